# SPDX-License-Identifier: MIT
"""The best items of a row: their state, and how values are ordered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.base.arrays import scalar
from rankax.core.reduce.extrema import Chosen, no_index
from rankax.core.reduce.row import State, choose

_INFINITY = 0x7F800000  # as float32


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
    has_floats: bool  # whether keys can be compared `as_floats`

    def start(self, slots: int) -> State:
        return self.empty(self.k)

    def entries(self, tile: Any, index: jax.Array, counts: Any) -> State:
        """Return an entry for each item, empty if it does not count."""
        keys = sort_key(tile, largest=self.descending)
        entries = keys, jnp.broadcast_to(index, keys.shape)
        return entries if counts is None else choose(counts, entries, self.empty(index.size))

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        entries = keys, _ = self.entries(tile, index, counts)
        if self.has_floats or (self.some and counts is not None):
            return self.merge(state, entries)

        def by_top_k() -> State:
            count = min(self.k, tile.shape[-1])
            _, places = lax.top_k(keys, count)
            best = tuple(jnp.take_along_axis(x, places, axis=-1) for x in entries)
            return self.merge(state, concatenated(best, self.empty(self.k - count)))

        if counts is None:
            return by_top_k()
        # An item that does not count can have the same key as one that does. Only the last tile has
        # items that were in another. A sort takes longer than `top_k`.
        return lax.cond(jnp.all(counts), by_top_k, lambda: self.merge(state, entries))

    def merge(self, first: State, second: State) -> State:
        keys, index = both = concatenated(first, second)
        if not self.has_floats:
            return self.join(both)
        # Equal keys keep their order. An entry without an item comes after NaN, of the same key.
        is_empty = index == scalar(no_index(index.dtype), index.dtype)
        floats = jnp.where(is_empty, -jnp.inf, as_floats(keys))
        _, places = lax.top_k(floats, self.k)
        return tuple(jnp.take_along_axis(x, places, axis=-1) for x in both)

    def join(self, state: State) -> State:
        return state if state[0].shape[-1] == self.k else tuple(first_k(self.k, *state))


def first_k(k: int, keys: jax.Array, index: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Return the ``k`` entries of the largest keys along the last axis, equal keys by index."""
    # Flipping the bits of an integer reverses the order.
    flipped, *rest = lax.sort((~keys, index, *others), dimension=-1, num_keys=2)
    return [~flipped[..., :k], *(x[..., :k] for x in rest)]


def has_floats(dtype: Any) -> bool:
    """Whether the keys of a dtype can be compared `as_floats`."""
    return dtype == jnp.float32 or jnp.dtype(dtype).itemsize < 4


def as_floats(keys: jax.Array) -> jax.Array:
    """Return finite float32 in the order of keys; infinite only for NaN that is larger than all.

    `jax.lax.top_k` sorts integers. XLA has a function of its own for float32, which takes 1/20 to
    1/50 of the time on a CPU, and 1/7 on a GPU, where it fails for NaN (openxla/xla#48119). So
    numbers move by two floats towards 0, where five become one: 0 and denormals up to 2.8e-45.
    """
    if keys.dtype != jnp.int32:
        return keys.astype(jnp.float32)
    nearer = jnp.clip(keys - jnp.clip(keys, -2, 2), -_INFINITY, _INFINITY)
    bits = jnp.where(nearer < 0, nearer ^ jnp.int32(2**31 - 1), nearer)
    return lax.bitcast_convert_type(bits, jnp.float32)


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
