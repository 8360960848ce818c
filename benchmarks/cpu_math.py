# SPDX-License-Identifier: MIT
"""What ``cpu_math=True`` gains: kernels full of sines, angles and powers, and each function alone.

    python benchmarks/cpu_math.py

One core; chunks of 4096, or of 2**16 pairs. The
contestants of a row take turns, and medians are compared. Freed memory is kept (``allocator.py``).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import allocator
import page
from rankax import auto_vmap, chunked_vmap

if __name__ == "__main__":  # before the kernels make arrays
    allocator.keep_memory()
    os.sched_setaffinity(0, {0})
from held_out import haversine, slerp
from tile_kernels import drawn, kepler, rotate
from tiles import compiled, medians

RESULTS = page.RESULTS / "cpu-math.md"
CHUNK, PAIRS = 4096, 2**16


def spherical(point):
    r = jnp.sqrt(point @ point)
    return jnp.stack([r, jnp.arccos(point[2] / r), jnp.arctan2(point[1], point[0])])


def torsion(points):
    first, second, third = points[1:] - points[:-1]
    left, right = jnp.cross(first, second), jnp.cross(second, third)
    return jnp.arctan2(jnp.sqrt(second @ second) * (first @ right), left @ right)


def pendulum(angle, speed):
    for _ in range(20):
        speed = speed - 0.05 * jnp.sin(angle)
        angle = angle + 0.05 * speed
    return angle, speed


def gravity(x, y, mass):
    away = y - x
    return mass * away / (away @ away + 1e-2) ** 1.5


def gravity_by_root(x, y, mass):
    away = y - x
    square = away @ away + 1e-2
    return mass * away / (square * jnp.sqrt(square))


def biot_savart(x, y, current):
    away = x - y
    return jnp.cross(current, away) / (away @ away + 1e-2) ** 1.5


class Case(NamedTuple):
    name: str
    fun: Callable[..., Any]
    inputs: tuple[Any, ...]
    pairs: bool = False

    def ways(self) -> dict[str, Any]:
        """Return the map by hand, in chunks, and both with the option."""
        if self.pairs:
            ranks = [x.ndim - 1 for x in self.inputs]
            reduced = auto_vmap(*ranks, reduce="sum", reduce_axis=-1, chunk_size=PAIRS)(self.fun)
            own = reduced.with_options(cpu_math=True)
            over = jax.vmap(self.fun, (None, *(0 for _ in ranks[1:])))

            def by_hand(x, *others):
                return jax.vmap(lambda row: jnp.sum(over(row, *others), 0))(x)

            return {
                "jax.vmap": by_hand,
                "chunks": lambda x, *others: reduced(x[:, None], *others),
                "chunks, cpu_math": lambda x, *others: own(x[:, None], *others),
            }
        return {
            "jax.vmap": jax.vmap(self.fun),
            "cpu_math": chunked_vmap(self.fun, None, cpu_math=True),
            "chunks": chunked_vmap(self.fun, CHUNK),
            "chunks, cpu_math": chunked_vmap(self.fun, CHUNK, cpu_math=True),
        }


def cases() -> Iterator[Case]:
    two = drawn(1, 200_000, 2), drawn(2, 200_000, 2)
    bodies = drawn(0, 4000, 3), drawn(1, 4000, 3)
    yield Case("Kepler", kepler, (drawn(0, 200_000), drawn(1, 200_000)))
    yield Case("great circles", haversine, two)
    yield Case("slerp", slerp, (drawn(0, 100_000, 4), drawn(1, 100_000, 4), drawn(2, 100_000)))
    yield Case("torsion", torsion, (drawn(0, 100_000, 4, 3),))
    yield Case("spherical", spherical, (drawn(0, 200_000, 3),))
    yield Case("pendulum", pendulum, (drawn(0, 100_000), drawn(1, 100_000)))
    yield Case("rotation (none of these)", rotate, (drawn(0, 200_000, 4), drawn(1, 200_000, 3)))
    yield Case("gravity, d2**1.5", gravity, (*bodies, drawn(2, 4000)), pairs=True)
    yield Case("gravity, d2 * sqrt(d2)", gravity_by_root, (*bodies, drawn(2, 4000)), pairs=True)
    yield Case("Biot-Savart, d2**1.5", biot_savart, (*bodies, drawn(2, 4000, 3)), pairs=True)


FUNCTIONS = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "atan2": lambda x: jnp.arctan2(x, 0.3 - x),
    "x**1.5": lambda x: jnp.abs(x) ** 1.5,
    "x**-2.5": lambda x: jnp.abs(x) ** -2.5,
}
WAYS = ("jax.vmap", "cpu_math", "chunks", "chunks, cpu_math")


def timed(case: Case, mode: str, seconds: float) -> dict[str, float]:
    runs = {way: compiled(fun, case.inputs, mode == "gradient") for way, fun in case.ways().items()}
    return medians(runs, case.inputs, seconds)


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=2, help="for each row")
    parser.add_argument("--only", default="", help="rows whose name begins so")
    given = parser.parse_args()
    if given.only and given.write:
        parser.error("--write is for all rows: without --only")
    header = "| " + " | ".join(["", "", *WAYS, "jax.vmap / last", "chunks / last"]) + " |"
    lines = [
        "# Sines, angles and powers",
        "",
        f"Written by `python benchmarks/cpu_math.py --seconds {given.seconds:g} --write`. jax "
        f"{jax.__version__}, one core, float32. *cpu_math*: with `cpu_math=True`; *chunks*: "
        "`chunk_size=4096`, or 2**16 for sums over all pairs of 4000 points. Medians of turns.",
        "",
        "Milliseconds of kernels:",
        "",
        header,
        "|" + " --- |" * 2 + " ---: |" * 6,
    ]
    numbers = jnp.tanh(drawn(0, 1_000_000))
    functions = [Case(name, fun, (numbers,)) for name, fun in FUNCTIONS.items()]
    parts = [(list(cases()), 1e3, ("forward", "gradient")), (functions, 1e3, ("forward",))]
    for number, (rows, unit, modes) in enumerate(parts):
        if number:
            lines += ["", "Nanoseconds of each function, in an array of a million numbers:", ""]
            lines += [header, "|" + " --- |" * 2 + " ---: |" * 6]
        for case in rows:
            if not case.name.startswith(given.only):
                continue
            for mode in modes:
                times = timed(case, mode, given.seconds)
                last = times["chunks, cpu_math"]
                cells = [f"{times[way] * unit:.2f}" if way in times else "-" for way in WAYS]
                ratios = [f"{times[way] / last:.2f}" for way in ("jax.vmap", "chunks")]
                lines.append("| " + " | ".join([case.name, mode, *cells, *ratios]) + " |")
                page.progress(lines[-1])
    page.finish(RESULTS, "\n".join(lines), write=given.write)


if __name__ == "__main__":
    main()
