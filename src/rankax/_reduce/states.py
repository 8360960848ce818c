# SPDX-License-Identifier: MIT
"""Accumulators: how the items of a tile are taken into a running state.

Each is a monoid over the items. A state holds one value for each lane, on the last axis: item ``j``
of every tile goes into lane ``j``, elementwise, and the lanes are joined once, behind the loop. A
reduction across the lanes at every step would cost more than the kernel itself.

What lies on the other axes are the core axes of one output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.arrays import counted, scalar

__all__ = [
    "Accumulator",
    "Arg",
    "Elementwise",
    "LogSumExpOf",
    "MomentsOf",
    "Ordered",
    "Top",
    "fill",
    "merge_neighbours",
    "sort_key",
]

State = Any  # a pytree of arrays, each with the lanes on the last axis


class Accumulator(Protocol):
    """What a loop asks of the fold of one output (of all leaves of one part, in `Ordered`)."""

    def start(self, lanes: int) -> State:
        """Return the state of no item, for so many lanes."""
        ...

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        """Take one tile, whose items have these flat indices, one for each lane."""
        ...

    def merge(self, first: State, second: State) -> State:
        """Join two states, lane by lane; all items of the first come before those of the second."""
        ...

    def join(self, state: State) -> State:
        """Join the lanes of a state into one."""
        ...

    def shift(self, state: State, offset: jax.Array) -> State:
        """Add an offset to the indices that a state holds."""
        ...

    def placed(self, state: State, fun: Callable[[jax.Array], jax.Array]) -> State:
        """Change the indices that a state holds."""
        ...

    def merge_apart(self, first: State, second: State) -> State:
        """Merge two states of one lane each, whose items may lie among each other."""
        ...


def fill(value: Any, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return `jax.numpy.full`, by an explicit transfer."""
    return lax.broadcast(scalar(value, dtype), shape)


class _NoIndex:
    def shift(self, state: State, offset: jax.Array) -> State:
        del offset
        return state

    def placed(self, state: State, fun: Callable[[jax.Array], jax.Array]) -> State:
        del fun
        return state

    def merge_apart(self, first: State, second: State) -> State:
        return self.merge(first, second)

    def merge(self, first: State, second: State) -> State:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Elementwise(_NoIndex):
    """One associative and commutative function of two arrays, such as `jax.numpy.maximum`."""

    core: tuple[int, ...]
    dtype: Any  # in which it is computed
    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis, such as `jax.numpy.max`

    def start(self, lanes: int) -> State:
        return fill(self.identity, self.dtype, (*self.core, lanes))

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        del index
        return self.combine(state, tile.astype(self.dtype))

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        return self.reduce(state, axis=-1, keepdims=True).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class LogSumExpOf(_NoIndex):
    """The largest real part so far, and the sum of the exponentials relative to it."""

    core: tuple[int, ...]
    dtype: Any

    @property
    def real_dtype(self) -> Any:
        """The dtype of a real part."""
        return jnp.finfo(self.dtype).dtype

    def start(self, lanes: int) -> State:
        # The smallest number instead of -inf, for -inf - -inf is nan.
        shape = (*self.core, lanes)
        return fill(jnp.finfo(self.real_dtype).min, self.real_dtype, shape), fill(
            0, self.dtype, shape
        )

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        del index
        largest, total = state
        x = tile.astype(self.dtype)
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            turned = jnp.exp(lax.complex(jnp.zeros_like(x.real), x.imag))
            is_nothing = x.real == -jnp.inf
            return self.merge(state, (x.real, jnp.where(is_nothing, jnp.zeros_like(x), turned)))
        # One exponential serves both cases, for that of the larger is 1.
        ratio = jnp.exp(-jnp.abs(_difference(x, largest)))
        grew = x > largest
        total = jnp.where(grew, total * ratio + 1, total + ratio)
        return jnp.where(grew, x, largest), total

    def merge(self, first: State, second: State) -> State:
        (m, a), (n, b) = first, second
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


