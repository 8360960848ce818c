# SPDX-License-Identifier: MIT
"""Maps over arrays that several devices share, against the same kernel on one."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import StepLog, compilations, refusal
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax import reductions as rd
from sharding import (
    B,
    N,
    W,
    X,
    compiled,
    data,
    given,
    kernel,
    loss_of,
    mesh_of,
    on,
    put,
    same,
    scalar,
    sent,
)


@on("Auto", "Explicit")
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

        def push(x, w, b, t, mapped=mapped):
            return jax.jvp(lambda x: mapped(x, w, b), (x,), (t,))

        def pull(x, w, b, cotangent, mapped=mapped):
            return jax.vjp(mapped, x, w, b)[1](cotangent)

        forward = compiled(push, *args, x)
        assert sent(forward) == {}
        found, _ = forward(*args, x)
        same(found, want)
        for out in jax.tree.leaves(found):  # as `jax.vmap` leaves it
            assert out.sharding.is_equivalent_to(x.sharding, out.ndim)
        backward = compiled(pull, *args, ones)
        assert sent(backward) == {"all-reduce": 1}
        same(backward(*args, ones), pulled, rtol=1e-3, atol=1e-3)

    def closed(w, x, b):
        own = chunked_vmap(lambda x, b: kernel(x, w, b), 7, **given(mesh))
        return loss_of(own)(x, b)

    assert sent(compiled(jax.grad(closed), w, x, b)) == {"all-reduce": 1}


@on("Auto")
def test_eager_calls_see_how_arrays_are_sharded(mesh):
    x, w, b = put(mesh, X, "d"), put(mesh, W), put(mesh, B)
    again = x + 0
    for make in (
        lambda: chunked_vmap(kernel, 7, (0, None, 0)),
        lambda: auto_vmap(x=1, w=2, b=0, chunk_size=7)(kernel),
        lambda: chunked_reduce(kernel, {"v": "max", "x": "sum"}, 7, (0, None, 0)),
        lambda: auto_vmap(x=1, w=2, b=0, chunk_size=7, reduce=rd.Best("v"))(kernel),
    ):
        same(make()(x, w, b), make()(X, W, B))
        out, count = compilations(make(), again, w, b)
        assert count == 0
        for leaf in jax.tree.leaves(out):
            spread = NamedSharding(mesh, P("d") if leaf.shape[:1] == (N,) else P())
            assert leaf.sharding.is_equivalent_to(spread, leaf.ndim)
    by_jit = auto_vmap(x=1, w=2, b=0, chunk_size=7, jit=True)(kernel)
    assert sent(by_jit.lower(x, w, b).compile()) == {}
    same(by_jit(x, w, b), by_jit(X, W, B))
    # Arrays with another sharding have another program.
    other = put(mesh_of(AxisType.Auto, 2, mesh.size // 2), X, "e")
    out, count = compilations(chunked_vmap(kernel, 7, (0, None, 0)), other, W, B)
    assert count > 0
    same(out, chunked_vmap(kernel, 7, (0, None, 0))(X, W, B))


@on("Auto", "Explicit")
def test_memory_of_a_device_does_not_grow(mesh):
    def spread(x, w):  # (200, 3): needs (200, 200) numbers on the way
        return jnp.sum(jnp.tanh(jnp.sum((x[:, None] - x[None]) ** 2, -1)) * w[0, 0])

    mapped = chunked_vmap(spread, 2, (0, None), **given(mesh))
    total = chunked_reduce(spread, "sum", 2, (0, None), **given(mesh))

    def temporaries(fun, items):
        args = put(mesh, data(items, 200, 3), "d"), put(mesh, W), put(mesh, data(items), "d")
        return compiled(fun, *args).memory_analysis().temp_size_in_bytes

    for program in (
        lambda x, w, cotangent: (mapped(x, w), jax.vjp(mapped, x, w)[1](cotangent)),
        lambda x, w, _: (jax.jvp(mapped, (x, w), (x, w)), jax.grad(total, (0, 1))(x, w)),
    ):
        few, many = temporaries(program, 64), temporaries(program, 640)
        # An item has 2400 bytes; of its cotangent, 4, there may be a copy.
        assert many <= few + 4 * 640, (few, many)


@on("Auto")
def test_one_of_several_axes(mesh):
    a, s = data(6, 48, 3), data(6, 1, seed=3)
    fun = auto_vmap(x=1, w=2, b=0)(kernel)
    auto = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    of_columns = {"reduce": {"v": "sum", "x": None}, "reduce_axis": 0}
    extremes = {"reduce": {"v": "argmax", "x": rd.BottomK(3)}}
    for options, *entries in (
        ({}, "d", "e"),
        (of_columns, "d", "e"),
        (extremes, None, ("d", "e")),
    ):
        own = fun.with_options(chunk_size=5, jit=True, **options)
        args = put(auto, a, *entries), put(auto, W), put(auto, s, entries[0])
        program = own.lower(*args).compile()
        same(program(*args), own(a, W, s))
        assert options or sent(program) == {}
    # Of equal items the first counts, along the axes as they are.
    ties = auto_vmap(x=0, chunk_size=3, reduce="argmax")(lambda x: x)
    level = np.zeros((6, 48), "f")
    level[3, 1] = level[2, 30] = level[2, 47] = 1
    assert int(ties(put(auto, level, None, "d"))) == 2 * 48 + 30
    top = auto_vmap(x=0, chunk_size=3, reduce=rd.TopK(3))(lambda x: x)
    assert top(put(auto, level, None, "d")).indices.tolist() == [126, 143, 145]


@on("Auto")
def test_other_ways_to_map(mesh):
    x, w = put(mesh, X.T.copy(), None, "d"), put(mesh, W)

    def fun(tree, w, k):
        return (scalar(tree["x"], w) + k, {"x": tree["x"]}, w[0, 0] * 2)

    args = {"x": x}, w, np.float32(2)
    axes = ({"x": 1}, None, None), (0, {"x": -1}, None)
    want = jax.vmap(fun, *axes)({"x": X.T}, W, np.float32(2))
    same(chunked_vmap(fun, 7, *axes)(*args), want)
    # Items that are on several devices stay there.
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    wide = put(square, data(N, 4), "d", "e")
    doubled = compiled(chunked_vmap(lambda x: jnp.tanh(x) * 2, 7, devices=P("d")), wide)
    same(doubled(wide), np.tanh(data(N, 4)) * 2)
    assert sent(doubled) == {}
    # Effects in order cannot be mapped over devices, so the batch is walked as one.
    seen = []

    def tells(x):
        jax.experimental.io_callback(lambda i: seen.append(int(i)), None, x, ordered=True)
        return x

    numbers = put(mesh, np.arange(16), "d")
    chunked_vmap(tells, 1)(numbers)
    jax.effects_barrier()
    assert seen == list(range(16)), seen


@on("Auto", "Explicit")
def test_split_keys_send_nothing(mesh):
    def draw(x, key):
        return x + jax.random.normal(key)

    args = put(mesh, data(N, 3), "d"), put(mesh, jax.random.key(3))
    drawn = auto_vmap(x=0, key=SplitKey, chunk_size=7, jit=True)(draw)
    assert sent(drawn.lower(*args).compile()) == {}
    assert sent(drawn.with_options(reduce="sum").lower(*args).compile()) == {"all-reduce": 1}


@on("Auto", "Explicit")
def test_progress_counts_all_parts(mesh):
    x, w = put(mesh, X, "d"), put(mesh, W)
    heard = []
    options = {"progress": lambda *now: heard.append(now), **given(mesh)}
    for mapped in (
        auto_vmap(x=1, w=2, chunk_size=6, **options)(scalar),
        chunked_reduce(scalar, "sum", 6, (0, None), **options),
    ):
        heard.clear()
        jax.jit(mapped)(x, w)
        jax.effects_barrier()
        assert (heard[0], heard[-1]) == ((0, N), (N, N))


@on("Auto")
def test_each_device_tells_an_observer(mesh):
    log = StepLog()
    kernel = auto_vmap(x=1, w=2, chunk_size=6, progress=log, jit=True, **given(mesh))(scalar)
    kernel(put(mesh, X, "d"), put(mesh, W))
    parts, (length, size, steps) = log.asked
    assert (parts * length, size) == (N, 6)
    told = [done for done in log.told if done != "end"]
    assert sorted(told) == sorted(parts * [min(6 * i, length - 6) for i in range(steps)])


@on("Auto")
def test_shard_map_checks_what_varies(mesh):
    def halved(x, w):  # an item that ends by itself, and counts
        start = jnp.int32(0), scalar(x, w) ** 2
        n, v = jax.lax.while_loop(lambda s: s[1] > 1, lambda s: (s[0] + 1, s[1] / 2), start)
        return v * (n + 1).astype(v.dtype)

    lanes = auto_vmap(x=1, w=2, chunk_size=3, lockstep=False)(halved)
    reductions = "sum", rd.BottomK(2), "logsumexp"
    calls = (
        chunked_vmap(scalar, 7, (0, None)),
        auto_vmap(x=1, w=2, chunk_size=7, jit=True)(lambda x, w: scalar(x, w) ** 2 / 4),
        *(chunked_reduce(scalar, reduction, 7, (0, None)) for reduction in reductions),
        *(lanes, lanes.with_options(reduce="sum")),
    )

    def out(x, w):
        return [jax.tree.map(jnp.atleast_1d, call(x, w)) for call in calls]

    def pull(x, w):
        return jax.grad(loss_of(out))(x, w)

    # For values, a batch of which no chunk divides what a device has.
    for own, x in ((out, X[: 7 * mesh.size]), (pull, X)):
        specs = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}
        of_one = jax.jit(own)
        by_device = [of_one(part, W) for part in np.split(x, mesh.size)]
        want = jax.tree.map(lambda *parts: np.concatenate(parts), *by_device)
        found = jax.jit(jax.shard_map(own, **specs))(put(mesh, x, "d"), put(mesh, W))
        same(found, want, rtol=1e-3, atol=1e-4)


@on("Auto")
def test_the_plan_says_it(mesh):
    x, w = put(mesh, X, "d"), put(mesh, W)
    mapped = auto_vmap(x=1, w=2, chunk_size=7)(scalar)
    plan = mapped.plan(x, w)
    assert (plan.devices, plan.batch_shape) == (((0, mesh.size),), (N,))
    assert plan.in_flight <= 7
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert mapped.plan(shape, w) == plan
    assert mapped.with_options(devices=1).plan(x, w).devices == ()
    # Where a device has all of its items in flight, this is `jax.vmap`.
    whole = [str(mapped.with_options(chunk_size=size).plan(x, w)) for size in (N, None)]
    assert whole[0] == whole[1]


KINDS = (
    "devices must be 'all', a positive int, a sequence of jax.Device, a "
    "jax.sharding.PartitionSpec, False, or None, got "
)


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        (0, ValueError, "devices must be a positive int, got 0"),
        (True, TypeError, "devices must be a positive int, got True"),
        ("d", TypeError, KINDS + "'d'; the axes of a mesh are named by PartitionSpec('d')"),
        ("gpu", TypeError, KINDS + "'gpu'; for all of this kind, pass 'all' or jax.devices('gpu')"),
        (2.0, TypeError, KINDS + "2.0"),
    ],
    ids=str,
)
def test_what_devices_cannot_be(devices, error, text):
    for name, call in (
        ("chunked_vmap", lambda: chunked_vmap(scalar, 7, devices=devices)),
        ("chunked_reduce", lambda: chunked_reduce(scalar, "sum", 7, devices=devices)),
        ("auto_vmap", lambda: auto_vmap(1, 2, devices=devices)(scalar)),
    ):
        assert refusal(error, call) == f"{name}(scalar): {text}"


@on("Auto")
def test_errors(mesh):
    mesh = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    x, w = put(mesh, X, "d"), put(mesh, W)

    def unfit(devices, args, text):
        mapped = auto_vmap(x=1, w=2, chunk_size=7, devices=devices)(scalar)
        assert refusal(ValueError, mapped, *args) == f"scalar(): devices={devices!r} {text}"

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
    assert refusal(ValueError, first.with_options(devices=P(None, "d")), cube) == (
        "<lambda>(): Fold takes items in order, so only the first of the reduced axes (0, 1) can "
        "be sharded, but axis 1 is"
    )


@on("Auto", "Explicit")
def test_kernels_that_take_a_batch(mesh):
    lengths = set()

    def tanh(x, w):
        lengths.add(len(x))
        return jnp.tanh(x @ w)

    def both(fun, x, w):
        summed = fun.with_options(reduce="sum")
        return fun(x, w), jax.grad(lambda x: (summed(x, w) ** 2).sum())(x)

    w = jnp.asarray(W.T)
    batched = auto_vmap(x=1, batched=True, devices="all")(tanh)
    plain = auto_vmap(x=1)(lambda x, w: jnp.tanh(x @ w))
    for x, size in ((put(mesh, X, "d"), None), (put(mesh, X, "d"), 50), (jnp.asarray(X[1:]), 50)):
        found = jax.jit(functools.partial(both, batched.with_options(chunk_size=size)))(x, w)
        assert N // mesh.size in lengths if size is None else max(lengths) <= 50
        lengths.clear()
        same(found, both(plain, np.asarray(x), w), atol=1e-4)


@on("Auto")
def test_shardings_that_a_jit_hides(mesh):
    """A loop warns where a mesh is set; the plan of what is sharded says what to write."""
    x, w, mapped = put(mesh, X, "d"), put(mesh, W), auto_vmap(x=1, w=2, chunk_size=7)(scalar)
    devices = rf"devices={re.escape(str(P('d')))}"
    assert re.search(rf"inside a jax.jit of your own, .*: {devices}", str(mapped.plan(x, w)))
    assert "your own" not in str(mapped.with_options(devices="all").plan(X, W))
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mapped(X, W)
        mapped.with_options(jit=True)(x, w)
        for quiet in ({"devices": P("d")}, {"devices": False}, {"chunk_size": None}):
            jax.jit(mapped.with_options(**quiet))(x, w)
        assert not caught
        for loud in ({}, {"jit": True}):
            jax.jit(mapped.with_options(**loud))(x, w)
        jax.jit(chunked_reduce(jnp.sum, "sum", 7))(x)
    assert len(caught) == 3
    for found, site in zip(caught, ["scalar()"] * 2 + ["chunked_reduce(sum)"], strict=True):
        words = rf"{re.escape(site)}: inside jax.jit, .* over 'd' of .* pass {devices} to share"
        assert re.match(words, str(found.message)), found.message
        assert found.filename == __file__
