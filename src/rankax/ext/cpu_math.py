# SPDX-License-Identifier: MIT
"""``cpu_math=True``: sines, angles and powers by programs of their own, where XLA:CPU calls C.

The C library takes its arguments one by one: 5 ns for a power such as ``x ** 1.5``, 6 ns for a
sine, 13 to 22 ns for an angle. (XLA:CPU has programs for a few exponents, such as 0.5 and 2,
and for the exponential, the logarithm and `tanh`.) Laws of force, rotations and angles are full of
them. As products, roots and polynomials they are vectorised, and three to eighteen times as fast.
Each result is within four units in the last place of the exact one. Subnormal numbers may count as
zero, and a negative power above a quarter of the largest float may be infinite.

Sines of all arguments are computed, also of large ones (`_turned`). XLA:CPU stores the result of a
call of `sin`, but repeats a chain of cheap operations in every loop that reads it. A barrier
prevents that, from JAX 0.12 on; with earlier versions, nothing is replaced. There is no upper
bound, because values do not depend on the version.

Derivatives are those of JAX, with such programs in them. Narrow floats are left alone, because each
step would be rounded; of double precision, only powers are replaced.

Sources: M. Payne and R. Hanek, "Radian reduction for trigonometric functions", SIGNUM Newsletter 18
(1983), 19-24; S. Moshier's Cephes library for the polynomials.

Test: ``tests/trace/test_cpu_math.py``, whose last lines fail when XLA:CPU has these programs.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from rankax._options import Options
from rankax.core.base.arrays import is_plain
from rankax.core.base.messages import listed, plural
from rankax.core.trace.derivatives import call_with_derivative_of
from rankax.core.trace.programs import evaluate, with_equations, with_shape, with_subprograms
from rankax.ext.equations import operations

_LARGEST = 4  # exponent; more products would round more often
_SINES = ("cos", "sin", "tan")
HOLDS = jax.__version_info__ >= (0, 12)
# Numbers of an item, from which on a library that sums them computes their sines, and faster.
_MANY = 32
# How many times as fast they are in chunks, measured with JAX 0.12 on one core.
_GAINS = {
    **dict.fromkeys(_SINES, 3),
    **dict.fromkeys(("acos", "asin", "atan", "atan2"), 18),
    "pow": 10,
}


def hints_of_cpu_math(jaxpr: Any) -> tuple[str, ...]:
    """Say which functions of an item ``cpu_math=True`` would compute faster on a CPU, if any."""
    if not HOLDS:
        return ()
    # Of a function that takes a batch itself, the first program is that for one item.
    batched = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "rankax_batch"]
    programs = [eqn.params["programs"][0].jaxpr for eqn in batched] or [jaxpr]
    counts = collections.Counter[str]()
    exponents: dict[Any, float] = {}
    for operation in itertools.chain(*map(operations, programs)):
        if _own_function(operation.eqn, exponents) is not None:
            counts[operation.name] += operation.times * operation.eqn.outvars[0].aval.size
    if not counts:
        return ()
    gains = sorted({_GAINS[name] for name in counts})
    calls = listed([f"{name} {plural(count, 'time')}" for name, count in counts.items()])
    shown = " to ".join(map(str, dict.fromkeys((gains[0], gains[-1]))))
    return (f"calls {calls} per item; cpu_math=True computes them about {shown} times as fast",)


def with_cpu_math(jaxpr: Any, items: int = 1) -> Any:
    """Return a program without calls of the C library; itself if there are none.

    ``items``: how many items it evaluates.
    """
    exponents: dict[Any, float] = {}  # that the program computes, as a derivative does

    def changed(eqn: Any) -> Any:
        if (own := _own_function(eqn, exponents, items)) is None:
            of_batch = _of_batch if eqn.primitive.name == "rankax_batch" else with_cpu_math
            return with_subprograms(eqn, of_batch)
        fun, inputs = own
        types = [with_shape(v.aval, v.aval.shape) for v in inputs]
        (call,) = jax.make_jaxpr(fun)(*types).jaxpr.eqns
        return call.replace(invars=inputs, outvars=eqn.outvars)

    return with_equations(jaxpr, changed)


def _of_batch(jaxpr: Any) -> Any:
    """Return the program of a function that takes a batch itself, with the items on axis 0."""
    return with_cpu_math(jaxpr, max(1, *(v.aval.shape[0] for v in jaxpr.invars[:1])))


def _own_function(
    eqn: Any, exponents: dict[Any, float], items: int = 1
) -> tuple[Callable[..., Any], list[Any]] | None:
    """Return a function that takes the place of an equation, and its inputs."""
    name = eqn.primitive.name
    if name not in (*_FUNCTIONS, "pow", "sub"):
        return None
    dtype = eqn.outvars[0].aval.dtype
    if name in _FUNCTIONS and dtype == "float32" and not eqn.params.get("accuracy"):
        is_summed = name in _SINES and eqn.outvars[0].aval.size >= _MANY * items
        if is_summed or all(isinstance(v, Literal) for v in eqn.invars):
            return None
        plain = functools.partial(eqn.primitive.bind, **eqn.params)
        return _differentiable(_FUNCTIONS[name], plain, (name, items)), eqn.invars
    if name in _FUNCTIONS or dtype not in ("float32", "float64"):
        return None
    base, by = eqn.invars
    number = float(by.val) if isinstance(by, Literal) else exponents.get(by)
    if number is None or isinstance(base, Literal) != (name == "sub"):
        return None
    if name == "sub":
        exponents[eqn.outvars[0]] = float(base.val) - number
        return None
    if number % 0.5 or abs(number) in (0, 1) or abs(number) > _LARGEST:
        return None
    if not number % 1:
        return functools.partial(lax.integer_pow, y=int(number)), [base]
    fun = functools.partial(_power, exponent=number)
    return _differentiable(fun, lambda x: x**number, (number, items)), [base]


def _differentiable(
    fun: Callable[..., Any], plain: Callable[..., Any], key: tuple[Any, int]
) -> Callable[..., Any]:
    """Return a function with the derivative of a plain one, whose functions are replaced, too.

    ``key``: what the function is known by, and how many items it is evaluated for.
    """
    differentiated = jax.custom_jvp(fun)

    @differentiated.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        closed = jax.make_jaxpr(functools.partial(jax.jvp, plain))(primals, tangents)
        jaxpr = with_cpu_math(closed.jaxpr, key[1])
        value, tangent = evaluate(jaxpr, closed.consts, *primals, *tangents)
        return value, tangent

    return functools.partial(call_with_derivative_of, differentiated, fun, key=key)


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """Return ``x ** exponent`` for an odd multiple of a half."""
    # The power of -0 is that of 0, and the power of minus infinity that of infinity.
    root = jnp.abs(lax.integer_pow(x, int(abs(exponent))) * jnp.sqrt(x))
    root = jnp.where(x == -jnp.inf, jnp.inf, root)
    return root if exponent > 0 else 1 / root


# The bits of 2 / pi, from those of weight 2 ** 31 on. The last words are not read.
_TWO_OVER_PI = (
    *(0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB),
    *(0, 0, 0),
)
_QUARTER = math.pi / 2 / 2**30  # an angle of one, where 2 ** 30 are a right angle


def _turned(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return an angle less the nearest multiple of a right angle, and that multiple modulo 4.

    The float is an integer of 24 bits times a power of two. In its product with 2 / pi, the first
    bits of 2 / pi give multiples of four right angles, and so many that they would hide all others
    are left out (Payne and Hanek). The next 96 bits suffice: two of the product are the multiple
    and 62 the part of a right angle, which can begin with 30 zeros.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent, is_negative = bits >> 23 & 255, bits >> 31 != 0
    integer = bits & 0x7FFFFF | 0x800000
    begin = jnp.maximum(exponent, 120) - 120
    words: list[Any] = list(map(np.uint32, _TWO_OVER_PI))
    for step in (4, 2, 1):
        is_later = begin >> 5 & step != 0
        words = [_either(is_later, *pair) for pair in zip(words[step:], words[:-step], strict=True)]
    shift = begin & 31
    first, second, third = (a << shift | b >> 1 >> 31 - shift for a, b in pairwise(words))
    low = integer * second
    rest = low + _high_product(integer, third)
    whole = (
        integer * first
        + _high_product(integer, second)
        + lax.convert_element_type(rest < low, jnp.uint32)
    )
    multiple = whole + 2**29 >> 30
    part = lax.bitcast_convert_type(whole - (multiple << 30), jnp.int32).astype(x.dtype)
    least = rest.astype(x.dtype) * (_QUARTER / 2**32)
    # The error of a factor of 24 bits would be one of the angle.
    factor = float(np.float32(_QUARTER))
    angle = part * factor + (part * (_QUARTER - factor) + least)
    angle = _either(exponent == 255, jnp.nan, _either(is_negative, -angle, angle))
    multiple = _either(is_negative, -multiple, multiple)
    is_small = exponent < 126
    return _either(is_small, x, angle), _either(is_small, 0, multiple)


def _high_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the upper half of the product of two integers of 32 bits."""
    (high, low), (other_high, other_low) = ((v >> 16, v & 0xFFFF) for v in (x, y))
    middle, other_middle = high * other_low, low * other_high
    carried = (low * other_low >> 16) + (middle & 0xFFFF) + (other_middle & 0xFFFF) >> 16
    return high * other_high + (middle >> 16) + (other_middle >> 16) + carried


