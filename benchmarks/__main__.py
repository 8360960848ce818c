# SPDX-License-Identifier: MIT
"""Compare rankax with its peers: time, temporaries, traces and compile time.

``tox -e bench`` (or ``python benchmarks``) writes ``benchmarks/results/<platform>.{md,json}``, and
on a CPU also the marked parts and the figure of the README. ``--quick`` runs two small cases and
writes nothing.
"""

import argparse
import itertools
import time
from pathlib import Path

import jax

import shown
from kernels import EIGH, PAIRS, SCAN
from measure import MODES, Case, Measured, run_case, temporaries
from report import write_json, write_markdown

HERE = Path(__file__).parent

# Lengths with 3 at their end are divided by no chunk near the one asked for.
SETTINGS = [
    (PAIRS, 100_000, 1000),
    (PAIRS, 400_000, 1000),
    (PAIRS, 400_003, 1000),
    # With these, time against the size of a chunk is a curve.
    *((PAIRS, 400_003, chunk_size) for chunk_size in (30, 100, 300, 3000, 10_000, 100_000)),
    (EIGH, 20_000, 500),
    (EIGH, 20_003, 500),
    (EIGH, 20_003, 5000),
    (SCAN, 50_000, 1000),
    (SCAN, 50_003, 1000),
    (SCAN, 50_003, 10_000),
]
QUICK = [(PAIRS, 20_003, 1000), (SCAN, 5003, 1000)]
CURVE_LENGTHS = [10_003, 30_003, 100_003, 300_003, 1_000_003]
CURVE_PEERS = ["jax.vmap", "lax.map", "powerpax", "rankax"]
CURVE_CHUNK = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small cases; write nothing")
    parser.add_argument("--rounds", type=int, default=25, help="runs of each contestant, at most")
    parser.add_argument(
        "--seconds", type=float, default=15, help="time for each case, at least 3 rounds"
    )
    options = parser.parse_args()

    begin = time.perf_counter()
    results = []
    settings = QUICK if options.quick else SETTINGS
    for (kernel, length, chunk_size), mode in itertools.product(settings, MODES):
        case = Case(kernel, length, chunk_size, mode)
        row = run_case(case, options.rounds, options.seconds)
        results.append((case, row))
        print(f"{kernel.name}, {length:,} by {chunk_size:,}, {mode}: {_summary(row)}", flush=True)
    if options.quick:
        return

    curves = {
        (kernel.name, mode, peer): [
            (length, size)
            for length in CURVE_LENGTHS
            if (size := temporaries(kernel, peer, length, CURVE_CHUNK, mode)) is not None
        ]
        for kernel in (PAIRS, EIGH)
        for mode in ("forward", "gradient")
        for peer in CURVE_PEERS
    }
    platform = jax.devices()[0].platform
    directory = HERE / "results"
    directory.mkdir(exist_ok=True)
    command = "python -m tox -e bench"
    write_json(directory / f"{platform}.json", results, curves, command)
    write_markdown(directory / f"{platform}.md", results, command)
    if platform == "cpu":
        shown.main()
    print(f"Done in {time.perf_counter() - begin:.0f} s; see benchmarks/results/{platform}.md")


def _summary(row: list[Measured]) -> str:
    return ", ".join(
        f"{m.peer} {m.note or f'{m.median_seconds * 1e3:.1f} ms, {m.temporary_bytes / 1e6:.1f} MB'}"
        for m in row
    )


if __name__ == "__main__":
    main()
