# SPDX-License-Identifier: MIT
"""A row: the items along the reduced axes, for one item of the kept axes.

A nest of loops evaluates a row. At most one level of the nest is cut into tiles: the levels inside
it fit a tile whole and are mapped; those around it are evaluated item by item. Each loop returns
its states with the lanes joined, and the loop around it merges them.

On a CPU, a tile has at most 1024 items (`most_lanes`), so that it fits the cache. What is left
after the last whole tile is a smaller tile. An overlap with a mask would need one program fewer,
but the mask multiplies the derivative of an item by zero, which is NaN if that derivative is
infinite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rankax._base.arrays import counted, scalar
from rankax._lockstep.call import walk_in_lanes
from rankax._loop.keys import PLACE, vmap_level
from rankax._loop.level import mapped_arrays, places_of, trace_level
from rankax._loop.loop import KEPT_IN_REVERSE
from rankax._loop.reuse import map_chunks
from rankax._loop.sinks import Sink
from rankax._loop.spec import LoopSpec
from rankax._plan.chunks import Chunks
from rankax._reduce.extrema import in_tiles
from rankax._reduce.states import Accumulation, Storage
from rankax._trace.derivatives import keep_rules
from rankax._trace.item import ItemProgram, chunk_program, with_axis
from rankax._trace.programs import evaluate

Steps = Sequence[Accumulation | Storage]


def most_lanes() -> int | None:
    """Return how many items a tile has at most; None: as many as may be in flight.

    On a CPU, the tile should fit the cache, and XLA:CPU of JAX 0.10 and 0.12 is slow at reductions
    of more than some thousand numbers.
    """
    return 1024 if jax.default_backend() == "cpu" else None


def index_dtype(size: int) -> Any:
    """Return the dtype of the flat indices of ``size`` items."""
    return jnp.int32 if size < 2**31 else jnp.int64


@dataclasses.dataclass(frozen=True)
class Row:
    """The items of one row, not yet evaluated."""

    item: Callable[..., list[jax.Array]]  # from one item of each leaf to its outputs
    leaves: tuple[Any, ...]
    levels: tuple[LoopSpec, ...]
    is_expensive: bool = False  # see `_trace.work.evaluates_functions`

    @property
    def size(self) -> int:
        """The number of items."""
        return math.prod(level.chunks.length for level in self.levels)

    @property
    def count(self) -> Any:
        """The number of items that count: all, but see `where.py`."""
        return self.size

    @property
    def is_whole(self) -> bool:
        """Whether the row fits one tile."""
        return not any(level.is_loop or level.lanes for level in self.levels)

    def then(self, fun: Callable[[list[jax.Array]], list[jax.Array]]) -> Row:
        """Return the row with ``fun`` applied to the outputs of each item."""
        item = self.item
        return dataclasses.replace(self, item=lambda *leaves: fun(item(*leaves)))

    def at(self, index: Any) -> list[jax.Array]:
        """Evaluate the item with this flat index."""
        return self.item(*self.leaves_at(index))

    def leaves_at(self, index: Any) -> list[Any]:
        """Return what the item with this flat index is evaluated from."""
        leaves = list(self.leaves)
        # From the outermost level inwards: axes are counted without those of the outer levels.
        for level, place in zip(self.levels, places_of(index, self.levels), strict=True):
            for i, axis in enumerate(level.in_axes):
                if axis is not None:
                    leaves[i] = lax.dynamic_index_in_dim(leaves[i], place, axis, keepdims=False)
            if level.numbered:
                leaves.append(place.astype(PLACE.dtype))
        return leaves

    def pick(self, index: jax.Array, output: int) -> jax.Array:
        """Return one output, each number of it from the item at the same position of ``index``.

        An item is evaluated for each number.
        """
        if not index.shape:
            return self.at(index)[output]

        def one(at: Any, number: Any) -> jax.Array:
            return lax.dynamic_index_in_dim(jnp.ravel(self.at(at)[output]), number, keepdims=False)

        numbers = counted(index.size, jnp.int32)
        return jnp.reshape(jax.vmap(one)(jnp.ravel(index), numbers), index.shape)

    def whole(self) -> list[jax.Array]:
        """Evaluate all items at once: outputs with the row on axis 0.

        A single item is not mapped, so a branch stays a branch and effects may be ordered, as in a
        loop over chunks of one item.
        """
        if self.size == 1:
            outs = self.at(scalar(0, index_dtype(1)))
            return [lax.expand_dims(out, (0,)) for out in outs]
        item = self.item
        for level in reversed(self.levels):
            item = vmap_level(item, level.in_axes, level.chunks.length, numbered=level.numbered)
        count = len(self.levels)
        return [jnp.reshape(x, (self.size, *x.shape[count:])) for x in item(*self.leaves)]

    def split(self, array: jax.Array) -> jax.Array:
        """Cut axis 0, the row, into the axes of its levels."""
        return lax.reshape(
            array, (*(level.chunks.length for level in self.levels), *array.shape[1:])
        )

    def fold_constants(self, steps: Steps) -> list[Any]:
        """Return the states as constants, for results that have no derivative.

        The reverse pass keeps them instead of folding the row again.
        """
        item = self.item

        def constant(*leaves: Any) -> list[jax.Array]:
            return [lax.stop_gradient(out) for out in item(*map(lax.stop_gradient, leaves))]

        row = dataclasses.replace(self, item=constant)
        if getattr(jax.config, "jax_remat3", False):
            # A checkpoint makes tangents of zeros there, and a maximum of lanes makes NaN of those.
            # Elsewhere, two loops with a checkpoint share a copy of the inputs.
            levels = tuple(dataclasses.replace(level, checkpoint=False) for level in self.levels)
            row = dataclasses.replace(row, levels=levels)
        states = row.fold(steps)
        return jax.tree.map(lambda x: checkpoint_name(x, KEPT_IN_REVERSE), states)

    def fold(self, steps: Steps, *, linear: bool = True) -> list[Any]:
        """Return the state of each step after all items, with its lanes joined.

        ``linear``: a derivative needs no state. Otherwise one is stored for each tile.
        """
        loops = _RowLoops(tuple(steps), index_dtype(self.size), self.is_expensive)
        if self.is_whole or not self.size:
            return loops.at_once(self.whole(), self.size)
        if (lanes := self.levels[0].lanes) is not None:
            return loops.in_lanes(self, min(lanes, self.size, most_lanes() or lanes))
        at = max(i for i, level in enumerate(self.levels) if level.is_loop)
        around, below = self.levels[:at], self.levels[at + 1 :]
        lanes = math.prod(level.chunks.length for level in below)
        fun = _lanes_last(self.item, below)
        level = dataclasses.replace(self.levels[at], linear=linear)
        fun = loops.tiles(fun, level, len(below), lanes)
        each = lanes * level.chunks.length
        for level in reversed(around):
            fun = loops.item_by_item(fun, level, each)
            each *= level.chunks.length
        return fun(*self.leaves)


def _lanes_last(item: Callable[..., Any], levels: Sequence[LoopSpec]) -> Callable[..., Any]:
    """Map an item over levels, whose axes follow the core axes in the same order."""
    for place, level in enumerate(reversed(levels), start=1):
        item = vmap_level(item, level.in_axes, level.chunks.length, -place, numbered=level.numbered)
    return item


@dataclasses.dataclass(frozen=True)
class _RowLoops:
    """The loops of one row, which share their steps."""

    steps: tuple[Accumulation | Storage, ...]
    index_dtype: Any
    is_expensive: bool

    def at_once(self, outs: Sequence[jax.Array], size: int) -> list[Any]:
        """Return the states of a row that is one tile, or empty; ``outs`` have it on axis 0."""
        tiles = [jnp.moveaxis(out, 0, -1) for out in outs]
        if size:
            sink = _Tiles(self.steps, size, 0, 1, self.index_dtype)
            return sink.single(tiles, scalar(0, self.index_dtype))
        return [
            tiles[step.output] if isinstance(step, Storage) else step.join(step.start(1))
            for step in self.steps
        ]

    def tiles(
        self, fun: Callable[..., Any], level: LoopSpec, levels_below: int, lanes_below: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over the tiles of one level."""

        def loop(*leaves: Any) -> list[Any]:
            item = trace_level(fun, leaves, level, -levels_below - 1)
            mapped = mapped_arrays(leaves, level)
            chunks = level.chunks
            # Tiles enter these; `self.steps` merge the joined states.
            steps = tuple(in_tiles(step, is_expensive=self.is_expensive) for step in self.steps)
            sink = _Tiles(steps, chunks.size, levels_below, lanes_below, self.index_dtype)
            states = map_chunks(item, mapped, level, sink)
            start = chunks.steps * chunks.size
            if start == chunks.length:
                return states
            outs = _remainder(item, mapped, start, level)
            return self.with_rest(states, sink, outs, start, chunks.length - start)

        return loop

    def with_rest(
        self, states: list[Any], sink: _Tiles, outs: list[Any], start: int, size: int
    ) -> list[Any]:
        """Add the items from ``start`` on, which are less than a tile."""
        rest = dataclasses.replace(sink, tile=size)
        more = rest.single(outs, scalar(start, self.index_dtype))
        both = zip(self.steps, states, more, strict=True)
        return [step.merge(first, second) for step, first, second in both]

    def in_lanes(self, row: Row, tile: int) -> list[Any]:
        """Fold a row whose items end by themselves."""
        sink = _Tiles(self.steps, tile, 0, 1, self.index_dtype)
        states, outs = walk_in_lanes(row.item, row.leaves, row.levels, sink, tile)
        rest = row.size % tile
        return self.with_rest(states, sink, outs, row.size - rest, rest) if rest else states

    def item_by_item(
        self, fun: Callable[..., list[Any]], level: LoopSpec, each: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over one level whose items are loops themselves."""

        def loop(*leaves: Any) -> list[Any]:
            structures: list[Any] = []

            def flat(*items: Any) -> list[Any]:
                states, structure = jax.tree.flatten(fun(*items))
                structures.append(structure)
                return states

            item = trace_level(flat, leaves, level)
            sink = _States(self.steps, structures[-1], each, self.index_dtype)
            one_by_one = dataclasses.replace(
                level, chunks=Chunks(level.chunks.length, 1, level.chunks.length), checkpoint=False
            )
            mapped = mapped_arrays(leaves, level)
            return map_chunks(item, mapped, one_by_one, sink)

        return loop


def _remainder(
    item: ItemProgram, leaves: Sequence[Any], start: int, level: LoopSpec
) -> list[jax.Array]:
    """Evaluate the items from ``start`` on, at once."""
    length, axes = level.chunks.length, level.axes
    size = length - start
    tails = [
        lax.slice_in_dim(x, start, length, axis=axis) for x, axis in zip(leaves, axes, strict=True)
    ]
    if level.numbered:
        first = scalar(start % 2**32, PLACE.dtype)
        tails, axes = [*tails, first + counted(size, PLACE.dtype)], (*axes, 0)
    avals = [with_axis(x, axis, size) for x, axis in zip(tails, axes, strict=True)]
    closed = keep_rules(chunk_program(item, axes, avals, size))

    def remainder(*tails: Any) -> list[jax.Array]:
        return evaluate(closed.jaxpr, closed.consts, *tails)

    return (jax.checkpoint(remainder) if level.checkpoint else remainder)(*tails)


# The sinks, see `_loop/sinks.py`. States are carried; stored outputs leave the loop as rows.


@dataclasses.dataclass(frozen=True)
class _Tiles(Sink):
    """Folds tiles: outputs with the core axes first, then the tile, then the levels below."""

    steps: tuple[Accumulation | Storage, ...]
    tile: int
    levels_below: int
    lanes_below: int
    index_dtype: Any

    def start(self) -> list[Any]:
        return [step.start(self.tile * self.lanes_below) for step in self.steps]

    def step(self, carry: list[Any], chunk: list[Any], at: jax.Array) -> tuple[list[Any], Any]:
        first = at.astype(self.index_dtype) * np.asarray(self.lanes_below, self.index_dtype)
        index = first + counted(self.tile * self.lanes_below, self.index_dtype)
        outs = [lax.collapse(out, out.ndim - 1 - self.levels_below) for out in chunk]
        both = zip(self.steps, carry, strict=True)
        pairs = [step.step(state, outs, index) for step, state in both]
        return [state for state, _ in pairs], [row for _, row in pairs]

    def end(self, carry: list[Any], rows: list[Any]) -> list[Any]:
        triples = zip(self.steps, carry, rows, strict=True)
        return [step.join(step.end(state, row)) for step, state, row in triples]

    def single(self, chunk: list[Any], at: jax.Array) -> list[Any]:
        """Return the states after one tile alone."""
        carry, rows = self.step(self.start(), chunk, at)
        return self.end(carry, jax.tree.map(lambda x: lax.expand_dims(x, (0,)), rows))


@dataclasses.dataclass(frozen=True)
class _States(Sink):
    """Merges the states of inner loops, which arrive one at a time, flat, on axis 0."""

    steps: tuple[Accumulation | Storage, ...]
    structure: Any
    each: int  # the items of one inner loop
    index_dtype: Any

    def start(self) -> list[Any]:
        return [step.start(1) for step in self.steps]

    def step(self, carry: list[Any], chunk: list[Any], at: jax.Array) -> tuple[list[Any], Any]:
        inner = self.structure.unflatten([lax.squeeze(x, (0,)) for x in chunk])
        offset = at.astype(self.index_dtype) * np.asarray(self.each, self.index_dtype)
        triples = zip(self.steps, carry, inner, strict=True)
        pairs = [step.step_merge(state, new, offset) for step, state, new in triples]
        return [state for state, _ in pairs], [row for _, row in pairs]

    def end(self, carry: list[Any], rows: list[Any]) -> list[Any]:
        triples = zip(self.steps, carry, rows, strict=True)
        return [step.end(state, row) for step, state, row in triples]
