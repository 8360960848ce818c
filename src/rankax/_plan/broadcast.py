# SPDX-License-Identifier: MIT
"""Whether the sizes of one call agree: batch axes by NumPy's rules, core dimensions by name.

What does not agree is returned as data; `rankax._plan.report` words it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rankax._declare.dims import Dim, Rank
from rankax._declare.expressions import CannotComputeError
from rankax._plan.levels import Shape

__all__ = ["Clash", "bind_sizes", "broadcast"]


@dataclasses.dataclass(frozen=True)
class Clash:
    """One axis that has several sizes, or one size that is not the declared one."""

    axis: int | Dim  # a batch axis, counted from the right; or a core dimension
    leaves: dict[int, list[int]]  # those that show each size, by position
    expected: Any = None  # of a dimension without a name: its size, or why it has none


def broadcast(batches: Iterable[tuple[int, Shape]]) -> tuple[Shape, list[Clash]]:
    """Return the batch shape, and a clash for every axis that has two lengths.

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
    ]
    return _bind_names(declared, sizes) + _check_others(declared, sizes)


def _bind_names(declared: list[tuple[int, int, Dim]], sizes: dict[str, int]) -> list[Clash]:
    found: dict[str, Clash] = {}
    for leaf, size, dim in declared:
        if dim.name is not None and not (dim.stretches and size == 1):
            clash = found.setdefault(dim.name, Clash(dim, {}))
            clash.leaves.setdefault(size, []).append(leaf)
    for name, clash in found.items():
        size = sizes.setdefault(name, next(iter(clash.leaves)))
        clash.leaves.setdefault(size, [])  # where an earlier leaf has it, which is not among these
    return [clash for clash in found.values() if len(clash.leaves) > 1]


def _check_others(declared: list[tuple[int, int, Dim]], sizes: Mapping[str, int]) -> list[Clash]:
    found: dict[tuple[str, int], Clash] = {}
    for leaf, size, dim in declared:
        if dim.name is not None or (dim.stretches and size == 1):
            continue
        try:
            expected = dim.expected(sizes)
        except CannotComputeError as error:
            expected = error
        if expected is not None and expected != size:
            clash = found.setdefault((dim.text.lstrip("#"), size), Clash(dim, {}, expected))
            clash.leaves.setdefault(size, []).append(leaf)
    return list(found.values())
