# SPDX-License-Identifier: MIT
"""Time the tiles that rankax chooses and tunes, beside `jax.vmap`, `lax.map` and powerpax.

    python benchmarks/tiles.py

Eleven kernels, forward and gradient. The contestants of a
row take turns, and medians are compared, so that a machine that is busy for a while slows all.
Freed memory is kept (``allocator.py``).
"""

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import allocator
import page
import shown
from rankax import auto_vmap
from rankax.core.plan.schedule import Tiles

if __name__ == "__main__":  # before the kernels make arrays
    allocator.keep_memory()
    if "--one-core" in sys.argv:
        os.sched_setaffinity(0, {0})
    else:
        jax.config.update("jax_num_cpu_devices", os.cpu_count())
from tile_kernels import CASES, Case

RESULTS = page.RESULTS / "tiles.md"
CHUNK = 4096
MAP_SIZES = (4, 16, 64, 256, 1024, 4096)


# The contestants: each a compiled function of the inputs.


def compiled(fun: Callable[..., Any], inputs: Any, gradient: bool, options: Any = None) -> Any:
    """Compile; the cotangents are made of an input, so that they are not constants."""

    def value_and_gradient(scale: Any, *arrays: Any) -> Any:
        def value(arrays: Any) -> Any:
            return sum(scale * jnp.sum(out) for out in jax.tree.leaves(fun(*arrays)))

        return jax.value_and_grad(value)(arrays)

    program = value_and_gradient if gradient else lambda scale, *arrays: fun(*arrays)
    return jax.jit(program, compiler_options=options).lower(jnp.float32(1), *inputs).compile()


def contestants(case: Case, inputs: Any, gradient: bool, seconds: float) -> dict[str, Any]:
    devices = "all" if jax.local_device_count() > 1 else None
    kernel = auto_vmap(*map(len, case.cores), jit=True, chunk_size=CHUNK, devices=devices)(case.fun)
    tuned = kernel.tune(*inputs, memory_limit="50%", gradient=gradient, seconds=seconds)
    page.progress(tuned.tuning)
    options = tuned.tuning.options
    found = {
        "jax.vmap": compiled(jax.vmap(case.fun), inputs, gradient),
        "default": compiled(kernel, inputs, gradient),
        "tuned": compiled(tuned, inputs, gradient, options.get("compiler_options")),
    }
    own = kernel.with_options(cpu_math=True)
    found["cpu_math"] = compiled(own, inputs, gradient)
    with mock.patch("rankax.ext.xla_cpu.rules.best_tiles", return_value=Tiles()):
        found["no tiles"] = compiled(kernel, inputs, gradient)
    for size in MAP_SIZES:
        found[f"lax.map {size}"] = compiled(_lax_map(case.fun, size), inputs, gradient)
    try:
        import powerpax
    except ImportError:
        return found
    chunked = powerpax.chunked_vmap(lambda xs: case.fun(*xs), CHUNK)
    return found | {"powerpax": compiled(lambda *xs: chunked(xs), inputs, gradient)}


def _lax_map(fun: Callable[..., Any], size: int) -> Callable[..., Any]:
    return lambda *xs: lax.map(lambda x: fun(*x), xs, batch_size=size)


def medians(
    runs: dict[str, Any],
    inputs: Any,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    arguments = [jnp.float32(1), *inputs]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run(*arguments))
    deadline, turn = time.perf_counter() + seconds, 0
    while turn < 5 or time.perf_counter() < deadline:
        # Always in one order, a program would find what the same one has left in the cache.
        for name in random.Random(turn).sample(sorted(runs), len(runs)):
            begin = clock()
            jax.block_until_ready(runs[name](*arguments))
            times[name].append(clock() - begin)
        turn += 1
    return {name: statistics.median(found) for name, found in times.items()}


COLUMNS = ("jax.vmap", "no tiles", "default", "cpu_math", "tuned", "lax.map, best", "powerpax")


