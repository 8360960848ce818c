# SPDX-License-Identifier: MIT
"""Items by their flat index over several levels."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax.core.base.arrays import places_of
from rankax.core.loop.spec import PLACE, LoopSpec


def lengths_of(levels: Sequence[LoopSpec]) -> list[int]:
    """Return how many items each level has."""
    return [level.chunks.length for level in levels]


def items_at(leaves: Sequence[Any], index: Any, levels: Sequence[LoopSpec]) -> list[Any]:
    """Return what the item with this flat index is evaluated from."""
    places = places_of(index, lengths_of(levels))
    items = [item_of(leaf, i, places, levels) for i, leaf in enumerate(leaves)]
    return [*items, *own_places(places, levels)]


def own_places(places: Sequence[Any], levels: Sequence[LoopSpec]) -> list[Any]:
    """Return the last inputs of an item."""
    return [place.astype(PLACE.dtype) for place in places if levels[0].numbered]


def item_of(leaf: Any, i: int, places: Sequence[Any], levels: Sequence[LoopSpec]) -> Any:
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
