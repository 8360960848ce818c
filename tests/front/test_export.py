# SPDX-License-Identifier: MIT
"""Batches of unknown length, as `jax.export` has them."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, refusal, slow
from rankax import (
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_jacfwd,
    chunked_reduce,
    chunked_vmap,
    sliced_scan,
)
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


def pairs(x, chunk_size=None):
    mapped = auto_vmap(1, 1, reduce="sum", reduce_axis=-1, chunk_size=chunk_size)
    return mapped(lambda a, b: jnp.sin(a) @ jnp.cos(b))(x[:, None], x[None])


# Calls in chunks, of what has an unknown length, beside the same without chunks.
UNKNOWN = {
    "pairs": (lambda x: pairs(x[:, None], 4), lambda x: pairs(x[:, None])),
    "one item": (lambda x: pairs(jnp.stack([x] * 3), 2), lambda x: pairs(jnp.stack([x] * 3))),
    "jacobian": (chunked_jacfwd(kernel, chunk_size=2), jax.jacfwd(kernel)),
    "trace": (chunked_jacfwd(kernel, reduce="trace"), lambda x: jnp.trace(jax.jacfwd(kernel)(x))),
}


@pytest.mark.parametrize(("call", "plain"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_has_an_unknown_length(call, plain):
    want = jax.jit(lambda x: (plain(x), jax.grad(lambda x: total(plain(x)))(x)))(X)
    assert_same(exported(call, "4*n")(X), want, rtol=1e-4)


def step(carry, x):
    return carry + x, carry


def halved(x):
    return jax.lax.while_loop(lambda y: y > 0.1, lambda y: y / 2, x)


# What needs a number, and says so before JAX does.
REFUSED = {
    "kernel(): memory_limit cannot measure arrays of the unknown length 4*n; give chunk_size": (
        auto_vmap(0, memory_limit="1 MB")(kernel)
    ),
    "kernel(): devices=1 cannot divide the unknown length 4*n; leave it out, or export a known "
    "length": auto_vmap(0, devices=1)(kernel),
    "halved(): lockstep=False counts the items, but the batch has the unknown length 4*n; leave it "
    "out, or export a known length": auto_vmap(0, lockstep=False)(halved),
    "progress= counts the items, but the batch has the unknown length 4*n; leave it out, or export "
    "a known length": auto_vmap(0, chunk_size=2, progress=print)(kernel),
    "checkpoint_chunked_scan(step): the leading axis of xs has the unknown length 4*n; use "
    "jax.lax.scan, which takes it, or export a known length": (
        lambda x: checkpoint_chunked_scan(step, jnp.float32(0), x, chunk_size=2)
    ),
    "sliced_scan(step): the leading axis of xs has the unknown length 4*n; use jax.lax.scan, which "
    "takes it, or export a known length": (lambda x: sliced_scan(step, jnp.float32(0), x, start=1)),
}


@pytest.mark.parametrize(("text", "call"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_needs_a_known_length(text, call):
    assert refusal(ValueError, exported, call, "4*n").partition("\n")[0] == text


@pytest.mark.parametrize("reduce", ["sum", slow("logsumexp"), slow(TopK(2))], ids=str)
def test_pairs_of_unknown_length_along_both_axes(reduce):
    pairs = auto_vmap(0, 0, reduce=reduce, chunk_size=2)(lambda a, b: jnp.sin(a - 2 * b))
    run, x = exported(lambda x: pairs(x[:, None], x), "2*n"), jnp.asarray(X)
    plain = auto_vmap(0, reduce=reduce)(lambda y: y)

    def by_hand(x):
        return plain(jnp.ravel(jnp.sin(x[:, None] - 2 * x[None])))

    want = by_hand(x), jax.grad(lambda x: total(by_hand(x)))(x)
    assert_same(run(x), want, rtol=1e-3)
