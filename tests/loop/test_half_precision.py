# SPDX-License-Identifier: MIT
"""Cotangents of what items share are added in float32, and rounded once, however a batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow, weekly
from rankax import Ragged, auto_vmap, checkpoint_chunked_scan, sliced_scan
from rankax.ext.equations import operations

MANY = 5000
CHUNKS = [1, 2, 16, 77, 1000, weekly(None)]
dtypes = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def drawn(dtype, *shape):
    return jnp.asarray(np.random.default_rng(2).uniform(size=shape), dtype)


def rounded(exact, dtype):
    return np.asarray(np.asarray(exact, np.float32), dtype)


def assert_rounded_once(found, exact):
    assert found.dtype in (jnp.bfloat16, jnp.float16)
    np.testing.assert_array_equal(np.asarray(found), rounded(exact, found.dtype))


def total(out):
    return out.astype(jnp.float32).sum()


def wide(x):
    return np.asarray(x).astype(np.float64)


OPTIONS = {
    "map": {},
    "sum": {"reduce": "sum"},
    "lanes": {"lockstep": False},
    "no checkpoint": {"checkpoint": False},
    "jit": {"jit": True},
    "sum in lanes": {"lockstep": False, "reduce": "sum"},
}


# In chunks: a map of all items at once is plain `jax.vmap`.
@dtypes
@pytest.mark.parametrize("chunk_size", [1, slow(2), 16, weekly(77), slow(1000)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shared_numbers(options, chunk_size, dtype):
    x = drawn(dtype, MANY)

    def item(w, x):
        out = w * x  # one number, or a vector
        return out.astype(jnp.float32) if "reduce" in options else out

    kernel = auto_vmap(w=0, x=0, chunk_size=chunk_size, **options)(item)
    gradient = jax.grad(lambda w: total(kernel(w, x)))(dtype(1))
    assert_rounded_once(gradient, wide(x).sum())

    of_vector = auto_vmap(w=1, x=0, chunk_size=chunk_size, **options)(item)
    gradient = jax.grad(lambda w: total(of_vector(w, x)))(jnp.ones(3, dtype))
    assert_rounded_once(gradient, np.full(3, wide(x).sum()))


@dtypes
def test_a_sum_of_all_items_at_once(dtype):
    """XLA:CPU adds 100,000 numbers of half precision in half precision."""
    x = drawn(dtype, 100_000) / 4
    kernel = auto_vmap(w=0, x=0, reduce="sum", chunk_size=None)
    kernel = kernel(lambda w, x: (w * x).astype(jnp.float32))
    assert_rounded_once(jax.jit(jax.grad(lambda w: kernel(w, x)))(dtype(1)), wide(x).sum())


@dtypes
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_what_a_kernel_closes_over(chunk_size, dtype):
    x = drawn(dtype, MANY)

    def loss(w):
        kernel = auto_vmap(x=0, chunk_size=chunk_size, reduce="sum")
        return kernel(lambda x: jnp.sum(w * x).astype(jnp.float32))(x)

    assert_rounded_once(jax.grad(loss)(jnp.ones(2, dtype)), np.full(2, wide(x).sum()))
    assert_rounded_once(jax.jit(jax.grad(loss))(jnp.ones(2, dtype)), np.full(2, wide(x).sum()))


@dtypes
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_rows_and_columns_of_pairs(chunk_size, dtype):
    rows, columns, w = drawn(dtype, 7), drawn(dtype, 1001), dtype(1)
    kernel = auto_vmap(0, 0, 0, chunk_size=chunk_size, reduce="sum")
    kernel = kernel(lambda x, y, w: (w * x).astype(jnp.float32) * y.astype(jnp.float32))
    of_rows, of_w = jax.grad(lambda x, w: kernel(x[:, None], columns, w), (0, 1))(rows, w)
    assert_rounded_once(of_rows, np.full(7, wide(columns).sum()))
    # The kernel itself rounds the cotangent of `w * x`, and so that of `w`, in each pair.
    each = rounded(rounded(wide(columns), dtype) * wide(rows)[:, None], dtype)
    np.testing.assert_allclose(wide(of_w), wide(each).sum(), rtol=2 * jnp.finfo(dtype).eps)


@dtypes
@pytest.mark.parametrize("chunk_size", [1, 10, "sqrt", None])
def test_what_a_scan_closes_over(chunk_size, dtype):
    x = drawn(dtype, MANY)

    def step(w):
        return lambda carry, x: (carry + (w * x).astype(jnp.float32), None)

    def loss(w):
        return checkpoint_chunked_scan(step(w), 0.0, x, chunk_size=chunk_size)[0]

    def sliced(w):
        return sliced_scan(step(w), 0.0, x, step=50)[0]

    assert_rounded_once(jax.grad(loss)(dtype(1)), wide(x).sum())
    assert_rounded_once(jax.grad(sliced)(dtype(1)), wide(x).sum())


@dtypes
def test_ragged_items_share_a_number(dtype):
    lengths = np.arange(1, 60)
    items = Ragged.from_list([drawn(dtype, n) for n in lengths])
    kernel = auto_vmap(x="n", w=0, chunk_size=2)
    kernel = kernel(lambda x, w: (w * x[0]).astype(jnp.float32))
    gradient = jax.grad(lambda w: kernel(items, w).sum())(dtype(1))
    assert_rounded_once(gradient, sum(wide(drawn(dtype, n))[0] for n in lengths))


@dtypes
def test_second_derivatives_and_outputs_keep_their_dtype(dtype):
    x = drawn(dtype, 300)
    kernel = auto_vmap(w=0, x=0, chunk_size=7)(lambda w, x: w * w * x)
    second = jax.grad(jax.grad(lambda w: total(kernel(w, x))))(dtype(1))
    np.testing.assert_allclose(wide(second), 2 * wide(x).sum(), rtol=jnp.finfo(dtype).eps)
    out, tangent = jax.jvp(lambda w: kernel(w, x), (dtype(1),), (dtype(1),))
    plain = jax.jvp(lambda w: jax.vmap(lambda x: w * w * x)(x), (dtype(1),), (dtype(1),))
    assert (out.dtype, tangent.dtype) == (dtype, dtype)
    np.testing.assert_array_equal(wide(out), wide(plain[0]))
    np.testing.assert_array_equal(wide(tangent), wide(plain[1]))


@dtypes
def test_a_matrix_is_rounded_once_a_chunk(dtype):
    """It is not mapped: the cotangent of a product of matrices is one of a whole chunk."""
    x, w = drawn(dtype, 400, 12), drawn(dtype, 12, 12)
    kernel = auto_vmap(w=2, x=1, chunk_size=10, reduce="sum")
    kernel = kernel(lambda w, x: jnp.sum((x @ w).astype(jnp.float32)))
    gradient = jax.grad(lambda w: kernel(w, x))(w)
    exact = np.repeat(wide(x).sum(0)[:, None], 12, 1)
    np.testing.assert_allclose(wide(gradient), exact, rtol=2 * float(jnp.finfo(dtype).eps))


@dtypes
@pytest.mark.parametrize("chunk_size", [slow(64), "auto"])
def test_pairs_that_multiply_are_products_of_matrices_backward(chunk_size, dtype):
    """Each pair had a cotangent of its own for each factor: 12 times the time of `jax.vmap`."""
    x, y = drawn(dtype, 512, 16), drawn(dtype, 384, 16)
    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=1, chunk_size=chunk_size)
    kernel = kernel(lambda x, y: jnp.exp(x @ y / 16))

    def loss(x, y):
        return total(kernel(x[:, None], y))

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    largest = max(size_of_largest(jax.make_jaxpr(gradient)(x, y).jaxpr), x.size, y.size)
    assert largest <= 256 * 256  # not of 16 numbers for each pair of a tile
    in_float32 = jax.grad(
        lambda x, y: jnp.sum(jnp.exp(x @ y.T / 16)),
        (0, 1),
    )(x.astype(jnp.float32), y.astype(jnp.float32))
    for found, exact in zip(gradient(x, y), in_float32, strict=True):
        np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0.03)


def size_of_largest(jaxpr):
    """Return how many numbers the largest array has that a program computes in a loop."""
    each = operations(jaxpr)
    inside = [v.aval.size for own in each if own.times > 1 for v in own.eqn.outvars]
    return max(inside, default=0)
