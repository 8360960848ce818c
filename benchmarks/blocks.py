# SPDX-License-Identifier: MIT
"""What a kernel costs in blocks: the wrapper for each block, and the memory of a worker.

``python benchmarks/blocks.py`` prints two tables:

* the time of one block beside the same compiled kernel called with the same array, which leaves
  what the wrapper adds, and what dask adds to it for a task;
* the peak of memory of a worker of a `dask.distributed.LocalCluster`, above what it needed before
  the run, with a chunk size inside the blocks and without, beside the whole array in one block.
"""

from __future__ import annotations

import time
from typing import Any

import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np

from rankax import auto_vmap

POINTS = 1024
ITEMS = 8192


@auto_vmap(t="level")
def column(t):
    """Products of waves, of which each item needs a table."""
    waves = jnp.sin(jnp.arange(POINTS, dtype=t.dtype)[:, None] * t)
    return jnp.trace(waves.T @ waves)


@auto_vmap(t="level")
def light(t):
    """Do next to nothing, so that the wrapper shows."""
    return t @ t


def main() -> None:
    """Measure and print."""
    print(f"JAX {jax.__version__}, {jax.default_backend()}\n")
    overhead()
    memory()


def best(fun: Any, repeats: int = 200) -> float:
    """Return the median time of a call, in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        fun()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e6


def overhead() -> None:
    """Print what the wrapper adds to a block."""
    print(
        "| numbers in a block | `jax.jit` and back to NumPy, µs | in the wrapper, µs | as a task of dask, µs |"
    )
    print("|---:|---:|---:|---:|")
    for items in (16, 1024, 65536):
        block = np.ones((items, 16), "float32")
        compiled = jax.jit(light)
        bare = best(lambda: np.array(compiled(block)))
        lazy = light(da.from_array(block, chunks=(items, 16)))
        fun = _function_of(light)
        wrapped = best(lambda: fun(block))
        many = light(da.ones((64 * items, 16), chunks=(items, 16), dtype="float32"))
        given = da.ones((64 * items, 16), chunks=(items, 16), dtype="float32").sum(-1)
        del lazy
        task = best(lambda: many.compute(scheduler="synchronous"), 5) / 64
        none = best(lambda: given.compute(scheduler="synchronous"), 5) / 64
        print(
            f"| {items * 16} | {bare:.0f} | {wrapped:.0f} | {task:.0f} (a `sum` of dask: {none:.0f}) |"
        )


def _function_of(kernel: Any) -> Any:
    """Return what dask calls for a block of the kernel that was called last."""
    from rankax._blocks import programs

    program = next(reversed(list(programs._programs._found.values())))
    assert program.setup.mapped is kernel
    return programs.OnBlocks.of(program, ())


def memory() -> None:
    """Print the peak of a worker's memory."""
    from distributed import Client, LocalCluster

    print(
        f"\n| {ITEMS} columns of 16 levels, {POINTS * 16 * 4 // 1024} KiB of work each | peak above rest, MiB |"
    )
    print("|---|---:|")
    for name, chunks, options in (
        ("one block, all at once", ITEMS, {}),
        ("8 blocks, all of a block at once", ITEMS // 8, {}),
        ("one block, `chunk_size=64`", ITEMS, {"chunk_size": 64}),
        ("8 blocks, `chunk_size=64`", ITEMS // 8, {"chunk_size": 64}),
        ('8 blocks, `memory_limit="32 MB"`', ITEMS // 8, {"memory_limit": "32 MB"}),
    ):
        with (
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            x = da.random.default_rng(0).random((ITEMS, 16), chunks=(chunks, 16), dtype="float32")
            x = client.persist(x)
            light(x).compute()  # so that JAX is there
            (before,) = client.run(_peak).values()
            column.with_options(**options)(x).compute()
            (after,) = client.run(_peak).values()
            print(f"| {name} | {(after - before) / 2**20:.0f} |", flush=True)


def _peak() -> int:
    """Return the largest memory that this process ever had, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
