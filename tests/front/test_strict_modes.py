# SPDX-License-Identifier: MIT
"""Every public function in JAX's strict modes, in threads, and through `jax.export`."""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import REMAT3, assert_same, at_each_run, enable_x64, slow
from rankax import (
    auto_vmap,
    checkpoint_chunked_scan,
    checkpoint_while_loop,
    chunked_vmap,
    sliced_scan,
)


def kernel(s, v):
    return jnp.sin(s) * jnp.dot(v, v), v + s


def step(carry, x):
    carry = jnp.sin(carry) * x + carry
    return carry, carry * x


def item(x, w):
    return jnp.dot(x, w) * jnp.cos(x)


S = jnp.asarray(np.linspace(0.0, 1.0, 4)[:, None])
V = jnp.asarray(np.linspace(-1.0, 1.0, 15).reshape(5, 3))
ROWS = jnp.asarray(np.linspace(0.0, 1.0, 21).reshape(7, 3))
W = jnp.asarray(np.linspace(1.0, 2.0, 3))
XS, C = jnp.asarray(np.linspace(0.5, 1.5, 10)), jnp.float32(0.5)


def damped(x, c):
    return jnp.sin(x) * c


def outer(s, v):
    return jax.vmap(jax.vmap(kernel, in_axes=(None, 0)), in_axes=(0, None))(s.reshape(4), v)


def scanned(window=slice(None)):
    """Return what a scan gives that keeps the steps in this window."""

    def plain(c, xs):
        carry, ys = jax.lax.scan(step, c, xs)
        return carry, ys[window]

    return plain


# What is called, its arguments, and the plain program that means the same.
CASES = {
    "auto_vmap": (auto_vmap(0, 1)(kernel), (S, V), outer),
    "auto_vmap, jit and chunks": (auto_vmap(0, 1, chunk_size=7, jit=True)(kernel), (S, V), outer),
    "chunked_vmap": (chunked_vmap(item, 3, (0, None)), (ROWS, W), jax.vmap(item, (0, None))),
    "sliced_scan": (
        lambda c, x: sliced_scan(step, c, x, start=1, step=3),
        (C, XS),
        scanned(slice(1, None, 3)),
    ),
    "checkpoint_chunked_scan": (
        lambda c, x: checkpoint_chunked_scan(step, c, x, chunk_size=4),
        (C, XS),
        scanned(),
    ),
    "checkpoint_while_loop": (
        lambda c, x: checkpoint_while_loop(lambda x: jnp.max(x) > c / 2, lambda x: damped(x, c), x),
        (C, XS),
        lambda c, x: damped(damped(x, c), c),
    ),
}


def outputs_and_gradients(f, *args):
    def loss(*args):
        outs = f(*args)
        squares = [jnp.vdot(out, out) for out in jax.tree.leaves(outs)]
        return functools.reduce(jnp.add, squares), outs

    gradients, outs = jax.grad(loss, argnums=(0, 1), has_aux=True)(*args)
    return outs, gradients


def check(f, args, want):
    assert_same(outputs_and_gradients(f, *args), want, rtol=1e-4, atol=1e-5)


# Each takes seconds: a mode of JAX makes it forget what it has traced and compiled.
AT_EACH_RUN = {"auto_vmap, jit and chunks", "sliced_scan", "checkpoint_while_loop"}


@pytest.fixture(scope="module", params=at_each_run(AT_EACH_RUN, CASES, pytest.mark.weekly))
def case(request):
    f, args, plain = request.param
    want = jax.jit(lambda *args: outputs_and_gradients(plain, *args))(*args)
    return f, args, want


# The session itself runs with strict rank and dtype promotion (see conftest.py).
@contextlib.contextmanager
def checks():
    with jax.checking_leaks(), jax.debug_nans(True), jax.debug_key_reuse(True):
        yield


@pytest.mark.parametrize("mode", [checks, slow(jax.disable_jit)])
def test_strict_modes(case, mode):
    if REMAT3 and case[0] is CASES["checkpoint_while_loop"][0]:
        pytest.skip("the next checkpoint keeps tracers that a rule closes over")
    with mode():
        check(*case)


def test_compiled_calls_transfer_nothing(case):
    f, args, want = case
    compiled = jax.jit(lambda *args: outputs_and_gradients(f, *args))
    with jax.transfer_guard("disallow"):
        got = compiled(*args)
    assert_same(got, want, rtol=1e-4, atol=1e-5)


# JAX transfers the constants of eager operations, such as a step of a scan outside of its loop.
@pytest.mark.parametrize("name", ["auto_vmap", "chunked_vmap", "checkpoint_while_loop"])
def test_eager_calls_transfer_nothing_implicitly(name):
    if REMAT3 and name == "checkpoint_while_loop":
        pytest.skip("JAX evaluates its next checkpoint with NumPy scalars")
    f, args, plain = CASES[name]
    with jax.transfer_guard("disallow"):
        got = f(*args)
    assert_same(got, jax.jit(plain)(*args))


def test_double_precision(case):
    f, args, _ = case
    plain = next(p for g, _, p in CASES.values() if g is f)
    with enable_x64():
        double = [jnp.asarray(x, jnp.float64) for x in args]
        out = f(*double)
        assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype("float64")}
        assert_same(out, jax.jit(plain)(*double), rtol=1e-12, atol=1e-12)
        assert_same(f(*args), jax.jit(plain)(*args))  # and single stays single


def test_export_round_trip(case):
    f, args, want = case
    exported = jax.export.export(jax.jit(f))(*args)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    check(again.call, args, want)


def test_several_threads_at_once(case):
    f, args, want = case

    def work(_):
        check(f, args, want)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


@pytest.mark.parametrize("options", [{"jit": True}, {"chunk_size": 2}], ids=str)
def test_threads_with_other_shapes_do_not_meet(options):
    mapped = auto_vmap(0, 1, **options)(lambda s, v: s * jnp.sum(v))

    def work(n):
        s, v = jnp.arange(float(n)), jnp.full((n, n % 3 + 1), float(n))
        return mapped(s, v), s * n * (n % 3 + 1)

    with ThreadPoolExecutor(3) as pool:
        for got, want in pool.map(work, [1, 2, 3, 4] * 2):
            assert_same(got, want)


def test_keys_are_used_once():
    mapped = auto_vmap(0, jit=True)(jax.random.normal)
    with jax.debug_key_reuse(True):
        keys = jax.random.split(jax.random.key(0), 3)
        mapped(keys)
        with pytest.raises(jax.errors.KeyReuseError, match="consumed"):
            mapped(keys)


@pytest.mark.parametrize("options", [{"jit": True}, {"chunk_size": 2}], ids=str)
def test_a_nan_is_reported_where_it_arises(options):
    mapped = auto_vmap(0, **options)(jnp.log)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        mapped(jnp.array([1.0, -1.0, 2.0, 3.0]))


@pytest.mark.parametrize("options", [{}, {"jit": True}, {"chunk_size": 3}], ids=str)
def test_calls_without_a_batch(options):
    mapped = auto_vmap(0, 1, **options)(kernel)
    with jax.checking_leaks(), jax.transfer_guard("disallow"), jax.debug_nans(True):
        got = mapped(C, W)
    assert_same(got, kernel(C, W))
