# SPDX-License-Identifier: MIT
"""Whole programs of four fields: `jax.vmap`, chunks by hand, and rankax.

    python benchmarks/fields.py            prints the table
    python benchmarks/fields.py --write    writes ``benchmarks/results/fields.md``

The programs are the cells of ``docs/howto/programs.md``, here at larger sizes. Results are compared
first. Then the contestants take turns on one core, and medians of processor time are compared. The
chains of the wave function are on two devices.
"""

import ast
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["NETKET_ENABLE_X64"] = "0"

import jax
import numpy as np

import page
from shown import megabytes

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "programs.md"
RESULTS = Path(__file__).parent / "results" / "fields.md"
CONTESTANTS = {"jax.vmap": "vmap", "chunks by hand": "hand", "rankax": "rankax"}
HEAD = """# Whole programs of four fields

Written by `python benchmarks/fields.py --write`. {machine}, one core, JAX {jax}.
Medians of {turns} turns; times are given as a part of that of `jax.vmap`.

<!-- shown -->
"""

Space = dict[str, Any]
Run = tuple[Callable[[], Any], int]  # and the bytes of its temporaries


def sections() -> dict[str, str]:
    """The code of each section of the page; that before the first has an empty name."""
    parts = re.split(r"(?m)^## (.*)\n", PAGE.read_text(encoding="utf-8"))
    cells = [re.findall(r"(?ms)^```\{code-cell\}\n(.*?)^```$", part) for part in parts[::2]]
    names = ["", *parts[1::2]]
    # The last cell of a section runs it at a small size.
    return {n: "\n".join(c[:-1] if n else c) for n, c in zip(names, cells, strict=True)}


