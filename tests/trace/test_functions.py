# SPDX-License-Identifier: MIT
"""Powers, sines and angles in chunks: the values and derivatives of JAX, without the C library."""

import ctypes
import ctypes.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import compilations, enable_x64, primitives
from rankax import auto_vmap, chunked_vmap
from rankax._trace.functions import with_own_functions
from rankax._trace.work import evaluates_functions

ON_CPU = jax.default_backend() == "cpu"
HOLDS = jax.__version_info__ >= (0, 12)  # a barrier; without it sines are left alone
SINES = ("cos", "sin", "tan")
AS_PRODUCTS = (-4.0, -2.5, -2.0, -1.5, -0.5, 0.5, 1.5, 2.0, 2.5, 3.5, 4.0)
X = np.float32([0, -0.0, 1e-20, 0.3, 1, 2.7, 1e15, np.inf, -np.inf, np.nan, -2])


def of(exponent):
    return lambda x: x**exponent


@pytest.mark.parametrize("exponent", AS_PRODUCTS)
@pytest.mark.quick("-1.5", "-4.0", "0.5", "2.0", "3.5")
def test_powers_in_chunks_have_the_values_of_powers(exponent):
    power = of(exponent)
    assert primitives(chunked_vmap(power, 3), X)["pow"] == (not ON_CPU)
    assert primitives(chunked_vmap(power, 11), X)["pow"] == 1  # one chunk is plain `jax.vmap`
    got, expected = chunked_vmap(power, 3)(X), jax.jit(jax.vmap(power))(X)
    np.testing.assert_allclose(got, expected, rtol=5e-7)


@pytest.mark.quick("2.5-3")
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


FUNCTIONS = {
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "cos": jnp.cos,
    "sin": jnp.sin,
    "tan": jnp.tan,
}
IN_NUMPY = {"acos": np.arccos, "asin": np.arcsin, "atan": np.arctan, "atan2": np.arctan2}
SPECIAL = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e38, -3e38])


def arguments(name):
    """Return arguments of all sizes, and among angles those next to multiples of a right angle."""
    rng, n = np.random.default_rng(0), 4000
    signs, wide = rng.choice([-1, 1], n), 10.0 ** rng.uniform(-37, 38, n)
    if name == "atan2":
        y, x = np.meshgrid(SPECIAL, SPECIAL)
        plane = rng.normal(size=(2, n)) * np.geomspace(1e-15, 1e15, n)
        pairs = [y.ravel(), plane[0]], [x.ravel(), rng.permutation(plane[1])]
        return [np.concatenate(numbers).astype("float32") for numbers in pairs]
    ranges = [rng.uniform(-1, 1, n), signs * wide, SPECIAL]
    if name in ("acos", "asin"):
        ranges = [rng.uniform(-1, 1, n), signs * (1 - 10.0 ** rng.uniform(-7, 0, n)), SPECIAL]
    if name in SINES:
        ranges += [rng.normal(size=n) * 100, np.round(rng.uniform(-1e6, 1e6, n)) * np.pi / 2]
    return [np.concatenate(ranges).astype("float32")]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.quick("sin", "atan2", "tan")
def test_functions_in_chunks_have_the_values_of_the_c_library(name):
    fun, args = FUNCTIONS[name], arguments(name)
    is_own = ON_CPU and (HOLDS or name not in SINES)
    assert primitives(chunked_vmap(fun, 1000), *args)[name] == (not is_own)
    assert primitives(chunked_vmap(fun, 10**6), *args)[name] == 1  # plain `jax.vmap`
    got = np.asarray(chunked_vmap(fun, 1000)(*args))
    with np.errstate(invalid="ignore"):
        expected = IN_NUMPY.get(name, getattr(np, name, None))(*(x.astype(float) for x in args))
    assert got.dtype == jnp.float32
    normal = abs(expected) > np.finfo("float32").tiny
    ulps = abs(got - expected)[normal] / np.spacing(abs(expected[normal]).astype("float32"))
    assert np.max(ulps, initial=0, where=np.isfinite(ulps)) <= 4
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.signbit(got)[normal], np.signbit(expected)[normal])
    np.testing.assert_allclose(got[~normal], expected[~normal], atol=2e-38)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(got)[zeros], np.signbit(expected)[zeros])


