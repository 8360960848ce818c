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
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from rankax.ext.padding import bucket_of

Array = np.ndarray[Any, Any]

MOST_LENGTHS = 12
_ENOUGH = 1 / 0.9  # of the rows that there are, the rows that are evaluated
_RATIO = 1.5  # of one length of the series to the next, which fills a fifth in on average
_FEW = 64
_MOST_CANDIDATES = 400  # distinct lengths at which a run may end


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The items that are padded to the same length."""

    items: Array  # their numbers, in ascending order
    lengths: tuple[int, ...]  # of each ragged dimension


def groups_of(lengths: Array, *, in_series: bool) -> list[Group]:
    """Sort items into groups.

    Parameters
    ----------
    lengths : array of shape (items, dimensions)
    in_series : bool
        Whether lengths come from the geometric series.
    """
    filled = np.maximum(lengths, 1)
    if in_series:
        series = series_to(int(filled.max(initial=1)))
        filled = series[np.searchsorted(series, filled)]
    rows = filled.sum(1)
    order = np.argsort(rows, kind="stable")
    filled, rows = filled[order], rows[order]
    ends = np.flatnonzero(np.append(rows[1:] != rows[:-1], True)) + 1
    if len(ends) > _MOST_CANDIDATES:
        ends = ends[np.linspace(0, len(ends) - 1, _MOST_CANDIDATES).astype(int)]
    most = np.maximum.reduceat(filled, np.append(0, ends[:-1]))
    enough = 0 if in_series else int(np.maximum(lengths, 1).sum() * _ENOUGH)
    bounds = [0, *(ends[i] for i in _cuts(ends, most, enough))]
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
