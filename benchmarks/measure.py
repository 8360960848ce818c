# SPDX-License-Identifier: MIT
"""Compile every contestant of one case, check that they agree, then time them in turns."""

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import Kernel
from peers import PEERS

MODES = ("forward", "gradient", "jvp")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: what is mapped, over how many items, in chunks of how many."""

    kernel: Kernel
    length: int
    chunk_size: int
    mode: str


@dataclasses.dataclass
class Measured:
    """What one contestant took; ``note`` instead where it could not take part."""

    peer: str
    note: str = ""
    traces: int = 0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    temporary_bytes: int = 0
    rounds: int = 0
    fastest_seconds: float = 0.0
    median_seconds: float = 0.0
    quartiles: tuple[float, float] = (0.0, 0.0)


def program(mapped: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return what is compiled, as a function of the items and a direction."""
    if mode == "gradient":
        return lambda x, _: jax.grad(lambda x: jnp.sum(mapped(x)))(x)
    if mode == "jvp":
        return lambda x, direction: jax.jvp(mapped, (x,), (direction,))
    return lambda x, _: mapped(x)


def prepare(case: Case, peer: str, x: Any) -> tuple[Measured, Callable[..., Any] | None]:
    """Compile one contestant for ``x``, which may be a shape."""
    result = Measured(peer)

    @functools.wraps(case.kernel.fun)
    def counted(item: jax.Array) -> jax.Array:
        result.traces += 1
        return case.kernel.fun(item)

    begin = time.perf_counter()
    try:
        mapped = PEERS[peer](case.kernel, counted, case.chunk_size)
        lowered = jax.jit(program(mapped, case.mode)).lower(x, x)
    except ImportError as error:
        result.note = f"not installed: {error.name}"
        return result, None
    result.trace_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    compiled = lowered.compile()
    result.compile_seconds = time.perf_counter() - begin
    result.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
    return result, compiled


def run_case(case: Case, rounds: int, seconds: float) -> list[Measured]:
    """Measure all contestants of one case in turns, for ``rounds`` rounds or ``seconds``.

    They take turns so that a slow moment of the machine falls on each of them, in another order in
    each round: one that always followed a neighbour with much memory to free would look slow.
    """
    x = jax.block_until_ready(case.kernel.inputs(case.length))
    contestants = [prepare(case, peer, x) for peer in PEERS]
    runners = [(result, run) for result, run in contestants if run is not None]
    _check_agreement(case, [(result.peer, run(x, x)) for result, run in runners])
    times: dict[str, list[float]] = {result.peer: [] for result, _ in runners}
    deadline = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > deadline:
            break
        for result, run in random.Random(turn).sample(runners, len(runners)):
            begin = time.perf_counter()
            jax.block_until_ready(run(x, x))
            times[result.peer].append(time.perf_counter() - begin)
    for result, _ in runners:
        result.rounds, result.fastest_seconds = len(times[result.peer]), min(times[result.peer])
        low, median, high = statistics.quantiles(times[result.peer], n=4)
        result.median_seconds, result.quartiles = median, (low, high)
    return [result for result, _ in contestants]


def _check_agreement(case: Case, outputs: list[tuple[str, Any]]) -> None:
    """Stop where a contestant computes something else: its time would mean nothing."""
    expected = jax.tree.leaves(outputs[-1][1])
    for peer, output in outputs:
        for got, want in zip(jax.tree.leaves(output), expected, strict=True):
            np.testing.assert_allclose(
                got,
                want,
                rtol=2e-3,
                atol=2e-3,
                equal_nan=False,
                err_msg=f"{peer} differs from the others: {case}",
            )


def temporaries(kernel: Kernel, peer: str, length: int, chunk_size: int, mode: str) -> int | None:
    """Bytes of temporaries of a program that is compiled but never run."""
    result, compiled = prepare(Case(kernel, length, chunk_size, mode), peer, kernel.shape(length))
    return None if compiled is None else result.temporary_bytes
