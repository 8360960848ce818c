# SPDX-License-Identifier: MIT
"""Runs: items of a row that are folded into one state, and how the states of all runs merge."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax.core.base.arrays import flat_index, index_dtype, places_of
from rankax.core.plan.schedule import Level
from rankax.core.protocols import NO_RULES
from rankax.core.reduce.extrema import no_index
from rankax.core.reduce.protocol import Outputs, Place, Reduction
from rankax.core.reduce.row import Accumulator
from rankax.core.reduce.run import Reductions, RowReduction
from rankax.core.trace.derivatives import call_with_derivative_of
from rankax.core.trace.programs import ItemProgram, evaluate


def reduce_row(
    item: ItemProgram, leaves: Sequence[Any], levels: Sequence[Level], reductions: Reductions
) -> list[Any]:
    """Reduce the outputs of an item, as `trace_reduced` returns it, over levels without loops.

    This has its derivative; `rankax.core.walk` has one for a whole call.
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

        return self._of_rows(merge, states, batch, 1)

    def merge_two(self, one: Sequence[Any], other: Sequence[Any], batch: int = 0) -> list[Any]:
        """Merge two states; kept outputs are those of the first one."""
        pairs = list(zip(self.reductions.entries, one, other, strict=True))
        both = [a if entry.is_kept else _stacked(a, b) for entry, a, b in pairs]
        # Some merge tuples to lists, which `jax.tree.map` tells apart.
        leaves = jax.tree.leaves(self.merge(both, batch))
        return jax.tree.unflatten(jax.tree.structure(list(one)), leaves)

    # Many runs, one after another: beside a sum, what is held has what rounding took from it.

    def begin(self, none: Sequence[Any]) -> list[Any]:
        """Return what the states of many runs are added to, from the states of no items."""
        pairs = zip(self._drifting, none, strict=True)

        def begin(accumulator: Accumulator) -> Any:
            return accumulator.begin(1) if accumulator.drifts else accumulator.start(1)

        return [list(map(begin, every)) if every else state for every, state in pairs]

    def add(self, held: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        """Add the states of a run; kept outputs are those of the run."""

        def add(accumulator: Accumulator, *pair: Any) -> Any:
            return accumulator.add(*pair) if accumulator.drifts else accumulator.merge(*pair)

        every = self.reductions.each(self.outputs, held, states)
        added: list[Any] = []
        for accumulators, (entry, outputs, before, new) in zip(self._drifting, every, strict=True):
            if entry.is_kept:
                added.append(new)
            elif accumulators:
                added.append(list(map(add, accumulators, before, new)))
            else:
                merged = entry.merge_states(outputs, _stacked(before, new))
                added.append(jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(merged)))
        return added

    def total(self, held: Sequence[Any]) -> list[Any]:
        """Return the states that are held."""

        def total(accumulator: Accumulator, held: Any) -> Any:
            return accumulator.total(held) if accumulator.drifts else held

        pairs = zip(self._drifting, held, strict=True)
        return [list(map(total, every, state)) if every else state for every, state in pairs]

    @functools.cached_property
    def _drifting(self) -> list[list[Accumulator]]:
        """The accumulators of each reduction, if one of them drifts."""
        drifting: list[list[Accumulator]] = []
        for entry, outputs in self.reductions.each(self.outputs):
            accumulators = [] if entry.is_kept else entry.accumulators(outputs)
            drifting.append(accumulators if any(each.drifts for each in accumulators) else [])
        return drifting

    def finish(self, states: Sequence[Any], batch: int = 0) -> list[Any]:
        """Return the results from the state of all items, with ``batch`` axes of rows in front."""
        size = self.size
        return self._of_rows(lambda entry, *own: entry.finish_state(*own, size), states, batch, 0)

    def _of_rows(
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


def _stacked(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda *pair: jnp.stack(pair), one, other)