def row_of(times: dict[str, float]) -> dict[str, float]:
    best = min(seconds for name, seconds in times.items() if name.startswith("lax.map"))
    return {**{name: times[name] for name in COLUMNS if name in times}, "lax.map, best": best}


def mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def report(rows: dict[tuple[str, str], dict[str, float]], command: str) -> str:
    lines = [
        "# Tiles",
        "",
        f"Written by `{command}`. jax {jax.__version__}, {jax.devices()[0].device_kind}, float32.",
        "",
        "Milliseconds, medians of turns. *no tiles*: chunks of 4096 as they are; *default*: the "
        "same in the tiles that rankax chooses; *cpu_math*: with `cpu_math=True`; *tuned*: the "
        "options of `kernel.tune`, which may use half of the memory; *lax.map, best*: the best of "
        "its chunks of 4 to 4096; powerpax: chunks of 4096. Then ratios of times; *better* is the "
        "better of *no tiles* and jax.vmap. The fastest of a row is bold.",
        "",
    ]
    ratios = (
        "no tiles / default",
        "better / default",
        "default / tuned",
        "vmap / tuned",
        "best other / tuned",
    )
    lines.append("| " + " | ".join(["kernel", "", *COLUMNS, *ratios]) + " |")
    lines.append("|" + " --- |" * 2 + " ---: |" * (len(COLUMNS) + len(ratios)))
    found: dict[str, list[float]] = {}
    for (name, mode), row in rows.items():
        best = min(row.values())
        cells = [
            "-" if c not in row
            else f"**{row[c] * 1e3:.1f}**" if row[c] == best
            else f"{row[c] * 1e3:.1f}"
            for c in COLUMNS
        ]  # fmt: skip
        ours = ("tuned", "default", "cpu_math")
        others = min(t for c, t in row.items() if c not in ours)
        values = (
            row["no tiles"] / row["default"],
            min(row["no tiles"], row["jax.vmap"]) / row["default"],
            row["default"] / row["tuned"],
            row["jax.vmap"] / row["tuned"],
            others / row["tuned"],
        )
        for ratio, value in zip(ratios, values, strict=True):
            found.setdefault(f"{ratio}, {mode}", []).append(value)
        lines.append("| " + " | ".join([name, mode, *cells, *(f"{v:.2f}" for v in values)]) + " |")
    lines += ["", "Geometric means: "]
    lines += [f"* {name}: {mean(values):.2f}" for name, values in found.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--only", help="kernels whose name begins so")
    parser.add_argument("--seconds", type=float, default=3, help="for each row")
    parser.add_argument("--tuning", type=float, default=5, help="seconds to tune each row")
    parser.add_argument("--one-core", action="store_true", help="where jax.vmap has no second one")
    parser.add_argument("--results", default=RESULTS.stem, help="the name of the file of results")
    given = parser.parse_args()
    if given.only and given.write:
        parser.error("--write is for all kernels: without --only")
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for case in CASES:
        if given.only and not case.name.startswith(given.only):
            continue
        inputs = case.inputs()
        for mode in ("forward", "gradient"):
            runs = contestants(case, inputs, mode == "gradient", given.tuning)
            rows[case.name, mode] = row = row_of(medians(runs, inputs, given.seconds))
            times = ", ".join(f"{name} {t * 1e3:.1f}" for name, t in row.items())
            page.progress(f"{case.name}, {mode}: {times}")
    command = f"python benchmarks/tiles.py --seconds {given.seconds:g} --tuning {given.tuning:g}"
    command += f" --results {given.results}"
    command += " --one-core" if given.one_core else ""
    command += " --write"
    text = report(rows, command)
    page.finish(RESULTS.with_stem(given.results), text, write=given.write)
    if given.write and given.results == RESULTS.stem:
        shown.main()


if __name__ == "__main__":
    main()
