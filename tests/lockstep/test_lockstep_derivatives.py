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
        return key, s[1] + a * s[1] * (1 + 0.3 * jax.random.uniform(use))

    key = jax.random.fold_in(jax.random.key(0), (100 * x).astype(int))
    return lax.while_loop(lambda s: s[1] < 9, body, (key, x))[1]


def under_checkpoint(x, a):
    return jax.checkpoint(jax.jit(end))(x, a) + jax.checkpoint(end)(x * a, a)


def total(out):
    floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.sin(x)) for x in floats)


KERNELS = [end, counted, nested, in_a_scan, in_a_branch, with_keys, under_checkpoint]


def both_modes(kernel, mapped, jit=jax.jit):
    """Return value, gradient and the gradient's derivative, by reverse and by forward mode."""

    def loss(mapped, v):
        return total(mapped(v[0], v[1]))

    def reverse(v):
        gradient = functools.partial(jax.value_and_grad(loss, 1), mapped)
        return jax.jvp(gradient, (v,), (v,))

    def forward(v):
        plain = functools.partial(loss, jax.vmap(kernel, (0, None)))
        gradient = lambda v: (plain(v), jax.jacfwd(plain)(v))  # noqa: E731
        return jax.jvp(gradient, (v,), (v,))

    return jit(reverse), jax.jit(forward)


@pytest.mark.parametrize(
    "kernel", [end, slow(nested), weekly(in_a_branch), weekly(under_checkpoint)]
)
def test_reverse_mode_is_forward_mode(kernel):
    with enable_x64():
        v = jnp.asarray(X, float), jnp.asarray(A, float)
        got, want = both_modes(kernel, free(kernel, in_axes=(0, None)))
        assert_same(got(v), want(v), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_all_kernels_at_once_in_first_order():
    def kernel(x, a):
        return [kernel(x, a) for kernel in KERNELS]

    with enable_x64():
        v = jnp.asarray(X, float), jnp.asarray(A, float)
        got = jax.jit(jax.grad(lambda v: total(free(kernel, in_axes=(0, None))(*v))))(v)
        want = jax.jit(jax.jacfwd(lambda v: total(jax.vmap(kernel, (0, None))(*v))))(v)
        assert_same(got, want, rtol=1e-9, atol=1e-9)


# Numbers of steps and of items.


def turned(n, x, a):
    """Make n steps."""

    def body(s):
        i, x = s
        return i + 1, x * (1 - 1e-5 * a) + 1e-4 * jnp.sin(a * x)

    return lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]


def test_items_of_any_number_of_steps():
    mapped = free(turned, in_axes=(0, 0, None))
    with enable_x64():
        n = jnp.array([33, 0, 1025, 1, 100_000, 32, 1023, 31, 32_769, 1024, 32_767, 32_768])
        x = jnp.linspace(1.0, 2.0, n.size)
        got = jax.jit(jax.grad(lambda x, a: jnp.sum(x * mapped(n, x, a)), (0, 1)))(x, 0.9)
        plain = jax.vmap(lambda n, x: _by_forward_mode(n, x, 0.9))
        value, of_x, of_a = jax.jit(plain)(n, x)
        assert_same(got, (value + x * of_x, jnp.sum(x * of_a)), rtol=1e-9)


def _by_forward_mode(n, x, a):
    value, of_x = jax.jvp(lambda x: turned(n, x, a), (x,), (jnp.ones_like(x),))
    _, of_a = jax.jvp(lambda a: turned(n, x, a), (a,), (1.0,))
    return value, of_x, of_a


@pytest.mark.parametrize(("items", "lanes"), [(1, 4), slow(0, 4), weekly(7, 1), weekly(13, None)])
def test_any_number_of_items(items, lanes):
    x = X[:items]
    got = jax.grad(lambda x, a: total(free(end, lanes, in_axes=(0, None))(x, a)), (0, 1))(x, A)
    want = jax.jacfwd(lambda x, a: total(jax.vmap(end, (0, None))(x, a)), (0, 1))(x, A)
    assert_same(got, want, rtol=1e-4, atol=1e-5)


