# SPDX-License-Identifier: MIT
"""One row of a reduction: all items along the reduced axes, for one item of the kept ones.

A row is walked by a nest of loops. At most one level is cut into tiles: the levels below it fit in
a tile whole, and are mapped; those above it are walked item by item. Each loop returns its states
with the lanes joined, and the loop around it merges them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.ad_checkpoint import checkpoint_name

from rankax._base.arrays import counted, scalar
from rankax._loop.keys import PLACE, vmap_level
from rankax._loop.level import trace_level
from rankax._loop.loop import KEPT_IN_REVERSE
from rankax._loop.reuse import map_chunks
from rankax._loop.spec import LoopSpec
from rankax._plan.chunks import Chunks
from rankax._reduce.states import Accumulator
from rankax._trace.derivatives import keep_rules
from rankax._trace.item import ItemProgram, chunk_program, with_axis

__all__ = ["Row", "Task", "most_lanes", "whole_level"]

_MOST_PER_LANE = 16  # numbers; a lane of more would not fit the cache with the others


def most_lanes() -> int | None:
    """Return how many items a tile has at most; None: as many as are allowed in flight.

    On a CPU, what they need should fit its cache, and XLA:CPU of JAX 0.10 and 0.12 reduces slowly
    where more than some thousand numbers take part.
    """
    return 1024 if jax.default_backend() == "cpu" else None


def whole_level(length: int, in_axes: tuple[int | None, ...] = ()) -> LoopSpec:
    """Return a level that is one tile."""
    return LoopSpec(Chunks(length, length, 1), in_axes, is_loop=False)


class Task(NamedTuple):
    """One accumulator, and the outputs of an item that it takes; with none, they are kept."""

    outputs: tuple[int, ...]
    accumulator: Accumulator | None
    core: tuple[int, ...]  # of the largest output

    @property
    def is_wide(self) -> bool:
        """Whether the lanes of each tile are joined at once, for their states are large."""
        return math.prod(self.core) > _MOST_PER_LANE


@dataclasses.dataclass(frozen=True)
class Row:
    """The items of one row, not yet evaluated."""

    item: Callable[..., list[jax.Array]]  # from one item of each leaf to its outputs
    leaves: tuple[Any, ...]
    levels: tuple[LoopSpec, ...]

    @property
    def size(self) -> int:
        """How many items the row has."""
        return math.prod(level.chunks.length for level in self.levels)

    @property
    def is_whole(self) -> bool:
        """Whether all of it fits in one tile."""
        return not any(level.is_loop for level in self.levels)

    @property
    def index_dtype(self) -> Any:
        """The dtype of a flat index."""
        return jnp.int32 if self.size < 2**31 else jnp.int64

    def stopped(self) -> Row:
        """Return the same row as constants, for a result that has no derivative."""
        item = self.item

        def constant(*leaves: Any) -> list[jax.Array]:
            return [lax.stop_gradient(out) for out in item(*map(lax.stop_gradient, leaves))]

        return dataclasses.replace(self, item=constant)

    def then(self, fun: Callable[[list[jax.Array]], list[jax.Array]]) -> Row:
        """Return the row whose items are those of this one after ``fun``."""
        item = self.item
        return dataclasses.replace(self, item=lambda *leaves: fun(item(*leaves)))

    def at(self, index: Any) -> list[jax.Array]:
        """Evaluate the item of one flat index."""
        leaves = list(self.leaves)
        # From the outermost level on, for axes are counted without those of the levels around.
        for level, place in zip(self.levels, self._places(index), strict=True):
            for i, axis in enumerate(level.in_axes):
                if axis is not None:
                    leaves[i] = lax.dynamic_index_in_dim(leaves[i], place, axis, keepdims=False)
            if level.numbered:
                leaves.append(place.astype(PLACE.dtype))
        return self.item(*leaves)

    def _places(self, index: Any) -> list[Any]:
        """Return where a flat index is along each level."""
        places: list[Any] = []
        for level in reversed(self.levels):
            size = np.asarray(max(level.chunks.length, 1), index.dtype)
            places.append(index % size)
            index = index // size
        return places[::-1]

    def pick(self, index: jax.Array, output: int) -> jax.Array:
        """Return one output, each number of it from the item that ``index`` has in its place.

        An item is evaluated for each number, of which one is used.
        """
        if not index.shape:
            return self.at(index)[output]

        def one(at: Any, number: Any) -> jax.Array:
            return lax.dynamic_index_in_dim(jnp.ravel(self.at(at)[output]), number, keepdims=False)

        numbers = counted(index.size, jnp.int32)
        return jnp.reshape(jax.vmap(one)(jnp.ravel(index), numbers), index.shape)

    def whole(self) -> list[jax.Array]:
        """Evaluate all items at once: outputs with the row on axis 0."""
        item = self.item
        for level in reversed(self.levels):
            item = vmap_level(item, level.in_axes, level.chunks.length, numbered=level.numbered)
        count = len(self.levels)
        return [jnp.reshape(x, (self.size, *x.shape[count:])) for x in item(*self.leaves)]

    def found(self, tasks: Sequence[Task]) -> list[Any]:
        """Return what `fold` does, for the reverse pass to keep rather than to compute again."""
        return jax.tree.map(lambda x: checkpoint_name(x, KEPT_IN_REVERSE), self.fold(tasks))

    def fold(self, tasks: Sequence[Task], *, linear: bool = True) -> list[Any]:
        """Return the state of each task after all items, its lanes joined.

        ``linear`` says that a derivative needs no state. Otherwise one is stored for each tile.
        """
        cut = [i for i, level in enumerate(self.levels) if level.is_loop]
        at = cut[-1] if cut else 0
        around, below = self.levels[:at], self.levels[at + 1 :]
        lanes = math.prod(level.chunks.length for level in below)
        walk = _RowLoops(tuple(tasks), self.index_dtype)
        fun = _lanes_behind(self.item, below)
        level = dataclasses.replace(self.levels[at], linear=linear)
        fun = walk.tiles(fun, level, len(below), lanes)
        each = lanes * level.chunks.length
        for level in reversed(around):
            fun = walk.one_by_one(fun, level, each)
            each *= level.chunks.length
        return fun(*self.leaves)


def _lanes_behind(item: Callable[..., Any], levels: Sequence[LoopSpec]) -> Callable[..., Any]:
    """Map an item over levels, whose axes come behind the core axes in their order."""
    for place, level in enumerate(reversed(levels), start=1):
        item = vmap_level(item, level.in_axes, level.chunks.length, -place, numbered=level.numbered)
    return item


@dataclasses.dataclass(frozen=True)
class _RowLoops:
    """What the loops of one row have in common."""

    tasks: tuple[Task, ...]
    index_dtype: Any

    def tiles(
        self, fun: Callable[..., Any], level: LoopSpec, levels_below: int, lanes_below: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over the tiles of one level; what is left over is a tile of its own."""

        def walk(*leaves: Any) -> list[Any]:
            item = trace_level(fun, leaves, level, -levels_below - 1)
            mapped = [jnp.asarray(x) for x in level.mapped(leaves)]
            chunks = level.chunks
            sink = _Tiles(self.tasks, chunks.size, levels_below, lanes_below, self.index_dtype)
            states = map_chunks(item, mapped, level, sink)
            start = chunks.steps * chunks.size
            if start == chunks.length:
                return states
            rest = dataclasses.replace(sink, tile=chunks.length - start)
            outs = self._rest(item, mapped, start, level)
            at = scalar(start, self.index_dtype)
            found, rows = rest.step(rest.start(), outs, at)
            one_row = jax.tree.map(lambda x: lax.expand_dims(x, (0,)), rows)
            return merged(self.tasks, states, rest.end(found, one_row))

        return walk

    def _rest(
        self,
        item: ItemProgram,
        leaves: Sequence[Any],
        start: int,
        level: LoopSpec,
    ) -> list[jax.Array]:
        length, axes = level.chunks.length, level.axes
        size = length - start
        tails = [
            lax.slice_in_dim(x, start, length, axis=axis)
            for x, axis in zip(leaves, axes, strict=True)
        ]
        if level.numbered:
            first = scalar(start % 2**32, PLACE.dtype)
            tails, axes = [*tails, first + counted(size, PLACE.dtype)], (*axes, 0)
        avals = [with_axis(x, axis, size) for x, axis in zip(tails, axes, strict=True)]
        closed = keep_rules(chunk_program(item, axes, avals, size))

        def evaluate(*tails: Any) -> list[jax.Array]:
            return core.eval_jaxpr(closed.jaxpr, closed.consts, *tails)

        return (jax.checkpoint(evaluate) if level.checkpoint else evaluate)(*tails)

    def one_by_one(
        self, fun: Callable[..., list[Any]], level: LoopSpec, each: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over one level whose items are walks themselves."""

        def walk(*leaves: Any) -> list[Any]:
            structures: list[Any] = []

            def flat(*items: Any) -> list[Any]:
                states, structure = jax.tree.flatten(fun(*items))
                structures.append(structure)
                return states

            item = trace_level(flat, leaves, level)
            sink = _States(self.tasks, structures[-1], each, self.index_dtype)
            one_by_one = dataclasses.replace(
                level, chunks=Chunks(level.chunks.length, 1, level.chunks.length), checkpoint=False
            )
            mapped = [jnp.asarray(x) for x in level.mapped(leaves)]
            return map_chunks(item, mapped, one_by_one, sink)

        return walk


def merged(tasks: Sequence[Task], first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Merge the states of two walks, of which one comes before the other."""
    return [
        lax.concatenate([a, b], a.ndim - 1)
        if task.accumulator is None
        else task.accumulator.merge(a, b)
        for task, a, b in zip(tasks, first, second, strict=True)
    ]


# The sinks, see `sinks.py`. What is kept leaves the loop as rows; all else is carried.


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Folds tiles; their outputs have core axes first, then the tile, then the levels below."""

    tasks: tuple[Task, ...]
    tile: int
    levels_below: int
    lanes_below: int
    index_dtype: Any

    def start(self) -> list[Any]:
        lanes = self.tile * self.lanes_below
        return [
            None
            if task.accumulator is None
            else task.accumulator.start(1 if task.is_wide else lanes)
            for task in self.tasks
        ]

    def step(self, carry: list[Any], chunk: list[Any], at: jax.Array) -> tuple[list[Any], Any]:
        lanes = self.tile * self.lanes_below
        first = at.astype(self.index_dtype) * np.asarray(self.lanes_below, self.index_dtype)
        index = first + counted(lanes, self.index_dtype)
        flat = [lax.collapse(out, out.ndim - 1 - self.levels_below) for out in chunk]
        states: list[Any] = []
        rows: list[Any] = []
        for task, state in zip(self.tasks, carry, strict=True):
            tiles = [flat[i] for i in task.outputs]
            tile = tiles[0] if len(tiles) == 1 else tiles
            rows.append(tile if task.accumulator is None else None)
            states.append(_taken(task, state, tile, index))
        return states, rows

    def end(self, carry: list[Any], rows: list[Any]) -> list[Any]:
        return [
            _in_a_row(row) if task.accumulator is None else task.accumulator.join(state)
            for task, state, row in zip(self.tasks, carry, rows, strict=True)
        ]

    def to_differentiate(self) -> _Tiles:
        return self


@dataclasses.dataclass(frozen=True)
class _States:
    """Merges the states of inner walks, which come one at a time, flat, on axis 0."""

    tasks: tuple[Task, ...]
    structure: Any
    each: int  # items of one inner walk
    index_dtype: Any

    def start(self) -> list[Any]:
        return [
            None if task.accumulator is None else task.accumulator.start(1) for task in self.tasks
        ]

    def step(self, carry: list[Any], chunk: list[Any], at: jax.Array) -> tuple[list[Any], Any]:
        found = self.structure.unflatten([lax.squeeze(x, (0,)) for x in chunk])
        offset = at.astype(self.index_dtype) * np.asarray(self.each, self.index_dtype)
        states: list[Any] = []
        rows: list[Any] = []
        for task, state, new in zip(self.tasks, carry, found, strict=True):
            accumulator = task.accumulator
            rows.append(new if accumulator is None else None)
            states.append(
                None
                if accumulator is None
                else accumulator.merge(state, accumulator.shift(new, offset))
            )
        return states, rows

    def end(self, carry: list[Any], rows: list[Any]) -> list[Any]:
        return [
            _in_a_row(row) if task.accumulator is None else state
            for task, state, row in zip(self.tasks, carry, rows, strict=True)
        ]

    def to_differentiate(self) -> _States:
        return self


def _taken(task: Task, state: Any, tile: Any, index: jax.Array) -> Any:
    """Return the state after one more tile."""
    accumulator = task.accumulator
    if accumulator is None:
        return None
    if not task.is_wide:
        return accumulator.step(state, tile, index)
    fresh = accumulator.step(accumulator.start(index.size), tile, index)
    return accumulator.merge(state, accumulator.join(fresh))


def _in_a_row(rows: jax.Array) -> jax.Array:
    """Join the rows of a scan along the lanes, which are the last axis."""
    return lax.collapse(jnp.moveaxis(rows, 0, -2), rows.ndim - 2)
