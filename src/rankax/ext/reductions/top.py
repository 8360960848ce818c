# SPDX-License-Identifier: MIT
"""The best items of a row: their state, and how values are ordered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.protocol import (
    Chosen,
    State,
    choose,
    no_index,
    scalar,
)


def if_found(index: jax.Array, value: jax.Array, otherwise: Any) -> jax.Array:
    """Return ``value``, or something else where the index is that of no item."""
    is_item = index != scalar(no_index(index.dtype), index.dtype)
    return jnp.where(is_item, value, scalar(otherwise, value.dtype))


@dataclasses.dataclass(frozen=True)
class Top(Chosen):
    """The ``k`` largest keys in order and their indices; see `sort_key`.

    Its states have ``k`` entries on the last axis instead of slots.
    """

    k: int
    descending: bool  # whether these are the largest items

    def start(self, slots: int) -> State:
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
            # The indices of the slots are consecutive.
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


def concatenated(first: State, second: State) -> State:
    """Return the slots of two states as those of one."""
    return jax.tree.map(lambda a, b: lax.concatenate([a, b], a.ndim - 1), first, second)
