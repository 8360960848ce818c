# SPDX-License-Identifier: MIT
"""How the items of the levels of a nest are numbered and read, and a split key for each.

``jax.random.split(key, n)[i]`` is ``jax.random.fold_in(key, i)`` (`SplitKey` says for which
generators). So there is no array of keys: `item_key` makes the key where the item is evaluated
(`Call.on_item`).

The number comes from the places of the item: each level of a nest passes the place of the item
along it as the last input of the function that it maps (`Level.numbered`). In a loop this is the
start of the chunk plus a count within it. An array of numbers as one more operand would be simpler,
but it is as long as the batch, and compiled programs do store it. The places become one number
just outside the program of one item (`number_items`), so that this program does not depend on how
the levels are cut. A nest over a part of a batch takes the splits of the whole batch, so that the
part only has to add the number of its first item (`ext/devices/over_parts.py`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from rankax.core.base.arrays import counted, flat_index, places_of, scalar
from rankax.core.plan.schedule import Level, Shape, Split

# Keys of the same form. What the first one folds differs under `jax.vmap`, and so by chunk.
_UNSAFE, _SAFE = "unsafe_rbg", "rbg"

PLACE = jax.ShapeDtypeStruct((), jnp.uint32)  # the type of an item's place along a level


def item_key(key: Any, number: Any) -> Any:
    """Return the key of the item that has this number."""
    if jax.random.key_impl(key) != _UNSAFE:
        return jax.random.fold_in(key, number)
    safe = jax.random.wrap_key_data(jax.random.key_data(key), impl=_SAFE)
    folded = jax.random.key_data(jax.random.fold_in(safe, number))
    return jax.random.wrap_key_data(folded, impl=_UNSAFE)


def index_without_fill(
    index: jax.Array, shape: Shape, axes: Sequence[int], lengths: Mapping[int, Any]
) -> jax.Array:
    """Return a flat index into some axes of a batch as it was before padding.

    Parameters
    ----------
    index : array of ints
        Negative: no item.
    shape : tuple of int
        The shape of the padded batch.
    axes : sequence of int
    lengths : mapping of int to uint32
        How long each padded axis was; traced.
    """
    if not lengths.keys() & axes[1:]:
        return index
    places = places_of(index, [shape[axis] for axis in axes])
    whole = flat_index(places, [lengths.get(axis, shape[axis]) for axis in axes])
    return jnp.where(index < scalar(0, index.dtype), index, whole)


def number_items(
    fun: Callable[..., Any], splits: Sequence[Split], levels: Sequence[Level], shape: Shape
) -> Callable[..., Any]:
    """Return ``fun``, which takes the numbers of its item last, as a function of places instead.

    Parameters
    ----------
    fun : callable
        Takes items of leaves, then one number for each split.
    splits : sequence of Split
    levels : sequence of Level
        The levels of a nest, outermost first.
    shape : tuple of int
        The shape of the batch that the nest walks.

    Returns
    -------
    callable
        Takes items of leaves, then one place for each level.
    """

    def along(place: Any, level: Level) -> list[Any]:
        sizes = [shape[axis] for axis in level.axes]
        return places_of(place, sizes) if len(sizes) > 1 else [place]

    @functools.wraps(fun)
    def of_places(*args: Any) -> Any:
        count = len(args) - len(levels)
        places = [
            pair
            for place, level in zip(args[count:], levels, strict=True)
            for pair in zip(level.axes, along(place, level), strict=True)
        ]
        return fun(*args[:count], *(number_of(split, places) for split in splits))

    return of_places


def number_of(split: Split, places: Iterable[tuple[int, Any]]) -> Any:
    """Return the number of the item at these places, each along an axis of the batch."""
    terms = [_times(place, split.strides[axis]) for axis, place in places]
    found = [term for term in terms if term is not None]
    return functools.reduce(jnp.add, found) if found else scalar(0, PLACE.dtype)


def _times(place: Any, stride: Any) -> Any:
    """Return one term of a number; None if it is 0, as along axes that the keys have themselves."""
    if isinstance(stride, int):
        if stride % 2**32 == 0:  # 2**32 belongs to an axis of length 1
            return None
        return place if stride == 1 else place * scalar(stride, PLACE.dtype)
    return place * jnp.asarray(stride).astype(PLACE.dtype)  # a symbolic shape


def lengths_of(levels: Sequence[Level]) -> list[int]:
    """Return how many items each level has."""
    return [level.chunks.length for level in levels]


def items_at(leaves: Sequence[Any], index: Any, levels: Sequence[Level]) -> list[Any]:
    """Return what the item with this flat index is evaluated from."""
    places = places_of(index, lengths_of(levels))
    items = [item_of(leaf, i, places, levels) for i, leaf in enumerate(leaves)]
    return [*items, *own_places(places, levels)]


def own_places(places: Sequence[Any], levels: Sequence[Level]) -> list[Any]:
    """Return the last inputs of an item."""
    return [place.astype(PLACE.dtype) for place in places if levels[0].numbered]


def item_of(leaf: Any, i: int, places: Sequence[Any], levels: Sequence[Level]) -> Any:
    """Return the item of leaf ``i`` at these places.

    It is read along all levels at once, so that `jax.vmap` makes it one gather.
    """
    starts, axes = {}, list(range(jnp.ndim(leaf)))
    for place, level in zip(places, levels, strict=True):
        if (axis := level.in_axes[i]) is not None:
            starts[axes.pop(axis)] = place  # axes are counted without the outer levels
    if not starts:
        return leaf
    start = [starts.get(axis, np.zeros((), places[0].dtype)) for axis in range(leaf.ndim)]
    sizes = [1 if axis in starts else n for axis, n in enumerate(leaf.shape)]
    window = lax.dynamic_slice(leaf, start, sizes, allow_negative_indices=False)
    return lax.squeeze(window, list(starts))


def vmap_level(fun: Callable[..., Any], level: Level, out_axes: Any = 0) -> Callable[..., Any]:
    """Return `jax.vmap` of ``fun``; if numbered, each item takes its place as its last input."""
    in_axes, size = level.in_axes, level.chunks.length
    if not level.numbered:
        return jax.vmap(fun, in_axes, out_axes, axis_size=size)
    mapped = jax.vmap(fun, (*in_axes, 0), out_axes, axis_size=size)
    return lambda *leaves: mapped(*leaves, _places(size, leaves, in_axes))


def _places(size: int, leaves: Sequence[Any], in_axes: Sequence[int | None]) -> jax.Array:
    """Count along an axis. On a mesh with explicit axes, the count is sharded like the leaves."""
    count = counted(size, PLACE.dtype)
    for leaf, axis in zip(leaves, in_axes, strict=True):
        if axis is not None and AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types:
            zeros = lax.full_like(leaf, 0, PLACE.dtype)
            others = tuple(other for other in range(zeros.ndim) if other != axis)
            return count + jnp.sum(zeros, others, dtype=PLACE.dtype)
    return count
