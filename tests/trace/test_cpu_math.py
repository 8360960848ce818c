# SPDX-License-Identifier: MIT
"""``cpu_math=True``: the values and derivatives of JAX, without the C library."""

import ctypes
import ctypes.util
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, compilations, enable_x64, primitives, slow, weekly
from rankax import auto_vmap, chunked_jacfwd, chunked_reduce, chunked_vmap, options
from rankax.ext import cpu_math

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ < (0, 12),
    reason="the option does nothing here",
)
chunked = functools.partial(chunked_vmap, cpu_math=True)
X = np.float32([0, -0.0, 1e-20, 0.3, 1, 2.7, 1e15, np.inf, -np.inf, np.nan, -2])


def of(exponent):
    return lambda x: x**exponent


def derivative(fun, order, *args):
    """Differentiate the sum so many times, each time with respect to the next argument."""
    for i in range(order):
        fun = jax.grad(lambda *args, fun=fun: jnp.sum(fun(*args)), i % len(args))
    return fun


def check_derivatives(fun, order, *args):
    """Compare the derivative of chunks, and chunks of the derivative, with those of `jax.vmap`."""
    expected = jax.jit(derivative(jax.vmap(fun), order, *args))(*args)
    outside = derivative(chunked(fun, 3), order, *args)
    inside = chunked(derivative(fun, order, *args), 3)
    for got in (outside(*args), jax.jit(outside)(*args), inside(*args)):
        assert_same(got, expected, rtol=3e-6)
    return primitives(inside, *args)


@pytest.mark.parametrize(("exponent", "order"), [(2.5, 2), weekly(2.5, 3), slow(-1.5, 1)])
def test_derivatives_are_those_of_powers(exponent, order):
    check_derivatives(of(exponent), order, jnp.asarray(X[2:7]))


def test_a_derivative_in_the_kernel_has_no_power():
    slope = chunked(jax.grad(lambda x: jnp.sum(x * x) ** 1.5), 2)
    assert primitives(slope, jnp.ones((4, 3)))["pow"] == 0


def test_a_power_in_a_scan():
    def kernel(x):
        step = lambda x, _: (x + x / jnp.sum(x**2 + 1) ** 1.5, None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0]

    x = jnp.linspace(-1, 1, 21).reshape(7, 3)
    assert primitives(chunked(kernel, 3), x)["pow"] == 0
    got, want = (
        jax.jit(jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(x)
        for f in (chunked(kernel, 3), jax.vmap(kernel))
    )
    assert_same(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    "kernel",
    [lambda x: x**1.7, lambda x: x**5.0, lambda x: x**x, lambda x: lax.complex(x, x) ** 1.5],
    ids=["1.7", "5", "x", "complex"],
)
def test_other_powers_stay(kernel):
    x = jnp.linspace(0.5, 2, 6, dtype="float32")
    assert primitives(chunked(kernel, 3), x)["pow"] == 1
    np.testing.assert_array_equal(chunked(kernel, 3)(x), jax.jit(jax.vmap(kernel))(x))


def test_a_derivative_of_nested_eager_calls_is_compiled_once():
    x = jnp.linspace(0.5, 2, 6, dtype="float32")
    inner = auto_vmap(1, cpu_math=True, chunk_size=1, reduce="sum", reduce_axis=-1)(
        lambda x: jnp.sum(x) ** 1.5
    )

    def slope(x):
        outer = auto_vmap(2, cpu_math=True, chunk_size=1)(lambda x: inner(x))
        return jax.grad(lambda x: jnp.sum(outer(x)))(x)

    x = jnp.reshape(x, (3, 2, 1))
    first, _ = compilations(slope, x)
    second, count = compilations(slope, x)
    assert count == 0
    np.testing.assert_array_equal(first, second)


FUNCTIONS = {n: getattr(jnp, n) for n in ("acos", "asin", "atan", "atan2", "cos", "sin", "tan")}
# Units in the last place, as the docstring of `auto_vmap` says.
MOST_ULPS = {name: 3 if name in ("cos", "sin") else 4 for name in FUNCTIONS}
SPECIAL = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e38, -3e38])


def floats(count):
    """Return every so many floats, by their bits, without subnormal ones, infinities and NaN."""
    bits = np.linspace(0, 2**32 - 1, count).astype(np.uint32).view(np.float32)
    return bits[np.isfinite(bits) & (abs(bits) >= np.finfo("float32").tiny)]


