# SPDX-License-Identifier: MIT
"""Kernels that make or use a `jax.Ref`: right values and derivatives, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, refusal, slow
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Best, Moments, TopK
from scan_cases import here

X = jnp.asarray(np.linspace(1.0, 2.0, 7, dtype=np.float32))


def square(x):
    held = jax.new_ref(jnp.zeros(()))
    held[...] += x * x
    return held[...]


def plain(x):
    return x * x


def of(mapped, x):
    """Return values, a gradient, a tangent, and a derivative of the gradient."""
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(mapped(x))))
    return mapped(x), gradient(x), jax.jvp(mapped, (x,), (x,))[1], jax.vjp(gradient, x)[1](x)


OPTIONS = [{}, slow({"lockstep": False}), {"devices": 1}, slow({"memory_limit": "1 MB"})]
WORDS = (
    "it uses a jax.Ref inside a loop over chunks, where JAX gets derivatives wrong; use no Ref, or"
)


@pytest.mark.parametrize("options", [*OPTIONS, slow({"jit": True})], ids=str)
@pytest.mark.parametrize("size", [None, 7])
def test_all_items_at_once(options, size):
    mapped = auto_vmap(0, chunk_size=size, **options)
    assert_same(of(mapped(square), X), of(jax.vmap(plain), X))


@pytest.mark.parametrize("options", [*OPTIONS, slow({"checkpoint": False}), {"jit": True}], ids=str)
@pytest.mark.parametrize("size", [1, slow(2)])
def test_chunks_refuse_derivatives(options, size):
    mapped = auto_vmap(0, chunk_size=size, **options)(square)
    assert_same(mapped(X), plain(X))
    assert refusal(ValueError, jax.vjp, mapped, X).startswith(f"{here(square)}: {WORDS}")
    assert refusal(ValueError, jax.jvp, mapped, (X,), (X,)).startswith(f"{here(square)}: {WORDS}")


REDUCTIONS = ["sum", "max", *map(slow, ["mean", "prod", "logsumexp", "gram", TopK(2), Best(0)])]


@pytest.mark.parametrize("reduce", [*REDUCTIONS, slow(Moments())], ids=str)
def test_reductions_in_chunks_refuse_derivatives(reduce):
    def kernel(x):
        return (square(x),)

    mapped = chunked_reduce(kernel, reduce, 2)
    assert_same(mapped(X), chunked_reduce(lambda x: (plain(x),), reduce, 2)(X))
    assert refusal(ValueError, jax.vjp, mapped, X).startswith(f"{here(kernel)}: {WORDS}")


# In JAX 0.10, `jax.vmap` of such a kernel has no derivative of a gradient either.
HAS_SECOND = jax.__version_info__ >= (0, 12)


def negated(x):
    held = jax.new_ref(x)
    held[...] *= -1
    return held[...]


@pytest.mark.parametrize("reduce", ["max", slow("prod"), slow("logsumexp"), slow("sum")])
def test_a_ref_that_begins_with_an_input(reduce):
    got, want = (chunked_reduce(f, reduce, 2) for f in (negated, lambda x: -x))
    if HAS_SECOND:
        assert_same(of(got, X), of(want, X))
    assert_same(
        *(jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(X) for f in (got, want))
    )


def loss_of(mapped, x, writes=True):
    """Return a loss that depends on what the kernel writes into a Ref of its caller."""
    seen = jax.new_ref(jnp.ones(()))

    def kernel(x):
        before = seen[...]
        if writes:
            seen[...] += x
        return x * before

    return jnp.sum(jnp.sin(mapped(kernel)(x))) * seen[...]


@pytest.mark.parametrize("reduce", [None, slow("sum")])
def test_a_ref_of_the_caller_has_right_gradients(reduce):
    def one_by_one(kernel):
        return lambda x: jnp.stack([kernel(item) for item in x])

    def mapped(kernel):
        return chunked_reduce(kernel, reduce, 1) if reduce else chunked_vmap(kernel, 1)

    def plain(kernel):
        return (lambda x: jnp.sum(one_by_one(kernel)(x))) if reduce else one_by_one(kernel)

    got, want = (
        jax.jit(jax.value_and_grad(lambda x, f=f: loss_of(f, x)))(X) for f in (mapped, plain)
    )
    assert_same(got, want)


def largest(kernel):
    return chunked_reduce(kernel, "max", 1)


def test_a_ref_of_the_caller_and_items_evaluated_again():
    assert WORDS in refusal(ValueError, jax.grad(lambda x: loss_of(largest, x)), X)
    got = jax.grad(lambda x: loss_of(largest, x, writes=False))(X)
    assert_same(got, jax.grad(lambda x: jnp.sin(jnp.max(x)))(X))
