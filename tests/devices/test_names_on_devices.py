# SPDX-License-Identifier: MIT
"""Batch axes with names on several devices: as with `[:, None]`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from helpers import assert_same, refusal, weekly
from rankax import auto_vmap
from sharding import ODD, N, data, on, put

X, Y, W = data(N, 3), data(ODD, 3, seed=1), data(ODD, seed=2)


def gauss(x, y, w):
    return w * jnp.exp(-jnp.sum((x - y) ** 2))


def both(axes, **options):
    axis = {"i": 0, "j": 1, "i j": None}[axes]
    named = auto_vmap(x="i | 3", y="j | 3", w="j |", reduce="sum", over=axes, **options)(gauss)
    return named, auto_vmap(1, 1, 0, reduce="sum", reduce_axis=axis, **options)(gauss)


@pytest.mark.parametrize("devices", ["all", weekly(P("d")), P(None, "d")], ids=str)
@pytest.mark.parametrize("axes", ["i", "j"])
@on("Auto", "Explicit")
def test_sums_over_names(mesh, axes, devices):
    named, other = both(axes, devices=devices, chunk_size=1000, jit=True)
    x, y, w = put(mesh, X), put(mesh, Y), put(mesh, W)
    assert_same(named(x, y, w), other(x[:, None], y, w))
    plans = named.plan(x, y, w), other.plan(x[:, None], y, w)
    assert plans[0].devices == plans[1].devices != ()

    def slope(call, x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(call(x))))(x)

    new = slope(lambda x: other(x[:, None], y, w), x)
    assert_same(slope(lambda x: named(x, y, w), x), new, rtol=1e-4)


@on("Auto", "Explicit")
def test_a_sharded_axis_has_its_name(mesh):
    named, other = both("j", jit=True)
    x, y, w = put(mesh, X, "d"), put(mesh, Y), put(mesh, W)
    assert_same(named(x, y, w), other(x[:, None], y, w))
    assert "axis i: over 8 devices, 60 items on each" in str(named.plan(x, y, w))


@on("Auto", "Explicit")
def test_an_argument_leaves_items_out(mesh):
    ranks = {"x": "i | 3", "y": "j | 3", "ok": "i j |"}
    kernel = auto_vmap(**ranks, reduce="mean", over="j", where="ok", chunk_size=1000, jit=True)
    kernel = kernel(lambda x, y, ok: jnp.sqrt(jnp.sum((x - y) ** 2)))
    x, y = X, data(N, 3, seed=1)
    y[5] = x[7]  # a derivative that is NaN
    ok = jnp.any(x[:, None] != y, -1)

    def slope(*args):
        return jax.grad(lambda x, y, ok: jnp.sum(jnp.sin(kernel(x, y, ok))), (0, 1))(*args)

    want, found = slope(x, y, ok), slope(put(mesh, x, "d"), put(mesh, y), put(mesh, ok, "d"))
    assert_same(found, want, rtol=1e-4)
    assert all(bool(jnp.isfinite(x).all()) for x in found)


@on("Auto")
def test_errors_of_a_spec_name_the_axes(mesh):
    named, _ = both("j", devices=P(None, None, "d"))
    text = refusal(ValueError, named, put(mesh, X, "d"), put(mesh, Y), put(mesh, W))
    assert "has 3 entries for the batch shape (480, 483), whose last axes are i and j" in text
