# SPDX-License-Identifier: MIT
"""What a kernel costs from disk to disk: beside memory, beside a bare loop, and in memory.

    python benchmarks/stream.py

* a kernel that computes much, streamed, beside the same kernel on arrays in memory;
* a kernel that computes little, beside a loop that reads, copies and writes the same blocks, and
  beside that loop with waiting for the disk at its end, as the stream does;
* the peak of memory of a run, above what the process had before it. Linux only.

The contestants take turns, and the first turn, which compiles, does not count.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page

if __name__ == "__main__":
    page.needs("zarr")
import jax
import jax.numpy as jnp
import numpy as np
import zarr

import rankax.stream
from rankax import auto_vmap
from rankax.stream._job import prepared

TURNS = 9
LIMIT = 200_000_000
MEGABYTES = 1000


@auto_vmap(x=1, chunk_size=4096, jit=True)
def heavy(x):
    """Much work on few numbers."""
    return jax.lax.fori_loop(0, 500, lambda _, x: jnp.sin(x) + 0.1 * x, x)


@auto_vmap(x=1)
def light(x):
    """Next to no work."""
    return x + 1


def main():
    given = page.arguments(__doc__).parse_args()
    page.progress("two minutes, and 3 GB of disk for a while")
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            "# Streams",
            "",
            "Written by `python benchmarks/stream.py --write`. "
            f"jax {jax.__version__}, zarr {zarr.__version__}, {jax.default_backend()}, float32, "
            f"`memory_limit` {LIMIT // 10**6} MB. Medians of {TURNS} turns in one process.",
            "",
            *compute_bound(Path(folder)),
            "",
            *io_bound(Path(folder)),
            "",
            *memory(Path(folder)),
        ]
    text = "\n".join(lines) + "\n"
    page.finish(page.RESULTS / "stream.md", text, write=given.write)


def in_turns(contestants, out):
    """The seconds of each contestant, which are called in turns."""
    seconds = {name: [] for name in contestants}
    for _ in range(TURNS + 1):
        for name, call in contestants.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # so that nobody waits for what the one before wrote
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in seconds.items()}


def streamed(kernel, x, out):
    return lambda: rankax.stream.run(kernel, x, out=out, memory_limit=LIMIT, progress=False)


def compute_bound(folder):
    """A table of a kernel that computes much."""
    x, out = np.random.default_rng(0).random((200_000, 16), "float32"), folder / "heavy.zarr"
    times = in_turns(
        {
            "arrays in memory": lambda: heavy(x).block_until_ready(),
            "`rankax.stream`": streamed(heavy, save(folder, x), out),
        },
        out,
    )
    yield f"Compute-bound: {x.size} numbers, 500 sines for each."
    yield ""
    yield from table(times, x.nbytes)


def io_bound(folder):
    """A table of a kernel that computes next to nothing."""
    out = folder / "light.zarr"
    path = write_large(folder)
    x = np.load(path, mmap_mode="r")
    (stage,) = prepared(light, (x,), {}, LIMIT, "stream", {}).stages
    times = in_turns(
        {
            "a bare loop": lambda: bare(x, stage, out),
            "a bare loop that waits for the disk": lambda: bare(x, stage, out, flush=True),
            "`rankax.stream`": streamed(light, x, out),
        },
        out,
    )
    yield f"I/O-bound: {MEGABYTES} MB are read and written, {stage.grid[0]} blocks."
    yield ""
    yield from table(times, x.nbytes)


def bare(x, stage, out, *, flush=False):
    """Read, copy and write the same blocks to a store of the same chunks."""
    chunks = stage.block + x.shape[1:]
    array = zarr.create_array(out, shape=x.shape, chunks=chunks, dtype=x.dtype)
    for block in stage.blocks():
        array[block.region] = np.array(x[block.region])
    for path in out.glob("c/*/*") if flush else ():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def memory(folder):
    """The peak of memory of a run in a process of its own."""
    command = [sys.executable, __file__, "peak", str(folder)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    yield f"Peak memory of that run: {peak / 1e6:.0f} MB more than after a small one."


def peak(folder):
    """Print the peak of memory of a run, above what the process has after a small one, in bytes."""
    streamed(light, np.ones((300, 1000), "float32"), folder / "small.zarr")()
    run = streamed(light, np.load(folder / "x.npy", mmap_mode="r"), folder / "peak.zarr")
    Path("/proc/self/clear_refs").write_text("5")
    rest = status("VmRSS")
    run()
    print(status("VmHWM") - rest)


def status(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def save(folder, x):
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


def write_large(folder):
    """Write random numbers, of which zarr can compress little."""
    path, rng = folder / "x.npy", np.random.default_rng(0)
    shape = (MEGABYTES * 250, 1000)  # of four bytes each
    x = np.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=shape)
    for begin in range(0, len(x), 5000):
        x[begin : begin + 5000] = rng.random((5000, 1000), "float32")
    x.flush()
    return path


def table(times, size):
    """Medians, and the median over the turns of what the stream does in the time of the other."""
    own = times["`rankax.stream`"]
    yield "| | seconds | MB/s | throughput of the stream by this one's |"
    yield "| --- | ---: | ---: | ---: |"
    for name, turns in times.items():
        seconds = statistics.median(turns)
        ratio = statistics.median(other / each for other, each in zip(turns, own, strict=True))
        yield f"| {name} | {seconds:.2f} | {size / seconds / 1e6:.0f} | {ratio:.2f} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        peak(Path(sys.argv[2]))
    else:
        main()
