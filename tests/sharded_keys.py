# SPDX-License-Identifier: MIT
"""Run by `test_keys.py` on eight simulated devices: keys that are split over a sharded batch."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rankax import SplitKey, auto_vmap

KEY = jax.random.key(5)
BATCH = (8, 3)
X = jnp.arange(24.0).reshape(BATCH) / 24


def noisy(x, key):
    return x + jax.random.normal(key), jax.random.key_data(key)


def check(mesh, chunk_size, reduce):
    """Compare with plain JAX on one device; return the names of what is sent."""
    shards = None if AxisType.Explicit in mesh.axis_types else P("batch")
    options = {"chunk_size": chunk_size, "reduce": reduce, "shards": shards}
    kernel = auto_vmap(x=0, key=SplitKey, **options)(noisy)
    draws, data = jax.vmap(jax.vmap(noisy))(X, jax.random.split(KEY, BATCH))
    x = jax.device_put(X, NamedSharding(mesh, P("batch")))
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    program = jax.jit(kernel).lower(x, key).compile()
    got, got_data = program(x, key)
    np.testing.assert_array_equal(got_data, data)
    np.testing.assert_allclose(got, draws if reduce is None else jnp.sum(draws), rtol=1e-5)
    return set(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", program.as_text()))


def main(kind, *counts):
    checked = 0
    for count in map(int, counts):
        types = (AxisType[kind],)
        devices = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("batch",), axis_types=types, devices=devices)
        enter = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
        for chunk_size in (None, 1, 2, 100):
            for reduce in (None, ("sum", None)):
                with enter(mesh):  # which JAX wants where axes are explicit
                    sent = check(mesh, chunk_size, reduce)
                checked += 1
                if kind == "Explicit" and jax.__version_info__ < (0, 8):
                    continue  # JAX 0.7 gathers what it folds in
                assert sent == ({"all-reduce"} if reduce and count > 1 else set()), sent
    sys.stdout.write(f"{checked} programs\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
