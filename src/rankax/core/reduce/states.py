# SPDX-License-Identifier: MIT
"""Accumulators: how the items of a tile enter a running state.

A state holds one value for each lane of a tile: item ``j`` of every tile goes into lane ``j``,
elementwise, and the lanes are joined once, after the loop. A sum across the lanes in every step
would cost more than the kernel itself: on two CPU cores, a sum of Gaussians over 10,000 x 10,000
points took 0.6 to 1 s that way, and takes 0.1 s with one accumulator for each lane. Only outputs of
more than 16 numbers are joined in every step, because their lanes would not fit the cache
(`Accumulation.is_wide`).

The lanes are the last axis of each array of a state; the other axes are the core axes of an output.
The states of several runs of items are lanes, too: `join_runs` merges them (`passes.py`).
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

State = Any  # a pytree of arrays, each with the lanes on the last axis

_MOST_PER_LANE = 16  # numbers; larger lanes would not fit the cache together


class Accumulator(Protocol):
    """The fold of one output, or of all outputs of one reduction (`Ordered`)."""

    #: The shape of the output, if each lane has such a state.
    core: tuple[int, ...]

    #: Whether an item may be added twice.
    may_repeat = False

    def start(self, lanes: int) -> State:
        """Return the state of no items."""

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        """Add one tile; ``index`` holds the flat index of its item in each lane.

        ``counts``: which items count; `nothing` is already in place of the others.
        """

    def nothing(self) -> Any:
        """Return the outputs of an item that adds nothing; None if `step` needs ``counts``."""

    def merge(self, first: State, second: State) -> State:
        """Merge two states lane by lane; the items of the first precede those of the second."""

    def join(self, state: State) -> State:
        """Merge the lanes of a state into one. Only the lanes of `Ordered` must be in order."""

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
        """Whether the lanes of each tile are joined at once because their states are large."""
        return math.prod(self.accumulator.core) > _MOST_PER_LANE

    def taken(self, outs: Callable[[int], Any], counts: jax.Array | None) -> Any:
        """Return the outputs that it takes of an item or a tile, or `nothing` in their place."""
        tile = jax.tree.map(outs, self.outputs)
        nothing = self.accumulator.nothing()
        return tile if counts is None or nothing is None else choose(counts, tile, nothing)

    def start(self, lanes: int) -> State:
        return self.accumulator.start(1 if self.is_wide else lanes)

    def step(self, held: State, tile: Tile) -> tuple[State, None]:
        accumulator = self.accumulator
        counts = None if accumulator.may_repeat else tile.new
        if self.mask is not None:
            mask = tile.in_lanes(self.mask)
            counts = mask if counts is None else mask & counts
        items = self.taken(tile.in_lanes, counts)
        if not self.is_wide:
            return accumulator.step(held, items, tile.index, counts), None
        fresh = accumulator.step(accumulator.start(tile.lanes.count), items, tile.index, counts)
        return accumulator.merge(held, accumulator.join(fresh)), None

    def end(self, held: State, rows: Any) -> State:
        return self.accumulator.join(held)


@dataclasses.dataclass(frozen=True)
class Merged(Sink):
    """Merges the states of inner loops, each over ``each`` items."""

    position: int
    accumulator: Accumulator
    each: int

    def start(self, lanes: int) -> State:
        return self.accumulator.start(1)

    def step(self, held: State, tile: Tile) -> tuple[State, None]:
        dtype = tile.lanes.dtype
        offset = tile.at.astype(dtype) * np.asarray(self.each).astype(dtype)
        placed = self.accumulator.renumber(
            tile.outs[self.position], lambda index: index + offset.astype(index.dtype)
        )
        return self.accumulator.merge(held, placed), None

    def end(self, held: State, rows: Any) -> State:
        return held


def _in_a_row(rows: jax.Array) -> jax.Array:
    """Move axis 0 into the lanes."""
    return lax.collapse(jnp.moveaxis(rows, 0, -2), rows.ndim - 2)


def concatenated(first: State, second: State) -> State:
    """Return the lanes of two states as those of one."""
    return jax.tree.map(lambda a, b: lax.concatenate([a, b], a.ndim - 1), first, second)


def fill(value: Any, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return `jax.numpy.full`, by an explicit transfer."""
    return lax.broadcast(scalar(value, dtype), shape)


