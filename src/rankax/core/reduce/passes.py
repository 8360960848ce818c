# SPDX-License-Identifier: MIT
"""Reduce a row: in the pass that is evaluated, or in the one that is differentiated.

A run is some items of a row, such as one device's part or one dask block; for a reduction that
depends on their order, they are consecutive. For `Reductions` with ``of_run``, `RowReduction`
returns states instead of results, and `ext/runs.py` merges the states of all runs.

With ``where``, an item counts if its mask, one of the outputs of the kernel, is true. Others add
nothing and send nothing back, even where their value or derivative is NaN:

* Forward, it is replaced by the identity of the reduction, or the accumulator passes over it.
* In the derivative, a cotangent of 0 is not enough, because 0 times an infinite derivative is NaN.
  So a first pass over the row, which computes only the mask, finds an item that counts, and the
  inputs of this item replace the inputs of each item that is left out. They are constants
  there: the transpose of the choice drops the cotangent. If no item counts, the cotangents of what
  all items share are dropped, too (`_masked_row`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import has_tangent, index_dtype, too_many
from rankax.core.hooks import Rules
from rankax.core.loop.spec import LoopSpec, items_at
from rankax.core.reduce.extrema import Arg
from rankax.core.reduce.protocol import Outputs
from rankax.core.reduce.row import Row
from rankax.core.reduce.run import Reductions
from rankax.core.reduce.states import Accumulation

# A row has at least so many items for each that is evaluated again. The derivative of the others is
# not computed then: with 16 to 200 items, gradients of min, max, `TopK` and `Best` take 0.3 to 0.7
# of the time on a CPU, and on a GPU, nothing of a row is stored.
_ITEMS_PER_CHOSEN = 8


@dataclasses.dataclass(frozen=True)
class RowReduction:
    """How the items of a row are reduced: in the pass that is evaluated, or that differentiated.

    Attributes
    ----------
    item_of : callable
        Makes the function of one item from the constants of its program.
    levels : tuple of LoopSpec
        The levels of the row, outermost first.
    outputs : tuple of Outputs
        As `trace_reduced` returns them.
    reductions : Reductions
    jaxpr : Jaxpr
        The program of an item.
    rules : Rules
    """

    item_of: Callable[[Sequence[Any]], Callable[..., list[Any]]]
    levels: tuple[LoopSpec, ...]
    outputs: tuple[Outputs, ...]
    reductions: Reductions
    jaxpr: Jaxpr
    rules: Rules

    def values(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> list[Any]:
        """Return one value for each reduction: its result, or its state."""
        row, every = self._row(consts, leaves, back=back), self.reductions.each(self.outputs)
        if self.is_at_once:
            outs, row = row.whole(), dataclasses.replace(row, picks=back and self.chooses_few)
            return [entry.plain(own, row, [outs[i] for i in own.positions]) for entry, own in every]
        # A row of no items has no winner to take a derivative from.
        if not back or not row.size:
            return self._fold_each(row, every, back=False)
        # One loop for each mask folds the linear ones; the others are folded one by one.
        values: dict[int, Any] = {}
        for mask in dict.fromkeys(outputs.mask for outputs in self.outputs):
            each = {i: pair for i, pair in enumerate(every) if pair[1].mask == mask}
            pairs = list(each.values())
            own = row if mask is None else self._masked_row(consts, leaves, pairs[0][1])
            values.update(zip(each, self._fold_each(own, pairs, back=True), strict=True))
        return [values[i] for i in range(len(values))]

    @property
    def is_linear(self) -> bool:
        """Whether the pass that is evaluated can be differentiated as it is."""
        return not self._is_masked and all(entry.is_linear for entry in self.reductions.entries)

    @property
    def is_at_once(self) -> bool:
        """Whether all items are evaluated at once, and reduced as `jax.numpy` does."""
        has_loop = any(level.is_loop or level.walker for level in self.levels)
        return self.reductions.of_run is None and not (has_loop or self._is_masked)

    @property
    def chooses_few(self) -> bool:
        """Whether a derivative had better evaluate the chosen items of a row again."""
        chosen = sum(entry.chosen(own) for entry, own in self.reductions.each(self.outputs))
        items = math.prod(level.chunks.length for level in self.levels)
        return 0 < _ITEMS_PER_CHOSEN * chosen <= items

    @property
    def _is_masked(self) -> bool:
        return any(outputs.mask is not None for outputs in self.outputs)

    def _row(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> Row:
        count = len(self.jaxpr.outvars)
        item = self.item_of(consts)
        return Row(item, tuple(leaves), self.levels, self.jaxpr, self.rules, count, back)

    def _masked_row(self, consts: Sequence[Any], leaves: Sequence[Any], outputs: Outputs) -> Row:
        """Return a row whose items that are left out can be differentiated as if they counted.

        ``outputs`` are some that the mask is for.
        """
        row = self._row([lax.stop_gradient(x) for x in consts], leaves, back=True)

        def counts(*leaves: Any) -> jax.Array:
            return row.item(*map(lax.stop_gradient, leaves))[outputs.mask]

        arg = Arg((), jnp.bool_, index_dtype(row.size), largest=True)
        if words := too_many(row.size):
            raise ValueError(f"a reduction with where or bucket has no derivative: {words}")
        steps = Accumulation(outputs.mask, arg), outputs.counting()
        (_, (index,)), (number,) = row.fold_constants(steps)

        def if_any(x: Any) -> Any:
            if not has_tangent(jax.typeof(x)):
                return x
            return jnp.where(number > 0, x, lax.stop_gradient(x))

        by_leaf = [[level.in_axes[i] for level in row.levels] for i in range(len(leaves))]
        is_mapped = [any(axis is not None for axis in axes) for axes in by_leaf]
        pairs = zip(leaves, is_mapped, strict=True)
        shared = [x if own else if_any(x) for x, own in pairs]
        safe = self._row(list(map(if_any, consts)), shared, back=True)
        others = [lax.stop_gradient(x) for x in items_at(safe.leaves, index, safe.levels)]
        is_mapped += [True] * (len(others) - len(is_mapped))  # the numbers of items

        def item(*leaves: Any) -> list[jax.Array]:
            is_own = counts(*leaves)
            triples = zip(leaves, others, is_mapped, strict=True)
            return safe.item(*(lax.select(is_own, x, y) if own else x for x, y, own in triples))

        return dataclasses.replace(safe, item=item, counts=counts, number=number)

    def _fold_each(self, row: Row, pairs: Sequence[tuple[Any, ...]], *, back: bool) -> list[Any]:
        """Fold reductions in one loop, except those that have a derivative of their own."""
        groups = [
            reduction.accumulations(outputs, row.size) if reduction.is_linear or not back else None
            for reduction, outputs in pairs
        ]
        in_loop = list(itertools.chain(*filter(None, groups)))
        kept = [i for entry, outputs in pairs if entry.is_kept for i in outputs.positions]
        states = row.fold(in_loop, kept) if in_loop or kept else []
        folded, whole = iter(states[: len(in_loop)]), iter(states[len(in_loop) :])
        values: list[Any] = []
        for (reduction, outputs), group in zip(pairs, groups, strict=True):
            if group is None:
                state = reduction.differentiable(outputs, row)
            elif reduction.is_kept:
                state = [next(whole) for _ in outputs.positions]
            else:
                state = reduction.partial(outputs, row, [next(folded) for _ in group])
            if self.reductions.of_run is None:
                state = reduction.finish_state(outputs, state, row.size)
            values.append(state)
        return values
