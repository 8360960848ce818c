# SPDX-License-Identifier: MIT
"""A memory limit: how it is written, and the search for the largest chunk within it.

`rankax.ext.memory.limit` measures a chunk, by compiling the whole call. Only a chunk size that was
itself measured to be within the limit is chosen. Lines through the measurements only tell where to
measure next.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from rankax.core.base.messages import checked_int
from rankax.core.plan.schedule import even_chunk_size

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


def checked_limit(value: Any, site: str) -> int | str | None:
    """Return a limit in normal form: a number of bytes, or a share such as ``"50%"``."""
    refusal = f"{site}: memory_limit must be {_UNDERSTOOD}, got"
    if value is None:
        return None
    if not isinstance(value, str):
        return checked_int(value, refusal, least=1)
    match = _PATTERN.fullmatch(value)
    amount, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    if unit == "%" and 0 < amount <= 100:
        return f"{amount:g}%"
    count = int(amount * _UNITS.get(unit, 0))
    if count < 1:
        raise ValueError(f"{refusal} {value!r}")
    return count


def limit_in_bytes(limit: int | str, free: Callable[[], int]) -> int:
    """Return the bytes of a limit in normal form; a share refers to the bytes that are ``free``."""
    return limit if isinstance(limit, int) else int(free() * float(limit[:-1]) / 100)


def shown_bytes(count: int) -> str:
    """Return a number of bytes in words, with three digits: ``1.23 MB``."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_PREFIXES) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_PREFIXES[unit]}B"


@dataclasses.dataclass(frozen=True)
class MemoryFit:
    """What a chunk size needs, such as the one chosen for a memory limit.

    Attributes
    ----------
    limit : int
        The limit in bytes.
    chunk_size : int
        The largest ``chunk_size`` that was measured to be within the limit.
    in_flight : int
        How many items are evaluated at once.
    forward : int
        Temporaries of the call in bytes, as reported by the compiler.
    gradient : int or None
        Those of its gradient. None if there is no gradient, or if chunks do not bound its memory,
        as with ``checkpoint=False``.
    stored : bool
        Whether the reverse pass recomputes nothing, because the limit leaves room for everything.
    no_gradient : str
        Why there is no gradient, if there is none: ``"Differentiation rule for 'schur' not
        implemented"``.
    cotangents : int
        What the gradient needs besides, for any chunk size, if it is also taken with respect to
        large arguments: their cotangents are left out where there is no room for them.
    """

    limit: int
    chunk_size: int
    in_flight: int
    forward: int
    gradient: int | None = None
    stored: bool = False
    no_gradient: str = ""
    cotangents: int = 0

    @property
    def most(self) -> int:
        """The bytes of the call or of its gradient, whichever needs more."""
        return max(self.forward, self.gradient or 0)

    def __str__(self) -> str:
        gradient = "" if self.gradient is None else f", gradient {shown_bytes(self.gradient)}"
        if self.no_gradient:
            gradient = f", gradient: none ({self.no_gradient})"
        if self.cotangents:
            gradient += (
                f" (with cotangents of large arguments, {shown_bytes(self.cotangents)} more)"
            )
        stored = ", nothing recomputed" if self.stored else ""
        return (
            f"memory limit {shown_bytes(self.limit)}: allows {self.chunk_size} in flight, forward "
            f"{shown_bytes(self.forward)}{gradient}{stored}"
        )


class TooLargeError(ValueError):
    """Raised where one item exceeds the limit."""


_SMALL = 8  # the first chunk size to measure
_MOST_MEASURED = 8
_ENOUGH = 0.5  # the share of the limit at which the search ends
_AIM = 0.97  # the share of the limit that a guess aims at


def fit_chunk(
    measure: Callable[[int], MemoryFit], sizes: Sequence[int], most: int, limit: int, site: str
) -> MemoryFit:
    """Return a chunk size of at most ``most`` that was measured to be within ``limit``.

    Memory is assumed to be linear in the chunk size: at first proportional to it, then on the line
    through two measurements, those around the limit or else those nearest to it. If it is
    proportional, the second measurement is the last. The search also ends at a chunk if twice as
    many items exceed the limit, or should. Chunks that divide the batch (of levels of such
    ``sizes``) are preferred because others copy the outputs in the gradient, which is not linear.

    Raises
    ------
    TooLargeError
        If a chunk of one item exceeds the limit.
    """
    measured: dict[int, MemoryFit] = {}
    low = 0  # the largest chunk within the limit
    candidate = first = even_chunk_size(sizes, min(_SMALL, most))
    while len(measured) < _MOST_MEASURED:
        measured[candidate] = measure(candidate)
        low = max((size for size, cost in measured.items() if cost.most <= limit), default=0)
        high = min((size for size in measured if size > low), default=most + 1)
        is_close = high <= low + 1 or (high in measured and high <= 2 * low)
        if is_close:
            break
        guess = _guess(measured, low, high, limit)
        even = even_chunk_size(sizes, guess)
        candidate = even if even > low else guess
        # What all chunks need, such as a copy of the outputs, may be most of it.
        is_enough = low and len(measured) > 1 and measured[low].most >= _ENOUGH * limit
        if is_enough and candidate < 2 * low:
            break
    low = low or 1
    cost = measured.get(low) or measure(low)
    if cost.most > limit:
        # Both are always measured. A chunk that the compiler fuses may need less than one item.
        least = min(cost.most, measured[first].most)
        raise TooLargeError(_too_much(cost, least, site))
    return cost


def _guess(measured: dict[int, MemoryFit], low: int, high: int, limit: int) -> int:
    """Return a chunk size between ``low`` and ``high`` that should need nearly the limit."""
    below = [measured[size].most for size in sorted(measured) if size <= low]
    if len(below) > 1 and below[-1] <= below[-2]:  # a tile, say, needs the same for any chunk
        return (low + high) // 2 if high in measured else high - 1
    near = sorted(measured.values(), key=lambda cost: abs(cost.most - limit))[:2]
    if low and high in measured:
        near = [measured[low], measured[high]]
    points = [(cost.in_flight, cost.most) for cost in near]
    (x, y), (x0, y0) = points if len(points) > 1 else (points[0], (0, 0))
    slope = (y - y0) / (x - x0) if x != x0 else 0.0
    guess = high - 1 if low else high // 2
    if slope > 0:
        guess = int(x + (_AIM * limit - y) / slope)
    return min(max(guess, low + 1), high - 1)


def _too_much(cost: MemoryFit, least: int, site: str) -> str:
    needs = f"{shown_bytes(cost.forward)} forward"
    if cost.gradient is not None:
        needs += f" and {shown_bytes(cost.gradient)} in the gradient"
    if cost.cotangents:
        needs += f" (and {shown_bytes(cost.cotangents)} for cotangents of large arguments)"
    step = "split the item itself, such as with chunked_vmap inside the kernel"
    return (
        f"{site}: one item alone needs {needs} beyond inputs and outputs, and memory_limit is "
        f"{shown_bytes(cost.limit)}; raise it to at least {least} bytes, or {step}"
    )
