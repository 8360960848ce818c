# SPDX-License-Identifier: MIT
"""Pytree classes that check, or convert, what they are rebuilt from, as TFP's distributions do.

JAX rebuilds a class with arrays, for one item or for all. Whatever else stood in its fields on the
way (a shape, a dtype, the items of one chunk, a zero that stands for a tangent) would be refused.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from helpers import assert_same
from rankax import auto_vmap, checkpoint_chunked_scan, chunked_vmap, sliced_scan

LENGTH = 5


class Rebuilt:
    """Is made by its constructor, which may check or convert, of what JAX gives it."""

    def tree_flatten(self):
        return tuple(vars(self).values()), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Normal(Rebuilt):
    """Converts its parameters, whose shapes must be that of one item or of all."""

    def __init__(self, mean, scale):
        self.mean, self.scale = (
            value if isinstance(value, jax.Array) else jnp.asarray(float(value))
            for value in (mean, scale)
        )
        for value in (self.mean, self.scale):
            assert value.shape in ((), (LENGTH,)), value.shape


@jax.tree_util.register_pytree_node_class
class State(Rebuilt):
    """Holds scalars, and nothing else."""

    def __init__(self, x):
        assert x.shape == ()
        assert isinstance(x, jax.Array)
        self.x = x


@jax.tree_util.register_pytree_node_class
class Freely(Rebuilt):
    """Takes arrays of any one length, because a scan may keep only some of its outputs."""

    def __init__(self, mean, scale):
        for value in (mean, scale):
            assert isinstance(value, jax.Array)
            assert value.ndim <= 1
        self.mean, self.scale = mean, scale


@jax.tree_util.register_pytree_node_class
class Plane(Rebuilt):
    """Holds one item, or all of a batch with two axes."""

    def __init__(self, x):
        assert x.shape in ((), (1, LENGTH))
        self.x = x


M = jnp.linspace(0.1, 0.9, LENGTH)


def shifted(normal, by):
    return {"moved": Normal(normal.mean + by, normal.scale * 2.0), "by": by**2}


def total(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def looped(fun, *args):
    """What `jax.vmap` means."""
    outs = [fun(*jax.tree.map(operator.itemgetter(i), args)) for i in range(LENGTH)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


@pytest.mark.parametrize(("chunk_size", "jit"), [(1, False), (2, False), (None, True)])
def test_in_and_out_of_a_kernel(chunk_size, jit):
    normals = Normal(M, jnp.ones(LENGTH))
    want = jax.jit(looped, static_argnums=0)(shifted, normals, M)
    mapped = auto_vmap(0, 0, chunk_size=chunk_size, jit=jit)(shifted)
    assert_same(mapped(normals, M), want)
    assert_same(mapped(Normal(M, 1.0), M), want)
    assert mapped.plan(normals, M).batch_shape == (LENGTH,)
    gradient = jax.grad(lambda normals: total(mapped(normals, M)))(normals)
    assert_same(gradient, jax.jit(jax.grad(lambda n: total(looped(shifted, n, M))))(normals))


def test_levels_of_a_nest_are_not_seen():
    """A map of (1, 5) items is one of 5, whose outputs are given the shape of the batch later."""

    @auto_vmap(0, 0, chunk_size=2)
    def kernel(a, b):
        return Plane(a * b)

    got = kernel(M, jnp.full((1, 1), 2.0))
    assert_same(got.x, 2 * M[None])


@pytest.mark.parametrize("chunk_size", [2, None])
def test_chunked_with_axes(chunk_size):
    axes = ({"normal": 0, "table": 1},)
    tree = {"normal": Normal(M, M + 1), "table": jnp.arange(3.0 * LENGTH).reshape(3, LENGTH)}

    def one(tree):
        normal, table = tree["normal"], tree["table"]
        return Normal(normal.mean * table[0], normal.scale), table * normal.mean, Normal(2.0, 3.0)

    def by_hand(tree):
        rows = {"normal": tree["normal"], "table": tree["table"].T}
        normal, table, fixed = looped(one, rows)
        return normal, table.T, jax.tree.map(lambda leaf: leaf[0], fixed)

    out_axes = (0, 1, None)
    mapped = chunked_vmap(one, chunk_size, axes, out_axes)
    assert_same(mapped(tree), jax.jit(by_hand)(tree))
    gradient = jax.jit(jax.grad(lambda tree: total(mapped(tree))))(tree)
    assert_same(gradient, jax.jit(jax.grad(lambda tree: total(by_hand(tree))))(tree))


# A scan, and which outputs it keeps.
SCANS = {
    "sliced": (functools.partial(sliced_scan, start=1, step=2), slice(1, None, 2)),
    "backwards": (functools.partial(sliced_scan, start=-2, step=-2), slice(-2, None, -2)),
    "checkpointed": (functools.partial(checkpoint_chunked_scan, chunk_size=2), slice(None)),
}


@pytest.mark.parametrize(("scan", "window"), SCANS.values(), ids=SCANS)
def test_as_carry_inputs_and_outputs_of_a_scan(scan, window):
    def plain(f, init, xs):
        carry, ys = lax.scan(f, init, xs)
        return carry, jax.tree.map(lambda y: y[window], ys)

    def body(state, x):
        state = State(jnp.sin(state.x) * x.scale + x.mean)
        return state, Freely(x.mean * state.x, state.x)

    def end_and_gradients(scan):
        def loss(init, xs):
            outs = scan(body, State(init), xs)
            return total(outs), outs

        return jax.grad(loss, (0, 1), has_aux=True)(jnp.asarray(0.3), Normal(M, 1 - M))

    want = jax.jit(lambda: end_and_gradients(plain))()
    assert_same(end_and_gradients(scan), want)
