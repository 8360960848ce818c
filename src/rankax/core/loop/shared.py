# SPDX-License-Identifier: MIT
"""What all steps of a loop share: how its cotangents are added up.

The transpose of a `jax.lax.scan` adds the cotangents of a constant one step after another, and
rounds as often. In a long loop, a constant has no derivative of its own. Its tangent goes through
the carry instead, from which each step borrows it. The transpose of that is a sum which carries
what rounding took (`add_exactly`), as the long sums of `rankax.core.reduce.row` do. Where a step
computes little, that would nearly double its time: there, a few steps add plainly to a part of its
own, and the part is added exactly. Forward, nothing of this is computed: the carry holds the
constants, which nobody reads there.

Floats of less than 32 bits are constants in float32 where a loop is differentiated, and each item
converts them back (`narrowed`): their cotangents are rounded once.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.interpreters import ad, batching, mlir, partial_eval

from rankax.core.base.arrays import SMALL, has_tangent, is_plain, is_ref
from rankax.core.plan.schedule import at_most
from rankax.core.trace.programs import subprograms

MOST_PLAIN = 20  # sums one after another that are not worth it; `jax.numpy.sum` makes about as many

_LESS = 64  # numbers that a step computes for each of a constant
_PRODUCTS = 16  # of a product of matrices, which take as long as one other number
_LARGE = 2**16  # numbers of a constant of which two copies more are too much


def add_exactly(total: jax.Array, lost: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``total + lost + x`` rounded, and what rounding took.

    What it took is itself a number of their dtype, and found without a comparison (Knuth, The Art
    of Computer Programming, volume 2, 4.2.2). To add it to the next number is due to Kahan (1965).
    """
    total, lost = _added(total, lost, x) if is_plain() else _add.bind(total, lost, x)
    return total, lost


def steps_per_sum(x: jax.Array, var: Any, jaxpr: Jaxpr) -> int:
    """Return how many steps of this program add up the cotangents of a constant plainly; 0: all.

    To add exactly takes eight operations for each of its numbers. So in each step, the constant has
    to be small, or a step has to compute many times as much. A step that looks a few numbers up, or
    computes less than the constant has numbers, should do nothing with the others. For a large
    constant, its parts and what they lose would take too much memory.
    """
    if is_ref(x) or not has_tangent(x):
        return 0
    if at_most(x.size, SMALL) or at_most(x.size * _LESS, _numbers(jaxpr, _PRODUCTS)):
        return 1
    is_small = at_most(x.size, _LARGE) and at_most(x.size, _numbers(jaxpr, 1))
    return MOST_PLAIN if is_small and not _is_looked_up(var, jaxpr) else 0


def _is_looked_up(var: Any, jaxpr: Jaxpr) -> bool:
    reads = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("dynamic_slice", "gather")]
    return any(eqn.invars[0] is var for eqn in reads)


def is_multiplied(var: Any, jaxpr: Jaxpr) -> bool:
    """Whether a program multiplies a matrix or vector, of which a product adds the cotangents."""
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    return any(v is var for eqn in products for v in eqn.invars)


def _numbers(jaxpr: Jaxpr, products: int) -> int:
    """Return about how many numbers a program computes, so many ``products`` counted as one."""
    total = 0
    for eqn in jaxpr.eqns:
        numbers = sum(_numbers(each, products) for each in subprograms(eqn))
        if not numbers:
            numbers = sum(getattr(v.aval, "size", 0) for v in eqn.outvars)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            operand: Any = eqn.invars[0].aval
            each = math.prod(operand.shape[axis] for axis in contracted)
            numbers = numbers * max(each, products) // products
        total += numbers * eqn.params.get("length", 1)
    return total


Held = tuple[jax.Array, jax.Array, jax.Array]  # of a constant, by the carry of a loop


def lend(x: jax.Array) -> Held:
    """Return what the carry of a loop holds of a constant before the first step."""
    x, lost, part = _lend.bind(x)
    return x, lost, part


def borrow(held: Held, at: jax.Array, steps: int) -> tuple[jax.Array, Held]:
    """Return the slope of a constant in a step, for `with_slope`, and what the carry holds next.

    So many ``steps`` are added plainly; ``at`` counts them.
    """
    slope, x, lost, part = _borrow.bind(*held, at, steps=steps)
    return slope, (x, lost, part)


def with_slope(x: jax.Array, slope: jax.Array) -> jax.Array:
    """Return ``x`` with the derivative of ``slope``, which is the same array."""
    return _with_slope.bind(x, slope)[0]


def narrowed(x: Any, dtype: Any, items: Sequence[Any]) -> Any:
    """Return what an item takes of an array `in_32_bits`, in which its cotangents are added.

    A small array is mapped along each axis of a `jax.vmap` that maps one of the ``items``, so that
    each item has a cotangent of its own. Without ``items``, a chunk has one, which is rounded; so
    it has of a large array.
    """
    x = _in_each.bind(x, *items)[0] if items and at_most(x.size, SMALL) else x
    return x.astype(dtype)


# The primitives. A compiled program shows no trace of them.


def _primitive(name: str, results: int, run: Any, differentiate: Any, transpose: Any = None) -> Any:
    """Return a primitive whose ``results`` all have the type of the first argument."""
    primitive: Any = jax.extend.core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda *avals, **_: [avals[0]] * results)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    ad.primitive_jvps[primitive] = differentiate
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    return primitive


