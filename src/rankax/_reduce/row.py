# SPDX-License-Identifier: MIT
"""A row: the items along the reduced axes, for one item of the kept axes.

A nest of loops evaluates a row. At most one level of the nest is cut into tiles: the levels inside
it fit a tile whole and are mapped; those around it are evaluated item by item. Each loop returns
its states with the lanes joined, and the loop around it merges them.

On a CPU, a tile has at most 1024 items (`most_lanes`), so that it fits the cache. The last tile
overlaps the one before it if no tile divides the level. Items that were counted before add nothing
and send nothing back (`rankax._loop.store.without_repeated`). A smaller tile for what is left would
be a second copy of the kernel: it would double the time to trace and compile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rankax._base.arrays import counted, index_dtype, scalar
from rankax._lockstep.call import in_lockstep, walk_in_lanes
from rankax._loop.keys import PLACE, vmap_level
from rankax._loop.loop import KEPT_IN_REVERSE, SinksOf, run_loop
from rankax._loop.spec import LoopSpec, places_of
from rankax._loop.store import Sink, Store, Tile, TileLanes
from rankax._plan.chunks import Chunks
from rankax._reduce.extrema import BlockArg, in_tiles
from rankax._reduce.states import Accumulation, Merged, Ordered, Whole

Steps = Sequence[Accumulation | Whole]
_STEPS_PER_TILE_AGAIN = 8  # a row has at least so many steps for each tile that is evaluated again


def most_lanes() -> int | None:
    """Return how many items a tile has at most; None: as many as may be in flight.

    On a CPU, the tile should fit the cache, and XLA:CPU of JAX 0.10 and 0.12 is slow at reductions
    of more than some thousand numbers.
    """
    return 1024 if jax.default_backend() == "cpu" else None


class RowMask(NamedTuple):
    """Which items of a row count, where one that does not is differentiated as if it did."""

    counts: Callable[..., jax.Array]  # of one item
    number: Any  # of the items that count


@dataclasses.dataclass(frozen=True)
class Row:
    """The items of one row, not yet evaluated."""

    item: Callable[..., list[jax.Array]]  # from one item of each leaf to its outputs
    leaves: tuple[Any, ...]
    levels: tuple[LoopSpec, ...]
    count_of_outputs: int
    is_expensive: bool = False  # see `_trace.work.evaluates_functions`
    pure: bool = False  # whether items may be evaluated again
    back: bool = False  # whether it is differentiated
    mask: RowMask | None = None

    @property
    def size(self) -> int:
        """The number of items."""
        return math.prod(level.chunks.length for level in self.levels)

    @property
    def count(self) -> Any:
        """The number of items that count: all, but see `passes.py`."""
        return self.size if self.mask is None else self.mask.number

    @property
    def is_whole(self) -> bool:
        """Whether the row fits one tile."""
        return not any(level.is_loop or level.lanes for level in self.levels)

    def then(self, fun: Callable[[list[jax.Array]], jax.Array]) -> Row:
        """Return the row whose items have one output, ``fun`` of the outputs that they have now."""
        item = self.item
        return dataclasses.replace(
            self, item=lambda *leaves: [fun(item(*leaves))], count_of_outputs=1
        )

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

        row = dataclasses.replace(self, item=constant, back=False)
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
        if self.mask is not None:
            row, steps = _that_count(self, self.mask, steps)
            return row.fold(steps, linear=linear)
        if self.is_whole or not self.size:
            return self._at_once(steps)
        if (lanes := self.levels[0].lanes) is not None:
            if self.back:
                return _fold_in_lockstep(self, steps, linear=linear)
            return self._in_lanes(steps, min(lanes, self.size, most_lanes() or lanes))
        at = max(i for i, level in enumerate(self.levels) if level.is_loop)
        around, below = self.levels[:at], self.levels[at + 1 :]
        level = dataclasses.replace(self.levels[at], linear=linear)
        fun = self._tiles(steps, level, below)
        each = level.chunks.length * math.prod(level.chunks.length for level in below)
        for level in reversed(around):
            fun = self._item_by_item(fun, steps, level, each)
            each *= level.chunks.length
        return fun(*self.leaves)

    def _at_once(self, steps: Steps) -> list[Any]:
        """Return the states of a row that is one tile, or empty."""
        outs, dtype = self.whole(), index_dtype(self.size)
        last = [jnp.moveaxis(out, 0, -1) for out in outs]
        tile = Tile(last, scalar(0, dtype), None, TileLanes(self.size, (), dtype))

        def state(step: Accumulation | Whole) -> Any:
            if isinstance(step, Whole):
                return self.split(outs[step.output])
            held = step.start(max(self.size, 1))
            return step.end(step.step(held, tile)[0] if self.size else held, None)

        return list(map(state, steps))

    def _tiles(
        self, steps: Steps, level: LoopSpec, below: Sequence[LoopSpec]
    ) -> Callable[..., list[Any]]:
        """Return the loop over the tiles of one level; the levels ``below`` are mapped."""
        kept = {step.output for step in steps if isinstance(step, Whole)}
        again = not level.numbered and level.chunks.steps >= _STEPS_PER_TILE_AGAIN
        settings = {"is_expensive": self.is_expensive, "again": self.pure and again}
        own = [step if isinstance(step, Whole) else in_tiles(step, **settings) for step in steps]
        folds = _sinks_of(own, back=self.back, reduced=True)

        def loop(*leaves: Any) -> list[Any]:
            count = self.count_of_outputs
            # Outputs that are folded have the items of the levels on their last axes, in order.
            item = self.item
            for place, inner in enumerate(reversed(below), start=1):
                axes = [0 if i in kept else -place for i in range(count)]
                size, numbered = inner.chunks.length, inner.numbered
                item = vmap_level(item, inner.in_axes, size, axes, numbered=numbered)
            axes = [0 if i in kept else -len(below) - 1 for i in range(count)]
            sizes, dtype = tuple(inner.chunks.length for inner in below), index_dtype(self.size)
            states = run_loop(
                item, leaves, level, axes, folds, back=self.back, below=sizes, index_dtype=dtype
            )
            row = dataclasses.replace(self, leaves=tuple(leaves), levels=(level, *below))
            return [_found(row, *pair) for pair in zip(own, states, strict=True)]

        return loop

    def _item_by_item(
        self, fun: Callable[..., list[Any]], steps: Steps, level: LoopSpec, each: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over one level whose items are loops themselves."""
        length = level.chunks.length
        one_by_one = dataclasses.replace(level, chunks=Chunks(length, 1, length), checkpoint=False)
        axes = [0 if isinstance(step, Whole) else None for step in steps]
        own = [
            Whole(i) if isinstance(step, Whole) else Merged(i, step.accumulator, each)
            for i, step in enumerate(steps)
        ]
        folds, dtype = _sinks_of(own, back=self.back), index_dtype(self.size)
        return lambda *leaves: run_loop(
            fun, leaves, one_by_one, axes, folds, back=self.back, index_dtype=dtype
        )

    def _in_lanes(self, steps: Steps, tile: int) -> list[Any]:
        """Fold a row whose items end by themselves."""
        folds, dtype = _sinks_of(steps, in_lanes=True), index_dtype(self.size)
        states = walk_in_lanes(self.item, self.leaves, self.levels, None, folds, tile, dtype)
        return [
            self.split(state) if isinstance(step, Whole) else state
            for step, state in zip(steps, states, strict=True)
        ]


