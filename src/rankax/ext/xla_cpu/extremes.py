# SPDX-License-Identifier: MIT
"""Extremes in tiles: accumulators that compare less, or later, with the same results.

Tests: ``tests/reduce/test_best_tile.py`` and ``tests/xla_cpu/test_extremes.py``.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import counted, scalar
from rankax.core.loop.loop import Sink, Tile
from rankax.core.plan.schedule import Chunks
from rankax.core.reduce.extrema import Arg, no_index
from rankax.core.reduce.row import Accumulation, State, in_a_row
from rankax.ext.equations import FUNCTIONS, operations
from rankax.ext.reductions.top import Top, concatenated

_MOST_IN_SLOTS = 8  # entries of `TopOfSlots`
_MOST_ITEMS_OF_A_SLOT = 8  # of each tile in `BlockArg`
_CALLS_OF_C = {"acos", "asin", "atan", "atan2", "cos", "pow", "sin", "tan"}  # number by number


def in_tiles(step: Accumulation, jaxpr: Jaxpr, *, again: bool) -> Accumulation:
    """Return a step as tiles enter it; its joined states are those of the step itself.

    ``again``: a `BlockArg` may be returned, and its tile is evaluated again, unless the program of
    an item has effects.
    """
    old, tiled = step.accumulator, None
    if isinstance(old, Top) and old.has_floats:
        return TopOfGroups(step.outputs, old, step.mask)
    if isinstance(old, Top) and old.k <= _MOST_IN_SLOTS:
        tiled = TopOfSlots
    elif isinstance(old, Arg) and not old.some:
        names = {operation.name for operation in operations(jaxpr)}
        is_cheap = not (names & FUNCTIONS or old.core or jaxpr.effects)
        tiled = DelayedArg if names & _CALLS_OF_C else BlockArg if again and is_cheap else None
    if step.is_wide or tiled is None:
        return step
    return dataclasses.replace(step, accumulator=tiled(**vars(old)))


class DelayedArg(Arg):
    """`Arg` that compares each tile in the next step, from the carry of the loop.

    `Arg.step` uses the items twice, for the value and for the index. XLA:CPU (JAX 0.12) can
    fuse a kernel of one operand into both, and so evaluates it twice; it drops an optimization
    barrier before it fuses. The carry is an array in memory, which is computed once. It costs about
    as much as a cheap kernel, so only those that call the C library number by number are delayed:
    on one core, the loop takes 0.53 times as long for ``jnp.sin``, and as long for the haversine
    formula, which is not fused twice.
    Test: ``test_without_the_rule_it_is_evaluated_twice``.
    """

    def start(self, slots: int) -> State:
        # No item is worse than those of the tile before the first.
        best, at = super().start(slots)
        return (best, at), best, scalar(0, self.index_dtype)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        return self._compared(state), tile, lax.index_in_dim(index, 0, keepdims=False)

    def join(self, state: State) -> State:
        return super().join(self._compared(state))

    def _compared(self, state: State) -> State:
        before, tile, first = state
        return super().step(before, tile, first + counted(tile.shape[-1], self.index_dtype))


class BlockArg(Arg):
    """`Arg` that only remembers in which tile the best item is, which is then evaluated again.

    A slot takes several items of each tile, the best of which it compares once: the loop costs
    little more than one for the value, a third of `Arg` (10,000 x 10,000 squared distances).
    """

    def start(self, slots: int) -> State:
        items = next(n for n in range(_MOST_ITEMS_OF_A_SLOT, 0, -1) if slots % n == 0)
        return super().start(slots // items)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        pick = jnp.max if self.largest else jnp.min
        best = pick(jnp.reshape(tile, (-1, state[0].size)), axis=0)
        return self.merge(state, (best, jnp.broadcast_to(index[0], best.shape)))

    def found(self, row: Any, step: Accumulation, state: State) -> State:
        (_, (first,)), (level, *below) = state, row.levels
        size = level.chunks.size
        place = first // math.prod(inner.chunks.length for inner in below)
        leaves = [
            leaf if axis is None else lax.dynamic_slice_in_dim(leaf, place, size, axis)
            for leaf, axis in zip(row.leaves, level.in_axes, strict=True)
        ]
        alone = dataclasses.replace(level, chunks=Chunks(size, size, 1), is_loop=False)
        tile = dataclasses.replace(row, leaves=tuple(leaves), levels=(alone, *below))
        return self.in_tile(step.taken(tile.whole().__getitem__, None), first)

    def in_tile(self, tile: jax.Array, first: jax.Array) -> State:
        """Return the state after one tile alone, whose first item has the index ``first``."""
        index = counted(tile.size, self.index_dtype)
        best, _ = self.join(self.step(self.start(tile.size), tile, index))
        none = scalar(no_index(self.index_dtype), self.index_dtype)
        at = jnp.min(jnp.where(tile == best, index, none))
        place = jnp.argmax if self.largest else jnp.argmin
        # None equals NaN, or an item that XLA computes twice, with different rounding.
        at = lax.cond(at == none, lambda: place(tile).astype(at.dtype), lambda: at)
        return best, jnp.expand_dims(at + first, 0)


class TopOfGroups(Accumulation):
    """`Top` of many items at a time: those of a group of steps, which are stored until its end.

    To merge a large state with each tile takes longer than to evaluate the tile: 500 of 200,000
    numbers take 7 ms that way, and 2.3 in groups.
    """

    accumulator: Top

    @property
    def in_groups(self) -> bool:
        return True

    @property
    def of_group(self) -> Sink:
        return _Entries(self)

    def fresh(self, held: State, slots: int) -> None:
        """Return no carry."""

    def with_group(self, held: State, of_group: None, rows: State) -> State:
        return self.accumulator.merge(held, jax.tree.map(in_a_row, rows))


@dataclasses.dataclass(frozen=True)
class _Entries(Sink):
    """Stores an entry for each item."""

    step_of: TopOfGroups

    def step(self, held: None, tile: Tile) -> tuple[None, State]:
        items, counts = self.step_of.items(tile)
        return None, self.step_of.accumulator.entries(items, tile.index, counts)


class TopOfSlots(Top):
    """`Top` for a small ``k``: each slot has ``k`` entries of its own, best first.

    `jax.lax.top_k` of integers takes 130 to 300 ns an item, for any small ``k``, and these
    comparisons take 7 ns for ``k = 1``, 33 for 4 and 94 for 8. Tiles are compared in the next step,
    as those of `DelayedArg` are; otherwise it takes three times as long. A joined state is one of
    `Top`.
    """

    def start(self, slots: int) -> State:
        return [self.empty(slots)] * self.k, self.empty(slots)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        return self._compared(*state), self.entries(tile, index, counts)

    def join(self, state: State) -> State:
        entries = zip(*self._compared(*state), strict=True)
        keys, index = (lax.concatenate(x, x[0].ndim - 1) for x in entries)
        arg = Arg(self.core, self.dtype, self.index_dtype, self.largest)
        best: list[State] = []
        for _ in range(self.k):
            best.append(arg.join((keys, index)))
            is_best = functools.partial(jnp.where, index == best[-1][1])
            keys, index = map(is_best, self.empty(1), (keys, index))
        return functools.reduce(concatenated, best)

    def _compared(self, entries: list[State], new: State) -> list[State]:
        """Insert one entry in each slot.

        Each result depends on two entries only. XLA:CPU would repeat a longer chain for each of
        them.
        """
        chosen: list[State] = []
        before = new
        for old in entries:
            wins = (new[0] > old[0]) | ((new[0] == old[0]) & (new[1] < old[1]))
            pick = functools.partial(jnp.where, wins)
            chosen.append(jax.tree.map(pick, before, old))
            before = jax.tree.map(pick, old, new)
        return chosen
