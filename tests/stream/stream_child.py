# SPDX-License-Identifier: MIT
"""A run of `rankax.stream` in a process of its own, which a test kills or measures."""

import contextlib
import os
import pkgutil
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import rankax.stream
from rankax import auto_vmap

ITEMS = 1000


class Recorded:
    """An array that counts its reads, and may fail."""

    def __init__(self, array, error=None, after=0):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.error, self.after, self.reads = error, after, []

    def __getitem__(self, region):
        self.reads.append(region)
        if self.error is not None and len(self.reads) > self.after:
            raise self.error
        return self.array[region]


def values(tree):
    """What a run has stored, in memory."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[...]), tree)


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


def run(kind, out):
    x, y = points()
    kernel = KERNELS[kind]
    return rankax.stream.run(kernel, x[:, None], y, out=out, memory_limit="20 MB", progress=False)


# What a run does, one after the other.
STEPS = {
    "folder": "pathlib.Path.mkdir",
    "lock": "filelock.FileLock.acquire",
    "create": "rankax.stream._store._create",
    "array": "zarr.Group.create_array",
    "metadata": "rankax.stream._store.flush",
    "write": "rankax.stream._run.write",
    "flush": "rankax.stream._run.flush",
    "finish": "zarr.open_array",
}


@contextlib.contextmanager
def stopped(step, number, stop, *, after):
    """Call ``stop`` at one call of a step, before or after what it does; yield all its calls."""
    fun, calls = pkgutil.resolve_name(STEPS[step]), []

    def counted(*args, **kwargs):
        calls.append(args)
        is_now = len(calls) == number
        if is_now and not after:
            stop()
        result = fun(*args, **kwargs)
        if is_now and after:
            stop()
        return result

    with mock.patch(STEPS[step], counted):
        yield calls


def run_killed(kind, out, least, step, number, after):
    rankax.stream._job._LEAST = least
    with stopped(step, number, lambda: os.kill(os.getpid(), signal.SIGKILL), after=after):
        run(kind, out)


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
