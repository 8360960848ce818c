# SPDX-License-Identifier: MIT
"""What a caller passed, checked before anything is traced."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax._base.words import listed, table

__all__ = [
    "check_bool",
    "check_callable",
    "check_no_ref",
    "checked_int",
    "common_length",
    "positive_int",
]


def positive_int(value: Any, function: str, name: str) -> int:
    """Return ``value`` as a positive ``int``, or say which parameter of which function is wrong."""
    return checked_int(value, f"{function}: {name} must be a positive int, got", least=1)


def checked_int(
    value: Any, refusal: str, *, least: int | None = None, bools: bool = False, came: str = ""
) -> int:
    """Return ``value`` as an ``int`` of at least ``least``.

    Parameters
    ----------
    value : object
    refusal : str
        How the error begins, up to what came: the parameter and what it must be.
    bools : bool
        Whether ``True`` and ``False`` are ints, as they are to Python.
    came : str
        What came, in the error about a value of another type; by default its type and itself.
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


def check_bool(value: Any, function: str, name: str) -> None:
    """Refuse what is neither ``True`` nor ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def check_callable(value: Any, function: str, name: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"{function}: {name} must be callable, got {type(value).__name__}")


def check_no_ref(value: Any, function: str, name: str) -> None:
    """Refuse a `jax.Ref`: `jax.numpy.asarray` of one fails, or does not return.

    It is known by its type in JAX, because JAX 0.7 has no `jax.Ref`.
    """
    if type(getattr(value, "aval", None)).__name__ == "AbstractRef":
        raise TypeError(
            f"{function}: {name} is a jax.Ref, not an array; read it before the call: {name}[...]"
        )


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
