# SPDX-License-Identifier: MIT
"""Extremes in tiles: what a compiled program evaluates, compares and sorts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, equations, primitives, slow
from rankax import auto_vmap, chunked_reduce
from rankax.reductions import Best, BottomK

X = jnp.asarray(np.random.default_rng(0).uniform(-3, 3, 4096).astype(np.float32))


def wave(v):
    return jnp.sin(3 * v - 1) ** 3


def sines(reduce, **options):
    call = auto_vmap(0, reduce=reduce, chunk_size=512, **options)(lambda v: {"d": wave(v)})
    text = jax.jit(call).lower(X).compile().as_text()
    return len(re.findall(r"= f32\S* sine\(", text)), call(X)["d"]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("reduce", "winners"), [("argmax", 0), (Best("d"), 1), slow("max", 0)], ids=str
)
def test_a_kernel_that_calls_the_c_library_is_evaluated_once(reduce, winners):
    count, found = sines(reduce)
    assert count == 1 + winners  # the winner is evaluated once more
    name = "min" if isinstance(reduce, Best) else reduce
    assert_same(found, getattr(jnp, name)(jax.jit(wave)(X)))


@pytest.mark.optimized
def test_without_the_rule_it_is_evaluated_twice():
    assert sines("argmax", xla_cpu=False)[0] == 2  # otherwise `DelayedArg` may go


def carried(**options):
    """Return how many indices of items a loop carries."""
    call = auto_vmap(0, 0, reduce="argmin", reduce_axis=-1, chunk_size=512, **options)(jnp.subtract)
    found = equations(jax.make_jaxpr(call)(X[:3, None], X).jaxpr)
    carries = [v.aval for eqn in found if eqn.primitive.name == "scan" for v in eqn.outvars]
    return max(aval.size for aval in carries if aval.dtype == jnp.int32)


def test_a_cheap_kernel_compares_blocks():
    """An index for each item of a tile makes it three times as slow as one for eight."""
    assert carried(xla_cpu=False) == 512
    assert carried() == 512 // 8


def test_a_small_bottom_k_of_integers_sorts_no_tile():
    """`jax.lax.top_k` takes 130 to 300 ns an item on a CPU, comparing lanes 7 to 94."""

    def sorts(k, dtype=jnp.int32, **options):
        bottom = auto_vmap(0, 0, reduce=BottomK(k), chunk_size=30, **options)(jnp.multiply)
        found = primitives(bottom, jnp.ones((5, 1), dtype), jnp.ones(100, dtype))
        return found["top_k"]

    assert [sorts(k) for k in (1, 8)] == [0, 0]
    assert sorts(9) == sorts(1, xla_cpu=False) == 1
    assert sorts(1, jnp.float32) == 1  # for which XLA has a function
    large = jnp.asarray(X[:1000]).astype(jnp.int32)
    top = chunked_reduce(lambda v: v, BottomK(3), 100)(large)
    assert_same(top.values, jnp.sort(large)[:3])
