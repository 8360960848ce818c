# SPDX-License-Identifier: MIT
"""What `devices=` gains on the cores of one machine, each a CPU device.

    python benchmarks/devices.py                      # 1 device, and 2
    python benchmarks/devices.py --devices 1 2 4

Each row is one kernel of rankax with its default options and a `chunk_size`, compiled over so many
devices; they take turns in one process, in another order in each round, and the table has medians.
A call copies its inputs to the devices, which is part of its time.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import page
import reductions
from kernels import EIGH, PAIRS
from rankax import auto_vmap

RESULTS = page.RESULTS / "devices.md"
CHUNK = 1000


class Row(NamedTuple):
    """A mapped function, which takes the option ``devices``, and its inputs."""

    name: str
    mapped: Callable[..., Any]
    inputs: list[np.ndarray]
    gradient: bool = False


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def over_items(name: str, fun: Any, x: np.ndarray, chunk: int, *, gradient: bool = False) -> Row:
    mapped = auto_vmap(x.ndim - 1, chunk_size=chunk)(fun)
    return Row(name, lambda devices: mapped.with_options(devices=devices), [x], gradient)


def over_pairs(name: str, count: int) -> Row:
    task = reductions.TASKS[name.removeprefix(reductions.GRADIENT)]
    inputs = [drawn(*size, seed=seed) for seed, size in enumerate(task.sizes(count))]
    mapped = functools.partial(reductions.ours, task)
    return Row(f"{name}, all pairs", mapped, inputs, name.startswith(reductions.GRADIENT))


def spectrum(x: Any) -> Any:
    return jnp.abs(jnp.fft.rfft(x)) ** 2


def log_determinant(x: Any) -> Any:
    matrix = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(x.size)
    return jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(matrix))))


def convolved(image: Any) -> Any:
    """The derivative of a convolution by its weights, in the layout of Flax."""

    def loss(weights: Any) -> Any:
        out = jax.lax.conv_general_dilated(
            image[None], weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.sin(out))

    return jax.grad(loss)(jnp.full((3, 3, image.shape[-1], 4), 0.1))


def rows(scale: float, odd: int) -> list[Row]:
    """Return the cases; ``odd`` is added to each number of items."""
    import tile_kernels  # which makes arrays, after which JAX refuses another number of devices

    def items(count: int) -> int:
        return int(count * scale) + odd

    states = drawn(items(20_000), 2)
    points = drawn(items(20_000), 8, 3)
    many = drawn(items(400_000), 8, 3)
    return [
        *(over_pairs(name, int(10_000 * scale**0.5) + odd) for name in reductions.LARGE),
        over_items("RK4", tile_kernels.runge_kutta, states, CHUNK),
        over_items("gradient of RK4", tile_kernels.runge_kutta, states, CHUNK, gradient=True),
        over_items("spectrum of 64 numbers", spectrum, drawn(items(100_000), 64), 1000),
        over_items("Cholesky 12x12", log_determinant, drawn(items(20_000), 12), 1000),
        over_items("sort of 64 numbers", jnp.sort, drawn(items(50_000), 64), 1000),
        over_items("derivative of a convolution", convolved, drawn(items(4_000), 8, 8, 2), 500),
        over_items("eigenvalues 8x8", EIGH.fun, points, 500),
        over_items("gradient of distances", PAIRS.fun, many, 1000, gradient=True),
    ]


def compiled(row: Row, devices: int) -> Callable[[], Any]:
    """Compile a row over so many devices, and return a call of it."""
    fun = row.mapped(devices=devices)
    if row.gradient:

        def loss(scale: Any, *arrays: Any) -> Any:  # a cotangent that XLA cannot fold
            return scale * jnp.sum(row.mapped(devices=devices)(*arrays))

        fun = jax.grad(loss, tuple(range(1, len(row.inputs) + 1)))
    arrays = [*([jnp.float32(1)] if row.gradient else []), *map(jnp.asarray, row.inputs)]
    program = jax.jit(fun).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays))


def measure(row: Row, counts: list[int], seconds: float) -> list[float]:
    """Return the median time over each number of devices."""
    runs = [compiled(row, count) for count in counts]
    first, *others = ([np.asarray(x) for x in jax.tree.leaves(run())] for run in runs)
    for other in others:
        for got, want in zip(other, first, strict=True):
            scale = max(1.0, float(abs(want).max()))
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4 * scale, err_msg=row.name)
    times: list[list[float]] = [[] for _ in runs]
    deadline, turn = time.perf_counter() + seconds, 0
    while turn < 5 or time.perf_counter() < deadline:
        for i in random.Random(turn).sample(range(len(runs)), len(runs)):
            begin = time.perf_counter()
            runs[i]()
            times[i].append(time.perf_counter() - begin)
        turn += 1
    return [statistics.median(found) for found in times]


def report(found: dict[str, list[float]], counts: list[int], command: str, odd: int) -> str:
    machine = platform.processor() or platform.machine()
    lines = [
        "# Devices",
        "",
        f"Written by `{command}`. {machine}, {len(os.sched_getaffinity(0))} cores, JAX "
        f"{jax.__version__}, float32.",
        "",
        "Milliseconds, medians of turns in one process, over so many CPU devices, and how many "
        "times as fast that is as over one. "
        + ("The devices do not divide the number of items." if odd else ""),
        "",
    ]
    head = ["", *(f"{count} device{'s'[: count > 1]}, ms" for count in counts)]
    head += [f"{count}: times as fast" for count in counts[1:]]
    lines += ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    gains: list[list[float]] = []
    for name, (one, *others) in found.items():
        gains.append([one / other for other in others])
        cells = [f"{t * 1e3:.1f}" for t in (one, *others)] + [f"{gain:.2f}" for gain in gains[-1]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for count, gain in zip(counts[1:], zip(*gains, strict=True), strict=True):
        mean = math.exp(statistics.fmean(map(math.log, gain)))
        least = min(gain)
        lines += ["", f"{count} devices: geometric mean {mean:.2f}, least {least:.2f}."]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="1 first")
    parser.add_argument("--seconds", type=float, default=10, help="for each row")
    parser.add_argument("--scale", type=float, default=1, help="times the work")
    parser.add_argument("--odd", type=int, default=0, help="items more, which no device divides")
    given = parser.parse_args()
    if given.scale != 1 and given.write:
        parser.error("--write is for all of the work: without --scale")
    jax.config.update("jax_num_cpu_devices", max(given.devices))
    found: dict[str, list[float]] = {}
    for row in rows(given.scale, given.odd):
        found[row.name] = measure(row, given.devices, given.seconds)
        shown = ", ".join(f"{t * 1e3:.1f}" for t in found[row.name])
        page.progress(f"{row.name}: {shown} ms")
    counts = " ".join(map(str, given.devices))
    command = f"python benchmarks/devices.py --devices {counts} --seconds {given.seconds:g} --write"
    text = report(
        found, given.devices, command + (f" --odd {given.odd}" * bool(given.odd)), given.odd
    )
    path = RESULTS.with_stem("devices-odd") if given.odd else RESULTS
    page.finish(path, text, write=given.write)


if __name__ == "__main__":
    main()
