# SPDX-License-Identifier: MIT
"""The figures and tables of the page on benchmarks, drawn from the files in benchmarks/results.

Figures are SVG inside the page, so that they have the colours of its theme. Each panel is a figure
of its own: side by side on a wide page, one below the other on a phone.
"""

import html
import io
import re

import matplotlib.pyplot as plt
from IPython.display import HTML, Markdown
from matplotlib.ticker import FuncFormatter

import shown

__all__ = [
    "ages",
    "chunk_sizes",
    "drawn",
    "every_row",
    "file",
    "machine",
    "memory",
    "others",
    "reductions",
    "slower",
    "tiles",
]

COLOURS = {"rankax": "#6fb1ff", "lax.map": "#f0b656", "powerpax": "#c39bff", "jax.vmap": "#8fe0b0"}
COLOURS["adv-jax-math"] = "#e0694a"
DASHES = {"powerpax": (0, (2, 2)), "adv-jax-math": (2, (2, 2))}  # both on top of lax.map
DASHED = (0, (2, 2))
DEVICES = "#e07a7a"

# What the page calls the colours above and in docs/matplotlibrc: rankax.css has their values.
VARIABLES = {
    **{colour: f"--series-{number}" for number, colour in enumerate(COLOURS.values(), 1)},
    DEVICES: "--series-6",
    "#e6e8f0": "--color-foreground-primary",
    "#c8cde0": "--color-foreground-primary",
    "#a8aec6": "--color-foreground-secondary",
    "#4a5170": "--color-foreground-border",
}


def drawn(draw, words):
    """The figures that ``draw`` returns, as SVG; ``words`` are for those who do not see them."""
    figures = draw()
    panels = "".join(_svg(figure, f"{draw.__name__}-{n}-") for n, figure in enumerate(figures))
    label = html.escape(words)
    return HTML(f'<div class="figures" role="img" aria-label="{label}">{panels}</div>')


def _svg(figure, prefix):
    """One figure, with ids that no other has, and in the font and the colours of the page."""
    file = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = file.getvalue()
    text = re.sub(r"(?s)<metadata>.*?</metadata>", "", text[text.index("<svg") :])
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--font-stack)", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def _panels(count, size):
    """As many figures as panels, and the panels."""
    pairs = [plt.subplots(figsize=size) for _ in range(count)]
    return [figure for figure, _ in pairs], [panel for _, panel in pairs]


def _share(panels, axis):
    """Give all panels the widest limits among them."""
    limits = [getattr(panel, f"get_{axis}lim")() for panel in panels]
    for panel in panels:
        panel.set(**{f"{axis}lim": (min(low for low, _ in limits), max(up for _, up in limits))})


def machine(platform="cpu"):
    """What was measured on, by which command."""
    document = shown.document(platform)
    facts = document["machine"]
    versions = facts["packages"].items()
    stamps = {name.split()[-1]: stamp for name, stamp in shown.stamps(platform).items()}
    packages = ", ".join(f"{name} {version}" for name, version in versions if version)
    return Markdown(
        f"`{document['command']}`, on {facts['device']}: {facts['processor']}; Python "
        f"{facts['python']}; {packages}. Times: {_sentence(stamps['cases'])} Memory: "
        f"{_sentence(stamps['memory'])}"
    )


def _sentence(stamp):
    return f"{str(stamp)[0].lower()}{str(stamp)[1:]}"


def ages():
    """When, at which commit and with which JAX each result was measured."""
    lines = [
        "| result | command | measured on | commit | JAX |",
        "|---|---|---|---|---|",
    ]
    for name, stamp in _newest_first(shown.stamps().items(), lambda item: item[1]):
        command = shown.command(re.split(r"\.", name)[0])
        cells = [f"`{name}`", f"`{command}`", stamp.date, f"`{stamp.commit}`", stamp.jax]
        lines.append(f"| {' | '.join(cells)} |")
    return Markdown("\n".join(lines))


def _newest_first(results, stamp):
    """Results by the JAX they were measured with, and in their order with the same one."""
    return sorted(results, key=lambda x: [-int(n) for n in stamp(x).jax.split(".")[:2]])


