# SPDX-License-Identifier: MIT
"""How the items of a batch are counted, of which each gets a key of its own."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from rankax._base.functions import function_location
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Shape

__all__ = ["Split", "plan_splits"]

_MOST_KEYS = 2**32  # jax.random.fold_in takes a number of 32 bits


@dataclasses.dataclass(frozen=True)
class Split:
    """One array of keys that are split over the batch axes that it lacks.

    An item has the number ``sum(place * stride)`` over all axes of the batch.
    """

    position: int  # of the array, among all leaves of the call
    strides: tuple[int, ...]  # one for each axis of the batch; 0 along those that it has


def plan_splits(
    fun: Callable[..., Any],
    leaves: Sequence[LeafPlan],
    positions: Sequence[int],
    batch_shape: Shape,
) -> tuple[Split, ...]:
    """Count the items for every key that is split; one that lacks no batch axis is not.

    Parameters
    ----------
    fun : callable
        The kernel.
    leaves, positions : sequences of equal length
        Every leaf that has a rank, and where it is among all leaves of the call.
    batch_shape : tuple of int

    Raises
    ------
    ValueError
        If a key has to be split into more keys than can be counted.
    """
    splits: list[Split] = []
    axes = range(len(batch_shape))
    for leaf, position in zip(leaves, positions, strict=True):
        lengths = _split_lengths(leaf.batch_axes, batch_shape) if leaf.is_split else {}
        if not lengths:
            continue
        count: Any = math.prod(lengths.values())
        if isinstance(count, int) and count > _MOST_KEYS:  # not of symbolic shapes
            raise ValueError(
                f"{function_location(fun)}: each key of {leaf.path} would be split into {count} "
                f"keys, and JAX counts {_MOST_KEYS}; pass keys that have a batch axis themselves, "
                f"such as jax.random.split({leaf.path}, n) for an axis of length n"
            )
        strides = [_behind(axis, lengths) if axis in lengths else 0 for axis in axes]
        splits.append(Split(position, tuple(strides)))
    return tuple(splits)


def _split_lengths(own: Shape, batch_shape: Shape) -> dict[int, int]:
    """Return the lengths of the batch axes that a key lacks, or has to be stretched along."""
    absent = len(batch_shape) - len(own)
    return {
        axis: length
        for axis, length in enumerate(batch_shape)
        if axis < absent or own[axis - absent] != length
    }


def _behind(axis: int, lengths: dict[int, int]) -> int:
    return math.prod(length for other, length in lengths.items() if other > axis)
