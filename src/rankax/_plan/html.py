# SPDX-License-Identifier: MIT
"""A plan as a small picture, for a notebook.

It is a table without scripts. Its colours are translucent and its text has the notebook's colour,
so that it is readable on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Level, Shape
from rankax._plan.text import axis_cells, level_how

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


def plan_html(
    kernel: str,
    summary: str,
    batch_shape: Shape,
    leaves: Sequence[LeafPlan],
    levels: Sequence[Level],
    notes: Sequence[str],
) -> str:
    """Draw a plan: a row per leaf with its batch axes as aligned columns, the levels below."""
    blocks = [f"<p><code>{escape(kernel)}</code>{escape(summary)}</p>"]
    axes = len(batch_shape)
    if leaves:
        over = f'<th scope="colgroup" colspan="{axes}">batch axes</th>' if axes else ""
        head = f'<th scope="col">leaf</th>{over}<th scope="col">one item</th>'
        rows = [_leaf_row(leaf, batch_shape) for leaf in leaves]
        if axes:
            sizes = "".join(f'<td class="axis">{size}</td>' for size in batch_shape)
            rows.append(f'<tr class="batch"><th scope="row">batch</th>{sizes}<td></td></tr>')
        rows += [_level_row(level, axes) for level in levels]
        body = "".join(rows)
        blocks.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if axes:
        blocks.append(_key([_axis_cells(leaf, batch_shape) for leaf in leaves]))
    blocks += [f'<p class="key">{escape(line)}</p>' for line in notes]
    return f'<div class="rankax-plan"><style>{_STYLE}</style>{"".join(blocks)}</div>'


def _leaf_row(leaf: LeafPlan, batch_shape: Shape) -> str:
    cells = _axis_cells(leaf, batch_shape)
    core = f"<code>{escape(str(leaf.core_shape))}</code>"
    if leaf.declared.startswith('"') and leaf.declared != '""':  # names say more than a count
        core += f" <code>{escape(leaf.declared)}</code>"
    return f'<tr><th scope="row"><code>{escape(leaf.path)}</code></th>{cells}<td>{core}</td></tr>'


def _axis_cells(leaf: LeafPlan, batch_shape: Shape) -> str:
    kinds = {"-": "absent", "*": "stretched", "/": "split"}
    return "".join(
        f'<td class="axis {kinds.get(text[-1], "mapped")}">'
        f"{escape(text.rstrip('*').replace('-', '–'))}</td>"
        for text in axis_cells(leaf, batch_shape)
    )


def _level_row(level: Level, axes: int) -> str:
    """Bracket the axes that one level covers, and describe it."""
    first, last = level.axes[0], level.axes[-1]
    how = f"{level_how(level)}, reduced" if level.reduced else level_how(level)
    before, after = "<td></td>" * first, "<td></td>" * (axes - 1 - last)
    span = f'<td class="span" colspan="{last - first + 1}"><div></div></td>'
    return f"<tr><th></th>{before}{span}{after}<td>{how}</td></tr>"


def _key(cells: Sequence[str]) -> str:
    """Explain the kinds of cell that occur."""
    kinds = {
        "mapped": ("n", "mapped"),
        "stretched": ("1", "stretched, not copied"),
        "absent": ("–", "absent, not copied"),
        "split": ("/", "split, a key for each item"),
    }
    shown = [
        f'<span class="item"><span class="{kind}">{sign}</span> {meaning}</span>'
        for kind, (sign, meaning) in kinds.items()
        if any(f"axis {kind}" in cell for cell in cells)
    ]
    return f'<p class="key">{" ".join(shown)}</p>'
