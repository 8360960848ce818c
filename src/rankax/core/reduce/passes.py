# SPDX-License-Identifier: MIT
"""Reduce a row: in the pass that is evaluated, or in the one that is differentiated.

A run is some items of a row, such as one device's part or one dask block; for a reduction that
depends on their order, they are consecutive. For `Reductions` with ``of_run``, `RowReduction`
returns states instead of results, and `RunStates` merges the states of all runs.

With ``where``, items count for which one output of the kernel, the mask, is true. What is left out
adds nothing and sends nothing back, even where its value or derivative is NaN:

* Forward, it is replaced by the identity of the reduction, or the accumulator passes over it.
* In the derivative, a cotangent of 0 is not enough, because 0 times an infinite derivative is NaN.
  So a first pass over the row, which computes only the mask, finds an item that counts, and the
  inputs of this item take the place of those of each item that is left out. They are constants
  there: the transpose of the choice drops the cotangent. If no item counts, the cotangents of what
  all items share are dropped, too (`_masked_row`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.base.arrays import flat_index, has_tangent, index_dtype, places_of, too_many
from rankax.core.loop.rules import NO_RULES, Rules
from rankax.core.loop.spec import LoopSpec
from rankax.core.reduce.extrema import Arg, no_index
from rankax.core.reduce.protocol import Outputs, Place, Reduction
from rankax.core.reduce.row import Row
from rankax.core.reduce.run import Reductions
from rankax.core.reduce.states import Accumulation
from rankax.core.trace.derivatives import call_with_derivative_of
from rankax.core.trace.programs import ItemProgram, evaluate
from rankax.ext.lanes.call import items_at


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
    rules : Rules
    """

    item_of: Callable[[Sequence[Any]], Callable[..., list[Any]]]
    levels: tuple[LoopSpec, ...]
    outputs: tuple[Outputs, ...]
    reductions: Reductions
    jaxpr: Any
    rules: Rules

    def values(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> list[Any]:
        """Return one value for each reduction: its result, or its state."""
        row, every = self._row(consts, leaves, back=back), self.reductions.each(self.outputs)
        if self.is_at_once:
            outs = row.whole()
            return [
                reduction.plain(outputs, row, [outs[i] for i in outputs.positions])
                for reduction, outputs in every
            ]
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
        has_loop = any(level.is_loop or level.lanes for level in self.levels)
        return self.reductions.of_run is None and not (has_loop or self._is_masked)

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


def reduce_row(
    item: ItemProgram, leaves: Sequence[Any], levels: Sequence[LoopSpec], reductions: Reductions
) -> list[Any]:
    """Reduce the outputs of an item, as `trace_reduced` returns it, over levels without loops.

    This has its derivative; `rankax.core.call.nest` has one for a whole call.
    """
    # Without the constants, which may be tracers: from JAX 0.12 on, a jaxpr holds them.
    jaxpr = item.closed.jaxpr.replace(constvars=list(item.closed.jaxpr.constvars))
    item_of = functools.partial(functools.partial, evaluate, jaxpr)
    row = RowReduction(item_of, tuple(levels), item.outputs, reductions, jaxpr, NO_RULES)
    evaluated, differentiated = (functools.partial(row.values, back=b) for b in (False, True))
    arrays = list(item.closed.consts), list(leaves)
    if row.is_linear:
        return evaluated(*arrays)
    return call_with_derivative_of(differentiated, evaluated, *arrays)


@dataclasses.dataclass(frozen=True)
class RunStates:
    """The states of several runs of items, which together are a whole row.

    A state is a list with an entry for each reduction. Kept outputs are not part of it: their
    entries are ignored, and returned as they are.
    """

    reductions: Reductions
    outputs: tuple[Outputs, ...]
    sizes: tuple[int, ...]  # the lengths of the reduced axes

    @property
    def size(self) -> int:
        """The number of items in all runs."""
        return math.prod(self.sizes)

    def renumber(self, states: Sequence[Any], shape: Sequence[int], starts: Sequence[Any]) -> Any:
        """Replace the indices of items in one run by those in the whole row.

        Parameters
        ----------
        states : sequence
        shape : sequence of int
            The lengths of the run along the reduced axes.
        starts : sequence of scalars
            Where the run begins along them.
        """

        def place(index: jax.Array) -> jax.Array:
            dtype = index_dtype(self.size)
            if not math.prod(shape):  # the state of no items holds no valid index
                return jnp.full_like(index, no_index(dtype), dtype=dtype)
            pairs = zip(places_of(index.astype(dtype), shape), starts, strict=True)
            return flat_index([at + jnp.asarray(start, dtype) for at, start in pairs], self.sizes)

        return self.placed(states, place)

    def placed(self, states: Sequence[Any], place: Place) -> list[Any]:
        """Replace each index of an item by its ``place``."""
        return [
            state if reduction.is_kept else reduction.renumber(outputs, state, place)
            for reduction, outputs, state in self.reductions.each(self.outputs, states)
        ]

    def merge(
        self, states: Sequence[Any], batch: int = 0, gather: Callable[..., Any] | None = None
    ) -> list[Any]:
        """Merge states that have the runs on axis 0 and ``batch`` axes of rows after it.

        ``gather`` makes arrays whose runs are on several devices available to each device.
        """

        def merge(reduction: Reduction, outputs: Outputs, state: Any) -> Any:
            if gather is not None and not reduction.is_sum:
                arrays, structure = jax.tree.flatten(state)
                state = structure.unflatten(gather(arrays))
            return reduction.merge_states(outputs, state)

        return self._mapped(merge, states, batch, 1)

    def finish(self, states: Sequence[Any], batch: int = 0) -> list[Any]:
        """Return the results from the state of all items, with ``batch`` axes of rows in front."""
        size = self.size
        return self._mapped(lambda entry, *own: entry.finish_state(*own, size), states, batch, 0)

    def _mapped(
        self, fun: Callable[..., Any], states: Sequence[Any], batch: int, axis: int
    ) -> list[Any]:
        values: list[Any] = []
        for reduction, outputs, state in self.reductions.each(self.outputs, states):
            if reduction.is_kept:
                values.append(state)
                continue
            of_row = functools.partial(fun, reduction, outputs)
            for _ in range(batch):
                of_row = jax.vmap(of_row, in_axes=axis)
            values.append(of_row(state))
        return values

    def assemble(self, values: Sequence[Any], kept: Sequence[Any]) -> Any:
        """Put results and kept outputs together; both have an entry for each reduction."""
        arrays = [
            whole if reduction.is_kept else value
            for reduction, _, value, whole in self.reductions.each(self.outputs, values, kept)
        ]
        return self.reductions.assembled(self.outputs, arrays)