def test_items_of_similar_numbers_of_steps_share_a_tile():
    calls = [0]

    def call():
        calls[0] += 1

    def kernel(n, x):
        def body(s):
            jax.debug.callback(call)
            return s[0] + 1, x * jnp.sin(s[1])

        return lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]

    def evaluations(n):
        calls[0] = 0
        jax.block_until_ready(gradient(n, jnp.ones(12)))
        jax.effects_barrier()
        return calls[0]

    gradient = jax.jit(jax.grad(lambda n, x: jnp.sum(free(kernel, 3)(n, x)), 1))
    in_order = evaluations(jnp.repeat(jnp.array([1, 2, 3, 40]), 3))
    assert evaluations(jnp.tile(jnp.array([40, 1, 3, 2]), 3)) < 1.2 * in_order


def test_nan_stays_in_its_item():
    def kernel(x):  # at 0, an infinite derivative of a last carry that no step takes
        return lax.while_loop(lambda s: s > 1, lambda s: s - 1 + 0 * jnp.sqrt(s), x)

    x = jnp.array([3.0, jnp.nan, 1.0, 0.0, 5.0, jnp.inf, 7.0])
    x = jnp.where(x == jnp.inf, 2.0, x)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(free(kernel, 3)(x) ** 2)))(x)
    want = jax.jit(jax.vmap(jax.jacfwd(lambda x: kernel(x) ** 2)))(x)
    assert_same(gradient, want)
    assert jnp.isnan(gradient).tolist() == [False, True, *[False] * 5]


# Other options.


@pytest.mark.parametrize("chunk_size", [5, slow(None)])
def test_a_loop_of_as_many_steps_for_all_items(chunk_size):
    def kernel(count, x):
        return lax.fori_loop(0, count, lambda i, x: jnp.sin(x) + 0.1 * i, x)

    mapped = chunked_vmap(kernel, chunk_size, (None, 0), lockstep=False)
    got = jax.jit(jax.grad(lambda x: jnp.sum(mapped(3, x))))(X)
    assert_same(got, jax.jacfwd(lambda x: jnp.sum(jax.vmap(kernel, (None, 0))(3, x)))(X))


REDUCTIONS = {
    **{name: name for name in ("sum", "max", "prod", "logsumexp")},
    "Fold": Fold(0.0, lambda v: v, lambda a, b: a + b + 0.1 * a * b),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("prod", None),
        slow("sum", "ok"),
        weekly("Fold", "ok"),
        weekly("max", "ok"),
        weekly("logsumexp", None),
    ],
)
def test_gradients_of_reductions(name, where):
    reduction = REDUCTIONS[name]

    def kernel(x, a):
        v = jnp.tanh(end(x, a))
        return v if where is None else {"v": v, "ok": x < 4}

    named = reduction if where is None else {"v": reduction, "ok": None}
    options = {"reduce": named, "where": where, "chunk_size": 4}
    lanes = auto_vmap(x=0, a=0, lockstep=False, **options)(kernel)
    plain = auto_vmap(x=0, a=0, **options)(kernel)
    got = jax.jit(jax.grad(lambda x, a: total(lanes(x, a)), (0, 1)))(X, A)
    want = jax.jit(jax.jacfwd(lambda x, a: total(plain(x, a)), (0, 1)))(X, A)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"reduce": "sum", "reduce_axis": 0}, slow({})], ids=str)
def test_gradients_of_several_axes_and_keys(options):
    def kernel(x, y, key, a):
        return end(x[0] + y + 0.1 * jax.random.uniform(key), a) * x[1]

    declared = auto_vmap(x=1, y=0, key=SplitKey, a=0, chunk_size=4, **options)(kernel)
    x, y = jnp.stack([X[:5], X[5:10]], -1)[:, None], X[3:6]

    def loss(mapped, v):
        return total(mapped(v[0], v[1], jax.random.key(0), v[2]))

    lanes = functools.partial(loss, declared.with_options(lockstep=False))
    got = jax.jit(jax.grad(lanes))((x, y, A))
    assert_same(got, jax.jit(jax.jacfwd(functools.partial(loss, declared)))((x, y, A)), rtol=1e-4)


