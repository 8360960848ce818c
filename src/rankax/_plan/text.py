# SPDX-License-Identifier: MIT
"""The elements of a plan as aligned text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rankax._base.words import plural, shortened, table
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Level, Shape


def leaf_table(leaves: Sequence[LeafPlan], batch_shape: Shape) -> list[str]:
    """Return a row per leaf: words aligned to the left, lengths of batch axes to the right."""
    rows = [[leaf.path, str(leaf.shape), leaf.declared, str(leaf.core_shape)] for leaf in leaves]
    cells = [axis_cells(leaf, batch_shape) for leaf in leaves]
    if batch_shape:
        rows.append(["batch", str(batch_shape), "", ""])
        cells.append([str(size) for size in batch_shape])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, lengths in zip(rows, cells, strict=True):
        row.append(" ".join(n.rjust(width) for n, width in zip(lengths, widths, strict=True)))
    header = ["leaf", "shape", "rank", "core", "batch axes" if batch_shape else ""]
    return [line[2:] for line in table(header, rows, ()).split("\n")]


def axis_cells(leaf: LeafPlan, batch_shape: Shape) -> list[str]:
    """Return one cell per batch axis: the length, ``1*`` if it is stretched, ``-`` if absent.

    For a key that is split, these are ``1/`` and ``/``.
    """
    absent = len(batch_shape) - len(leaf.batch_axes)
    missing, stretched = ("/", "/") if leaf.is_split else ("-", "*")
    present = zip(leaf.batch_axes, batch_shape[absent:], strict=True)
    return [missing] * absent + [f"{n}{stretched}" if n != size else str(n) for n, size in present]


def legend(leaves: Sequence[LeafPlan], batch_shape: Shape) -> list[str]:
    """Explain the signs in the table of these leaves."""
    cells = {cell for leaf in leaves for cell in axis_cells(leaf, batch_shape)}
    signs = ["1* stretched"] if "1*" in cells else []
    signs += ["- absent"] if "-" in cells else []
    lines = [f"({', '.join(signs)}: used again for each item, never copied)"] if signs else []
    is_split = any(cell.endswith("/") for cell in cells)
    return [*lines, "(/ split: each item has a key of its own)"] if is_split else lines


def level_sentence(level: Level, leaves: Sequence[LeafPlan]) -> str:
    """Describe one level: its axes, its tile, the leaves that it maps."""
    paths = [leaf.path for leaf, mapped in zip(leaves, level.mapped, strict=True) if mapped]
    shown = paths if len(paths) <= 6 else [*paths[:4], f"{len(paths) - 4} more"]
    axes = ", ".join(str(axis) for axis in level.axes)
    where = f"axis {axes}" if len(level.axes) == 1 else f"axes {axes} as one"
    reduced = ", reduced" if level.reduced else ""
    return f"{where}: {level_how(level)}, mapping {', '.join(shown)}{reduced}"


def level_how(level: Level) -> str:
    """Describe how one level is evaluated."""
    if level.in_lanes:
        return f"{level.size} in the lanes"
    if level.tile == level.size:
        return f"vmap over {level.size}"
    word = "tile" if level.reduced else "chunk"
    other = level.derivative
    there = "" if other is None else f" ({other.tile or other.size} in derivatives)"
    return f"{plural(level.steps, word)} of {level.tile} over {level.size}{there}"


def ends_lines(ends: Sequence[str], lanes: int | None) -> list[str]:
    """Say where items part, and so end by themselves."""
    if lanes is None:
        return ["in lockstep: no loop, and no expensive branch, depends on the item"]
    return [f"{plural(lanes, 'lane')}; items part at", *(f"  {end}" for end in ends)]


def untouched_line(untouched: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return a line with the arrays without a rank, which every item gets whole, if any."""
    if not untouched:
        return []
    return [f"untouched: {shortened([f'{path} {shape}' for path, shape in untouched])}"]
