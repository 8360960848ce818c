# SPDX-License-Identifier: MIT
"""What decorating and calling cost besides the work itself.

    python benchmarks/overhead.py

Each comparison alternates the two sides in one process and takes medians, so that a machine that is
busy for a while slows down both. The sides do the same: two nested maps around four operations.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rankax import auto_vmap


def kernel(s, v, m):
    return v @ m @ v + s * v.size


def annotated(
    x: Float[Array, "n 3"], v: Float[Array, "n 3"], m: Float[Array, "n"], g: Float[Array, ""]
) -> Float[Array, ""]:
    return g * jnp.sum(m @ (x * v))


by_hand = jax.vmap(jax.vmap(kernel, in_axes=(None, 0, None)), in_axes=(None, None, 0))
decorated = auto_vmap(0, 1, 2)(kernel)
ARGS = (jnp.float32(2.0), jnp.ones((5, 3)), jnp.ones((4, 1, 3, 3)))


def by_hand_with_reshape(s, v, m):
    """The same, from the same arguments: the length-1 axis of ``m`` has to go somewhere."""
    return by_hand(s, v, jnp.reshape(m, (4, 3, 3)))


def fresh() -> Callable[..., Any]:
    """A kernel that no cache of JAX knows."""

    def traced(s, v, m):
        return kernel(s, v, m)

    return traced


def seconds(action: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


def medians(*actions: Callable[[], Any], rounds: int = 31, repeats: int = 20) -> list[float]:
    """Return the median time of each action in microseconds, measured in turns."""
    for action in actions:
        action()
    turns = [[seconds(action, repeats) for action in actions] for _ in range(rounds)]
    return [1e6 * statistics.median(times) for times in zip(*turns, strict=True)]


def new_shapes() -> Iterator[list[jax.ShapeDtypeStruct]]:
    """Arguments for one call after another, of shapes that none had before."""
    for n in itertools.count(2):
        shapes = [(n, 5, 3), (n, 5, 3), (5,), (7, 1)]
        yield [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


FOUR = auto_vmap(annotated)
FOUR_ARGS = (jnp.ones((7, 5, 3)), jnp.ones((7, 5, 3)), jnp.ones(5), jnp.ones((2, 1)))


def report(what: str, value: str, limit: str) -> None:
    print(f"{what:<58}{value:>10}   (at most {limit})")


def main() -> None:
    print(f"jax {jax.__version__} on {jax.default_backend()}, medians")
    (decoration,) = medians(lambda: auto_vmap(annotated))
    report("decoration, 4 annotated arguments", f"{decoration:.0f} us", "200 us")
    calls = iter(list(itertools.islice(new_shapes(), 31 * 20 + 1)))
    new, again = medians(lambda: FOUR.plan(*next(calls)), lambda: FOUR.plan(*FOUR_ARGS))
    report("plan, 4 leaves, new shapes", f"{new:.0f} us", "60 us")
    report("plan, 4 leaves, known shapes", f"{again:.0f} us", "60 us")

    def hand() -> Any:
        return by_hand_with_reshape(*ARGS).block_until_ready()

    def ours() -> Any:
        return decorated(*ARGS).block_until_ready()

    want, got = medians(hand, ours)
    report(f"eager call / hand-nested ({want:.0f} us)", f"{got / want:.3f}", "1.1")

    def trace_by_hand() -> Any:
        inner = jax.vmap(fresh(), in_axes=(None, 0, None))
        mapped = jax.vmap(inner, in_axes=(None, None, 0))
        return jax.make_jaxpr(lambda s, v, m: mapped(s, v, jnp.reshape(m, (4, 3, 3))))(*ARGS)

    mapped = auto_vmap(0, 1, 2)(fresh())

    def trace() -> Any:
        return jax.make_jaxpr(lambda *args: mapped(*args))(*ARGS)

    want, got = medians(trace_by_hand, trace, repeats=5)
    report(f"tracing / hand-nested ({want:.0f} us)", f"{got / want:.3f}", "1.15")

    jitted, hand_jitted = auto_vmap(0, 1, 2, jit=True)(kernel), jax.jit(by_hand_with_reshape)
    want, got = medians(
        lambda: hand_jitted(*ARGS).block_until_ready(),
        lambda: jitted(*ARGS).block_until_ready(),
        repeats=200,
    )
    report(f"jit=True - hand-nested, jitted ({want:.1f} us)", f"{got - want:.1f} us", "25 us")


if __name__ == "__main__":
    main()
