# SPDX-License-Identifier: MIT
"""A plan as aligned text for a terminal, and as a small picture for a notebook.

The picture is a table without scripts. Its colours are translucent and its text has the notebook's
colour, so that it is readable on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rankax._base.words import plural, shortened, table
from rankax._plan.levels import Level, Shape
from rankax._plan.shapes import LeafPlan


class Cell(NamedTuple):
    """One batch axis of one leaf."""

    kind: str  # mapped, stretched, absent or split
    text: str  # its length, ``1*`` or ``-``; those of a key that is split are ``1/`` and ``/``


class Shown(NamedTuple):
    """What is shown of a plan."""

    kernel: str
    summary: str  # follows the name of the kernel
    batch_shape: Shape
    leaves: Sequence[LeafPlan]
    levels: Sequence[Level]
    notes: Sequence[str]

    @property
    def cells(self) -> list[list[Cell]]:
        """One cell per batch axis of each leaf."""
        return [_cells(leaf, self.batch_shape) for leaf in self.leaves]

    @property
    def kinds(self) -> set[str]:
        """The kinds of cell that occur."""
        return {cell.kind for cells in self.cells for cell in cells}

    def text(self) -> str:
        """Return a row per leaf, then a line per level and note."""
        lines = self._table() if self.leaves else []
        below = [_level_sentence(level, self.leaves) for level in self.levels]
        below += [*self._legend(), *self.notes]
        return "\n".join([self.kernel + self.summary, *lines, *(f"  {line}" for line in below)])

    def _table(self) -> list[str]:
        """Align words to the left, lengths of batch axes to the right."""
        header = ["leaf", "shape", "rank", "core", "batch axes" if self.batch_shape else ""]
        rows = [[x.path, str(x.shape), x.declared, str(x.core_shape)] for x in self.leaves]
        lengths = [[cell.text for cell in cells] for cells in self.cells]
        if self.batch_shape:
            rows.append(["batch", str(self.batch_shape), "", ""])
            lengths.append([str(size) for size in self.batch_shape])
        widths = [max(map(len, column)) for column in zip(*lengths, strict=True)]
        for row, texts in zip(rows, lengths, strict=True):
            row.append(" ".join(n.rjust(width) for n, width in zip(texts, widths, strict=True)))
        return [line[2:] for line in table(header, rows, ()).split("\n")]

    def _legend(self) -> list[str]:
        """Explain the signs in the table."""
        words = {"stretched": "1* stretched", "absent": "- absent"}
        signs = [text for kind, text in words.items() if kind in self.kinds]
        lines = [f"({', '.join(signs)}: used again for each item, never copied)"] if signs else []
        if "split" in self.kinds:
            lines.append("(/ split: each item has a key of its own)")
        return lines

    def html(self) -> str:
        """Draw a row per leaf with its batch axes as aligned columns, the levels below."""
        blocks = [f"<p><code>{escape(self.kernel)}</code>{escape(self.summary)}</p>"]
        axes = len(self.batch_shape)
        if self.leaves:
            over = f'<th scope="colgroup" colspan="{axes}">batch axes</th>' if axes else ""
            head = f'<th scope="col">leaf</th>{over}<th scope="col">one item</th>'
            rows = list(map(_leaf_row, self.leaves, self.cells))
            if axes:
                sizes = "".join(f'<td class="axis">{size}</td>' for size in self.batch_shape)
                rows.append(f'<tr class="batch"><th scope="row">batch</th>{sizes}<td></td></tr>')
            rows += [_level_row(level, axes) for level in self.levels]
            body = "".join(rows)
            blocks.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if axes:
            blocks.append(_key(self.kinds))
        blocks += [f'<p class="key">{escape(line)}</p>' for line in self.notes]
        return f'<div class="rankax-plan"><style>{_STYLE}</style>{"".join(blocks)}</div>'


def _cells(leaf: LeafPlan, batch_shape: Shape) -> list[Cell]:
    absent = len(batch_shape) - len(leaf.batch_axes)
    missing, stretched = Cell("absent", "-"), Cell("stretched", "1*")
    if leaf.is_split:
        missing, stretched = Cell("split", "/"), Cell("split", "1/")
    present = zip(leaf.batch_axes, batch_shape[absent:], strict=True)
    return [missing] * absent + [
        Cell("mapped", str(n)) if n == size else stretched for n, size in present
    ]


def _level_sentence(level: Level, leaves: Sequence[LeafPlan]) -> str:
    """Describe one level: its axes, its tile, the leaves that it maps."""
    paths = [leaf.path for leaf, mapped in zip(leaves, level.mapped, strict=True) if mapped]
    shown = paths if len(paths) <= 6 else [*paths[:4], f"{len(paths) - 4} more"]
    axes = ", ".join(str(axis) for axis in level.axes)
    where = f"axis {axes}" if len(level.axes) == 1 else f"axes {axes} as one"
    reduced = ", reduced" if level.reduced else ""
    return f"{where}: {_level_how(level)}, mapping {', '.join(shown)}{reduced}"


def _level_how(level: Level) -> str:
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
    return [f"{plural(lanes, 'lane')}; items diverge at", *(f"  {end}" for end in ends)]


def untouched_line(untouched: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return a line with the arrays without a rank, which every item gets whole, if any."""
    if not untouched:
        return []
    return [f"untouched: {shortened([f'{path} {shape}' for path, shape in untouched])}"]


