# SPDX-License-Identifier: MIT
"""Sparse matrices of JAX, as a batch and as what all items share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from helpers import assert_same, refusal
from rankax import auto_vmap, chunked_reduce, chunked_vmap

DENSE = jnp.asarray(np.arange(80.0, dtype=np.float32).reshape(5, 4, 4) % 7)
M, V = BCOO.fromdense(DENSE, n_batch=1), jnp.arange(4.0)


def product(m):
    return m @ V


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_all_items_at_once_are_as_with_vmap(chunk_size):
    mapped = chunked_vmap(product, chunk_size)
    assert_same(mapped(M), DENSE @ V)

    def loss(data, mapped):
        return jnp.sum(mapped(BCOO((data, M.indices), shape=M.shape)) ** 2)

    got, want = (jax.grad(loss)(M.data, f) for f in (mapped, jax.vmap(product)))
    assert_same(got, want)
    assert_same(chunked_vmap(lambda m: 2 * m, chunk_size)(M).todense(), 2 * DENSE)


WORDS = (
    "m is a batch of sparse matrices (BCOO), and only jax.vmap can take one apart; pass its "
    "arrays, such as m.data and m.indices, and make the BCOO of one item in the function"
)
CALLS = {
    "chunked_vmap(product)": chunked_vmap(product, 2),
    "chunked_reduce(product)": chunked_reduce(product, "sum", None),
    "product()": auto_vmap(m=1)(product),
}


@pytest.mark.parametrize(("site", "call"), CALLS.items(), ids=CALLS)
def test_a_batch_in_chunks_says_what_to_do(site, call):
    assert refusal(TypeError, call, M) == f"{site}: {WORDS}"


def test_what_the_error_advises_and_a_shared_matrix():
    def one(data, indices):
        return product(BCOO((data, indices), shape=(4, 4)))

    assert_same(chunked_vmap(one, 2)(M.data, M.indices), DENSE @ V)
    x = jnp.asarray(np.linspace(0, 1, 28, dtype=np.float32).reshape(7, 4))
    shared = BCOO.fromdense(DENSE[0])
    for mapped in (chunked_vmap, lambda f, size, _: auto_vmap(1, None, chunk_size=size)(f)):
        assert_same(mapped(lambda x, m: m @ x, 2, (0, None))(x, shared), x @ DENSE[0].T)


def diagonal(v):
    return {"m": BCOO.fromdense(jnp.diag(v), nse=4)}


RETURNS = {
    "chunks": chunked_vmap(diagonal, 2),
    "auto_vmap": auto_vmap(1)(diagonal),
    "lanes": auto_vmap(1, lockstep=False)(diagonal),
    "sum": chunked_reduce(diagonal, "sum", None),
}


@pytest.mark.parametrize("call", RETURNS.values(), ids=RETURNS)
def test_a_sparse_output_says_what_to_return(call):
    """Otherwise, it would be a matrix whose methods fail, as what `jax.lax.map` returns."""
    x = DENSE[0]
    text = refusal(TypeError, call, x)
    assert "diagonal() at " in text
    assert text.endswith(
        "returned a sparse matrix (BCOO) at output['m'], and only jax.vmap can make a batch of "
        "them; return its arrays, such as output['m'].data"
    )
    want = jax.vmap(diagonal)(x)["m"].todense()
    assert_same(chunked_vmap(diagonal, None)(x)["m"].todense(), want)
    assert_same(auto_vmap(1)(diagonal)(x[0])["m"].todense(), jnp.diag(x[0]))
