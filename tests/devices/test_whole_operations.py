# SPDX-License-Identifier: MIT
"""What XLA would divide wrongly, or with a collective in each step, if it saw a sharded axis."""

from __future__ import annotations

import functools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from helpers import weekly
from kernel_kinds import OPERATIONS, SOME_OPERATIONS
from library_functions import FUNCTIONS, HOMES, LEFT_OUT, SOME_FUNCTIONS
from rankax import auto_vmap, chunked_vmap
from sharding import X, compiled, data, from_0_10_1, given, naming, on, put, same, sent


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


@on("Auto")
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


@on("Auto")
def test_ffts_and_factors_send_nothing(mesh):
    def factor(x):
        return jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(3)).sum()

    x = put(mesh, X, "d")
    for fun in (lambda x: jnp.abs(jnp.fft.fft(x)), factor, jnp.sort, jnp.cumsum):
        mapped = chunked_vmap(fun, 20, **given(mesh))
        forward = compiled(mapped, x)
        assert sent(forward) == {}
        same(forward(x), jax.jit(jax.vmap(fun))(X))


@on("Auto")
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


@on("Auto")
def test_jacobians_of_convolutions(mesh):
    weights, images = data(3, 3, 1, 2), data(mesh.size, 6, 6, 1, seed=1)
    own = auto_vmap(None, 3, chunk_size=1, devices="all")(convolved)

    def both(f):
        return jax.jacrev(f)(weights, images), jax.hessian(f)(weights, images)

    want = jax.jit(functools.partial(both, jax.vmap(convolved, (None, 0))))()
    same(jax.jit(functools.partial(both, own))(), want, rtol=1e-3)


@pytest.mark.parametrize("names", [SOME_OPERATIONS, weekly(OPERATIONS)], ids=["some", "all"])
@on("Auto")
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


CASES = [SOME_FUNCTIONS[:1], weekly(SOME_FUNCTIONS[1:]), weekly(tuple(FUNCTIONS))]


@pytest.mark.parametrize("names", CASES, ids=["quick", "some", "all"])
@on("Auto")
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
