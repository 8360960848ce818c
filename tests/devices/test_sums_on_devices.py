# SPDX-License-Identifier: MIT
"""Sums on devices are as accurate as on one, and half precision is rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow, weekly
from rankax import auto_vmap

TENTH = float(np.float32(0.1))
ULP = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize("count", [100_001, slow(100_000_000)])
@pytest.mark.parametrize("chunk_size", [weekly(1), 2, weekly(1000), None])
def test_long_sums(chunk_size, count):
    total = auto_vmap(0, reduce="sum", chunk_size=chunk_size, devices=4, jit=True)(lambda x: x)
    assert abs(float(total(jnp.full(count, 0.1))) / (count * TENTH) - 1) < 4 * ULP
    pairs = auto_vmap(0, 0, reduce="sum", chunk_size=chunk_size, devices=4, jit=True)
    n = 46_500 if count > 1e6 else 301
    found = pairs(lambda a, b: a * b)(jnp.full((n, 1), 0.1), jnp.ones(n))
    assert abs(float(found) / (n * n * TENTH) - 1) < 4 * ULP


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("chunk_size", [1, 16, weekly(64), 1000, weekly(None)])
@pytest.mark.parametrize("options", [{}, {"reduce": "sum"}, {"lockstep": False}], ids=str)
def test_cotangents_of_half_precision_are_rounded_once(options, chunk_size, dtype):
    x = jnp.asarray(np.random.default_rng(1).uniform(size=3001), dtype)
    kernel = auto_vmap(0, 0, chunk_size=chunk_size, devices=4, **options)
    kernel = kernel(lambda w, x: (w * x).astype(jnp.float32))
    gradient = jax.grad(lambda w: kernel(w, x).sum())(dtype(1))
    exact = np.asarray(np.asarray(x).astype(np.float64).sum(), np.float32).astype(dtype)
    assert gradient.dtype == dtype
    assert float(gradient) == float(exact)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_devices_add_before_they_round(dtype):
    """The part of each device, 257 and so on, is no number of 8 bits."""
    x = jnp.asarray(np.random.default_rng(3).integers(1, 4, 504), dtype)

    def gradient(shared, **options):
        kernel = auto_vmap(x=0, chunk_size=2, devices=3, **options)
        return jax.grad(lambda w: kernel(lambda x: shared(w) * x)(x).astype(jnp.float32).sum())

    exact = np.asarray(np.asarray(x).astype(np.float32).sum()).astype(dtype)
    for options in ({}, {"lockstep": False}):
        assert float(gradient(lambda w: w, **options)(dtype(1))) == float(exact)
        of_vector = gradient(lambda w: w[1], **options)(jnp.ones(3, dtype))
        np.testing.assert_array_equal(np.asarray(of_vector).astype(float), [0, float(exact), 0])
