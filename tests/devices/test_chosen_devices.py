# SPDX-License-Identifier: MIT
"""Devices that the call chooses, such as `devices="all"`, for batches of any length."""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rankax
from fuzz import programs
from helpers import refusal, weekly
from rankax import SplitKey, auto_vmap, chunked_jacfwd, chunked_jacrev, chunked_reduce, chunked_vmap
from rankax import reductions as rd
from scan_cases import assert_same_weak_types
from sharding import (
    ODD,
    N,
    W,
    X,
    check_drawn,
    compiled,
    data,
    kernel,
    loss_of,
    mesh_of,
    naming,
    on,
    put,
    same,
    scalar,
    sent,
)


@pytest.mark.parametrize(("size", "length"), [(7, N), (7, ODD), (None, ODD)])
@on("Auto")
def test_maps_of_any_length_send_nothing_inside(mesh, size, length):
    x, b = data(length, 3), data(length, seed=2)
    one = functools.partial(chunked_vmap, kernel, size, (0, None, 0))
    mapped, one = one(devices="all"), one()
    ones = {"v": np.ones(length, np.float32), "x": np.ones((length, 3), np.float32)}

    def pull(mapped, cotangent, *args):
        return jax.vjp(mapped, *args)[1](cotangent)

    want, slopes = jax.jit(lambda *args: (one(*args), pull(one, ones, *args)))(x, W, b)
    # Where the devices do not divide the length, each gets all results, and all cotangents.
    gathered = {"all-gather": 2} if length % mesh.size else {}  # of two outputs, of x and of b
    forward = compiled(mapped, x, W, b)
    assert sent(forward) == gathered
    same(forward(x, W, b), want)
    backward = compiled(functools.partial(pull, mapped), ones, x, W, b)
    assert sent(backward) == {"all-reduce": 1, **gathered}
    same(backward(ones, x, W, b), slopes, rtol=1e-3, atol=1e-3)


@pytest.mark.optimized
@on("Auto")
def test_memory_of_a_gradient_of_any_length(mesh):
    """Each device has all outputs and all cotangents, but not all inputs once more."""
    x, w = data(80003, 16), data(16, 16)
    mapped = chunked_vmap(lambda x, w: jnp.tanh(w @ x), 100, (0, None), devices="all")
    gradient = jax.grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), (0, 1))
    assert compiled(gradient, x, w).memory_analysis().temp_size_in_bytes < 2.6 * x.nbytes


def waves(x):
    return jnp.cumsum(jnp.sin(x)) * jnp.sum(x**2)


@pytest.mark.parametrize("jacobian", [chunked_jacfwd, chunked_jacrev])
@on("Auto")
def test_basis_vectors_of_a_jacobian_are_items(mesh, jacobian):
    x = data(100)
    plain = np.asarray(jax.jit(jax.jacfwd(waves))(x))
    spread = functools.partial(jacobian, waves, chunk_size=7, devices="all")
    found = spread()(x)
    assert len(found.sharding.device_set) == mesh.size
    same(found, plain, rtol=1e-4, atol=1e-3)
    trace, gram = jax.jit(lambda x: [spread(reduce=name)(x) for name in ("trace", "gram")])(x)
    same(trace, np.trace(plain), rtol=1e-4)
    same(gram, plain.T @ plain, rtol=1e-3, atol=1.0)


@on("Auto")
def test_basis_vectors_of_a_hessian_are_items(mesh):
    def energy(x):
        return jnp.sum(waves(x))

    hessian = rankax.chunked_hessian(energy, chunk_size=7, devices="all")
    want = jax.jit(jax.hessian(energy))(data(100))
    same(hessian(data(100)), want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("size", "length"), [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (None, 2), (None, 7)]
)
@on("Auto")
def test_every_length_counts_once(mesh, size, length):
    """From no item to more than two for each of three devices; with the index of each item."""
    x = np.arange(length, dtype="f")[::-1].copy()
    doubled = chunked_vmap(lambda x: 2 * x, size, devices=3)
    fold = rd.Fold(jnp.float32(0), lambda x: x, jnp.add)
    totals = [chunked_reduce(lambda x: x * x, how, size, devices=3) for how in ("sum", fold)]

    @jax.jit
    def found(x):
        slope = jax.grad(lambda x: jnp.sum(doubled(x) ** 2))(x)
        return doubled(x), slope, [(total(x), jax.grad(total)(x)) for total in totals]

    same(found(x), (2 * x, 8 * x, 2 * [(np.sum(x * x), 2 * x)]))
    if length:
        least = chunked_reduce(lambda x: (x * 1, x), ("argmin", None), size, devices=3)
        same(least(x), (np.int32(length - 1), x))


