# SPDX-License-Identifier: MIT
"""What XLA would divide wrongly, or with a collective in each step, if it saw a sharded axis."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special
from jax.sharding import AxisType

from helpers import weekly
from ops import operations
from rankax import auto_vmap, chunked_vmap
from sharding import X, compiled, data, from_0_10_1, given, on, put, same, sent


def convolved(weights, image):
    """A convolution in the layout of Flax: weights (3, 3, 1, 2), an image (6, 6, 1)."""
    layout = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(image[None], weights, (1, 1), "SAME", dimension_numbers=layout)
    return jnp.sum(jnp.sin(out))


@from_0_10_1
@on("Auto", "Explicit")
def test_gradients_of_convolutions_are_right(mesh):
    weights, images = data(3, 3, 1, 2), data(4 * mesh.size, 6, 6, 1, seed=1)
    slope = jax.grad(convolved)

    @jax.jit
    def of_one(weights, images):
        def total(w, x):
            return jnp.sum(jax.vmap(convolved, (None, 0))(w, x))

        return jax.vmap(slope, (None, 0))(weights, images), jax.grad(total, (0, 1))(weights, images)

    want, slopes = jax.tree.map(np.asarray, of_one(weights, images))
    lying = put(mesh, weights), put(mesh, images, "d")
    # A `jax.jit` of the caller hides the sharding of arrays, unless their types show it.
    is_explicit = AxisType.Explicit in mesh.axis_types
    calls = [(None, {}, lying)] if is_explicit else [(None, {"devices": "all"}, (weights, images))]
    for size, options, args in [*calls, (3, {}, lying)]:
        mapped = auto_vmap(None, 3, chunk_size=size, **options)(slope)
        total = mapped.with_options(reduce="sum")
        calls = [mapped, jax.jit(mapped)] if options or is_explicit else [mapped]
        for call in calls:
            same(call(*args), want, rtol=1e-3)
        same(total(*args), want.sum(0), rtol=1e-3, atol=1e-4)
    through = auto_vmap(None, 3, chunk_size=2, **given(mesh))(convolved)
    backward = compiled(jax.grad(lambda w, x: jnp.sum(through(w, x)), (0, 1)), *lying)
    assert sent(backward) == {"all-reduce": 1}
    same(backward(*lying), slopes, rtol=1e-3, atol=1e-4)


@on("Auto")
def test_callbacks_run_on_each_device(mesh):
    def called(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x, vmap_method="expand_dims").sum()

    for length, size in ((8 * mesh.size, None), (8 * mesh.size + 1, 2)):
        x = data(length, 3)
        mapped = compiled(chunked_vmap(called, size, devices="all"), x)
        same(mapped(x), np.sin(x).sum(1))
        assert "all-reduce" not in sent(mapped)


def factor(x):
    return jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(3)).sum()


@on("Auto")
def test_lapack_may_hang_with_jax_0_10(mesh, monkeypatch):
    def warned(fun, threads):
        monkeypatch.setenv("PJRT_NPROC", str(threads))
        mapped = chunked_vmap(fun, 7, devices="all")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.jit(mapped).lower(X)
        return [(str(each.message), each.filename) for each in caught]

    found = warned(factor, mesh.size)
    assert not warned(factor, mesh.size + 1)
    assert not warned(jnp.sort, mesh.size)
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


# Of each kind of operation that XLA could divide, one.
SOME_OPERATIONS = (
    *("fft.fft", "jnp.argmax", "jnp.einsum", "lax.associative_scan", "lax.cond", "lax.gather"),
    *("lax.conv_general_dilated", "lax.reduce_window", "lax.scan", "lax.scatter_add", "lax.sort"),
    *("lax.while_loop", "linalg.cholesky", "linalg.solve", "random.normal"),
)
OPERATIONS = [call for call in operations.MAPPED if "with_sharding_constraint" not in call]


def samples(*names):
    """Return the samples of operations, or of whole modules."""
    return [
        call for call in OPERATIONS if {operations.name_of(call), call.split(".")[0]} & {*names}
    ]


MODULES = [weekly(samples(module)) for module in operations.MODULES]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "calls", [samples(*SOME_OPERATIONS), *MODULES], ids=["some", *operations.MODULES]
)
@on("Auto")
def test_no_operation_is_divided(mesh, calls):
    """Values and gradients of many operations, on all devices and on one; none sends anything.

    Of several arrays that one takes, all items have the last.
    """
    kernels = {call: operations.Operation(call) for call in calls}

    def kernel(arrays):
        return {call: kernels[call](*arrays[call]) for call in arrays}

    arrays, axes = {True: {}, False: {}}, {True: {}, False: {}}  # has it a reverse mode?
    for call, fun in kernels.items():
        *mapped, last = fun.arrays(4 * mesh.size)
        modes, _ = operations.possible(fun, [x[0] for x in (*mapped, last)])
        kind = operations.vjp in modes
        arrays[kind][call] = [*mapped, last[0] if mapped else last]
        axes[kind][call] = [*[0] * len(mapped), None if mapped else 0]

    def found(arrays, **options):
        own = {kind: chunked_vmap(kernel, 2, (axes[kind],), **options) for kind in axes}
        leaves, tree = jax.tree.flatten(arrays[True])
        fun, primals = operations.of_inexact(lambda *xs: own[True](tree.unflatten(xs)), leaves)
        out, pull = jax.vjp(fun, primals)
        values = own[False](arrays[False]) if arrays[False] else {}
        return jax.tree.map(operations.data, values), out, pull(jax.tree.map(jnp.cos, out))

    program = compiled(functools.partial(found, devices="all"), arrays)
    assert sent(program).keys() <= {"all-reduce"}  # of the cotangents of what all items have
    want = jax.tree.map(np.asarray, jax.jit(found)(arrays))
    operations.assert_close(jax.tree.map(np.asarray, program(arrays)), want)


@on("Auto")
def test_a_function_with_constants_inside(mesh):
    """Values and gradients, in uneven parts: a program that is traced anew keeps its constants."""
    w, x = data(3, 3), data(4 * mesh.size + 1, 3, 3, seed=1)

    def kernel(w, x):
        return special.spence((1.2 + jnp.tanh(x * w)) / 3)

    def found(mapped, w, x):
        outs, pull = jax.vjp(mapped, w, x)
        return outs, pull(jnp.ones_like(outs))

    shared = auto_vmap(None, 2, chunk_size=4, jit=True, devices="all")(kernel)
    want = jax.jit(functools.partial(found, jax.vmap(kernel, (None, 0))))(w, x)
    same(jax.tree.map(np.asarray, found(shared, w, x)), want, rtol=1e-2, atol=1e-3)
