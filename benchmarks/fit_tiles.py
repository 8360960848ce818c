# SPDX-License-Identifier: MIT
"""Fit the costs by which tiles are chosen (``src/rankax/_fit/cpu.py``) to measured times.

    python benchmarks/fit_tiles.py

times every kernel of ``tile_kernels.py`` and of ``held_out.py`` in tiles of 1 to 4096 items, pinned
to one core, and writes ``benchmarks/results/tile-times-jax-VERSION.json``; what that file holds
already is not timed again, and only a shape of code or of JAX that is new needs that (20 minutes).
Then it fits the costs to the times of all versions that have a file, prints them, and says how fast
the chosen tiles are: in training, and for the kernels held out, which the fit never sees.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from held_out import HELD_OUT
from rankax import auto_vmap
from rankax._fit import cpu
from rankax._plan.levels import Tiles
from rankax._trace.work import Work, work_of
from tile_kernels import TRAINING, Case
from tiles import compiled

RESULTS = Path(__file__).parent / "results"
CHUNK = 4096
TILES = tuple(4**n for n in range(7))
MODES = ("forward", "gradient")
CACHE = 2**20  # of the machine that timed the kernels

GRID = {
    "library": (3, 10, 30),
    "convolution": (10, 30),
    "product": (0, 1e-5, 1e-4, 1e-3),
    "number": (5e-4, 1e-3, 2e-3),
    "row": (0, 5e-4, 1e-3, 2e-3),
    "byte": (1e-5, 2e-5, 4e-5, 8e-5),
}
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


def timed(case: Case, mode: str, seconds: float) -> dict[str, float]:
    """Return the shortest time of `jax.vmap` and of each tile, which take turns."""
    case = case._replace(items=max(2 * CHUNK, 2 ** (case.items.bit_length() - 1)))
    inputs, is_gradient = case.inputs(), mode == "gradient"
    runs = {"jax.vmap": compiled(jax.vmap(case.fun), inputs, is_gradient)}
    for tile in TILES:
        kernel = auto_vmap(*map(len, case.cores), jit=True, chunk_size=CHUNK)(case.fun)
        with (
            mock.patch("rankax._call.run.best_tiles", return_value=Tiles(tile, tile)),
            mock.patch("rankax._call.run.tiles_matter", return_value=True),
        ):
            runs[str(tile)] = compiled(kernel, inputs, is_gradient)
    arguments = [jnp.float32(1), *inputs]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run(*arguments))
    deadline = time.perf_counter() + seconds
    while len(times["jax.vmap"]) < 3 or time.perf_counter() < deadline:
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times[name].append(time.perf_counter() - begin)
    return {name: min(found) for name, found in times.items()}


def collect(path: Path, seconds: float) -> None:
    """Time what the file lacks."""
    os.sched_setaffinity(0, {0})
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for case, mode in itertools.product([*TRAINING, *HELD_OUT], MODES):
        key = f"{case.name}, {mode}"
        if key not in found:
            found[key] = timed(case, mode, seconds)
            print(key, {name: f"{t * 1e3:.2f} ms" for name, t in found[key].items()}, flush=True)
            lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(t)}" for k, t in found.items())
            path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


class Rows(NamedTuple):
    """The times of some kernels in one mode, and what each item does."""

    names: list[str]
    works: list[Work]
    times: np.ndarray  # kernel x tile
    best_without: np.ndarray  # the better of `jax.vmap` and whole chunks
    loss: np.ndarray  # kernel x tile


def rows_of(cases: Sequence[Case], mode: str) -> Rows:
    names, works, times, others = [], [], [], []
    for path in sorted(RESULTS.glob("tile-times-jax-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for case in cases:
            row = found[f"{case.name}, {mode}"]
            args = [jax.ShapeDtypeStruct(core, jnp.float32) for core in case.cores]
            names.append(f"{case.name}, {path.stem.removeprefix('tile-times-')}")
            works.append(work_of(jax.make_jaxpr(case.fun)(*args).jaxpr))
            times.append([row[str(tile)] for tile in TILES])
            others.append(min(row["jax.vmap"], row[str(CHUNK)]))
    all_times, best_without = np.array(times), np.array(others)
    slower = np.log(all_times / all_times.min(1, keepdims=True))
    # Rows below 0.92 of the better of the two count more, if a tile exists that is not.
    goal = np.maximum(all_times.min(1), best_without / 0.92)[:, None]
    loss = slower + 3 * np.maximum(0, np.log(all_times / goal)) + np.maximum(0, slower - 0.36) / 2
    return Rows(names, works, all_times, best_without, loss)


def chosen(rows: Rows, costs: cpu.Costs, share: float) -> np.ndarray:
    """Return which of the tiles the model chooses, for each kernel."""
    table = [
        [cpu.cost_in_tile(work, t, costs, cache) for t in reversed(TILES)]
        for work in rows.works
        for cache in [CACHE * (min(share, costs.loop) if work.loops else share)]
    ]
    return len(TILES) - 1 - np.argmin(np.array(table), axis=1)


def candidates() -> Iterator[cpu.Costs]:
    for values in itertools.product(*GRID.values()):
        yield cpu.Costs(**dict(zip(GRID, values, strict=True)))


def fit(forward: Rows, gradient: Rows) -> cpu.Costs:
    """Return the costs of the grid that lose least, over both modes."""

    def least(rows: Rows, costs: cpu.Costs) -> tuple[float, float]:
        losses = {
            share: rows.loss[np.arange(len(rows.loss)), chosen(rows, costs, share)].mean()
            for share in SHARES
        }
        return min((loss, -share) for share, loss in losses.items())

    best: tuple[float, cpu.Costs] | None = None
    for costs in candidates():
        (a, share), (b, other) = least(forward, costs), least(gradient, costs)
        if best is None or a + b < best[0] - 1e-9:
            best = a + b, costs._replace(forward=-share, derivative=-other)
    assert best is not None
    return best[1]


def mean(values: np.ndarray) -> float:
    return math.exp(statistics.fmean(np.log(values)))


def times_of(rows: Rows, costs: cpu.Costs, share: float) -> np.ndarray:
    """Return the time of each kernel in the tiles that the model chooses."""
    picks = chosen(rows, costs, share)
    return rows.times[np.arange(len(picks)), picks]


def say(title: str, rows: Rows, costs: cpu.Costs, share: float) -> None:
    times = times_of(rows, costs, share)
    ratio, possible = rows.best_without / times, rows.best_without / rows.times.min(1)
    is_low = ratio < 0.9
    print(
        f"{title}: {mean(rows.times[:, -1] / times):.2f} times as fast as whole chunks, "
        f"{mean(ratio):.2f} as the better of these and jax.vmap, "
        f"{mean(rows.times.min(1) / times):.2f} as the best tile; {sum(is_low)} of {len(ratio)} "
        f"rows below 0.9 of the better, {sum(is_low & (possible >= 0.9))} though a tile is not"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1, help="for each kernel and mode")
    given = parser.parse_args()
    version = ".".join(jax.__version__.split(".")[:2])
    collect(RESULTS / f"tile-times-jax-{version}.json", given.seconds)
    forward, gradient = (rows_of(TRAINING, mode) for mode in MODES)
    costs = fit(forward, gradient)
    print(f"fitted: {costs}")
    print(f"in use: {cpu.COSTS}")
    for name, cases in (("training", TRAINING), ("held out", HELD_OUT)):
        for mode, share in zip(MODES, (cpu.COSTS.forward, cpu.COSTS.derivative), strict=True):
            say(f"{name}, {mode}", rows_of(cases, mode), cpu.COSTS, share)


if __name__ == "__main__":
    main()
