# SPDX-License-Identifier: MIT
"""A plan as aligned text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rankax._base.words import plural, shortened
from rankax._plan.budget import MemoryFit
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Level, Shape

__all__ = [
    "Plan",
    "axis_cells",
    "legend",
    "level_how",
    "level_sentences",
    "notes",
    "plan_text",
    "summary",
    "untouched_line",
]


class Plan(Protocol):
    """What is shown of a `BatchPlan`, which imports what shows it."""

    @property
    def kernel(self) -> str: ...
    @property
    def batch_shape(self) -> Shape: ...
    @property
    def leaves(self) -> tuple[LeafPlan, ...]: ...
    @property
    def levels(self) -> tuple[Level, ...]: ...
    @property
    def untouched(self) -> tuple[tuple[str, Shape], ...]: ...
    @property
    def memory(self) -> MemoryFit | None: ...
    @property
    def reduced(self) -> tuple[int, ...]: ...
    @property
    def reduce(self) -> str: ...
    @property
    def parts(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def evaluations(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def steps(self) -> int: ...


def plan_text(plan: Plan) -> str:
    """Word a plan: a summary, a row per leaf with its batch axes in columns, a line per level."""
    lines = [summary(plan)]
    if plan.leaves:
        lines += _leaf_table(plan)
    below = [*level_sentences(plan), *legend(plan), *notes(plan)]
    return "\n".join([*lines, *(f"  {line}" for line in below)])


def summary(plan: Plan) -> str:
    """Say in one line what the call amounts to."""
    if not plan.leaves:
        return f"{plan.kernel}: no argument with a rank, so the kernel is simply called"
    if not plan.batch_shape:
        return f"{plan.kernel}: no batch axes, so the kernel is simply called"
    return (
        f"{plan.kernel}: batch shape {plan.batch_shape}, "
        f"{plural(plan.evaluations, 'evaluation')}, {plan.in_flight} in flight"
        f"{' in each part' if plan.parts else ''}, "
        f"{plural(plan.steps, 'step')}"
    )


def _leaf_table(plan: Plan) -> list[str]:
    """Align the leaves: words to the left, lengths to the right, as digits are read."""
    head = ["leaf", "shape", "rank", "core"]
    rows = [
        [leaf.path, str(leaf.shape), leaf.declared, str(leaf.core_shape)] for leaf in plan.leaves
    ]
    cells = [axis_cells(leaf, plan.batch_shape) for leaf in plan.leaves]
    if plan.batch_shape:
        rows.append(["batch", str(plan.batch_shape), "", ""])
        cells.append([str(size) for size in plan.batch_shape])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    axes = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(words: list[str], lengths: list[str]) -> str:
        left = [word.ljust(width) for word, width in zip(words, widths, strict=True)]
        right = [length.rjust(width) for length, width in zip(lengths, axes, strict=True)]
        return "  " + "  ".join([*left, " ".join(right)]).rstrip()

    title = line(head, [""] * len(axes))
    title = title.ljust(sum(widths) + 2 * len(widths) + 2) + "batch axes" if axes else title
    return [title, *(line(words, lengths) for words, lengths in zip(rows, cells, strict=True))]


def axis_cells(leaf: LeafPlan, batch_shape: tuple[int, ...]) -> list[str]:
    """One cell per batch axis: its length; ``1*`` where it is stretched; ``-`` where absent.

    Of a key that is split, ``/`` stands where it is: ``1/`` and ``/``.
    """
    absent = len(batch_shape) - len(leaf.batch_axes)
    alone, more = ("/", "/") if leaf.is_split else ("-", "*")
    present = zip(leaf.batch_axes, batch_shape[absent:], strict=True)
    return [alone] * absent + [f"{n}{more}" if n != size else str(n) for n, size in present]


def level_sentences(plan: Plan) -> list[str]:
    """Say what each level does, outermost first: its axes, its tile, the leaves it maps."""
    return [_level_sentence(plan, level) for level in plan.levels]


def _level_sentence(plan: Plan, level: Level) -> str:
    paths = [leaf.path for leaf, mapped in zip(plan.leaves, level.mapped, strict=True) if mapped]
    shown = paths if len(paths) <= 6 else [*paths[:4], f"{len(paths) - 4} more"]
    axes = ", ".join(str(axis) for axis in level.axes)
    where = f"axis {axes}" if len(level.axes) == 1 else f"axes {axes} as one"
    reduced = ", reduced" if level.reduced else ""
    return f"{where}: {level_how(level)}, mapping {', '.join(shown)}{reduced}"


def level_how(level: Level) -> str:
    """Say how one level is walked."""
    if level.tile == level.size:
        return f"vmap over {level.size}"
    word = "tile" if level.reduced else "chunk"
    return f"{plural(level.steps, word)} of {level.tile} over {level.size}"


def notes(plan: Plan) -> list[str]:
    """Say what else there is to know: what is reduced, the memory measured, what has no rank."""
    memory = [] if plan.memory is None else [str(plan.memory)]
    return [*_parts(plan), *_reduced_to(plan), *memory, *untouched_line(plan.untouched)]


def _parts(plan: Plan) -> list[str]:
    return [
        f"axis {axis}: {count} parts of {plan.batch_shape[axis] // count}, side by side"
        for axis, count in plan.parts
    ]


def _reduced_to(plan: Plan) -> list[str]:
    if not plan.reduced:
        return []
    kept = tuple(n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced)
    return [f"reduced by {plan.reduce}, to {kept}"]


def untouched_line(untouched: Sequence[tuple[str, Shape]]) -> list[str]:
    """Say which arrays have no rank, and so go whole to every item; nothing where none has."""
    if not untouched:
        return []
    return [f"untouched: {shortened([f'{path} {shape}' for path, shape in untouched])}"]


def legend(plan: Plan) -> list[str]:
    """Explain the signs that this plan shows."""
    cells = {cell for leaf in plan.leaves for cell in axis_cells(leaf, plan.batch_shape)}
    signs = ["1* stretched"] if "1*" in cells else []
    signs += ["- absent"] if "-" in cells else []
    lines = [f"({', '.join(signs)}: used again for each item, never copied)"] if signs else []
    is_split = any(cell.endswith("/") for cell in cells)
    return [*lines, "(/ split: each item has a key of its own)"] if is_split else lines
