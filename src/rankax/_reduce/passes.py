# SPDX-License-Identifier: MIT
"""Reduce a row: in the pass that is evaluated, or in the one that is differentiated.

With ``where``, items count for which one output of the kernel, the mask, is true. What is left out
adds nothing and sends nothing back, even where its value or derivative is NaN:

* Forward, it is replaced by the identity of the reduction, or the accumulator passes over it.
* In the derivative, a cotangent of 0 is not enough, because 0 times an infinite derivative is NaN.
  So a first pass over the row, which computes only the mask, finds an item that counts, and the
  inputs of this item take the place of those of each item that is left out. They are constants
  there: the transpose of the choice drops the cotangent. If no item counts, the cotangents of what
  all items share are dropped, too (`masked_row`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.arrays import has_tangent, index_dtype, too_many
from rankax._loop.keys import PLACE
from rankax._loop.loop import apart_from_constants
from rankax._loop.spec import LoopSpec
from rankax._reduce.extrema import Arg
from rankax._reduce.protocol import Outputs, Reduction, counting
from rankax._reduce.row import Row, RowMask
from rankax._reduce.run import Reduced, Reductions
from rankax._reduce.states import Accumulation
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.item import ItemProgram, with_axis, with_shape
from rankax._trace.work import evaluates_functions


def masked_row(
    row_of: Callable[[Sequence[Any], Sequence[Any]], Row],
    consts: Sequence[Any],
    leaves: Sequence[Any],
    outputs: Outputs,
) -> Row:
    """Return a row whose items that are left out can be differentiated as if they counted.

    Parameters
    ----------
    row_of : callable
        Makes a row from constants and leaves.
    consts, leaves : sequences of arrays
    outputs : Outputs
        Some that the mask is for.
    """
    mask: Any = outputs.mask
    row = row_of([lax.stop_gradient(x) for x in consts], leaves)

    def counts(*leaves: Any) -> jax.Array:
        return row.item(*map(lax.stop_gradient, leaves))[mask]

    arg = Arg((), jnp.bool_, index_dtype(row.size), largest=True)
    if words := too_many(row.size):
        raise ValueError(f"a reduction with where or bucket has no derivative: {words}")
    steps = Accumulation(mask, arg), counting(outputs)
    (_, (index,)), (number,) = row.fold_constants(steps)

    def if_any(x: Any) -> Any:
        if not has_tangent(jax.typeof(x)):
            return x
        return jnp.where(number > 0, x, lax.stop_gradient(x))

    by_leaf = [[level.in_axes[i] for level in row.levels] for i in range(len(leaves))]
    is_mapped = [any(axis is not None for axis in axes) for axes in by_leaf]
    pairs = zip(leaves, is_mapped, strict=True)
    safe = row_of(list(map(if_any, consts)), [x if own else if_any(x) for x, own in pairs])
    others = [lax.stop_gradient(x) for x in safe.leaves_at(index)]
    is_mapped += [True] * (len(others) - len(is_mapped))  # the numbers of items

    def item(*leaves: Any) -> list[jax.Array]:
        is_own = counts(*leaves)
        triples = zip(leaves, others, is_mapped, strict=True)
        return safe.item(*(lax.select(is_own, x, y) if own else x for x, y, own in triples))

    return dataclasses.replace(safe, item=item, mask=RowMask(counts, number))


@dataclasses.dataclass(frozen=True)
class RowReduction:
    """How the items of a row are reduced: in the pass that is evaluated, or that differentiated.

    Attributes
    ----------
    item_of : callable
        Makes the function of one item from the constants of its program.
    levels : tuple of LoopSpec
        Those of the row, outermost first.
    outputs : tuple of Outputs
        As `trace_reduced` returns them.
    reductions : Reductions
    jaxpr : Jaxpr
        The program of an item.
    """

    item_of: Callable[[Sequence[Any]], Callable[..., list[Any]]]
    levels: tuple[LoopSpec, ...]
    outputs: tuple[Outputs, ...]
    reductions: Reductions
    jaxpr: Any

    def values(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> list[Any]:
        """Return one value for each reduction: its result, or its state."""
        row = self._row(consts, leaves, back=back)
        if self.is_at_once or (not row.size and self._is_plain):
            outs = row.whole()
            return [
                reduction.plain(outputs, row, [outs[i] for i in outputs.positions])
                for reduction, outputs in self._each()
            ]
        # A row of no items has no winner to take a derivative from.
        if not back or not row.size:
            return self._fold_each(row, self._each(), back=False)
        # One loop for each mask folds the linear ones; the others are folded one by one.
        values: list[Any] = [None] * len(self.outputs)
        for mask in dict.fromkeys(outputs.mask for outputs in self.outputs):
            numbers = [i for i, outputs in enumerate(self.outputs) if outputs.mask == mask]
            each = [self._each()[i] for i in numbers]
            row_of = functools.partial(self._row, back=True)
            own = row if mask is None else masked_row(row_of, consts, leaves, each[0][1])
            for i, value in zip(numbers, self._fold_each(own, each, back=True), strict=True):
                values[i] = value
        return values

    @property
    def is_linear(self) -> bool:
        """Whether the pass that is evaluated can be differentiated as it is."""
        return not self._is_masked and all(entry.is_linear for entry in self.reductions.entries)

    @property
    def is_at_once(self) -> bool:
        """Whether all items are evaluated at once, and reduced as `jax.numpy` does."""
        has_loop = any(level.is_loop or level.lanes for level in self.levels)
        return self._is_plain and not has_loop

    @property
    def _is_plain(self) -> bool:
        return self.reductions.of_run is None and not self._is_masked

    @property
    def _is_masked(self) -> bool:
        return any(outputs.mask is not None for outputs in self.outputs)

    def _each(self) -> list[tuple[Reduction, Outputs]]:
        return list(zip(self.reductions.entries, self.outputs, strict=True))

    def _row(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> Row:
        count, is_expensive = len(self.jaxpr.outvars), evaluates_functions(self.jaxpr)
        pure = not self.jaxpr.effects
        item = self.item_of(consts)
        return Row(item, tuple(leaves), self.levels, count, is_expensive, pure, back)

    def _fold_each(
        self, row: Row, pairs: Sequence[tuple[Reduction, Outputs]], *, back: bool
    ) -> list[Any]:
        """Fold reductions in one loop, except those that have a derivative of their own."""
        groups = [
            reduction.accumulations(outputs, row.size) if reduction.is_linear or not back else None
            for reduction, outputs in pairs
        ]
        in_loop = [group for group in groups if group is not None]
        folded = iter(row.fold(list(itertools.chain(*in_loop))) if in_loop else ())
        values: list[Any] = []
        for (reduction, outputs), group in zip(pairs, groups, strict=True):
            if group is None:
                state = reduction.differentiable(outputs, row)
            else:
                state = reduction.partial(outputs, row, [next(folded) for _ in group])
            if self.reductions.of_run is None:
                state = reduction.finish_state(outputs, state, row.size)
            values.append(state)
        return values


def reduce_row(
    item: ItemProgram, leaves: Sequence[Any], levels: Sequence[LoopSpec], reductions: Reductions
) -> Reduced:
    """Reduce the outputs of an item, as `trace_reduced` returns it, over levels without loops.

    This has its derivative; `rankax._call.nest` has one for a whole call.
    """
    evaluate = apart_from_constants(item.closed, item_types(leaves, levels))
    row = RowReduction(
        lambda consts: lambda *items: evaluate(consts, items),
        tuple(levels),
        item.outputs,
        reductions,
        item.closed.jaxpr,
    )
    evaluated, differentiated = (functools.partial(row.values, back=b) for b in (False, True))
    arrays = list(item.closed.consts), list(leaves)
    if row.is_linear:
        values = evaluated(*arrays)
    else:
        values = call_with_derivative_of(differentiated, evaluated, *arrays)
    return Reduced.of(values, reductions, item.outputs)


def item_types(leaves: Sequence[Any], levels: Sequence[LoopSpec]) -> list[Any]:
    """Return the types of one item of each leaf, and of its place along each numbered level."""
    avals = [_item_aval(leaf, i, levels) for i, leaf in enumerate(leaves)]
    return avals + [with_shape(PLACE, ()) for level in levels if level.numbered]


def _item_aval(leaf: Any, number: int, levels: Sequence[LoopSpec]) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    for level in levels:
        axis = level.in_axes[number]
        aval = aval if axis is None else with_axis(aval, axis)
    return with_shape(aval, aval.shape)
