# SPDX-License-Identifier: MIT
"""Batches that several devices share, compared with the same kernel on one, without a mesh.

`meshes.on` says on which devices a test runs. One session has them all, also for a debugger::

    pytest -n 0 --devices 4 tests/devices -k "test_errors and Auto-4" --pdb
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import random_calls
import rankax
from fuzz import programs
from helpers import slow, weekly
from kernel_kinds import KINDS, OPERATIONS, SOME_OPERATIONS, WITHOUT_GRADIENT
from library_functions import FUNCTIONS, HOMES, LEFT_OUT, SOME_FUNCTIONS
from meshes import on
from rankax import (
    SplitKey,
    auto_vmap,
    chunked_hessian,
    chunked_jacfwd,
    chunked_jacrev,
    chunked_reduce,
    chunked_vmap,
)
from rankax import reductions as rd

N = 480


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, W, B = data(N, 3), data(5, 3, seed=1), data(N, seed=2)


def kernel(x, w, b):
    return {"v": jnp.tanh(w @ x).sum() * b, "x": x + b}


def scalar(x, w):
    return jnp.tanh(w @ x).sum()


def mesh_of(kind, *shape):
    names = ("d", "e")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


from_0_10_1 = pytest.mark.skipif(
    jax.__version__ == "0.10.0", reason="JAX 0.10.0 cannot compile this, see docs/limits.md"
)


def inside(mesh):
    """Enter the mesh where its axes are explicit, which JAX wants."""
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()


def put(mesh, x, *entries):
    return jax.device_put(x, NamedSharding(mesh, P(*entries)))


SENDS = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def sent(compiled):
    """Count what a compiled program sends, which it must do outside of its loops."""
    loops, entry = compiled.as_text().split("\nENTRY ")
    assert not re.findall(SENDS, loops), re.findall(SENDS, loops)
    return dict(Counter(re.findall(SENDS, entry)))


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile()


def same(got, want, *, rtol=1e-4, atol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


@contextlib.contextmanager
def naming(label):
    """Say which of several failed."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(label) from error


def loss_of(f):
    def loss(*args):
        return sum(
            jnp.sum(out * out)
            for out in jax.tree.leaves(f(*args))
            if jnp.issubdtype(out.dtype, jnp.floating)
        )

    return loss


def value_and_gradients(f):
    return lambda *args: (f(*args), jax.grad(loss_of(f), (0, 1))(*args))


def given(mesh):
    """Return the option that a call inside `jax.jit` needs."""
    return {} if AxisType.Explicit in mesh.axis_types else {"devices": P("d")}


