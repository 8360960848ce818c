# SPDX-License-Identifier: MIT
"""Accumulators of reductions that choose items: by value, or by keys that sort like the values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax.core.base.arrays import counted, scalar
from rankax.core.reduce.states import InLanes, State, choose, concatenated


def no_index(dtype: Any) -> Any:
    """Return the index of no item, which is larger than all others."""
    return jnp.iinfo(dtype).max


def if_found(index: jax.Array, value: jax.Array, otherwise: Any) -> jax.Array:
    """Return ``value``, or something else where the index is that of no item."""
    is_item = index != scalar(no_index(index.dtype), index.dtype)
    return jnp.where(is_item, value, scalar(otherwise, value.dtype))


def worst_value(dtype: Any, *, largest: bool) -> Any:
    """Return the value that no item is worse than."""
    if dtype == jnp.bool_:
        return not largest
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float and np.isinf(np.asarray(np.inf, dtype)):  # float8_e4m3fn has no infinity
        return -jnp.inf if largest else jnp.inf
    limits = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
    return limits.min if largest else limits.max


@dataclasses.dataclass(frozen=True)
class _Chosen(InLanes):
    """Values and flat indices of items. One without an item has `no_index`, and is the worst."""

    index_dtype: Any
    largest: bool
    some: bool = dataclasses.field(default=False, kw_only=True)  # whether only some items count

    def empty(self, entries: int) -> State:
        """Return entries without an item."""
        worst = worst_value(self.dtype, largest=self.largest)
        none = self.full(no_index(self.index_dtype), self.index_dtype, entries)
        return self.full(worst, self.dtype, entries), none

    def renumber(self, state: State, place: Callable[[jax.Array], jax.Array]) -> State:
        values, index = state
        placed = place(index)
        none = scalar(no_index(placed.dtype), placed.dtype)
        return values, jnp.where(index == no_index(index.dtype), none, placed)


class Arg(_Chosen):
    """The best value so far and its flat index: the first of equals, and NaN before all others.

    If only some items count (``some``), a lane has `no_index` until one of its items does.
    """

    may_repeat = True

    def start(self, lanes: int) -> State:
        # Items as bad as this value replace no lane, so a lane keeps the index of its first item.
        worst, none = self.empty(lanes)
        first = jnp.broadcast_to(counted(lanes, self.index_dtype), worst.shape)
        return worst, none if self.some else first

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        new = tile, jnp.broadcast_to(index, tile.shape)
        if self.some:
            new = choose(counts, new, self.empty(index.size))
        return self.merge(state, new)

    def merge(self, first: State, second: State) -> State:
        (best, at), (value, index) = first, second
        wins = self._wins(value, best)
        if self.some:
            wins |= at == scalar(no_index(at.dtype), at.dtype)
        return jnp.where(wins, value, best), jnp.where(wins, index, at)

    def _wins(self, value: Any, best: Any) -> Any:
        better = value > best if self.largest else value < best
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return better
        return better | ((value != value) & (best == best))

    def join(self, state: State) -> State:
        value, index = state
        if value.shape[-1] == 1:
            return state
        pick, place = (jnp.max, jnp.argmax) if self.largest else (jnp.min, jnp.argmin)
        best = pick(value, axis=-1, keepdims=True)  # NaN if any is
        is_best = ~self._wins(best, value)
        none = scalar(no_index(index.dtype), index.dtype)
        first = jnp.min(jnp.where(is_best, index, none), axis=-1, keepdims=True)
        # Where XLA computes an item twice, with different rounding, none equals the best one.
        at = jnp.take_along_axis(index, place(value, axis=-1, keepdims=True), axis=-1)
        return best, jnp.where(first == none, at, first)


@dataclasses.dataclass(frozen=True)
class Top(_Chosen):
    """The ``k`` largest keys in order and their indices; see `sort_key`.

    Its states have ``k`` entries on the last axis instead of lanes.
    """

    k: int
    descending: bool  # whether these are the largest items

    def start(self, lanes: int) -> State:
        return self.empty(self.k)

    def entries(self, tile: Any, index: jax.Array, counts: Any) -> State:
        """Return an entry for each item, empty if it does not count."""
        keys = sort_key(tile, largest=self.descending)
        entries = keys, jnp.broadcast_to(index, keys.shape)
        return entries if counts is None else choose(counts, entries, self.empty(index.size))

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        def of_all() -> State:
            count = min(self.k, tile.shape[-1])
            keys, places = lax.top_k(sort_key(tile, largest=self.descending), count)
            # The indices of the lanes are consecutive.
            first = lax.index_in_dim(index, 0, keepdims=False)
            best = keys, first + places.astype(self.index_dtype)
            return self.merge(state, concatenated(best, self.empty(self.k - count)))

        def of_some() -> State:
            return self.merge(state, self.entries(tile, index, counts))

        if counts is None:
            return of_all()
        # Only the last tile has items that were in another. A sort takes longer than `top_k`.
        return of_some() if self.some else lax.cond(jnp.all(counts), of_all, of_some)

    def merge(self, first: State, second: State) -> State:
        return self.join(concatenated(first, second))

    def join(self, state: State) -> State:
        return state if state[0].shape[-1] == self.k else tuple(first_k(self.k, *state))


def first_k(k: int, keys: jax.Array, index: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Return the ``k`` entries of the largest keys along the last axis, equal keys by index."""
    # Flipping the bits of an integer reverses the order.
    flipped, *rest = lax.sort((~keys, index, *others), dimension=-1, num_keys=2)
    return [~flipped[..., :k], *(x[..., :k] for x in rest)]


def sort_key(x: jax.Array, *, largest: bool) -> jax.Array:
    """Return integers in the order of ``x``, or in the opposite order; NaN is above all numbers."""
    if x.dtype == jnp.bool_:
        keys = x.astype(jnp.int8)
    elif jnp.issubdtype(x.dtype, jnp.floating):
        whole = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
        # -0.0 equals 0.0. The bits of negative floats, as integers, grow with the distance from 0.
        bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), whole)
        keys = jnp.where(bits < 0, bits ^ whole.type(jnp.iinfo(whole).max), bits)
        keys = jnp.where(x != x, whole.type(jnp.iinfo(whole).max), keys)
    else:
        keys = x
    return keys if largest else ~keys