def _found(row: Row, step: Accumulation | Whole, state: Any) -> Any:
    """Evaluate the tile of the best item again, if the tile is all that the step remembers."""
    if isinstance(step, Whole) or not isinstance(step.accumulator, BlockArg):
        return state
    (_, (first,)), (level, *below) = state, row.levels
    size = level.chunks.size
    place = first // math.prod(inner.chunks.length for inner in below)
    leaves = [
        leaf if axis is None else lax.dynamic_slice_in_dim(leaf, place, size, axis)
        for leaf, axis in zip(row.leaves, level.in_axes, strict=True)
    ]
    alone = dataclasses.replace(level, chunks=Chunks(size, size, 1), is_loop=False)
    tile = dataclasses.replace(row, leaves=tuple(leaves), levels=(alone, *below))
    return step.accumulator.in_tile(step.taken(tile.whole().__getitem__, None), first)


def _fold_in_lockstep(row: Row, steps: Steps, *, linear: bool) -> list[Any]:
    """Fold a row whose items end by themselves, to be differentiated."""
    accumulators = [step.accumulator for step in steps if isinstance(step, Accumulation)]
    is_ordered = any(isinstance(accumulator, Ordered) for accumulator in accumulators)
    loop = in_lockstep(row.item, row.leaves, row.levels, sort=not is_ordered)
    tiles = dataclasses.replace(row, item=loop.fun, leaves=tuple(loop.leaves), levels=(loop.level,))
    return [
        row.split(loop.stored(state)) if isinstance(step, Whole) else state
        for step, state in zip(steps, tiles.fold(steps, linear=linear), strict=True)
    ]


def _that_count(row: Row, mask: RowMask, steps: Steps) -> tuple[Row, Steps]:
    """Return a row without a mask, and steps to which an item that is left out adds nothing."""
    accumulations = [step for step in steps if isinstance(step, Accumulation)]

    def item(*leaves: Any) -> list[jax.Array]:
        # The loop itself would store the mask of each item for the derivative.
        outs, counts = row.item(*leaves), mask.counts(*leaves)
        for step in accumulations:
            taken = step.taken(outs.__getitem__, counts)
            for position, out in zip(*map(jax.tree.leaves, (step.outputs, taken)), strict=True):
                outs[position] = out
        # In place of the mask of the item that may have been evaluated instead.
        return [*outs, counts]

    own = row.count_of_outputs
    masks = [None if x.accumulator.nothing() is not None else own for x in accumulations]
    pairs = zip(accumulations, masks, strict=True)
    changed = dataclasses.replace(row, item=item, count_of_outputs=own + 1, mask=None)
    return changed, [dataclasses.replace(x, mask=at) for x, at in pairs]


def _sinks_of(steps: Sequence[Sink | Whole], **settings: bool) -> SinksOf:
    """Return what becomes of the outputs of a chunk: those that are kept whole are stored."""

    def sinks(outs: Sequence[Any], chunks: Chunks) -> list[Sink]:
        return [
            Store.of(outs, step.output, 0, chunks, **settings) if isinstance(step, Whole) else step
            for step in steps
        ]

    return sinks
