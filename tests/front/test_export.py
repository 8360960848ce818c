# SPDX-License-Identifier: MIT
"""Batches of unknown length, as `jax.export` has them."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, refusal, slow
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Moments, TopK

X = np.linspace(0.1, 1.3, 12, dtype=np.float32)


def kernel(x):
    return jnp.sin(x) * x


def total(tree):
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(jnp.sum(x**2) for x in leaves)


def exported(fun, length):
    """Return a function of batches of any length, and its gradient."""
    like = jax.ShapeDtypeStruct(jax.export.symbolic_shape(length), jnp.float32)
    both = jax.jit(lambda x: (fun(x), jax.grad(lambda x: total(fun(x)))(x)))
    return jax.export.export(both)(like).call


REDUCTIONS = ["sum", "max", slow("mean"), slow("logsumexp"), slow("gram"), slow(Moments())]


@pytest.mark.parametrize(
    ("length", "size"), [("4*n", 2), slow("4*n", 3), slow("n", 1), ("n", None)]
)
@pytest.mark.parametrize("reduce", [None, *REDUCTIONS, slow(TopK(2))], ids=str)
def test_a_batch_of_unknown_length(reduce, length, size):
    def mapped(size):
        if reduce is None:
            return auto_vmap(0, chunk_size=size)(kernel)
        return auto_vmap(0, chunk_size=size, reduce=reduce)(kernel)

    if isinstance(reduce, TopK) and length == "n":
        pytest.skip("there may be fewer items than it takes")
    run, plain = exported(mapped(size), length), mapped(None)
    for x in (X, X[:4]):
        want = plain(x), jax.grad(lambda x: total(plain(x)))(x)
        assert_same(run(x), want, rtol=1e-4)


def test_axes_and_default_chunks():
    assert_same(exported(chunked_vmap(kernel, 5), "5*n")(X[:10])[0], kernel(X[:10]))
    assert_same(exported(chunked_reduce(kernel, "sum", 2), "2*n")(X)[0], jnp.sum(kernel(X)))
    assert_same(exported(auto_vmap(0, reduce="sum")(kernel), "n")(X)[0], jnp.sum(kernel(X)))


@pytest.mark.parametrize("reduce", [None, "sum"])
def test_chunks_that_may_not_divide_it(reduce):
    mapped = auto_vmap(0, chunk_size=3, reduce=reduce) if reduce else auto_vmap(0, chunk_size=3)
    text = refusal(ValueError, exported, mapped(kernel), "n")
    assert text.partition("\n")[0] == (
        "kernel(): the batch has the unknown length n, which no chunk of 2 to 3 items divides; "
        "export a multiple, as of jax.export.symbolic_shape('3*n'), or give chunk_size=None"
    )
