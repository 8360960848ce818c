# SPDX-License-Identifier: MIT
"""The shapes of one call: divided by their ranks, compared with each other, padded, split.

Batch axes agree by NumPy's rules, core dimensions by name. Disagreements are returned as data;
`rankax.core.plan.report` words them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rankax.core.base.messages import checked_int, function_location
from rankax.core.declare.dims import Dim, Rank
from rankax.core.plan.levels import Shape

Bucket = bool | tuple[int, ...]

_RATIO = 1.25  # of one length to the next, so that at most a fifth of the items are copies
_MOST_KEYS = 2**32  # jax.random.fold_in takes a number of 32 bits


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One ranked leaf of a call.

    Attributes
    ----------
    path : str
        Its name, as the caller writes it: ``pose.rotation``.
    shape : tuple of int
    rank : int
        The declared number of core axes.
    core_shape : tuple of int
        ``shape`` without its leading batch axes.
    batch_axes : tuple of int
        The lengths of those axes.
    declared : str
        The rank as it was written; ignored in comparisons.
    is_split : bool
        Whether its rank is `rankax.SplitKey`.
    """

    path: str
    shape: Shape
    rank: int
    core_shape: Shape
    batch_axes: Shape
    declared: str = dataclasses.field(compare=False)
    is_split: bool = False


def leaf_plan(path: str, shape: Shape, rank: Rank) -> LeafPlan:
    """Divide a shape by its rank; one with too few axes has no batch axes."""
    batch = max(0, len(shape) - rank.rank)
    return LeafPlan(path, shape, rank.rank, shape[batch:], shape[:batch], str(rank), rank.is_split)


@dataclasses.dataclass(frozen=True)
class Clash:
    """An axis with several sizes, or with a size other than the declared one."""

    axis: int | Dim  # a batch axis, counted from the right; or a core dimension
    leaves: dict[int, list[int]]  # the leaves of each size, by position
    expected: Any = None  # of a dimension without a name: its size, or a `NoSize`


def broadcast(batches: Iterable[tuple[int, Shape]]) -> tuple[Shape, list[Clash]]:
    """Return the batch shape, and a clash for each axis that has two lengths.

    Parameters
    ----------
    batches : iterable of (leaf, batch axes)
    """
    batches = list(batches)
    width = max((len(batch) for _, batch in batches), default=0)
    shape: list[int] = []
    clashes: list[Clash] = []
    for axis in range(-width, 0):
        leaves: dict[int, list[int]] = {}
        for leaf, batch in batches:
            if len(batch) >= -axis and batch[axis] != 1:
                leaves.setdefault(batch[axis], []).append(leaf)
        shape.append(next(iter(leaves), 1))
        if len(leaves) > 1:
            clashes.append(Clash(axis, leaves))
    return tuple(shape), clashes


def bind_sizes(cores: Iterable[tuple[int, Shape, Rank]], sizes: dict[str, int]) -> list[Clash]:
    """Bind each named dimension in ``sizes``, and return every disagreement.

    Parameters
    ----------
    cores : iterable of (leaf, core shape, rank)
    sizes : dict
        The sizes known so far, by dimension name; extended in place.
    """
    declared = [
        (leaf, size, dim)
        for leaf, core, rank in cores
        for size, dim in zip(core, rank.dims or (), strict=bool(rank.dims))
        if not (dim.stretches and size == 1)
    ]
    named: dict[str, Clash] = {}
    for leaf, size, dim in declared:
        if dim.name is not None:
            named.setdefault(dim.name, Clash(dim, {})).leaves.setdefault(size, []).append(leaf)
    for name, clash in named.items():
        size = sizes.setdefault(name, next(iter(clash.leaves)))
        clash.leaves.setdefault(size, [])  # the size may be known from leaves other than these
    others: dict[tuple[str, int], Clash] = {}  # expressions need all names bound
    for leaf, size, dim in declared:
        if dim.name is None and not dim.fits(size, sizes):
            clash = Clash(dim, {}, dim.expected(sizes))
            clash = others.setdefault((dim.text.lstrip("#"), size), clash)
            clash.leaves.setdefault(size, []).append(leaf)
    return [*(clash for clash in named.values() if len(clash.leaves) > 1), *others.values()]


# Buckets: the few lengths to which `bucket=` fills the axes of a batch up.


def checked_bucket(value: Any, where: str) -> Bucket:
    """Return a valid value of the option ``bucket``, or raise."""
    if isinstance(value, bool):
        return value
    refusal = f"{where}: bucket must be True, False or lengths such as (128, 1024, 8192), got"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{refusal} {type(value).__name__} {value!r}")
    if not value:
        raise ValueError(f"{refusal} no length")
    refusal = f"{where}: the lengths of bucket must be positive ints, got"
    return tuple(sorted({checked_int(length, refusal, least=1) for length in value}))  # pyright: ignore


def bucket_of(length: int, bucket: Bucket) -> int | None:
    """Return the length to which an axis is padded; None if it is longer than all of them."""
    series = (math.ceil(_RATIO**k) for k in itertools.count()) if bucket is True else bucket or ()
    return next((size for size in series if size >= length), None)


# Split keys: how items are numbered; `core/loop/spec.py` makes the keys from these numbers.


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
                f"keys, but JAX counts only {_MOST_KEYS}; pass keys that have a batch axis "
                f"themselves, such as jax.random.split({leaf.path}, n) for an axis of length n"
            )
        if any(strides):
            splits.append(Split(position, tuple(reversed(strides))))
    return tuple(splits)
