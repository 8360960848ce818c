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
from helpers import assert_same, enable_x64, primitives, slow, weekly
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Best, BottomK, Fold

# Kernels whose loops differ in length.


def halvings(x):
    """Return a tree: how often ``x`` can be halved, what is left, whether it was even at all."""

    def step(s):
        return s["x"] / 2, s["n"] + 1, s["x"] > 8

    def body(s):
        return dict(zip(["x", "n", "large"], step(s), strict=True))

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


in_lockstep = jax.jit(jax.vmap(halvings))


def free(fun, lanes=5, **options):
    return chunked_vmap(fun, lanes, lockstep=False, **options)


@pytest.mark.parametrize("lanes", [4, slow(1), weekly(100)])
def test_trees_integers_and_bools(lanes):
    want = in_lockstep(X)
    assert_same(free(halvings, lanes)(X), want)
    assert_same(jax.jit(free(halvings, lanes))(X), want)


def test_empty_batches_and_loops_of_no_step():
    assert_same(free(halvings)(X[:0]), in_lockstep(X[:0]))
    assert_same(free(halvings)(X * 0), in_lockstep(X * 0))


def test_nan_in_a_condition_ends_a_loop():
    x = X.at[3].set(jnp.nan).at[30].set(jnp.inf)
    assert_same(free(newton)(x), jax.jit(jax.vmap(newton))(x))
    assert jnp.isnan(free(newton)(x)[3])


def test_axes_of_inputs_and_outputs():
    def kernel(x, shift):
        s = halvings(x[0])
        return x[1] * s["x"] + shift, shift * 2

    x = jnp.stack([X, X], 0)
    axes = {"in_axes": (1, None), "out_axes": (0, None)}
    shift = jnp.float32(3)
    assert_same(free(kernel, **axes)(x, shift), jax.jit(jax.vmap(kernel, **axes))(x, shift))

    def vector(x):
        return jnp.full(3, newton(x))

    assert_same(free(vector, out_axes=1)(X), jax.jit(jax.vmap(vector, out_axes=1))(X))


def test_several_batch_axes_broadcast():
    kernel = auto_vmap(a=0, b=1, chunk_size=4)(lambda a, b: b * newton(a + b.sum()))
    a, b = X[:15].reshape(5, 1, 3), jnp.ones((4, 1, 2))
    assert_same(kernel.with_options(lockstep=False)(a, b), jax.jit(kernel)(a, b))


def test_split_keys_draw_what_they_draw_in_lockstep():
    def walk(key, far):
        def step(s):
            key, at, n = s
            key, use = jax.random.split(key)
            return key, at + jax.random.normal(use), n + 1

        return lax.while_loop(lambda s: jnp.abs(s[1]) < far, step, (key, 0.0, 0))

    kernel = auto_vmap(key=SplitKey, far=0, chunk_size=4)(walk)
    far = jnp.arange(6.0).reshape(2, 3)
    got = kernel.with_options(lockstep=False)(jax.random.key(0), far)
    assert_same(got, jax.jit(kernel)(jax.random.key(0), far))


def test_a_branch_with_many_sides():
    def kernel(x, which):
        loops = [lambda x, n=n: halvings(x + n)["x"] for n in range(3)]
        return lax.switch(which, [*loops, lambda x: x], x)

    which = jnp.arange(37) % 4
    assert_same(free(kernel)(X, which), jax.jit(jax.vmap(kernel))(X, which))


def test_an_expensive_branch_runs_for_the_items_that_take_it():
    matrix = jnp.eye(64) * 0.5

    def kernel(x):
        expensive = lambda x: lax.fori_loop(0, 4, lambda _, v: matrix @ v, jnp.full(64, x))  # noqa: E731
        return lax.cond(x < 40, expensive, lambda x: jnp.full(64, x), x)

    assert_same(free(kernel)(X), jax.jit(jax.vmap(kernel))(X))
    assert primitives(free(kernel), X)["cond"] > 1
    assert primitives(jax.vmap(kernel), X)["cond"] == 0
    want = jax.jit(jax.grad(lambda x: jax.vmap(kernel)(x).sum()))(X)
    assert_same(jax.grad(lambda x: free(kernel)(x).sum())(X), want)


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