def arguments(name, count):
    """Return a sample of all floats, and numbers near those where a function does something."""
    rng, n = np.random.default_rng(0), 4000
    sample = [floats(count), SPECIAL]
    if name == "atan2":
        y, x = np.meshgrid(SPECIAL, SPECIAL)
        plane = rng.normal(size=(2, n)) * np.geomspace(1e-15, 1e15, n)
        pairs = [y.ravel(), plane[0]], [x.ravel(), rng.permutation(plane[1])]
        sample = [[*pairs[0], sample[0]], [*pairs[1], rng.permutation(sample[0])]]
        return [np.concatenate(numbers).astype("float32") for numbers in sample]
    if name in ("acos", "asin"):
        near = rng.choice([-1, 1], n) * (1 - 10.0 ** rng.uniform(-7, 0, n))
        sample = [sample[0][abs(sample[0]) <= 1], SPECIAL, near]
    if name in ("cos", "sin", "tan"):  # and next to multiples of a right angle
        sample += [rng.normal(size=n) * 100, np.round(rng.uniform(-1e6, 1e6, n)) * np.pi / 2]
    return [np.concatenate(sample).astype("float32")]


@pytest.mark.parametrize("count", [2**17 + 1, weekly(2**22 + 1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_values_of_the_c_library(name, count):
    fun, args = FUNCTIONS[name], arguments(name, count)
    assert primitives(chunked(fun, 1000), *args)[name] == 0
    assert primitives(chunked(fun, None), *args)[name] == 0
    assert primitives(chunked_vmap(fun, 1000), *args)[name] == 1
    got = np.asarray(chunked(fun, 4096)(*args))
    with np.errstate(invalid="ignore", under="ignore"):
        expected = getattr(np, name)(*(x.astype(float) for x in args))
    assert got.dtype == jnp.float32
    assert ulps(got, expected) <= MOST_ULPS[name]
    normal = abs(expected) >= np.finfo("float32").tiny
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_allclose(got[~normal], expected[~normal], atol=2e-38)
    signed = normal | (expected == 0)
    np.testing.assert_array_equal(np.signbit(got)[signed], np.signbit(expected)[signed])


@pytest.mark.parametrize("count", [2**17 + 1, weekly(2**22 + 1)])
@pytest.mark.parametrize("exponent", [-3.5, 0.5, 1.5, weekly(-2.0), weekly(4.0)])
def test_powers_have_the_values_of_the_c_library(exponent, count):
    fun, x = of(exponent), np.concatenate([abs(floats(count)), X])
    assert primitives(chunked(fun, 4096), x)["pow"] == 0
    assert primitives(chunked(fun, None), x)["pow"] == 0
    got, expected = np.asarray(chunked(fun, 4096)(x)), np.asarray(jax.jit(jax.vmap(fun))(x))
    # A power below one may be infinite above a quarter of the largest float.
    is_large = (exponent < 0) & (expected > np.finfo("float32").max / 4)
    assert np.all(np.isinf(got[is_large]) | (got[is_large] > np.finfo("float32").max / 5))
    np.testing.assert_allclose(got[~is_large], expected[~is_large], rtol=5e-7, atol=2e-38)


def ulps(got, expected):
    """Return the largest error, where the value is a normal number."""
    normal = (abs(expected) >= np.finfo("float32").tiny) & (abs(expected) < np.finfo("float32").max)
    units = np.spacing(abs(expected[normal]).astype("float32")).astype(float)
    return np.max(abs(got.astype(float)[normal] - expected[normal]) / units)


@pytest.mark.parametrize(
    ("name", "order"),
    [("atan2", 2), slow("tan", 2), slow("acos", 1), weekly("sin", 3), weekly("atan", 3)],
)
def test_derivatives_are_those_of_the_functions(name, order):
    fun = FUNCTIONS[name]
    x = jnp.float32([0, 0.1, -0.3, 0.5, 0.8, -0.9, 0.7])
    args = [x, x[::-1]][: 2 if name == "atan2" else 1]
    counts = check_derivatives(fun, order, *args)
    assert not counts["cos"]
    assert not counts["sin"]
    if name == "atan2":  # with one argument that does not move
        grads = [
            jax.grad(lambda y, f=f: jnp.sum(f(y, args[1]) ** 2))(x)
            for f in (chunked(fun, 3), jax.vmap(fun))
        ]
        assert_same(*grads, rtol=3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "float64"])
def test_sines_of_other_dtypes_stay(dtype):
    with enable_x64():
        x = jnp.linspace(0.5, 2, 6).astype(dtype)
        assert primitives(chunked(jnp.sin, 3), x)["sin"] == 1
        np.testing.assert_array_equal(chunked(jnp.sin, 3)(x), jax.jit(jax.vmap(jnp.sin))(x))


@pytest.mark.parametrize("options", [{}, {"batched": True}], ids=str)
def test_sines_of_many_numbers_in_an_item_stay(options):
    """A library of XLA computes those faster, where it sums them."""
    for count, stays in ((31, False), (32, True)):
        x = jnp.ones((40, count))
        kernel = auto_vmap(1, chunk_size=20, cpu_math=True, **options)(jnp.sin)
        gradient = jax.grad(lambda x, kernel=kernel: jnp.sum(kernel(x)))
        assert bool(primitives(kernel, x)["sin"]) == stays
        assert bool(primitives(gradient, x)["cos"]) == stays


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["sin", "cos", "atan2"])
def test_functions_of_xla_are_those_of_the_c_library(name):
    in_c = getattr(ctypes.CDLL(ctypes.util.find_library("m")), f"{name}f")
    in_c.restype, numbers = ctypes.c_float, np.random.default_rng(0).uniform(-1, 1, (2, 1000))
    args = numbers.astype("float32")[: 2 if name == "atan2" else 1]
    expected = [in_c(*map(ctypes.c_float, each)) for each in zip(*args, strict=True)]
    in_a_loop = jax.jit(lambda *args: lax.map(lambda x: FUNCTIONS[name](*x), args))
    # Otherwise this function may leave `ext/cpu_math.py`.
    np.testing.assert_array_equal(in_a_loop(*args), np.float32(expected))


@pytest.mark.optimized
def test_powers_of_xla_call_the_c_library():
    text = jax.jit(jax.vmap(of(1.5))).lower(jnp.ones(1000)).compile().as_text()
    assert re.search(r" power\(", text)  # otherwise `ext/cpu_math.py` may go


# Where it acts.


def calls(fun, *args):
    """Count the sines that a program has, and the calls of ours."""
    counts = primitives(fun, *args)
    return counts["sin"], counts["rankax_call"]


Y = np.linspace(-3, 3, 12, dtype=np.float32)


@pytest.mark.parametrize(("size", "jit"), [(None, True), (5, False)])
def test_calls_with_and_without_chunks(size, jit):
    plain = auto_vmap(0, chunk_size=size, jit=jit)(lambda x: 2 * jnp.sin(x))
    kernel = plain.with_options(cpu_math=True)
    assert calls(plain, Y)[0] == 1
    assert calls(kernel, Y) == (0, calls(plain, Y)[1] + 1)
    assert_same(kernel(Y), 2 * jnp.sin(Y), rtol=3e-7)
    assert calls(chunked_vmap(jnp.sin, size), Y)[0] == 1
    assert calls(chunked(jnp.sin, size), Y)[0] == 0
    assert calls(jax.vmap(kernel), Y[None])[0] == 0
    gradient = jax.grad(lambda x: jnp.sum(kernel(x)))
    assert primitives(gradient, Y)["cos"] == 0
    assert_same(gradient(Y), 2 * jnp.cos(Y), rtol=3e-6)


OTHER_OPTIONS = {
    "a sum": {"reduce": "sum", "chunk_size": 5},
    "a batch": {"batched": True, "chunk_size": 5},
    "lanes": {"lockstep": False, "chunk_size": 3},
}


@pytest.mark.parametrize("name", ["a sum", "a batch", slow("lanes")])
def test_it_goes_with_other_options(name):
    def kernel(x):
        if name == "lanes":
            return lax.while_loop(lambda y: abs(y) > 1, lambda y: jnp.sin(y) * 0.9, x)
        return jnp.sin(x) * x

    plain = auto_vmap(0, **OTHER_OPTIONS[name])(kernel)
    own = plain.with_options(cpu_math=True)
    assert calls(plain, Y)[0] > 0
    assert calls(own, Y)[0] == 0
    assert_same(own(Y), plain(Y), rtol=3e-6)
    gradients = [jax.grad(lambda x, f=f: jnp.sum(f(x)))(Y) for f in (own, plain)]
    assert_same(*gradients, rtol=3e-6)


def test_a_scope_decides_where_nothing_else_does():
    kernel = auto_vmap(0, chunk_size=5)(jnp.sin)
    with options(cpu_math=True):
        assert calls(kernel, Y)[0] == 0
        assert calls(kernel.with_options(cpu_math=False), Y)[0] == 1
        assert calls(chunked_reduce(jnp.sin, "sum", 5), Y)[0] == 0
        assert calls(chunked_vmap(jnp.sin, 5, cpu_math=False), Y)[0] == 1
        assert primitives(chunked_jacfwd(jnp.sin, chunk_size=5), Y)["cos"] == 1  # outside of chunks
        with options(cpu_math=False):
            assert calls(chunked_vmap(jnp.sin, 5), Y)[0] == 1
            assert calls(chunked(jnp.sin, 5), Y)[0] == 0


def test_without_batch_axes_the_kernel_is_simply_called():
    kernel = auto_vmap(0, cpu_math=True)(lambda x: jnp.sin(x) if x > 0 else x)
    assert_same(kernel(jnp.float32(2)), jnp.sin(jnp.float32(2)), rtol=0)


# What `plan` says.


def test_a_plan_shows_where_it_would_help():
    def kernel(x):
        return lax.fori_loop(0, 7, lambda _, y: y + jnp.sin(y), x) + jnp.exp(x)

    plain = auto_vmap(0, chunk_size=5)(kernel)
    note = "calls sin 7 times per item; cpu_math=True computes them about 3 times as fast"
    assert plain.plan(Y).notes == (note,)
    assert str(plain.plan(Y)).endswith(f"  {note}")
    assert plain.with_options(cpu_math=True).plan(Y).notes == ()
    several = auto_vmap(1, chunk_size=2)(lambda x: jnp.sum(jnp.arctan(x)) + x[0] ** 1.5)
    assert several.plan(jnp.ones((6, 3))).notes == (
        "calls atan 3 times and pow 1 time per item; "
        "cpu_math=True computes them about 10 to 18 times as fast",
    )
    at_once = auto_vmap(0, chunk_size=4, batched=True)(lambda x: jnp.sin(x) * 2 + x**1.5)
    (note,) = at_once.plan(jnp.ones(16)).notes
    assert note.startswith("calls sin 1 time and pow 1 time per item;")
    assert auto_vmap(0, chunk_size=5)(jnp.tanh).plan(Y).notes == ()


# Where it does nothing.


def test_a_collective_keeps_its_axis():
    """It would see one item of a program for one item."""

    def centred(x):
        return jnp.sin(x) - lax.pmean(x, "i")

    want = jax.vmap(centred, axis_name="i")(Y)
    assert_same(chunked_vmap(centred, None, axis_name="i", cpu_math=True)(Y), want)


def test_elsewhere_a_call_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(cpu_math, "HOLDS", False)
    kernel = auto_vmap(0, jit=True, cpu_math=True)(jnp.sin)
    assert str(jax.make_jaxpr(kernel)(Y)) == str(jax.make_jaxpr(jax.vmap(jnp.sin))(Y))
    assert calls(chunked(jnp.sin, 5), Y)[0] == 1
    assert auto_vmap(0, chunk_size=5)(jnp.sin).plan(Y).notes == ()


def test_an_angle_beside_a_number_is_replaced():
    fun = lambda x: jnp.arctan2(x, 1.0) + jnp.arctan2(0.5, x)  # noqa: E731
    kernel = chunked(fun, 5)
    assert primitives(kernel, Y)["atan2"] == 0
    got, want = (jax.value_and_grad(lambda x, f=f: jnp.sum(f(x)))(Y) for f in (kernel, fun))
    assert_same(got, want, rtol=1e-5)


# Without the option.

ELEMENTWISE = {
    "exp": lax.exp,
    "power 1.5": of(1.5),
    **{name: getattr(lax, name) for name in ("tanh", "rsqrt", "cos", "log1p", "erf", "lgamma")},
}
# What XLA itself compiles in another way in a loop: in `lax.map` as well.
OF_XLA = {"atan": lax.atan, "asinh": lax.asinh, "cbrt": lax.cbrt, "tan": lax.tan}
OFTEN = ("exp", "power 1.5", "atan")


@pytest.fixture
def _as_users():
    """Compile as users do: without optimizations, programs differ more."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)  # as in `conftest.py`


@pytest.mark.usefixtures("_as_users")
@pytest.mark.parametrize(
    "name", [*OFTEN, *(weekly(name) for name in (*ELEMENTWISE, *OF_XLA) if name not in OFTEN)]
)
def test_chunks_alone_change_no_bit(name):
    fun = {**ELEMENTWISE, **OF_XLA}[name]
    x = np.random.default_rng(0).uniform(0.01, 0.99, 20_000).astype("float32")
    got = jax.jit(chunked_vmap(fun, 4000))(x)
    np.testing.assert_array_equal(got, jax.jit(lambda x: lax.map(fun, x, batch_size=4000))(x))
    if name not in OF_XLA:
        np.testing.assert_array_equal(got, jax.jit(jax.vmap(fun))(x))
