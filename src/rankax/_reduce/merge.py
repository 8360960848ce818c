# SPDX-License-Identifier: MIT
"""Merge the states of several runs: renumber, merge, finish.

A run is some items of a row, such as one device's part or one dask block; for a reduction that
depends on their order, they are consecutive. For `Reductions` with ``of_run``, `reduce_row` returns
states instead of results, and the states of all runs are merged here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._base.arrays import index_dtype, scalar
from rankax._reduce.extrema import no_index
from rankax._reduce.protocol import Outputs, Place, Reduction
from rankax._reduce.run import Reduced, Reductions, trace_reduced


@dataclasses.dataclass(frozen=True)
class RunStates:
    """The states of several runs of items, which together are a whole row.

    A state is a list with an entry for each reduction. Kept outputs are not part of it: their
    entries are ignored, and returned as they are.
    """

    reductions: Reductions
    outputs: tuple[Outputs, ...]
    sizes: tuple[int, ...]  # the lengths of the reduced axes

    @classmethod
    def traced(
        cls,
        fun: Callable[..., Any],
        items: Sequence[Any],
        reductions: Reductions,
        sizes: Sequence[int],
    ) -> RunStates:
        """Trace ``fun`` for one item, given as tracers, to learn its outputs."""
        total = math.prod(sizes) if reductions.of_run is None else reductions.of_run
        item = trace_reduced(fun, items, reductions, total)
        return cls(reductions, item.outputs, tuple(sizes))

    @property
    def size(self) -> int:
        """The number of items in all runs."""
        return math.prod(self.sizes)

    def _each(self, *values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        return zip(self.reductions.entries, self.outputs, *values, strict=True)

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
            rest, stride, total = index.astype(dtype), 1, scalar(0, dtype)
            for size, length, start in reversed(list(zip(self.sizes, shape, starts, strict=True))):
                position = rest % scalar(length, dtype) + jnp.asarray(start, dtype)
                total = total + position * scalar(stride, dtype)
                rest, stride = rest // scalar(length, dtype), stride * size
            return total

        return self.placed(states, place)

    def placed(self, states: Sequence[Any], place: Place) -> list[Any]:
        """Replace each index of an item by its ``place``."""
        return [
            state if reduction.is_kept else reduction.renumber(outputs, state, place)
            for reduction, outputs, state in self._each(states)
        ]

    def merge(
        self,
        states: Sequence[Any],
        batch: int = 0,
        gather: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] | None = None,
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

        def finish(reduction: Reduction, outputs: Outputs, state: Any) -> Any:
            return reduction.finish_state(outputs, state, self.size)

        return self._mapped(finish, states, batch, 0)

    def _mapped(
        self, fun: Callable[..., Any], states: Sequence[Any], batch: int, axis: int
    ) -> list[Any]:
        values: list[Any] = []
        for reduction, outputs, state in self._each(states):
            if reduction.is_kept:
                values.append(state)
                continue
            of_row = functools.partial(fun, reduction, outputs)
            for _ in range(batch):
                of_row = jax.vmap(of_row, in_axes=axis)
            values.append(of_row(state))
        return values

    def reduced(self, values: Sequence[Any]) -> Reduced:
        """Return states or results as those of one row."""
        return Reduced.of(values, self.reductions, self.outputs)

    def assemble(self, values: Sequence[Any], kept: Sequence[Any]) -> Any:
        """Put results and kept outputs together; both have an entry for each reduction."""
        arrays = [
            whole if reduction.is_kept else value
            for reduction, _, value, whole in self._each(values, kept)
        ]
        return self.reduced(arrays).assembled()
