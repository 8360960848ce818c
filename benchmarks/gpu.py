# SPDX-License-Identifier: MIT
"""The first minutes on a GPU: six questions, with plain JAX beside rankax.

    python -m pip install . "jax[cuda13]"
    python benchmarks/gpu.py            # on the first device of JAX
    python benchmarks/gpu.py --small    # sizes for a CPU: a minute, in which times say nothing

1. How fast are eight reductions over pairs, beside `jax.vmap` and blocks written by hand?
2. Does a call with ``memory_limit`` stay within it, as the allocator counts?
3. What does a step of a loop cost, if it does nothing?
4. How many lanes do items need that end by themselves, and how long must they be?
5. From which chunk size on are eleven kernels as fast as `jax.vmap`?
6. How near do these times come to the predictions of ``gpu_compiled.py``?

Programs are compiled first and then take turns. Times are medians, each until the result is ready.
Rows are printed as they come. After seven minutes no other row is begun, so that all ends within
eight, and the result says where it stopped.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hlo
import page
import stamp
from lockstep import oscillator
from pair_tasks import ROWS, TASKS, of_squares, ways
from rankax import auto_vmap, chunked_vmap
from report import machine
from tile_kernels import CASES, Case, drawn

BEGIN = time.perf_counter()
MOST_SECONDS = 7 * 60  # after which no row is begun
ROUNDS = 7
ROUNDS_SECONDS = 5  # for the turns of a row, which has at least one that counts
KEYS = "kernel", "lanes", "limit", "mode", "oscillators", "reduction", "steps", "what decides"
NO_GPU = """\
JAX sees no GPU. In a clone, on a machine that has one: python -m pip install . "jax[cuda13]"
`python benchmarks/gpu.py --small` has sizes for a CPU."""
TIMED: list[tuple[str, float]] = []  # all programs, as HLO, and their seconds


def timed(
    what: str, programs: Mapping[str, Callable[..., Any]], arrays: Sequence[Any]
) -> dict[str, float]:
    """Return the median time of each program in seconds; nan if it does not fit the memory."""
    lowered = {name: jax.jit(program).lower(*arrays) for name, program in programs.items()}
    # One by one: XLA chooses kernels by measuring them, and nothing else may run meanwhile.
    made = {name: compiled_for(what, name, each) for name, each in lowered.items()}
    compiled = {name: run for name, run in made.items() if run}
    times: dict[str, list[float]] = {name: [] for name in lowered}
    able = {name: run for name, run in compiled.items() if fits(run)}
    end = time.perf_counter() + ROUNDS_SECONDS
    for turn in range(ROUNDS + 1):
        if turn > 1 and time.perf_counter() > end:
            break
        for name, run in list(able.items()):
            begin = time.perf_counter()
            try:
                jax.block_until_ready(run(*arrays))
            except jax.errors.JaxRuntimeError as error:
                print(f"{what}, {name}: {str(error).splitlines()[0]}", file=sys.stderr)
                del able[name]
            else:
                times[name].append(time.perf_counter() - begin)
    medians = {
        name: statistics.median(own[1:]) if name in able else math.nan
        for name, own in times.items()
    }
    TIMED.extend((compiled[name].as_text(), medians[name]) for name in able)
    return medians


def compiled_for(what: str, name: str, lowered: Any) -> Any:
    """Compile a program, which XLA tries out meanwhile; None if that fails."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        print(f"{what}, {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def fits(program: Any) -> bool:
    """Whether the compiler reports no more memory than the device has."""
    needs = program.memory_analysis()
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    return needs.temp_size_in_bytes + needs.output_size_in_bytes < most


def empty_loop(small: bool) -> Iterator[list[str]]:
    """What a step costs that does next to nothing, in a scan and in chunks of one item."""
    yield ["steps", "`lax.scan`, us a step", "`chunked_vmap(f, 1)`, us a step"]
    for steps in (1000,) if small else (1000, 10_000):
        programs = {
            "scan": lambda x: lax.scan(lambda c, row: (jnp.cos(c + row), c), 0.0, x),
            "chunks": chunked_vmap(lambda row: row + 1, 1),
        }
        took = timed(f"{steps:,} empty steps", programs, (jnp.zeros(steps),))
        yield [f"{steps:,}", *(f"{1e6 * seconds / steps:.2f}" for seconds in took.values())]


def chunks(small: bool) -> Iterator[list[str]]:
    """Eleven kernels, forward and gradient, in chunks of several sizes."""
    sizes = (2**8, 2**10) if small else (2**16, 2**18, 2**20, 2**22)
    yield ["kernel", "mode", "items", "`jax.vmap`, ms", *(f"{size:,}" for size in sizes)]
    for case in CASES[:2] if small else CASES:
        items = 2**11 if small else items_of(case)
        arrays = [drawn(i, items, *core) for i, core in enumerate(case.cores)]
        for mode in ("forward", "gradient"):
            ways = {"vmap": jax.vmap(case.fun)}
            ways |= {f"chunk_size={n:,}": chunked_vmap(case.fun, n) for n in sizes if n < items}
            programs = {name: in_mode(way, mode) for name, way in ways.items()}
            took = timed(f"{case.name}, {mode}", programs, arrays)
            plain = took.pop("vmap")
            shown = [f"{plain / seconds:.2f}" for seconds in took.values()]
            shown += [""] * (len(sizes) - len(shown))
            yield [case.name, mode, f"{items:,}", f"{1e3 * plain:.3g}", *shown]


def items_of(case: Case) -> int:
    """Return how many items a GPU should have to be busy: 128 MB of the first argument, or less."""
    return min(2**24, 2**25 // math.prod(case.cores[0]))


def in_mode(fun: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return a mapped kernel, or its gradient by the first argument."""
    if mode == "forward":
        return fun

    def total(*arrays: Any) -> jax.Array:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fun(*arrays)))

    return jax.grad(total)


def pairs(small: bool) -> Iterator[list[str]]:
    """Eight reductions over all pairs, and the gradients of their squares."""
    sizes = (2**12,) if small else (2**24,)
    ours: dict[str, dict[str, Any]] = {"rankax": {}}
    ours |= {f"chunk_size={size:,}": {"chunk_size": size} for size in sizes}
    points = 200 if small else 100_000
    yield ["reduction", "mode", "`jax.vmap`, ms", f"`lax.map` of {ROWS} rows", *ours]
    for task in TASKS[:2] if small else TASKS:
        arrays = [drawn(i, *shape) for i, shape in enumerate(task.shapes(points))]
        for mode in task.modes:
            programs = {
                name: of_squares(way, mode, task.arguments) for name, way in ways(task, ours)
            }
            took = timed(f"{task.name} over pairs, {mode}", programs, arrays)
            yield [task.name, mode, *map(hlo.milliseconds, took.values())]


def lanes(small: bool) -> Iterator[list[str]]:
    """Oscillators whose numbers of steps differ: in lockstep, and in lanes."""
    yield ["oscillators", "`jax.vmap`, ms", "lanes", "ms", "times as fast"]
    for items in (64,) if small else (10_000, 100_000):
        stiffness = jnp.exp(jnp.linspace(jnp.log(0.1), jnp.log(10.0 if small else 100.0), items))
        counts = (16,) if small else (2048, 8192, 32_768)
        ways = {"vmap": jax.vmap(oscillator)}
        ways |= {
            f"{count:,}": chunked_vmap(oscillator, count, lockstep=False)
            for count in counts
            if count < items
        }
        ways["by default"] = auto_vmap(0, lockstep=False)(oscillator)
        took = timed(f"{items:,} oscillators", ways, (stiffness,))
        plain = took.pop("vmap")
        for count, seconds in took.items():
            ratio = f"{plain / seconds:.2f}"
            yield [f"{items:,}", f"{1e3 * plain:.3g}", str(count), f"{1e3 * seconds:.3g}", ratio]


def limits(small: bool) -> Iterator[list[str]]:
    """A memory limit, the bytes that the compiler reports, and the peak of the allocator.

    Each in a process of its own, because the peak never falls, and XLA allocates to try kernels
    out.
    """
    yield ["limit", "chunk_size", "reported, MB", "peak beyond inputs and outputs, MB"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    for limit in ("4 MB",) if small else ("1 GB", "2 GB", "4 GB"):
        command = [sys.executable, __file__, "--limit", limit, *(["--small"] if small else [])]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        yield [limit, *(run.stdout or run.stderr).splitlines()[-1].split(";")]


def limited(limit: str, small: bool) -> list[str]:
    """Return what a row of `limits` says after the limit."""
    items = 2**12 if small else 2**20
    (case,) = (case for case in CASES if case.name.startswith("Lennard-Jones"))
    x = drawn(0, items, *case.cores[0])
    kernel = auto_vmap(2, memory_limit=limit)(case.fun)
    memory = kernel.plan(x).memory
    run = jax.jit(jax.grad(lambda x: kernel(x).sum())).lower(x).compile()
    jax.block_until_ready(run(x))
    beyond = (peak() - 2 * x.nbytes) / 1e6
    return [f"{memory.chunk_size:,}", f"{memory.gradient / 1e6:,.0f}", f"{beyond:,.0f}"]


def peak() -> int:
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def predictions(small: bool) -> Iterator[list[str]]:
    """How many times as long as predicted the programs above took, by what decides the prediction.

    Without those that have a loop whose length is not known. The median, the least and the most.
    """
    times: dict[str, list[float]] = {}
    for text, seconds in TIMED:
        program = hlo.read_text(text)
        predicted, why = hlo.predict(program)
        if predicted and not program.has_unknown_steps:
            times.setdefault(why, []).append(seconds / predicted)
    yield ["what decides", "programs", "times as long", "the least", "the most"]
    for why, own in times.items():
        spread = f"{statistics.median(own):.1f}", f"{min(own):.1f}", f"{max(own):.1f}"
        yield [why, str(len(own)), *spread]


QUESTIONS: dict[str, Callable[[bool], Iterator[list[str]]]] = {
    "Reductions over 100,000 x 100,000 pairs, in ms": pairs,
    "A memory limit and the peak": limits,
    "A step that does nothing": empty_loop,
    "Items that end by themselves": lanes,
    "Chunks beside `jax.vmap`, which is as fast at 1.00": chunks,
    "Predictions for an H100, by launches, bytes or operations, and the times": predictions,
}


def answer(question: Callable[[bool], Iterator[list[str]]], small: bool) -> str:
    """Return a table, whose rows are printed as they come, until there is no time left."""
    text = ""
    for row in question(small):
        line = "| " + " | ".join(row) + " |\n"
        if not text:
            rule = ("---" if name in KEYS else "---:" for name in row)
            line += "| " + " | ".join(rule) + " |\n"
        page.progress(line.rstrip())
        text += line
        if question is not predictions and time.perf_counter() - BEGIN > MOST_SECONDS:
            page.progress("\nno time left\n")
            return f"{text}\nStopped here after {MOST_SECONDS // 60} minutes.\n"
    return text


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--limit", help="print one row about a memory limit, for this program")
    options = parser.parse_args()
    if options.small and options.write:
        parser.error("--write is for the large sizes: without --small")
    if options.limit:
        print(*limited(options.limit, options.small), sep=";", end="")
        return
    ran = machine()
    if ran["platform"] == "cpu" and not options.small:
        sys.exit(NO_GPU)
    path = page.RESULTS / f"{ran['platform']}-first.md"
    text = "# The first minutes on a GPU\n\n"
    text += "Written by `python benchmarks/gpu.py --write`, on "
    text += f"{ran['device']}, JAX {jax.__version__}.\n"
    text += "— is what did not fit the memory.\n"
    for title, question in QUESTIONS.items():
        page.progress(f"\n{title}\n")
        text += f"\n## {title}\n\n{answer(question, options.small)}"
        if options.write:  # after each section, in case the next one fails
            stamp.write(path, text)
    page.finish(path, text, write=options.write)
    page.progress(f"{time.perf_counter() - BEGIN:.0f} s")


if __name__ == "__main__":
    main()
