# SPDX-License-Identifier: MIT
"""Accumulators: how the items of a tile enter a running state.

A state holds one value for each slot of a tile: item ``j`` of every tile goes into slot ``j``,
elementwise, and the slots are joined once, after the loop. A sum across the slots in every step
would cost more than the kernel itself: on two CPU cores, a sum of Gaussians over 10,000 x 10,000
points took 0.6 to 1 s that way, and takes 0.1 s with one accumulator for each slot. Only outputs of
more than 16 numbers are joined in every step, because their slots would not fit the cache
(`Accumulation.is_wide`).

The slots are the last axis of each array of a state; the other axes are the core axes of an output.
The states of several runs of items are slots, too: `join_runs` merges them (`passes.py`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax.core.base.arrays import scalar
from rankax.core.loop.loop import Sink, Tile

State = Any  # a pytree of arrays, each with the slots on the last axis

_MOST_PER_SLOT = 16  # numbers; larger slots would not fit the cache together


class Accumulator(Protocol):
    """The fold of one output, or of all outputs of one reduction (`Ordered`)."""

    #: The shape of the output, if each slot has such a state.
    core: tuple[int, ...]

    #: Whether an item may be added twice.
    may_repeat = False

    def start(self, slots: int) -> State:
        """Return the state of no items."""

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        """Add one tile; ``index`` holds the flat index of its item in each slot.

        ``counts``: which items count; `nothing` is already in place of the others.
        """

    def nothing(self) -> Any:
        """Return the outputs of an item that adds nothing; None if `step` needs ``counts``."""

    def merge(self, first: State, second: State) -> State:
        """Merge two states slot by slot; the items of the first come before the others."""

    def join(self, state: State) -> State:
        """Merge the slots of a state into one. Only the slots of `Ordered` must be in order."""

    def found(self, row: Any, step: "Accumulation", state: State) -> State:
        """Complete the joined state of a `Row`, if `step` has put off some of the work."""
        return state

    def join_runs(self, states: State) -> State:
        """Merge the states of runs, which are on axis 0 of each array, into one."""
        return self.join(jax.tree.map(_in_a_row, states))

    def renumber(self, state: State, place: Callable[[jax.Array], jax.Array]) -> State:
        """Replace each index in a state by its ``place``."""
        return state


# What a loop over a reduced level does with the outputs of its items.


@dataclasses.dataclass(frozen=True)
class Accumulation(Sink):
    """An accumulator, and the output of an item that it takes, or several as a tuple."""

    outputs: int | tuple[int, ...]
    accumulator: Accumulator
    mask: int | None = None  # the output that says whether the item counts

    @property
    def is_wide(self) -> bool:
        """Whether the slots of each tile are joined at once because their states are large."""
        return math.prod(self.accumulator.core) > _MOST_PER_SLOT

    def taken(self, outs: Callable[[int], Any], counts: jax.Array | None) -> Any:
        """Return the outputs that it takes of an item or a tile, or `nothing` in their place."""
        tile = jax.tree.map(outs, self.outputs)
        nothing = self.accumulator.nothing()
        return tile if counts is None or nothing is None else choose(counts, tile, nothing)

    def start(self, slots: int) -> State:
        return self.accumulator.start(1 if self.is_wide else slots)

    def step(self, held: State, tile: Tile) -> tuple[State, None]:
        accumulator = self.accumulator
        counts = None if accumulator.may_repeat else tile.new
        if self.mask is not None:
            mask = tile.in_slots(self.mask)
            counts = mask if counts is None else mask & counts
        items = self.taken(tile.in_slots, counts)
        if not self.is_wide:
            return accumulator.step(held, items, tile.index, counts), None
        fresh = accumulator.step(accumulator.start(tile.slots.count), items, tile.index, counts)
        return accumulator.merge(held, accumulator.join(fresh)), None

    def end(self, held: State, rows: Any) -> State:
        return self.accumulator.join(held)


@dataclasses.dataclass(frozen=True)
class Merged(Sink):
    """Merges the states of inner loops, each over ``each`` items."""

    position: int
    accumulator: Accumulator
    each: int

    def start(self, slots: int) -> State:
        return self.accumulator.start(1)

    def step(self, held: State, tile: Tile) -> tuple[State, None]:
        dtype = tile.slots.dtype
        offset = tile.at.astype(dtype) * np.asarray(self.each).astype(dtype)
        placed = self.accumulator.renumber(
            tile.outs[self.position], lambda index: index + offset.astype(index.dtype)
        )
        return self.accumulator.merge(held, placed), None

    def end(self, held: State, rows: Any) -> State:
        return held


def _in_a_row(rows: jax.Array) -> jax.Array:
    """Move axis 0 into the slots."""
    return lax.collapse(jnp.moveaxis(rows, 0, -2), rows.ndim - 2)


def fill(value: Any, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return `jax.numpy.full`, by an explicit transfer."""
    return lax.broadcast(scalar(value, dtype), shape)


