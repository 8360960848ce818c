# SPDX-License-Identifier: MIT
"""`Gram` with ``center=True``, against NumPy in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, refusal, slow, temporary_bytes
from rankax import auto_vmap, chunked_jacfwd, chunked_jacrev, chunked_reduce
from rankax.reductions import Gram

DRAW = np.random.default_rng(3).normal
CENTERED = Gram(center=True)


def of_rows(x):
    off = x - x.mean(0, keepdims=True) if len(x) else x
    return off.conj().T @ off


def tree(v):
    return {"a": v[:1], "b": v[1:]}


@pytest.mark.parametrize("size", [5, slow(1), slow(2), slow(None)])
@pytest.mark.parametrize("dtype", ["float32", "complex64", slow("float16")])
@pytest.mark.parametrize("count", [23, 0, slow(1), slow(2)])
def test_values_and_gradients(count, dtype, size):
    x = DRAW(size=(count, 4)) + 1j * DRAW(size=(count, 4)) * (dtype == "complex64")
    x = jnp.asarray(x.astype(dtype) if dtype == "complex64" else x.real.astype(dtype))

    def loss(gram):
        return lambda x: jnp.sum(jnp.sin(jnp.real(gram(x))))

    plain = jax.grad(loss(of_rows))(x.astype("complex64" if dtype == "complex64" else "float32"))
    rough = {"rtol": 1e-2, "atol": 3e-2} if dtype == "float16" else {"rtol": 1e-3, "atol": 1e-4}
    gram = jax.jit(chunked_reduce(tree, CENTERED, size))
    want = of_rows(np.asarray(x, "complex128" if dtype == "complex64" else "float64"))
    assert_same(gram(x), want.astype(dtype), **rough)
    assert_same(jax.jit(jax.grad(loss(gram)))(x), plain.astype(dtype), **rough)


def test_no_large_numbers_are_subtracted():
    x = jnp.asarray(DRAW(size=(100_000, 2)) + [1e4, -3e4], jnp.float32)
    got = chunked_reduce(lambda v: v, CENTERED, 64)(x) / 100_000
    want = np.cov(np.asarray(x, "float64"), rowvar=False, bias=True)
    assert np.abs(got - want).max() < 1e-4  # as `jnp.cov`; without the means, more than 10
    far = x.at[0].set(0)  # the first item is far from the mean
    got = chunked_reduce(lambda v: v, CENTERED, 1000)(far) / 100_000
    assert_same(got, np.cov(far, rowvar=False, bias=True).astype("float32"), rtol=1e-4)


def test_items_that_count_and_other_axes():
    x, real = jnp.asarray(DRAW(size=(3, 10, 2)) + 500, jnp.float32), jnp.arange(10) % 3 != 0
    reduce = Gram(center=True, where="real")
    gram = auto_vmap(x=1, real=0, reduce=reduce, reduce_axis=-1, chunk_size=4)(lambda x, real: x)
    want = [of_rows(np.asarray(part, "float64")[np.asarray(real)]) for part in x]
    assert_same(gram(x, real), np.stack(want).astype("float32"), rtol=1e-3)
    nan = jnp.where(real[None, :, None], x, jnp.nan)
    assert_same(gram(nan, real), gram(x, real))
    slope = jax.jit(jax.grad(lambda x: jnp.sum(gram(x, real)[:, 0, 1])))
    counted = np.asarray(real)
    plain = jax.grad(lambda x: sum(of_rows(part[counted])[0, 1] for part in x))(x)
    assert_same(slope(nan), plain, rtol=1e-3, atol=1e-3)


def test_second_derivatives_and_memory():
    x = jnp.asarray(DRAW(size=(11, 3)), jnp.float32)

    def loss(gram, s, x):
        return jnp.sum(jnp.cos(gram(jnp.tanh(s * x))))

    gram = chunked_reduce(lambda v: v, CENTERED, 4)
    hessian = jax.jit(jax.hessian(loss, 1), static_argnums=0)
    hessians = [hessian(each, jnp.float32(0.7), x) for each in (gram, of_rows)]
    assert_same(*hessians, rtol=1e-3)
    wide = chunked_reduce(lambda v: jnp.sin(jnp.arange(60.0) * v), CENTERED, 100)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(wide(x))))
    few, many = (temporary_bytes(slope, jnp.ones(n)) for n in (1000, 20_000))
    assert many < few + 300_000  # a state for each tile would take 2.7 MB more


def test_what_is_refused():
    assert "center must be True or False, got 1" in refusal(TypeError, lambda: Gram(center=1))
    assert "weights are for Jacobians" in refusal(TypeError, lambda: Gram(jnp.ones(3), True))
    for jacobian in (chunked_jacfwd, chunked_jacrev):
        call = jacobian(jnp.sin, reduce=CENTERED)
        words = "(sin): Gram(center=True) is not for rows of a Jacobian"
        assert words in refusal(ValueError, call, jnp.ones(3))
    counts = chunked_reduce(lambda v: v, CENTERED, 2)
    assert "center=True needs floats" in refusal(ValueError, counts, jnp.ones((3, 2), int))
