# SPDX-License-Identifier: MIT
"""What the README and the documentation show of the results: read from the files, never copied.

    python benchmarks/shown.py

writes the marked part of README.md, the picture of memory and tables in ``docs/_parts``. Benchmarks
with ``--write`` end with it, and a test fails if one of them differs from the results.
Only the standard library is needed, so that the build of the documentation can use it.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from stamp import Stamp, read

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
FIGURE = HERE.parent / "docs" / "_static" / "memory.svg"
DOCS_PARTS = HERE.parent / "docs" / "_parts"
BEGIN, END = "<!-- results: figures -->", "<!-- end -->"

# The rows of the summary: gradients, at lengths that no chunk divides.
ROWS = [
    ("pairwise distances", "distances of 8 points", 400_003, 1000),
    ("eigh 8x8", "eigenvalues of 8 × 8 matrices", 20_003, 500),
    ("scan of 64 steps", "a scan of 64 steps", 50_003, 1000),
]
PEERS = ("rankax", "lax.map", "jax.vmap")
CURVE_CHUNK = 1000
_SPACE = "\N{NO-BREAK SPACE}"  # in the narrow columns of a phone, a number keeps its unit


def document(platform: str = "cpu") -> dict[str, Any]:
    """Everything that `python benchmarks` measured."""
    return json.loads((RESULTS / f"{platform}.json").read_text(encoding="utf-8"))


def measured(kernel: str, length: int, chunk: int, mode: str, peer: str) -> dict[str, Any]:
    """One contestant in one case."""
    wanted = {"kernel": kernel, "length": length, "chunk_size": chunk, "mode": mode, "peer": peer}
    for row in document()["cases"]:
        if wanted.items() <= row.items():
            return row
    raise LookupError(f"benchmarks/results/cpu.json has no row {wanted}")


def table(name: str) -> list[dict[str, str]]:
    """The first table of a file of results, a dict for each row, without the marks of bold."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    head = rows[0]
    body = [row for row in rows[1:] if len(row) == len(head) and not set(row[0]) <= set("-: ")]
    return [dict(zip(head, row, strict=True)) for row in body]


def stamps(platform: str = "cpu") -> dict[str, Stamp]:
    """When each result was measured, and with which JAX."""
    found = {
        f"{platform}.json, {part}": Stamp(**s) for part, s in document(platform)["measured"].items()
    }
    for path in sorted(RESULTS.glob("*.md")):
        if not path.with_suffix(".json").exists():
            found[path.name] = read(path.read_text(encoding="utf-8"))
    return found


def command(name: str) -> str:
    """The command that a file of results says it was written by, without ``--write``."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    return re.search(r"Written by `([^`]+)`", text)[1].removesuffix(" --write")


def megabytes(size: float) -> str:
    """``size`` in bytes, as a person would say it."""
    if size == 0:
        return "0 MB"
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    if size < 5e4:
        return f"{size / 1e3:.0f} kB"
    return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


# The part of the README.


def figures() -> str:
    """What rankax saves, in five figures, and the command for each."""
    items, _ = curve("rankax")[-1]
    own, whole, mapped = (
        megabytes(curve(peer)[-1][1]) for peer in ("rankax", "jax.vmap", "lax.map")
    )
    pairs = {
        row["contestant"]: row["ms"]
        for row in table("reductions")
        if (row["task"], row["points on each side"]) == ("sum", "10000")
    }
    both, keops = pairs['rankax, devices="all"'], pairs["KeOps"]
    gpu = {
        row["way"].strip("`"): _temporaries(row)
        for row in table("h100-compiled")
        if (row["reduction"], row["mode"]) == ("min", "gradient")
    }
    (timed,) = (
        row for row in table("gpu-first") if (row["reduction"], row["mode"]) == ("min", "gradient")
    )
    (loops,) = (row for row in table("lockstep") if row["kernel"].startswith("Van der Pol"))
    lanes, best, at_once = (f"{float(ms):,.0f} ms" for ms in [*loops.values()][:1:-1])
    (net,) = (
        row
        for row in table("once")
        if (row["kernel"], row["of all pairs"]) == ("net 3-64-64-3", "sum, gradient")
    )
    return f"""\
* **Gradients.** The gradient of {items:,} eigenvalue problems, 1000 at once, needs **{own}** of
  temporary memory. `jax.vmap` needs {whole}, `lax.map` {mapped}.
* **Pairs on a CPU.** A sum over 10,000 × 10,000 pairs takes **{both} ms** on two cores, with
  `devices="all"`. KeOps takes {keops} ms.
