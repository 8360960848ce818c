# SPDX-License-Identifier: MIT
"""Gradients of what compares the types of arrays, which name the mesh on devices."""

import jax
import jax.numpy as jnp
import pytest

from helpers import assert_same, weekly
from rankax import auto_vmap
from sharding import on, put

eqx = pytest.importorskip("equinox")
C = jnp.linspace(0.5, 4.0, 8)


@eqx.filter_custom_vjp
def solved(c, start, f):
    return jax.lax.fori_loop(0, 20, lambda _, x: x - f(x, c) / (2 * x), start)


@solved.def_fwd
def _(_, c, start, f):
    x = solved(c, start, f)
    return x, x


@solved.def_bwd
def _(x, cotangent, _, c, start, f):
    return jax.vjp(lambda c: f(x, c), c)[1](-cotangent / (2 * x))[0]


def root(c):
    start = jnp.ones_like(c)
    return solved(c, start, eqx.filter_closure_convert(lambda x, c: x**2 - c, start, c))


@on("Auto", "Explicit")
@pytest.mark.parametrize(
    "given", [{}, {"chunk_size": 3}, weekly({"lockstep": False}), {"reduce": "sum"}], ids=str
)
def test_rules_of_equinox_are_differentiated_from_outside(mesh, given):
    c = jnp.linspace(0.5, 4.0, 4 * mesh.size)
    kernel = auto_vmap(c=0, s=None, **given)(lambda c, s: root(s * c))
    slopes = jax.grad(lambda c, s: jnp.sum(kernel(c, s)), (0, 1))(put(mesh, c, "d"), 1.0)
    want = 0.5 / jnp.sqrt(c), jnp.sum(jnp.sqrt(c)) / 2
    assert_same(jax.device_get(slopes), jax.device_get(want), rtol=1e-5)


def test_in_jit_vmap_and_uneven_parts():
    kernel = auto_vmap(0, devices=3, chunk_size=2)(root)

    def slope(c):
        return jax.grad(lambda c: jnp.sum(kernel(c)))(c)

    many = jnp.stack([C[:7], C[1:]])
    assert_same(jax.jit(jax.vmap(slope))(many), 0.5 / jnp.sqrt(many), rtol=1e-5)
