# SPDX-License-Identifier: MIT
"""Reductions along an axis that is not the contiguous one: a step takes a kept axis whole."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, temporary_bytes
from rankax import auto_vmap
from rankax.ext.equations import operations
from rankax.ext.xla_cpu import library
from rankax.reductions import Best, Moments, TopK

tuned = pytest.mark.skipif(not library.IS_TUNED, reason="the rule holds from JAX 0.12 on")

R = np.random.default_rng(0)
COLUMNS = jnp.asarray(R.normal(size=(83, 45)), jnp.float32)
WEIGHTS = jnp.asarray(R.normal(size=83), jnp.float32)


def bell(a):
    return jnp.exp(-a * a)


def tiles(call, *shapes):
    plan = call.plan(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    return [level.tile for level in plan.levels]


def along_0(kernel, reduce="sum", *ranks, **options):
    return auto_vmap(*(ranks or (0,)), reduce=reduce, reduce_axis=0, **options)(kernel)


@tuned
@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((3000, 10000), {}, [10000, 1]),
        ((3000, 10000), {"chunk_size": 20000}, [10000, 1]),
        ((3000, 10000), {"chunk_size": 500}, [1, 500]),
        ((3000, 20), {}, [1, 1000]),
        ((3, 2000), {"chunk_size": 100}, [33, 3]),
    ],
)
def test_a_step_takes_a_kept_axis_whole_if_it_may(shape, options, expected):
    assert tiles(along_0(bell, **options), shape) == expected


def test_no_array_lies_across():
    """Of pairs, each argument lies along one axis, and rows are contiguous as they are."""
    pairs = auto_vmap(0, 0, reduce="sum", reduce_axis=0, hoist=False)(lambda x, y: jnp.exp(x * y))
    assert tiles(pairs, (3000, 1), (3000,))[0] == 1
    last = auto_vmap(0, reduce="sum", reduce_axis=1)(bell)
    assert tiles(last, (3000, 3000))[0] == 1


@pytest.mark.parametrize(
    "reduce", ["sum", "max", "argmin", "logsumexp", "prod", Moments(), TopK(2)]
)
def test_values_are_those_of_rows(reduce):
    found = along_0(bell, reduce, chunk_size=50)(COLUMNS)
    expected = auto_vmap(0, reduce=reduce, reduce_axis=1, chunk_size=None)(bell)(COLUMNS.T)
    assert_same(found, expected, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["sum", "max", "logsumexp", Best("key")])
def test_gradients_are_those_of_rows(reduce):
    def kernel(a, w):
        out = jnp.sin(a) * w
        return {"key": out, "out": out**2} if isinstance(reduce, Best) else out

    across = along_0(kernel, reduce, 0, 0, chunk_size=50)
    rows = auto_vmap(0, 0, reduce=reduce, reduce_axis=1, chunk_size=None)(kernel)

    def total(call):
        return lambda a, w: sum(map(jnp.sum, jax.tree.leaves(call(a, w))))

    got = jax.grad(total(across), (0, 1))(COLUMNS, WEIGHTS[:, None])
    a, w = jax.grad(total(rows), (0, 1))(COLUMNS.T, WEIGHTS)
    assert_same(got, (a.T, w[:, None]), rtol=1e-4, atol=1e-6)


@tuned
def test_one_slot_is_carried_without_its_axis():
    """XLA:CPU computes no vectors along an axis of length 1: 56 ms for 21."""
    jaxpr = jax.make_jaxpr(along_0(bell))(jnp.zeros((3000, 10000))).jaxpr
    loops = [each.eqn for each in operations(jaxpr) if each.name == "scan"]
    carried = [v.aval.shape for eqn in loops for v in eqn.outvars]
    assert (10000,) in carried
    assert not any(shape[-1:] == (1,) for shape in carried)


@tuned
def test_memory_is_that_of_the_running_states():
    calls = {(): along_0(bell), (3,): along_0(lambda v: v / (1 + v @ v), "mean", 1)}

    def bytes_of(rows, core, derivative):
        call = calls[core]
        fun = jax.grad(lambda a: jnp.sum(call(a))) if derivative else call
        return temporary_bytes(fun, jax.ShapeDtypeStruct((rows, 5000, *core), "float32"))

    for core, derivative in itertools.product(calls, (False, True)):
        few, many = (bytes_of(rows, core, derivative) for rows in (1000, 4000))
        assert few == many <= 5 * 4 * 5000 * math.prod(core)