@pytest.mark.parametrize(("length", "jit"), [(N, True), (ODD, False)], ids=["jit", "eager"])
@on("Auto")
def test_a_call_takes_arrays_from_anywhere(mesh, length, jit):
    devices = jax.devices()
    one = auto_vmap(x=1, w=2, b=0, chunk_size=7)(kernel)
    mapped = one.with_options(devices="all", jit=jit)
    x, b = data(length, 3), data(length, seed=2)

    def gradients(f, *args):
        return jax.grad(loss_of(f), (0, 1, 2))(*args)

    def pushed(f, *args):
        return jax.jvp(f, args, args)

    @jax.jit
    def of_one(*args):
        return one(*args), gradients(one, *args), pushed(one, *args)

    want, slopes, tangents = of_one(x, W, b)
    spread = NamedSharding(mesh, P() if length % mesh.size else P("d"))
    for place in (np.asarray, devices[1], NamedSharding(mesh, P()), spread):
        there = place(x) if callable(place) else jax.device_put(x, place)
        out = mapped(there, jax.device_put(W, devices[2]), b)
        same(out, want)
        for leaf in jax.tree.leaves(out):  # spread, or on every device
            assert leaf.sharding.is_equivalent_to(spread, leaf.ndim)
    same(gradients(mapped, jnp.asarray(x), W, b), slopes, rtol=1e-3, atol=1e-3)
    same(pushed(mapped, x, W, b), tangents, rtol=1e-3)
    both = jax.vmap(lambda w: mapped(x, w, b))(np.stack([W, 2 * W]))
    same(jax.tree.map(lambda out: out[0], both), want)
    both = jax.vmap(lambda x: mapped(x, W, b), in_axes=1)(np.stack([x, x], 1))
    same(jax.tree.map(lambda out: out[1], both), want)


