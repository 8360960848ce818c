# SPDX-License-Identifier: MIT
"""Run by `test_keys.py` on eight simulated devices: keys that are split over a sharded batch."""

import functools
import itertools
import math
import re
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rankax import SplitKey, auto_vmap

KEY = jax.random.key(5)


def noisy(x, key):
    return x + jax.random.normal(key), jax.random.key_data(key)


@functools.cache
def drawn(count):
    """Return what plain JAX draws on one device, for numbers in their order."""
    xs = np.arange(count, dtype="float32") / 24
    outs = jax.jit(lambda xs: jax.vmap(noisy)(xs, jax.random.split(KEY, count)))(xs)
    return xs, *map(np.asarray, outs)


def check(mesh, batch, chunk_size, reduce):
    """Compare with plain JAX on one device; return the names of what is sent."""
    xs, draws, data = drawn(math.prod(batch))
    spec = P(*("batch" if size == 16 else None for size in batch))
    x = jax.device_put(xs.reshape(batch), NamedSharding(mesh, spec))
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size, reduce=reduce, jit=True)(noisy)
    program = kernel.lower(x, key).compile()
    got, got_data = program(x, key)
    np.testing.assert_array_equal(np.asarray(got_data).reshape(data.shape), data)
    want = draws.reshape(batch) if reduce is None else np.sum(draws)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    return re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", program.as_text())


CALLS = [(7, None), (7, ("sum", None))]
MORE = [(None, None), (None, ("sum", None)), (1, ("sum", None)), (100, None)]


def main(*kinds):
    checked = 0
    for kind, count in itertools.product(kinds, (1, 4, 8)):
        types = (AxisType[kind],)
        devices = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("batch",), axis_types=types, devices=devices)
        for batch in ((16, 3), (3, 16)):
            for chunk_size, reduce in CALLS + MORE if count == 4 else CALLS:
                with jax.set_mesh(mesh):  # which JAX wants where axes are explicit
                    sent = check(mesh, batch, chunk_size, reduce)
                checked += 1
                assert sent == (["all-reduce"] if reduce and count > 1 else []), (kind, count, sent)
    sys.stdout.write(f"{checked} programs\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
