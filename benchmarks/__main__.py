# SPDX-License-Identifier: MIT
"""Compare rankax with its peers: time, temporaries, traces and compile time.

    python benchmarks             # all cases, in half an hour
    python benchmarks --quick     # two small ones, in a minute
    python benchmarks --memory    # of a million items, which are compiled only

``--write`` writes ``benchmarks/results/<platform>.{md,json}``, and on a CPU also the figures of the
README and the pages. ``--memory --write`` measures all memory anew and keeps the times.
"""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import jax

import page
import shown
import stamp
from kernels import EIGH, PAIRS, SCAN
from measure import MODES, Case, Measured, run_case, temporaries
from report import Curves, curve_rows, curve_table, markdown, write_json

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
    parser = page.arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="two small cases")
    parser.add_argument("--memory", action="store_true", help="only the memory")
    parser.add_argument("--rounds", type=int, default=25, help="runs of each contestant, at most")
    parser.add_argument(
        "--seconds", type=float, default=15, help="time for each case, at least 3 rounds"
    )
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--write is for all cases: without --quick")

    file = page.RESULTS / f"{jax.devices()[0].platform}.json"
    if options.memory and options.write:
        return _measure_memory(file)
    if options.memory:
        return _compare_memory(file)

    begin = time.perf_counter()
    results = []
    settings = QUICK if options.quick else SETTINGS
    for (kernel, length, chunk_size), mode in itertools.product(settings, MODES):
        case = Case(kernel, length, chunk_size, mode)
        row = run_case(case, options.rounds, options.seconds)
        results.append((case, row))
        page.progress(f"{kernel.name}, {length:,} by {chunk_size:,}, {mode}: {_summary(row)}")
    tables = file.with_suffix(".md")
    old = tables.read_text(encoding="utf-8") if tables.exists() else ""
    print(page.beside(markdown(results), old))
    if options.write:
        command = "python benchmarks --write"
        measured = write_json(file, results, _curves(CURVE_LENGTHS), command)
        tables.write_text(markdown(results, command, measured))
        if file.stem == "cpu":
            shown.main()
    page.progress(f"{time.perf_counter() - begin:.0f} s")


def _compare_memory(file: Path) -> None:
    """Compile the longest of the curves, and print them beside those of the file."""
    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    text = curve_table(curve_rows(_curves(CURVE_LENGTHS[-2:])))
    old = curve_table(document.get("memory", []))
    if old:
        stamped = stamp.Stamp(**document["measured"]["memory"])
        origin = f"`{document['command']}`, {document['machine']['device']}."
        old = f"Written by {origin}\n\n{old}\n{stamped}"
    print(page.beside(text, old))


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
    document["memory"] = curve_rows(_curves(CURVE_LENGTHS))
    document["measured"]["memory"] = dataclasses.asdict(stamp.now())
    file.write_text(json.dumps(document, indent=1) + "\n")
    tables = markdown(list(results.items()), document["command"], document["measured"])
    file.with_suffix(".md").write_text(tables)
    shown.main()


def _curves(lengths: list[int]) -> Curves:
    """Compile for each number of items; nothing is run."""
    curves: Curves = {}
    for kernel, mode in itertools.product((EIGH, PAIRS), ("gradient", "forward")):
        page.progress(f"compiling {kernel.name}, {mode}")
        for peer in CURVE_PEERS:
            sizes = ((n, temporaries(kernel, peer, n, shown.CURVE_CHUNK, mode)) for n in lengths)
            curves[kernel.name, mode, peer] = [(n, size) for n, size in sizes if size is not None]
    return curves


def _summary(row: list[Measured]) -> str:
    return ", ".join(
        f"{m.peer} {m.note or f'{m.median_seconds * 1e3:.1f} ms, {m.temporary_bytes / 1e6:.1f} MB'}"
        for m in row
    )


if __name__ == "__main__":
    main()
