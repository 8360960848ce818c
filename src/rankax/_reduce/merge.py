# SPDX-License-Identifier: MIT
"""A reduction in parts: the state of each block of items, the states merged, the result.

`reduce_row` reduces a row that one program has. Where nobody has the whole row, as on a cluster,
each block of it is reduced to its state by the same loop, which is given a `Partial` in place of
every reduction; states are merged by the accumulators that merge tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._base.arrays import counted, scalar
from rankax._reduce.protocol import Part, Reduction
from rankax._reduce.row import Row, Task, whole_level
from rankax._reduce.run import Reductions, traced_parts

__all__ = ["BlockStates", "partial_reductions"]


class Partial(Reduction):
    """Reduces the items of a block to the state that its reduction hands on."""

    # Nothing that is evaluated in blocks is differentiated.
    is_linear = True

    def __init__(self, inner: Reduction, whole: Row) -> None:
        self.inner = inner
        self.whole = whole
        self.name = inner.name

    def lifted(self, out: Any) -> Any:
        return self.inner.lifted(out)

    def check(self, part: Part, count: int) -> None:
        del count
        self.inner.check(part, self.whole.size)

    def tasks(self, part: Part, row: Row) -> list[Task]:
        return self.inner.tasks(part, row)

    def from_states(self, part: Part, row: Row, states: list[Any]) -> Any:
        return self.inner.block_state(part, row, states)

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        index = counted(row.size, row.index_dtype)
        states: list[Any] = []
        for task in self.inner.tasks(part, row):
            accumulator = task.accumulator
            assert accumulator is not None  # what is kept is reduced by nobody
            if not row.size:
                states.append(accumulator.join(accumulator.start(1)))
                continue
            tiles = [jnp.moveaxis(outs[i - part.first], 0, -1) for i in task.outputs]
            tile = tiles[0] if len(tiles) == 1 else tiles
            states.append(
                accumulator.join(accumulator.step(accumulator.start(row.size), tile, index))
            )
        return self.from_states(part, row, states)

    def assembled(self, part: Part, values: Any) -> Any:
        del part
        return values


def partial_reductions(reductions: Reductions, sizes: Sequence[int]) -> Reductions:
    """Return what makes the states of a block; ``sizes`` are those of all reduced axes, whole."""
    whole = _row(sizes)
    entries = tuple(None if r is None else Partial(r, whole) for r in reductions.entries)
    return Reductions(entries, reductions.structure)


def _row(sizes: Sequence[int]) -> Row:
    """Return a row of which only the size is asked."""
    return Row(list, (), tuple(whole_level(size) for size in sizes))


class BlockStates:
    """The outputs of one item in the parts of its reductions, and how their states are handled.

    Parameters
    ----------
    fun : callable
        The kernel of one item.
    items : sequence of arrays
        One item of each leaf, as tracers.
    reductions : Reductions
    sizes : sequence of int
        Of the reduced axes, whole.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        items: Sequence[Any],
        reductions: Reductions,
        sizes: Sequence[int],
    ) -> None:
        self.whole = _row(sizes)
        self.reductions = reductions
        self.parts = traced_parts(fun, items, reductions, sizes)

    def _each(self) -> list[tuple[Part, Reduction | None]]:
        return list(zip(self.parts, self.reductions.entries, strict=True))

    def placed(self, states: Sequence[Any], starts: Sequence[Any], shape: Sequence[int]) -> Any:
        """Make the indices in the states of a block those of the whole.

        Parameters
        ----------
        states : sequence
            One for each part, of any batch of rows.
        starts : sequence of scalars
            Where the block begins along each reduced axis.
        shape : sequence of int
            The lengths of the block along them.
        """
        sizes = tuple(level.chunks.length for level in self.whole.levels)
        dtype = self.whole.index_dtype

        def in_whole(index: jax.Array) -> jax.Array:
            # The place of no item gives way to every item, as `Top` has it.
            none = scalar(jnp.iinfo(dtype).max, dtype)
            is_none = (index == jnp.iinfo(index.dtype).max) | (math.prod(shape) == 0)
            rest, stride = index.astype(dtype), 1
            place = jnp.zeros_like(rest)
            for size, length, start in reversed(list(zip(sizes, shape, starts, strict=True))):
                at = rest % max(length, 1) + jnp.asarray(start, dtype)
                place = place + at * jnp.asarray(stride, dtype)
                rest, stride = rest // max(length, 1), stride * size
            return jnp.where(is_none, none, place)

        return [
            None if r is None else r.placed_state(part, self.whole, state, in_whole)
            for (part, r), state in zip(self._each(), states, strict=True)
        ]

    def merged(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        """Merge the states of two sets of items, for one row."""
        both = zip(self._each(), first, second, strict=True)
        return [
            None if r is None else r.merged_states(part, self.whole, a, b)
            for (part, r), a, b in both
        ]

    def results(self, states: Sequence[Any]) -> list[Any]:
        """Return what each reduction makes of the state of all items of one row."""
        return [
            None if r is None else r.from_block_state(part, self.whole, state)
            for (part, r), state in zip(self._each(), states, strict=True)
        ]

    def assembled(self, values: Sequence[Any], kept: Sequence[Any]) -> Any:
        """Put results and kept outputs together; both have an entry for each part."""
        results = [
            part.structure.unflatten(whole) if r is None else r.assembled(part, value)
            for (part, r), value, whole in zip(self._each(), values, kept, strict=True)
        ]
        return self.reductions.structure.unflatten(results)
