# SPDX-License-Identifier: MIT
"""``lockstep=False``: items that end by themselves, against a Python loop over the items."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import rankax
from helpers import assert_same, primitives, slow, temporary_bytes, weekly
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Best, BottomK, Fold
from scan_cases import assert_same_weak_types

# Kernels whose loops differ in length.


def halvings(x):
    """Return a tree: how often ``x`` can be halved, what is left, whether it was even at all."""

    def body(s):
        return {"x": s["x"] / 2, "n": s["n"] + 1, "large": s["x"] > 8}

    start = {"x": x, "n": jnp.int32(0), "large": jnp.bool_(0)}
    return lax.while_loop(lambda s: s["x"] > 1, body, start)


def newton(a):
    """Return the square root of ``a``; each step moves towards it."""

    def step(s):
        return 0.5 * (s[0] + a / s[0]), s[1] + 1

    def goes_on(s):
        return (jnp.abs(s[0] * s[0] - a) > 1e-5 * a) & (s[1] < 50)

    return lax.while_loop(goes_on, step, (a + 1, jnp.int32(0)))[0]


def implicit_root(a):
    def solve(f, start):
        return lax.while_loop(lambda v: f(v) > 1e-5, lambda v: v - f(v) / (2 * v), start)

    return lax.custom_root(lambda v: v * v - a, a + 1, solve, lambda g, y: y / g(1.0))


X = jnp.asarray(np.linspace(0.5, 90, 37))


def free(fun, lanes=5, **options):
    return chunked_vmap(fun, lanes, lockstep=False, **options)


in_lockstep = jax.jit(jax.vmap(halvings))


@pytest.mark.parametrize("lanes", [4, slow(1), weekly(100)])
def test_trees_integers_and_bools(lanes):
    want = in_lockstep(X)
    assert_same(free(halvings, lanes)(X), want)
    assert_same(jax.jit(free(halvings, lanes))(X), want)


def test_empty_batches_and_loops_of_no_step():
    assert_same(free(halvings)(X[:0]), in_lockstep(X[:0]))
    assert_same(free(halvings)(X * 0), in_lockstep(X * 0))


def test_results_are_weak_as_under_vmap():
    def counted(x):
        start = 0, 1.0, x
        *counts, last = lax.while_loop(
            lambda s: s[2] > 1, lambda s: (s[0] + 1, s[1] * 2, s[2] / 2), start
        )
        return *counts, last, 2

    for x in (X, lax.full((7,), 20.0)):
        got, want = free(counted)(x), jax.vmap(counted)(x)
        assert_same(got, want)
        assert_same_weak_types(got, want)


def many_sides(x):
    loops = [lambda x, n=n: halvings(x + n)["x"] for n in range(3)]
    return lax.switch(x.astype(jnp.int32) % 4, [*loops, lambda x: x], x)


def scans(x):
    """Over closed-over arrays and over none; the outputs have the carry before each step."""
    rows, none = jnp.arange(12.0).reshape(4, 3), jnp.zeros((0, 3))

    def body(total, row):
        return total + newton(x + row[0]), (total, row * x)

    return lax.scan(body, 0.0, rows, reverse=True), lax.scan(body, 0.0, none)


def places(x):
    start = x, x + 0.5, (x * 10).astype(jnp.int32) % 5
    return lax.while_loop(lambda s: s[2] > 0, lambda s: (s[1], s[0], s[2] - 1), start)


def roots(x):
    def body(s):
        return implicit_root(s[0] + 1), s[1] - 1

    return lax.while_loop(lambda s: s[1] > 0, body, (x, x.astype(jnp.int32) % 5))


def solved(x):
    """A linear solve around a loop; its matrix and the solver are programs of their own."""

    def solve(matvec, b):
        def body(v):
            return v + (b - matvec(v)) / 2

        return lax.while_loop(lambda v: jnp.sum((b - matvec(v)) ** 2) > 1e-8, body, b / 2)

    return lax.custom_linear_solve(lambda v: (1 + x**2 / 1e4) * v, jnp.stack([x, 2.0]) / 99, solve)


KERNELS = {
    "a branch with many sides": many_sides,
    "scans of closed-over arrays and of length zero": scans,
    "carried values change places": places,
    "a root inside a loop": roots,
    "a linear solve around a loop": solved,
    "nan in a condition": lambda x: newton(jnp.where((x > 9) & (x < 20), jnp.nan, 1 / (x - 0.5))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_items_are_those_of_lockstep(name):
    assert_same(free(KERNELS[name])(X), jax.jit(jax.vmap(KERNELS[name]))(X), rtol=1e-4)


@pytest.mark.parametrize(("numbers", "loops"), [(1, 1), (999, 2)], ids=["cheap", "expensive"])
def test_a_cheap_loop_inside_a_step_stays_whole(numbers, loops):
    def kernel(x):
        def inner(s):
            total, n = s
            return total + jnp.sin(total + jnp.ones(numbers)).mean(), n - 1

        def outer(s):
            total, n = s
            total, _ = lax.while_loop(lambda s: s[1] > 0, inner, (total, n % 3))
            return total + jnp.cos(total + jnp.arange(200.0)).mean(), n - 1

        return lax.while_loop(lambda s: s[1] > 0, outer, (x, x.astype(jnp.int32) % 7))

    assert_same(free(kernel)(X), jax.jit(jax.vmap(kernel))(X), rtol=1e-4)
    lanes = auto_vmap(x=0, chunk_size=4, lockstep=False)(kernel)
    assert len(lanes.plan(X).ends) == loops


# Reductions.


def test_reductions_are_those_of_lockstep():
    def kernel(x):
        return newton(x), *[halvings(x)] * 3

    digits = Fold(0, lambda out: out["n"], lambda a, b: (3 * a + b) % 101)
    tree = {"x": "mean", "n": None, "large": "any"}
    got = chunked_reduce(kernel, (BottomK(3), digits, Best("n"), tree), 4, lockstep=False)
    want = chunked_reduce(kernel, (BottomK(3), digits, Best("n"), tree), 4)
    assert_same(jax.jit(got)(X), jax.jit(want)(X))


@pytest.mark.parametrize("axis", [1, 0])
def test_a_loop_that_depends_only_on_an_axis_that_is_kept(axis):
    def halved(x, n):
        return lax.fori_loop(0, n, lambda _, x: x / 2, x)

    x, n = X[:10].reshape(2, 5), jnp.arange(2, 7 if axis == 0 else 4)
    n = jnp.expand_dims(n, axis)
    kernel = auto_vmap(x=0, n=0, reduce="sum", reduce_axis=axis, lockstep=False)(halved)
    assert_same(kernel(x, n), jnp.sum(x * jnp.exp2(-n.astype(x.dtype)), axis))


# Transformations.


def test_forward_derivatives():
    def pushed(fun):
        return jax.jit(lambda x: jax.jvp(fun, (x,), (x,)))(X)

    each = jax.vmap(newton)
    lanes = auto_vmap(0, reduce=(None, "sum"), chunk_size=5, lockstep=False)
    got = pushed(lanes(lambda x: (newton(x), newton(x))))
    assert_same(got, pushed(lambda x: (each(x), each(x).sum())), rtol=1e-4)


@pytest.mark.parametrize("jit", [slow(lambda f: f), jax.jit])
def test_a_rule_around_a_loop_counts(jit):
    gradient = jax.grad(lambda x: jit(free(implicit_root))(x).sum())(X)
    assert_same(gradient, 0.5 / np.sqrt(X), rtol=1e-3)
    if jax.__version_info__ < (0, 12):  # whose `custom_root` hides its loop, which stays whole
        assert str(jax.make_jaxpr(free(implicit_root))(X)).count("while[") > 1

    ruled = jax.custom_jvp(newton)
    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 7 * tangents[0]))
    _, tangent = jax.jvp(jit(free(lambda x: newton(ruled(x)) * 0 + ruled(x))), (X,), (X,))
    assert_same(tangent, 7 * X)


# Programs, plans and errors.


def test_without_a_loop_of_its_own_the_call_is_the_ordinary_one():
    def kernel(x):
        return lax.fori_loop(0, 3, lambda _, v: jnp.sin(v), x)

    def program(mapped):  # JAX 0.10.0 prints addresses of functions
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(mapped)(X)))

    assert program(free(kernel)) == program(chunked_vmap(kernel, 5))

    count = jnp.array(3)

    def shared(x):  # as many steps for all items
        return lax.fori_loop(0, count, lambda _, v: jnp.sin(v), x)

    assert primitives(free(shared), X) == primitives(chunked_vmap(shared, 5), X)


def test_plans_name_the_loops():
    kernel = auto_vmap(0, chunk_size=5, lockstep=False)(newton)
    lines = str(kernel.plan(X)).splitlines()
    assert lines[0] == (
        "newton: batch shape (37,), 37 evaluations, 5 in flight, items end by themselves"
    )
    assert lines[-3] == "  axis 0: 37 in the lanes, mapping a"
    assert lines[-2] == "  5 lanes; items diverge at"
    where = r"    while at .*test_lockstep.py:\d+:\d+ \(newton\)"
    assert re.fullmatch(where + ", reversed from stored carries", lines[-1])
    plain = auto_vmap(x=0, chunk_size=5, lockstep=False)(lambda x: 2 * x)
    assert str(plain.plan(X)).splitlines()[-1] == (
        "  in lockstep: no loop, and no expensive branch, depends on the item"
    )


def test_a_scope_sets_it():
    kernel = auto_vmap(0, chunk_size=5)(newton)
    with rankax.options(lockstep=False):
        assert kernel.plan(X).lanes == 5
    assert kernel.plan(X).lanes is None
    assert auto_vmap(0, lockstep=False)(newton).plan(jnp.ones(10_000)).lanes == 256

    def steps(x):  # each lane keeps 2,000 numbers
        return jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x * 2, x)

    assert auto_vmap(1, lockstep=False)(steps).plan(jnp.ones((300, 2000))).lanes == 16


def told(x):
    io_callback(lambda _: None, None, x, ordered=True)
    return newton(x)


def told_in_loop(x):
    def step(x):
        io_callback(lambda _: None, None, x, ordered=True)
        return x / 2

    return lax.cond(x > 0, lambda x: lax.while_loop(lambda x: x > 1, step, x), newton, x)


LINE = told_in_loop.__code__.co_firstlineno + 5


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (told, "it has an ordered effect, such as a callback with ordered=True, but with lockstep"),
        (told_in_loop, f"has an ordered effect in the loop at {re.escape(__file__)}:{LINE}"),
        (lambda x: lax.psum(newton(x), "outer"), "it uses a collective over 'outer', but with"),
    ],
)
def test_effects_in_order_and_collectives_are_refused(kernel, text):
    with pytest.raises(ValueError, match=text):
        jax.vmap(free(kernel), axis_name="outer")(X[None])


@pytest.mark.optimized
def test_memory_is_that_of_the_lanes():
    few, many = (jax.ShapeDtypeStruct((items,), jnp.float32) for items in (1000, 1_000_000))
    lanes = free(newton, 64)
    assert temporary_bytes(lanes, many) <= temporary_bytes(lanes, few) + 4096


def test_a_memory_limit_chooses_the_lanes():
    def kernel(x):
        return jnp.sort(jnp.sin(newton(x) * jnp.arange(500.0)))[7]

    limits = {"memory_limit": "50 KB", "checkpoint": False}
    lanes = auto_vmap(x=0, lockstep=False, **limits)(kernel).plan(X).lanes
    assert 1 <= lanes < 37
