# SPDX-License-Identifier: MIT
"""Reductions that define no derivative, against `jax.numpy` on what they never store."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, refusal, slow, weekly
from rankax import auto_vmap, chunked_reduce
from rankax.core.reduce.protocol import EachLeaf
from rankax.core.reduce.row import Elementwise, InSlots, choose


class SquareOfSum(EachLeaf):
    @staticmethod
    def function(x, axis):
        return jnp.sum(x, axis) ** 2

    def accumulator(self, aval, size):
        return Elementwise(aval.shape, aval.dtype, 0, lax.add, jnp.sum)

    def result(self, state, aval, size):
        return state[..., 0] ** 2


class Accumulated(EachLeaf):
    def accumulator(self, aval, size):
        reduce = type(self).function
        return Elementwise(aval.shape, aval.dtype, self.identity, self.combine, reduce)

    def result(self, state, aval, size):
        return state[..., 0]


class LogSum(Accumulated):
    function = staticmethod(jax.nn.logsumexp)
    # Not -inf: the second derivative of `jax.numpy.logaddexp` of two of these is NaN.
    identity, combine = np.finfo("float32").min, staticmethod(jnp.logaddexp)


class Product(Accumulated):
    function = staticmethod(jnp.prod)
    identity, combine = 1, staticmethod(lax.mul)


class Largest(Accumulated):
    function = staticmethod(jnp.max)
    identity, combine = -jnp.inf, staticmethod(lax.max)


class PowerSums(InSlots):
    """The sums of the numbers and of their squares, of the items that count."""

    def start(self, slots):
        return self.full(0, self.dtype, slots), self.full(0, self.dtype, slots)

    def step(self, state, tile, index, counts=None):
        new = self.merge(state, (tile, tile**2))
        return new if counts is None else choose(counts, new, state)

    def nothing(self):
        return None

    def merge(self, first, second):
        return tuple(map(jnp.add, first, second))

    def join(self, state):
        return tuple(jnp.sum(x, axis=-1, keepdims=True) for x in state)


class Spread(EachLeaf):
    @staticmethod
    def function(x, axis):
        return jnp.sqrt(1 + jnp.sum(x**2, axis) - jnp.sum(x, axis) ** 2 / 99)

    def accumulator(self, aval, size):
        return PowerSums(aval.shape, aval.dtype)

    def result(self, state, aval, size):
        total, squares = (x[..., 0] for x in state)
        return jnp.sqrt(1 + squares - total**2 / 99)


X, Y, W = (jnp.asarray(np.random.default_rng(0).normal(size=n)) for n in (2, 6, ()))


def kernel(x, y, w):
    value = 1.1 + 0.3 * jnp.sin(3 * y + w * x)
    return {"v": value, "wide": value ** jnp.linspace(0.5, 2, 17), "ok": jnp.cos(9 * y) > x - 1}


def derivatives(call):
    """The values, the gradients of a loss, and those of a number made of these gradients."""

    def weighed(tree):
        return sum(jnp.cos(jnp.arange(x.size, dtype=x.dtype)) @ jnp.ravel(x) for x in tree)

    def slopes(*args):
        return jax.grad(lambda *args: weighed(call(*args)), (0, 1, 2))(*args)

    def all_of(*args):
        bends = jax.grad(lambda *args: weighed(slopes(*args)), (0, 1, 2))(*args)
        return call(*args), slopes(*args), bends

    return jax.jit(all_of)(X, Y, W)


def of_pairs(x, y, w):
    return jax.vmap(jax.vmap(kernel, (None, 0, None)), (0, None, None))(x, y, w)


@functools.cache
def plainly(own, axis, where):
    ok = np.asarray(of_pairs(X, Y, W)["ok"]) | (where is None)

    def reduced(out):
        if axis is None:
            return own.function(out[ok], axis=0)
        rows = zip(out, ok, strict=True)
        return jnp.stack([own.function(row[mask], axis=0) for row, mask in rows])

    return derivatives(lambda *args: [reduced(of_pairs(*args)[name]) for name in ("v", "wide")])


@pytest.mark.parametrize(
    ("axis", "size", "where"),
    [
        (None, 4, "ok"),
        *(slow(*case) for case in [(None, 1, None), (1, 2, "ok"), (1, 2, None), (1, 4, None)]),
    ],
)
@pytest.mark.parametrize(
    "own", [weekly(SquareOfSum), slow(LogSum), slow(Product), slow(Largest), Spread]
)
def test_derivatives_of_a_reduction_of_ones_own(own, axis, size, where):
    """In chunks that divide the axis and do not; with both axes, one loop is in another."""
    reduce = {"v": own(), "wide": own(), "ok": "any"}
    options = {"reduce": reduce, "reduce_axis": axis, "chunk_size": size, "where": where}
    mapped = auto_vmap(0, 0, None, **options)(kernel)

    def call(x, y, w):
        out = mapped(x[:, None], y, w)
        return [out["v"], out["wide"]]

    assert_same(derivatives(call), plainly(own, axis, where), rtol=2e-4, atol=2e-4)


def test_the_last_item_is_no_equal_of_itself():
    """In the last chunk, it takes the place of those that an earlier one had."""
    gradient = jax.grad(chunked_reduce(lambda v: v, Largest(), 4))
    assert_same(gradient(jnp.arange(7.0)), jnp.eye(7)[6])


def test_what_has_no_derivative_is_an_error():
    def combine(x, y):
        return jax.pure_callback(np.add, x, x, y, vmap_method="broadcast_all")

    class OnHost(Accumulated):
        function = staticmethod(jnp.sum)
        identity = 0

    OnHost.combine = staticmethod(combine)
    mapped = chunked_reduce(lambda v: v, OnHost(), 2)
    assert mapped(jnp.arange(6.0)) == 15
    assert "JVP" in refusal(ValueError, jax.grad(mapped), jnp.arange(6.0))
    # What has no derivative anyway needs none of it.
    of_whole = chunked_reduce(lambda v: v.astype(int), OnHost(), 2)
    assert not jax.grad(lambda v: of_whole(v).astype(float))(jnp.arange(6.0)).any()
