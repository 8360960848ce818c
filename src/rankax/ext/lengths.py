# SPDX-License-Identifier: MIT
"""The few lengths to which ragged items are padded, and which items go to each.

Items are sorted by their rows, and cut into runs; the items of a run are padded to its longest one.
The cuts that need the fewest rows of padding are the shortest path over the distinct lengths, for
each number of runs (`_cuts`). An eager call, which compiles a loop for each run, takes the fewest
runs for which at most a tenth of the rows are padding. With ``jit=True``, lengths are first rounded
up to one geometric series, and each length that occurs is a run: if lengths were merged, the
choice, and so the programs, would differ from batch to batch.

Items may be ragged in several dimensions, such as the atoms and the bonds of molecules. They are
then sorted by all their rows together.

The blocks of a stream are known before the first one is evaluated. They share the runs of all
items, and a few numbers of items for each run (`Shared`).

Batches are padded, too: with ``bucket=``, each axis to one of a few lengths (`bucket_of`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax.core.base.messages import checked_int

Array = np.ndarray[Any, Any]

Bucket = bool | tuple[int, ...]

_RATIO_OF_BUCKETS = 1.25  # of one to the next, so that at most a fifth of the items are copies
MOST_LENGTHS = 12
_ENOUGH = 1 / 0.9  # of the rows that there are, the rows that are evaluated
_ENOUGH_ITEMS = 1.25  # of the items of blocks, the items that are evaluated
_RATIO = 1.5  # of one length of the series to the next, which fills a fifth in on average
_FEW = 64
_MOST_CANDIDATES = 400  # distinct lengths at which a run may end


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The items that are padded to the same length."""

    items: Array  # their numbers, in ascending order
    lengths: tuple[int, ...]  # of each ragged dimension


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The shapes that blocks share, and so their programs."""

    ends: Array  # how many rows the largest item of each group has, in all dimensions together
    slots: dict[tuple[int, ...], list[int]]  # numbers of items, by the lengths of each group
    rows: tuple[int, ...]  # those of a block in each dimension, at most
    items: int  # those of a block, at most

    @classmethod
    def of(cls, lengths: Array, blocks: Sequence[tuple[int, int]]) -> Shared:
        """Choose shapes for blocks, given by the first item of each and the end of its items."""
        groups, number = groups_of(lengths, in_series=False), np.zeros(len(lengths), int)
        for i, group in enumerate(groups):
            number[group.items] = i
        counts = np.array([np.bincount(number[a:b], minlength=len(groups)) for a, b in blocks])
        slots: dict[tuple[int, ...], list[int]] = {}
        for group, own in zip(groups, counts.T, strict=True):
            sizes = groups_of(own[own > 0, None], in_series=False, enough=_ENOUGH_ITEMS)
            slots[group.lengths] = [n for size in sizes for n in size.lengths]
        rows = np.maximum(lengths, 1).sum(1)
        return cls(
            np.array([rows[group.items].max() for group in groups]),
            slots,
            tuple(np.max([lengths[a:b].sum(0) for a, b in blocks], 0).tolist()),
            max(b - a for a, b in blocks),
        )

    def groups(self, lengths: Array) -> list[Group]:
        """Sort the items of a block into groups."""
        number, every = np.searchsorted(self.ends, np.maximum(lengths, 1).sum(1)), [*self.slots]
        return [Group(np.flatnonzero(number == i), every[i]) for i in np.unique(number)]

    def slots_of(self, group: Group, count: int) -> int:
        """Return how many items a group is padded to, which has so many at least."""
        sizes = [*self.slots.get(group.lengths, ()), slots_for(count)]
        return next(size for size in sizes if size >= count)


def groups_of(lengths: Array, *, in_series: bool, enough: float = _ENOUGH) -> list[Group]:
    """Sort items into groups.

    Parameters
    ----------
    lengths : array of shape (items, dimensions)
    in_series : bool
        Whether lengths come from the geometric series.
    enough : float
        Otherwise, how many rows may be evaluated for each of those that there are.
    """
    filled = rounded_up(lengths) if in_series else np.maximum(lengths, 1)
    if (filled == filled[:1]).all() and len(filled):
        return [Group(np.arange(len(filled)), tuple(filled[0].tolist()))]
    rows = filled.sum(1)
    order = np.argsort(rows, kind="stable")
    filled, rows = filled[order], rows[order]
    ends = np.flatnonzero(np.append(rows[1:] != rows[:-1], True)) + 1
    if len(ends) > _MOST_CANDIDATES:
        ends = ends[np.linspace(0, len(ends) - 1, _MOST_CANDIDATES).astype(int)]
    most = np.maximum.reduceat(filled, np.append(0, ends[:-1]))
    most_rows = 0 if in_series else int(filled.sum() * enough)
    bounds = [0, *(ends[i] for i in _cuts(ends, most, most_rows))]
    return [
        Group(np.sort(order[begin:end]), tuple(filled[begin:end].max(0).tolist()))
        for begin, end in itertools.pairwise(bounds)
    ]


def slots_for(count: int) -> int:
    """Return how many items a group of so many is padded to, so that others reuse its program.

    Sizes of large groups vary less from batch to batch, so their steps are finer: an eighth.
    """
    if count <= _FEW:
        return bucket_of(count, True) or count
    step = 2 ** (count.bit_length() - 4)
    return -(-count // step) * step


def rounded_up(lengths: Array) -> Array:
    """Return lengths of the geometric series."""
    series = series_to(int(lengths.max(initial=1)))
    return series[np.searchsorted(series, lengths)]


@functools.lru_cache(1024)
def series_to(longest: int) -> Array:
    """Return the lengths of the series up to the first that is not shorter than ``longest``."""
    count = math.ceil(math.log(longest, _RATIO)) + 2
    series = np.unique(np.ceil(_RATIO ** np.arange(count)).astype(int))
    return series[: np.searchsorted(series, longest) + 1]


def _cuts(ends: Array, most: Array, enough: int) -> list[int]:
    """Return the last candidate of each run, for the fewest runs that are good enough.

    Parameters
    ----------
    ends : array
        How many items there are up to each candidate.
    most : array of shape (candidates, dimensions)
        The longest lengths between one candidate and the one before.
    enough : int
        If at most this many rows are evaluated in all, no more runs are needed.
    """
    count = len(ends)
    begins = np.append(0, ends[:-1])
    # The rows of a run from candidate i to candidate j.
    cost = np.full((count, count), np.inf)
    for i in range(count):
        longest = np.maximum.accumulate(most[i:], axis=0).sum(1)
        cost[i, i:] = (ends[i:] - begins[i]) * longest
    best, chosen = cost[0], [np.zeros(count, int)]
    while len(chosen) < min(MOST_LENGTHS, count) and best[-1] > enough:
        # The last run begins with candidate i + 1, the runs before end with candidate i.
        totals = best[:-1, None] + cost[1:]
        chosen.append(np.argmin(totals, axis=0) + 1)
        best = np.min(totals, axis=0)
    cuts, last = [count - 1], count - 1
    for first in reversed(chosen[1:]):
        last = int(first[last]) - 1
        cuts.append(last)
    return cuts[::-1]


def checked_bucket(value: Any, site: str) -> Bucket:
    """Return a valid value of the option ``bucket``, or raise."""
    if isinstance(value, bool):
        return value
    refusal = f"{site}: bucket must be True, False or lengths such as (128, 1024, 8192), got"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{refusal} {type(value).__name__} {value!r}")
    if not value:
        raise ValueError(f"{refusal} no length")
    refusal = f"{site}: the lengths of bucket must be positive ints, got"
    return tuple(sorted({checked_int(length, refusal, least=1) for length in value}))  # pyright: ignore


@functools.lru_cache(4096)
def bucket_of(length: int, bucket: Bucket) -> int | None:
    """Return the length to which an axis is padded; None if it is longer than all of them."""
    every = (math.ceil(_RATIO_OF_BUCKETS**k) for k in itertools.count())
    sizes = every if bucket is True else bucket or ()
    return next((size for size in sizes if size >= length), None)
