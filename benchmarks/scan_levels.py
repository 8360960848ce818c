# SPDX-License-Identifier: MIT
"""Evaluations, memory and time of the gradient of a long scan, by the levels of its checkpoints.

Run with ``python benchmarks/scan_levels.py``; it prints the table of ``docs/howto/scans.md``.
Evaluations are counted by a callback, in a shorter scan; memory is what the compiler reports; the
times are medians, taken in turns.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from rankax import checkpoint_chunked_scan

STEPS, FEW, WIDTH, ROUNDS = 20_000, 1000, 512, 7


def body(state, _):
    for _ in range(3):
        state = state + 0.01 * jnp.tanh(state) * jnp.sin(state)
    return state, None


def gradient(step, length, sizes):
    def last(state):
        if sizes is None:
            return jnp.sum(lax.scan(step, state, length=length)[0])
        return jnp.sum(checkpoint_chunked_scan(step, state, length=length, chunk_size=sizes)[0])

    return jax.jit(jax.grad(last))


def levels(length):
    yield "`jax.lax.scan`", None
    yield '1: `"sqrt"`', "sqrt"
    for count in (1, 2, 3):
        q = (length * 15) ** (1 / (count + 1))  # 15: what a step stores, in carries
        yield f"{count}", tuple(round(length / q**level) for level in range(1, count + 1))


CALLS = []


@jax.custom_jvp
def counted(state):
    """Return the state, and count."""

    def count(state):
        CALLS.append(1)
        return state

    return jax.pure_callback(count, jax.ShapeDtypeStruct(state.shape, state.dtype), state)


@counted.defjvp
def _(primals, tangents):
    return counted(*primals), tangents[0]


def evaluations(sizes):
    """Count the evaluations of each step, forward and in the reverse pass."""
    CALLS.clear()
    step = lambda state, x: body(counted(state), x)  # noqa: E731
    jax.block_until_ready(gradient(step, FEW, sizes)(jnp.ones(8)))
    return len(CALLS) / FEW


def main():
    state = jnp.full(WIDTH, 0.3)
    few = dict(levels(FEW))
    compiled = {
        name: (sizes, gradient(body, STEPS, sizes).lower(state).compile())
        for name, sizes in levels(STEPS)
    }
    times = {name: [] for name in compiled}
    for _ in range(ROUNDS):
        for name, (_, program) in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(state))
            times[name].append(time.perf_counter() - begin)
    print(f"{STEPS} steps of a state of {WIDTH} numbers, {jax.devices()[0].device_kind}\n")
    print("| levels | `chunk_size` | evaluations | memory | time |\n|---|---|---|---|---|")
    for name, (sizes, program) in compiled.items():
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        shown = "" if sizes is None else f"`{sizes!r}`"
        milliseconds = statistics.median(times[name]) * 1e3
        count = evaluations(few[name])
        print(f"| {name} | {shown} | {count:.1f} | {memory:.2f} MB | {milliseconds:.0f} ms |")


if __name__ == "__main__":
    main()
