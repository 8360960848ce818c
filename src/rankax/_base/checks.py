# SPDX-License-Identifier: MIT
"""What a caller passed, checked before anything is traced."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax._base.words import listed, table

__all__ = ["common_length", "positive_int"]


def positive_int(value: Any, function: str, name: str) -> int:
    """Return ``value`` as a positive ``int``, or say which parameter of which function is wrong."""
    if isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a positive int, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {name} must be a positive int, got {type(value).__name__} {value!r}"
        ) from None
    if number < 1:
        raise ValueError(f"{function}: {name} must be a positive int, got {number}")
    return number


def common_length(leaves: Sequence[tuple[str, Any, int]], function: str) -> int:
    """Return the length that every ``(name, leaf, axis)`` has along its own axis.

    Raises
    ------
    ValueError
        If a leaf has no such axis, or the lengths differ: a table of all leaves, the odd ones
        marked. Nothing is ever cut to the shortest.
    """
    if short := [i for i, (_, leaf, axis) in enumerate(leaves) if not _has_axis(leaf, axis)]:
        rows = [(name, str(np.shape(leaf)), str(axis)) for name, leaf, axis in leaves]
        raise ValueError(
            f"{function}: {listed([leaves[i][0] for i in short])} "
            f"{'lacks' if len(short) == 1 else 'lack'} the axis to loop over\n\n"
            + table(("leaf", "shape", "axis"), rows, short)
        )
    lengths = [np.shape(leaf)[axis] for _, leaf, axis in leaves]
    usual = Counter(lengths).most_common(1)[0][0]
    if odd := [i for i, length in enumerate(lengths) if length != usual]:
        rows = [
            (name, str(np.shape(leaf)), str(axis), str(length))
            for (name, leaf, axis), length in zip(leaves, lengths, strict=True)
        ]
        raise ValueError(
            f"{function}: the looped axes must have one length, got "
            f"{listed([str(n) for n in dict.fromkeys(lengths)])}\n\n"
            + table(("leaf", "shape", "axis", "length"), rows, odd)
        )
    return usual


def _has_axis(leaf: Any, axis: int) -> bool:
    return -np.ndim(leaf) <= axis < np.ndim(leaf)
