# SPDX-License-Identifier: MIT
"""Checks of arguments, before anything is traced."""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax._base.words import listed, table


def positive_int(value: Any, site: str, name: str) -> int:
    """Return ``value`` as a positive ``int``; the error begins with ``site``."""
    return checked_int(value, f"{site}: {name} must be a positive int, got", least=1)


def checked_int(
    value: Any, refusal: str, *, least: int | None = None, bools: bool = False, came: str = ""
) -> int:
    """Return ``value`` as an ``int`` of at least ``least``.

    Parameters
    ----------
    value : object
    refusal : str
        The beginning of the error: the parameter, what it must be, and "got".
    bools : bool
        Whether ``True`` and ``False`` count as ints, as in Python.
    came : str
        How the error describes a value of another type; by default by its type and ``repr``.
    """
    if isinstance(value, bool) and not bools:
        raise TypeError(f"{refusal} {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        came = came or f"{type(value).__name__} {value!r}"
        raise TypeError(f"{refusal} {came}") from None
    if least is not None and number < least:
        raise ValueError(f"{refusal} {number}")
    return number


def check_bool(value: Any, site: str, name: str) -> bool:
    """Return ``value``; refuse one that is neither ``True`` nor ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{site}: {name} must be True or False, got {value!r}")
    return value


def check_callable(value: Any, site: str, name: str) -> None:
    """Refuse a value that is not callable."""
    if not callable(value):
        raise TypeError(f"{site}: {name} must be callable, got {type(value).__name__}")


def common_length(leaves: Sequence[tuple[str, Any, int]], site: str) -> int:
    """Return the common length of the looped axes of all ``(name, leaf, axis)``.

    Raises
    ------
    ValueError
        If a leaf lacks its axis, or the lengths differ. The error shows a table of all leaves with
        the offending ones marked. No axis is ever cut to the shortest length.
    """
    header = ("leaf", "shape", "axis", "length")
    rows = [(name, str(np.shape(leaf)), str(axis)) for name, leaf, axis in leaves]
    lacking = [
        i for i, (_, leaf, axis) in enumerate(leaves) if not -np.ndim(leaf) <= axis < np.ndim(leaf)
    ]
    if lacking:
        raise ValueError(
            f"{site}: {listed([leaves[i][0] for i in lacking])} "
            f"{'lacks' if len(lacking) == 1 else 'lack'} the axis to loop over\n\n"
            + table(header[:3], rows, lacking)
        )
    lengths = [np.shape(leaf)[axis] for _, leaf, axis in leaves]
    usual = Counter(lengths).most_common(1)[0][0]
    if odd := [i for i, length in enumerate(lengths) if length != usual]:
        raise ValueError(
            f"{site}: the looped axes must have one length, got "
            f"{listed([str(n) for n in dict.fromkeys(lengths)])}\n\n"
            + table(header, [(*row, str(n)) for row, n in zip(rows, lengths, strict=True)], odd)
        )
    return usual
