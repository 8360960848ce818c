# SPDX-License-Identifier: MIT
"""Batches that lie on several devices: cases that `test_shards.py` runs in processes of their own.

``python tests/shards_cases.py NAME KIND DEVICES`` runs one on a mesh of that kind with so many
simulated devices. What is found is compared with the same kernel on one of them, without a mesh.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernel_kinds import KINDS, WITHOUT_GRADIENT
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax import reductions as rd

N = 480
CASES = {}


def case(fun):
    CASES[fun.__name__] = fun
    return fun


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


ENTER = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh  # JAX 0.7


def inside(mesh):
    """Enter the mesh where its axes are explicit, which JAX wants."""
    return ENTER(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()


def outside(mesh):
    """Leave it: JAX 0.7 cannot differentiate an index of an array from nowhere there."""
    return ENTER(mesh_of(AxisType.Auto, mesh.size))


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


def loss_of(f):
    def loss(*args):
        return sum(
            jnp.sum(out * out)
            for out in jax.tree.leaves(f(*args))
            if jnp.issubdtype(out.dtype, jnp.floating)
        )

    return loss


def given(mesh):
    """Return the option that a call inside `jax.jit` needs."""
    return {} if AxisType.Explicit in mesh.axis_types else {"shards": P("d")}


@case
def maps_send_nothing(mesh):
    args = put(mesh, X, "d"), put(mesh, W), put(mesh, B, "d")
    x, w, b = args
    want, pull_one = jax.vjp(jax.vmap(kernel, (0, None, 0)), X, W, B)
    # A cotangent is given, for the sum of a loss is itself one that is sent.
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


@case
def second_derivatives(mesh):
    x, w, b = put(mesh, X, "d"), put(mesh, W), put(mesh, B, "d")
    loss = loss_of(chunked_vmap(kernel, 7, (0, None, 0), **given(mesh)))
    of_one = loss_of(jax.vmap(kernel, (0, None, 0)))
    got = jax.jit(lambda t: jax.jvp(jax.grad(lambda x: loss(x, w, b)), (x,), (t,)))(x)
    want = jax.jvp(jax.grad(lambda x: of_one(x, W, B)), (X,), (X,))
    same(got, want, rtol=1e-3, atol=1e-4)


@case
def eager_calls_see_how_arrays_lie(mesh):
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
    # The program of arrays that lie otherwise is another one.
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
USUAL = [("sum", scalar), ("max", scalar), (rd.TopK(3), scalar)]
OTHERS = [
    *((name, scalar) for name in ("mean", "min", "logsumexp", rd.Moments(), FOLD)),
    ("prod", lambda x, w: 1 + scalar(x, w) / 9),
    (rd.TopK(100), scalar),  # more than one device has
    (rd.Best("v"), lambda x, w: kernel(x, w, 1.0)),
    ("any", lambda x, w: scalar(x, w) > 4),
    ("all", lambda x, w: scalar(x, w) < 4),
    ("argmax", scalar),
    ("argmin", scalar),
]
BY_SUM = ("sum", "mean", "any", "all")
WITHOUT_DERIVATIVE = ("any", "all", "argmax", "argmin")


def is_too_old(reduction, mesh):
    """JAX 0.7 cannot map the loop of TopK where the axes of a mesh are explicit."""
    is_explicit = AxisType.Explicit in mesh.axis_types
    return is_explicit and jax.__version_info__ < (0, 8) and isinstance(reduction, rd.TopK)


def check_reduction(mesh, reduction, fun):
    x, w = put(mesh, X, "d"), put(mesh, W)
    own = chunked_reduce(fun, reduction, 7, (0, None), **given(mesh))
    of_one = chunked_reduce(fun, reduction, 7, (0, None))
    forward = compiled(own, x, w)
    found = sent(forward)
    # What no sum makes is sent to all devices, in one piece for each dtype.
    pieces = 1 if reduction in (*BY_SUM, "max", "min", "prod", "logsumexp", FOLD) else 2
    assert 1 <= sum(found.values()) <= pieces, (reduction, found)
    if reduction in BY_SUM:
        assert found == {"all-reduce": 1}, (reduction, found)
    with outside(mesh):
        want = jax.tree.map(np.asarray, of_one(X, W))
    same(forward(x, w), want)
    if reduction in WITHOUT_DERIVATIVE:
        return
    of_mapped = sent(compiled(jax.grad(loss_of(own)), x, w))
    assert sum(of_mapped.values()) <= sum(found.values()), (reduction, of_mapped)
    backward = compiled(jax.grad(loss_of(own), (0, 1)), x, w)
    assert Counter(sent(backward)) - Counter(of_mapped) == {"all-reduce": 1}, reduction
    with outside(mesh):
        want = jax.tree.map(np.asarray, jax.jit(jax.grad(loss_of(of_one), (0, 1)))(X, W))
    scale = max(float(abs(leaf).max()) for leaf in want)
    same(backward(x, w), want, rtol=1e-3, atol=1e-4 * scale)


@case
def reductions_send_once(mesh):
    for reduction, fun in USUAL:
        if not is_too_old(reduction, mesh):
            check_reduction(mesh, reduction, fun)


@case
def other_reductions_send_once(mesh):
    for reduction, fun in OTHERS:
        if not is_too_old(reduction, mesh):
            check_reduction(mesh, reduction, fun)


def reduce_sharded(mesh, reduction, size, values, fun=lambda x: x * 1):
    return chunked_reduce(fun, reduction, size)(put(mesh, np.asarray(values), "d"))


@case
def nan_survives_the_merge(mesh):
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
            assert np.isnan(reduce_sharded(mesh, reduction, 1, values)), (reduction, values)
        best = reduce_sharded(
            mesh, rd.Best("x"), 1, np.stack([values, values], 1), lambda x: {"x": x[0], "y": x}
        )
        assert np.isnan(best["y"]).all()


@case
def a_part_may_be_masked(mesh):
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


@case
def narrow_floats_are_merged_wide(mesh):
    values = jnp.where(jnp.arange(256) % 3 > 1, 1000.0, 1004.0).astype(jnp.bfloat16)
    of_one = chunked_reduce(lambda x: x, rd.Moments(), 16)(values)
    same(reduce_sharded(mesh, rd.Moments(), 16, values), of_one)
    cancel = np.repeat(np.float16([6e4, -6e4, 6e4, -6e4]), 4)
    for name in ("sum", "mean"):
        assert float(reduce_sharded(mesh, name, 1, cancel)) == 0, name


@case
def memory_of_a_device_does_not_grow(mesh):
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


@case
def one_of_several_axes(mesh):
    devices = mesh.size
    a, s = data(6, 48, 3), data(6, 1, seed=3)
    fun = auto_vmap(x=1, w=2, b=0)(kernel)
    auto = mesh_of(AxisType.Auto, 2, devices // 2)
    for entries in ((None, "d"), (None, ("d", "e")), ("d", "e")):
        x, b, w = put(auto, a, *entries), put(auto, s, entries[0]), put(auto, W)
        for reduce, axis in (
            (None, None),
            ({"v": "sum", "x": None}, 0),
            ({"v": "argmax", "x": rd.TopK(3)}, None),
        ):
            own = fun.with_options(chunk_size=5, reduce=reduce, reduce_axis=axis, jit=True)
            same(own(x, w, b), own(a, W, s))
            found = sent(own.lower(x, w, b).compile())
            assert reduce is not None or found == {}
    # Of equal items the first counts, along the axes as they are.
    ties = auto_vmap(x=0, chunk_size=3, reduce="argmax")(lambda x: x)
    level = np.zeros((6, 48), "f")
    level[3, 1] = level[2, 30] = level[2, 47] = 1
    assert int(ties(put(auto, level, None, "d"))) == 2 * 48 + 30
    best = auto_vmap(x=0, i=0, chunk_size=3, reduce=rd.Best("x"))(lambda x, i: {"x": -x, "i": i})
    index = np.arange(6 * 48).reshape(6, 48)
    assert int(best(put(auto, level, None, "d"), put(auto, index, None, "d"))["i"]) == 2 * 48 + 30
    top = auto_vmap(x=0, chunk_size=3, reduce=rd.TopK(3, largest=True))(lambda x: x)
    assert top(put(auto, level, None, "d")).indices.tolist() == [126, 143, 145]


@case
def other_ways_to_map(mesh):
    x, w = put(mesh, X.T.copy(), None, "d"), put(mesh, W)

    def fun(tree, w, k):
        return (scalar(tree["x"], w) + k, {"x": tree["x"]}, w[0, 0] * 2)

    args = {"x": x}, w, np.float32(2)
    axes = ({"x": 1}, None, None), (0, {"x": -1}, None)
    want = jax.vmap(fun, *axes)({"x": X.T}, W, np.float32(2))
    same(chunked_vmap(fun, 7, *axes)(*args), want)
    inner = jax.jit(chunked_vmap(fun, 7, *axes, shards=mesh.size))
    same(inner(*args), want)
    assert sent(inner.lower(*args).compile()) == {}
    # Items that lie on several devices are gathered, once.
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    wide = put(square, data(N, 4), "d", "e")
    doubled = jax.jit(chunked_vmap(lambda x: jnp.tanh(x) * 2, 7, shards=P("d")))
    same(doubled(wide), jnp.tanh(data(N, 4)) * 2)
    assert sent(doubled.lower(wide).compile()) == {"all-gather": 1}
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


@case
def split_keys_are_those_of_the_whole_batch(mesh):
    def draw(x, key):
        return x + jax.random.normal(key), jax.random.key_data(key)

    batch = data(N, 6)
    keys = jax.random.key(3)
    want = jax.vmap(jax.vmap(draw))(batch, jax.random.split(keys, batch.shape))
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    for entries in (("d",), (None, "d"), ("e", "d")):
        for size in (1, 7, 100):
            drawn = auto_vmap(x=0, key=SplitKey, chunk_size=size)(draw)
            out = drawn(put(square, batch, *entries), keys)
            np.testing.assert_array_equal(np.asarray(out[1]), np.asarray(want[1]))
            same(out, want)
        total = drawn.with_options(reduce=("sum", None), reduce_axis=0)
        summed = total(put(square, batch, *entries), keys)
        np.testing.assert_array_equal(np.asarray(summed[1]), np.asarray(want[1]))
        same(summed[0], jnp.sum(want[0], axis=0), atol=1e-3)


@case
def progress_counts_all_parts(mesh):
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


@case
def shard_map_checks_what_varies(mesh):
    w = put(mesh, W)
    for mapped in (
        chunked_vmap(scalar, 7, (0, None)),
        auto_vmap(x=1, w=2, chunk_size=7, jit=True)(lambda x, w: scalar(x, w) ** 2 / 4),
        chunked_reduce(scalar, "sum", 7, (0, None)),
        chunked_reduce(scalar, rd.TopK(2), 7, (0, None)),
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
            by_device = [own(part, W) for part in np.split(np.asarray(x), mesh.size)]
            want = jax.tree.map(lambda *parts: jnp.concatenate(parts), *by_device)
            same(jax.jit(jax.shard_map(own, **specs))(x, w), want, rtol=1e-3, atol=1e-4)


@case
def the_plan_says_it(mesh):
    x, w = put(mesh, X, "d"), put(mesh, W)
    mapped = auto_vmap(x=1, w=2, chunk_size=7)(scalar)
    devices = mesh.size
    plan = mapped.plan(x, w)
    assert plan.parts == ((0, devices),)
    assert plan.batch_shape == (N,)
    assert plan.in_flight <= 7
    assert f"axis 0: {devices} parts of {N // devices}, side by side" in str(plan)
    assert "in flight in each part" in str(plan)
    assert f"{devices} parts" in plan._repr_html_()
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert mapped.plan(shape, w) == plan
    assert mapped.with_options(shards=devices).plan(X, W).parts == ((0, devices),)
    assert mapped.with_options(shards=1).plan(x, w).parts == ()
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


@case
def errors(mesh):
    mesh = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    x, w = put(mesh, X, "d"), put(mesh, W)

    def wrong(shards, error, text):
        def mapped():
            chunked_vmap(scalar, 7, shards=shards)

        def reduced():
            chunked_reduce(scalar, "sum", 7, shards=shards)

        def decorated():
            auto_vmap(1, 2, shards=shards)(scalar)

        refused(error, f"chunked_vmap(scalar): {text}", mapped)
        refused(error, f"chunked_reduce(scalar): {text}", reduced)
        refused(error, f"auto_vmap(scalar): {text}", decorated)

    wrong(0, ValueError, "shards must be a positive int, got 0")
    wrong(
        "d",
        TypeError,
        "shards must be a positive int, a jax.sharding.PartitionSpec, or None, got 'd'; the axes "
        "of a mesh are named by PartitionSpec('d')",
    )

    def unfit(shards, args, text):
        mapped = auto_vmap(x=1, w=2, chunk_size=7, shards=shards)(scalar)
        refused(ValueError, f"scalar(): shards={shards} {text}", mapped, *args)

    unfit(7, (x, w), "needs a batch whose axis 0 it divides, but there are 480 items")
    unfit(7, (X[0], w), "needs a batch whose axis 0 it divides, but there is no batch axis")
    unfit(P("z"), (x, w), "names 'z', but the mesh has the axes 'd' and 'e'")
    unfit(P("d", "e"), (x, w), "has 2 entries for the batch shape (480,)")
    three = put(mesh, X[:3]), w
    unfit(
        P("d"),
        three,
        "cuts axis 0 of the batch in 2 parts, where there are 3 items, which 2 does not divide",
    )
    unfit(
        P("d"),
        (X, W),
        "names axes of a mesh, but no argument is on one here; give the number of parts, or call "
        "it with jax.set_mesh(mesh)",
    )
    fold = rd.Fold(jnp.float32(0), lambda y: y, jnp.add)
    first = auto_vmap(x=1, chunk_size=7, reduce=fold)(lambda x: x[0] * 1)
    cube = put(mesh, data(6, 48, 3), None, "d")
    same(first(cube), jnp.sum(data(6, 48, 3)[..., 0]), rtol=1e-3, atol=1e-3)
    refused(
        ValueError,
        "<lambda>(): Fold takes items in their order, so of the axes that are reduced, (0, 1), "
        "only the first can be sharded, but axis 1 is",
        first.with_options(shards=P(None, "d")),
        cube,
    )
    explicit = mesh_of(AxisType.Explicit, 2, mesh.size // 2)
    with inside(explicit):
        refused(
            ValueError,
            "chunked_vmap(<lambda>): one argument is sharded along the mesh axes ('d',) where it "
            "is mapped, another along ('e',); use jax.sharding.reshard to shard them alike",
            chunked_vmap(lambda x, b: x * b, 7),
            put(explicit, X, "d"),
            put(explicit, X, "e"),
        )
        refused(
            ValueError,
            "chunked_vmap(<lambda>): items of one argument are sharded along the mesh axes "
            "('e',), but a loop over chunks needs each of them whole on a device; use "
            "jax.sharding.reshard",
            chunked_vmap(lambda x: x * 2, 7),
            put(explicit, data(N, 4), "d", "e"),
        )


# Kernels of every kind on a mesh with explicit axes, inside `jax.set_mesh` and outside of it.

FRONT_ENDS = {
    "chunked_vmap": (lambda f: chunked_vmap(f, 2), lambda f: f),
    "auto_vmap": (lambda f: auto_vmap(1, chunk_size=4)(f), lambda f: f),
    "chunked_reduce": (lambda f: chunked_reduce(f, "max", 2), lambda f: over_rows(f, jnp.max)),
}


def over_rows(f, reduce):
    return lambda x: jax.tree.map(lambda out: reduce(out, axis=0), f(x))


def gradient(f):
    def loss(x):
        return sum(jnp.sin(out).sum() for out in jax.tree.leaves(f(x)))

    return jax.grad(loss)


def lacks_gradient(kind):
    # JAX before 0.12 cannot map the derivative of `sort` over an explicit axis, nor can `jax.vmap`.
    return kind in WITHOUT_GRADIENT or (kind == "sort" and jax.__version_info__ < (0, 12))


def check_kernels(mesh, kinds, *, of_gradient=False):
    """Compile the maps of all kinds as one program, and compare it with one on one device."""
    jax.config.update("jax_disable_most_optimizations", True)  # which takes half the time
    kinds = [kind for kind in kinds if not (of_gradient and lacks_gradient(kind))]
    wrap = gradient if of_gradient else lambda f: f
    x = data(6 * mesh.size, 3) + 1.5
    ours, plain = {}, {}
    for kind in kinds:
        for name, (front, reference) in FRONT_ENDS.items():
            ours[kind, name] = wrap(front(KINDS[kind]))
            plain[kind, name] = wrap(reference(jax.vmap(KINDS[kind])))

    def run(maps, x):
        return [f(x) for f in maps.values()]

    with outside(mesh):
        want = jax.jit(functools.partial(run, plain))(x)
    for enter in (contextlib.nullcontext(), ENTER(mesh)):
        with enter:
            got = jax.jit(functools.partial(run, ours))(put(mesh, x, "d"))
            for label, a, b in zip(ours, got, want, strict=True):
                try:
                    same(a, b, rtol=1e-3)
                except AssertionError as error:
                    raise AssertionError(label) from error


@case
def some_kernels_on_an_explicit_mesh(mesh):
    check_kernels(mesh, ("scan", "nested chunked_vmap", "key"))
    check_kernels(mesh, ("jit", "scan"), of_gradient=True)


@case
def every_kernel_on_an_explicit_mesh(mesh):
    check_kernels(mesh, KINDS)


@case
def every_gradient_on_an_explicit_mesh(mesh):
    check_kernels(mesh, KINDS, of_gradient=True)


@case
def other_calls_on_an_explicit_mesh(mesh):
    jax.config.update("jax_disable_most_optimizations", True)
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
        with outside(mesh):
            plain = [a if a is key else np.asarray(a) for a in args]
            want = jax.tree.map(np.asarray, call(*plain))
        for enter in (contextlib.nullcontext(), ENTER(mesh)):
            with enter:
                try:
                    same(call(*args), want, rtol=1e-3, atol=1e-3)
                except AssertionError as error:
                    raise AssertionError(label) from error
    assert auto_vmap(**limited)(square).plan(x).memory.chunk_size <= N // mesh.size

    square_mesh = mesh_of(AxisType.Explicit, 2, mesh.size // 2)
    both = put(square_mesh, data(6, 8, 3), "d", "e")
    for reduce, axis in ((None, None), ("sum", None), ("max", 1)):
        mapped = auto_vmap(v=1, chunk_size=3, reduce=reduce, reduce_axis=axis)(square)
        with outside(mesh):
            want = np.asarray(mapped(data(6, 8, 3)))
        same(mapped(both), want, rtol=1e-3)


@case
def eager_calls_on_an_explicit_mesh(mesh):
    x = data(6 * mesh.size, 3) + 1.5
    for kind, kernel in KINDS.items():
        for front, reference in FRONT_ENDS.values():
            with outside(mesh):
                want = jax.tree.map(np.asarray, reference(jax.vmap(kernel))(x))
            for enter in (contextlib.nullcontext(), ENTER(mesh)):
                with enter:
                    got = front(kernel)(put(mesh, x, "d"))
                    same(got, want, rtol=1e-3)
                    for out in jax.tree.leaves(got):
                        entries = ("d",) if out.shape[:1] == x.shape[:1] else ()
                        sharding = NamedSharding(mesh, P(*entries))
                        assert out.sharding.is_equivalent_to(sharding, out.ndim), kind


if __name__ == "__main__":
    name, kind, devices = sys.argv[1:]
    of_all = mesh_of(getattr(AxisType, kind), int(devices))
    # These cases enter the mesh themselves.
    with contextlib.nullcontext() if name.endswith("on_an_explicit_mesh") else inside(of_all):
        CASES[name](of_all)
