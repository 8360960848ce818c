# SPDX-License-Identifier: MIT
"""Which steps of a loop are kept, and the items that they read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

__all__ = ["KeptSteps", "cut_steps", "find_kept_steps"]


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


def cut_steps(tree: Any, begin: int, end: int, *, reverse: bool) -> Any:
    """Cut the leading axis of every leaf to the steps from ``begin`` to ``end``.

    The steps are counted in the order of execution: if ``reverse``, from the last item.
    """

    def cut(leaf: jax.Array) -> jax.Array:
        length = leaf.shape[0]
        low, high = (length - end, length - begin) if reverse else (begin, end)
        return lax.slice_in_dim(leaf, low, high)

    return jax.tree.map(cut, tree)
