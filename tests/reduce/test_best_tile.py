# SPDX-License-Identifier: MIT
"""`argmin` and `argmax` remember the tile of the best item, and evaluate that tile again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.helpers import assert_same

from rankax import SplitKey, auto_vmap, chunked_reduce
from rankax.reductions import Best

NAN, INF = np.nan, np.inf
ROWS = {
    "ties": np.random.default_rng(0).integers(0, 3, 900),
    "all alike": np.zeros(900),
    "the last": np.arange(900.0)[::-1],
    "nan": np.where(np.arange(900) % 301 == 300, NAN, np.cos(np.arange(900))),
    "nan alone": np.full(900, NAN),
    "infinite": np.full(900, INF),
    "minus infinite": np.full(900, -INF),
    "signed zeros": np.where(np.arange(900) % 2, 0.0, -0.0),
}


@pytest.mark.parametrize("reduce", ["argmin", "argmax"])
@pytest.mark.parametrize("length", [900, 887])  # of which 16 has tiles that overlap
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.quick("nan-887-argmax", "ties-900-argmin", "signed zeros-887-argmax")
def test_of_a_long_row(row, length, reduce):
    x = jnp.asarray(ROWS[row][:length], jnp.float32)
    got = chunked_reduce(lambda x: -x, reduce, 16)(x)
    assert_same(got, getattr(jnp, reduce)(-x))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "float16"])
@pytest.mark.quick("int8", "uint32", "float16")
def test_of_other_dtypes(dtype):
    x = jnp.asarray(np.random.default_rng(1).integers(0, 5, (3, 700)) % 4, dtype)
    got = auto_vmap(0, reduce="argmax", reduce_axis=-1, chunk_size=32)(lambda x: x)(x)
    assert_same(got, jnp.argmax(x, axis=-1))


@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
@pytest.mark.quick("vmap")
def test_of_pairs_over_two_axes(how):
    a = jnp.asarray(np.random.default_rng(2).normal(size=(2, 37, 1)).round(1), jnp.float32)
    b = jnp.asarray(np.random.default_rng(3).normal(size=(29,)).round(1), jnp.float32)
    options = {"reduce": ("argmin", Best("by")), "reduce_axis": (-2, -1), "chunk_size": 29 * 2}
    fun = auto_vmap(0, 0, **options)(lambda a, b: (a - b, {"by": b - a, "both": a * 100 + b}))
    call = {"jit": jax.jit(fun), "vmap": jax.vmap(fun, (0, None))}.get(how, fun)
    at, best = call(a, b)
    pairs = (a - b[None, None]).reshape(2, -1)
    assert_same(at, jnp.argmin(pairs, axis=-1))
    where = jnp.argmin(-pairs, axis=-1)
    assert_same(best["by"], jnp.take_along_axis(-pairs, where[:, None], -1)[:, 0])
    assert_same(best["both"], a[:, :, 0][jnp.arange(2), where // 29] * 100 + b[where % 29])


def test_of_items_with_keys_and_of_max_with_a_gradient():
    x = jnp.asarray(np.sin(np.arange(400)), jnp.float32)
    key = jax.random.key(0)

    def drawn(x, key):
        return x + jax.random.uniform(key)

    fun = auto_vmap(0, SplitKey, reduce="argmax", reduce_axis=-1, chunk_size=16)(drawn)
    whole = auto_vmap(0, SplitKey)(drawn)(x, key)
    assert_same(fun(x, key), jnp.argmax(whole))
    pulled = jax.grad(lambda x: chunked_reduce(lambda x: x * x, "max", 16)(x))(x)
    assert_same(pulled, jnp.zeros(400).at[jnp.argmax(x * x)].set(2 * x[jnp.argmax(x * x)]))