def test_axes_and_trees_of_outputs():
    def kernel(x, a):
        n, x, rest = growth(x[0], a)
        return {"n": n, "v": jnp.stack([x, rest["total"], a]), "a": a * 2}

    axes = {"in_axes": (1, None), "out_axes": {"n": 0, "v": 1, "a": None}}
    x = jnp.stack([X, X])
    loss = lambda mapped: lambda x, a: total(jax.tree.map(lambda v: v * v, mapped(x, a)))  # noqa: E731
    got = jax.jit(jax.value_and_grad(loss(free(kernel, **axes)), (0, 1)))(x, A)
    plain = loss(jax.vmap(kernel, **axes))
    assert_same(
        got, jax.jit(lambda x, a: (plain(x, a), jax.jacfwd(plain, (0, 1))(x, a)))(x, A), rtol=1e-4
    )


def test_under_vmap():
    a = jnp.array([0.2, 0.5])
    gradient = lambda mapped: jax.vmap(jax.grad(lambda a: total(mapped(X, a))))  # noqa: E731
    plain = jax.vmap(jax.jacfwd(lambda a: total(jax.vmap(end, (0, None))(X, a))))
    assert_same(jax.jit(gradient(free(end, in_axes=(0, None))))(a), jax.jit(plain)(a), rtol=1e-4)


def test_a_number_that_all_items_share_under_vmap():
    def kernel(n, x, a):
        return lax.fori_loop(0, n, lambda _, x: jnp.sin(a * x), x)

    n, x = jnp.array([2, 0, 3]), jnp.linspace(0.5, 1, 3)
    got = jax.jacrev(lambda x, a: free(kernel, 2, in_axes=(0, 0, None))(n, x, a), (0, 1))(x, A)
    want = jax.jacfwd(lambda x, a: jax.vmap(kernel, (0, 0, None))(n, x, a), (0, 1))(x, A)
    assert_same(got, want)


def test_many_pairs_stay_in_their_order(monkeypatch):
    monkeypatch.setattr("rankax.ext.lanes.call._MOST_SORTED", 10)
    pairs = auto_vmap(x=0, a=0, chunk_size=4, reduce="sum", lockstep=False)(end)
    x, a = X[:5, None], jnp.array([0.2, 0.5, 0.7])
    got = jax.jit(jax.grad(lambda x, a: jnp.sin(pairs(x, a)), (0, 1)))(x, a)
    plain = jax.vmap(jax.vmap(end, (None, 0)), (0, None))
    want = jax.jit(jax.jacfwd(lambda x, a: jnp.sin(jnp.sum(plain(x[:, 0], a))), (0, 1)))(x, a)
    assert_same(got, want, rtol=1e-3)


@pytest.mark.optimized
def test_memory_is_that_of_a_chunk_and_of_the_inputs():
    def gradient(mapped):
        return jax.grad(lambda x, a: jnp.sum(mapped(x, a) ** 2), (0, 1))

    def temporaries(mapped, *shapes):
        like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return temporary_bytes(gradient(mapped), *like)

    assert temporaries(free(end, 64, in_axes=(0, None)), (2000,), ()) < 150_000
    pairs = auto_vmap(x=0, a=0, chunk_size=64, reduce="sum", lockstep=False)(end)
    assert temporaries(pairs, (1500, 1), (1500,)) < 500_000


# Programs and plans.


def test_plans_say_how_loops_are_reversed():
    @jax.custom_jvp
    def ruled(x):
        return end(x, 0.5)

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
    gradient = jax.grad(lambda x: jnp.sum(free(end, in_axes=(0, None))(x, A)))
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
