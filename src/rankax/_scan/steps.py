# SPDX-License-Identifier: MIT
"""Which steps of a loop are kept."""

from __future__ import annotations

import dataclasses

__all__ = ["KeptSteps", "find_kept_steps"]


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


def find_kept_steps(length: int, window: slice, *, reverse: bool) -> KeptSteps:
    """Find the steps ``range(length)[window]`` of a loop that runs up, or down if ``reverse``.

    The blocks begin as early as possible, so that they tile the loop if the stride divides its
    length and no block is left out.
    """
    kept = range(length)[window]
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