def choose(lanes: jax.Array, new: State, old: State) -> State:
    """Return ``new`` in some lanes, and ``old``, which may have no lanes, in the others."""

    # Differentiated, `jnp.where` stores which of two it chose for each number of an item; a
    # checkpoint stores that once for each item.
    def each(lanes: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        is_new = lax.expand_dims(lanes, range(new.ndim - lanes.ndim))
        old = lax.expand_dims(old, range(old.ndim, new.ndim))
        return jnp.where(is_new, new.astype(old.dtype), old)

    once = jax.checkpoint(each, prevent_cse=False)
    return jax.tree.map(lambda *own: once(lanes, *own), new, old)


# The accumulators.

_IDEMPOTENT = (lax.max, lax.min, lax.bitwise_or, lax.bitwise_and)


@dataclasses.dataclass(frozen=True)
class InLanes(Accumulator):
    """An accumulator that has a state of the shape of its output in each lane."""

    core: tuple[int, ...]
    dtype: Any  # of the computation

    def full(self, value: Any, dtype: Any, lanes: int) -> jax.Array:
        """Return an array of one number."""
        return fill(value, dtype, (*self.core, lanes))


@dataclasses.dataclass(frozen=True)
class Elementwise(InLanes):
    """One associative and commutative function of two arrays, such as `jax.numpy.maximum`."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis, such as `jax.numpy.max`

    @property
    def may_repeat(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.combine in _IDEMPOTENT

    def start(self, lanes: int) -> State:
        return self.full(self.identity, self.dtype, lanes)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        return self.combine(state, tile.astype(self.dtype))

    def nothing(self) -> jax.Array:
        return scalar(self.identity, self.dtype)

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        return self.reduce(state, axis=-1, keepdims=True).astype(self.dtype)


class LogSumExpOf(InLanes):
    """The largest real part so far, and the sum of the exponentials relative to it."""

    def start(self, lanes: int) -> State:
        # The smallest number instead of -inf, because -inf - -inf is NaN.
        real = jnp.finfo(self.dtype)
        return self.full(real.min, real.dtype, lanes), self.full(0, self.dtype, lanes)

    def nothing(self) -> jax.Array:
        return scalar(-jnp.inf, self.dtype)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        x = tile.astype(self.dtype)
        scaled = jnp.ones_like(x)  # the exponential of an item relative to its real part
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            turned = jnp.exp(lax.complex(jnp.zeros_like(x.real), x.imag))
            scaled = jnp.where(x.real == -jnp.inf, jnp.zeros_like(x), turned)
        return self.merge(state, (x.real, scaled))

    def merge(self, first: State, second: State) -> State:
        (m, a), (n, b) = first, second
        # One exponential serves both cases, because that of the larger is 1.
        ratio = jnp.exp(-jnp.abs(_difference(n, m))).astype(self.dtype)
        return jnp.maximum(m, n), jnp.where(n > m, a * ratio + b, a + b * ratio)

    def join(self, state: State) -> State:
        largest, total = state
        top = jnp.max(largest, axis=-1, keepdims=True)
        scaled = total * jnp.exp(_difference(largest, top)).astype(self.dtype)
        return top, jnp.sum(scaled, axis=-1, keepdims=True)


def _difference(x: Any, y: Any) -> Any:
    """Return ``x - y``, and 0 for two equal infinities."""
    return jnp.where(x == y, jnp.zeros_like(x), x - y)


class MomentsOf(InLanes):
    """Count, mean, and the sum of squared distances from it.

    They merge by the formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise
    algorithm for computing sample variances", 1979). Welford's step is a special case. No large
    numbers are subtracted from each other. An infinite mean stays infinite, and a state of no items
    changes nothing.
    """

    def start(self, lanes: int) -> State:
        real = jnp.finfo(self.dtype).dtype
        count = fill(0, real, (lanes,))
        return count, self.full(0, self.dtype, lanes), self.full(0, real, lanes)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        count, mean, squares = state
        x = tile.astype(self.dtype)
        count = count + 1
        off = x - _finite(mean)
        mean = mean + off / self._like_items(count, mean)
        new = count, mean, squares + jnp.real(off * jnp.conj(x - mean))
        return new if counts is None else choose(counts, new, state)

    def merge(self, first: State, second: State) -> State:
        (n, mean, squares), (m, other, more) = first, second
        count = n + m
        share = m / jnp.maximum(count, 1)
        off = other - _finite(mean)
        mean = mean + off * self._like_items(share, mean)
        return count, mean, squares + more + self._squares(n * share, off)

    def join(self, state: State) -> State:
        count, mean, squares = state
        total = jnp.sum(count, axis=-1, keepdims=True)
        # Relative to one lane, so that no large numbers are added up.
        first = _finite(mean[..., :1])
        off = mean - first
        share = self._like_items(count / jnp.maximum(total, 1), mean)
        center = jnp.sum(jnp.where(share == 0, jnp.zeros_like(off), off * share), -1, keepdims=True)
        spread = squares + self._squares(count, off - center)
        return total, first + center, jnp.sum(spread, axis=-1, keepdims=True)

    def _squares(self, weight: Any, off: Any) -> Any:
        """Return weighted squares; those of weight 0 count as 0 even where they are infinite."""
        square = jnp.real(off * jnp.conj(off))
        weight = self._like_items(weight, square)
        return jnp.where(weight == 0, jnp.zeros_like(square), square * weight)

    def _like_items(self, numbers: Any, items: Any) -> Any:
        """Give numbers, one for each lane, the rank and the dtype of the items."""
        rank = len(self.core)
        return lax.expand_dims(numbers, range(rank)).astype(items.dtype)


def _finite(x: Any) -> Any:
    """Return 0 in place of an infinite number, from which a distance would be NaN."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


@dataclasses.dataclass(frozen=True)
class Outer(Accumulator):
    """The sum of outer products of two vectors of each item. Its state has one lane."""

    length: int
    dtype: Any

    core = ()

    def start(self, lanes: int) -> State:
        return fill(0, self.dtype, (self.length, self.length, 1))

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        first, second = (x.astype(self.dtype) for x in tile)
        return state + lax.expand_dims(first @ second.T, (2,))

    def nothing(self) -> Any:
        return (scalar(0, self.dtype),) * 2

    def merge(self, first: State, second: State) -> State:
        return first + second

    def join(self, state: State) -> State:
        return jnp.sum(state, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Ordered(Accumulator):
    """Any monoid, whose items are merged in order.

    Its states have one lane, on axis 0 of each leaf: the items of a tile are merged in pairs of
    neighbours until one is left.
    """

    identity: Any  # a pytree of NumPy arrays
    combine: Callable[[Any, Any], Any]  # of states with lanes on axis 0

    core = ()

    def start(self, lanes: int) -> State:
        return jax.tree.map(lambda x: jax.device_put(x[None]), self.identity)

    def nothing(self) -> Any:
        return jax.tree.map(jax.device_put, self.identity)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        lanes_first = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tile)
        return self.merge(state, self.join(lanes_first))

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
