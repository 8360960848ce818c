# SPDX-License-Identifier: MIT
"""Time kernels in tiles of 1 to 4096 items, and in the tile that rankax chooses.

    python benchmarks/tile_sizes.py

for the kernels of ``tile_kernels.py`` and of
``held_out.py``, forward and gradient, how fast the default tile is beside the best one. One core,
in half an hour. The contestants of a row take turns, and medians are compared: of processor times,
which other processes on that core change little. Freed memory is kept (``allocator.py``).
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import jax

import allocator
import page
from rankax import auto_vmap
from rankax.core.plan.schedule import Tiles

if __name__ == "__main__":  # before the kernels make arrays
    allocator.keep_memory()
    os.sched_setaffinity(0, {0})
from held_out import HELD_OUT, NEWER
from tile_kernels import TRAINING, Case
from tiles import compiled, mean, medians

RESULTS = page.RESULTS / "tile-sizes.md"
CHUNK = 4096
TILES = tuple(4**n for n in range(7))
MODES = ("forward", "gradient")
SETS = {"training": TRAINING, "held out": HELD_OUT, "the ten newest": NEWER}


@contextlib.contextmanager
def forced(tile: int) -> Iterator[None]:
    """Let kernels that are traced in here have tiles of so many items."""
    with mock.patch("rankax.ext.xla_cpu.rules.best_tiles", return_value=Tiles(tile, tile)):
        yield


class Row(NamedTuple):
    """The seconds of a kernel in one mode: by the tile, in the default one, and of `jax.vmap`."""

    tiles: dict[int, float]
    default_tile: int  # of the forward pass
    default: float
    vmap: float

    @property
    def best_tile(self) -> int:
        return min(self.tiles, key=self.tiles.__getitem__)

    @property
    def best(self) -> float:
        return self.tiles[self.best_tile]


def timed(case: Case, mode: str, seconds: float) -> Row:
    # A power of two, so that all chunks are full; at least two of them, so that there is a loop.
    case = case._replace(items=max(2 * CHUNK, 2 ** (case.items.bit_length() - 1)))
    inputs, is_gradient = case.inputs(), mode == "gradient"

    def kernel():  # a new one each time, because a kernel keeps its programs
        return auto_vmap(*map(len, case.cores), jit=True, chunk_size=CHUNK)(case.fun)

    runs = {
        "vmap": compiled(jax.vmap(case.fun), inputs, is_gradient),
        "default": compiled(default := kernel(), inputs, is_gradient),
    }
    for tile in TILES:
        with forced(tile):
            runs[str(tile)] = compiled(forced_kernel := kernel(), inputs, is_gradient)
            assert forced_kernel.plan(*inputs).in_flight == tile  # `forced` fits this rankax
    times = medians(runs, inputs, seconds, time.process_time)
    tiles = {tile: times[str(tile)] for tile in TILES}
    return Row(tiles, default.plan(*inputs).in_flight, times["default"], times["vmap"])


Rows = dict[tuple[str, str], Row]


def report(rows: Rows, command: str) -> str:
    lines = [
        "# Sizes of tiles",
        "",
        f"Written by `{command}`. jax {jax.__version__}, {jax.devices()[0].device_kind}, float32, "
        "one core.",
        "",
        "Processor times, in chunks of 4096: of the fastest of the tiles of 1, 4, 16 and so on to "
        "4096 items, and of the tile that rankax chooses for a call. A derivative may have a "
        "smaller one, which is timed but not shown. *share*: the time of the best tile over that "
        "of the default one, or of `jax.vmap`; above 1, it is faster than the best tile.",
        "",
        *_table(
            ("", "rows", "default, mean", "its worst", "jax.vmap, mean", "worst"), _summary(rows)
        ),
        "",
        *_table(
            (*("kernel", "", "best tile", "default tile", "best, ms", "default, ms"), *_SHARES),
            [_cells(name, mode, row) for (name, mode), row in rows.items()],
        ),
    ]
    return "\n".join(lines) + "\n"


_SHARES = ("default's share", "jax.vmap's share")


def _summary(rows: Rows) -> list[Sequence[str]]:
    """Return the geometric mean and the least of the shares, by set and mode."""
    found = []
    for name, cases in SETS.items():
        for mode in MODES:
            own = {case.name: rows.get((case.name, mode)) for case in cases}
            own = {kernel: row for kernel, row in own.items() if row}
            if not own:
                continue
            cells = [f"{name}, {mode}", str(len(own))]
            for contestant in ("default", "vmap"):
                shares = {
                    kernel: row.best / getattr(row, contestant) for kernel, row in own.items()
                }
                worst = min(shares, key=shares.__getitem__)
                cells += [f"{mean([*shares.values()]):.2f}", f"{shares[worst]:.2f} ({worst})"]
            found.append(cells)
    return found


def _cells(name: str, mode: str, row: Row) -> Sequence[str]:
    shares = (row.best / row.default, row.best / row.vmap)
    times = (f"{seconds * 1e3:.2f}" for seconds in (row.best, row.default))
    return (
        *(name, mode, str(row.best_tile), str(row.default_tile), *times),
        *(f"{share:.2f}" for share in shares),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    dashes = ["---" if name in ("", "kernel") else "---:" for name in head]
    return ["| " + " | ".join(cells) + " |" for cells in (head, dashes, *rows)]


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--only", help="kernels whose name begins so")
    parser.add_argument("--seconds", type=float, default=1, help="for each row")
    parser.add_argument("--held-out", action="store_true", help="only those")
    given = parser.parse_args()
    if given.write and (given.only or given.held_out):
        parser.error("--write is for all kernels: without --only and --held-out")
    rows: Rows = {}
    for case in [*([] if given.held_out else TRAINING), *HELD_OUT]:
        if given.only and not case.name.startswith(given.only):
            continue
        for mode in MODES:
            rows[case.name, mode] = row = timed(case, mode, given.seconds)
            tiles = ", ".join(f"{tile} {own * 1e3:.2f}" for tile, own in row.tiles.items())
            page.progress(
                f"{case.name}, {mode}, ms: {tiles}; default ({row.default_tile}) "
                f"{row.default * 1e3:.2f}, jax.vmap {row.vmap * 1e3:.2f}",
            )
    text = report(rows, f"python benchmarks/tile_sizes.py --seconds {given.seconds:g} --write")
    page.finish(RESULTS, text, write=given.write)


if __name__ == "__main__":
    main()
