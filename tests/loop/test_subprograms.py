# SPDX-License-Identifier: MIT
"""Kernels with each primitive of JAX that holds programs among its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from helpers import assert_same, at_each_run, primitives
from rankax import chunked_vmap

M = jnp.asarray(3 * np.eye(3) + np.sin(np.arange(45.0)).reshape(5, 3, 3) / 4)


with_jvp = jax.custom_jvp(jnp.sin)
with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 7 * tangents[0]))
with_batching = jax.custom_batching.custom_vmap(jnp.sin)
with_batching.def_vmap(lambda size, batched, m: (jnp.sin(m), batched[0]))


def sharded(m):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec("d")}
    return jax.shard_map(jnp.linalg.inv, mesh=mesh, **specs)(m[None])[0]


def with_refs(m):
    ref = jax.new_ref(m)
    lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(..., jnp.linalg.inv(ref[...])), None)
    return ref[...]


KERNELS = {
    "jit": jax.jit(lambda m: jnp.linalg.inv(m)),
    "custom_vmap_call": with_batching,
    "scan": lambda m: lax.scan(lambda c, row: (jnp.linalg.solve(m, c), row * c), m[0], m),
    "while": lambda m: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.linalg.solve(m, c[1])), (0, m[0])
    ),
    "shard_map": sharded,
    "rules in branches": lambda m: lax.cond(m[0, 0] > 3, with_jvp, jnp.linalg.inv, m),
    "refs": with_refs,
}


@pytest.mark.parametrize("name", at_each_run([*KERNELS][:2], {name: name for name in KERNELS}))
def test_a_primitive_that_holds_programs(name):
    """Others are in ``tests/ops``."""
    kernel = KERNELS[name]
    used = primitives(kernel, M[0])
    assert name in used or "_" not in name
    want = jax.jit(jax.vmap(kernel))(M)
    for chunk_size in (1, 2):
        for _ in range(2):  # compiled, then kept
            assert_same(chunked_vmap(kernel, chunk_size)(M), want, rtol=1e-4, atol=1e-5)