def test_loops_of_closed_over_arrays_and_of_length_zero():
    rows, none = jnp.arange(12.0).reshape(4, 3), jnp.zeros((0, 3))

    def kernel(x):
        def body(total, row):
            return total + newton(x + row[0]), row * x

        return lax.scan(body, 0.0, rows, reverse=True), lax.scan(body, 0.0, none)

    assert_same(free(kernel)(X), jax.jit(jax.vmap(kernel))(X))


def test_a_scan_that_returns_the_carries_before_its_steps():
    def kernel(x):
        return lax.scan(lambda s, row: (newton(s + row), (s, row)), x, jnp.arange(3.0))

    assert_same(free(kernel)(X), jax.jit(jax.vmap(kernel))(X))


def test_carried_values_change_places():
    def kernel(x):
        start = x, x + 0.5, (x * 10).astype(jnp.int32) % 5
        return lax.while_loop(lambda s: s[2] > 0, lambda s: (s[1], s[0], s[2] - 1), start)

    assert_same(free(kernel)(X), jax.jit(jax.vmap(kernel))(X))


# Reductions.


@pytest.mark.parametrize(
    "reduction",
    [
        BottomK(3),
        Fold(0, lambda out: out["n"], lambda a, b: (3 * a + b) % 101),
        slow(Best("n")),
        slow({"x": "mean", "n": None, "large": "any"}),
    ],
    ids=["bottom", "fold", "best", "a tree"],
)
def test_reductions_are_those_of_lockstep(reduction):
    kernel = newton if isinstance(reduction, BottomK) else halvings
    got = chunked_reduce(kernel, reduction, 4, lockstep=False)
    assert_same(jax.jit(got)(X), jax.jit(chunked_reduce(kernel, reduction, 4))(X))


@pytest.mark.parametrize("reduction", ["argmin", slow("mean")])
def test_only_items_that_count_are_reduced(reduction):
    def kernel(x):
        return {"y": newton(x), "ok": x.astype(jnp.int32) % 3 == 0}

    options = {"reduce": reduction, "where": "ok", "chunk_size": 4}
    got = jax.jit(auto_vmap(x=0, lockstep=False, **options)(kernel))(X)
    assert_same(got, jax.jit(auto_vmap(x=0, **options)(kernel))(X))


def test_a_reduction_over_some_axes():
    kernel = auto_vmap(a=0, b=0, chunk_size=4, reduce="sum", reduce_axis=0)(
        lambda a, b: newton(a * b)
    )
    a, b = X[:5, None], X[None, 5:12]
    assert_same(kernel.with_options(lockstep=False)(a, b), jax.jit(kernel)(a, b))


@pytest.mark.parametrize("axis", [1, 0])
def test_a_loop_that_depends_only_on_an_axis_that_is_kept(axis):
    def halved(x, n):
        return lax.fori_loop(0, n, lambda _, x: x / 2, x)

    x, n = X[:10].reshape(2, 5), jnp.arange(2, 7 if axis == 0 else 4)
    n = jnp.expand_dims(n, axis)
    kernel = auto_vmap(x=0, n=0, reduce="sum", reduce_axis=axis, lockstep=False)(halved)
    assert_same(kernel(x, n), jnp.sum(x * jnp.exp2(-n.astype(x.dtype)), axis))


def test_double_precision_with_strict_promotion():
    with enable_x64():
        x = jnp.linspace(1.0, 40.0, 9)
        want = {"x": jnp.array([halvings(a)["x"] for a in x.tolist()])}
        got = auto_vmap(0, chunk_size=4, lockstep=False)(halvings)(x)
        assert got["x"].dtype == jnp.float64
        assert_same({"x": got["x"]}, want)


def test_a_long_item_holds_up_a_window_only():
    def count(n):
        return lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)

    lengths = jnp.ones(500, int).at[0].set(10_000)
    assert chunked_reduce(count, "sum", 2, lockstep=False)(lengths) == 10_499


# Transformations.


def test_forward_derivatives():
    tangent = jnp.cos(X)
    got = jax.jvp(free(newton), (X,), (tangent,))
    want = jax.jit(lambda x, tangent: jax.jvp(jax.vmap(newton), (x,), (tangent,)))(X, tangent)
    assert_same(got, want, rtol=1e-4)
    got = jax.jvp(lambda x: chunked_reduce(newton, "sum", 5, lockstep=False)(x), (X,), (tangent,))
    assert_same(got, (want[0].sum(), want[1].sum()), rtol=1e-4)