* **Pairs of features.** The gradient of a sum over 2,000 × 2,000 pairs, with a small network of
  each point, takes **{float(net["rankax"]):.0f} ms** on one core. `jax.vmap` takes
  {float(net["`jax.vmap`"]):.0f} ms.
* **Pairs on a GPU.** The gradient of the smallest of 100,000 squared distances, for each of
  100,000 points, takes an H200 **{timed["rankax"]} ms**. `jax.vmap` takes {timed["`jax.vmap`, ms"]}
  ms. Compiled for an H100, it needs **{gpu["rankax"]}** of temporary memory. `jax.vmap` needs
  {gpu["jax.vmap"]}.
* **Loops of different lengths.** {loops["items"]} oscillators with adaptive steps take **{lanes}**
  of processor time, with `lockstep=False`. `jax.vmap` takes {at_once}, `lax.map` {best}.

Measured with JAX {_jax("cpu.json, cases")}, on the H200 with JAX {_jax("gpu-first.md")}. In a
clone, each command prints what your machine finds, beside these figures:

```bash
# Gradients
python benchmarks --memory
# Pairs on a CPU (KeOps: if installed)
python benchmarks/reductions.py sum
# Pairs of features
python benchmarks/once.py "net 3-64-64-3"
# Pairs on a GPU
python benchmarks/gpu.py
# Loops of different lengths
python benchmarks/lockstep.py oscillator
```"""


def _jax(result: str) -> str:
    """The version of JAX of a result, without its last number."""
    return ".".join(stamps()[result].jax.split(".")[:2])


# Other parts of the pages.


def benchmark() -> str:
    """Three gradients by three contestants."""
    lines = ["| gradient of | items | " + " | ".join(f"`{peer}`" for peer in PEERS) + " |"]
    lines += ["|---|---:|" + "---:|" * len(PEERS)]
    for kernel, words, length, chunk in ROWS:
        row = [measured(kernel, length, chunk, "gradient", peer) for peer in PEERS]
        fastest = min(one["median_seconds"] for one in row)
        cells = []
        for one in row:
            time = f"{one['median_seconds'] * 1e3:.0f}{_SPACE}ms"
            time = f"**{time}**" if one["median_seconds"] == fastest else time
            cells.append(f"{time}, {megabytes(one['temporary_bytes']).replace(' ', _SPACE)}")
        lines.append(f"| {words} | {length:,} | " + " | ".join(cells) + " |")
    stamp = stamps()["cpu.json, cases"]
    return "\n".join([*lines, "", f"{document()['machine']['processor']}. {stamp}"]) + "\n"


def curve(peer: str, *, divided: bool = True) -> list[tuple[int, int]]:
    """Items and temporaries of the gradient of the eigenvalues; a chunk divides them, or none."""
    for row in document()["memory"]:
        if (row["kernel"], row["mode"], row["peer"]) == ("eigh 8x8", "gradient", peer):
            points = row["length_and_bytes"]
            return [(n, size) for n, size in points if (n % CURVE_CHUNK == 0) == divided]
    raise LookupError(f"benchmarks/results/cpu.json has no curve of {peer}")


def description() -> str:
    """The figure of memory, in words that its numbers bear out."""
    (length, own), (_, other) = curve("rankax")[-1], curve("jax.vmap")[-1]
    uneven, rest = curve("rankax", divided=False)[-1]
    if {size for _, size in curve("rankax")} != {own}:
        raise ValueError("the memory of rankax is not flat: its figure needs other words")
    if rest - own > 4.2 * uneven:  # a float32 of each output
        raise ValueError("where no chunk divides, rankax needs more than a copy of the outputs")
    return (
        f"Temporary memory of a gradient against the number of items. jax.vmap grows with the "
        f"batch, to {megabytes(other)} for {length:,} items. rankax needs {megabytes(own)} if a "
        f"chunk size divides the number of items; otherwise up to {megabytes(rest)}."
    )


def on_gpu() -> str:
    """What an H100's compiler makes of sums over all pairs: `jax.vmap` beside default options."""
    rows = {
        (row["reduction"], row["mode"], row["way"].strip("`")): row
        for row in table("h100-compiled")
    }
    lines = [
        "| | | `jax.vmap`: temporaries | rankax, default: temporaries | launches | at least |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (name, mode, way), row in rows.items():
        if way == "rankax":
            plain, own = _temporaries(rows[name, mode, "jax.vmap"]), _temporaries(row)
            predicted = f"{row['predicted ms']} ms"
            lines.append(f"| {name} | {mode} | {plain} | {own} | {row['launches']} | {predicted} |")
    return "\n".join(lines) + "\n"


FILES = {"benchmark": benchmark, "h100": on_gpu}


def _temporaries(row: dict[str, str]) -> str:
    words = row["temporaries, MB"].replace(",", "")
    return words if words == "—" else megabytes(1e6 * float(words))


def with_figures(readme: str) -> str:
    """The README with the figures that the results have."""
    text = f"{BEGIN}\n{figures()}\n{END}"
    readme, count = re.subn(f"{BEGIN}\n.*?{END}", lambda _: text, readme, flags=re.DOTALL)
    if count != 1:
        raise LookupError(f"README.md needs one part that is marked {BEGIN}")
    return readme


# The figure: large type, two lines with their names beside them. A colour is the page's where the
# figure stands in a page, and one that reads on white and on black where it is a file of its own.

INK = "var(--color-foreground-primary, #7d8590)"
FAINT = "var(--color-foreground-secondary, #7d8590)"
OWN, OTHER = "var(--ink-batch, #2f81f7)", "var(--ink-core, #db6d28)"
LEFT, RIGHT, TOP, BOTTOM = 116, 620, 64, 320  # of the axes, in a picture of 640 by 390


def memory_svg() -> str:
    """Draw temporaries of a gradient against the number of items."""
    own, rest, other = curve("rankax"), curve("rankax", divided=False), curve("jax.vmap")
    x = _scale([length for length, _ in own], LEFT, RIGHT)
    sizes = [size for _, size in own + rest + other]
    low, high = math.floor(math.log10(min(sizes))) - 1, math.ceil(math.log10(max(sizes)))
    y = _scale([10**low, 10**high], BOTTOM, TOP)
    lines = [
        '<svg class="memory" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 390" width="560" '
        'height="341" role="img" font-family="system-ui, sans-serif" font-size="24" '
        'aria-labelledby="memory-title">',
        f'<title id="memory-title">{description()}</title>',
        _text(8, 30, "Memory of the gradient", weight=600),
    ]
    for power in range(low, high + 1):
        lines.append(_line(LEFT, y(10**power), RIGHT, y(10**power), FAINT, "0.3"))
        lines.append(_text(LEFT - 10, y(10**power) + 8, _bytes(10**power), "end", FAINT))
    for count, words in ((10_000, "10,000"), (100_000, "100,000"), (1_000_000, "1 million items")):
        anchor = "end" if count == 1_000_000 else "start" if count == 10_000 else "middle"
        lines.append(_text(x(count), BOTTOM + 36, words, anchor, FAINT))
    # Each line with its name, at a point of it, and the size at its end; below it where negative.
    for name, points, colour, dash, at, above in (
        ("jax.vmap", other, OTHER, "", -14, 20),
        ("no chunk divides", rest, OWN, "2 10", 40, 16),
        ("rankax, 1000 at once", own, OWN, "", 40, -32),
    ):
        path = " ".join(f"{x(length):.1f},{y(size):.1f}" for length, size in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke-width="5" stroke-linecap="round" '
            f'stroke-linejoin="round" stroke-dasharray="{dash}" style="stroke: {colour}"/>'
        )
        length, size = points[len(points) // 2]
        weight = 400 if dash else 600
        lines.append(_text(x(length) + at, y(size) - above, name, "end", colour, weight))
        end = points[-1]
        lines.append(_text(RIGHT, y(end[1]) - above, megabytes(end[1]), "end", colour, weight))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _scale(values: list[int], begin: float, end: float) -> Any:
    low, high = math.log10(min(values)), math.log10(max(values))
    return lambda value: begin + (end - begin) * (math.log10(value) - low) / (high - low)


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = INK, weight: int = 400
) -> str:
    style = f"fill: {colour}; font-weight: {weight}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{style}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, opacity: str) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'style="stroke: {colour}; stroke-opacity: {opacity}"/>'
    )


def check() -> None:
    """Refuse a README, a picture or a table that is not what the results say."""
    readme = README.read_text(encoding="utf-8")
    if memory_svg() != FIGURE.read_text(encoding="utf-8") or with_figures(readme) != readme:
        raise ValueError("README.md or docs/_static/memory.svg is old: python benchmarks/shown.py")
    for name, part in FILES.items():
        if part() != (DOCS_PARTS / f"{name}.md").read_text(encoding="utf-8"):
            raise ValueError(f"docs/_parts/{name}.md is old: python benchmarks/shown.py")


def main() -> None:
    """Write what this module shows."""
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_figures(readme), encoding="utf-8")
    FIGURE.write_text(memory_svg(), encoding="utf-8")
    for name, part in FILES.items():
        (DOCS_PARTS / f"{name}.md").write_text(part(), encoding="utf-8")
    print("wrote README.md, docs/_static/memory.svg and docs/_parts")


if __name__ == "__main__":
    main()
