# SPDX-License-Identifier: MIT
"""A reduction as one kernel, `FusedFold`, and its derivatives, which are such reductions again.

An operand has some of the axes of the batch, in front and in their order, and then those of an
item. The tangent of a sum is the sum of the tangents of its items. What the transpose of a sum
sends back to an operand is the sum, over all axes which the operand lacks, of what the transposed
item sends back; so a gradient of pairs is one sum over columns, for what rows have, and one over
rows. A map by `jax.vmap` is one more axis.

Where the kernel of a derivative cannot be written, the same sum is evaluated by `jax.lax.map`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from rankax.core.base.arrays import has_tangent, wide
from rankax.core.loop.loop import carried_with
from rankax.core.reduce.row import Accumulation, Elementwise
from rankax.core.trace.derivatives import new_primitive, of_some
from rankax.core.trace.programs import evaluate, with_shape
from rankax.ext.fused.kernel import MOST_INDEX, AxisGroup, Source, groups_of, kernel_of, parts_of
from rankax.ext.fused.launch import launch
from rankax.ext.fused.scalars import Refused


@dataclasses.dataclass(frozen=True, eq=False)
class FusedFold:
    """The states of all rows of a batch.

    Attributes
    ----------
    item : ClosedJaxpr
        From one item of each operand to what is folded; without constants.
    sizes : tuple of int
        The lengths of the axes of the batch.
    reduced : tuple of bool
        Which of them are reduced.
    on : tuple of tuple of bool
        For each operand, which axes it has.
    steps : tuple of Accumulation
        What is folded.
    is_sum : bool
        Whether these are the sums of all outputs, which have derivatives.
    """

    item: ClosedJaxpr
    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]
    on: tuple[tuple[bool, ...], ...]
    steps: tuple[Accumulation, ...]
    is_sum: bool = False

    @functools.cached_property
    def groups(self) -> list[AxisGroup]:
        """The axes as loops."""
        return groups_of(self.sizes, self.reduced, self.on)

    @functools.cached_property
    def kernel(self) -> Source:
        """The text of the kernel; raises `Refused`."""
        return kernel_of(self.item, self.groups, self.steps)

    @functools.cached_property
    def states(self) -> Any:
        """The types of the states of one row, with one slot each."""
        return jax.eval_shape(lambda: [step.start(1) for step in self.steps])

    @functools.cached_property
    def avals(self) -> list[Any]:
        """The types of the results."""
        kept = tuple([n for n, gone in zip(self.sizes, self.reduced, strict=True) if not gone])
        leaves = jax.tree.leaves(self.states)
        return [jax.ShapeDtypeStruct(kept + x.shape, x.dtype) for x in leaves]


def sums_of(
    item: ClosedJaxpr, like: FusedFold, reduced: Sequence[bool], on: Sequence[Any]
) -> FusedFold:
    """Return the sums of all outputs of an item over some axes of another fold."""
    each = [Elementwise(x.shape, wide(x.dtype), 0, lax.add, jnp.sum) for x in item.out_avals]
    steps = tuple(itertools.starmap(Accumulation, enumerate(each)))
    return FusedFold(item, like.sizes, tuple(reduced), tuple(on), steps, is_sum=True)


def evaluated(fold: FusedFold, operands: Sequence[Any]) -> list[Any]:
    """Return the states of a fold, whose leaves have the kept axes in front."""
    return _fused.bind(*carried_with(list(operands), operands), fold=fold)


def _run(*operands: Any, fold: FusedFold) -> list[Any]:
    if 0 in fold.sizes:
        starts = jax.tree.leaves([step.start(1) for step in fold.steps])
        return [jnp.broadcast_to(x, v.shape) for x, v in zip(starts, fold.avals, strict=True)]
    try:
        return _launched(fold, operands)
    except Refused:
        if not fold.is_sum:
            raise
    return _by_rows(fold, operands)


def _launched(fold: FusedFold, operands: Sequence[Any]) -> list[Any]:
    rows, parts, length = parts_of(fold.groups)
    leaves, tree = jax.tree.flatten(fold.states)
    sizes = [rows * parts * math.prod(x.shape) for x in leaves]
    if max([rows * parts, *sizes, *(x.size for x in operands)]) > MOST_INDEX:
        raise Refused("2**31 numbers in one array, or more")
    numbers = [*(group.size for group in fold.groups), rows, length]
    flat = launch(fold.kernel, operands, numbers, rows * parts, sizes)
    shapes = [(parts, rows, *x.shape) for x in leaves]
    dtypes = [x.dtype for x in leaves]
    triples = zip(flat, shapes, dtypes, strict=True)
    states = tree.unflatten([jnp.reshape(x, own).astype(dtype) for x, own, dtype in triples])
    merged = jax.vmap(functools.partial(_merged, fold.steps), 1)(states)
    pairs = zip(jax.tree.leaves(merged), fold.avals, strict=True)
    return [jnp.reshape(x, aval.shape) for x, aval in pairs]


def _merged(steps: Sequence[Accumulation], states: Any) -> Any:
    """Merge the states of the parts of a row, which are on axis 0."""
    if jax.tree.leaves(states)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[0], states)
    return [step.accumulator.join_runs(own) for step, own in zip(steps, states, strict=True)]


def _by_rows(fold: FusedFold, operands: Sequence[Any]) -> list[Any]:
    """Evaluate sums without a kernel, row by row."""

    def over(axes: Sequence[int], *args: Any) -> list[Any]:
        if not axes:
            return evaluate(fold.item.jaxpr, fold.item.consts, *args)
        first, *rest = axes
        places = [sum(own[x] for x in axes if x < first) if own[first] else None for own in fold.on]
        fun = functools.partial(over, rest)
        if fold.reduced[first]:
            outs = jax.vmap(fun, places, axis_size=fold.sizes[first])(*args)
            return [jnp.sum(x.astype(wide(x.dtype)), axis=0) for x in outs]

        def one(i: Any) -> list[Any]:
            pairs = zip(args, places, strict=True)
            return fun(*(x if at is None else jnp.take(x, i, at) for x, at in pairs))

        return lax.map(one, jnp.arange(fold.sizes[first]))

    outs = over(sorted(range(len(fold.sizes)), key=lambda axis: fold.reduced[axis]), *operands)
    return [x[..., None].astype(aval.dtype) for x, aval in zip(outs, fold.avals, strict=True)]


# The rules of the primitive.


def _types(*avals: Any, fold: FusedFold) -> tuple[list[Any], Any]:
    if not avals:
        return [core.ShapedArray(x.shape, x.dtype) for x in fold.avals], frozenset()
    # All operands vary along the same axes of a mesh, and so do the results.
    types = [jax.typeof(with_shape(avals[0], x.shape)) for x in fold.avals]
    pairs = zip(types, fold.avals, strict=True)
    return [own.update(dtype=x.dtype, weak_type=False) for own, x in pairs], frozenset()


def _batched(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, fold: FusedFold) -> Any:
    if all(dim is None for dim in dims):
        return evaluated(fold, args), [None] * len(fold.avals)
    pairs = zip(args, dims, strict=True)
    arrays = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    on = tuple([(dim is not None, *own) for dim, own in zip(dims, fold.on, strict=True)])
    sizes, reduced = (axis.size, *fold.sizes), (False, *fold.reduced)
    outs = evaluated(dataclasses.replace(fold, sizes=sizes, reduced=reduced, on=on), arrays)
    return outs, [0] * len(outs)


def _pushed(primals: Sequence[Any], tangents: Sequence[Any], *, fold: FusedFold) -> Any:
    outs = evaluated(fold, primals)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    moving = [i for i, aval in enumerate(fold.item.out_avals) if has_tangent(aval)]
    if not live or not moving:
        return outs, zeros
    if not fold.is_sum:
        raise NotImplementedError("only sums are differentiated")
    fun = functools.partial(evaluate, fold.item.jaxpr, fold.item.consts)

    def pushed(*args: Any) -> list[Any]:
        own, directions = args[: len(primals)], args[len(primals) :]
        of_live = of_some(fun, own, live)
        _, outs = jax.jvp(of_live, [own[i] for i in live], list(directions))
        return [outs[i] for i in moving]

    avals = fold.item.in_avals
    item = jax.make_jaxpr(pushed)(*map(_shape, avals), *(_shape(avals[i]) for i in live))
    on = [*fold.on, *(fold.on[i] for i in live)]
    own = sums_of(item, fold, fold.reduced, on)
    found = evaluated(own, [*primals, *(tangents[i] for i in live)])
    for i, tangent in zip(moving, found, strict=True):
        zeros[i] = tangent
    return outs, zeros


def _transposed(cotangents: Sequence[Any], *args: Any, fold: FusedFold) -> list[Any]:
    unknown = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(args)) if i not in unknown]
    cts = [ad.instantiate_zeros(ct)[..., 0] for ct in cotangents]
    avals = [_shape(aval) for aval in fold.item.in_avals]
    rows = tuple([not gone for gone in fold.reduced])
    results: list[Any] = [None] * len(args)
    fun = functools.partial(evaluate, fold.item.jaxpr, fold.item.consts)
    for axes in dict.fromkeys(fold.on[i] for i in unknown):
        mine = [i for i in unknown if fold.on[i] == axes]

        def pulled(*items: Any, mine: Any = mine) -> list[Any]:
            own = dict(zip(known, items, strict=False))
            linear = of_some(fun, [own.get(i) for i in range(len(args))], unknown)
            back = jax.linear_transpose(linear, *(avals[i] for i in unknown))
            outs = fold.item.out_avals
            pairs = zip(items[len(known) :], outs, strict=True)
            sent = dict(zip(unknown, back([x.astype(v.dtype) for x, v in pairs]), strict=True))
            return [sent[i].astype(wide(sent[i].dtype)) for i in mine]

        sent = [with_shape(jax.typeof(x), x.shape[sum(rows) :]) for x in cts]
        item = jax.make_jaxpr(pulled)(*(avals[i] for i in known), *sent)
        on = [*(fold.on[i] for i in known), *(rows for _ in cts)]
        own = sums_of(item, fold, [not has for has in axes], on)
        found = evaluated(own, [*(args[i] for i in known), *cts])
        for i, x in zip(mine, found, strict=True):
            results[i] = x[..., 0].astype(args[i].aval.dtype)
    return results


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return with_shape(aval, aval.shape)


_fused = new_primitive("rankax_fused", _run, _pushed, _transposed, _batched, _types)