@dataclasses.dataclass(frozen=True)
class MomentsOf(_NoIndex):
    """Count, mean, and the sum of squared distances from it.

    Joined by the formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm
    for computing sample variances", 1979), of which Welford's step is a case: no large numbers are
    subtracted from each other.
    """

    core: tuple[int, ...]
    dtype: Any

    def start(self, lanes: int) -> State:
        shape = (*self.core, lanes)
        real = jnp.finfo(self.dtype).dtype
        return fill(0, real, (lanes,)), fill(0, self.dtype, shape), fill(0, real, shape)

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        del index
        count, mean, squares = state
        x = tile.astype(self.dtype)
        count = count + 1
        off = x - mean
        mean = mean + off / self._like_items(count, mean)
        return count, mean, squares + jnp.real(off * jnp.conj(x - mean))

    def merge(self, first: State, second: State) -> State:
        (n, mean, squares), (m, other, more) = first, second
        count = n + m
        share = m / jnp.maximum(count, 1)
        off = other - mean
        square = jnp.real(off * jnp.conj(off))
        mean = mean + off * self._like_items(share, mean)
        return count, mean, squares + more + square * self._like_items(n * share, square)

    def _like_items(self, numbers: Any, items: Any) -> Any:
        """Give numbers, one for each lane, the rank and the dtype of the items."""
        rank = len(self.core)
        return lax.expand_dims(numbers, range(rank)).astype(items.dtype)

    def join(self, state: State) -> State:
        count, mean, squares = state
        total = jnp.sum(count, axis=-1, keepdims=True)
        # Relative to one lane, so that no large numbers are added up.
        first = mean[..., :1]
        off = mean - first
        share = self._like_items(count / total, mean)
        center = jnp.sum(off * share, axis=-1, keepdims=True)
        off = off - center
        square = jnp.real(off * jnp.conj(off))
        spread = squares + square * self._like_items(count, square)
        return total, first + center, jnp.sum(spread, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Arg:
    """The best value so far, and its flat index; the first of equals, and nan before all."""

    core: tuple[int, ...]
    dtype: Any
    index_dtype: Any
    largest: bool

    def start(self, lanes: int) -> State:
        # An item as bad as this one wins no lane, so the lane keeps the index of its first item.
        shape = (*self.core, lanes)
        indices = jnp.broadcast_to(counted(lanes, self.index_dtype), shape)
        return fill(self.worst, self.dtype, shape), indices

    @property
    def worst(self) -> Any:
        """The value that no item is worse than."""
        if jnp.issubdtype(self.dtype, jnp.floating):
            return -jnp.inf if self.largest else jnp.inf
        if self.dtype == jnp.bool_:
            return not self.largest
        return jnp.iinfo(self.dtype).min if self.largest else jnp.iinfo(self.dtype).max

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        return self.merge(state, (tile, jnp.broadcast_to(index, tile.shape)))

    def merge(self, first: State, second: State) -> State:
        (best, at), (value, index) = first, second
        wins = self._wins(value, best)
        return jnp.where(wins, value, best), jnp.where(wins, index, at)

    def _wins(self, value: Any, best: Any) -> Any:
        better = value > best if self.largest else value < best
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return better
        return better | ((value != value) & (best == best))

    def join(self, state: State) -> State:
        value, index = state
        pick = jnp.max if self.largest else jnp.min
        best = pick(value, axis=-1, keepdims=True)  # nan if there is one
        is_best = (value == best) | ((value != value) & (best != best))
        none = scalar(jnp.iinfo(index.dtype).max, index.dtype)
        return best, jnp.min(jnp.where(is_best, index, none), axis=-1, keepdims=True)

    def shift(self, state: State, offset: jax.Array) -> State:
        value, index = state
        return value, index + offset.astype(index.dtype)

    def placed(self, state: State, fun: Callable[[jax.Array], jax.Array]) -> State:
        value, index = state
        return value, fun(index)

    def merge_apart(self, first: State, second: State) -> State:
        # `merge` takes the first of equals for the one with the smaller index; `join` looks.
        pairs = zip(first, second, strict=True)
        return self.join(tuple(lax.concatenate(pair, pair[0].ndim - 1) for pair in pairs))


@dataclasses.dataclass(frozen=True)
class Top:
    """The keys and indices of the ``k`` largest keys, in order; see `sort_key`.

    Its states have no lanes, but ``k`` places on the last axis. An empty place has the smallest
    key and the largest index, and so gives way to any item.
    """

    core: tuple[int, ...]
    dtype: Any  # of the keys
    index_dtype: Any
    k: int
    largest: bool
    by_sort: bool = False  # see `best_keys`

    def start(self, lanes: int) -> State:
        del lanes
        return self._empty(self.k)

    def _empty(self, places: int) -> State:
        shape = (*self.core, places)
        last = jnp.iinfo(self.index_dtype).max
        lowest = jnp.iinfo(self.dtype).min
        return fill(lowest, self.dtype, shape), fill(last, self.index_dtype, shape)

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        count = min(self.k, tile.shape[-1])
        keys = sort_key(tile, largest=self.largest)
        keys, places = best_keys(keys, count, by_sort=self.by_sort)
        # The lanes of a tile count up.
        first = lax.index_in_dim(index, 0, keepdims=False)
        found = keys, first + places.astype(self.index_dtype)
        empty = self._empty(self.k - count)
        both = zip(found, empty, strict=True)
        return self.merge(state, tuple(lax.concatenate(pair, pair[0].ndim - 1) for pair in both))

    def merge(self, first: State, second: State) -> State:
        pairs = zip(first, second, strict=True)
        keys, index = (lax.concatenate(pair, pair[0].ndim - 1) for pair in pairs)
        # Sorted by the flipped key, so that the largest comes first, and then by the index.
        flipped, index = lax.sort((~keys, index), dimension=-1, num_keys=2)
        return ~flipped[..., : self.k], index[..., : self.k]

    def join(self, state: State) -> State:
        return state

    def shift(self, state: State, offset: jax.Array) -> State:
        keys, index = state
        moved = index + offset.astype(index.dtype)
        return keys, jnp.where(index == jnp.iinfo(index.dtype).max, index, moved)

    def placed(self, state: State, fun: Callable[[jax.Array], jax.Array]) -> State:
        keys, index = state
        return keys, fun(index)

    def merge_apart(self, first: State, second: State) -> State:
        return self.merge(first, second)


def best_keys(keys: jax.Array, k: int, *, by_sort: bool) -> tuple[jax.Array, jax.Array]:
    """Return `jax.lax.top_k`; ``by_sort`` does without it.

    XLA (JAX 0.7 to 0.12) has each device send its keys to all others for it, where they are mapped
    over devices. Test: ``test_shards.py``, ``reductions_send_once``.
    """
    if not by_sort:
        best, places = lax.top_k(keys, k)
        return best, places
    places = lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    flipped, places = lax.sort((~keys, places), dimension=-1, num_keys=2)
    return ~flipped[..., :k], places[..., :k]


def sort_key(x: jax.Array, *, largest: bool) -> jax.Array:
    """Return ints that are ordered as ``x`` is, or the other way; nan is above all numbers."""
    if x.dtype == jnp.bool_:
        keys = x.astype(jnp.int8)
    elif jnp.issubdtype(x.dtype, jnp.floating):
        whole = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
        # -0.0 equals 0.0. As an int, a negative float is the larger, the further it is from 0.
        bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), whole)
        keys = jnp.where(bits < 0, bits ^ whole.type(jnp.iinfo(whole).max), bits)
        keys = jnp.where(x != x, whole.type(jnp.iinfo(whole).max), keys)
    else:
        keys = x
    return keys if largest else ~keys


