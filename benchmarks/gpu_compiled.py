# SPDX-License-Identifier: MIT
"""What an H100 would launch, move and compute, as compiled on a machine that has none.

    python benchmarks/gpu_compiled.py

Eight reductions over pairs, and the eleven kernels of ``tile_kernels.py``, forward and gradient, by
`jax.vmap`, `jax.lax.map` and rankax. ``h100.py`` says what to install. It takes four minutes of
processor time.
"""

from __future__ import annotations

import h100  # before JAX, which then leaves a GPU alone

# isort: split
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax import lax

import hlo
import page
from gpu import in_mode, items_of
from pair_tasks import TASKS, of_squares, ways
from rankax import auto_vmap, chunked_vmap
from tile_kernels import CASES, Case

POINTS = 100_000
BATCH = 2**20  # of `lax.map`

# The options of rankax, by the name of the row.
PAIRS = {
    "rankax, chunk_size=65,536": {"chunk_size": 2**16},
    "rankax": {},
    "rankax, chunk_size=16,777,216": {"chunk_size": 2**24},
}
SIZES = (2**16, 2**22)
LIMIT = "1 GB"
LIMITED = "Lennard-Jones 32x3"  # `memory_limit` compiles several chunks, so one kernel has to do

HEAD = """# Compiled for an H100

Written by `python benchmarks/gpu_compiled.py --write`, on a machine that has no GPU: nothing ran.

Temporaries, loops and launches are those of the compiled program. A loop is its steps x what a step
launches, with the loops within; ? steps are not known, so that the host waits for the condition in
each. Launches are kernels and copies within the memory of the device, all steps together (one, if
they are not known). GB is what the kernels read and write, and T how many operations they compute
(in units of 10^12), both counted simply from the program. A row of — did not compile without a GPU.

**The last two columns are a prediction, not a measurement:** the largest of 2.5 us for each launch,
the bytes at 3.35 TB/s and the operations at 60 T/s in float32, and which of the three it is. That
is rough. Kernels seldom reach these rates, and `exp` costs as much as an addition here. But bytes
that stay in the L2 cache of 50 MB move faster, and so does the launching of kernels that XLA
records as a graph.
"""


class Way(NamedTuple):
    """A way to evaluate many items: its name, the call, and what compiles it."""

    name: str
    call: Callable[..., Any]
    compiled: Callable[..., Any] = h100.compiled


def mapped(case: Case, items: int) -> Iterator[Way]:
    """A kernel over many items, by several ways."""
    yield Way("`jax.vmap`", jax.vmap(case.fun))
    if items > BATCH:

        def batches(*arrays: Any) -> Any:
            return lax.map(lambda item: case.fun(*item), arrays, batch_size=BATCH)

        yield Way(f"`lax.map` of {BATCH:,}", batches)
    for size in SIZES:
        if size < items:
            yield Way(f"rankax, chunk_size={size:,}", chunked_vmap(case.fun, size))
    if case.name == LIMITED:
        call = auto_vmap(*map(len, case.cores), memory_limit=LIMIT)(case.fun)
        yield Way(f"rankax, memory_limit={LIMIT}", call, h100.compiled_on_device)


class Row(NamedTuple):
    """What one row is about: its first cells, the way, that way in a mode, and the arrays."""

    cells: list[str]
    way: Way
    fun: Callable[..., Any]
    arrays: list[Any]


COLUMNS = ["temporaries, MB", "loops", "launches", "GB", "T", "predicted ms", "for"]


def compiled(row: Row) -> list[str]:
    """Compile what a row is about, and return its cells."""
    cells = [*row.cells, row.way.name]
    try:
        program = hlo.read(row.way.compiled(row.fun, *row.arrays))
    except jax.errors.JaxRuntimeError as error:
        # Some calls of a library cannot be compiled without a GPU, such as `top_k` in two places.
        return [*cells, "—", f"XLA: {str(error).partition(':')[0]}", *("—" for _ in COLUMNS[2:])]
    seconds, why = hlo.predict(program)
    is_known = not program.has_unknown_steps
    return [
        *cells,
        f"{program.temporaries / 1e6:,.1f}",
        "; ".join(map(str, program.loops)),
        f"{program.launches:,}",
        f"{program.bytes / 1e9:,.1f}",
        f"{program.operations / 1e12:.2g}",
        hlo.milliseconds(seconds) if is_known else "not known",
        why if is_known else "",
    ]


def over_pairs() -> Iterator[Row]:
    for task in TASKS:
        arrays = [h100.shaped(*shape) for shape in task.shapes(POINTS)]
        for mode in task.modes:
            for way in itertools.starmap(Way, ways(task, PAIRS)):
                fun = of_squares(way.call, mode, task.arguments)
                yield Row([task.name, mode], way, fun, arrays)


def over_items() -> Iterator[Row]:
    for case in CASES:
        items = items_of(case)
        arrays = [h100.shaped(items, *core) for core in case.cores]
        for mode in ("forward", "gradient"):
            for way in mapped(case, items):
                cells = [case.name, f"{items:,}", mode]
                yield Row(cells, way, in_mode(way.call, mode), arrays)


def section(title: str, head: list[str], rows: Iterator[Row]) -> str:
    """Return a table, whose rows are printed as they come."""
    rules = {head[0]: "---", "mode": "---", "way": "---", "loops": ":---", "for": ":---"}
    columns = [*head, *COLUMNS]
    rule = [rules.get(name, "---:") for name in columns]
    text = f"\n## {title}\n\n"
    page.progress(text)
    with ThreadPoolExecutor(2) as pool:  # one traces while the other compiles
        for row in itertools.chain([columns, rule], pool.map(compiled, rows)):
            line = f"| {' | '.join(row)} |\n"
            page.progress(line.rstrip())
            text += line
    return text


def main() -> None:
    given = page.arguments(__doc__).parse_args()
    try:
        h100.gpus()
    except RuntimeError as error:
        sys.exit(str(error))
    begin = time.perf_counter()
    pairs = f"{POINTS:,} x {POINTS:,}"
    text = f"{HEAD}\nJAX {jax.__version__}, float32.\n"
    text += section(
        f"Reductions over {pairs} pairs; the gradient of squares",
        ["reduction", "mode", "way"],
        over_pairs(),
    )
    text += section(
        "Maps; the gradient by the first argument", ["kernel", "items", "mode", "way"], over_items()
    )
    page.finish(page.RESULTS / "h100-compiled.md", text, write=given.write)
    page.progress(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
