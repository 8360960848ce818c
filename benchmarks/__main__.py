# SPDX-License-Identifier: MIT
"""Compare rankax with its peers: time, temporaries, traces and compile time.

``tox -e bench`` (or ``python benchmarks``) writes ``benchmarks/results/<platform>.{md,json}``, and
on a CPU also the figures of the README and the pages. ``--quick`` runs two small cases and
writes nothing. ``--memory`` only compiles: it measures all memory anew and keeps the times.
"""

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path

import jax

import shown
import stamp
from kernels import EIGH, PAIRS, SCAN
from measure import MODES, Case, Measured, run_case, temporaries
from report import Curves, curve_rows, write_json, write_markdown

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
CURVE_LENGTHS = [n + rest for n in (10_000, 30_000, 100_000, 300_000, 1_000_000) for rest in (0, 3)]
CURVE_PEERS = ["jax.vmap", "lax.map", "powerpax", "adv-jax-math", "rankax"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small cases; write nothing")
    parser.add_argument("--memory", action="store_true", help="only the memory; keep the times")
    parser.add_argument("--rounds", type=int, default=25, help="runs of each contestant, at most")
    parser.add_argument(
        "--seconds", type=float, default=15, help="time for each case, at least 3 rounds"
    )
    options = parser.parse_args()

    directory = HERE / "results"
    file = directory / f"{jax.devices()[0].platform}.json"
    if options.memory:
        return _measure_memory(file)

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

    directory.mkdir(exist_ok=True)
    command = "python -m tox -e bench"
    measured = write_json(file, results, _curves(), command)
    write_markdown(file.with_suffix(".md"), results, command, measured)
    if file.stem == "cpu":
        shown.main()
    print(f"Done in {time.perf_counter() - begin:.0f} s; see {file.with_suffix('.md').name}")


def _measure_memory(file: Path) -> None:
    """Compile what the file has times of, and the curves; write both, and the tables."""
    document = json.loads(file.read_text(encoding="utf-8"))
    kernels = {kernel.name: kernel for kernel in (PAIRS, EIGH, SCAN)}
    results: dict[Case, list[Measured]] = {}
    for row in document["cases"]:
        names = ("length", "chunk_size", "mode")
        case = Case(kernels[row["kernel"]], *(row[name] for name in names))
        if not row["note"]:
            row["temporary_bytes"] = temporaries(
                case.kernel, row["peer"], case.length, case.chunk_size, case.mode
            )
        fields = {field.name: row[field.name] for field in dataclasses.fields(Measured)}
        results.setdefault(case, []).append(Measured(**fields))
    document["memory"] = curve_rows(_curves())
    document["measured"]["memory"] = dataclasses.asdict(stamp.now())
    file.write_text(json.dumps(document, indent=1) + "\n")
    write_markdown(
        file.with_suffix(".md"),
        list(results.items()),
        document["command"],
        document["measured"],
    )
    shown.main()


def _curves() -> Curves:
    """Compile for each number of items; nothing is run."""
    return {
        (kernel.name, mode, peer): [
            (length, size)
            for length in CURVE_LENGTHS
            if (size := temporaries(kernel, peer, length, shown.CURVE_CHUNK, mode)) is not None
        ]
        for kernel in (PAIRS, EIGH)
        for mode in ("forward", "gradient")
        for peer in CURVE_PEERS
    }


def _summary(row: list[Measured]) -> str:
    return ", ".join(
        f"{m.peer} {m.note or f'{m.median_seconds * 1e3:.1f} ms, {m.temporary_bytes / 1e6:.1f} MB'}"
        for m in row
    )


if __name__ == "__main__":
    main()
