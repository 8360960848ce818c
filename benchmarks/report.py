# SPDX-License-Identifier: MIT
"""Write what was measured: JSON for programs, and a Markdown table for people."""

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

import shown
import stamp
from measure import Case, Measured
from peers import CHUNKED

Results = list[tuple[Case, list[Measured]]]
Curves = dict[tuple[str, str, str], list[tuple[int, int]]]  # by kernel, mode and peer


def machine() -> dict[str, Any]:
    """Say what ran, and on what kind of machine; never which machine."""
    device = jax.devices()[0]
    packages = {}
    for name in (
        "jax",
        "jaxlib",
        "numpy",
        "powerpax",
        "netket",
        "adv-jax-math",
        "jax-autovmap",
        "rankax",
    ):
        packages[name] = _version(name)
    return {
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "platform": device.platform,
        "processor": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "packages": packages,
    }


def _version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return __import__("rankax").__version__ if name == "rankax" else None


def write_json(path: Path, results: Results, curves: Curves, command: str) -> dict[str, Any]:
    """Write every number, unrounded, and return the stamps of times and of memory."""
    rows = [
        {
            "kernel": case.kernel.name,
            "length": case.length,
            "chunk_size": case.chunk_size,
            "mode": case.mode,
            **dataclasses.asdict(measured),
        }
        for case, row in results
        for measured in row
    ]
    memory = curve_rows(curves)
    measured = dict.fromkeys(("cases", "memory"), dataclasses.asdict(stamp.now()))
    document = {
        "command": command,
        "machine": machine(),
        "measured": measured,
        "cases": rows,
        "memory": memory,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return measured


def curve_rows(curves: Curves) -> list[dict[str, Any]]:
    """Return the curves of memory as rows for JSON."""
    return [
        {"kernel": kernel, "mode": mode, "peer": peer, "length_and_bytes": points}
        for (kernel, mode, peer), points in curves.items()
    ]


def curve_table(rows: list[dict[str, Any]]) -> str:
    """Return the temporaries of the curves, in the words of the pages."""
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    cells: dict[tuple[str, str, int], dict[str, str]] = {}
    for row in rows:
        for length, size in row["length_and_bytes"]:
            key = row["kernel"], row["mode"], length
            cells.setdefault(key, {})[row["peer"]] = shown.megabytes(size)
    lines = [_line(["kernel", "", "items", *peers])] if rows else []
    lines += [_line(["---"] * 3 + ["---:"] * len(peers))] if rows else []
    for (kernel, mode, length), own in cells.items():
        lines.append(_line([kernel, mode, f"{length:,}", *(own.get(peer, "—") for peer in peers)]))
    return "\n".join(lines)


def markdown(
    results: Results, command: str = "", measured: dict[str, dict[str, str]] | None = None
) -> str:
    """Return a table for the times, one for the temporaries, and one for compiling."""
    facts = machine()
    versions = ", ".join(f"{k} {v}" for k, v in facts["packages"].items() if v)
    lines = [
        f"# Benchmark on {facts['device']}",
        "",
        f"Written by `{command}`. {facts['processor']}; Python {facts['python']}; {versions}.",
        "",
        "One process; the contestants take turns; medians. `lax.map` is `lax.map(batch_size=)`. "
        "`jax.vmap`, `jax-autovmap` and `jnp.vectorize` hold all items at once. The fastest of a "
        "row is bold; **—**: not measured.",
        "",
        "## Time in ms",
        "",
        *_table(results, _milliseconds, ratios=True),
        "",
        "*vs chunked*: rankax's time by that of the fastest other chunked contestant; *vs all*: by "
        "that of the fastest other one of any kind; *vs lax.map*: how many times faster rankax is.",
        "",
        "## Temporaries in MB",
        "",
        *_table(results, lambda row: _best(row, lambda m: m.temporary_bytes / 1e6, "{:.2f}")),
        "",
        "## Traces of the kernel, and seconds to trace and compile",
        "",
        *_table(results, lambda row: _each(row, _compiling)),
        *[f"\n{peer} did not take part: {note}." for peer, note in _absent(results)],
        "",
        *(f"{part.capitalize()}. {stamp.Stamp(**own)}" for part, own in (measured or {}).items()),
    ]
    return "\n".join(lines) + "\n"


def _table(results: Results, cells: Any, *, ratios: bool = False) -> list[str]:
    extra = ["vs chunked", "vs all", "vs lax.map"] if ratios else []
    peers = [measured.peer for measured in results[0][1]]
    header = ["kernel", "items", "chunk", "", *peers, *extra]
    lines = [_line(header), _line(["---"] * 4 + ["---:"] * (len(peers) + len(extra)))]
    for case, row in results:
        name = [case.kernel.name, f"{case.length:,}", f"{case.chunk_size:,}", case.mode]
        lines.append(_line(name + cells(row) + (_ratios(row) if ratios else [])))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _each(row: list[Measured], text: Any) -> list[str]:
    return ["—" if measured.note else text(measured) for measured in row]


def _compiling(measured: Measured) -> str:
    return f"{measured.traces}: {measured.trace_seconds:.2f} + {measured.compile_seconds:.2f}"


def _best(row: list[Measured], value: Any, form: str) -> list[str]:
    best = min(value(measured) for measured in row if not measured.note)

    def text(measured: Measured) -> str:
        shown = form.format(value(measured))
        return f"**{shown}**" if shown == form.format(best) else shown

    return _each(row, text)


def _milliseconds(row: list[Measured]) -> list[str]:
    return _best(row, lambda measured: measured.median_seconds * 1e3, "{:.1f}")


def _ratios(row: list[Measured]) -> list[str]:
    times = {m.peer: m.median_seconds for m in row if not m.note}
    own = times.pop("rankax")
    chunked = min(seconds for peer, seconds in times.items() if peer in CHUNKED)
    return [
        f"{own / chunked:.2f}",
        f"{own / min(times.values()):.2f}",
        f"{times['lax.map'] / own:.2f}x",
    ]


def _absent(results: Results) -> list[tuple[str, str]]:
    notes = {(m.peer, m.note) for _, row in results for m in row}
    return sorted((peer, note) for peer, note in notes if note.startswith("not installed"))