# JupyterLab right-aligns the cells of tables, stripes rows and greys code, with selectors of up to
# two classes and two elements: .jp-ThemedContainer .jp-RenderedHTMLCommon :not(pre) > code.
# Three times the same class outranks those, and leaves !important to the user.
_ROOT = ".rankax-plan" * 3
_STYLE = """
ROOT { max-width: 100%; overflow-x: auto; color: inherit; font-size: 13px; line-height: 1.35; }
ROOT p { margin: 0 0 6px; text-align: left; }
ROOT table { border-collapse: separate; border-spacing: 2px; width: auto; margin: 0;
  border: 0; background: none; color: inherit; font-size: inherit; table-layout: auto; }
ROOT thead { border: 0; }
ROOT tr { border: 0; background: none; }
ROOT th, ROOT td { border: 0; padding: 2px 6px; background: none; color: inherit;
  font-weight: normal; text-align: left; white-space: nowrap; vertical-align: middle;
  line-height: inherit; max-width: none; }
ROOT tbody th { max-width: min(24em, 36vw); white-space: normal; overflow-wrap: anywhere; }
ROOT thead th { opacity: .7; }
ROOT code { background: none; border: 0; padding: 0; color: inherit; font-size: inherit;
  line-height: inherit; white-space: inherit; }
ROOT td.axis { min-width: 22px; text-align: center; border-radius: 3px;
  font-variant-numeric: tabular-nums; }
ROOT .mapped { background: rgba(60, 130, 230, .32); }
ROOT .stretched { background: repeating-linear-gradient(135deg,
  rgba(225, 140, 30, .45) 0 3px, rgba(225, 140, 30, .12) 3px 8px); }
ROOT .split { background: rgba(70, 170, 100, .32); }
ROOT .absent { box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .35); opacity: .6; }
ROOT tr.batch th, ROOT tr.batch td { font-weight: bold; }
ROOT tr.batch td.axis { box-shadow: inset 0 0 0 1px currentColor; }
ROOT td.span { height: 8px; padding: 0; }
ROOT td.span div { height: 5px; border: 1.5px solid currentColor; border-top: 0; opacity: .6; }
ROOT p.key { margin: 6px 0 0; opacity: .8; }
ROOT p.key .item { display: inline-block; margin-right: 12px; white-space: nowrap; }
ROOT p.key .item span { display: inline-block; min-width: 16px; text-align: center;
  padding: 0 4px; border-radius: 3px; }
""".replace("ROOT", _ROOT)


def _leaf_row(leaf: LeafPlan, cells: Sequence[Cell]) -> str:
    axes = "".join(
        f'<td class="axis {kind}">{escape(text.rstrip("*").replace("-", "–"))}</td>'
        for kind, text in cells
    )
    core = f"<code>{escape(str(leaf.core_shape))}</code>"
    if leaf.declared.startswith('"') and leaf.declared != '""':  # names say more than a count
        core += f" <code>{escape(leaf.declared)}</code>"
    return f'<tr><th scope="row"><code>{escape(leaf.path)}</code></th>{axes}<td>{core}</td></tr>'


def _level_row(level: Level, axes: int) -> str:
    """Bracket the axes that one level covers, and describe it."""
    first, last = level.axes[0], level.axes[-1]
    how = f"{_level_how(level)}, reduced" if level.reduced else _level_how(level)
    before, after = "<td></td>" * first, "<td></td>" * (axes - 1 - last)
    span = f'<td class="span" colspan="{last - first + 1}"><div></div></td>'
    return f"<tr><th></th>{before}{span}{after}<td>{how}</td></tr>"


def _key(kinds: set[str]) -> str:
    """Explain the kinds of cell that occur."""
    words = {
        "mapped": ("n", "mapped"),
        "stretched": ("1", "stretched, not copied"),
        "absent": ("–", "absent, not copied"),
        "split": ("/", "split, a key for each item"),
    }
    shown = [
        f'<span class="item"><span class="{kind}">{sign}</span> {meaning}</span>'
        for kind, (sign, meaning) in words.items()
        if kind in kinds
    ]
    return f'<p class="key">{" ".join(shown)}</p>'
