# SPDX-License-Identifier: MIT
"""Evaluations, memory and time of the gradient of a long scan, by the levels of its checkpoints.

    python benchmarks/scan_levels.py

Evaluations are counted by a callback, in a shorter scan; memory is what the compiler reports; the
times are medians, taken in turns.
"""

import os
import platform
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

import page
from rankax import checkpoint_chunked_scan

RESULTS = page.RESULTS / "scan_levels.md"
HEAD = """# Levels of checkpoints

Written by `python benchmarks/scan_levels.py --write`. {machine}, {cores} cores, JAX {jax}, float32.

The gradient of {steps:,} steps of a state of {width} numbers, each of which stores 15 such states.
Evaluations of each step, temporaries, and medians of {rounds} turns in one process.

| levels | `chunk_size` | evaluations of a step | temporaries, MB | ms |
|---|---|---:|---:|---:|
"""
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


def chunk_sizes(length):
    """Return None, for `jax.lax.scan`, and the ``chunk_size`` of one to three levels."""
    return [
        None,
        "sqrt",
        # A level divides its steps by q; 15 carries are what a step stores.
        *(
            tuple(round(length / q**level) for level in range(1, count + 1))
            for count in (1, 2, 3)
            for q in [(length * 15) ** (1 / (count + 1))]
        ),
    ]


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
    given = page.arguments(__doc__).parse_args()
    page.progress("compiling, then timing: half a minute")
    state = jnp.full(WIDTH, 0.3)
    compiled = [gradient(body, STEPS, sizes).lower(state).compile() for sizes in chunk_sizes(STEPS)]
    times = [[] for _ in compiled]
    for _ in page.turns(ROUNDS):
        for program, own in zip(compiled, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(program(state))
            own.append(time.perf_counter() - begin)
    text = HEAD.format(
        machine=platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        jax=jax.__version__,
        steps=STEPS,
        width=WIDTH,
        rounds=ROUNDS,
    )
    for sizes, few, program, own in zip(
        chunk_sizes(STEPS), chunk_sizes(FEW), compiled, times, strict=True
    ):
        levels = len(sizes) if isinstance(sizes, tuple) else int(sizes is not None)
        shown = "`jax.lax.scan`" if sizes is None else f"`{sizes!r}`".replace("'", '"')
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        milliseconds = statistics.median(own) * 1e3
        text += (
            f"| {levels} | {shown} | {evaluations(few):.1f} | {memory:.2f} | {milliseconds:.0f} |\n"
        )
    page.finish(RESULTS, text, write=given.write)


if __name__ == "__main__":
    main()
