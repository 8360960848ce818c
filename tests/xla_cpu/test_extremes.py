# SPDX-License-Identifier: MIT
"""Extremes in tiles: what a compiled program evaluates, compares and sorts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, equations, primitives, slow
from rankax import auto_vmap, chunked_reduce
from rankax.reductions import Best, BottomK, TopK

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
    options |= {"chunk_size": 512, "hoist": False}  # in tiles of one row
    call = auto_vmap(0, 0, reduce="argmin", reduce_axis=-1, **options)(jnp.subtract)
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
    assert sorts(1, jnp.float32) == 2  # for which XLA has a function: of tiles, and of rows
    large = jnp.asarray(X[:1000]).astype(jnp.int32)
    top = chunked_reduce(lambda v: v, BottomK(3), 100)(large)
    assert_same(top.values, jnp.sort(large)[:3])


def test_a_top_k_merges_many_tiles_at_once():
    """To merge 500 entries takes longer than to evaluate a tile: 17 ms for 200,000 numbers."""
    program = jax.make_jaxpr(chunked_reduce(jnp.sin, TopK(500), 64))(X)
    merged = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "top_k"]
    assert [eqn.invars[0].aval.size for eqn in merged] == [500 + 16 * 64]
    assert not primitives(chunked_reduce(jnp.sin, TopK(500), 64), X)["sort"]


ODD = [0.0, -0.0, jnp.nan, -jnp.inf, jnp.inf, 1.0, 1.0, 2.0, -2.0]


@pytest.mark.parametrize(
    ("length", "kind"),
    [(118, TopK), slow(120, TopK), (115, BottomK), slow(47, BottomK)],  # in 24 tiles, or 10
)
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16), slow(jnp.int8)])
def test_entries_of_groups_are_in_order(length, kind, dtype):
    rng = np.random.default_rng(length)
    values = rng.choice(np.asarray(ODD, np.float32), length)
    values = np.nan_to_num(values, posinf=5, neginf=-5) if dtype == jnp.int8 else values
    counts = rng.uniform(size=length) < 0.3
    x = jnp.asarray(values).astype(dtype)
    found = chunked_reduce(lambda x, c: (x, c), (kind(8), None), 5)(x, counts)[0]
    some = chunked_reduce(lambda x, c: {"x": x, "c": c}, kind(40, where="c"), 5)(x, counts)["x"]
    rank = np.asarray(x.astype(jnp.float32))
    # NaN is the largest, equal items stay in order, and so those that do not count come last.
    key = np.where(np.isnan(rank), np.float32(9e9), np.clip(rank, -8e9, 8e9))
    order = np.argsort(key if kind is BottomK else -key, kind="stable")
    assert_same(found.indices, order[:8].astype(np.int32))
    assert_same(found.values, x[order[:8]])
    chosen = [i for i in order if counts[i]][:40]
    np.testing.assert_array_equal(some.indices, [*chosen, *[-1] * (40 - len(chosen))])