@pytest.mark.quick("2-atan2")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_are_those_of_the_functions(name, order):
    fun = FUNCTIONS[name]
    x = jnp.float32([0, 0.1, -0.3, 0.5, 0.8, -0.9, 0.7])
    args = [x, x[::-1]][: 2 if name == "atan2" else 1]

    def derivative(fun):
        for i in range(order):
            fun = jax.grad(lambda *args, fun=fun: jnp.sum(fun(*args)), i % len(args))
        return fun

    expected = derivative(jax.vmap(fun))(*args)
    outside = derivative(chunked_vmap(fun, 3))
    np.testing.assert_allclose(outside(*args), expected, rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(jax.jit(outside)(*args), expected, rtol=3e-6, atol=1e-6)
    inside = chunked_vmap(derivative(fun), 3)
    np.testing.assert_allclose(inside(*args), expected, rtol=3e-6, atol=1e-6)
    if ON_CPU and HOLDS:
        counts = primitives(inside, *args)
        assert not counts["cos"]
        assert not counts["sin"]
    if name == "atan2":  # with one argument that does not move
        grads = [
            jax.grad(lambda y, f=f: jnp.sum(f(y, args[1]) ** 2))(x)
            for f in (chunked_vmap(fun, 3), jax.vmap(fun))
        ]
        np.testing.assert_allclose(*grads, rtol=3e-6, atol=1e-6)


@pytest.mark.skipif(not ON_CPU, reason="the functions are for XLA:CPU")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_still_count_as_functions(name):
    args = [jnp.ones(())] * (2 if name == "atan2" else 1)
    assert evaluates_functions(with_own_functions(jax.make_jaxpr(FUNCTIONS[name])(*args).jaxpr))


def test_tangents_and_batches_of_derivatives():
    x, v = jnp.linspace(-3, 3, 7), jnp.linspace(1, 2, 7)
    for fun in (jnp.sin, jnp.arctan):
        chunked, plain = chunked_vmap(fun, 3), jax.vmap(fun)
        for got, want in zip(*(jax.jvp(f, (x,), (v,)) for f in (chunked, plain)), strict=True):
            np.testing.assert_allclose(got, want, rtol=3e-6)
        jacobians = [jax.jacrev(f)(x) for f in (chunked, plain)]
        np.testing.assert_allclose(*jacobians, rtol=3e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_sines_of_other_dtypes_stay(dtype):
    x = jnp.linspace(0.5, 2, 6).astype(dtype)
    assert primitives(chunked_vmap(jnp.sin, 3), x)["sin"] == 1
    np.testing.assert_array_equal(chunked_vmap(jnp.sin, 3)(x), jax.jit(jax.vmap(jnp.sin))(x))


def test_sines_that_a_library_computes_stay():
    x = jnp.ones((4, 32))
    assert primitives(chunked_vmap(jnp.sin, 2), x)["sin"] == 1
    assert primitives(chunked_vmap(jnp.sin, 2), x[:, 1:])["sin"] == (not (ON_CPU and HOLDS))


def test_a_sine_of_double_precision_stays():
    with enable_x64():
        x = jnp.linspace(0.5, 2, 6)
        assert x.dtype == jnp.float64
        assert primitives(chunked_vmap(jnp.sin, 3), x)["sin"] == 1


@pytest.mark.optimized
@pytest.mark.skipif(not ON_CPU, reason="the functions are for XLA:CPU")
@pytest.mark.parametrize("name", ["sin", "cos", "atan2"])
def test_functions_of_xla_are_those_of_the_c_library(name):
    in_c = getattr(ctypes.CDLL(ctypes.util.find_library("m")), f"{name}f")
    in_c.restype, numbers = ctypes.c_float, np.random.default_rng(0).uniform(-1, 1, (2, 1000))
    args = numbers.astype("float32")[: 2 if name == "atan2" else 1]
    expected = [in_c(*map(ctypes.c_float, each)) for each in zip(*args, strict=True)]
    in_a_loop = jax.jit(lambda *args: lax.map(lambda x: FUNCTIONS[name](*x), args))
    # Otherwise this function may leave `_trace/functions.py`.
    np.testing.assert_array_equal(in_a_loop(*args), np.float32(expected))


@pytest.mark.optimized
@pytest.mark.skipif(not ON_CPU, reason="products are for XLA:CPU")
def test_powers_of_xla_call_the_c_library():
    text = jax.jit(jax.vmap(of(1.5))).lower(jnp.ones(1000)).compile().as_text()
    assert re.search(r" power\(", text)  # otherwise `_trace/functions.py` may go
