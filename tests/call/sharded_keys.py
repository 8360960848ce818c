# SPDX-License-Identifier: MIT
"""Run by `test_keys.py` on eight simulated devices: keys that are split over a sharded batch."""

import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rankax import SplitKey, auto_vmap

KEY = jax.random.key(5)


def noisy(x, key):
    return x + jax.random.normal(key), jax.random.key_data(key)


draw_each = jax.jit(jax.vmap(noisy))


def check(mesh, batch, chunk_size, reduce):
    """Compare with plain JAX on one device; return the names of what is sent."""
    xs = np.arange(math.prod(batch), dtype="float32").reshape(batch) / 24
    draws, data = draw_each(xs.ravel(), jax.random.split(KEY, xs.size))
    spec = P(*("batch" if size == 16 else None for size in batch))
    x = jax.device_put(xs, NamedSharding(mesh, spec))
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size, reduce=reduce, jit=True)(noisy)
    program = kernel.lower(x, key).compile()
    got, got_data = program(x, key)
    np.testing.assert_array_equal(np.asarray(got_data).reshape(data.shape), data)
    want = draws.reshape(batch) if reduce is None else jnp.sum(draws)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    return re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", program.as_text())


def main(kind, *counts):
    checked = 0
    # JAX 0.7 gathers what it folds in, and mixes up where two axes of a batch lie.
    is_early = kind == "Explicit" and jax.__version_info__ < (0, 8)
    for count in map(int, counts):
        types = (AxisType[kind],)
        devices = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("batch",), axis_types=types, devices=devices)
        enter = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
        for batch in ((16, 3), (3, 16))[: 1 if is_early else 2]:
            for chunk_size in (None, 1, 7, 100) if count == 4 else (None, 7):
                for reduce in (None, ("sum", None)):
                    with enter(mesh):  # which JAX wants where axes are explicit
                        sent = check(mesh, batch, chunk_size, reduce)
                    checked += 1
                    if is_early:
                        continue
                    assert sent == (["all-reduce"] if reduce and count > 1 else []), sent
    sys.stdout.write(f"{checked} programs\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