@on("Auto-4", slow("Explicit-8"))
def test_maps_send_nothing(mesh):
    args = put(mesh, X, "d"), put(mesh, W), put(mesh, B, "d")
    x, w, b = args
    want, pull_one = jax.vjp(jax.vmap(kernel, (0, None, 0)), X, W, B)
    # The cotangent is an argument, because the sum of a loss would itself be sent.
    ones = jax.tree.map(lambda out: put(mesh, np.ones(out.shape, "f"), "d"), want)
    pulled = pull_one(jax.tree.map(np.asarray, ones))
    for mapped in (  # of the chunks one divides what a device has, and one does not
        auto_vmap(x=1, w=2, b=0, chunk_size=20, **given(mesh))(kernel),
        chunked_vmap(kernel, 7, (0, None, 0), **given(mesh)),
    ):

        def pull(x, w, b, cotangent, mapped=mapped):
            return jax.vjp(mapped, x, w, b)[1](cotangent)

        def pull_mapped(*args, pull=pull):
            return pull(*args)[0]

        def push(x, w, b, t, mapped=mapped):
            return jax.jvp(lambda x: mapped(x, w, b), (x,), (t,))

        forward = compiled(mapped, *args)
        assert sent(forward) == {}
        same(forward(*args), want)
        for out in jax.tree.leaves(forward(*args)):  # as `jax.vmap` leaves it
            assert out.sharding.is_equivalent_to(x.sharding, out.ndim)
        assert sent(compiled(pull_mapped, *args, ones)) == {}
        backward = compiled(pull, *args, ones)
        assert sent(backward) == {"all-reduce": 1}
        same(backward(*args, ones), pulled, rtol=1e-3, atol=1e-3)
        assert sent(compiled(push, *args, x)) == {}

    def closed(w, x, b):
        own = chunked_vmap(lambda x, b: kernel(x, w, b), 7, **given(mesh))
        return loss_of(own)(x, b)

    assert sent(compiled(jax.grad(closed), w, x, b)) == {"all-reduce": 1}


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_second_derivatives(mesh):
    x, w, b = put(mesh, X, "d"), put(mesh, W), put(mesh, B, "d")
    loss = loss_of(chunked_vmap(kernel, 7, (0, None, 0), **given(mesh)))
    of_one = loss_of(jax.vmap(kernel, (0, None, 0)))
    got = jax.jit(lambda t: jax.jvp(jax.grad(lambda x: loss(x, w, b)), (x,), (t,)))(x)
    want = jax.jit(lambda t: jax.jvp(jax.grad(lambda x: of_one(x, W, B)), (X,), (t,)))(X)
    same(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_sines_of_ours_on_several_devices(mesh):
    x = np.linspace(-3, 3, 40, dtype=np.float32)
    y = np.linspace(1, 2, 40, dtype=np.float32)
    with inside(mesh):
        sharded = put(mesh, x, "d"), put(mesh, y, "d")
        for size in (None, 4):
            for reduce in (None, "sum"):
                plain = auto_vmap(0, 0, chunk_size=size, reduce=reduce, **given(mesh))(
                    lambda x, y: jnp.sin(x * y) * y**1.5 + jnp.arctan2(x, y)
                )
                kernel = plain.with_options(cpu_math=True)
                program = str(jax.make_jaxpr(kernel)(*sharded))
                assert (" sin " in program) == (jax.__version_info__ < (0, 12))
                got = jax.jit(value_and_gradients(kernel))(*sharded)
                same(got, jax.jit(value_and_gradients(plain))(*sharded))


@pytest.mark.usefixtures("unchecked")
@on("Auto-4")
def test_eager_calls_see_how_arrays_are_sharded(mesh):
    programs = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: programs.append(name) if name == event else None
    )
    x, w, b = put(mesh, X, "d"), put(mesh, W), put(mesh, B)
    for make in (
        lambda: chunked_vmap(kernel, 7, (0, None, 0)),
        lambda: auto_vmap(x=1, w=2, b=0, chunk_size=7)(kernel),
        lambda: chunked_reduce(kernel, {"v": "max", "x": "sum"}, 7, (0, None, 0)),
        lambda: auto_vmap(x=1, w=2, b=0, chunk_size=7, reduce=rd.Best("v"))(kernel),
    ):
        out = make()(x, w, b)
        same(out, make()(X, W, B))
        before = len(programs)
        again = make()(x + 0, w, b)
        assert len(programs) <= before + 1, "only the sum is new"
        for leaf in jax.tree.leaves(again):
            assert leaf.sharding.is_equivalent_to(
                NamedSharding(mesh, P("d") if leaf.shape[:1] == (N,) else P()), leaf.ndim
            )
    by_jit = auto_vmap(x=1, w=2, b=0, chunk_size=7, jit=True)(kernel)
    text = by_jit.lower(x, w, b).compile().as_text()
    assert not re.findall(SENDS, text)
    same(by_jit(x, w, b), by_jit(X, W, B))
    # Arrays with another sharding have another program.
    other = put(mesh_of(AxisType.Auto, 2, len(jax.devices()) // 2), X, "e")
    before = len(programs)
    same(
        chunked_vmap(kernel, 7, (0, None, 0))(other, W, B),
        chunked_vmap(kernel, 7, (0, None, 0))(X, W, B),
    )
    assert len(programs) > before


FOLD = rd.Fold(
    (jnp.float32(1), jnp.float32(0)),
    lambda y: (1 + y / 9, y),
    lambda first, second: (first[0] * second[0], first[1] + second[1]),
)
USUAL = [("sum", scalar), ("max", scalar), (rd.BottomK(3), scalar)]
OTHERS = [
    *((name, scalar) for name in ("mean", "min", "logsumexp", rd.Moments(), FOLD)),
    ("prod", lambda x, w: 1 + scalar(x, w) / 9),
    (rd.TopK(100), scalar),  # more than one device has
    (rd.Best("v"), lambda x, w: kernel(x, w, 1.0)),
    ("any", lambda x, w: scalar(x, w) > 4),
    ("all", lambda x, w: scalar(x, w) < 4),
    ("argmax", scalar),
    ("argmin", scalar),
    ("gram", lambda x, w: jnp.tanh(w @ x)),
]
BY_SUM = ("sum", "mean", "any", "all", "gram")
WITHOUT_DERIVATIVE = ("any", "all", "argmax", "argmin")


def check_reductions(cases, own, one, args, mesh, *, exchanged=0):
    """Compare values and gradients with those of one device, and count what is sent.

    ``own`` and ``one`` map a function over all devices and over one. Of the cotangents
    ``exchanged`` are sent, besides those of the argument that all items share.
    """
    got, most = [], 0
    for reduction, fun in cases:
        forward = compiled(own(fun, reduction), *args)
        found = sent(forward)
        # What no sum makes is sent to all devices, in one piece for each dtype.
        pieces = 1 if reduction in (*BY_SUM, "max", "min", "prod", "logsumexp", FOLD) else 2
        assert 1 <= sum(found.values()) <= pieces, (reduction, found)
        if reduction in BY_SUM:
            assert found == {"all-reduce": 1}, (reduction, found)
        got.append(forward(*args))
        if reduction not in WITHOUT_DERIVATIVE:
            most += sum(found.values()) + 1 + exchanged

    def gradients(mapped, *args):
        differentiable = (case for case in cases if case[0] not in WITHOUT_DERIVATIVE)
        return [
            jax.grad(loss_of(mapped(fun, reduction)), (0, 1))(*args)
            for reduction, fun in differentiable
        ]

    @jax.jit
    def of_one(*args):
        return [one(fun, reduction)(*args) for reduction, fun in cases], gradients(one, *args)

    plain = jax.tree.map(np.asarray, args)
    want, slopes = jax.tree.map(np.asarray, of_one(*plain))
    for (reduction, _), a, b in zip(cases, got, want, strict=True):
        with naming(reduction):
            same(a, b)
    backward = compiled(functools.partial(gradients, own), *args)
    assert sum(sent(backward).values()) <= most, (sent(backward), most)
    for a, b in zip(backward(*args), slopes, strict=True):
        scale = max(float(abs(leaf).max()) for leaf in b)
        same(a, b, rtol=1e-3, atol=1e-4 * scale)
    return want


def check_sharded(mesh, cases):
    def mapped(fun, reduction, **options):
        return chunked_reduce(fun, reduction, 7, (0, None), **options)

    own = functools.partial(mapped, **given(mesh))
    check_reductions(cases, own, mapped, (put(mesh, X, "d"), put(mesh, W)), mesh)


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_reductions_send_once(mesh):
    for usual in USUAL:
        check_sharded(mesh, [usual])


@pytest.mark.slow
@on("Auto-8", "Explicit-8")
def test_other_reductions_send_once(mesh):
    check_sharded(mesh, OTHERS)


def reduce_sharded(mesh, reduction, size, values, fun=lambda x: x * 1):
    return chunked_reduce(fun, reduction, size)(put(mesh, np.asarray(values), "d"))


@pytest.mark.slow
@on("Auto-4")
def test_nan_survives_the_merge(mesh):
    nan = np.nan
    for values in (
        [3, 1, 1, 2, 4, 5, 1, nan],
        [nan, 1, 1, 2, 4, 5, 1, 3],
        [3, 1, nan, 2, 4, nan, 1, 0],
    ):
        values = np.asarray(values, "f")
        at = np.flatnonzero(np.isnan(values))[0]
        for name in ("argmax", "argmin"):
            assert int(reduce_sharded(mesh, name, 1, values)) == at, (name, values)
        for reduction in ("max", "min"):
            for size in (1, None):
                assert np.isnan(reduce_sharded(mesh, reduction, size, values)), (reduction, values)
        best = reduce_sharded(
            mesh, rd.Best("x"), 1, np.stack([values, values], 1), lambda x: {"x": x[0], "y": x}
        )
        assert np.isnan(best["y"]).all()


@pytest.mark.slow
@on("Auto-4")
def test_a_part_may_be_masked(mesh):
    inf = np.inf
    for values in (
        [0, 1, -inf, -inf, 2, 3, 1, 0],
        [-inf] * 7 + [2],
        [1e4, 1e4, -inf, -inf, -1e4, 0, 1, 2],
    ):
        args = np.ones(8, "f"), np.asarray(values, "f")
        own = jax.value_and_grad(chunked_reduce(lambda z, mask: 2 * z + mask, "logsumexp", 1))
        want = jax.value_and_grad(lambda z, mask: jax.nn.logsumexp(2 * z + mask))(*args)
        same(own(*(put(mesh, x, "d") for x in args)), want)


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_some_items_count(mesh):
    """None of the first device does, and the derivatives of what is left out are nan."""
    x = np.where((np.arange(N) % 3 == 0) | (np.arange(N) < N // 4), 0, X[:, 0] ** 2).astype("f")

    def root(x, w):
        return {"v": jnp.sqrt(w[0, 0] ** 2 * x), "ok": x > 0}

    names = ("sum", "mean", "min", "argmin", "logsumexp", rd.Moments(), rd.BottomK(3), FOLD)
    reduce = {"v": rd.Several(*names), "ok": "sum"}
    own = chunked_reduce(root, reduce, 7, (0, None), where="ok", **given(mesh))
    of_one = chunked_reduce(root, reduce, 7, (0, None), where="ok")
    sharded = put(mesh, x, "d"), put(mesh, W)
    want = jax.tree.map(np.asarray, jax.jit(value_and_gradients(of_one))(x, W))
    assert not any(np.isnan(leaf).any() for leaf in want[1])
    got = jax.jit(value_and_gradients(own))(*sharded)
    same(got[0], want[0])
    same(got[1], want[1], rtol=1e-3)
    total = chunked_reduce(root, "sum", 7, (0, None), where="ok", **given(mesh))
    assert sent(compiled(total, *sharded)) == {"all-reduce": 1}


@pytest.mark.slow
@on("Auto-3")
def test_some_items_of_any_length_count(mesh):
    """More than one device has an item, or only one; the derivative of what is left out is nan."""

    def root(x, w):
        return {"v": jnp.sqrt(w * x), "ok": x > 0}

    names = ("sum", rd.Moments(), "argmin", rd.BottomK(2), FOLD)
    reduce = {"v": rd.Several(*names), "ok": None}
    for length in (2, 2 * mesh.size + 3):
        x = np.arange(length, dtype="f")[::-1] - length // 2 * (np.arange(length) % 2)
        own, one = on_all(functools.partial(chunked_reduce, root, reduce, 2, (0, None), where="ok"))
        want = jax.jit(value_and_gradients(one))(x, 2.0)
        assert not any(np.isnan(leaf).any() for leaf in want[1])
        same(own(x, 2.0), want[0])
        same(jax.jit(jax.grad(loss_of(own), (0, 1)))(x, 2.0), want[1], rtol=1e-3)


@pytest.mark.slow
@on("Auto-4")
def test_narrow_floats_are_merged_wide(mesh):
    values = jnp.where(jnp.arange(256) % 3 > 1, 1000.0, 1004.0).astype(jnp.bfloat16)
    of_one = chunked_reduce(lambda x: x, rd.Moments(), 16)(values)
    same(reduce_sharded(mesh, rd.Moments(), 16, values), of_one)
    cancel = np.repeat(np.float16([6e4, -6e4, 6e4, -6e4]), 4)
    for name in ("sum", "mean"):
        assert float(reduce_sharded(mesh, name, 1, cancel)) == 0, name


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_memory_of_a_device_does_not_grow(mesh):
    def spread(x, w):  # (200, 3): needs (200, 200) numbers on the way
        return jnp.sum(jnp.tanh(jnp.sum((x[:, None] - x[None]) ** 2, -1)) * w[0, 0])

    mapped = chunked_vmap(spread, 2, (0, None), **given(mesh))
    total = chunked_reduce(spread, "sum", 2, (0, None), **given(mesh))

    def temporaries(fun, items):
        args = put(mesh, data(items, 200, 3), "d"), put(mesh, W), put(mesh, data(items), "d")
        return compiled(fun, *args).memory_analysis().temp_size_in_bytes

    for program in (
        lambda x, w, _: mapped(x, w),
        lambda x, w, cotangent: jax.vjp(mapped, x, w)[1](cotangent),
        lambda x, w, _: jax.jvp(mapped, (x, w), (x, w)),
        lambda x, w, _: jax.grad(total, (0, 1))(x, w),
    ):
        few, many = temporaries(program, 64), temporaries(program, 640)
        # An item has 2400 bytes; of its cotangent, 4, there may be a copy.
        assert many <= few + 4 * 640, (few, many)


@pytest.mark.slow
@on("Auto-8")
def test_one_of_several_axes(mesh):
    devices = mesh.size
    a, s = data(6, 48, 3), data(6, 1, seed=3)
    fun = auto_vmap(x=1, w=2, b=0)(kernel)
    auto = mesh_of(AxisType.Auto, 2, devices // 2)
    for reduce, axis in (
        (None, None),
        ({"v": "sum", "x": None}, 0),
        ({"v": "argmax", "x": rd.BottomK(3)}, None),
    ):
        own = fun.with_options(chunk_size=5, reduce=reduce, reduce_axis=axis, jit=True)
        want = own(a, W, s)
        for entries in ((None, "d"), (None, ("d", "e")), ("d", "e")):
            args = put(auto, a, *entries), put(auto, W), put(auto, s, entries[0])
            program = own.lower(*args).compile()
            same(program(*args), want)
            found = sent(program)
            assert reduce is not None or found == {}
    # Of equal items the first counts, along the axes as they are.
    ties = auto_vmap(x=0, chunk_size=3, reduce="argmax")(lambda x: x)
    level = np.zeros((6, 48), "f")
    level[3, 1] = level[2, 30] = level[2, 47] = 1
    assert int(ties(put(auto, level, None, "d"))) == 2 * 48 + 30
    best = auto_vmap(x=0, i=0, chunk_size=3, reduce=rd.Best("x"))(lambda x, i: {"x": -x, "i": i})
    index = np.arange(6 * 48).reshape(6, 48)
    assert int(best(put(auto, level, None, "d"), put(auto, index, None, "d"))["i"]) == 2 * 48 + 30
    top = auto_vmap(x=0, chunk_size=3, reduce=rd.TopK(3))(lambda x: x)
    assert top(put(auto, level, None, "d")).indices.tolist() == [126, 143, 145]


@pytest.mark.slow
@on("Auto-4")
def test_other_ways_to_map(mesh):
    x, w = put(mesh, X.T.copy(), None, "d"), put(mesh, W)

    def fun(tree, w, k):
        return (scalar(tree["x"], w) + k, {"x": tree["x"]}, w[0, 0] * 2)

    args = {"x": x}, w, np.float32(2)
    axes = ({"x": 1}, None, None), (0, {"x": -1}, None)
    want = jax.vmap(fun, *axes)({"x": X.T}, W, np.float32(2))
    same(chunked_vmap(fun, 7, *axes)(*args), want)
    inner = jax.jit(chunked_vmap(fun, 7, *axes, devices=mesh.size))
    same(inner(*args), want)
    assert sent(inner.lower(*args).compile()) == {}
    # Items that are on several devices stay there.
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    wide = put(square, data(N, 4), "d", "e")
    doubled = jax.jit(chunked_vmap(lambda x: jnp.tanh(x) * 2, 7, devices=P("d")))
    same(doubled(wide), jnp.tanh(data(N, 4)) * 2)
    assert sent(doubled.lower(wide).compile()) == {}
    keys = jax.random.split(jax.random.key(0), N)
    draws = chunked_vmap(jax.random.normal, 7)
    lying = jax.device_put(keys, NamedSharding(mesh, P("d")))
    np.testing.assert_array_equal(np.asarray(draws(lying)), np.asarray(draws(keys)))
    # Effects in order cannot be mapped over devices, so the batch is walked as one.
    seen = []

    def tells(x):
        jax.experimental.io_callback(lambda i: seen.append(int(i)), None, x, ordered=True)
        return x

    numbers = put(mesh, np.arange(16), "d")
    chunked_vmap(tells, 1)(numbers)
    jax.effects_barrier()
    assert seen == list(range(16)), seen


def check_drawn(out, summed, want):
    np.testing.assert_array_equal(np.asarray(out[1]), np.asarray(want[1]))
    same(out, want)
    np.testing.assert_array_equal(np.asarray(summed[1]), np.asarray(want[1]))
    axis = 0 if summed[0].ndim else None  # which has been summed, or all
    same(summed[0], np.sum(want[0], axis), atol=1e-3)


@pytest.mark.slow
@on("Auto-4")
def test_split_keys_are_those_of_the_whole_batch(mesh):
    def draw(x, key):
        return x + jax.random.normal(key), jax.random.key_data(key)

    batch = data(N, 6)
    keys = jax.random.key(3)
    want = jax.jit(jax.vmap(jax.vmap(draw)))(batch, jax.random.split(keys, batch.shape))
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    for entries, sizes in ((("d",), (1, 7)), ((None, "d"), (7, 100)), (("e", "d"), (1, 100))):
        for size in sizes:
            drawn = auto_vmap(x=0, key=SplitKey, chunk_size=size)(draw)
            total = drawn.with_options(reduce=("sum", None), reduce_axis=0)
            args = put(square, batch, *entries), keys
            check_drawn(drawn(*args), total(*args), want)


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_progress_counts_all_parts(mesh):
    x, w = put(mesh, X, "d"), put(mesh, W)
    heard = []

    def told(*now):
        heard.append(now)

    options = {"progress": told, **given(mesh)}
    for mapped in (
        chunked_vmap(scalar, 6, (0, None), **options),
        auto_vmap(x=1, w=2, chunk_size=6, **options)(scalar),
        chunked_reduce(scalar, "sum", 6, (0, None), **options),
    ):
        heard.clear()
        jax.jit(mapped)(x, w)
        jax.effects_barrier()
        assert heard[0] == (0, N), heard
        assert heard[-1] == (N, N), heard


@pytest.mark.slow
@on("Auto-4")
def test_shard_map_checks_what_varies(mesh):
    w = put(mesh, W)
    for mapped in (
        chunked_vmap(scalar, 7, (0, None)),
        auto_vmap(x=1, w=2, chunk_size=7, jit=True)(lambda x, w: scalar(x, w) ** 2 / 4),
        chunked_reduce(scalar, "sum", 7, (0, None)),
        chunked_reduce(scalar, rd.BottomK(2), 7, (0, None)),
        chunked_reduce(scalar, "logsumexp", 7, (0, None)),
    ):

        def out(x, w, mapped=mapped):
            return jax.tree.map(jnp.atleast_1d, mapped(x, w))

        def pull(x, w, out=out):
            return jax.grad(loss_of(out))(x, w)

        for own in (out, pull):
            # A batch of which no chunk divides what a device has.
            x = put(mesh, X[: 7 * mesh.size], "d") if own is out else put(mesh, X, "d")
            specs = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}
            of_one = jax.jit(own)
            by_device = [of_one(part, W) for part in np.split(np.asarray(x), mesh.size)]
            want = jax.tree.map(lambda *parts: np.concatenate(parts), *by_device)
            same(jax.jit(jax.shard_map(own, **specs))(x, w), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@on("Auto-4")
def test_the_plan_says_it(mesh):
    x, w = put(mesh, X, "d"), put(mesh, W)
    mapped = auto_vmap(x=1, w=2, chunk_size=7)(scalar)
    devices = mesh.size
    plan = mapped.plan(x, w)
    assert plan.devices == ((0, devices),)
    assert plan.batch_shape == (N,)
    assert plan.in_flight <= 7
    assert f"axis 0: over {devices} devices, {N // devices} items on each" in str(plan)
    assert "in flight on each device" in str(plan)
    assert f"over {devices} devices" in plan._repr_html_()
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert mapped.plan(shape, w) == plan
    assert mapped.with_options(devices=devices).plan(X, W).devices == ((0, devices),)
    assert mapped.with_options(devices=1).plan(x, w).devices == ()
    # Where a device has all of its items in flight, this is `jax.vmap`.
    assert str(mapped.with_options(chunk_size=N).plan(x, w)) == str(
        mapped.with_options(chunk_size=None).plan(x, w)
    )
    limited = auto_vmap(x=1, w=2, memory_limit="2 kB")(scalar)
    assert limited.plan(x, w).memory.chunk_size <= N // devices
    same(limited(x, w), jax.vmap(scalar, (0, None))(X, W))


def refused(error, text, call, *args):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call(*args)


@pytest.mark.slow
@on("Auto-4")
def test_errors(mesh):
    mesh = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    x, w = put(mesh, X, "d"), put(mesh, W)

    def wrong(devices, error, text):
        def mapped():
            chunked_vmap(scalar, 7, devices=devices)

        def reduced():
            chunked_reduce(scalar, "sum", 7, devices=devices)

        def decorated():
            auto_vmap(1, 2, devices=devices)(scalar)

        refused(error, f"chunked_vmap(scalar): {text}", mapped)
        refused(error, f"chunked_reduce(scalar): {text}", reduced)
        refused(error, f"auto_vmap(scalar): {text}", decorated)

    wrong(0, ValueError, "devices must be a positive int, got 0")
    wrong(True, TypeError, "devices must be a positive int, got True")
    wrong(
        "d",
        TypeError,
        "devices must be 'all', a positive int, a sequence of jax.Device, a "
        "jax.sharding.PartitionSpec, False, or None, got 'd'; the axes of a mesh are named by "
        "PartitionSpec('d')",
    )
    wrong(
        "gpu",
        TypeError,
        "devices must be 'all', a positive int, a sequence of jax.Device, a "
        "jax.sharding.PartitionSpec, False, or None, got 'gpu'; for all of this kind, pass 'all' "
        "or jax.devices('gpu')",
    )
    wrong(
        2.0,
        TypeError,
        "devices must be 'all', a positive int, a sequence of jax.Device, a "
        "jax.sharding.PartitionSpec, False, or None, got 2.0",
    )

    def unfit(devices, args, text):
        mapped = auto_vmap(x=1, w=2, chunk_size=7, devices=devices)(scalar)
        refused(ValueError, f"scalar(): devices={devices!r} {text}", mapped, *args)

    unfit(P("z"), (x, w), "names 'z', but the mesh has the axes 'd' and 'e'")
    unfit(P("d", "e"), (x, w), "has 2 entries for the batch shape (480,)")
    unfit(
        P("d"),
        (X, W),
        "names axes of a mesh, but no argument is on one here; give the number of devices, or call "
        "it with jax.set_mesh(mesh)",
    )
    fold = rd.Fold(jnp.float32(0), lambda y: y, jnp.add)
    first = auto_vmap(x=1, chunk_size=7, reduce=fold)(lambda x: x[0] * 1)
    cube = put(mesh, data(6, 48, 3), None, "d")
    same(first(cube), jnp.sum(data(6, 48, 3)[..., 0]), rtol=1e-3, atol=1e-3)
    refused(
        ValueError,
        "<lambda>(): Fold takes items in order, so only the first of the reduced axes (0, 1) can "
        "be sharded, but axis 1 is",
        first.with_options(devices=P(None, "d")),
        cube,
    )


# Devices that the call chooses: `devices="all"`, for any length.

ODD = N + 3
LENGTHS = (N, ODD)


def on_all(make):
    """Return a mapped function over all devices, and over one."""
    return make(devices="all"), make()


@pytest.mark.slow
@on("Auto-4")
def test_maps_of_any_length_send_nothing_inside(mesh):
    for size, length in ((7, N), (7, ODD), (None, ODD), (20, N)):
        x, b = data(length, 3), data(length, seed=2)
        mapped, one = on_all(functools.partial(chunked_vmap, kernel, size, (0, None, 0)))
        ones = {"v": np.ones(length, np.float32), "x": np.ones((length, 3), np.float32)}

        @jax.jit
        def of_one(x, w, b, cotangent, one=one):
            out, pull = jax.vjp(one, x, w, b)
            return out, pull(cotangent)

        # Where the devices do not divide the length, each gets all results, and all cotangents.
        gathered = 2 if length % mesh.size else 0  # of two outputs, of x and of b

        def pull(x, w, b, cotangent, mapped=mapped):
            return jax.vjp(mapped, x, w, b)[1](cotangent)

        def pull_mapped(*args, pull=pull):
            pulled = pull(*args)
            return pulled[0], pulled[2]

        forward = compiled(mapped, x, W, b)
        assert sent(forward) == ({"all-gather": gathered} if gathered else {}), sent(forward)
        want, slopes = of_one(x, W, b, ones)
        same(forward(x, W, b), want)
        assert sent(compiled(pull_mapped, x, W, b, ones)) == sent(forward)
        backward = compiled(pull, x, W, b, ones)
        assert sent(backward) == {"all-reduce": 1, **sent(forward)}
        same(backward(x, W, b, ones), slopes, rtol=1e-3, atol=1e-3)


def check_any_length(mesh, cases, size=7, lengths=LENGTHS):
    for length in lengths:

        def mapped(fun, reduction, **options):
            return chunked_reduce(fun, reduction, size, (0, None), **options)

        own = functools.partial(mapped, devices="all")
        # Each device gets the cotangents of x if they do not divide.
        exchanged = int(length % mesh.size > 0)
        args = data(length, 3), W
        want = check_reductions(cases, own, mapped, args, mesh, exchanged=exchanged)
        if len(cases) == 1 and exchanged:  # without `jax.jit`
            ((reduction, fun),) = cases
            same(own(fun, reduction)(*args), want[0])


@pytest.mark.slow
@on("Auto-4")
def test_usual_reductions_of_any_length(mesh):
    for usual in USUAL:
        check_any_length(mesh, [usual])
    check_any_length(mesh, USUAL[:1], None, lengths=[ODD])


@pytest.mark.slow
@on("Auto-8")
def test_other_reductions_of_any_length(mesh):
    check_any_length(mesh, OTHERS, lengths=[ODD])  # of `N`, in `other_reductions_send_once`


@pytest.mark.slow
@on("Auto-4")
def test_basis_vectors_of_a_jacobian_are_items(mesh):
    def fun(x):
        return jnp.cumsum(jnp.sin(x)) * jnp.sum(x**2)

    x = data(100)
    plain = np.asarray(jax.jit(jax.jacfwd(fun))(x))
    for jacobian in (chunked_jacfwd, chunked_jacrev):
        spread = functools.partial(jacobian, fun, chunk_size=7, devices="all")
        found = spread()(x)
        assert len(found.sharding.device_set) == mesh.size
        same(found, plain, rtol=1e-4, atol=1e-3)
        same(jax.jit(spread(reduce="trace"))(x), np.trace(plain), rtol=1e-4)
        same(spread(reduce="gram")(x), plain.T @ plain, rtol=1e-3, atol=1.0)
    hessian = chunked_hessian(lambda x: jnp.sum(fun(x)), chunk_size=7, devices="all")
    want = jax.jit(jax.hessian(lambda x: jnp.sum(fun(x))))(x)
    same(hessian(x), want, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@on("Auto-3")
def test_every_length_counts_once(mesh):
    """From no item to more than two for each device; with the index of each item."""
    count = mesh.size
    for size, lengths in (
        (1, (0, 1, 2, count, count + 1, count + 2, 2 * count, 2 * count + 2)),
        (None, (0, 2, count, 2 * count + 1)),
    ):
        for length in lengths:
            check_length(np.arange(length, dtype="f")[::-1].copy(), size)


def check_length(x, size):
    reduced = functools.partial(chunked_reduce, chunk_size=size, devices="all")
    doubled = chunked_vmap(lambda x: 2 * x, size, devices="all")
    fold = rd.Fold(jnp.float32(0), lambda x: x, jnp.add)
    totals = [reduced(lambda x: x * x, reduction) for reduction in ("sum", fold)]
    last = len(x) - 1

    @jax.jit
    def found(x):
        found = {
            "doubled": (doubled(x), jax.grad(lambda x: jnp.sum(doubled(x) ** 2))(x)),
            "totals": [(total(x), jax.grad(total)(x)) for total in totals],
        }
        if len(x):
            found["least"] = reduced(lambda x: (x * 1, x), ("argmin", None))(x)
        if len(x) > 2:
            found["top"] = reduced(lambda x: x * 1, rd.BottomK(3))(x)
        return found

    want = {"doubled": (2 * x, 8 * x), "totals": 2 * [(np.sum(x * x), 2 * x)]}
    if len(x):
        want["least"] = np.int32(last), x
    if len(x) > 2:
        best = np.arange(3)
        want["top"] = rd.TopKResult(best.astype("f"), (last - best).astype("int32"))
    same(found(x), want)


@pytest.mark.slow
@on("Auto-4")
def test_a_call_takes_arrays_from_anywhere(mesh):
    devices = jax.devices()
    own, one = on_all(functools.partial(auto_vmap, x=1, w=2, b=0, chunk_size=7))

    def gradients(f):
        return jax.grad(loss_of(f), (0, 1, 2))

    def pushed(f, *args):
        return jax.jvp(f, args, args)

    @jax.jit
    def of_one(*args):
        f = one(kernel)
        return f(*args), gradients(f)(*args), pushed(f, *args)

    for length in LENGTHS:
        x, b = data(length, 3), data(length, seed=2)
        want, slopes, tangents = of_one(x, W, b)
        spread = NamedSharding(mesh, P() if length % mesh.size else P("d"))
        for jit in (False, True):
            mapped = own(kernel).with_options(jit=jit)
            for put_x in (
                lambda x: x,
                jnp.asarray,
                lambda x: jax.device_put(x, devices[1]),
                lambda x: put(mesh, x),
                lambda x, spread=spread: jax.device_put(x, spread),
            ):
                out = mapped(put_x(x), jax.device_put(W, devices[2]), b)
                same(out, want)
                for leaf in jax.tree.leaves(out):  # spread, or on every device
                    assert leaf.sharding.is_equivalent_to(spread, leaf.ndim)

            same(gradients(mapped)(jnp.asarray(x), W, b), slopes, rtol=1e-3, atol=1e-3)
            same(pushed(mapped, x, W, b), tangents, rtol=1e-3)
            both = jax.vmap(lambda w, f=mapped, x=x, b=b: f(x, w, b))(np.stack([W, 2 * W]))
            same(jax.tree.map(lambda out: out[0], both), want)
            both = jax.vmap(lambda x, f=mapped, b=b: f(x, W, b), in_axes=1)(np.stack([x, x], 1))
            same(jax.tree.map(lambda out: out[1], both), want)
        same(jax.jit(gradients(own(kernel)))(x, W, b), slopes, rtol=1e-3, atol=1e-3)
    # Another mesh may be set than the one that arrays are on.
    with jax.set_mesh(mesh_of(AxisType.Auto, 2, mesh.size // 2)):
        apart = jax.make_mesh((mesh.size,), ("x",), axis_types=(AxisType.Auto,))
        same(
            chunked_vmap(scalar, 7, (0, None))(put(apart, X, "x"), W),
            jax.vmap(scalar, (0, None))(X, W),
        )
    # What is sharded over the same devices stays on the mesh of the caller.
    assert own(kernel)(put(mesh, X, "d"), W, B)["v"].sharding.mesh == mesh
    # What the kernel closes over is copied to all devices, wherever it is.
    w = jax.device_put(W, devices[3])
    mapped = chunked_vmap(lambda x: scalar(x, w), 7, devices="all")
    same(mapped(X), jax.jit(jax.vmap(scalar, (0, None)))(X, W))


@pytest.mark.slow
@on("Auto-4")
def test_devices_are_chosen(mesh):
    devices = jax.devices()
    mapped = auto_vmap(x=1, w=2, chunk_size=7, devices=2)(scalar)
    plain = jax.jit(jax.vmap(scalar, (0, None)))
    want = plain(X, W)
    for given, used in (
        (2, devices[:2]),
        (3, devices[:3]),
        ([devices[3], devices[1]], [devices[3], devices[1]]),
        (mesh.devices, devices),
        ([devices[2]], [devices[2]]),
        (1, [devices[0]]),
    ):
        out = mapped.with_options(devices=given)(X, W)
        same(out, want)
        assert out.sharding.device_set == set(used), given
    # No more devices than there are items.
    assert len(mapped.with_options(devices="all")(X[:3], W).sharding.device_set) == 3
    assert mapped.with_options(devices="all")(X[0], W).shape == ()
    # 1: on the first device, wherever the arrays are. False: as one, where they are.
    one, whole = (mapped.with_options(devices=given) for given in (1, False))
    for call in (one, whole):
        assert call.plan(put(mesh, X, "d"), W).devices == ()
        same(call(put(mesh, X, "d"), W), want)
    there = jax.device_put(X, devices[2])
    assert one(there, W).devices() == {devices[0]}
    assert whole(there, W).devices() == {devices[2]}
    with rankax.options(devices=2):
        assert auto_vmap(x=1, w=2)(scalar).plan(X, W).devices == ((0, 2),)
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh_of(kind, mesh.size)):
            for x in (X, data(ODD, 3)):
                for call in (
                    mapped.with_options(devices="all"),
                    chunked_vmap(scalar, 7, (0, None)),
                ):
                    same(call(x, W), plain(x, W))
            refused(
                ValueError,
                f"scalar(): devices=2 names 2 devices, but the call is on another mesh, of "
                f"{mesh.size} devices; leave out devices= to use it",
                mapped,
                X,
                W,
            )


def collatz(n, w):
    def body(state):
        n, count, total = state
        following = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return following, count + 1, total + w[0] * jnp.sin(n * w[1])

    start = n, 0, jnp.float32(0)
    return jax.lax.while_loop(lambda state: state[0] > 1, body, start)[1:]


@on("Auto-4")
def test_items_end_alone(mesh):
    w = jnp.array([0.3, 0.7])
    mapped = auto_vmap(n=0, w=1, chunk_size=3, lockstep=False, devices="all")(collatz)
    # A vmapped loop asks all devices at each step whether it is done; here each ends alone.
    assert sent(compiled(mapped, jnp.arange(1, N + 1), w)) == {}
    totals = mapped.with_options(reduce="sum")
    assert sent(compiled(totals, jnp.arange(1, N + 1), w)) == {"all-reduce": 2}
    best = mapped.with_options(reduce=(None, "argmax"))
    for length, wrapped in ((N, jax.jit), (ODD, lambda fun: fun), (2, jax.jit)):
        n = np.arange(1, length + 1, dtype=np.int32)
        counts, sums = jax.jit(jax.vmap(collatz, (0, None)))(n, w)
        want = (counts, sums), (jnp.sum(counts), jnp.sum(sums)), (counts, jnp.argmax(sums))
        same(wrapped(lambda n: (mapped(n, w), totals(n, w), best(n, w)))(n), want)
    plan = mapped.plan(jnp.arange(N), w)
    assert (plan.lanes, plan.devices) == (3, ((0, mesh.size),))


@pytest.mark.slow
@on("Auto-4")
def test_derivatives_of_items_that_end_alone(mesh):
    w = jnp.array([0.3, 0.7])
    mapped = auto_vmap(n=0, w=1, chunk_size=3, lockstep=False, devices="all")(collatz)
    largest = mapped.with_options(reduce=(None, "logsumexp"))

    def slopes(gradient, fun, largest, n, w):
        both = gradient(lambda w: jnp.sum(jnp.sin(fun(n, w)[1])) + largest(n, w)[1])(w)
        return jax.jvp(lambda w: fun(n, w)[1], (w,), (w,)), both

    each = jax.vmap(collatz, (0, None))
    plain_largest = lambda n, w: jax.tree.map(jax.nn.logsumexp, each(n, w))  # noqa: E731
    plain = jax.jit(functools.partial(slopes, jax.jacfwd, each, plain_largest))
    found = functools.partial(slopes, jax.grad, mapped, largest)
    for length, call in ((N, jax.jit(found)), (ODD, found), (2, jax.jit(found))):
        n = np.arange(1, length + 1, dtype=np.int32)
        same(call(n, w), plain(n, w), rtol=1e-3, atol=1e-3)


@on("Auto-4")
def test_noise_and_progress_of_items_that_end_alone(mesh):
    """Noise is that of the whole batch, and progress counts all items."""
    key, seen = jax.random.key(1), []

    def noisy(n, key):
        def body(state):
            return state[0] - 1, state[1] + jax.random.normal(jax.random.fold_in(key, state[0]))

        return jax.lax.while_loop(lambda state: state[0] > 0, body, (n, jnp.float32(0)))[1]

    n = jnp.arange(ODD) % 5
    drawn = auto_vmap(n=0, key=SplitKey, chunk_size=3, lockstep=False, devices="all")(noisy)
    same(drawn(n, key), jax.jit(jax.vmap(noisy))(n, jax.random.split(key, ODD)))
    jax.block_until_ready(
        drawn.with_options(progress=lambda done, total: seen.append((done, total)))(n, key)
    )
    jax.effects_barrier()
    assert seen[-1][0] == seen[-1][1] == max(seen)[0]


@pytest.mark.slow
@on("Explicit-4", enter=False)
def test_items_end_alone_on_an_explicit_mesh(mesh):
    n, w = np.arange(1, N + 1, dtype=np.int32), jnp.array([0.3, 0.7])
    lying = put(mesh, n, "d")
    mapped = auto_vmap(n=0, w=1, chunk_size=3, lockstep=False)(collatz)
    totals = mapped.with_options(reduce="sum")

    def slopes(gradient, fun, n, w):
        pulled = gradient(lambda w: jnp.sum(fun(n, w)[1]))(w)
        return jax.jvp(lambda w: fun(n, w)[1], (w,), (w,)), pulled

    @jax.jit
    def plain(n, w):
        each = jax.vmap(collatz, (0, None))
        counts, sums = each(n, w)
        return (counts, sums), (jnp.sum(counts), jnp.sum(sums)), slopes(jax.jacfwd, each, n, w)

    want = plain(n, w)
    with jax.set_mesh(mesh):
        assert sent(compiled(mapped, lying, w)) == {}
        assert sent(compiled(totals, lying, w)) == {"all-reduce": 2}
        found = mapped(lying, w), totals(lying, w), slopes(jax.grad, mapped, lying, w)
    same(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@on("Auto-4")
def test_inner_kernels_use_one_device(mesh):
    inner = auto_vmap(v=0, devices="all", chunk_size=2)(lambda v: jnp.sin(v))
    outer = auto_vmap(x=1, devices="all", chunk_size=5)(lambda x: inner(x).sum())
    want = np.sin(X).sum(1)
    same(outer(X), want)
    assert sent(compiled(outer, X)) == {}
    # But they do if the outer one is walked as one.
    same(outer.with_options(devices=False)(X), want)
    own = jax.shard_map(
        lambda x: outer(x), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    same(jax.jit(own)(put(mesh, X, "d")), want)


@pytest.mark.slow
@on("Auto-4")
def test_the_longest_axis_that_serves_is_spread(mesh):
    a, s = data(6, ODD, 3), data(6, 1, seed=3)
    fun = auto_vmap(x=1, w=2, b=0, devices="all")(kernel)
    one = fun.with_options(devices=None)
    ways = (
        {},
        {"reduce": {"v": "sum", "x": None}, "reduce_axis": 0},
        {"reduce": {"v": "mean", "x": None}, "reduce_axis": 1},
        {"reduce": {"v": "argmax", "x": rd.BottomK(3)}},
        {"reduce": {"v": rd.Moments(), "x": "logsumexp"}},
    )
    plain = jax.jit(lambda *args: [one.with_options(**way)(*args) for way in ways])
    for number, (way, want) in enumerate(zip(ways, plain(a, W, s), strict=True)):
        for size in (5, None) if number % 2 == 0 else (5,):
            own = fun.with_options(chunk_size=size, **way)
            assert own.plan(a, W, s).devices == ((1, mesh.size),)
            same(own(a, W, s), want)
    folded = {"v": rd.Fold(jnp.float32(0), lambda y: y, jnp.add), "x": None}
    ordered = fun.with_options(reduce=folded, chunk_size=5)
    assert ordered.plan(a, W, s).devices == ((0, mesh.size),)
    total = np.sum(plain(a, W, s)[0]["v"])
    same(ordered(a, W, s)["v"], total, rtol=1e-3, atol=1e-3)
    # Of equally long axes, one that is kept.
    square = fun.with_options(reduce="sum", reduce_axis=0, chunk_size=5)
    assert square.plan(data(9, 9, 3), W, s[0]).devices == ((1, mesh.size),)


@pytest.mark.slow
@on("Auto-4")
def test_named_axes_are_of_any_length(mesh):
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    a, s = data(5, 7, 3), data(5, 1, seed=3)
    fun = auto_vmap(x=1, w=2, b=0, chunk_size=5)(kernel)
    args = put(square, a), put(square, W), put(square, s)
    ways = (
        {},
        {"reduce": {"v": "sum", "x": None}, "reduce_axis": 0},
        {"reduce": {"v": "argmax", "x": rd.BottomK(3)}},
    )

    def found(ways, *args, **options):
        return [fun.with_options(**way, **options)(*args) for way in ways]

    want = jax.jit(functools.partial(found, ways))(a, W, s)
    for spec, chosen in (
        (P("d"), slice(1, 3)),
        (P(None, "d"), slice(0, 2)),
        (P("d", "e"), slice(0, 3)),
        (P(("d", "e")), slice(0, 3)),
    ):
        same(jax.jit(functools.partial(found, ways[chosen], devices=spec))(*args), want[chosen])
    # An axis that has fewer items than the mesh is walked as one.
    few = fun.with_options(devices=P("d"), jit=True)
    same(few(put(square, a[:1]), W, s[:1]), fun(a[:1], W, s[:1]))


@pytest.mark.slow
@on("Auto-4")
def test_keys_of_any_length_are_those_of_the_whole_batch(mesh):
    def draw(x, key):
        return x + jax.random.normal(key), jax.random.key_data(key)

    key = jax.random.key(3)
    for shape in ((ODD,), (2, ODD)):
        batch = data(*shape)
        mapped = draw
        for _ in shape:
            mapped = jax.vmap(mapped)
        want = jax.jit(mapped)(batch, jax.random.split(key, shape))
        for size in (1, 7, None):
            drawn = auto_vmap(x=0, key=SplitKey, chunk_size=size, devices="all")(draw)
            total = drawn.with_options(reduce=("sum", None))
            both = jax.jit(lambda *args, calls=(drawn, total): [call(*args) for call in calls])
            check_drawn(*both(batch, key), want)
    # Keys that are mapped are cut like any array.
    keys = jax.random.split(key, ODD)
    draws = chunked_vmap(jax.random.normal, 7, devices="all")
    same(draws(keys), jax.vmap(jax.random.normal)(keys), rtol=1e-6)
    # An axis that no array has is cut as well.
    drawn = auto_vmap(x=0, key=SplitKey, batch_shape=ODD, chunk_size=7, devices="all")(draw)
    same(drawn(1.0, key), jax.vmap(draw, (None, 0))(1.0, jax.random.split(key, ODD)))


@pytest.mark.slow
@on("Auto-4")
def test_plans_and_tuning_know_devices(mesh):
    count = mesh.size
    mapped = auto_vmap(x=1, w=2, chunk_size=7, devices="all")(scalar)
    x = jax.ShapeDtypeStruct((ODD, 3), jnp.float32)
    assert mapped.plan(x, W).devices == ((0, count),)
    assert f"axis 0: over {count} devices, 120 or 121 items on each" in str(mapped.plan(x, W))
    at_once = mapped.with_options(chunk_size=None).plan(X, W)
    assert f"{N // count} in flight on each device, 1 step" in str(at_once)
    assert f"over {count} devices, {N // count} items on each" in at_once._repr_html_()
    limited = auto_vmap(x=1, w=2, memory_limit="2 kB", devices="all")(scalar)
    assert limited.plan(x, W).memory.chunk_size <= N // count
    same(limited(data(ODD, 3), W), jax.vmap(scalar, (0, None))(data(ODD, 3), W))
    heard = []
    told = mapped.with_options(progress=lambda *now: heard.append(now))
    told(X, W)
    assert heard[0] == (0, N), heard
    assert heard[-1] == (N, N), heard
    tuned = mapped.with_options(devices=None).tune(X, W, seconds=0.5)
    tried = [candidate.options.get("devices") for candidate in tuned.tuning.candidates]
    assert "all" in tried, tried
    assert None in tried, tried
    assert "devices='all'" in str(tuned.tuning)
    same(tuned(X, W), mapped(X, W))


@pytest.mark.slow
@on("Auto-4")
def test_errors_of_devices(mesh):
    mapped = auto_vmap(x=1, w=2, chunk_size=7, devices=99)(scalar)
    refused(
        ValueError,
        f"scalar(): devices=99, but JAX has {mesh.size} CPU devices; for more CPU devices, one for "
        'each core, call jax.config.update("jax_num_cpu_devices", 99) before JAX is first used',
        mapped,
        X,
        W,
    )
    there = jax.device_put(X, jax.devices()[1])
    for jit in (False, True):
        mapped = mapped.with_options(devices="all", jit=jit)
        text = (
            "scalar(): inside jax.grad, jax.jvp or jax.vmap, an argument is committed to other "
            "devices than those of devices=; put it on them first, with jax.device_put"
        )
        with pytest.raises(ValueError, match=re.escape(text)):
            jax.grad(lambda x, f=mapped: f(x, W).sum())(there)
    with pytest.raises(ValueError, match=r"incompatible devices.*Got argument x "):  # of JAX
        jax.jit(mapped)(there, W)


@on("Explicit-4")
def test_check_refuses_explicit_axes(mesh):
    mapped = auto_vmap(x=1, w=2)(scalar)
    refused(
        TypeError,
        "scalar.check: an array is on a mesh with explicit axes, where items cannot be picked; "
        "pass jax.device_get(...) of the arguments",
        mapped.check,
        put(mesh, X, "d"),
        W,
    )
    assert mapped.check(X, W).items


@pytest.mark.slow
@on("Auto-4")
def test_buckets_are_filled_up_and_shared(mesh):
    filled = auto_vmap(x=1, w=2, jit=True, bucket=(mesh.size + 1,))(scalar)
    x = put(mesh, X[: mesh.size], "d")
    refused(
        ValueError,
        "scalar(): x is sharded over devices, but bucket= pads it on the host; with devices=, "
        "the devices share the padded batch",
        filled,
        x,
        W,
    )
    same(filled.with_options(devices="all")(x, W), jax.vmap(scalar, (0, None))(X[: mesh.size], W))


def check_ragged(mesh, reductions, **options):
    """Also with more devices than a length has items."""
    lengths = [6, 0, 5, 1, 3, 6, 1, 6, 5]  # three programs, of 3, 1 and 5 items
    x = rankax.Ragged(data(sum(lengths), 3), lengths)
    s = np.arange(9, dtype=np.float32)
    kernel = auto_vmap(x="n 3", mask=rankax.Mask("n"), s=0, **options)(
        lambda x, mask, s: jnp.sum(jnp.tanh(x).sum(-1), where=mask) * s
    )
    rows = auto_vmap("(n,3)->(n)", **options)(lambda x: x.sum(-1))
    shared = kernel.with_options(devices="all")
    same(shared(x, s), kernel(x, s))
    for reduce in reductions:
        both = [f.with_options(reduce=reduce) for f in (shared, kernel)]
        same(both[0](x, s), both[1](x, s))
    loss = lambda f: lambda x: jnp.sum(f(x, s) ** 2)  # noqa: E731
    same(jax.grad(loss(shared))(x), jax.grad(loss(kernel))(x))
    same(rows.with_options(devices="all")(x), rows(x))
    with pytest.raises(ValueError, match="s is sharded over devices, but ragged items are read"):
        kernel(x, put(mesh, np.arange(8, dtype=np.float32), "d"))


@on("Auto-4")
def test_ragged_items_are_shared(mesh):
    check_ragged(mesh, ["argmax"], jit=True, chunk_size=2)


@pytest.mark.slow
@on("Auto-4")
def test_ragged_items_are_shared_in_eager_calls(mesh):
    check_ragged(mesh, ["sum", "argmax", "logsumexp"])


# What XLA would divide wrongly, or with a collective in each step, if it saw a sharded axis.


def convolved(weights, image):
    """A convolution in the layout of Flax: weights (3, 3, 1, 2), an image (6, 6, 1)."""
    layout = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(image[None], weights, (1, 1), "SAME", dimension_numbers=layout)
    return jnp.sum(jnp.sin(out))


@pytest.mark.slow
@from_0_10_1
@on("Auto-4", "Explicit-4")
def test_gradients_of_convolutions_are_right(mesh):
    weights, images = data(3, 3, 1, 2), data(4 * mesh.size, 6, 6, 1, seed=1)
    slope = jax.grad(convolved)
    want = np.asarray(jax.jit(jax.vmap(slope, (None, 0)))(weights, images))
    lying = put(mesh, weights), put(mesh, images, "d")
    # A `jax.jit` of the caller hides the sharding of arrays, unless their types show it.
    ways = [({}, lying)]
    if AxisType.Explicit not in mesh.axis_types:
        ways.append(({"devices": "all"}, (weights, images)))
    for options, args in ways:
        for size in (None, 2, 3):
            mapped = auto_vmap(None, 3, chunk_size=size, **options)(slope)
            total = mapped.with_options(reduce="sum")
            calls = [mapped]
            if options or mesh.axis_types[0] == AxisType.Explicit:
                calls.append(jax.jit(mapped))
            for call in calls:
                same(call(*args), want, rtol=1e-3)
            same(total(*args), want.sum(0), rtol=1e-3, atol=1e-4)
    through = auto_vmap(None, 3, chunk_size=2, **given(mesh))(convolved)
    backward = compiled(jax.grad(lambda w, x: jnp.sum(through(w, x)), (0, 1)), *lying)
    assert sent(backward) == {"all-reduce": 1}
    own = jax.grad(lambda w, x: jnp.sum(jax.vmap(convolved, (None, 0))(w, x)), (0, 1))
    want = jax.jit(own)(weights, images)
    same(backward(*lying), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@on("Auto-4")
def test_callbacks_run_on_each_device(mesh):
    def called(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x, vmap_method="expand_dims").sum()

    for length in (8 * mesh.size, 8 * mesh.size + 1):
        x = data(length, 3)
        for size in (None, 2):
            mapped = chunked_vmap(called, size, devices="all")
            same(mapped(x), np.sin(x).sum(1))
            assert "all-reduce" not in sent(compiled(mapped, x))


@pytest.mark.slow
@on("Auto-4")
def test_ffts_and_factors_send_nothing(mesh):
    def factor(x):
        return jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(3)).sum()

    x = put(mesh, X, "d")
    for fun in (lambda x: jnp.abs(jnp.fft.fft(x)), factor, jnp.sort, jnp.cumsum):
        mapped = chunked_vmap(fun, 20, **given(mesh))
        forward = compiled(mapped, x)
        assert sent(forward) == {}
        same(forward(x), jax.jit(jax.vmap(fun))(X))


@pytest.mark.slow
@on("Auto-4")
def test_lapack_may_hang_with_jax_0_10(mesh):
    def factor(x):
        return jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(3)).sum()

    def warned(fun, threads):
        os.environ["PJRT_NPROC"] = str(threads)
        mapped = chunked_vmap(fun, 7, devices="all")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.jit(mapped).lower(X)
        return [(str(each.message), each.filename) for each in caught]

    before = os.environ.get("PJRT_NPROC")
    try:
        found = warned(factor, mesh.size)
        assert not warned(factor, mesh.size + 1)
        assert not warned(jnp.sort, mesh.size)
    finally:
        os.environ.pop("PJRT_NPROC")
        if before is not None:
            os.environ["PJRT_NPROC"] = before
    if jax.__version_info__[:2] != (0, 10):
        assert not found
        return
    ((text, file),) = found
    assert text.endswith(
        f"with JAX 0.10, LAPACK (here cholesky) can hang forever on {mesh.size} CPU devices that "
        f"have {mesh.size} threads; set the environment variable PJRT_NPROC to {2 * mesh.size} "
        "before JAX is first used, or use JAX 0.12"
    )
    assert file == __file__


@pytest.mark.slow
@on("Auto-4")
def test_jacobians_of_convolutions(mesh):
    weights, images = data(3, 3, 1, 2), data(mesh.size, 6, 6, 1, seed=1)
    own = auto_vmap(None, 3, chunk_size=1, devices="all")(convolved)

    def both(f):
        return jax.jacrev(f)(weights, images), jax.hessian(f)(weights, images)

    want = jax.jit(functools.partial(both, jax.vmap(convolved, (None, 0))))()
    same(jax.jit(functools.partial(both, own))(), want, rtol=1e-3)


@pytest.mark.slow
@on("Auto-4")
def test_items_end_alone_in_shard_map(mesh):
    def halved(n, w):
        def body(state):
            n, total = state
            return n // 2, total + jnp.sin(n * w)

        return lax.while_loop(lambda state: state[0] > 0, body, (n, jnp.sin(n * 0.0)))[1]

    n = np.arange(1, N + 1, dtype=np.int32)
    for reduce in (None, "sum"):
        mapped = auto_vmap(n=0, w=0, chunk_size=3, lockstep=False, reduce=reduce)(halved)

        def out(n, w, mapped=mapped):
            return jnp.atleast_1d(mapped(n, w))

        specs = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}
        got = jax.jit(jax.shard_map(out, **specs))(put(mesh, n, "d"), jnp.float32(0.3))
        want = jax.jit(jax.vmap(halved, (0, None)))(n, 0.3)
        if reduce:
            got, want = got.sum(), want.sum()
        same(got, want, rtol=1e-3)


@pytest.mark.parametrize("names", [slow(SOME_OPERATIONS), weekly(OPERATIONS)], ids=["some", "all"])
@on("Auto-4")
def test_no_operation_is_divided(mesh, names):
    """Values and gradients of many operations, on all devices and on one; none sends anything."""
    weights, items = data(3, 3), data(4 * mesh.size, 6, 6, seed=1)

    # An input for each operation, so that each has gradients of its own.
    w, x = dict.fromkeys(names, weights), dict.fromkeys(names, items)

    def apart(w, x):
        return {name: OPERATIONS[name](w[name], x[name]) for name in names}

    own, one = (chunked_vmap(apart, 2, (None, 0), **given) for given in ({"devices": "all"}, {}))

    def found(f, w, x):
        outs, pull = jax.vjp(f, w, x)
        ones = jax.tree.map(lambda out: jnp.ones(out.shape, out.dtype), outs)
        return outs, *pull(ones)

    program = compiled(functools.partial(found, own), w, x)
    assert sent(program).keys() == {"all-reduce"}  # of the cotangents of the weights
    want = jax.tree.map(np.asarray, jax.jit(functools.partial(found, one))(w, x))
    for got, expected in zip(program(w, x), want, strict=True):
        for name, out in got.items():
            with naming(name):
                same(out, expected[name], rtol=1e-2, atol=1e-3)


CASES = [SOME_FUNCTIONS[:1], slow(SOME_FUNCTIONS[1:]), weekly(tuple(FUNCTIONS))]


@pytest.mark.parametrize("names", CASES, ids=["quick", "some", "all"])
@on("Auto-4")
def test_functions_of_jax(mesh, names):
    """Values and gradients, in chunks on all devices: rules, loops and constants inside."""
    w, x = data(3, 3), data(4 * mesh.size + 1, 3, 3, seed=1)
    for name in names:
        kernel = FUNCTIONS[name]

        def found(mapped, w, x):
            outs, pull = jax.vjp(mapped, w, x)
            ones = jax.tree.map(lambda out: jnp.ones(out.shape, out.dtype), outs)
            return outs, pull(ones)

        shared = auto_vmap(None, 2, chunk_size=4, jit=True, devices="all")(kernel)
        with naming(name):
            want = jax.jit(functools.partial(found, jax.vmap(kernel, (None, 0))))(w, x)
            same(jax.tree.map(np.asarray, shared(w, x)), want[0], rtol=1e-2, atol=1e-3)
            same(jax.tree.map(np.asarray, found(shared, w, x)), want, rtol=1e-2, atol=1e-3)


def test_no_function_of_jax_is_left_out():
    found = {f"{home.__name__}.{name}" for home in HOMES for name in public(home)}
    assert found == {*FUNCTIONS}


def public(home):
    names = [name for name in vars(home) if not name.startswith("_") and name not in LEFT_OUT]
    return [name for name in names if callable(getattr(home, name))]


@pytest.mark.slow
@on("Explicit-4", enter=False)
def test_shared_arrays_are_summed_once_on_an_explicit_mesh(mesh):
    # An array that is on no mesh has a type without it.
    w, x = data(3, 3), put(mesh, data(400 * mesh.size, 3), "d")
    inner = jax.jit(lambda w, v: jnp.where(w > 0, w, 0) @ v)

    def loss(w, x):
        passed = chunked_vmap(lambda w, x: jnp.tanh(inner(w, x)).sum(), 100, (None, 0))
        closed = chunked_vmap(lambda x: lax.map(lambda u: inner(w, x) * u, x).sum(), 100)
        return passed(w, x).sum() + closed(x).sum()

    def plain(w, x):
        def of_one(x):
            return jnp.tanh(inner(w, x)).sum() + lax.map(lambda u: inner(w, x) * u, x).sum()

        return jax.vmap(of_one)(x).sum()

    backward = compiled(jax.grad(loss), w, x)
    assert sent(backward).keys() == {"all-reduce"}
    want = jax.jit(jax.grad(plain))(w, np.asarray(x))
    same(backward(w, x), want, rtol=1e-3, atol=1e-2)


@on("Explicit-4", enter=False)
def test_a_program_whose_arguments_are_on_no_mesh(mesh):
    # Only what the loss closes over says which devices there are.
    w, images = data(2, 3, 3, 3), data(4 * mesh.size, 3, 6, 6, seed=1)
    x = put(mesh, images, "d")

    def convolved(w, x):
        return lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0]

    def loss(w):
        return jnp.sum(jnp.sin(auto_vmap(None, 3, chunk_size=2)(convolved)(w, x)))

    def of_one(w):
        return jnp.sum(jnp.sin(jax.vmap(convolved, (None, 0))(w, images)))

    value = compiled(loss, w)(w)
    same(np.asarray(value), np.asarray(of_one(w)), rtol=1e-3, atol=1e-2)
    gradient = compiled(jax.grad(loss), w)(w)
    same(np.asarray(gradient), np.asarray(jax.grad(of_one)(w)), rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@on("Auto-4")
def test_stretched_axes_of_any_length(mesh):
    x, y = data(9), data(1, seed=1)
    key = jax.random.key(0)

    def noisy(x, y, key):
        return x * y + jax.random.normal(key)

    fun = auto_vmap(x=0, y=0, devices=2)(lambda x, y: x * y)
    drawn = auto_vmap(x=0, y=0, key=SplitKey, devices=2)(noisy)
    for options in (
        {"reduce": "argmin"},
        {"jit": True},
        {"chunk_size": 2},
        {"lockstep": False},
        {"memory_limit": "8 kB"},
    ):
        for call, args in ((fun, (x, y)), (drawn, (x, y, key))):
            own = call.with_options(**{"reduce": "sum", **options})
            same(own(*args), own.with_options(devices=None)(*args))
    own = fun.with_options(reduce="sum", chunk_size=2)
    one = own.with_options(devices=None)
    same(jax.grad(own, (0, 1))(x, y), jax.grad(one, (0, 1))(x, y))


@pytest.mark.slow
@from_0_10_1
@on("Explicit-4")
def test_all_items_are_finite(mesh):
    fun = auto_vmap(x=1, w=2, chunk_size=2)(scalar)
    with inside(mesh):
        for gradient in (False, True):
            found = fun.nonfinite(put(mesh, X, "d"), put(mesh, W), gradient=gradient)
            assert found.count == 0


# Kernels of every kind on a mesh with explicit axes, inside `jax.set_mesh` and outside of it. One
# kernel has an output for each, and an argument, for a gradient is then that of one kind.

FRONT_ENDS = {
    "chunked_vmap": (lambda f: chunked_vmap(f, 2), lambda out: out),
    "auto_vmap": (lambda f: auto_vmap(1, chunk_size=4)(f), lambda out: out),
    "chunked_reduce": (lambda f: chunked_reduce(f, "max", 2), lambda out: jnp.max(out, axis=0)),
}


def all_kinds(v):
    return {kind: KINDS[kind](v[kind]) for kind in v}


def of_kinds(mesh, kinds):
    return dict.fromkeys(kinds, data(6 * mesh.size, 3) + 1.5)


@functools.cache
def plain_values(mesh, kinds):
    """Return what each front end should find, computed on one device."""

    def values(x):
        out = jax.vmap(all_kinds)(x)
        return {name: jax.tree.map(reduce, out) for name, (_, reduce) in FRONT_ENDS.items()}

    return jax.tree.map(np.asarray, jax.jit(values)(of_kinds(mesh, kinds)))


def same_kinds(found, want):
    for name, of_each in found.items():
        for kind, out in of_each.items():
            with naming((name, kind)):
                same(out, want[name][kind], rtol=1e-3)


def lacks_gradient(kind):
    # JAX before 0.12 cannot map the derivative of `sort` over an explicit axis, nor can `jax.vmap`.
    return kind in WITHOUT_GRADIENT or (kind == "sort" and jax.__version_info__ < (0, 12))


def check_kernels(mesh, kinds):
    """Compare compiled calls; the front ends that map differ only in what they accept."""
    x = put(mesh, of_kinds(mesh, kinds), "d")
    for enter, *names in (
        (contextlib.nullcontext(), "chunked_vmap", "chunked_reduce"),
        (jax.set_mesh(mesh), "auto_vmap", "chunked_reduce"),
    ):
        maps = {name: FRONT_ENDS[name][0](all_kinds) for name in names}
        with enter:
            found = jax.jit(lambda x, maps=maps: {name: f(x) for name, f in maps.items()})(x)
            same_kinds(found, plain_values(mesh, kinds))


def check_gradients(mesh, kinds, apart):
    """Compare gradients of maps, of the best item, and of the largest outputs of ``apart``."""
    x = of_kinds(mesh, [kind for kind in kinds if not lacks_gradient(kind)])

    def gradients(mapped, best, largest, x):
        def of_apart(x):
            return [largest({kind: x[kind]}) for kind in apart]

        def loss(x, f):
            return sum(jnp.sin(out).sum() for out in jax.tree.leaves(f(x)))

        calls = {"map": mapped, "Best": best, "max": of_apart}
        return {name: jax.grad(loss)(x, f) for name, f in calls.items()}

    plain = jax.vmap(all_kinds)

    def plain_best(x):
        out = plain(x)
        return jax.tree.map(lambda leaf: leaf[jnp.argmax(out["einsum"])], out)

    def plain_max(x):
        return jax.tree.map(lambda out: jnp.max(out, axis=0), plain(x))

    want = jax.jit(functools.partial(gradients, plain, plain_best, plain_max))(x)
    with jax.set_mesh(mesh):
        reduced = functools.partial(chunked_reduce, all_kinds, chunk_size=2)
        calls = chunked_vmap(all_kinds, 2), reduced(rd.Best("einsum", largest=True)), reduced("max")
        same_kinds(jax.jit(functools.partial(gradients, *calls))(put(mesh, x, "d")), want)


@pytest.mark.slow
@on("Explicit-4", enter=False)
def test_some_kernels_on_an_explicit_mesh(mesh):
    check_kernels(mesh, ("scan", "nested chunked_vmap", "key"))
    check_gradients(mesh, ("jit", "scan", "einsum"), ("jit", "scan"))


@pytest.mark.slow
@on("Explicit-4", enter=False)
def test_every_kernel_on_an_explicit_mesh(mesh):
    check_kernels(mesh, tuple(KINDS))


@pytest.mark.weekly
@on("Explicit-4", enter=False)
def test_every_gradient_on_an_explicit_mesh(mesh):
    apart = ("switch", "nested chunked_vmap", "custom_vjp", "linalg", "key", "pytree")
    check_gradients(mesh, KINDS, apart)


@pytest.mark.slow
@on("Explicit-4", enter=False)
def test_other_calls_on_an_explicit_mesh(mesh):
    x, w = put(mesh, X, "d"), put(mesh, W)
    key = jax.random.key(0)
    options = {"v": 1, "chunk_size": 7}
    limited = {"memory_limit": "2 kB", "v": 1}

    def walk(v, w):
        return lax.scan(lambda s, a: (jnp.tanh(w @ s) + a, None), v, v)[0].sum()

    def square(v):
        return walk(v, jnp.outer(v, v))

    def noisy(key, v):
        return v * jax.random.normal(key, (3,))

    def closed(w, x):
        return jnp.sum(chunked_vmap(lambda v: walk(v, w.T @ w), 7)(x) ** 2)

    calls = {
        "closed over": (jax.jit(jax.grad(closed)), w, x),
        "on every device": (chunked_vmap(square, 7), put(mesh, X)),
        "reduced on every device": (chunked_reduce(square, "max", 7), put(mesh, X)),
        "jit=True": (auto_vmap(**options, jit=True)(square), x),
        "memory limit": (jax.jit(auto_vmap(**limited)(square)), x),
        "split keys": (auto_vmap(key=SplitKey, **options)(noisy), key, x),
        "split keys, reduced": (auto_vmap(key=SplitKey, **options, reduce="sum")(noisy), key, x),
    }
    for label, (call, *args) in calls.items():
        plain = [a if a is key else np.asarray(a) for a in args]
        want = jax.tree.map(np.asarray, call(*plain))
        for enter in (contextlib.nullcontext(), jax.set_mesh(mesh)):
            with enter, naming(label):
                same(call(*args), want, rtol=1e-3, atol=1e-3)
    assert auto_vmap(**limited)(square).plan(x).memory.chunk_size <= N // mesh.size

    # Not divided, also where a loop of the caller carries the array.
    for size in (7, None):
        whole = chunked_vmap(lambda v: jnp.tanh(v) + 1, size, devices=False)

        def again(x, whole=whole):
            return jnp.max(whole(x)) + x, None

        with naming(size):
            want = jax.tree.map(np.asarray, lax.scan(lambda x, _: again(x), X, None, 3)[0])
            same(lax.scan(lambda x, _: again(x), x, None, 3)[0], want, rtol=1e-3)

    square_mesh = mesh_of(AxisType.Explicit, 2, mesh.size // 2)
    wide, turned = (put(square_mesh, data(N, 4), *entries) for entries in (("d", "e"), ("e",)))
    for entered in (contextlib.nullcontext(), jax.set_mesh(square_mesh)):
        with entered:  # arrays with another sharding are sent before the loop
            same(chunked_vmap(lambda x: x * 2, 7)(wide), data(N, 4) * 2)
            same(chunked_vmap(lambda x, y: x * y, 7)(wide, turned), data(N, 4) ** 2)
    both = put(square_mesh, data(6, 8, 3), "d", "e")
    for reduce, axis in ((None, None), ("sum", None), ("max", 1)):
        mapped = auto_vmap(v=1, chunk_size=3, reduce=reduce, reduce_axis=axis)(square)
        want = np.asarray(mapped(data(6, 8, 3)))
        same(mapped(both), want, rtol=1e-3)


@pytest.mark.slow
@on("Explicit-4", enter=False)
def test_eager_calls_on_an_explicit_mesh(mesh):
    x = put(mesh, of_kinds(mesh, KINDS), "d")
    want = plain_values(mesh, tuple(KINDS))
    for name, (front, _) in FRONT_ENDS.items():
        spread = NamedSharding(mesh, P() if name == "chunked_reduce" else P("d"))
        for enter in (contextlib.nullcontext(), jax.set_mesh(mesh)):
            with enter:
                found = front(all_kinds)(x)
                same_kinds({name: found}, want)
                for path, out in jax.tree.leaves_with_path(found):
                    assert out.sharding.is_equivalent_to(spread, out.ndim), path


COUNT = int(os.environ.get("RANKAX_PROGRAMS", "12"))


@pytest.mark.slow
@on("Auto-4", "Explicit-4")
def test_kernels_that_take_a_batch(mesh):
    lengths = set()

    def tanh(x, w):
        lengths.add(len(x))
        return jnp.tanh(x @ w)

    def both(fun):
        summed = fun.with_options(reduce="sum")
        return lambda x, w: (fun(x, w), jax.grad(lambda x: (summed(x, w) ** 2).sum())(x))

    plain = auto_vmap(x=1)(lambda x, w: jnp.tanh(x @ w))
    w = jnp.asarray(W.T)
    for count, chunk_size in ((N, None), (N, 50), (N - 1, 50)):
        x = put(mesh, X, "d") if count == N else jnp.asarray(X[:count])
        kernel = auto_vmap(x=1, batched=True, chunk_size=chunk_size, devices="all")(tanh)
        with inside(mesh):
            found = jax.jit(both(kernel))(x, w)
            assert N // mesh.size in lengths if chunk_size is None else max(lengths) <= 50
        lengths.clear()
        same(found, both(plain)(X[:count], w), atol=1e-4)
    kernel = auto_vmap(x=1, batched=True, chunk_size=50)(tanh)
    same(kernel(put(mesh, X, "d"), w), plain(X, w))


@on("Auto-4")
def test_random_calls_with_other_options(mesh):
    for seed in range(3):  # a few at each run
        random_calls.check(seed)


@pytest.mark.parametrize("third", [slow(1), weekly(2), weekly(3)])
@on("Auto-4")
def test_many_random_calls_with_other_options(mesh, third):
    seeds = range(3 + (third - 1) * 2 * COUNT // 3, 3 + third * 2 * COUNT // 3)
    assert sum(random_calls.check(seed) for seed in seeds) > len(seeds) // 2


@pytest.mark.parametrize("third", [slow(1), weekly(2), weekly(3)])
@on("Auto-4")
def test_random_programs_on_all_devices(mesh, third):
    drawn = (programs.draw(seed) for seed in range(5 * COUNT))
    maps = [program for program in drawn if program.caller.endswith("_vmap")]
    for program in maps[(third - 1) * COUNT // 3 : third * COUNT // 3]:
        with naming(program):
            dataclasses.replace(program, options=program.options | {"devices": "all"}).check()


def test_one_cpu_device_says_how_to_get_more():
    mapped = chunked_vmap(lambda x: x, 2, devices="all")
    with pytest.raises(
        ValueError,
        match=re.escape(
            "chunked_vmap(<lambda>): devices='all', but JAX has 1 CPU device; for more "
            "CPU devices, one for each core, call "
            f'jax.config.update("jax_num_cpu_devices", {os.cpu_count()}) before JAX is first used'
        ),
    ):
        mapped(jnp.ones(4))
    (device,) = jax.devices()
    out = chunked_vmap(lambda x: x * 2, 2, devices=[device])(jnp.arange(4.0))
    np.testing.assert_array_equal(out, [0, 2, 4, 6])
    np.testing.assert_array_equal(chunked_vmap(lambda x: x, 2, devices=1)(jnp.ones(4)), np.ones(4))


@pytest.mark.parametrize(
    "call",
    [
        lambda: auto_vmap(1, shards=2)(lambda x: x),
        lambda: auto_vmap(1)(lambda x: x).with_options(shards=2),
        lambda: rankax.options(shards=2),
    ],
)
def test_the_old_name_of_the_option_leads_to_the_new_one(call):
    with pytest.raises(TypeError, match=r"did you mean (the option )?'?devices'?"):
        call()