@dataclasses.dataclass(frozen=True)
class Ordered(_NoIndex):
    """Any monoid, whose items are merged in their order.

    Its states have one lane, on axis 0 of each leaf: a tile is halved again and again, each time
    merging neighbours.
    """

    identity: Any  # a pytree of arrays of NumPy's
    combine: Callable[[Any, Any], Any]  # of states with lanes on axis 0

    def __hash__(self) -> int:
        # A function of the user's may do something else at the next call, and stay the same object.
        raise TypeError("unhashable: it holds a function of the user's")

    def start(self, lanes: int) -> State:
        del lanes
        return jax.tree.map(lambda x: jax.device_put(x[None]), self.identity)

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        lanes_first = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tile)
        return self.merge(state, merge_neighbours(self.combine, lanes_first, index.shape[0]))

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        return state


def merge_neighbours(combine: Callable[[Any, Any], Any], states: Any, count: int) -> Any:
    """Merge ``count`` states, which lie along axis 0, into one, in their order."""
    while count > 1:
        even = count // 2 * 2
        pairs = [_slice(states, start, even, 2) for start in range(2)]
        merged, rest = combine(*pairs), _slice(states, even, count)
        states = jax.tree.map(lambda a, b: lax.concatenate([a, b], 0), merged, rest)
        count -= count // 2
    return states


def _slice(tree: Any, start: int, stop: int, step: int = 1) -> Any:
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, step), tree)