@on("Auto")
def test_arrays_of_another_mesh(mesh):
    want = jax.jit(jax.vmap(scalar, (0, None)))(X, W)
    # Another mesh may be set than the one that arrays are on.
    with jax.set_mesh(mesh_of(AxisType.Auto, 2, mesh.size // 2)):
        apart = jax.make_mesh((mesh.size,), ("x",), axis_types=(AxisType.Auto,))
        same(chunked_vmap(scalar, 7, (0, None))(put(apart, X, "x"), W), want)
    # What is sharded over the same devices stays on the mesh of the caller.
    spread = chunked_vmap(scalar, 7, (0, None), devices="all")
    assert spread(put(mesh, X, "d"), W).sharding.mesh == mesh
    # What the kernel closes over is copied to all devices, wherever it is.
    w = jax.device_put(W, jax.devices()[3])
    same(chunked_vmap(lambda x: scalar(x, w), 7, devices="all")(X), want)


@on("Auto")
def test_devices_are_chosen(mesh):
    devices = jax.devices()
    mapped = auto_vmap(x=1, w=2, chunk_size=7, devices=2)(scalar)
    plain = jax.jit(jax.vmap(scalar, (0, None)))
    want = plain(X, W)
    for given, used in (
        (2, devices[:2]),
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
            assert refusal(ValueError, mapped, X, W) == (
                "scalar(): devices=2 names 2 devices, but the call is on another mesh, of "
                f"{mesh.size} devices; leave out devices= to use it"
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
    wanted = plain(a, W, s)
    for way, want in zip(ways, wanted, strict=True):
        own = fun.with_options(chunk_size=5, **way)
        assert own.plan(a, W, s).devices == ((1, mesh.size),)
        same(own(a, W, s), want)
    folded = {"v": rd.Fold(jnp.float32(0), lambda y: y, jnp.add), "x": None}
    ordered = fun.with_options(reduce=folded, chunk_size=5)
    assert ordered.plan(a, W, s).devices == ((0, 6),)  # no more than there are items
    same(ordered(a, W, s)["v"], np.sum(wanted[0]["v"]), rtol=1e-3, atol=1e-3)
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
        (P(("d", "e")), slice(2, 3)),
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
    for shape, mapped, size in (
        ((ODD,), jax.vmap(draw), 7),
        ((ODD,), jax.vmap(draw), None),
        ((2, ODD), jax.vmap(jax.vmap(draw)), 1),
    ):
        batch = data(*shape)
        want = jax.jit(mapped)(batch, jax.random.split(key, shape))
        drawn = auto_vmap(x=0, key=SplitKey, chunk_size=size, devices="all")(draw)
        total = drawn.with_options(reduce=("sum", None))
        both = jax.jit(lambda *args, calls=(drawn, total): [call(*args) for call in calls])
        check_drawn(*both(batch, key), want)
    # Of a batch that is sharded along axes of the mesh, in any order.
    square = mesh_of(AxisType.Auto, 2, mesh.size // 2)
    batch = data(N, 6)
    want = jax.jit(jax.vmap(jax.vmap(draw)))(batch, jax.random.split(key, batch.shape))
    for size, *entries in ((7, None, "d"), (100, "e", "d")):
        drawn = auto_vmap(x=0, key=SplitKey, chunk_size=size)(draw)
        total = drawn.with_options(reduce=("sum", None), reduce_axis=0)
        args = put(square, batch, *entries), key
        check_drawn(drawn(*args), total(*args), want)
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
    limited = auto_vmap(x=1, w=2, memory_limit="2 kB", devices="all")(scalar)
    assert limited.plan(x, W).memory.chunk_size <= N // count
    same(limited(data(ODD, 3), W), jax.vmap(scalar, (0, None))(data(ODD, 3), W))
    tuned = mapped.with_options(devices=None).tune(X, W, seconds=0.5)
    tried = [candidate.options.get("devices") for candidate in tuned.tuning.candidates]
    assert {"all", None} <= {*tried}
    assert "devices='all'" in str(tuned.tuning)
    same(tuned(X, W), mapped(X, W))


@on("Auto")
def test_errors_of_devices(mesh):
    mapped = auto_vmap(x=1, w=2, chunk_size=7, devices=99)(scalar)
    assert refusal(ValueError, mapped, X, W) == (
        f"scalar(): devices=99, but JAX has {mesh.size} CPU devices; for more CPU devices, one for "
        'each core, call jax.config.update("jax_num_cpu_devices", 99) before JAX is first used'
    )
    there = jax.device_put(X, jax.devices()[1])
    text = (
        "scalar(): inside jax.grad, jax.jvp or jax.vmap, an argument is committed to other "
        "devices than those of devices=; put it on them first, with jax.device_put"
    )
    for jit in (False, True):
        mapped = mapped.with_options(devices="all", jit=jit)
        with pytest.raises(ValueError, match=re.escape(text)):
            jax.grad(lambda x, f=mapped: f(x, W).sum())(there)


@on("Auto")
def test_buckets_are_filled_up_and_shared(mesh):
    filled = auto_vmap(x=1, w=2, jit=True, bucket=(mesh.size + 1,))(scalar)
    x = put(mesh, X[: mesh.size], "d")
    assert refusal(ValueError, filled, x, W) == (
        "scalar(): x is sharded over devices, but bucket= pads it on the host; with devices=, "
        "the devices share the padded batch"
    )
    same(filled.with_options(devices="all")(x, W), jax.vmap(scalar, (0, None))(X[: mesh.size], W))


@pytest.mark.parametrize(
    ("reductions", "options"),
    [
        (["argmax"], {"jit": True, "chunk_size": 2}),
        weekly(["sum", "argmax", "logsumexp"], {}),
    ],
    ids=["jit", "eager"],
)
@on("Auto")
def test_ragged_items_are_shared(mesh, reductions, options):
    """Also with more devices than a length has items."""
    lengths = [6, 0, 5, 1, 3, 6, 1, 6, 5]  # three programs, of 3, 1 and 5 items
    x, s = rankax.Ragged(data(sum(lengths), 3), lengths), np.arange(9, dtype=np.float32)
    kernel = auto_vmap(x="n 3", mask=rankax.Mask("n"), s=0, **options)(
        lambda x, mask, s: jnp.sum(jnp.tanh(x).sum(-1), where=mask) * s
    )
    rows = auto_vmap("(n,3)->(n)", **options)(lambda x: x.sum(-1))
    same(rows.with_options(devices="all")(x), rows(x))

    def found(devices):
        calls = [kernel.with_options(reduce=name, devices=devices) for name in (None, *reductions)]
        return [call(x, s) for call in calls], jax.grad(lambda x: jnp.sum(calls[0](x, s) ** 2))(x)

    same(found("all"), found(None))
    with pytest.raises(ValueError, match="s is sharded over devices, but ragged items are read"):
        kernel(x, put(mesh, np.arange(8, dtype=np.float32), "d"))


@pytest.mark.parametrize(
    "options",
    [{"reduce": "argmin"}, {"jit": True}, {"chunk_size": 2}, {"memory_limit": "8 kB"}],
    ids=str,
)
@on("Auto")
def test_stretched_axes_of_any_length(mesh, options):
    options = {"reduce": "sum", **options}
    args = data(9), data(1, seed=1), jax.random.key(0)
    drawn = auto_vmap(x=0, y=0, key=SplitKey, devices=2, **options)(
        lambda x, y, key: x * y + jax.random.normal(key)
    )
    same(drawn(*args), drawn.with_options(devices=None)(*args))


@pytest.mark.parametrize("length", [8, 9])
@on("Auto")
def test_results_and_cotangents_are_weak_as_on_one(mesh, length):
    x, w = jax.lax.full((length,), 2.0), jax.lax.full((3,), 2.0)

    def found(devices):
        mapped = chunked_vmap(lambda x, w: (x * w, 2), None, (0, None), devices=devices)
        return mapped(x, w), jax.grad(lambda *args: mapped(*args)[0].sum(), (0, 1))(x, w)

    same(found("all"), found(None))
    assert_same_weak_types(found("all"), found(None))


# Random programs, against plain JAX on one device.

COUNT = int(os.environ.get("RANKAX_PROGRAMS", "12"))


@pytest.mark.parametrize(
    ("kind", "count"),
    [("pairs", 3), weekly("pairs", 2 * COUNT), weekly("calls", COUNT), weekly("lanes", COUNT)],
)
@on("Auto")
def test_random_programs_on_all_devices(mesh, kind, count):
    drawn = (programs.draw(seed, kind) for seed in range(5 * count))
    maps = [program for program in drawn if program.caller in ("auto_vmap", "chunked_vmap")]
    for program in maps[:count]:
        with naming(program):
            dataclasses.replace(program, options=program.options | {"devices": "all"}).check()
