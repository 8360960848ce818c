# SPDX-License-Identifier: MIT
"""A plan as aligned text, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankax._errors import plural

if TYPE_CHECKING:
    from rankax._plan import BatchPlan, LeafPlan, Level

__all__ = ["axis_cells", "level_sentence", "plan_text", "summary"]


def plan_text(plan: BatchPlan) -> str:
    """Word a plan: a summary, a row per leaf with its batch axes in columns, a line per level."""
    header = ["leaf", "shape", "rank", *(["batch axes"] if plan.batch_shape else [])]
    rows = [
        [leaf.path, str(leaf.shape), leaf.declared, *axis_cells(leaf, plan.batch_shape)]
        for leaf in plan.leaves
    ]
    total = ["", "", "", *(str(size) for size in plan.batch_shape)]
    columns = len(total)
    widths = [max((len(row[i]) for row in [*rows, total]), default=0) for i in range(columns)]
    widths[:3] = [max(width, len(name)) for width, name in zip(widths, header, strict=False)]

    def line(cells: list[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(cells[:3], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=False)]
        return ("  " + "  ".join([*left, *right])).rstrip()

    lines = [summary(plan), line(header[:3]) + ("  batch axes" if plan.batch_shape else "")]
    lines += [line(row) for row in rows]
    lines += [f"  {level_sentence(plan, level)}" for level in plan.levels]
    return "\n".join(lines)


def summary(plan: BatchPlan) -> str:
    """Say in one line what the call amounts to."""
    amount = (
        f"{plural(plan.evaluations, 'evaluation')}, {plan.in_flight} in flight, "
        f"{plural(plan.steps, 'step')}"
    )
    return f"{plan.kernel}: batch {plan.batch_shape}, {amount}"


def axis_cells(leaf: LeafPlan, batch_shape: tuple[int, ...]) -> list[str]:
    """One cell per batch axis: its length; ``1*`` where it is stretched; ``-`` where absent."""
    absent = len(batch_shape) - len(leaf.batch_axes)
    present = zip(leaf.batch_axes, batch_shape[absent:], strict=True)
    return ["-"] * absent + [f"{n}*" if n != size else str(n) for n, size in present]


def level_sentence(plan: BatchPlan, level: Level) -> str:
    """Say what one level does: its axes, its tile, the leaves it maps."""
    paths = [leaf.path for leaf, mapped in zip(plan.leaves, level.mapped, strict=True) if mapped]
    noun = "axis" if len(level.axes) == 1 else "axes"
    axes = ", ".join(str(axis) for axis in level.axes)
    how = "vmap" if level.tile == level.size else f"chunks of {level.tile}"
    return f"{noun} {axes}: {how} over {level.size} of {', '.join(paths)}"
