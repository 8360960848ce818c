# SPDX-License-Identifier: MIT
"""How items are numbered for each split key; `_loop/keys.py` makes the keys from these numbers."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rankax._base.functions import function_location
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Shape

_MOST_KEYS = 2**32  # jax.random.fold_in takes a number of 32 bits


@dataclasses.dataclass(frozen=True)
class Split:
    """One array of keys that are split over the batch axes that it lacks.

    The number of an item is the sum of index times stride over all axes of the batch.
    """

    position: int  # the leaf position of the array
    strides: tuple[int, ...]  # one for each axis of the batch; 0 for those that the array has


def plan_splits(
    fun: Callable[..., Any],
    leaves: Sequence[LeafPlan],
    positions: Sequence[int],
    batch_shape: Shape,
) -> tuple[Split, ...]:
    """Return how items are counted for each key that is split; keys without absent axes are not.

    Parameters
    ----------
    fun : callable
        The kernel.
    leaves, positions : sequences of equal length
        Every leaf that has a rank, and its leaf position.
    batch_shape : tuple of int

    Raises
    ------
    ValueError
        If a key would be split into more than 2**32 keys.
    """
    splits: list[Split] = []
    for leaf, position in zip(leaves, positions, strict=True):
        if not leaf.is_split:
            continue
        count: Any = 1  # symbolic shapes are not ints
        strides: list[int] = []
        axes = itertools.zip_longest(reversed(batch_shape), reversed(leaf.batch_axes))
        for length, size in axes:
            strides.append(count if size != length else 0)
            count *= length if size != length else 1
        if isinstance(count, int) and count > _MOST_KEYS:
            raise ValueError(
                f"{function_location(fun)}: each key of {leaf.path} would be split into {count} "
                f"keys, and JAX counts {_MOST_KEYS}; pass keys that have a batch axis themselves, "
                f"such as jax.random.split({leaf.path}, n) for an axis of length n"
            )
        if any(strides):
            splits.append(Split(position, tuple(reversed(strides))))
    return tuple(splits)
