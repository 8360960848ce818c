# SPDX-License-Identifier: MIT
"""Time the tiles that rankax chooses and tunes, beside `jax.vmap`, `lax.map` and powerpax.

    python benchmarks/tiles.py

writes ``benchmarks/results/tiles.md``. Eleven kernels, forward and gradient. The contestants of a
row take turns, and medians are compared, so that a machine that is busy for a while slows all.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shown
from rankax import auto_vmap

RESULTS = Path(__file__).parent / "results" / "tiles.md"
CHUNK = 4096
MAP_SIZES = (4, 16, 64, 256, 1024, 4096)


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# The kernels. All but the last three are those of the table by which tiles were designed.


def distances(points):
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


def ray_triangle(origin, direction, a, b, c):
    """Moeller and Trumbore: the distance to the triangle along the ray."""
    first, second = b - a, c - a
    h = jnp.cross(direction, second)
    det = first @ h
    s = origin - a
    u = (s @ h) / det
    q = jnp.cross(s, first)
    v = (direction @ q) / det
    hit = (u >= 0) & (v >= 0) & (u + v <= 1)
    return jnp.where(hit, (second @ q) / det, 1e3)


def matmul(a, b):
    return a @ b


def runge_kutta(state):
    def slope(state):
        return jnp.stack([state[1], -jnp.sin(state[0])])

    def step(state, _):
        a = slope(state)
        b = slope(state + 0.005 * a)
        c = slope(state + 0.005 * b)
        d = slope(state + 0.01 * c)
        return state + 0.01 / 6 * (a + 2 * b + 2 * c + d), None

    return lax.scan(step, state, None, length=64)[0]


def rotate(quaternion, vector):
    real, imaginary = quaternion[0], quaternion[1:]
    turned = 2 * jnp.cross(imaginary, vector)
    return vector + real * turned + jnp.cross(imaginary, turned)


def lennard_jones(points):
    separation = points[:, None] - points[None]
    own = jnp.eye(len(points))
    sixth = 1 / (jnp.sum(separation**2, axis=-1) + own) ** 3
    return jnp.sum(jnp.where(own > 0, 0.0, sixth**2 - sixth))


def kepler(anomaly, eccentricity):
    eccentricity = 0.5 * jnp.abs(jnp.tanh(eccentricity))
    e = anomaly
    for _ in range(10):
        e = e - (e - eccentricity * jnp.sin(e) - anomaly) / (1 - eccentricity * jnp.cos(e))
    return e


HIDDEN, OUT = drawn(1, 64, 16) / 4, drawn(2, 1, 64) / 8


def network(x):
    return OUT @ jnp.tanh(HIDDEN @ x)


def kalman(state, covariance, seen):
    """One step of a filter: four states, two of which are seen."""
    move, look = jnp.eye(4) + 0.1 * jnp.eye(4, k=2), jnp.eye(2, 4)
    state, covariance = move @ state, move @ covariance @ move.T + 0.01 * jnp.eye(4)
    s = look @ covariance @ look.T + 0.1 * jnp.eye(2)
    inverse = jnp.array([[s[1, 1], -s[0, 1]], [-s[1, 0], s[0, 0]]])
    gain = covariance @ look.T @ inverse / (s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0])
    return state + gain @ (seen - look @ state), covariance - gain @ look @ covariance


MEANS = drawn(3, 8, 3)


def mixture(x):
    """The log-likelihood of eight Gaussians."""
    return jax.nn.logsumexp(-0.5 * jnp.sum((x - MEANS) ** 2, axis=-1))


GRID = drawn(4, 32, 32, 32)
CORNERS = jnp.array([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)])


def trilinear(point):
    """A value between the points of a grid."""
    at = jnp.clip(8 * point + 16, 0, 30.99)
    low = jnp.floor(at).astype(jnp.int32)
    part = at - low
    weights = jnp.prod(jnp.where(CORNERS == 1, part, 1 - part), axis=-1)
    return jnp.sum(weights * GRID[tuple((low + CORNERS).T)])


class Case(NamedTuple):
    name: str
    fun: Callable[..., Any]
    items: int
    cores: tuple[tuple[int, ...], ...]

    def inputs(self) -> list[jax.Array]:
        return [drawn(i, self.items, *core) for i, core in enumerate(self.cores)]


CASES = [
    Case("distances 8x3", distances, 100_000, ((8, 3),)),
    Case("ray-triangle", ray_triangle, 200_000, ((3,),) * 5),
    Case("matmul 16x16", matmul, 20_000, ((16, 16),) * 2),
    Case("RK4, 64 steps", runge_kutta, 20_000, ((2,),)),
    Case("rotation", rotate, 400_000, ((4,), (3,))),
    Case("Lennard-Jones 32x3", lennard_jones, 5_000, ((32, 3),)),
    Case("Kepler", kepler, 200_000, ((), ())),
    Case("MLP 16-64-1", network, 100_000, ((16,),)),
    Case("Kalman 4, 2", kalman, 50_000, ((4,), (4, 4), (2,))),
    Case("mixture of 8", mixture, 200_000, ((3,),)),
    Case("trilinear", trilinear, 200_000, ((3,),)),
]


# The contestants: each a compiled function of the inputs.


def compiled(fun: Callable[..., Any], inputs: Any, gradient: bool, options: Any = None) -> Any:
    """Compile; the cotangents are made of an input, lest they are constants."""

    def value_and_gradient(scale: Any, *arrays: Any) -> Any:
        def value(arrays: Any) -> Any:
            return sum(scale * jnp.sum(out) for out in jax.tree.leaves(fun(*arrays)))

        return jax.value_and_grad(value)(arrays)

    program = value_and_gradient if gradient else lambda scale, *arrays: fun(*arrays)
    return jax.jit(program, compiler_options=options).lower(jnp.float32(1), *inputs).compile()


def contestants(case: Case, inputs: Any, gradient: bool, seconds: float) -> dict[str, Any]:
    kernel = auto_vmap(*map(len, case.cores), jit=True, chunk_size=CHUNK)(case.fun)
    tuned = kernel.with_options(chunk_size=None).tune(*inputs, gradient=gradient, seconds=seconds)
    print(tuned.tuning, flush=True)
    options = tuned.tuning.options
    found = {
        "jax.vmap": compiled(jax.vmap(case.fun), inputs, gradient),
        "default": compiled(kernel, inputs, gradient),
        "tuned": compiled(tuned, inputs, gradient, options.get("compiler_options")),
    }
    with mock.patch("rankax._fit.cpu.tiles_matter", return_value=False):
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


def medians(runs: dict[str, Any], inputs: Any, seconds: float) -> dict[str, float]:
    arguments = [jnp.float32(1), *inputs]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run(*arguments))
    deadline = time.perf_counter() + seconds
    while len(times["tuned"]) < 5 or time.perf_counter() < deadline:
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


COLUMNS = ("jax.vmap", "no tiles", "default", "tuned", "lax.map, best", "powerpax")


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
        "same in the tiles that rankax chooses; *tuned*: the options of `kernel.tune`, without a "
        "bound; *lax.map, best*: the best of its chunks of 4 to 4096; powerpax: chunks of 4096. "
        "Then ratios of times; above 1, rankax is faster. The fastest of a row is bold. matmul, "
        "RK4, rotation, Kepler, MLP and Kalman have no short sums: there *no tiles* and *default* "
        "are one program, and what they differ by is the machine.",
        "",
    ]
    ratios = ("no tiles / default", "vmap / tuned", "best other / tuned")
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
        others = min(t for c, t in row.items() if c not in ("tuned", "default"))
        values = (
            row["no tiles"] / row["default"],
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="kernels whose name begins so; write nothing")
    parser.add_argument("--seconds", type=float, default=3, help="for each row, and for tuning it")
    parser.add_argument("--results", default=RESULTS.stem, help="the name of the file to write")
    given = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for case in CASES:
        if given.only and not case.name.startswith(given.only):
            continue
        inputs = case.inputs()
        for mode in ("forward", "gradient"):
            runs = contestants(case, inputs, mode == "gradient", given.seconds)
            rows[case.name, mode] = row = row_of(medians(runs, inputs, given.seconds))
            times = ", ".join(f"{name} {t * 1e3:.1f}" for name, t in row.items())
            print(f"{case.name}, {mode}: {times}", flush=True)
    command = f"python benchmarks/tiles.py --seconds {given.seconds:g} --results {given.results}"
    text = report(rows, command)
    print(text)
    if given.only:
        return
    RESULTS.with_stem(given.results).write_text(text, encoding="utf-8")
    if given.results == RESULTS.stem:
        shown.main()


if __name__ == "__main__":
    main()
