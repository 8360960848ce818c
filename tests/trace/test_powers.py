# SPDX-License-Identifier: MIT
"""Powers in chunks: products and roots, with the values and the derivatives of powers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import compilations, primitives
from rankax import auto_vmap, chunked_vmap

ON_CPU = jax.default_backend() == "cpu"
AS_PRODUCTS = (-4.0, -2.5, -2.0, -1.5, -0.5, 0.5, 1.5, 2.0, 2.5, 3.5, 4.0)
X = np.float32([0, -0.0, 1e-20, 0.3, 1, 2.7, 1e15, np.inf, -np.inf, np.nan, -2])


def of(exponent):
    return lambda x: x**exponent


@pytest.mark.parametrize("exponent", AS_PRODUCTS)
def test_powers_in_chunks_have_the_values_of_powers(exponent):
    power = of(exponent)
    assert primitives(chunked_vmap(power, 3), X)["pow"] == (not ON_CPU)
    assert primitives(chunked_vmap(power, 11), X)["pow"] == 1  # one chunk is plain `jax.vmap`
    got, expected = chunked_vmap(power, 3)(X), jax.jit(jax.vmap(power))(X)
    np.testing.assert_allclose(got, expected, rtol=5e-7)


@pytest.mark.quick("-1.5-1", "0.5-2", "2.5-3", "4.0-1")
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("exponent", [-1.5, 0.5, 2.5, 4.0])
def test_derivatives_are_those_of_powers(exponent, order):
    def derivative(fun):
        for _ in range(order):
            fun = jax.grad(lambda x, fun=fun: jnp.sum(fun(x)))
        return fun

    power, x = of(exponent), jnp.asarray(X[:9])
    expected = derivative(jax.vmap(power))(x)
    outside = derivative(chunked_vmap(power, 3))
    np.testing.assert_allclose(outside(x), expected, rtol=3e-6)
    np.testing.assert_allclose(jax.jit(outside)(x), expected, rtol=3e-6)
    inside = chunked_vmap(derivative(power), 3)
    np.testing.assert_allclose(inside(x), expected, rtol=3e-6)


def test_a_derivative_in_the_kernel_has_no_power():
    slope = chunked_vmap(jax.grad(lambda x: jnp.sum(x * x) ** 1.5), 2)
    assert primitives(slope, jnp.ones((4, 3)))["pow"] == (0 if ON_CPU else 2)


def test_a_power_in_a_scan_and_in_a_reduction():
    def kernel(x, y):
        step = lambda x, _: (x + (x - y) / jnp.sum((x - y) ** 2 + 1) ** 1.5, None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0]

    x, y = (jnp.asarray(np.random.default_rng(i).normal(size=(9, 3)), "float32") for i in (0, 1))
    sums = auto_vmap(1, 1, reduce="sum", reduce_axis=-1, chunk_size=4)(kernel)
    plain = lambda x, y: jax.vmap(lambda a: jax.vmap(kernel, (None, 0))(a, y).sum(0))(x)  # noqa: E731
    np.testing.assert_allclose(sums(x[:, None], y), plain(x, y), rtol=2e-5)
    grads = [
        jax.grad(lambda x, y, fun=fun: jnp.sum(jnp.sin(fun(x, y))), (0, 1))(x, y)
        for fun in (lambda x, y: sums(x[:, None], y), plain)
    ]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x: x**1.7,
        lambda x: x**5.0,
        lambda x: x**x,
        lambda x: 2.0**x,
        lambda x: x.astype("float16") ** 1.5,
        lambda x: lax.complex(x, x) ** 1.5,
    ],
)
def test_other_powers_stay(kernel):
    x = jnp.linspace(0.5, 2, 6, dtype="float32")
    assert primitives(chunked_vmap(kernel, 3), x)["pow"] == 1
    np.testing.assert_array_equal(chunked_vmap(kernel, 3)(x), jax.jit(jax.vmap(kernel))(x))


def test_a_derivative_of_nested_eager_calls_is_compiled_once():
    x = jnp.linspace(0.5, 2, 6, dtype="float32")
    inner = auto_vmap(1, chunk_size=1, reduce="sum", reduce_axis=-1)(lambda x: jnp.sum(x) ** 1.5)

    def slope(x):
        outer = auto_vmap(2, chunk_size=1)(lambda x: inner(x))
        return jax.grad(lambda x: jnp.sum(outer(x)))(x)

    x = jnp.reshape(x, (3, 2, 1))
    first, _ = compilations(slope, x)
    second, count = compilations(slope, x)
    assert count == 0
    np.testing.assert_array_equal(first, second)


@pytest.mark.optimized
@pytest.mark.skipif(not ON_CPU, reason="products are for XLA:CPU")
def test_powers_of_xla_call_the_c_library():
    text = jax.jit(jax.vmap(of(1.5))).lower(jnp.ones(1000)).compile().as_text()
    assert re.search(r" power\(", text)  # otherwise `_trace/powers.py` may go
