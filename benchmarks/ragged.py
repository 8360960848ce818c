# SPDX-License-Identifier: MIT
"""Ragged items beside padding to the longest, and beside one program for each length.

10,000 items of log-normal length, median 20 and longest over 1,000::

    python benchmarks/ragged.py [items]

For each way: the time of the first call, which compiles, and of a later one, the programs that were
compiled, and the largest temporary memory among them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax import Mask, Ragged, auto_vmap

CHUNK = 64
WEIGHTS = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
compiled: list[str] = []


def listen(event: str, _: float, **__: Any) -> None:
    """Note each program that is compiled."""
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(event)


def energy(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return a number for one item that looks at each of its rows."""
    return jnp.sum(jnp.tanh(x @ WEIGHTS).sum(-1), where=mask)


KERNEL = auto_vmap(x="n 3", mask=Mask("n"), chunk_size=CHUNK)(energy)


def by_length(x: Ragged) -> Any:
    """Evaluate the items of each length by a program of their own."""
    items, out = x.to_list(), np.zeros(len(x), np.float32)
    for length in np.unique(x.lengths):
        at = np.flatnonzero(x.lengths == length)
        out[at] = KERNEL.with_options(jit=True)(np.stack([items[i] for i in at]))
    return out


def padded(x: Ragged) -> Any:
    """Evaluate all items at the longest length."""
    longest = int(x.lengths.max())
    filled = np.zeros((len(x), longest, 3), np.float32)
    mask = np.arange(longest) < x.lengths[:, None]
    filled[mask] = x.values
    return PADDED(filled, mask)


PADDED = auto_vmap(x="n 3", mask="n", chunk_size=CHUNK, jit=True)(energy)


def timed(fun: Callable[[], Any]) -> tuple[Any, float, int]:
    """Return the result of a call, its seconds, and how many programs it compiled."""
    before, begin = len(compiled), time.perf_counter()
    out = jax.block_until_ready(fun())
    return out, time.perf_counter() - begin, len(compiled) - before


def main(items: int) -> None:
    """Print a table."""
    jax.monitoring.register_event_duration_secs_listener(listen)
    rng = np.random.default_rng(0)
    lengths = np.ceil(rng.lognormal(np.log(20), 1.2, items)).astype(int)
    x = Ragged(rng.normal(size=(lengths.sum(), 3)).astype(np.float32), lengths)
    print(KERNEL.with_options(jit=True).plan(x).ragged[0])
    ways: dict[str, Callable[[], Any]] = {
        "rankax.Ragged": lambda: KERNEL(x),
        "rankax.Ragged, jit=True": lambda: KERNEL.with_options(jit=True)(x),
        "one program per length": lambda: by_length(x),
        "padded to the longest": lambda: padded(x),
    }
    want = None
    for name, way in ways.items():
        out, first, programs = timed(way)
        _, later, _ = timed(way)
        want = np.asarray(out) if want is None else want
        np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-2)
        print(f"{name:26} first {first:7.2f} s, later {later:7.3f} s, {programs} programs")
    shape = jax.ShapeDtypeStruct(x.values.shape, x.values.dtype)
    whole = jax.jit(lambda values: KERNEL(Ragged(values, lengths))).lower(shape).compile()
    print(f"temporary memory: ragged {whole.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB")
    gradient = jax.jit(jax.grad(lambda values: KERNEL(Ragged(values, lengths)).sum()))
    needs = gradient.lower(shape).compile().memory_analysis().temp_size_in_bytes
    print(f"its gradient {needs / 1e6:.2f} MB, with values of {x.values.nbytes / 1e6:.2f} MB")
    longest = (jax.ShapeDtypeStruct((items, int(lengths.max()), 3), jnp.float32),)
    mask = (jax.ShapeDtypeStruct(longest[0].shape[:2], jnp.bool_),)
    dense = jax.jit(PADDED).lower(*longest, *mask).compile().memory_analysis()
    size = (dense.temp_size_in_bytes + dense.argument_size_in_bytes) / 1e6
    print(f"padded to the longest, with its arguments: {size:.2f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
