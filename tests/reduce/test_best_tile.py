# SPDX-License-Identifier: MIT
"""`argmin` and `argmax` remember the tile of the best item, and evaluate that tile again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, slow
from rankax import auto_vmap, chunked_reduce
from rankax.reductions import Best

NAN, INF = np.nan, np.inf
ROWS = {
    "ties": np.random.default_rng(0).integers(0, 3, 887),
    "all alike": np.zeros(887),
    "the last": np.arange(887.0)[::-1],
    "nan": np.where(np.arange(887) % 301 == 300, NAN, np.cos(np.arange(887))),
    "nan alone": np.full(900, NAN),
    "infinite": np.full(900, INF),
    "minus infinite": np.full(900, -INF),
    "signed zeros": np.where(np.arange(887) % 2, 0.0, -0.0),
}


@functools.cache
def best_of_887(reduce):
    """Tiles of 16 overlap there."""
    return jax.jit(chunked_reduce(lambda x: -x, reduce, 16))


@pytest.mark.parametrize("reduce", ["argmin", slow("argmax")])
@pytest.mark.parametrize("row", ROWS)
def test_of_a_long_row(row, reduce):
    x = np.asarray(ROWS[row], np.float32)
    # `jnp.argmin` may find another NaN than the first on a GPU.
    assert_same(best_of_887(reduce)(x), getattr(np, reduce)(-x).astype(np.int32))


@pytest.mark.parametrize("dtype", ["int8", "float16", slow("uint32")])
def test_of_other_dtypes(dtype):
    x = jnp.asarray(np.random.default_rng(1).integers(0, 5, (3, 700)) % 4, dtype)
    got = auto_vmap(0, reduce="argmax", reduce_axis=-1, chunk_size=32)(lambda x: x)(x)
    assert_same(got, jnp.argmax(x, axis=-1))


def test_of_pairs_over_two_axes():
    a = jnp.asarray(np.random.default_rng(2).normal(size=(2, 37, 1)).round(1), jnp.float32)
    b = jnp.asarray(np.random.default_rng(3).normal(size=(29,)).round(1), jnp.float32)
    options = {"reduce": ("argmin", Best("by")), "reduce_axis": (-2, -1), "chunk_size": 29 * 2}
    fun = auto_vmap(0, 0, **options)(lambda a, b: (a - b, {"by": b - a, "both": a * 100 + b}))
    at, best = jax.vmap(fun, (0, None))(a, b)
    pairs = (a - b[None, None]).reshape(2, -1)
    assert_same(at, jnp.argmin(pairs, axis=-1))
    where = jnp.argmin(-pairs, axis=-1)
    assert_same(best["by"], jnp.take_along_axis(-pairs, where[:, None], -1)[:, 0])
    assert_same(best["both"], a[:, :, 0][jnp.arange(2), where // 29] * 100 + b[where % 29])
