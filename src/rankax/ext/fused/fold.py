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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from rankax.core.base.arrays import has_tangent, wide
from rankax.core.loop.loop import carried_with
from rankax.core.loop.shared import MOST_PLAIN
from rankax.core.reduce.row import Accumulation, Elementwise
from rankax.core.trace.derivatives import new_primitive, of_some
from rankax.core.trace.programs import evaluate, with_shape
from rankax.ext.fused.kernel import (
    MOST_INDEX,
    Source,
    groups_of,
    kernel_of,
    parts_of,
    tile_of,
)
from rankax.ext.fused.launch import launch
from rankax.ext.fused.scalars import Refused
from rankax.ext.reductions.bins import InBins


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
    def kernel(self) -> Source:
        """The text of the kernel; raises `Refused`."""
        return kernel_of(self.item, groups_of(self.sizes, self.reduced, self.on), self.long)

    @functools.cached_property
    def long(self) -> list[Accumulation]:
        """What a kernel folds: as in long loops, whatever the length, so that one serves all."""
        return [step.over(MOST_PLAIN + 1) for step in self.steps]

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
    starts = jax.eval_shape(lambda: [step.start(1) for step in fold.long])
    leaves, tree = jax.tree.flatten(starts)
    groups = groups_of(fold.sizes, fold.reduced, fold.on)
    rows, parts, length = parts_of(groups, sum(x.size for x in leaves))
    sizes = [rows * parts * x.size for x in leaves]
    if max([rows * parts, *sizes, *(x.size for x in operands)]) > MOST_INDEX:
        raise Refused("2**31 numbers in one array, or more")
    numbers = [*(group.size for group in groups), rows, length]
    flat = launch(fold.kernel, operands, numbers, rows * parts, sizes)
    pairs = zip(flat, leaves, strict=True)
    held = [jnp.reshape(x, (parts, rows, *own.shape)).astype(own.dtype) for x, own in pairs]
    merged = jax.vmap(functools.partial(_merged, fold.long), 1)(tree.unflatten(held))
    pairs = zip(jax.tree.leaves(merged), fold.avals, strict=True)
    return [jnp.reshape(x, aval.shape) for x, aval in pairs]


def _merged(steps: Sequence[Accumulation], held: Sequence[Any]) -> Any:
    """Merge what is held of the parts of a row, on axis 0."""

    def of_step(step: Accumulation, own: Any) -> Any:
        states = jax.vmap(step.accumulator.total)(own) if step.is_long else own
        return step.accumulator.join_runs(states)

    return list(map(of_step, steps, held))


def _by_rows(fold: FusedFold, operands: Sequence[Any]) -> list[Any]:
    """Evaluate sums without a kernel, row by row."""

    def over(axes: Sequence[int], *args: Any) -> list[Any]:
        if not axes:
            outs = evaluate(fold.item.jaxpr, fold.item.consts, *args)
            tile = tile_of(outs, jnp.zeros((), jnp.int32))
            return [step.accumulator.lift(*step.items(tile))[..., 0] for step in fold.steps]
        first, *rest = axes
        places = [sum(own[x] for x in axes if x < first) if own[first] else None for own in fold.on]
        fun = functools.partial(over, rest)
        if fold.reduced[first]:
            outs = jax.vmap(fun, places, axis_size=fold.sizes[first])(*args)
            return [jnp.sum(x, axis=0) for x in outs]

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
    moving = [k for k, x in enumerate(_added(fold, fold.item.out_avals)) if has_tangent(x)]
    if not live or not moving:
        return outs, zeros
    fun = functools.partial(evaluate, fold.item.jaxpr, fold.item.consts)

    def pushed(*args: Any) -> list[Any]:
        own, directions = args[: len(primals)], args[len(primals) :]
        of_live = of_some(fun, own, live)
        outs, tangents = jax.jvp(of_live, [own[i] for i in live], list(directions))
        return [t if has_tangent(x) else x for x, t in zip(outs, tangents, strict=True)]

    avals = fold.item.in_avals
    item = jax.make_jaxpr(pushed)(*map(_shape, avals), *(_shape(avals[i]) for i in live))
    on = [*fold.on, *(fold.on[i] for i in live)]
    steps = tuple([fold.steps[k] for k in moving])
    own = dataclasses.replace(fold, item=item, on=tuple(on), steps=steps)
    found = evaluated(own, [*primals, *(tangents[i] for i in live)])
    for k, tangent in zip(moving, found, strict=True):
        zeros[k] = tangent
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
            like = [avals[i] for i in unknown]
            back = jax.linear_transpose(lambda *xs: _added(fold, linear(*xs)), *like)
            # Labels do not depend on what is unknown.
            zeros = [jnp.zeros(x.shape, x.dtype) for x in like]
            outs = linear(*carried_with(zeros, items))

            def of_item(step: Accumulation, x: Any, like: Any) -> Any:
                if isinstance(step.accumulator, InBins):
                    labels = outs[jax.tree.leaves(step.outputs)[0]]
                    counts = None if step.mask is None else outs[step.mask]
                    x = step.accumulator.of_items(x, labels, counts)
                return x.astype(like.dtype)

            own_cts = list(map(of_item, fold.steps, items[len(known) :], _added(fold, outs)))
            sent = dict(zip(unknown, back(own_cts), strict=True))
            return [sent[i].astype(wide(sent[i].dtype)) for i in mine]

        sent = [with_shape(jax.typeof(x), x.shape[sum(rows) :]) for x in cts]
        item = jax.make_jaxpr(pulled)(*(avals[i] for i in known), *sent)
        on = [*(fold.on[i] for i in known), *(rows for _ in cts)]
        own = sums_of(item, fold, [not has for has in axes], on)
        found = evaluated(own, [*(args[i] for i in known), *cts])
        for i, x in zip(mine, found, strict=True):
            results[i] = x[..., 0].astype(args[i].aval.dtype)
    return results


def _added(fold: FusedFold, outs: Sequence[Any]) -> list[Any]:
    """Return what steps add up, of the outputs of an item; labels, where these are counted."""
    return [outs[jax.tree.leaves(step.outputs)[-1]] for step in fold.steps]


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return with_shape(aval, aval.shape)


_fused = new_primitive("rankax_fused", _run, _pushed, _transposed, _batched, _types)
