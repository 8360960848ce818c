# SPDX-License-Identifier: MIT
"""A run of `rankax.stream` in a process of its own, which `test_stream.py` kills or measures."""

import re
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import rankax.stream
from rankax import auto_vmap

ITEMS = 1000


class Slow:
    """An array that takes its time."""

    def __init__(self, array, seconds):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.seconds = seconds

    def __getitem__(self, region):
        time.sleep(self.seconds)
        return self.array[region]


class Begin:
    """Sets an event once blocks are written, which is after all that is compiled."""

    def __init__(self, event):
        self.event, self.before = event, []

    def __call__(self, done, total):
        if self.before[1:] and done > self.before[1] and self.before[-1] == self.before[1]:
            self.event.set()
        self.before.append(done)


@auto_vmap(x=1, y=1)
def both(x, y):
    return {"distance": jnp.sqrt(jnp.sum((x - y) ** 2)), "sum": x + y}


KERNELS = {
    "map": both,
    "reduce": both.with_options(reduce={"distance": "mean", "sum": "max"}, reduce_axis=0),
}


def points():
    rng = np.random.default_rng(0)
    return (rng.normal(size=(n, 3)).astype("float32") for n in (ITEMS, 5))


def run(kind, out, seconds=0.0, progress=False):
    x, y = points()
    x = Slow(x[:, None], seconds)
    return rankax.stream.run(KERNELS[kind], x, y, out=out, memory_limit="20 MB", progress=progress)


def run_slowly(kind, out, begun):
    run(kind, out, seconds=0.08, progress=Begin(begun))


def status(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def measured(path, out, limit):
    """Print the peak of memory of a run, above what this process had before it, in bytes."""
    kernel = auto_vmap(x=1)(lambda x: jnp.tanh(x) * 2)
    small = np.ones((300, 1000), "float32")
    rankax.stream.run(kernel, small, out=out + ".small", progress=False)
    x = np.load(path, mmap_mode="r")
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    rankax.stream.run(kernel, x, out=out, memory_limit=limit, progress=False)
    sys.stdout.write(str(status("VmHWM") - before))


if __name__ == "__main__":
    measured(sys.argv[1], sys.argv[2], int(sys.argv[3]))