def chunk_sizes(kernel="pairwise distances", length=400_003):
    """Time for all items against the size of a chunk, for each contestant."""
    rows = [
        row
        for row in shown.document()["cases"]
        if (row["kernel"], row["length"], row["note"]) == (kernel, length, "")
    ]
    figures, panels = _panels(2, (4, 3.3))
    for panel, mode in zip(panels, ("forward", "gradient"), strict=True):
        for peer, colour in COLOURS.items():
            points = sorted(
                (row["chunk_size"], row["median_seconds"] * 1e3)
                for row in rows
                if (row["mode"], row["peer"]) == (mode, peer)
            )
            if not points:
                continue
            if peer == "jax.vmap":  # has no chunks: the median of all its turns
                level = sorted(ms for _, ms in points)[len(points) // 2]
                panel.axhline(level, color=colour, linestyle="--", label=f"{peer}, all at once")
            else:
                panel.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=peer)
        panel.set(xscale="log", xlabel="items in a chunk", title=mode)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{int(size):,}"))
        panel.set(ylim=(0, None), ylabel=f"ms for {length:,} items")
    _share(panels, "y")
    panels[0].legend(fontsize=9)
    return figures


def memory():
    """Temporaries against the number of items, a panel for each kernel and mode."""
    shown.description()  # fails where the numbers do not bear out the words of the page
    curves = shown.document()["memory"]
    kernels = list(dict.fromkeys(curve["kernel"] for curve in curves))
    figures, panels = _panels(2 * len(kernels), (4, 3))
    for curve in curves:
        row, column = kernels.index(curve["kernel"]), curve["mode"] == "gradient"
        panel, peer = panels[2 * row + column], curve["peer"]
        style = {"color": COLOURS[peer], "linewidth": 2.6 if peer == "rankax" else 1.6}
        for divided in (True, False):
            if not (divided or peer == "rankax"):
                continue
            points = [
                p for p in curve["length_and_bytes"] if (p[0] % shown.CURVE_CHUNK == 0) == divided
            ]
            lengths, sizes = zip(*points, strict=True)
            # On a logarithmic axis nothing cannot be drawn, so it lies on the lower edge.
            sizes = [max(size, 1e3) for size in sizes]
            dash = {} if divided else {"linestyle": DASHED}
            dash = {"linestyle": DASHES[peer]} if peer in DASHES else dash
            label = peer if divided else "rankax, no chunk divides"
            panel.plot(lengths, sizes, label=label, **style, **dash)
        panel.set(xscale="log", yscale="log", title=f"{curve['kernel']}: {curve['mode']}")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _size(size)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{int(count):,}"))
    for panel in panels:
        panel.set(xlabel="items", ylabel="temporaries")
    _share(panels, "x")
    _share(panels, "y")
    panels[0].legend(fontsize=8)
    return figures


def _size(size):
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size:g} B"


def reductions():
    """How many times as long as rankax the other ways to reduce all pairs take."""
    own = "rankax, cpu_math=True"  # in the table only
    rows = [row for row in shown.table("reductions") if row["times rankax"]]
    rows = [row for row in rows if row["contestant"] != own]
    cases = list(dict.fromkeys((row["task"], int(row["points on each side"])) for row in rows))
    names = ("rankax", "KeOps", "rows by lax.map", "whole, jax.numpy")
    colours = dict(zip(names, COLOURS.values(), strict=False))
    colours['rankax, devices="all"'] = DEVICES
    figures, (panel,) = _panels(1, (4.8, 4.6))
    for place, (task, count) in enumerate(reversed(cases)):
        for row in rows:
            if (row["task"], int(row["points on each side"])) == (task, count):
                ratio, who = float(row["times rankax"]), row["contestant"]
                label = who if place == len(cases) - 1 else None
                panel.plot(ratio, place, "o", color=colours[who], label=label, markersize=8)
    labels = [f"{task}, {count:,}" for task, count in reversed(cases)]
    panel.set_yticks(range(len(cases)), labels)
    panel.axvline(1, color=COLOURS["rankax"], linewidth=1)
    words = "time relative to rankax\n(right: rankax is faster)"
    panel.set(xscale="log", xlabel=words)
    _ratios(panel)
    figures[0].legend(loc="outside upper center", ncols=2, fontsize=9)
    return figures


def _ratios(panel):
    panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    some = FuncFormatter(lambda ratio, _: f"{ratio:g}" if ratio in (0.5, 2, 5) else "")
    panel.xaxis.set_minor_formatter(some)


