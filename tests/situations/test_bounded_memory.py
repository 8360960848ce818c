# SPDX-License-Identifier: MIT
"""Reported elsewhere: batches that do not fit, or whose length is not a multiple of the chunk.

Memory is what the compiled program says that it needs besides its arguments and results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, compilations, temporary_bytes
from plain import item_by_item
from rankax import SplitKey, auto_vmap, chunked_jacfwd, chunked_vmap

MB = 1_000_000


def sorted_angles(x):
    """An item that needs 16 kB, whatever the compiler does: its numbers have to be sorted."""
    return jnp.sort(jnp.sin(jnp.linspace(0.0, 40.0, 4096) * x))[1000] * x


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gradient(mapped):
    return jax.grad(lambda *args: jnp.sum(mapped(*args)))


@pytest.mark.optimized
def test_a_batch_too_big_for_a_gradient():
    """jax-ml/jax#11319, jax-ml/jax#19614: `lax.map` has chunks, and stores what all items need."""
    many = floats(2000)
    whole = temporary_bytes(gradient(jax.vmap(sorted_angles)), many)
    by_map = temporary_bytes(gradient(lambda x: lax.map(sorted_angles, x, batch_size=20)), many)
    assert min(whole, by_map) > 60 * MB
    kernel = auto_vmap(0, chunk_size=20)(sorted_angles)
    assert temporary_bytes(gradient(kernel), many) < 5 * MB
    x = jnp.linspace(0.5, 1.5, 7)
    want = item_by_item(jax.grad(sorted_angles), [0], x)
    assert_same(gradient(kernel.with_options(chunk_size=3))(x), want, rtol=1e-4)


def sinkhorn(softmin):
    """Return the transport cost of two clouds as a function of the first, after two rounds."""

    def cost(x, y):
        def cycle(f, _):
            g = softmin(y[:, None], x, f)
            return softmin(x[:, None], y, g), jnp.mean(g)

        f, g = lax.scan(cycle, jnp.zeros(len(x)), None, length=2)
        return jnp.mean(f) + g[-1]

    return cost


def half_squared(x, y, potential):
    return potential - jnp.sum((x - y) ** 2) / 2


def dense_softmin(x, y, potential):
    pairs = jax.vmap(jax.vmap(half_squared, (None, 0, 0)), (0, None, None))
    return -jax.nn.logsumexp(pairs(x[:, 0], y, potential), axis=1) + np.float32(np.log(len(y)))


def softmin(x, y, potential):
    log_sum = auto_vmap(1, 1, 0, reduce="logsumexp", reduce_axis=-1)(half_squared)
    return -log_sum(x, y, potential) + np.float32(np.log(len(y)))


@pytest.mark.optimized
def test_the_gradient_of_sinkhorn():
    """ott-jax/ott#20, PythonOT/POT#565: no matrix of all pairs is stored."""
    clouds = floats(2000, 2), floats(1500, 2)
    matrix = 4 * 2000 * 1500
    assert temporary_bytes(jax.grad(sinkhorn(dense_softmin)), *clouds) > matrix
    assert temporary_bytes(jax.grad(sinkhorn(softmin)), *clouds) < matrix / 4
    x, y = jax.random.normal(jax.random.key(0), (2, 12, 2))
    costs = [jax.value_and_grad(sinkhorn(each)) for each in (softmin, dense_softmin)]
    got, want = jax.jit(lambda x, y: [cost(x, y) for cost in costs])(x, y[:9] + 1)
    assert_same(got, want, rtol=1e-4)


@pytest.mark.optimized
def test_a_mean_of_many_draws():
    """pyro-ppl/numpyro#1503: memory must not grow with the number of draws."""

    def draw(scale, key):
        return sorted_angles(scale * jax.random.normal(key))

    def expectation(count):
        return auto_vmap(
            scale=0, key=SplitKey, batch_shape=count, chunk_size=8, reduce="mean", reduce_axis=-1
        )(draw)

    one, key = floats(), jax.random.key(0)
    few, many = (
        temporary_bytes(jax.grad(expectation(n)), one, jax.eval_shape(lambda: key))
        for n in (800, 80_000)
    )
    assert few < 2 * MB
    assert many < 1.1 * few
    keys = jax.random.split(key, 5)
    want = jnp.mean(item_by_item(lambda k: draw(1.5, k), [0], keys))
    assert_same(expectation(5)(jnp.float32(1.5), key), want)


@pytest.mark.optimized
def test_a_jacobian_in_chunks():
    """jax-ml/jax#215, PlasmaControl/DESC#826."""

    def total(x):
        return jnp.sum(jnp.sort(jnp.sin(jnp.outer(x, x)).ravel())[::3])

    def slopes(x):
        return jnp.stack([total(x), total(2 * x)])

    x = floats(300)
    at_once = temporary_bytes(jax.jacfwd(slopes), x)
    assert at_once > 10 * temporary_bytes(chunked_jacfwd(slopes, chunk_size=10), x)
    x = jnp.linspace(0.1, 1.0, 7)
    assert_same(chunked_jacfwd(slopes, chunk_size=3)(x), jax.jacfwd(slopes)(x), rtol=1e-4)


@pytest.mark.parametrize("length", [1, 7])
def test_a_length_that_the_chunk_does_not_divide(length):
    """netket/netket#1006, pytorch/pytorch#165616: no error, no item twice, one trace.

    The documentation of `lax.map` shows that it traces the remainder, too.
    """
    x = jnp.linspace(-1.0, 2.0, length)
    traces = []

    def kernel(x):
        traces.append(x)
        return {"item": x**2, "sign": x > 0}

    lax.map(kernel, x, batch_size=3)
    assert len(traces) == (2 if length == 7 else 1)
    want = item_by_item(kernel, [0], x)
    traces.clear()
    assert_same(jax.jit(chunked_vmap(kernel, 3))(x), want)
    assert len(traces) == 1
    total = auto_vmap(0, chunk_size=3, reduce={"item": "sum", "sign": "sum"})(kernel)(x)
    assert_same(total, {"item": jnp.sum(want["item"]), "sign": jnp.sum(want["sign"])})


def test_batches_of_new_lengths_are_not_compiled_again():
    """jax-ml/jax#2521, jax-ml/jax#803."""

    def norm(x):
        return jnp.sqrt(x @ x)

    kernel = auto_vmap(1, jit=True, bucket=(8, 16))(norm)
    kernel(jnp.ones((7, 3)))
    for length in (6, 5, 8):
        x = np.cos(np.arange(3.0 * length, dtype=np.float32)).reshape(length, 3)
        got, programs = compilations(kernel, x)
        assert programs == 0
        assert_same(jnp.asarray(got), item_by_item(norm, [1], jnp.asarray(x)))
