# SPDX-License-Identifier: MIT
"""Eager scans find their compiled program again, as eager maps do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, compilations, slow
from rankax import checkpoint_chunked_scan, sliced_scan

KEPT = {
    "slice": lambda f, xs: sliced_scan(f, INIT, xs, start=1, step=3),
    "checkpoint": lambda f, xs: sliced_scan(f, INIT, xs, step=4, checkpoint=True),
    "steps": lambda f, xs: sliced_scan(f, INIT, xs, save_at=[0, 1, 5], reverse=True),
    "windows": lambda f, xs: sliced_scan(f, INIT, xs, step=3, reduce="mean"),
    "chunks": lambda f, xs: checkpoint_chunked_scan(f, INIT, xs, chunk_size=4),
}
INIT = np.float32(0.5)


@pytest.mark.parametrize(
    ("name", "differentiated"),
    [
        ("slice", False),
        ("chunks", True),
        slow("checkpoint", True),
        slow("steps", False),
        slow("windows", True),
    ],
)
def test_a_warm_eager_scan_compiles_nothing(name, differentiated):
    def call(scale, xs):
        def step(carry, x):  # another function in each call
            return carry * scale + x, jnp.sin(carry)

        return KEPT[name](step, xs)

    def loss(scale, xs):
        carry, ys = call(scale, xs)
        return jnp.sum(ys) + carry

    xs = jnp.asarray(np.linspace(0.0, 1.0, 10))
    transformed = jax.value_and_grad(loss, (0, 1)) if differentiated else call
    scales = [jnp.float32(0.5), jnp.float32(0.8)]
    for _ in range(2):
        transformed(scales[0], xs)
    got, compiled = compilations(transformed, scales[1], xs)
    assert compiled == 0
    assert_same(got, jax.jit(transformed)(scales[1], xs))
