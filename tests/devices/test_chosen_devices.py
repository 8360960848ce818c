# SPDX-License-Identifier: MIT
"""Devices that the call chooses, such as `devices="all"`, for batches of any length."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rankax
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
from sharding import (
    LENGTHS,
    ODD,
    B,
    N,
    W,
    X,
    check_drawn,
    compiled,
    data,
    kernel,
    loss_of,
    mesh_of,
    on,
    on_several,
    put,
    refused,
    same,
    scalar,
    sent,
)


@on("Auto")
def test_maps_of_any_length_send_nothing_inside(mesh):
    for size, length in ((7, N), (7, ODD), (None, ODD), (20, N)):
        x, b = data(length, 3), data(length, seed=2)
        mapped, one = on_several(functools.partial(chunked_vmap, kernel, size, (0, None, 0)))
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


@on("Auto")
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


@on("Auto")
def test_every_length_counts_once(mesh):
    """From no item to more than two for each device; with the index of each item."""
    count = 3
    for size, lengths in (
        (1, (0, 1, 2, count, count + 1, count + 2, 2 * count, 2 * count + 2)),
        (None, (0, 2, count, 2 * count + 1)),
    ):
        for length in lengths:
            check_length(np.arange(length, dtype="f")[::-1].copy(), size)


def check_length(x, size):
    reduced = functools.partial(chunked_reduce, chunk_size=size, devices=3)
    doubled = chunked_vmap(lambda x: 2 * x, size, devices=3)
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


@on("Auto")
def test_a_call_takes_arrays_from_anywhere(mesh):
    devices = jax.devices()
    own, one = on_several(functools.partial(auto_vmap, x=1, w=2, b=0, chunk_size=7))

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


@on("Auto")
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


@on("Auto")
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


@on("Auto")
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
    assert ordered.plan(a, W, s).devices == ((0, 6),)  # no more than there are items
    total = np.sum(plain(a, W, s)[0]["v"])
    same(ordered(a, W, s)["v"], total, rtol=1e-3, atol=1e-3)
    # Of equally long axes, one that is kept.
    square = fun.with_options(reduce="sum", reduce_axis=0, chunk_size=5)
    assert square.plan(data(9, 9, 3), W, s[0]).devices == ((1, mesh.size),)


@on("Auto")
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


@on("Auto")
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


@on("Auto")
def test_plans_and_tuning_know_devices(mesh):
    count = mesh.size
    mapped = auto_vmap(x=1, w=2, chunk_size=7, devices="all")(scalar)
    x = jax.ShapeDtypeStruct((ODD, 3), jnp.float32)
    assert mapped.plan(x, W).devices == ((0, count),)
    assert f"axis 0: over {count} devices, {N // count} or {N // count + 1} items on each" in str(
        mapped.plan(x, W)
    )
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


@on("Auto")
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


@on("Auto")
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


@on("Auto")
def test_ragged_items_are_shared(mesh):
    check_ragged(mesh, ["argmax"], jit=True, chunk_size=2)


@pytest.mark.weekly
@on("Auto")
def test_ragged_items_are_shared_in_eager_calls(mesh):
    check_ragged(mesh, ["sum", "argmax", "logsumexp"])


@on("Auto")
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
