# SPDX-License-Identifier: MIT
"""Values of an item that are used again: where they are kept, and that results stay the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, primitives, slow
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.ext.xla_cpu import kept_values, library

pytestmark = pytest.mark.skipif(not library.IS_TUNED, reason="from JAX 0.12 on")

X = jnp.asarray(np.linspace(-1, 1, 7 * 5, dtype=np.float32).reshape(7, 5))


def layer(x):
    norm = jnp.sqrt(jnp.sum(jnp.abs(x) ** 2))
    return jnp.tanh(x) + lax.logistic(x) * norm.astype(x.dtype) * 0.3


def chain(x):
    for _ in range(4):
        x = layer(x)
    return x


@jax.custom_jvp
def with_jvp(x):
    return chain(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 7 * tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return chain(x)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, cotangent: (7 * cotangent,))


def in_branches(x):
    return lax.cond(x[0] > 0, chain, lambda x: layer(x) * 2, x)


CHAINS = {
    "chain": chain,
    "jit": jax.jit(chain),
    "scan": lambda x: lax.scan(lambda x, _: (chain(x), x[0]), x, None, length=3),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, x: chain(x), x),
    "branches": in_branches,
    "checkpoint": lambda x: jax.checkpoint(chain)(x) + x,
    "custom_jvp": lambda x: layer(with_jvp(x)),
    "custom_vjp": lambda x: layer(with_vjp(x)),
    "gradient": jax.grad(lambda x: jnp.sum(chain(x))),
    "integers and keys": lambda x: (
        chain(x) + jax.random.normal(jax.random.key(jnp.int32(9 * jnp.abs(x[0]))), (5,)),
        jnp.argsort(layer(x)),
    ),
    "complex": lambda x: jnp.abs(chain(lax.complex(x, x / 2))),
}


def barriers(fun, *args):
    return primitives(fun, *args)["optimization_barrier"]


@pytest.mark.parametrize("kernel", CHAINS.values(), ids=CHAINS)
def test_chains_of_layers_keep_values_in_chunks(kernel):
    by_hand = barriers(jax.vmap(kernel), X)
    found = barriers(chunked_vmap(kernel, 3), X)
    assert found > by_hand
    if kernel is chain:
        assert found == 4  # the input, and what is between the four
        assert_same(auto_vmap(1, chunk_size=3)(chain)(X), jax.jit(jax.vmap(chain))(X), rtol=2e-5)
    assert barriers(chunked_vmap(kernel, 7), X) == by_hand  # one chunk is plain `jax.vmap`


def polynomial(x):
    total = x
    for power in range(12):
        total = total * x + power
    return total


def distances(x):
    return jnp.sum(jnp.sqrt((x[:, None] - x[None]) ** 2 + 1e-3))


def with_an_effect(x):
    jax.debug.callback(lambda _: None, x[0])
    return chain(x)


CHEAP = {
    "an effect": with_an_effect,
    "polynomial": polynomial,
    "distances": distances,
    "sum of a function": lambda x: jnp.sum(jnp.exp(x) ** 2 + jnp.exp(x)),
    "cheap, read twice": lambda x: (x + 1) * jnp.sum(x + 1),
    "softmax": jax.nn.softmax,  # its largest number is broadcast
}


@pytest.mark.parametrize("kernel", CHEAP.values(), ids=CHEAP)
def test_cheap_kernels_keep_nothing(kernel):
    assert barriers(chunked_vmap(kernel, 3), X) == 0


def nearby(x, y, w):
    return w * lax.rsqrt(jnp.sum((x - y) ** 2) + 1)


COPIED = {
    "rsqrt in jit": (jax.jit(lambda x: x * lax.rsqrt(x @ x)), 1),
    "divided by a root": (lambda x: x / jnp.sqrt(x @ x), 1),
    "log1p in a scan": (lambda x: lax.scan(lambda x, _: (jnp.log1p(x), None), x, None, 2)[0], 1),
    "a root": (lambda x: jnp.sqrt(x @ x), 0),
    "a root beside a half": (lambda x: x / 2 + jnp.sqrt(x @ x), 0),
    "a power": (lambda x: x / (x @ x) ** 1.5, 0),
    "one of many": (lambda x: jnp.tile(x, 9) * jnp.tanh(x[0]), 1),
    "too few": (lambda x: x[0] + jnp.tanh(jnp.sum(x)), 1),
}


@pytest.mark.parametrize(("kernel", "count"), COPIED.values(), ids=COPIED)
def test_inputs_of_some_functions_are_copied(kernel, count):
    assert barriers(chunked_vmap(kernel, 3), X) == count
    assert barriers(chunked_vmap(kernel, 7), X) == 0  # one chunk is plain `jax.vmap`


def test_only_floats_that_are_mapped_and_small_are_copied():
    shared, many = jnp.ones(5), jnp.ones((7, 5000))

    def kernel(x, n, many, shared):
        return jnp.tanh(x * shared) * n.astype(x.dtype) + jnp.sum(jnp.tanh(many))

    mapped = auto_vmap(1, 0, 1, 1, chunk_size=3)(kernel)
    assert barriers(mapped, X, jnp.arange(7), many, shared) == 1


def test_derivatives_of_reductions_copy_nothing(monkeypatch):
    total = auto_vmap(1, 1, 0, reduce="sum", reduce_axis=-1, chunk_size=3)(nearby)

    def slope(x, y, w):
        return jax.grad(lambda y: jnp.sum(total(x[:, None], y, w)))(y)

    args = X[:, :3], X[:, :3], X[:, 0]
    assert barriers(lambda x, y, w: total(x[:, None], y, w), *args) == 3
    own = barriers(slope, *args)
    monkeypatch.setattr(kept_values, "_OPAQUE", set())
    assert barriers(slope, *args) == own


def loss(mapped):
    def total(x):
        outs = jax.tree.leaves(mapped(x))
        return sum(jnp.sum(jnp.sin(out)) for out in outs if jnp.issubdtype(out.dtype, jnp.inexact))

    return total


@pytest.mark.parametrize(
    "name", ["custom_vjp", *map(slow, ("scan", "branches", "loop", "complex"))]
)
def test_values_and_derivatives_are_those_of_vmap(name):
    """With rules of the caller, whose derivatives are not those of what they compute."""
    kernel = CHAINS[name]

    def all_of(mapped):
        total = loss(mapped)

        return jax.jit(lambda x: (mapped(x), jax.grad(total)(x)))(X)

    assert_same(all_of(chunked_vmap(kernel, 3)), all_of(jax.vmap(kernel)), rtol=2e-4, atol=2e-5)


def test_reductions_in_chunks():
    fun, whole = (chunked_reduce(lambda x: jnp.sum(chain(x)), "logsumexp", n) for n in (3, 7))
    assert barriers(fun, X) > 0
    assert barriers(whole, X) == 0
    got, want = (jax.jit(jax.value_and_grad(f))(X) for f in (fun, whole))
    assert_same(got, want, rtol=2e-4, atol=2e-5)


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile().as_text()


@pytest.mark.optimized
def test_each_layer_is_computed_once():
    def waves(x):
        for _ in range(4):
            x = jnp.tanh(x) + jnp.sin(x) * jnp.sqrt(jnp.sum(x * x)) * 0.3
        return x

    def count(mapped):
        x = jax.ShapeDtypeStruct((6000, 40), jnp.float32)  # so long that sines stay
        return len(re.findall(r" sine\(", compiled(mapped, x)))

    assert count(chunked_vmap(waves, 30)) == 4
    assert count(lambda x: lax.map(waves, x, batch_size=30)) > 4  # if not: see `kept_values.py`


@pytest.mark.optimized
def test_without_a_copy_such_functions_read_the_whole_array():
    """In a loop that slices the array for each number, LLVM reads number by number."""

    def screened(x):
        return jnp.log1p(x[0] * x[1] + x[2] ** 2) * x[3]

    def slices(mapped):
        x = jax.ShapeDtypeStruct((6000, 4), jnp.float32)
        loops = [text for text in compiled(mapped, x).split("\n\n") if "log-plus-one(" in text]
        assert loops
        return any("dynamic-slice(" in text for text in loops)

    assert not slices(chunked_vmap(screened, 30))
    assert slices(lambda x: lax.map(screened, x, batch_size=30))  # if not: see `keep_inputs`
