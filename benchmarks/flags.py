# SPDX-License-Identifier: MIT
"""What two flags of XLA, and the allocator, gain on a CPU: the eleven kernels of ``tiles.py``.

    python benchmarks/flags.py

The calls with ``jit=True`` are without chunks; forward,
rankax passes the flag for sums by itself where it expects a gain. A flag belongs to a process, so
each flag has one of its own. They take turns for each kernel, all on one core; medians of the
processor time are compared. All but one keep freed memory (``allocator.py``).
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

import page
from allocator import KEPT
from tile_kernels import CASES
from tiles import CHUNK, compiled

LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=262144"
SUMS = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT"
FLAGS = {  # what is added to the environment
    "malloc": {},
    "none": KEPT,
    "loops": KEPT | {"XLA_FLAGS": LOOPS},
    "sums": KEPT | {"XLA_FLAGS": SUMS},
}
RESULTS = page.RESULTS / "flags.md"
ROUNDS, TURNS = 5, 3


def serve() -> None:
    """Time the kernels whose names come in, one a line; print the milliseconds of each."""
    from rankax import auto_vmap

    os.sched_setaffinity(0, {0})
    runs = {}
    for line in sys.stdin:
        name, mode = json.loads(line)
        (case,) = (case for case in CASES if case.name == name)
        inputs, is_gradient = case.inputs(), mode == "gradient"
        if (name, mode) not in runs:
            kernel = auto_vmap(*map(len, case.cores), chunk_size=CHUNK)(case.fun)
            ways = {"jax.vmap": jax.vmap(case.fun), "rankax": kernel}
            runs[name, mode] = {
                way: compiled(fun, inputs, is_gradient) for way, fun in ways.items()
            }
            if not is_gradient:  # called as it is: rankax compiles
                alone = kernel.with_options(chunk_size=None, jit=True)
                runs[name, mode]["jit=True"] = lambda _, *inputs, alone=alone: alone(*inputs)
        found = {way: [] for way in runs[name, mode]}
        for _ in range(ROUNDS):
            for way, run in runs[name, mode].items():
                begin = time.process_time()
                jax.block_until_ready(run(jnp.float32(1), *inputs))
                found[way].append(1e3 * (time.process_time() - begin))
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--results", default=RESULTS.stem, help="the name of the file of results")
    given = parser.parse_args()
    name = given.results
    command = "python benchmarks/flags.py" + (f" --results {name}" if name != RESULTS.stem else "")
    command += " --write"
    servers = {
        flag: subprocess.Popen(
            [sys.executable, __file__, "serve"],
            env={**os.environ, "XLA_FLAGS": "", **changes},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for flag, changes in FLAGS.items()
    }
    columns = [f"{way}, {flag}" for way in ("jax.vmap", "rankax") for flag in FLAGS]
    columns.append("jit=True, none")
    lines = [
        "# Flags of XLA",
        "",
        f"Written by `{command}`. jax {jax.__version__}, cpu, one core, float32.",
        "",
        "Milliseconds of processor time, medians; rankax in chunks of "
        f"{CHUNK}, and `jit=True` without chunks. `malloc`: freed memory goes back to the system, "
        "as glibc decides; elsewhere it is kept. Flags: none; "
        f"`loops` is `{LOOPS}`; `sums` is `{SUMS}`. "
        "The fastest of a row is bold.",
        "",
        "| kernel |  | " + " | ".join(columns) + " |",
        "| --- | --- |" + " ---: |" * len(columns),
    ]
    for case in CASES:
        for mode in ("forward", "gradient"):
            times: dict[str, list[float]] = {column: [] for column in columns}
            for _ in range(TURNS):
                for flag, server in servers.items():
                    server.stdin.write(json.dumps([case.name, mode]) + "\n")
                    server.stdin.flush()
                    for way, found in json.loads(server.stdout.readline()).items():
                        if f"{way}, {flag}" in times:
                            times[f"{way}, {flag}"] += found[1:]
            row = [statistics.median(own) if own else math.inf for own in times.values()]
            cells = [f"**{x:.3g}**" if x == min(row) else f"{x:.3g}" for x in row]
            cells = ["—" if x == math.inf else cell for x, cell in zip(row, cells, strict=True)]
            lines.append(f"| {case.name} | {mode} | " + " | ".join(cells) + " |")
            page.progress(lines[-1])
    for server in servers.values():
        server.stdin.close()
        server.wait()
    page.finish(RESULTS.with_stem(name), "\n".join(lines), write=given.write)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
