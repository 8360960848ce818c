# SPDX-License-Identifier: MIT
"""A memory limit: how it is written, and which chunk keeps to it.

What a chunk needs is measured by others (`_map/cost.py`); here are the words and the search.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from rankax._plan.chunks import even_chunk_size

__all__ = ["Cost", "MemoryFit", "checked_limit", "fit_chunk", "limit_in_bytes", "shown_bytes"]

_PREFIXES = ("", "k", "M", "G", "T")
_UNITS = {
    **{f"{prefix}B".lower(): 1000**i for i, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}iB".lower(): 1024**i for i, prefix in enumerate(_PREFIXES) if prefix},
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|[a-z]+)\s*", re.IGNORECASE)
_UNDERSTOOD = (
    "a positive number of bytes as an int, a string with a unit "
    '("500 MB", "1.5 GiB"; B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), or a share of the free memory '
    '("50%")'
)


def checked_limit(value: Any, where: str) -> int | str | None:
    """Return a limit in normal form: bytes, or a share as ``"50%"``; or say what is understood."""
    refusal = f"{where}: memory_limit must be {_UNDERSTOOD}, got"
    if value is None:
        return None
    if not isinstance(value, str):
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise TypeError(f"{refusal} {type(value).__name__} {value!r}")
        if number < 1:
            raise ValueError(f"{refusal} {number}")
        return number
    match = _PATTERN.fullmatch(value)
    if match is None:
        raise ValueError(f"{refusal} {value!r}")
    amount, unit = float(match[1]), match[2].lower()
    if unit == "%" and 0 < amount <= 100:
        return f"{amount:g}%"
    count = int(amount * _UNITS.get(unit, 0))
    if count < 1:
        raise ValueError(f"{refusal} {value!r}")
    return count


def limit_in_bytes(limit: int | str, free: Callable[[], int]) -> int:
    """Return a limit in normal form in bytes; a share is one of what is ``free``."""
    return limit if isinstance(limit, int) else int(free() * float(limit[:-1]) / 100)


def shown_bytes(count: int) -> str:
    """Word a number of bytes with three digits: ``1.23 MB``."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_PREFIXES) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_PREFIXES[unit]}B"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The temporaries of one call in bytes, as the compiler says."""

    in_flight: int
    forward: int
    gradient: int | None  # where there is one

    @property
    def most(self) -> int:
        """Return the larger of the two."""
        return max(self.forward, self.gradient or 0)


@dataclasses.dataclass(frozen=True)
class MemoryFit:
    """What was chosen for a memory limit.

    Attributes
    ----------
    limit : int
        The limit in bytes.
    chunk_size : int
        The largest ``chunk_size`` that was found to keep to it.
    forward : int
        Temporaries of the call in bytes, as the compiler says.
    gradient : int or None
        Those of its gradient. None where there is none, or where it is not bounded by chunks, as
        with ``checkpoint=False``.
    """

    limit: int
    chunk_size: int
    forward: int
    gradient: int | None

    def __str__(self) -> str:
        gradient = "" if self.gradient is None else f", gradient {shown_bytes(self.gradient)}"
        return (
            f"memory limit {shown_bytes(self.limit)}: chunk_size {self.chunk_size}, forward "
            f"{shown_bytes(self.forward)}{gradient}"
        )


_SMALL, _MIDDLE = 8, 64  # chunk sizes of the first measurements
_MOST_MEASURED = 8
_ENOUGH = 0.5  # of the limit: no more is looked for


def fit_chunk(
    measure: Callable[[int], Cost], sizes: Sequence[int], most: int, limit: int, where: str
) -> MemoryFit:
    """Return a chunk size of at most ``most`` that was measured to keep to ``limit``.

    Memory is taken to be a line: through two small chunks at first, then through what was measured
    nearest to the limit. Where it is one, the third measurement is the last. Chunks that divide the
    batch (of levels of such ``sizes``) are preferred, for others need a copy of the outputs in the
    gradient, which is no matter of lines.

    Raises
    ------
    ValueError
        If a chunk of one item does not keep to the limit.
    """
    measured: dict[int, Cost] = {}
    candidate = even_chunk_size(sizes, min(_SMALL, most))
    while len(measured) < _MOST_MEASURED:
        measured[candidate] = measure(candidate)
        fits = [size for size, cost in measured.items() if cost.most <= limit]
        low = max(fits, default=0)
        high = min((size for size in measured if size > low), default=most + 1)
        if high <= low + 1 or (low and measured[low].most >= _ENOUGH * limit):
            break
        guess = _guess(measured, low, high, limit)
        even = even_chunk_size(sizes, guess)
        candidate = even if even > low else guess
    if low := max((size for size, cost in measured.items() if cost.most <= limit), default=0):
        return MemoryFit(limit, low, measured[low].forward, measured[low].gradient)
    one = measured.get(1) or measure(1)
    if one.most > limit:
        raise ValueError(_too_much(one, limit, where))
    return MemoryFit(limit, 1, one.forward, one.gradient)


def _guess(measured: dict[int, Cost], low: int, high: int, limit: int) -> int:
    """Return the chunk size between ``low`` and ``high`` that may need nearly the limit."""
    if len(measured) == 1 and low:
        return min(_MIDDLE, high - 1)
    near = sorted(measured.values(), key=lambda cost: abs(cost.most - limit))[:2]
    points = [(cost.in_flight, cost.most) for cost in near]
    (x, y), (x0, y0) = points if len(points) > 1 else (points[0], (0, 0))
    slope = (y - y0) / (x - x0) if x != x0 else 0.0
    guess = high - 1 if low else high // 2
    if slope > 0:
        guess = int(x + (_AIM * limit - y) / slope)
    return min(max(guess, low + 1), high - 1)


_AIM = 0.97  # of the limit


def _too_much(cost: Cost, limit: int, where: str) -> str:
    needs = f"{shown_bytes(cost.forward)} forward"
    hint = ""
    if cost.gradient is not None:
        needs += f" and {shown_bytes(cost.gradient)} in the gradient"
        if cost.forward <= limit:
            hint = "; with checkpoint=False the gradient is not counted"
    return (
        f"{where}: one item alone needs {needs} beyond inputs and outputs, and memory_limit is "
        f"{shown_bytes(limit)}{hint}"
    )