def choose(slots: jax.Array, new: State, old: State) -> State:
    """Return ``new`` in some slots, and ``old``, which may have no slots, in the others."""

    # Differentiated, `jnp.where` stores which of two it chose for each number of an item; a
    # checkpoint stores that once for each item.
    def each(slots: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        is_new = lax.expand_dims(slots, range(new.ndim - slots.ndim))
        old = lax.expand_dims(old, range(old.ndim, new.ndim))
        return jnp.where(is_new, new.astype(old.dtype), old)

    once = jax.checkpoint(each, prevent_cse=False)
    return jax.tree.map(lambda *own: once(slots, *own), new, old)


# The accumulators.

_IDEMPOTENT = (lax.max, lax.min, lax.bitwise_or, lax.bitwise_and)


@dataclasses.dataclass(frozen=True)
class InSlots(Accumulator):
    """An accumulator that has a state of the shape of its output in each slot."""

    core: tuple[int, ...]
    dtype: Any  # of the computation

    def full(self, value: Any, dtype: Any, slots: int) -> jax.Array:
        """Return an array of one number."""
        return fill(value, dtype, (*self.core, slots))


@dataclasses.dataclass(frozen=True)
class Elementwise(InSlots):
    """One associative and commutative function of two arrays, such as `jax.numpy.maximum`."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis, such as `jax.numpy.max`

    @property
    def may_repeat(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.combine in _IDEMPOTENT

    def start(self, slots: int) -> State:
        return self.full(self.identity, self.dtype, slots)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        return self.combine(state, tile.astype(self.dtype))

    def nothing(self) -> jax.Array:
        return scalar(self.identity, self.dtype)

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        return self.reduce(state, axis=-1, keepdims=True).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Ordered(Accumulator):
    """Any monoid, whose items are merged in order.

    Its states have one slot, on axis 0 of each leaf: the items of a tile are merged in pairs of
    neighbours until one is left.
    """

    identity: Any  # a pytree of NumPy arrays
    combine: Callable[[Any, Any], Any]  # of states with slots on axis 0

    core = ()

    def start(self, slots: int) -> State:
        return jax.tree.map(lambda x: jax.device_put(x[None]), self.identity)

    def nothing(self) -> Any:
        return jax.tree.map(jax.device_put, self.identity)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        slots_first = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tile)
        return self.merge(state, self.join(slots_first))

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        count = jax.tree.leaves(state)[0].shape[0]
        while count > 1:
            even = count // 2 * 2
            pairs = [_slice(state, start, even, 2) for start in range(2)]
            merged, rest = self.combine(*pairs), _slice(state, even, count)
            state = jax.tree.map(lambda a, b: lax.concatenate([a, b], 0), merged, rest)
            count -= count // 2
        return state

    def join_runs(self, states: State) -> State:
        return self.join(jax.tree.map(lambda x: lax.collapse(x, 0, 2), states))


def _slice(tree: Any, start: int, stop: int, step: int = 1) -> Any:
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, step), tree)
