# SPDX-License-Identifier: MIT
"""Whether the sizes of one call agree: batch axes by NumPy's rules, core dimensions by name.

Disagreements are returned as data; `rankax._plan.report` words them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rankax._declare.dims import Dim, Rank
from rankax._plan.levels import Shape


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