def _batched(primitive: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    pairs = list(zip(args, dims, strict=True))
    size = next(x.shape[dim] for x, dim in pairs if dim is not None)

    def in_front(x: Any, dim: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    # Only the type of the first argument matters, and of others whether they are mapped.
    rest = [(x, dim) for x, dim in pairs[1:] if primitive is not _in_each or dim is not None]
    outs = primitive.bind(*(in_front(x, dim) for x, dim in [pairs[0], *rest]), **params)
    return outs, [0] * len(outs)


def _pushed(linear: Any, primals: list[Any], tangents: Sequence[Any]) -> Any:
    """Return results and their tangents, those of a linear function of the tangents."""
    if all(isinstance(tangent, ad.Zero) for tangent in tangents):
        return primals, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals]
    return primals, linear(*map(ad.instantiate_zeros, tangents))


def _added(total: Any, lost: Any, x: Any) -> list[Any]:
    x = x + lost
    after = total + x
    taken = after - total
    error = (total - (after - taken)) + (x - taken)
    return [after, jnp.where(error == error, error, jnp.zeros_like(error))]  # NaN: of infinity


def _added_pushed(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    # Tangents are added exactly, too. In exact arithmetic, that is linear: nothing is lost.
    return _pushed(_add.bind, _add.bind(*primals), tangents)


def _added_back(cotangents: Sequence[Any], *_: Any) -> list[Any]:
    return [cotangents[0]] * 3


_add = _primitive("rankax_add", 2, _added, _added_pushed, _added_back)


def _added_some(total: Any, lost: Any, part: Any, x: Any, at: Any, *, steps: int) -> list[Any]:
    """Add a number to a part, and the part exactly after so many steps."""

    def added(_: Any, held: Any) -> Any:
        total, lost, part = held
        return *_added(total, lost, part), jnp.zeros_like(part)

    # A loop of no step or one, because XLA:CPU copies what goes through a branch.
    last = (at.ravel()[0] % steps == 0).astype(jnp.int32)
    return list(lax.fori_loop(jnp.zeros_like(last), last, added, (total, lost, part + x)))


def _added_each(total: Any, lost: Any, part: Any, x: Any, *_: Any, **__: Any) -> list[Any]:
    return [*_added(total, lost, x), part]


_add_some = _primitive(
    "rankax_add_some",
    3,
    _added_each,
    lambda primals, tangents, **params: _pushed(
        lambda *own: _add_some.bind(*own, primals[-1], **params),
        _add_some.bind(*primals, **params),
        tangents[:-1],
    ),
    lambda cotangents, *_, **__: [*[cotangents[0]] * 4, None],
)
# Elsewhere, a loop waits for the host, and to add a number costs what it takes to read it.
mlir.register_lowering(_add_some, mlir.lower_fun(_added_some, multiple_results=True), "cpu")


def _lent(x: Any) -> list[Any]:
    return [x, jnp.zeros_like(x), jnp.zeros_like(x)]


def _lent_back(cotangents: Sequence[Any], _: Any) -> list[Any]:
    total, lost, part = map(ad.instantiate_zeros, cotangents)
    return [total + (lost + part)]


_lend = _primitive(
    "rankax_lend",
    3,
    _lent,
    lambda primals, tangents: _pushed(_lend.bind, _lent(*primals), tangents),
    _lent_back,
)


def _borrowed(x: Any, lost: Any, part: Any, _: Any, **__: Any) -> list[Any]:
    return [x, x, lost, part]


def _borrowed_pushed(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    *_, at = primals
    linear = functools.partial(_borrow.bind, **params)
    return _pushed(lambda *own: linear(*own, at), _borrowed(*primals), tangents[:-1])


def _borrowed_back(cotangents: Sequence[Any], *args: Any, steps: int) -> list[Any]:
    own, *held = cotangents
    if isinstance(own, ad.Zero):
        return [*held, None]
    total, lost, part, own = map(ad.instantiate_zeros, (*held, own))
    if steps == 1:
        return [*add_exactly(total, lost, own), part, None]
    return [*_add_some.bind(total, lost, part, own, args[-1], steps=steps), None]


_borrow = _primitive("rankax_borrow", 4, _borrowed, _borrowed_pushed, _borrowed_back)


# In a derivative, the value does not depend on the slope, which is then not stored for each step. A
# second derivative goes through ``x`` itself, so this is only for an ``x`` that has the same one.
_with_slope = _primitive(
    "rankax_with_slope",
    1,
    lambda x, _: [x],
    lambda primals, tangents: (list(primals[:1]), list(tangents[1:])),
    lambda cotangents, x, _: [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None, *cotangents],
)
# So JAX sees that the value is the same in all steps also where only another argument has tangents.
# Otherwise each step would store what a loop inside it reads.
# Test: ``tests/reduce/test_long_sums.py``, ``what_rows_share``.
partial_eval.custom_partial_eval_rules[_with_slope] = lambda _, *tracers: list(tracers[:1])


def _in_each_pushed(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    _, *items = primals
    outs = _in_each.bind(*primals)
    return _pushed(lambda tangent: _in_each.bind(tangent, *items), outs, tangents[:1])


def _in_each_back(cotangents: Sequence[Any], _: Any, *items: Any) -> list[Any]:
    return [cotangents[0], *(None for _ in items)]


_in_each = _primitive("rankax_in_each", 1, lambda x, *_: [x], _in_each_pushed, _in_each_back)
