# SPDX-License-Identifier: MIT
"""Kernels of every kind on a mesh with explicit axes, inside `jax.set_mesh` and outside of it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import refusal, weekly
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax import reductions as rd
from sharding import N, W, X, data, from_0_10_1, mesh_of, naming, on, put, same, scalar


@on("Explicit")
def test_check_refuses_explicit_axes(mesh):
    mapped = auto_vmap(x=1, w=2)(scalar)
    assert refusal(TypeError, mapped.check, put(mesh, X, "d"), W) == (
        "scalar.check: an array is on a mesh with explicit axes, where items cannot be picked; "
        "pass jax.device_get(...) of the arguments"
    )
    assert mapped.check(X, W).items


@on("Explicit", enter=False)
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

    found, want = (jax.jit(jax.value_and_grad(f))(w) for f in (loss, of_one))
    same(jax.tree.map(np.asarray, found), want, rtol=1e-3, atol=1e-2)


@on("Explicit")
@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"chunk_size": 3, "jit": True}], ids=str)
def test_without_devices_results_are_sharded_alike(mesh, options):
    whole = auto_vmap(1, 2, devices=False)(scalar)
    x, w = put(mesh, X, "d"), put(mesh, W)
    chunked = whole.with_options(**options)
    want, pull = jax.vjp(whole, x, w)
    got, pull_chunked = jax.vjp(chunked, x, w)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    same(got, want)
    same(pull_chunked(want), pull(want), rtol=1e-4)
    pairs = auto_vmap(0, 0, devices=False, reduce="sum", reduce_axis=-1, **options)(jnp.multiply)
    rows = jax.reshard(x[:, :1], P("d"))
    got, want = pairs(rows, jnp.ones(5)), pairs.with_options(chunk_size=None)(rows, jnp.ones(5))
    assert jax.typeof(got) == jax.typeof(want)
    same(got, want)


@from_0_10_1
@on("Explicit")
def test_all_items_are_finite(mesh):
    fun = auto_vmap(x=1, w=2, chunk_size=2)(scalar)
    for gradient in (False, True):
        found = fun.nonfinite(put(mesh, X, "d"), put(mesh, W), gradient=gradient)
        assert found.count == 0


# Kernels of one vector of three numbers, one for each kind of program that JAX can trace.

# Closed over, and on no mesh.
WEIGHTS = jnp.asarray(np.cos(np.arange(9.0)).reshape(3, 3))
SHIFT = np.array([0.5, -1.0, 2.0], np.float32)


@jax.custom_jvp
def sine(v):
    return jnp.sin(v)


sine.defjvp(lambda primals, tangents: (sine(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def cosine(v):
    return jnp.cos(v)


cosine.defvjp(lambda v: (cosine(v), v), lambda v, g: (-g * jnp.sin(v),))


def drawn(v):
    return v * jax.random.normal(jax.random.fold_in(jax.random.key(3), v[0].astype(int)), (3,))


KINDS = {
    "jit": lambda v: jax.jit(lambda v: jnp.sin(v) @ WEIGHTS + SHIFT)(v),
    "scan": lambda v: lax.scan(lambda s, a: (jnp.tanh(WEIGHTS @ s) + a, s * a), v, v),
    "fori_loop": lambda v: lax.fori_loop(0, 4, lambda _, s: jnp.sin(s) + v, v),
    "cond": lambda v: lax.cond(v[0] > 1.5, jnp.sin, jnp.square, v),
    "switch": lambda v: lax.switch(v[0].astype(int), [jnp.sin, jnp.cos, jnp.square], v),
    "nested auto_vmap": lambda v: auto_vmap(0, 1, chunk_size=2)(lambda a, u: a * u.sum())(v, v),
    "nested chunked_vmap": lambda v: chunked_vmap(lambda a: jnp.sin(a) * v, 2)(v),
    "hessian": jax.hessian(lambda v: jnp.sin(v).prod()),
    "custom_jvp": lambda v: sine(v) ** 2,
    "custom_vjp": lambda v: cosine(v) ** 2,
    "checkpoint": jax.checkpoint(lambda v: jnp.sin(WEIGHTS @ v)),
    # Without `inv`, which JAX (0.12) cannot map over an explicit axis.
    "linalg": lambda v: jnp.linalg.solve(jnp.outer(v, v) + 2 * jnp.eye(3), v),
    "index": lambda v: v[jnp.array([2, 0, 1, 1])] * v[jnp.argmax(v)],
    "key": drawn,
    "einsum": lambda v: jnp.einsum("i,ij,j->", v, WEIGHTS, v) + jnp.dot(v, v),
    "pytree": lambda v: {"a": (v[0], jnp.sin(v)), "b": [v[1:].sum()]},
}


def all_kinds(v):
    return {kind: KINDS[kind](v[kind]) for kind in v}


plain = jax.vmap(all_kinds)


def plain_max(x):
    return jax.tree.map(lambda out: jnp.max(out, axis=0), plain(x))


# What each front end makes of the kernels, and what that means on one device.
FRONT_ENDS = {
    "chunked_vmap": (lambda: chunked_vmap(all_kinds, 2), plain),
    "auto_vmap": (lambda: auto_vmap(1, chunk_size=4)(all_kinds), plain),
    "chunked_reduce": (lambda: chunked_reduce(all_kinds, "max", 2), plain_max),
}


def of_kinds(mesh, kinds):
    return dict.fromkeys(kinds, data(6 * mesh.size, 3) + 1.5)


def same_kinds(found, want):
    for name, of_each in found.items():
        for kind, out in of_each.items():
            with naming((name, kind)):
                same(out, want[name][kind], rtol=1e-3)


SOME_KINDS = ("scan", "nested chunked_vmap", "key")


@pytest.mark.parametrize("kinds", [SOME_KINDS, weekly([*KINDS])], ids=["some", "all"])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@on("Explicit", enter=False)
def test_kernels_on_an_explicit_mesh(mesh, wrap, kinds):
    x = of_kinds(mesh, kinds)
    want = jax.jit(lambda x: {name: one(x) for name, (_, one) in FRONT_ENDS.items()})(x)
    want, x = jax.tree.map(np.asarray, want), put(mesh, x, "d")
    for name, (front, _) in FRONT_ENDS.items():
        spread = NamedSharding(mesh, P() if name == "chunked_reduce" else P("d"))
        for enter in (contextlib.nullcontext(), jax.set_mesh(mesh)):
            with enter:
                found = wrap(front())(x)
                same_kinds({name: found}, want)
                for path, out in jax.tree.leaves_with_path(found):
                    assert out.sharding.is_equivalent_to(spread, out.ndim), path


APART = ("switch", "nested chunked_vmap", "custom_vjp", "linalg", "key", "pytree")


@pytest.mark.parametrize(
    ("kinds", "apart"),
    [(("scan", "einsum"), ("scan",)), weekly([*KINDS], APART)],
    ids=["some", "all"],
)
@on("Explicit", enter=False)
def test_gradients_on_an_explicit_mesh(mesh, kinds, apart):
    """Those of maps, of the best item, and of the largest outputs of ``apart``."""
    x = of_kinds(mesh, kinds)

    def gradients(mapped, best, largest, x):
        def of_apart(x):
            return [largest({kind: x[kind]}) for kind in apart]

        def loss(x, f):
            return sum(jnp.sin(out).sum() for out in jax.tree.leaves(f(x)))

        calls = {"map": mapped, "Best": best, "max": of_apart}
        return {name: jax.grad(loss)(x, f) for name, f in calls.items()}

    def plain_best(x):
        out = plain(x)
        return jax.tree.map(lambda leaf: leaf[jnp.argmax(out["einsum"])], out)

    want = jax.jit(functools.partial(gradients, plain, plain_best, plain_max))(x)
    with jax.set_mesh(mesh):
        reduced = functools.partial(chunked_reduce, all_kinds, chunk_size=2)
        calls = chunked_vmap(all_kinds, 2), reduced(rd.Best("einsum", largest=True)), reduced("max")
        same_kinds(jax.jit(functools.partial(gradients, *calls))(put(mesh, x, "d")), want)


def walk(v, w):
    return lax.scan(lambda s, a: (jnp.tanh(w @ s) + a, None), v, v)[0].sum()


def square(v):
    return walk(v, jnp.outer(v, v))


def noisy(key, v):
    return v * jax.random.normal(key, (3,))


def closed(w, x):
    return jnp.sum(chunked_vmap(lambda v: walk(v, w.T @ w), 7)(x) ** 2)


KEY = jax.random.key(0)
OPTIONS = {"v": 1, "chunk_size": 7}
LIMITED = auto_vmap(v=1, memory_limit="2 kB")(square)
CALLS = {
    "closed over": (jax.jit(jax.grad(closed)), W, "d"),
    "on every device": (chunked_vmap(square, 7), None),
    "reduced on every device": (chunked_reduce(square, "max", 7), None),
    "jit=True": (auto_vmap(**OPTIONS, jit=True)(square), "d"),
    "memory limit": (jax.jit(LIMITED), "d"),
    "split keys": (auto_vmap(key=SplitKey, **OPTIONS)(noisy), KEY, "d"),
    "split keys, reduced": (auto_vmap(key=SplitKey, **OPTIONS, reduce="sum")(noisy), KEY, "d"),
}


@pytest.mark.parametrize("name", CALLS)
@on("Explicit", enter=False)
def test_other_calls_on_an_explicit_mesh(mesh, name):
    call, *shared, axis = CALLS[name]
    args = [x if x is KEY else put(mesh, x) for x in shared]
    want = jax.tree.map(np.asarray, call(*shared, X))
    for enter in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with enter:
            same(call(*args, put(mesh, X, axis)), want, rtol=1e-3, atol=1e-3)


@on("Explicit", enter=False)
def test_other_layouts_on_an_explicit_mesh(mesh):
    x = put(mesh, X, "d")
    assert LIMITED.plan(x).memory.chunk_size <= N // mesh.size

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


@on("Explicit")
def test_a_custom_vjp_of_a_shared_array_is_a_limit(mesh):
    """See `docs/limits.md`; if this fails, the limit has gone, and so may the sentence."""

    @jax.custom_vjp
    def dot(w, x):
        return jnp.sin(w @ x)

    def backward(residuals, cotangent):
        w, x = residuals
        slope = cotangent * jnp.cos(w @ x)
        return slope * x, slope * w

    dot.defvjp(lambda w, x: (dot(w, x), (w, x)), backward)
    w, x = jnp.arange(3.0) / 3, put(mesh, X, "d")

    def gradient(**options):
        mapped = auto_vmap(1, 1, **options)(dot)
        return jax.jit(jax.grad(lambda w: jnp.sum(mapped(w, x))))(w)

    with pytest.raises(ValueError, match="bwd rule"):
        gradient(chunk_size=2)
    want = jax.jit(jax.grad(lambda w: jnp.sum(jax.vmap(dot, (None, 0))(w, jnp.asarray(X)))))(w)
    np.testing.assert_allclose(gradient(devices=False), want, rtol=1e-5)


@pytest.mark.parametrize("reduce", [None, "sum"])
@on("Auto", "Explicit")
def test_a_shared_argument_that_the_kernel_broadcasts(mesh, reduce):
    """`jax.vmap` in the kernel enters the mesh that the argument is on."""

    def kernel(w, x):
        return jnp.sum(jax.vmap(lambda x: jnp.tanh(x + w))(x * jnp.eye(3)))

    w, x = jnp.arange(3.0), jnp.arange(48.0).reshape(16, 3)
    want = jax.vmap(kernel, (None, 0))(w, x)
    with jax.set_mesh(mesh):
        mapped = auto_vmap(x=1, reduce=reduce, devices=P("d"), chunk_size=1)(kernel)
        found = jax.jit(mapped)(w, put(mesh, x, "d"))
    np.testing.assert_allclose(found, want if reduce is None else want.sum(), rtol=1e-5)
