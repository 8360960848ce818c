# SPDX-License-Identifier: MIT
"""Maps over arrays that several devices share, against the same kernel on one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import weekly
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax import reductions as rd
from sharding import (
    SENDS,
    B,
    N,
    W,
    X,
    check_drawn,
    compiled,
    data,
    given,
    inside,
    kernel,
    loss_of,
    mesh_of,
    on,
    put,
    refused,
    same,
    scalar,
    sent,
    value_and_gradients,
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


@on("Auto", "Explicit")
def test_second_derivatives(mesh):
    x, w, b = put(mesh, X, "d"), put(mesh, W), put(mesh, B, "d")
    loss = loss_of(chunked_vmap(kernel, 7, (0, None, 0), **given(mesh)))
    of_one = loss_of(jax.vmap(kernel, (0, None, 0)))
    got = jax.jit(lambda t: jax.jvp(jax.grad(lambda x: loss(x, w, b)), (x,), (t,)))(x)
    want = jax.jit(lambda t: jax.jvp(jax.grad(lambda x: of_one(x, W, B)), (X,), (t,)))(X)
    same(got, want, rtol=1e-3, atol=1e-4)


@on("Auto", weekly("Explicit"))
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
@on("Auto")
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
        lambda x, w, _: mapped(x, w),
        lambda x, w, cotangent: jax.vjp(mapped, x, w)[1](cotangent),
        lambda x, w, _: jax.jvp(mapped, (x, w), (x, w)),
        lambda x, w, _: jax.grad(total, (0, 1))(x, w),
    ):
        few, many = temporaries(program, 64), temporaries(program, 640)
        # An item has 2400 bytes; of its cotangent, 4, there may be a copy.
        assert many <= few + 4 * 640, (few, many)


@on("Auto")
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


@on("Auto")
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


@on("Auto")
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


@on("Auto")
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


@on("Auto")
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


@on("Auto")
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


@on("Auto", "Explicit")
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
