# SPDX-License-Identifier: MIT
"""Reported elsewhere: batches that broadcast, of any dtype, empty, or in a function of batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, slow
from plain import item_by_item, wave
from rankax import Mask, Ragged, SplitKey, auto_vmap, chunked_vmap


def test_successive_axes_of_length_one():
    """getkeops/keops#382: the nearest centre, in batches that share some centres."""

    def squared(x, centre):
        return jnp.sum((x - centre) ** 2)

    points, centres = wave(4, 3, 1, 1, 2), wave(4, 1, 1, 7, 2)
    kernel = auto_vmap(x=1, centre=1, reduce="argmin", reduce_axis=-1)(squared)
    want = jnp.argmin(item_by_item(squared, [1, 1], points, centres), axis=-1)
    assert len({*np.ravel(want).tolist()}) > 1
    assert_same(kernel(points, centres), want)
    assert_same(kernel.with_options(chunk_size=5)(points, centres), want)


def test_parameters_with_a_batch_of_their_own():
    """getkeops/keops#366: one sum for each width, not only for the first."""

    def gauss(x, y, width):
        return jnp.exp(-width * (x - y) ** 2)

    x, y, width = wave(5, 1), wave(4), wave(3, 1, 1) + 2
    want = jnp.sum(item_by_item(gauss, [0, 0, 0], x, y, width), axis=-1)
    assert want.shape == (3, 5)
    for chunk_size in ("auto", 3, None):
        kernel = auto_vmap(0, 0, 0, reduce="sum", reduce_axis=-1, chunk_size=chunk_size)(gauss)
        assert_same(kernel(x, y, width), want)


def test_several_batch_axes_at_once():
    """jax-ml/jax#1168, pytorch/functorch#184."""
    matrices, vectors = wave(3, 2, 4, 4) + 3 * jnp.eye(4)[None, None], wave(2, 4)
    with pytest.raises(ValueError, match="in_axes"):
        jax.vmap(jnp.linalg.solve, in_axes=((0, 1), 0))(matrices, vectors)
    got = auto_vmap(2, 1)(jnp.linalg.solve)(matrices, vectors)
    assert_same(got, item_by_item(jnp.linalg.solve, [2, 1], matrices, vectors))


def test_an_ensemble_on_a_batch():
    """patrick-kidger/equinox#359, patrick-kidger/equinox#559: every member, every input."""

    def network(params, x):
        return params["out"] @ jnp.tanh(params["weight"] @ x + params["bias"])

    params = {"weight": wave(3, 5, 2), "bias": wave(3, 5), "out": wave(3, 5)}
    inputs = wave(4, 2)
    ranks = {"weight": 2, "bias": 1, "out": 1}
    want = jax.vmap(jax.vmap(network, in_axes=(None, 0)), in_axes=(0, None))(params, inputs)
    every = jax.tree.map(lambda leaf: leaf[:, None], params)
    assert_same(auto_vmap(params=ranks, x=1)(network)(every, inputs), want)


@pytest.mark.parametrize("axis", [-1, 1])
def test_the_axis_of_an_output(axis):
    """patrick-kidger/equinox#900."""
    x = wave(5, 3, 4)
    want = jax.vmap(lambda x: 2 * x, out_axes=axis)(x)
    for chunk_size in (2, None):
        assert_same(chunked_vmap(lambda x: 2 * x, chunk_size, out_axes=axis)(x), want)


@pytest.mark.parametrize("options", [{}, {"jit": True, "lockstep": False}])
def test_an_empty_batch(options):
    """numpy/numpy#5868, jax-ml/jax#2412."""
    empty = np.zeros((5, 0), np.float32)
    with pytest.raises(ValueError, match="size 0"):
        np.vectorize(lambda x: x + 1)(empty)
    kernel = auto_vmap(0, **options)(lambda x: {"next": x + 1, "below": x < 0})
    want = {"next": jnp.zeros((5, 0), jnp.float32), "below": jnp.zeros((5, 0), bool)}
    assert_same(kernel(jnp.asarray(empty)), want)


@pytest.mark.parametrize("dtype", ["bool", slow("bfloat16")])
def test_a_chunked_map_keeps_dtypes(dtype):
    """numpy/numpy#14936: there, the first item decides for all."""
    assert np.vectorize(lambda x: min(x, 10))([10.5, 9.5]).tolist() == [10, 9]
    x = jnp.asarray([3, 0, 1, 1, 0, 2, 5]).astype(dtype)

    def kernel(x):
        return {"same": x, "pair": jnp.stack([x, x]), "is": x == x}

    want = item_by_item(kernel, [0], x)
    assert want["same"].dtype == dtype
    for options in ({"chunk_size": 3}, {"chunk_size": 2, "lockstep": False}, {"bucket": True}):
        assert_same(auto_vmap(0, jit=True, **options)(kernel)(x), want)


def test_a_callback_that_takes_a_batch():
    """jax-ml/jax#17187, jax-ml/jax#23624: its arguments have the same batch axis, and only one."""
    seen = []

    def product(a, b):
        seen.append((a.shape, b.shape))
        return np.matmul(a, b)

    def callback(a, b):
        like = jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[-1]), a.dtype)
        return jax.pure_callback(product, like, a, b)

    a, b = wave(5, 1, 2, 3), wave(4, 3, 2)
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(callback)(a[:4, 0], b)
    got = auto_vmap(a=2, b=2, batched=True, chunk_size=10, jit=True)(callback)(a, b)
    assert_same(got, item_by_item(jnp.matmul, [2, 2], a, b))
    ((a_seen, b_seen),) = {*seen}  # all chunks are alike
    assert (a_seen[1:], b_seen[1:]) == ((2, 3), (3, 2))
    assert 1 < a_seen[0] == b_seen[0] <= 10


def test_a_key_for_each_item():
    """google/flax#4195, jax-ml/jax#7708."""

    def noisy(x, key):
        return x + jax.random.normal(key)

    key, x = jax.random.key(3), jnp.zeros(7)
    shared = jax.vmap(noisy, in_axes=(0, None))(x, key)
    assert len({*shared.tolist()}) == 1  # one draw for all
    want = jax.vmap(noisy)(x, jax.random.split(key, 7))
    assert len({*want.tolist()}) == 7
    for chunk_size in (None, 3):
        assert_same(auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size)(noisy)(x, key), want)


def test_items_of_different_lengths():
    """jax-ml/jax#17863."""

    def spread(x, mask):
        mean = jnp.sum(jnp.where(mask, x, 0)) / jnp.sum(mask).astype(x.dtype)
        return jnp.max(jnp.where(mask, jnp.abs(x - mean), 0))

    rows, lengths = wave(10), [3, 1, 4, 2]
    ends = np.cumsum(lengths)
    items = [np.asarray(rows)[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    want = jnp.stack([np.max(np.abs(x - np.mean(x))) for x in items])
    assert_same(auto_vmap(x="n", mask=Mask("n"))(spread)(Ragged(rows, lengths)), want)