def _either(condition: jax.Array, x: Any, y: Any) -> jax.Array:
    dtype = next(v.dtype for v in (x, y) if hasattr(v, "dtype"))
    return lax.select(condition, *(jnp.full(condition.shape, v, dtype) for v in (x, y)))


def _sine_and_cosine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both, of an angle of at most half a right angle."""
    square = x * x
    sine = -1.9515295891e-4 * square + 8.3321608736e-3
    sine = x + x * square * (sine * square - 1.6666654611e-1)
    cosine = 2.443315711809948e-5 * square - 1.388731625493765e-3
    cosine = 1 - 0.5 * square + square * square * (cosine * square + 4.166664568298827e-2)
    return _either(square < 1e-7, x, sine), cosine  # keeps -0


def _sine(x: jax.Array, quarters: int) -> jax.Array:
    angle, multiple = _turned(x)
    multiple += quarters
    sine, cosine = _sine_and_cosine(angle)
    value = _either(multiple & 1 != 0, cosine, sine)
    # Otherwise each loop that reads the sine computes it.
    return lax.optimization_barrier(_either(multiple & 2 != 0, -value, value))


def _tangent(x: jax.Array) -> jax.Array:
    angle, multiple = _turned(x)
    square = angle * angle
    tangent = 9.38540185543e-3 * square + 3.11992232697e-3
    for term in (2.44301354525e-2, 5.34112807005e-2, 1.33387994085e-1, 3.33331568548e-1):
        tangent = tangent * square + term
    tangent = angle + angle * square * tangent
    return lax.optimization_barrier(_either(multiple & 1 != 0, -1 / tangent, tangent))


def _arctangent(y: jax.Array, x: jax.Array) -> jax.Array:
    """Return the angle of the point (x, y)."""
    beside, above = jnp.abs(x), jnp.abs(y)
    is_infinite = (beside == jnp.inf) & (above == jnp.inf)
    beside, above = _either(is_infinite, 1.0, beside), _either(is_infinite, 1.0, above)
    least, most = jnp.minimum(beside, above), jnp.maximum(beside, above)
    slope = least / _either(most == 0, 1.0, most)
    is_steep = slope > math.tan(math.pi / 8)
    slope = _either(is_steep, (slope - 1) / (slope + 1), slope)
    square = slope * slope
    angle = 8.05374449538e-2 * square - 1.38776856032e-1
    angle = (angle * square + 1.99777106478e-1) * square - 3.33329491539e-1
    angle = slope + slope * square * angle
    angle = _either(is_steep, math.pi / 4 + angle, angle)
    angle = _either(above > beside, math.pi / 2 - angle, angle)
    is_behind = lax.bitcast_convert_type(x, jnp.int32) < 0
    angle = _either(is_behind, math.pi - angle, angle)
    return _either(lax.bitcast_convert_type(y, jnp.int32) < 0, -angle, angle)


def _leg(x: jax.Array) -> jax.Array:
    """Return the other leg of a right triangle with hypotenuse 1."""
    return jnp.sqrt((1 - x) * (1 + x))


# Compiled functions are traced once, however often a program calls them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "acos": jax.jit(lambda x: _arctangent(_leg(x), x)),
    "asin": jax.jit(lambda x: _arctangent(x, _leg(x))),
    "atan": jax.jit(lambda x: _arctangent(x, jnp.ones_like(x))),
    "atan2": jax.jit(_arctangent),
    "cos": jax.jit(lambda x: _sine(x, 1)),
    "sin": jax.jit(lambda x: _sine(x, 0)),
    "tan": jax.jit(_tangent),
}


class CpuMath:
    """The pass that replaces functions."""

    def both(self, jaxpr: Any) -> Any:
        return with_cpu_math(jaxpr)

    def differs_back(self, jaxpr: Any) -> bool:  # noqa: ARG002
        return False

    def back(self, jaxpr: Any, site: str) -> None:
        """Return None: derivatives are those of the program that is evaluated."""


PASS = CpuMath()


def is_on(options: Options) -> bool:
    """Whether functions are replaced in a call."""
    return options.cpu_math and HOLDS and options.on_cpu and not is_plain()  # it has a rule


def notes(options: Options, jaxpr: Any) -> list[str]:
    """Name the functions that it would replace, for a plan."""
    return list(hints_of_cpu_math(jaxpr)) if options.on_cpu and not options.cpu_math else []
