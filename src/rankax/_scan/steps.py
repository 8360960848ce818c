# SPDX-License-Identifier: MIT
"""Which steps of a loop are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class KeptSteps:
    """The kept steps of a loop, in the order of execution.

    First come ``lead`` skipped steps. Then come ``blocks`` blocks, each of ``before`` skipped
    steps, a kept one and ``after`` skipped ones. If ``partial``, another block follows that ends
    with its kept step. Last come ``trail`` skipped steps.
    """

    lead: int
    blocks: int
    before: int
    after: int
    partial: bool
    trail: int

    @property
    def stride(self) -> int:
        """Steps in one block."""
        return self.before + 1 + self.after

    @property
    def all(self) -> bool:
        """Whether no step is skipped."""
        return not self.lead and self.stride == 1 and not self.trail


def as_range(kept: Sequence[int]) -> range | None:
    """Return indices as a range; None if they are not one."""
    step = kept[1] - kept[0] if len(kept) > 1 else 1
    even = range(kept[0], kept[0] + step * len(kept), step) if kept and step else range(0)
    return even if list(kept) == list(even) else None


def find_kept_steps(length: int, kept: range, *, reverse: bool) -> KeptSteps:
    """Find the ``kept`` steps of a loop that runs up, or down if ``reverse``.

    The blocks begin as early as possible, so that they tile the loop if the stride divides its
    length and no block is left out.
    """
    if kept.step < 0:
        kept = kept[::-1]
    if not kept:
        return KeptSteps(length, 0, 0, 0, False, 0)
    first = length - 1 - kept[-1] if reverse else kept[0]
    stride = kept.step if len(kept) > 1 else 1
    before = min(first, stride - 1)
    lead = first - before
    blocks = min(len(kept), (length - lead) // stride)
    partial = blocks < len(kept)
    trail = length - lead - blocks * stride - (before + 1 if partial else 0)
    return KeptSteps(lead, blocks, before, stride - 1 - before, partial, trail)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The steps of a loop up to the last kept one, cut after each kept step.

    ``ends`` are the kept steps, each once, in the order of execution; ``of_output`` is the window
    of each output.
    """

    ends: tuple[int, ...]
    of_output: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The steps of all windows."""
        return self.ends[-1] + 1 if self.ends else 0

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each window."""
        return (0, *(end + 1 for end in self.ends))[: len(self.ends)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of steps in each window."""
        return tuple(end + 1 - start for start, end in zip(self.starts, self.ends, strict=True))


def find_windows(length: int, kept: Sequence[int], *, reverse: bool) -> Windows:
    """Find the windows of a loop that runs up, or down if ``reverse``, with an output per index."""
    places = [length - 1 - index for index in kept] if reverse else kept
    ends = sorted(set(places))
    numbers = {end: number for number, end in enumerate(ends)}
    return Windows(tuple(ends), tuple(numbers[place] for place in places))
