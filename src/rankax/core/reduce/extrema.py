# SPDX-License-Identifier: MIT
"""Accumulators of reductions that choose items by their values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.core.base.arrays import counted, scalar
from rankax.core.reduce.row import InSlots, State, choose


def no_index(dtype: Any) -> Any:
    """Return the index of no item, which is larger than all others."""
    return jnp.iinfo(dtype).max


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
class Chosen(InSlots):
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


class Arg(Chosen):
    """The best value so far and its flat index: the first of equals, and NaN before all others.

    If only some items count (``some``), a slot has `no_index` until one of its items does.
    """

    may_repeat = True

    def start(self, slots: int) -> State:
        # Items as bad as this value replace no slot, so a slot keeps the index of its first item.
        worst, none = self.empty(slots)
        first = jnp.broadcast_to(counted(slots, self.index_dtype), worst.shape)
        return worst, none if self.some else first

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        new = tile, jnp.broadcast_to(index, tile.shape)
        if self.some:
            new = choose(counts, new, self.empty(index.size))
        return self.merge(state, new)

    def merge(self, first: State, second: State) -> State:
        (best, at), (value, index) = first, second
        wins = self.wins(value, best)
        if self.some:
            wins |= at == scalar(no_index(at.dtype), at.dtype)
        return jnp.where(wins, value, best), jnp.where(wins, index, at)

    def wins(self, value: Any, best: Any) -> Any:
        """Whether a value is better."""
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
        is_best = ~self.wins(best, value)
        none = scalar(no_index(index.dtype), index.dtype)
        first = jnp.min(jnp.where(is_best, index, none), axis=-1, keepdims=True)
        # Where XLA computes an item twice, with different rounding, none equals the best one.
        at = jnp.take_along_axis(index, place(value, axis=-1, keepdims=True), axis=-1)
        return best, jnp.where(first == none, at, first)