def tiles():
    """What the tiles gain, and what is gained by tuning, for each kernel."""
    rows = shown.table("tiles")
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    figures, panels = _panels(2, (4, 4.6))
    for panel, mode in zip(panels, ("forward", "gradient"), strict=True):
        for row in rows:
            if row[""] == mode:
                place = -kernels.index(row["kernel"])
                for column, colour, words in (
                    ("no tiles / default", COLOURS["rankax"], "tiles, over full chunks"),
                    ("best other / tuned", COLOURS["lax.map"], "tuned, over the best other"),
                ):
                    label = None if place else words
                    panel.plot(float(row[column]), place, "o", color=colour, label=label)
        panel.axvline(1, color="#a8aec6", linewidth=1)
        panel.set(xscale="log", title=mode, xlabel="times as fast")
        _ratios(panel)
        panel.set_yticks([-place for place in range(len(kernels))], kernels)
    _share(panels, "x")
    for figure in figures:
        figure.legend(loc="outside upper center", ncols=1, fontsize=9)
    return figures


def _cases(value):
    """By kernel, items, chunk and mode: ``value`` of each contestant that took part."""
    cases = {}
    for row in shown.document()["cases"]:
        if not row["note"]:
            key = tuple(row[name] for name in ("kernel", "length", "chunk_size", "mode"))
            cases.setdefault(key, {})[row["peer"]] = value(row)
    return cases


def _milliseconds(row):
    return row["median_seconds"] * 1e3


def _megabytes(row):
    return row["temporary_bytes"] / 1e6


def every_row(peers=("rankax", "lax.map", "powerpax", "netket", "jax.vmap")):
    """Time and temporaries of all cases; the least of a row is bold."""
    head = f"| kernel | items | chunk | | {' | '.join(peers)} | {' | '.join(peers)} |"
    lines = [head, "|---|---:|---:|---|" + "---:|" * (2 * len(peers))]
    sizes = _cases(_megabytes)
    for key, times in _cases(_milliseconds).items():
        kernel, length, chunk, mode = key
        cells = [kernel, f"{length:,}", f"{chunk:,}", mode]
        for found, form in ((times, "{:.1f}"), (sizes[key], "{:.2f}")):
            texts = {peer: form.format(found[peer]) for peer in peers if peer in found}
            least = min(texts.values(), key=float)
            for peer in peers:
                text = texts.get(peer, "—")
                cells.append(f"**{text}**" if text == least else text)
        lines.append(f"| {' | '.join(cells)} |")
    return Markdown("\n".join(lines))


def slower(margin=1.05):
    """The cases in which another contestant took less time than rankax, by more than ``margin``."""
    cases, lost = _cases(_milliseconds), []
    for (kernel, length, chunk, mode), times in cases.items():
        own = times.pop("rankax")
        peer = min(times, key=times.get)
        if own > margin * times[peer]:
            other = times[peer]
            case = f"| {kernel} | {length:,} | {chunk:,} | {mode} "
            lost.append(f"{case}| {own:.1f} | {peer}: {other:.1f} | {own / other:.2f} |")
    head = [
        f"{len(lost)} of {len(cases)} cases:\n",
        "| kernel | items | chunk | | rankax, ms | fastest, ms | ratio |",
        "|---|---:|---:|---|---:|---|---:|",
    ]
    return Markdown("\n".join(head + lost))


def file(name):
    """A file of results as it is, without its title."""
    _, text = (shown.RESULTS / f"{name}.md").read_text(encoding="utf-8").split("\n", 1)
    return Markdown(_without_sections(text))


def _without_sections(text):
    """Turn headings into bold lines, so that the page does not list them as its own sections."""
    return re.sub(r"(?m)^#+ (.*)$", r"**\1**", text.strip())


SECTIONS = (
    *("cpu", "cpu-math", "flags", "gpu-first", "h100-compiled", "jacobians", "lockstep"),
    "ragged",
    *("by_hand", "labels", "once", "reductions", "scan_levels", "tiles", "tiles-one-core"),
)
UNSHOWN = ("tile-sizes",)  # about every kernel, for those who change the rule of tiles


def others(known=(*SECTIONS, *UNSHOWN)):
    """The files of results that have no section of their own: other versions, other devices."""
    texts = []
    for path in sorted(shown.RESULTS.glob("*.md")):
        if path.stem not in known:
            texts.append(_without_sections(path.read_text(encoding="utf-8")))
    return Markdown("\n\n".join(texts) or "All results have a section above.")