def lines_of(code: str, names: list[str]) -> int:
    """How many lines of code define these names."""
    found: set[int] = set()
    for node in ast.parse(code).body:
        own = [node.name] if isinstance(node, ast.FunctionDef) else []
        own += [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if not {*own}.isdisjoint(names):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            found.update(range(first - 1, node.end_lineno))
    text = code.split("\n")
    return sum(bool(text[i].strip()) and not text[i].strip().startswith("#") for i in found)


def compiled(fun: Callable[..., Any], *args: Any) -> Run:
    program = jax.jit(fun).lower(*args).compile()
    return lambda: program(*args), program.memory_analysis().temp_size_in_bytes


# Each section: the words of a row, and what each contestant runs.


def atoms(space: Space) -> Iterator[tuple[str, dict[str, Run]]]:
    (displacement, shift), points = space["box"](24)
    lists = space["neighbours"](displacement, 24).allocate(points)
    kernel = space["atom_in"](displacement)
    made = {name: space[f"atoms_by_{by}"](kernel) for name, by in CONTESTANTS.items()}
    totals = {name: compiled(total, points, lists.idx) for name, total in made.items()}
    yield f"{len(points):,} atoms, {lists.idx.shape[1]} places in a list: energy", totals
    slopes = {n: compiled(jax.grad(total), points, lists.idx) for n, total in made.items()}
    yield "gradient of the energy", slopes
    forces = dict(zip(CONTESTANTS, space["forces"](kernel), strict=True))
    for words, each in ("20 steps of dynamics", made), ("with a force of each atom", forces):
        runs = {n: space["dynamics"](own, shift) for n, own in each.items()}
        yield words, {n: compiled(run, points, lists.idx) for n, run in runs.items()}


def likelihood(space: Space) -> Iterator[tuple[str, dict[str, Run]]]:
    with jax.enable_x64(True):
        args = space["observations"](samples=500, bins=4000)
        runs = {name: space[f"likelihood_by_{by}"] for name, by in CONTESTANTS.items()}
        yield "500 samples, 4000 bins: values", {n: compiled(run, *args) for n, run in runs.items()}
        slopes = {n: compiled(space["slopes"](run), *args) for n, run in runs.items()}
        yield "gradient", slopes


def trends(space: Space) -> Iterator[tuple[str, dict[str, Run]]]:
    data = space["climate"](times=240, lats=90, lons=180)
    like = (data.t2m.values.transpose(1, 2, 0), data.time.values)
    programs = {"jax.vmap": "many", "chunks by hand": "in_chunks", "rankax": "mapped"}
    runs: dict[str, Run] = {}
    for name, by in CONTESTANTS.items():
        _, size = compiled(space[programs[name]], *like)

        def run(trends: Any = space[f"trends_by_{by}"]) -> list[Any]:
            return [np.asarray(out) for _, out in sorted(trends(data).data_vars.items())]

        runs[name] = run, size
    yield "2 variables, 240 times, 90 × 180 cells", runs


def wave(space: Space) -> Iterator[tuple[str, dict[str, Run]]]:
    w, chains = space["chains_on_mesh"](hidden=40, samples=1000)
    runs = {n: compiled(space[f"wave_by_{by}"], w, chains) for n, by in CONTESTANTS.items()}
    yield "16 chains of 1000 samples, 860 parameters", runs


SECTIONS = {
    "Neighbour lists with jax-md": (atoms, ["atoms_by_{}"]),
    "A likelihood over bins": (likelihood, ["likelihood_by_{}"]),
    "Trends with missing values": (trends, ["trends_by_{}"]),
    "A wave function with NetKet": (wave, ["wave_by_{}"]),
}
OTHERS = {"trends_by_vmap": "many", "trends_by_hand": "in_chunks", "trends_by_rankax": "mapped"}
OTHERS |= {"wave_by_rankax": "means"}


def row(words: str, runs: dict[str, Run], turns: int) -> str:
    """Compare the results, then the times."""
    first, *others = [jax.tree.leaves(run()) for run, _ in runs.values()]
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(np.nanmax(np.abs(a))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in page.turns(turns):
        for name, (run, _) in runs.items():
            begin = time.process_time()
            jax.block_until_ready(run())
            times[name].append(time.process_time() - begin)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians["jax.vmap"]
    shares = {name: f"{found / base:.2f}" for name, found in medians.items()}
    shares["jax.vmap"] = f"{base * 1e3:.0f} ms"
    cells = [f"{shares[name]}, {megabytes(size)}" for name, (_, size) in runs.items()]
    return f"| {words} | {' | '.join(cells)} |"


def measure(title: str, turns: int) -> None:
    """Print the rows of one section."""
    rows_of, names = SECTIONS[title]
    if rows_of is wave:  # with several CPU devices, XLA runs small steps more slowly
        jax.config.update("jax_num_cpu_devices", 2)
    os.sched_setaffinity(0, {0})
    code, space = sections(), dict[str, Any]()
    for part in "", title:
        exec(compile(code[part], str(PAGE), "exec"), space)
    lines: list[int] = []
    for by in CONTESTANTS.values():
        own = [name.format(by) for name in names]
        lines.append(lines_of(code[title], own + [OTHERS[n] for n in own if n in OTHERS]))
    print(f"| **{title}**: lines | {' | '.join(map(str, lines))} |")
    for words, runs in rows_of(space):
        print(row(words, runs, turns))


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--only", help="one section, by its title; in this process")
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    if given.only:
        return measure(given.only, given.turns)
    page.needs("jax_md", "netket", "xarray")
    table = [f"| | {' | '.join(CONTESTANTS)} |", "|---|---:|---:|---:|"]
    for title in SECTIONS:
        page.progress(title)
        command = [sys.executable, __file__, "--only", title, "--turns", str(given.turns)]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        table += [line for line in shown.splitlines() if line.startswith("|")]
    head = HEAD.format(machine=platform.machine(), jax=jax.__version__, turns=given.turns)
    text = "\n".join([head, *table, "", "<!-- end -->"])
    page.finish(RESULTS, text, write=given.write)


if __name__ == "__main__":
    main()
