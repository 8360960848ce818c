# SPDX-License-Identifier: MIT
"""What depends on fewer axes than an item is evaluated once on each device, for its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, weekly
from rankax import auto_vmap
from rankax.ext.equations import operations

R = np.random.default_rng(0)
X, Y = (jnp.asarray(R.normal(size=(n, 3)), jnp.float32) for n in (39, 87))
W, V = (jnp.asarray(R.normal(size=shape) / 4, jnp.float32) for shape in ((3, 32), (32, 4)))


def net(x):
    return jnp.tanh(jnp.tanh(x @ W) @ V)


def kernel(x, y):
    return jnp.exp(-jnp.sum((net(x) - net(y)) ** 2))


def total(f, x, y):
    return jnp.sum(jnp.sin(f(x[:, None], y)))


def tanhs(fun, *args):
    """Return how many numbers have a tanh, on one device."""
    found = operations(jax.make_jaxpr(fun)(*args).jaxpr)
    own = [each for each in found if each.name == "tanh" and not each.calls]
    return sum(each.times * each.eqn.outvars[0].aval.size for each in own)


@pytest.mark.parametrize(
    ("devices", "axis", "options"),
    [
        (3, None, {"chunk_size": 30}),
        (3, 0, {"chunk_size": 30}),
        weekly(3, 1, {"chunk_size": 30}),
        weekly(4, None, {"chunk_size": 30}),
        (3, 0, {"memory_limit": "100 kB"}),
        weekly(3, None, {"memory_limit": "100 kB"}),
    ],
)
def test_each_device_evaluates_its_part_once(devices, axis, options):
    reduced = {} if axis is None else {"reduce": "sum", "reduce_axis": axis}
    mine = auto_vmap(x=1, y=1, devices=devices, **options, **reduced)(kernel)

    def plain(x, y):
        outs = jax.vmap(lambda x: jax.vmap(lambda y: kernel(x, y))(y))(x[:, 0])
        return outs if axis is None else jnp.sum(outs, axis)

    assert_same(mine(X[:, None], Y), plain(X[:, None], Y), rtol=2e-5, atol=2e-5)
    gradients = [jax.jit(jax.grad(functools.partial(total, f), (0, 1))) for f in (mine, plain)]
    assert_same(*(gradient(X, Y) for gradient in gradients), rtol=2e-4, atol=2e-4)
    # A part of a device, and the item that it evaluates by itself, if they do not divide the axis.
    part = len(X) // devices + len(Y) + 30
    assert tanhs(mine, X[:, None], Y) <= (2 if len(X) % devices else 1) * part * 36
