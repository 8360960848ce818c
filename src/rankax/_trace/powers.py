# SPDX-License-Identifier: MIT
"""Powers such as ``x ** 1.5`` as products and roots, where XLA:CPU would call the C library.

XLA:CPU does so itself only for a few exponents, such as 0.5 and 2. Any other power is a call of
``powf`` for each number, which takes 3 ns, and 0.15 to 0.25 ns as a product. Laws of force between
points are full of them. The results differ from those of ``powf`` by rounding: by at most three
units in the last place. A negative power above a quarter of the largest float may be infinite.

Derivatives are those of powers, at 0 as well, and are products again. Loops over chunks do this; a
call without chunks stays the program that one would write by hand. Narrow floats are left alone,
because each product would be rounded.

Test: ``tests/trace/test_powers.py``, whose last line fails when XLA:CPU has these products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.programs import Literal, with_equations, with_shape, with_subprograms

_LARGEST = 4  # exponent; more products would round more often


def with_products(jaxpr: Any) -> Any:
    """Return a program with products in place of powers; itself if there are none."""
    return _with_products(jaxpr) if jax.default_backend() == "cpu" else jaxpr


def _with_products(jaxpr: Any) -> Any:
    exponents: dict[Any, float] = {}  # that the program computes, as a derivative does

    def changed(eqn: Any) -> Any:
        name = eqn.primitive.name
        if name not in ("pow", "sub") or eqn.outvars[0].aval.dtype not in ("float32", "float64"):
            return with_subprograms(eqn, _with_products)
        base, by = eqn.invars
        number = float(by.val) if isinstance(by, Literal) else exponents.get(by)
        if number is None or isinstance(base, Literal) != (name == "sub"):
            return eqn
        if name == "sub":
            exponents[eqn.outvars[0]] = float(base.val) - number
            return eqn
        if number % 0.5 or abs(number) in (0, 1) or abs(number) > _LARGEST:
            return eqn
        of_base = functools.partial(_power, exponent=number)
        (product,) = jax.make_jaxpr(of_base)(with_shape(base.aval, base.aval.shape)).jaxpr.eqns
        return product.replace(invars=[base], outvars=eqn.outvars)

    return with_equations(jaxpr, changed)


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """Return ``x ** exponent`` for a multiple of a half."""
    if not exponent % 1:
        return lax.integer_pow(x, int(exponent))
    evaluated = functools.partial(_with_root, exponent=exponent)
    differentiated = jax.custom_jvp(evaluated)

    @differentiated.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        (x,), (tangent,) = primals, tangents
        return _power(x, exponent), tangent * (exponent * _power(x, exponent - 1))

    return call_with_derivative_of(differentiated, evaluated, x, key=("power", exponent))


def _with_root(x: jax.Array, exponent: float) -> jax.Array:
    # The power of -0 is that of 0, and the power of minus infinity that of infinity.
    root = jnp.abs(lax.integer_pow(x, int(abs(exponent))) * jnp.sqrt(x))
    root = jnp.where(x == -jnp.inf, jnp.inf, root)
    return root if exponent > 0 else 1 / root
