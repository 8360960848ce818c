# SPDX-License-Identifier: MIT
"""A row: the items along the reduced axes, for one item of the kept axes.

A nest of loops evaluates a row. At most one level of the nest is cut into tiles: the levels inside
it fit a tile whole and are mapped; those around it are evaluated item by item. Each loop returns
its states with the slots joined, and the loop around it merges them.

The last tile overlaps the one before it if no tile divides the level. Items that were counted
before add nothing and send nothing back (`rankax.core.loop.loop.without_repeated`). A smaller tile
for what is left would be a second copy of the kernel: it would double the time to trace and
compile.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import counted, index_dtype, scalar, zeros
from rankax.core.hooks import Rules
from rankax.core.loop.loop import Tile, TileSlots, ends_of, run_loop, saved, sinks_of, steps_of
from rankax.core.loop.spec import LoopSpec, items_at, vmap_level
from rankax.core.plan.schedule import Chunks
from rankax.core.reduce.states import Accumulation, Merged

Steps = Sequence[Accumulation]
_STEPS_PER_TILE_AGAIN = 8  # a row has at least so many steps for each tile that is evaluated again


@dataclasses.dataclass(frozen=True)
class Row:
    """The items of one row, not yet evaluated."""

    item: Callable[..., list[jax.Array]]  # from one item of each leaf to its outputs
    leaves: tuple[Any, ...]
    levels: tuple[LoopSpec, ...]
    jaxpr: Jaxpr  # the program of an item
    rules: Rules
    count_of_outputs: int
    back: bool = False  # whether it is differentiated
    picks: bool = False  # whether a reduction of all items at once evaluates the chosen ones again
    # Set only if items that are left out are differentiated as a stand-in: which ones count, and
    # how many do.
    counts: Callable[..., jax.Array] | None = None
    number: Any = None

    @property
    def size(self) -> int:
        """The number of items."""
        return math.prod(level.chunks.length for level in self.levels)

    @property
    def count(self) -> Any:
        """The number of items that count: all, but see `passes.py`."""
        return self.size if self.counts is None else self.number

    def then(self, *funs: Callable[[list[jax.Array]], jax.Array]) -> Self:
        """Return the row whose items have one output for each function of those they have now."""
        item = self.item

        def then(*leaves: Any) -> list[jax.Array]:
            outs = item(*leaves)
            return [fun(outs) for fun in funs]

        return dataclasses.replace(self, item=then, count_of_outputs=len(funs))

    def at(self, index: Any) -> list[jax.Array]:
        """Evaluate the item with this flat index; return zeros if the row is empty."""
        if not self.size:
            avals: list[Any] = [v.aval for v in self.jaxpr.outvars]
            return [zeros(aval.shape, aval.dtype) for aval in avals]
        return self.item(*items_at(self.leaves, index, self.levels))

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
            item = vmap_level(item, level)
        count = len(self.levels)
        return [jnp.reshape(x, (self.size, *x.shape[count:])) for x in item(*self.leaves)]

    def split(self, array: jax.Array) -> jax.Array:
        """Cut axis 0, the row, into the axes of its levels."""
        shape = [level.chunks.length for level in self.levels]
        return lax.reshape(array, (*shape, *array.shape[1:]))

    def fold_constants(self, steps: Steps) -> list[Any]:
        """Return the states as constants, for results that have no derivative.

        The reverse pass keeps them instead of folding the row again.
        """
        item = self.item

        def constant(*leaves: Any) -> list[jax.Array]:
            return [lax.stop_gradient(out) for out in item(*map(lax.stop_gradient, leaves))]

        levels = self.levels
        if getattr(jax.config, "jax_remat3", False):
            # A checkpoint makes tangents of zeros there, and a maximum of slots makes NaN of those.
            # Elsewhere, two loops with a checkpoint share a copy of the inputs.
            levels = tuple(dataclasses.replace(level, checkpoint=False) for level in levels)
        row = dataclasses.replace(self, item=constant, levels=levels, back=False)
        return saved(row.fold(steps))

    def fold(self, steps: Steps, kept: Sequence[int] = (), *, linear: bool = True) -> list[Any]:
        """Return the state of each step after all items, with its slots joined.

        ``kept``: the outputs that are returned whole after the states. ``linear``: a derivative
        needs no state. Otherwise one is stored for each tile.
        """
        if self.counts is not None:
            row, steps = _that_count(self, self.counts, steps)
            return row.fold(steps, kept, linear=linear)
        if not self.size or not any(level.is_loop or level.walker for level in self.levels):
            return self._at_once(steps, kept)
        if (walker := self.levels[0].walker) is not None:
            return walker.fold(self, steps, kept, linear=linear)
        at = max(i for i, level in enumerate(self.levels) if level.is_loop)
        around, below = self.levels[:at], self.levels[at + 1 :]
        level = dataclasses.replace(self.levels[at], linear=linear)
        fun = self._tiles(steps, kept, level, below)
        each = math.prod(level.chunks.length for level in self.levels[at:])
        for level in reversed(around):
            fun = self._item_by_item(fun, steps, len(kept), level, each)
            each *= level.chunks.length
        return fun(*self.leaves)

    def _at_once(self, steps: Steps, kept: Sequence[int]) -> list[Any]:
        """Return the states of a row that is one tile, or empty."""
        outs, dtype = self.whole(), index_dtype(self.size)
        last = [jnp.moveaxis(out, 0, -1) for out in outs]
        tile = Tile(last, scalar(0, dtype), None, TileSlots(self.size, (), dtype))
        held = [step.start(max(self.size, 1)) for step in steps]
        if self.size:
            held, _ = steps_of(steps, held, tile)
        return [*ends_of(steps, held, held), *(self.split(outs[i]) for i in kept)]

    def _tiles(
        self, steps: Steps, kept: Sequence[int], level: LoopSpec, below: Sequence[LoopSpec]
    ) -> Callable[..., list[Any]]:
        """Return the loop over the tiles of one level; the levels ``below`` are mapped."""
        again = not level.numbered and level.chunks.steps >= _STEPS_PER_TILE_AGAIN
        own = [self.rules.folded(step, self.jaxpr, again=again) for step in steps]
        folds = sinks_of(own, kept, back=self.back, reduced=True)

        def loop(*leaves: Any) -> list[Any]:
            # Outputs that are folded have the items of the levels on their last axes, in order.
            def axes(place: int) -> list[int]:
                return [0 if i in kept else -place for i in range(self.count_of_outputs)]

            item = self.item
            for place, inner in enumerate(reversed(below), start=1):
                item = vmap_level(item, inner, axes(place))
            place, sizes = len(below) + 1, tuple(inner.chunks.length for inner in below)
            slots = {"below": sizes, "index_dtype": index_dtype(self.size)}
            states = run_loop(item, leaves, level, axes(place), folds, back=self.back, **slots)
            row = dataclasses.replace(self, leaves=tuple(leaves), levels=(level, *below))
            pairs = zip(own, states, strict=False)
            found = [step.accumulator.found(row, step, state) for step, state in pairs]
            return [*found, *states[len(own) :]]

        return loop

    def _item_by_item(
        self, fun: Callable[..., list[Any]], steps: Steps, kept: int, level: LoopSpec, each: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over one level whose items are loops themselves."""
        length = level.chunks.length
        one_by_one = dataclasses.replace(level, chunks=Chunks(length, 1, length), checkpoint=False)
        own = [Merged(i, step.accumulator, each) for i, step in enumerate(steps)]
        axes = [*[None] * len(own), *[0] * kept]
        folds = sinks_of(own, range(len(own), len(axes)), back=self.back)
        return lambda *leaves: run_loop(
            fun, leaves, one_by_one, axes, folds, back=self.back, index_dtype=index_dtype(self.size)
        )


def _that_count(row: Row, counts: Callable[..., jax.Array], steps: Steps) -> tuple[Row, Steps]:
    """Return a row without a mask, and steps to which an item that is left out adds nothing."""

    def item(*leaves: Any) -> list[jax.Array]:
        # The loop itself would store the mask of each item for the derivative.
        outs, is_counted = row.item(*leaves), counts(*leaves)
        for step in steps:
            taken = step.taken(outs.__getitem__, is_counted)
            for position, out in zip(*map(jax.tree.leaves, (step.outputs, taken)), strict=True):
                outs[position] = out
        # Overwrites the mask: a left-out item was evaluated on the inputs of another one.
        return [*outs, is_counted]

    own = row.count_of_outputs
    changed = dataclasses.replace(row, item=item, count_of_outputs=own + 1, counts=None)
    masks = [own if step.accumulator.nothing() is None else None for step in steps]
    pairs = zip(steps, masks, strict=True)
    return changed, [dataclasses.replace(step, mask=mask) for step, mask in pairs]