@pytest.mark.parametrize("jit", [slow(lambda f: f), jax.jit])
def test_a_rule_around_a_loop_counts(jit):
    gradient = jax.grad(lambda x: jit(free(implicit_root))(x).sum())(X)
    assert_same(gradient, 0.5 / np.sqrt(X), rtol=1e-3)
    if jax.__version_info__ < (0, 12):  # whose `custom_root` hides its loop, which stays whole
        assert str(jax.make_jaxpr(free(implicit_root))(X)).count("while[") > 1

    @jax.custom_jvp
    def ruled(x):
        return newton(x)

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 7 * tangents[0]))
    _, tangent = jax.jvp(jit(free(lambda x: newton(ruled(x)) * 0 + ruled(x))), (X,), (X,))
    assert_same(tangent, 7 * X)


def test_a_root_inside_a_loop():
    def kernel(x):
        def body(s):
            return implicit_root(s[0] + 1), s[1] - 1

        return lax.while_loop(lambda s: s[1] > 0, body, (x, x.astype(jnp.int32) % 5))

    assert_same(free(kernel)(X), jax.jit(jax.vmap(kernel))(X), rtol=1e-4)


def test_an_outer_vmap():
    x = X[:36].reshape(3, 12)
    assert_same(jax.vmap(free(newton))(x), jax.jit(jax.vmap(jax.vmap(newton)))(x))


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
    assert "37 in the lanes" in kernel.plan(X)._repr_html_()
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


def test_effects_in_order_and_collectives_are_refused():
    def told(x):
        io_callback(lambda _: None, None, x, ordered=True)
        return newton(x)

    text = "it has an ordered effect, such as a callback with ordered=True, but with lockstep=False"
    with pytest.raises(ValueError, match=text):
        free(told)(X)

    def told_in_loop(x):
        def step(x):
            io_callback(lambda _: None, None, x, ordered=True)
            return x / 2

        return lax.cond(x > 0, lambda x: lax.while_loop(lambda x: x > 1, step, x), newton, x)

    line = told_in_loop.__code__.co_firstlineno + 5
    text = f"has an ordered effect in the loop at {re.escape(__file__)}:{line}"
    with pytest.raises(ValueError, match=text):
        free(told_in_loop)(X)
    with pytest.raises(ValueError, match="it uses a collective over 'outer', but with lockstep="):
        jax.vmap(free(lambda x: newton(x) + lax.psum(x, "outer")), axis_name="outer")(X[None])


def test_a_linear_solve_around_a_loop_that_ends():
    """Its matrix and the solver are programs of their own."""

    def solved(x):
        def solve(matvec, b):
            def body(state):
                return state[0] + (b - matvec(state[0])) / 2, state[1] + 1

            start = jnp.zeros_like(b), 0
            return lax.while_loop(lambda s: jnp.sum((b - matvec(s[0])) ** 2) > 1e-8, body, start)[0]

        return lax.custom_linear_solve(lambda v: (1 + x**2) * v, jnp.stack([x, 2.0]), solve)

    x = jnp.linspace(0.1, 0.9, 7)
    assert_same(free(solved)(x), jax.vmap(solved)(x), rtol=1e-3)


def test_progress_counts_items(monkeypatch):
    monkeypatch.setattr("rankax.ext.progress.bars._SECONDS", 0)
    told: list[tuple[int, int]] = []

    def show(done, total):
        told.append((done, total))

    free(newton, progress=show)(X)
    assert told[0] == (0, 37)
    assert told[-1] == (37, 37)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 3


@pytest.mark.optimized
def test_memory_is_that_of_the_lanes():
    def temporaries(items):
        like = jax.ShapeDtypeStruct((items,), jnp.float32)
        program = jax.jit(free(newton, 64)).lower(like).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(1_000_000) <= temporaries(1000) + 4096


def test_a_memory_limit_chooses_the_lanes():
    def kernel(x):
        return jnp.sort(jnp.sin(newton(x) * jnp.arange(500.0)))[7]

    mapped = auto_vmap(x=0, memory_limit="50 KB", lockstep=False)(kernel)
    lanes = mapped.plan(X).lanes
    assert lanes is not None
    assert 1 <= lanes < 37
    assert_same(mapped(X), jax.jit(jax.vmap(kernel))(X), rtol=1e-4)
