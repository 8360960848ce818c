# SPDX-License-Identifier: MIT
"""Derivatives with ``lockstep=False``, against forward mode of the loops of JAX."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, enable_x64, slow, temporary_bytes, weekly
from rankax import SplitKey, auto_vmap, chunked_vmap
from rankax.reductions import Fold

X = np.linspace(0.5, 5, 13, dtype=np.float32)
A = np.float32(0.3)


def free(fun, lanes=4, **options):
    return chunked_vmap(fun, lanes, lockstep=False, **options)


def growth(x, a):
    """Multiply until 9; the number of steps differs from item to item."""

    def body(s):
        n, x, rest = s
        return n + 1, x * (1 + a), {"total": rest["total"] + jnp.sin(x) / (n + 1)}

    return lax.while_loop(lambda s: s[1] < 9, body, (0, x, {"total": a}))


def end(x, a):
    n, x, rest = growth(x, a)
    return jnp.sin(x) + rest["total"] * n


def counted(x, a):
    n = (3 * x).astype(int)
    return lax.fori_loop(0, n, lambda i, v: v * (1 - 0.1 * a) + 0.1 * jnp.sin(a * v + i), x)


def nested(x, a):
    return lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, end(1 + 0.2 * c[1], a)), (0, x))


def in_a_scan(x, a):
    return lax.scan(lambda s, row: (end(1 + 0.2 * s + row, a), s), x, jnp.arange(3) / 10)


def in_a_branch(x, a):
    return lax.switch((x * 10).astype(int) % 3, [end, counted, lambda x, a: x * a], x, a)


def with_keys(x, a):
    def body(s):
        key, use = jax.random.split(s[0])
        return key, s[1] * (1 + a * jax.random.uniform(use))

    return lax.while_loop(lambda s: s[1] < 9, body, (jax.random.key(0), x))[1]


def total(out):
    floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.sin(x)) for x in floats)


def assert_same_modes(lanes, plain, *args, order=1, **tolerances):
    """Compare the value and gradient of lanes, by reverse mode, with those by forward mode.

    Of the second order, compare their derivative along the arguments as well.
    """

    def derivatives(mapped, value_and_gradient):
        loss = lambda *args: total(mapped(*args))  # noqa: E731
        of = value_and_gradient(loss, tuple(range(len(args))))
        return jax.jit(of if order == 1 else lambda *args: jax.jvp(of, args, args))(*args)

    def by_forward_mode(loss, argnums):
        return lambda *args: (loss(*args), jax.jacfwd(loss, argnums)(*args))

    got, want = derivatives(lanes, jax.value_and_grad), derivatives(plain, by_forward_mode)
    assert_same(got, want, **tolerances)


def plain(kernel):
    return jax.vmap(kernel, (0, None))


def lanes(kernel, lanes=4):
    return free(kernel, lanes, in_axes=(0, None))


EXACT = {"rtol": 1e-9, "atol": 1e-9}  # in double precision


@pytest.mark.parametrize(
    "kernel", [end, slow(in_a_branch), slow(jax.checkpoint(with_keys)), weekly(in_a_scan)]
)
def test_reverse_mode_is_forward_mode(kernel):
    with enable_x64():
        args = jnp.asarray(X, float), jnp.asarray(A, float)
        assert_same_modes(lanes(kernel), plain(kernel), *args, order=2, **EXACT)


# Numbers of steps and of items.


def test_items_of_any_number_of_steps():
    def turned(n, x, a):
        def body(s):
            i, x = s
            return i + 1, x * (1 - 1e-5 * a) + 1e-4 * jnp.sin(a * x)

        return lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]

    axes = 0, 0, None
    with enable_x64():
        n = jnp.array([33, 0, 1025, 1, 100_000, 32, 1023, 31, 32_769, 1024, 32_767, 32_768])
        mapped = (
            functools.partial(f, n) for f in (free(turned, in_axes=axes), jax.vmap(turned, axes))
        )
        assert_same_modes(*mapped, jnp.linspace(1.0, 2.0, n.size), 0.9, **EXACT)


@pytest.mark.parametrize(("items", "count"), [(1, 4), slow(0, 4), weekly(7, 1), weekly(13, None)])
def test_any_number_of_items(items, count):
    assert_same_modes(lanes(end, count), plain(end), X[:items], A, rtol=1e-4, atol=1e-5)


def test_items_of_similar_numbers_of_steps_share_a_tile():
    calls = []

    def kernel(n, x):
        def body(s):
            jax.debug.callback(lambda: calls.append(1))
            return s[0] + 1, x * jnp.sin(s[1])

        return lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]

    def evaluations(n):
        calls.clear()
        jax.block_until_ready(gradient(n, jnp.ones(12)))
        jax.effects_barrier()
        return len(calls)

    gradient = jax.jit(jax.grad(lambda n, x: jnp.sum(free(kernel, 3)(n, x)), 1))
    in_order = evaluations(jnp.repeat(jnp.array([1, 2, 3, 40]), 3))
    assert evaluations(jnp.tile(jnp.array([40, 1, 3, 2]), 3)) < 1.2 * in_order


def test_nan_stays_in_its_item():
    def kernel(x):  # at 0, an infinite derivative of a last carry that no step takes
        return lax.while_loop(lambda s: s > 1, lambda s: s - 1 + 0 * jnp.sqrt(s), x)

    x = jnp.array([3.0, jnp.nan, 1.0, 0.0, 5.0, 2.0, 7.0])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(free(kernel, 3)(x) ** 2)))(x)
    want = jax.jit(jax.vmap(jax.jacfwd(lambda x: kernel(x) ** 2)))(x)
    assert_same(gradient, want)
    assert jnp.isnan(gradient).tolist() == [False, True, *[False] * 5]


# Other options.


@pytest.mark.parametrize("chunk_size", [5, slow(None)])
def test_a_loop_of_as_many_steps_for_all_items(chunk_size):
    def kernel(count, x):
        return lax.fori_loop(0, count, lambda i, x: jnp.sin(x) + 0.1 * i, x)

    mapped = (
        chunked_vmap(kernel, chunk_size, (None, 0), lockstep=False),
        jax.vmap(kernel, (None, 0)),
    )
    assert_same_modes(*(functools.partial(each, 3) for each in mapped), X)


COMPOSED = Fold(0.0, lambda v: v, lambda a, b: a + b + 0.1 * a * b)


@pytest.mark.parametrize(
    ("reduction", "where"),
    [
        ("prod", None),
        slow("sum", "ok"),
        weekly(COMPOSED, "ok"),
        weekly("max", "ok"),
        weekly("logsumexp", None),
    ],
    ids=str,
)
def test_gradients_of_reductions(reduction, where):
    def kernel(x, a):
        v = jnp.tanh(end(x, a))
        return v if where is None else {"v": v, "ok": x < 4}

    named = reduction if where is None else {"v": reduction, "ok": None}
    mapped = auto_vmap(x=0, a=0, reduce=named, where=where, chunk_size=4)(kernel)
    in_lanes = mapped.with_options(lockstep=False)
    assert_same_modes(in_lanes, mapped, X, A, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"reduce": "sum", "reduce_axis": 0}, slow({})], ids=str)
def test_gradients_of_several_axes_and_keys(options):
    def kernel(x, y, key, a):
        return end(x[0] + y + 0.1 * jax.random.uniform(key), a) * x[1]

    mapped = auto_vmap(x=1, y=0, key=SplitKey, a=0, chunk_size=4, **options)(kernel)
    both = (
        lambda x, y, a, f=f: f(x, y, jax.random.key(0), a)
        for f in (mapped.with_options(lockstep=False), mapped)
    )
    assert_same_modes(*both, jnp.stack([X[:5], X[5:10]], -1)[:, None], X[3:6], A, rtol=1e-4)


def test_axes_and_trees_of_outputs():
    def kernel(x, a):
        n, x, rest = growth(x[0], a)
        return {"n": n.astype(x.dtype), "v": jnp.stack([x, rest["total"], a]), "a": a * 2}

    axes = {"in_axes": (1, None), "out_axes": {"n": 0, "v": 1, "a": None}}
    mapped = free(kernel, **axes), jax.vmap(kernel, **axes)
    assert_same_modes(*mapped, jnp.stack([X, X]), A, rtol=1e-4)


def test_under_vmap():
    grown = lambda x, a: lax.while_loop(lambda x: x < 9, lambda x: x + a * x, x)  # noqa: E731
    x, a = X[:12].reshape(2, 6), jnp.array([0.2, 0.5])
    assert_same_modes(jax.vmap(lanes(grown)), jax.vmap(plain(grown)), x, a, rtol=1e-4)


def test_a_number_that_all_items_share_under_vmap():
    def kernel(n, x, a):
        return lax.fori_loop(0, n, lambda _, x: jnp.sin(a * x), x)

    axes = 0, 0, None
    n, x = jnp.array([2, 0, 3]), jnp.linspace(0.5, 1, 3)
    got = jax.jacrev(functools.partial(free(kernel, 2, in_axes=axes), n), (0, 1))
    want = jax.jacfwd(functools.partial(jax.vmap(kernel, axes), n), (0, 1))
    assert_same(jax.jit(got)(x, A), jax.jit(want)(x, A))


def test_many_pairs_stay_in_their_order(monkeypatch):
    monkeypatch.setattr("rankax.ext.lanes.call._MOST_SORTED", 10)
    pairs = auto_vmap(x=0, a=0, chunk_size=4, reduce="sum", lockstep=False)(end)
    by_hand = jax.vmap(jax.vmap(end, (None, 0)), (0, None))
    args = X[:5, None], jnp.array([0.2, 0.5, 0.7])
    assert_same_modes(pairs, lambda x, a: jnp.sum(by_hand(x[:, 0], a)), *args, rtol=1e-3)


@pytest.mark.optimized
def test_memory_is_that_of_a_chunk_and_of_the_inputs():
    def temporaries(mapped, *shapes):
        like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        gradient = jax.grad(lambda x, a: jnp.sum(mapped(x, a) ** 2), (0, 1))
        return temporary_bytes(gradient, *like)

    assert temporaries(lanes(end, 64), (2000,), ()) < 150_000
    pairs = auto_vmap(x=0, a=0, chunk_size=64, reduce="sum", lockstep=False)(end)
    assert temporaries(pairs, (1500, 1), (1500,)) < 500_000


# Programs and plans.


def test_plans_say_how_loops_are_reversed():
    ruled = jax.custom_jvp(lambda x: end(x, 0.5))
    ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0]))

    def kernel(x):
        return in_a_scan(x, 0.3)[0] + ruled(x)

    lines = str(auto_vmap(x=0, chunk_size=4, lockstep=False)(kernel).plan(X)).splitlines()
    ends = [line.partition(", ")[2] for line in lines if "reversed" in line]
    assert ends == [
        "reversed from all its carries",
        "reversed from stored carries",
        "reversed by its own derivative rule",
    ]


def test_the_reverse_pass_has_no_reverse_mode():
    gradient = jax.grad(lambda x: jnp.sum(lanes(end)(x, A)))
    with pytest.raises(ValueError, match="its reverse pass has no reverse mode") as error:
        jax.grad(lambda x: jnp.sum(gradient(x)))(X)
    assert re.match(r"end\(\) .*: while at .*: its reverse pass", str(error.value))


@pytest.mark.optimized
def test_lanes_that_count_steps_compute_the_values():
    """The loop over tiles is not evaluated forward, and the values are those without a gradient."""
    x = jnp.linspace(0.1, 0.9, 36)  # nine tiles: otherwise a loop is left that does nothing

    def value(x):
        outs = free(lambda x: end(x, 1.5))(x)
        return jnp.sum(outs), outs

    gradient = jax.jit(jax.value_and_grad(value, has_aux=True)).lower(x).compile()
    assert_same(gradient(x)[0][1], jax.jit(value)(x)[1], rtol=0, atol=0)
    # Lanes: rounds and steps. Reverse: tiles, their steps, steps back, carries, steps to these.
    assert gradient.as_text().count(" while(") == 2 + 5


# Loops that do not end for the items of another branch, or for those that are done.


def down(x):
    return lax.while_loop(lambda y: (y <= 0) | (y > 1e-2), lambda y: y * 0.3, x)


def up(x):
    return lax.while_loop(lambda y: y < -1e-2, lambda y: y * 0.3, x)


def ends_in_a_loop(x):
    def body(y):
        return 0.3 * lax.while_loop(lambda z: (z <= 1) | (z > 10), lambda z: z * 0.5, y * 3)

    return lax.while_loop(lambda y: y > 1, body, jnp.abs(x) + 1)


def ends_in_a_scan(x):
    return lax.scan(lambda y, a: (by_sign(y) * a, y), x, jnp.asarray([90.0, 80.0]))[0]


def by_sign(x):
    return lax.cond(x >= 0, jax.jit(down), up, x)


ENDLESS = {
    "cond": by_sign,
    "nested": lambda x: lax.cond(x > -1, lambda x: by_sign(2 * x) * x, up, x),
    "switch": lambda x: lax.switch(jnp.int32(jnp.clip(x + 1, 0, 2)), [up, jnp.sin, down], x),
    "loop": ends_in_a_loop,
    "scan": ends_in_a_scan,
}


@pytest.mark.parametrize("name", ["cond", "loop", *map(slow, ["nested", "switch", "scan"])])
def test_loops_that_end_only_for_the_items_that_reach_them(name):
    fun, x = ENDLESS[name], jnp.asarray([0.3, -0.2, 1.0, -5.0, 2.0])
    mapped = free(fun, 2)
    want = [jax.jvp(fun, (item,), (jnp.float32(1),)) for item in x]
    values, slopes = map(jnp.stack, zip(*want, strict=True))
    got, pull = jax.vjp(mapped, x)
    assert_same((got, *pull(jnp.ones(5))), (values, slopes), rtol=1e-4)
    assert_same(jax.jvp(mapped, (x,), (jnp.ones(5),))[1], slopes, rtol=1e-4)
