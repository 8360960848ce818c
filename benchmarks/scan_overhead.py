# SPDX-License-Identifier: MIT
"""Time per step of `sliced_scan` against a plain `jax.lax.scan` of the same body without ``ys``.

Run with ``python benchmarks/scan_overhead.py``. Every case is compiled first; then all take turns,
so that a slow moment of the machine falls on each of them. It prints medians and ratios.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from rankax import sliced_scan

STEPS, WIDTH, ROUNDS = 20_000, 512, 21


def body(state, force):
    state = state + 0.01 * (force - jnp.sin(state))
    return state, state


def without_ys(state, force):
    return body(state, force)[0], None


def seconds(fun, *args):
    begin = time.perf_counter()
    jax.block_until_ready(fun(*args))
    return time.perf_counter() - begin


def main():
    init, forces = jnp.ones(WIDTH), jnp.ones((STEPS, WIDTH))
    constant = jnp.full(WIDTH, 0.5)

    def autonomous(state, _):
        return body(state, constant)

    def autonomous_without_ys(state, _):
        return without_ys(state, constant)

    def every(step, **options):
        return lambda s, f: sliced_scan(body, s, f, step=step, **options)

    def every_without_xs(step):
        return lambda s, _: sliced_scan(autonomous, s, length=STEPS, step=step)

    cases = {
        "xs, no ys: lax.scan": lambda s, f: lax.scan(without_ys, s, f),
        "xs, every 100th": every(100),
        "xs, every 100th, checkpoint": every(100, checkpoint=True),
        "xs, every 7th": every(7),
        "no xs, no ys: lax.scan": lambda s, _: lax.scan(autonomous_without_ys, s, None, STEPS),
        "no xs, every 100th": every_without_xs(100),
        "no xs, every 7th": every_without_xs(7),
    }
    compiled = {name: jax.jit(fun) for name, fun in cases.items()}
    for fun in compiled.values():
        seconds(fun, init, forces)
    times = {name: [] for name in compiled}
    for _ in range(ROUNDS):
        for name, fun in compiled.items():
            times[name].append(seconds(fun, init, forces))
    plain = 0.0
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {STEPS} steps of {WIDTH} floats")
    for name, taken in times.items():
        median = statistics.median(taken)
        plain = median if "lax.scan" in name else plain
        print(f"{name:30} {1e6 * median / STEPS:7.3f} us/step   {median / plain:5.2f}")


if __name__ == "__main__":
    main()
