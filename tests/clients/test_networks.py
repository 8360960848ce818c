# SPDX-License-Identifier: MIT
"""Flax and Equinox: networks that take a batch themselves (``batched=True``)."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from clients import weighted_sum
from helpers import assert_same
from rankax import auto_vmap

POINTS = jnp.cos(jnp.arange(5 * 4 * 3.0)).reshape(5, 4, 3)
IMAGES = jnp.sin(jnp.arange(5 * 8 * 8 * 2.0)).reshape(5, 8, 8, 2)
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"chunk_size": 2}, {"chunk_size": 3, "jit": True}, {"memory_limit": "20 kB"}],
    ids=lambda options: ", ".join(map(str, options)) or "whole",
)


class Perceptron(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm()(linen.gelu(linen.Dense(8)(x)))
        return {"mean": linen.Dense(2)(x), "scale": linen.softplus(linen.Dense(1)(x))[..., 0]}


class Convolutional(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(4, (3, 3))(x))
        x = linen.max_pool(x, (2, 2), strides=(2, 2))
        return linen.Dense(3)(x.reshape(x.shape[0], -1))


class NNXPerceptron(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def check(apply, rank, params, x, options):
    """Values and gradients of ``apply(params, x)`` in batches and item by item."""

    def item_by_item(params, x):
        one = lambda item: jax.tree.map(lambda out: out[0], apply(params, item[None]))  # noqa: E731
        for _ in range(x.ndim - rank):
            one = jax.vmap(one)
        return one(x)

    kernel = auto_vmap(x=rank, batched=True, **options)(apply)
    assert_same(kernel(params, x), item_by_item(params, x), rtol=1e-4, atol=1e-5)
    gradients = [
        jax.jit(jax.grad(lambda *args, run=run: weighted_sum(run(*args)), (0, 1)))(params, x)
        for run in (kernel, item_by_item)
    ]
    assert_same(*gradients, rtol=1e-4, atol=1e-5)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradients[0]))


@pytest.mark.parametrize(
    ("model", "rank", "x"),
    [(Perceptron(), 1, POINTS), (Convolutional(), 3, IMAGES)],
    ids=["perceptron", "convolution"],
)
@OPTIONS
def test_flax_linen(model, rank, x, options):
    params = model.init(jax.random.key(0), x[0] if rank == 1 else x)
    check(lambda params, x: model.apply(params, x), rank, params, x, options)


@OPTIONS
def test_flax_nnx(options):
    graph, state = nnx.split(NNXPerceptron(nnx.Rngs(0)))
    check(lambda params, x: nnx.merge(graph, params)(x), 1, state, POINTS, options)


def test_nnx_grad_of_a_model_that_all_items_share():
    """A model knows in which trace it was made, and `nnx.grad` refuses one of another trace."""
    model, targets = NNXPerceptron(nnx.Rngs(0)), POINTS[..., :2]

    def gradient(model, x, y):
        return nnx.grad(lambda model, x, y: jnp.sum((model(x) - y) ** 2))(model, x, y)

    got = auto_vmap(x=1, y=1, chunk_size=3, jit=True)(gradient)(model, POINTS, targets)
    mapped = gradient
    for _ in range(POINTS.ndim - 1):
        mapped = jax.vmap(mapped, (None, 0, 0))
    assert_same(jax.tree.leaves(got), jax.tree.leaves(jax.jit(mapped)(model, POINTS, targets)))


@OPTIONS
def test_equinox(options):
    model = eqx.nn.MLP(3, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(2))
    params, static = eqx.partition(model, eqx.is_array)

    def apply(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    check(apply, 1, params, POINTS, options)
