# SPDX-License-Identifier: MIT
"""What a kernel costs in blocks: the wrapper for each block, and the memory of a worker.

    python benchmarks/blocks.py

* the time of one block in the wrapper, beside the compiled kernel with the same array and back to
  NumPy, and beside a whole task of dask;
* the peak of memory of a worker of a `dask.distributed.LocalCluster`, above what it had before the
  run, in one block and in several, with and without a bound inside the blocks. Linux only.
"""

import re
import time
from pathlib import Path

import page

if __name__ == "__main__":
    page.needs("dask", "distributed")
import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
from distributed import Client, LocalCluster

from rankax import auto_vmap
from rankax.ext.blocks import programs

POINTS = 1024
ITEMS = 8192
CASES = (
    ("one block, all at once", ITEMS, {}),
    ("8 blocks, all of a block at once", ITEMS // 8, {}),
    ("one block, `chunk_size=64`", ITEMS, {"chunk_size": 64}),
    ("8 blocks, `chunk_size=64`", ITEMS // 8, {"chunk_size": 64}),
    ('8 blocks, `memory_limit="32 MB"`', ITEMS // 8, {"memory_limit": "32 MB"}),
)


@auto_vmap(t="level")
def column(t):
    """Products of waves, of which each item needs a table."""
    waves = jnp.sin(jnp.arange(POINTS, dtype=t.dtype)[:, None] * t)
    return jnp.trace(waves.T @ waves)


@auto_vmap(t="level")
def light(t):
    """Do next to nothing, so that the wrapper shows."""
    return t @ t


def main():
    given = page.arguments(__doc__).parse_args()
    page.progress("a minute")
    lines = [
        "# Blocks",
        "",
        "Written by `python benchmarks/blocks.py --write`. "
        f"jax {jax.__version__}, {jax.default_backend()}, float32, one block at a time.",
        "",
        *overhead(),
        "",
        *memory(),
    ]
    text = "\n".join(lines) + "\n"
    page.finish(page.RESULTS / "blocks.md", text, write=given.write)


def median(fun, *args, repeats=300):
    """The median time of a call, in microseconds."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        fun(*args)
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:])) * 1e6


def overhead():
    """A table of what the wrapper adds to a block."""
    yield "Microseconds for a block, medians."
    yield ""
    yield "| numbers in a block | `jax.jit`, back to NumPy | the wrapper | a task of dask |"
    yield "| --- | ---: | ---: | ---: |"
    for items in (16, 1024, 65536):
        block = np.ones((items, 16), "float32")
        compiled = jax.jit(light)
        many = light(da.ones((64 * items, 16), chunks=(items, 16), dtype="float32"))
        bare = median(lambda block, fun: np.array(fun(block)), block, compiled)
        wrapped = median(lambda block, fun: fun(block), block, on_block(light))
        task = median(lambda x: x.compute(scheduler="synchronous"), many, repeats=5) / 64
        yield f"| {items * 16} | {bare:.0f} | {wrapped:.0f} | {task:.0f} |"


def on_block(kernel):
    """What dask calls for a block of the kernel that was called last."""
    program = list(programs._programs._values.values())[-1]
    assert program.setup.mapped is kernel
    return program


def memory():
    """A table of the peak of a worker's memory."""
    work = POINTS * 16 * 4 // 1024
    yield f"MiB of a worker above rest: {ITEMS} columns of 16 levels, {work} KiB of work each."
    yield ""
    yield "| | peak |"
    yield "| --- | ---: |"
    for name, chunks, options in CASES:
        with (
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            x = da.random.default_rng(0).random((ITEMS, 16), chunks=(chunks, 16), dtype="float32")
            x = client.persist(x)
            light(x).compute()  # so that JAX is there
            (rest,) = client.run(begin).values()
            column.with_options(**options)(x).compute()
            (peak,) = client.run(status, "VmHWM").values()
            yield f"| {name} | {(peak - rest) / 1024:.0f} |"


def begin():
    """Forget the peak of this process so far, and return what it has now, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    main()
