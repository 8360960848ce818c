# SPDX-License-Identifier: MIT
"""Tiles: chunks that are walked in smaller steps, where XLA:CPU is faster so."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, at_each_run, slow, temporary_bytes
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax.core.plan.schedule import Tiles, plan_levels, split_into_tiles
from rankax.ext.xla_cpu import rules as rule


def distances(points):
    """192 numbers an item, of which three at a time are summed: 21 items are below 4096."""
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


CACHE_BYTES = rule._cache_bytes  # which conftest.py replaces


def test_a_cache_that_the_machine_does_not_tell(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "no number")
    assert CACHE_BYTES.__wrapped__() == 2**20


def clouds(*batch):
    count = int(np.prod(batch)) * 24
    return jnp.asarray(np.sin(np.arange(count, dtype=np.float32)).reshape(*batch, 8, 3))


def gradient(mapped):
    return jax.grad(lambda *args: jnp.sum(mapped(*args)))


def pushed(mapped, x):
    return jax.jvp(gradient(mapped), (x,), (x + 1,))


def steps(fun, *args):
    """The lengths of the loops in a program, and of those inside."""
    return [int(n) for n in re.findall(r"\blength=(\d+)", str(jax.make_jaxpr(fun)(*args)))]


# Which tile.


def test_a_matrix_beyond_the_cache_is_read_for_many_items():
    """Gradients through a matrix of 1,600 x 1,600 took 4.3 times as long in tiles of 16."""

    def layer(side, items):
        own = auto_vmap(1, chunk_size=200)(lambda v: jnp.tanh(matrix(side) @ jnp.tanh(v)))
        (level,) = own.plan(jax.ShapeDtypeStruct((items, side), "float32")).levels
        return level.tile, (level.derivative or level.chunks).size

    def matrix(side):
        return jnp.zeros((side, side))

    assert all(100 <= tile <= 200 for tile in layer(2000, 1000))
    assert layer(2000, 150) == (150, 150)


THREE = jnp.ones(3)


def of_three(x):
    return jnp.sum(x[:3] ** 2)


def halved(x):
    """By a primitive that holds programs with as many inputs, and fewer outputs."""
    solve = lambda _, b: (b / 2, jnp.sum(b))  # noqa: E731
    return lax.custom_linear_solve(lambda v: 2 * v, x, solve, has_aux=True)


def in_a_loop(x):
    return lax.fori_loop(0, 8, lambda _, x: x + distances(x) / (1 + jnp.sum(x**2, axis=-1))[0], x)


WITH_TILES = {
    "distances": (distances, (8, 3), 21),
    "largest": (lambda x: distances(x[:8]) + distances(x), (16, 3), 5),
    "one at a time": (distances, (36, 3), 1),
    "dot": (lambda x: x @ (2 * x), (3,), 1365),
    "in scan": (lambda x: lax.scan(lambda c, y: (c + of_three(y), y), 0.0, x), (5, 3), 1365),
    "in while": (in_a_loop, (8, 3), 21),
    "in cond": (lambda x: lax.cond(x[0] > 0, of_three, jnp.max, x), (3,), 1365),
    "in checkpoint": (jax.checkpoint(of_three), (3,), 1365),
    "a rule": (jax.nn.logsumexp, (8,), 511),
    "beside an effect": (lambda x: jax.debug.callback(print, x) or of_three(x), (3,), 1365),
    "long, over axes apart": (lambda x: jnp.sum(x**2, axis=(0, 2)), (4, 6, 4), 42),
    "of a solution": (lambda x: of_three(halved(x)[0]), (3,), 1365),
    "float16": (lambda x: of_three(x.astype(jnp.float16)), (3,), 1365),
}  # fmt: skip

AT_LEAST = {
    "a sort": (jnp.sort, (9000,), 512),
    "a transform": (jnp.fft.rfft, (9000,), 512),
    "a factorisation": (lambda x: jnp.linalg.cholesky(x @ x.T + 1), (90, 90), 512),
    "a convolution": (lambda x: jnp.convolve(x, THREE), (9000,), 16),
}
# Of the numbers of an item, with its inputs and outputs, half a megabyte is in the cache.
IN_CACHE = {
    "an outer product": (lambda x: lax.mul(x[:, None], x[None]), (64,), 2**17 // 8384),
    "a long sum": (lambda x: jnp.sum(lax.neg(x)), (1000,), 2**17 // 2002),
    "a loop": (lambda x: lax.fori_loop(0, 9, lambda _, y: lax.neg(y), x), (300,), 2**17 // 1202),
}
WITHOUT = {
    "no sum": (jnp.sin, (3,)),
    "long": (jnp.sum, (16,)),
    "product": (jnp.prod, (3,)),
    "ints": (lambda x: jnp.sum(x.astype(jnp.int32)), (3,)),
    "of one": (jnp.sum, (1,)),
    "not of the item, in a loop": (
        lambda x: lax.scan(lambda c, y: (c + x, jnp.sum(y)), x, jnp.ones((4, 3))),
        (3,),
    ),
}


def in_flight(fun, core, **options):
    return auto_vmap(len(core), chunk_size=7919, **options)(fun).plan(
        jax.ShapeDtypeStruct((10**5, *core), jnp.float32)
    )


OFTEN = [
    *("distances", "largest", "one at a time", "dot", "in while", "a rule", "beside an effect"),
    *("no sum", "not of the item, in a loop", "a loop"),
]


@pytest.mark.parametrize("case", at_each_run(OFTEN, WITH_TILES | AT_LEAST | IN_CACHE))
def test_chunks_get_tiles(case):
    fun, core, tile = case
    assert 2 * tile / 3 <= in_flight(fun, core).in_flight <= tile  # one that divides may be smaller


@pytest.mark.parametrize("case", at_each_run(OFTEN, WITHOUT))
def test_all_else_keeps_its_chunk(case):
    assert in_flight(*case).in_flight == 6250


def test_chunks_below_a_tile_and_chunks_that_hold_all():
    x = clouds(100)
    kernel = auto_vmap(2)(distances)
    assert [
        kernel.with_options(chunk_size=size).plan(x).in_flight for size in (1, 7, 50, 99, 100, None)
    ] == [1, 7, 20, 20, 100, 100]


def test_an_accelerator_has_no_tiles(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert in_flight(distances, (8, 3)).in_flight == 6250


def test_options_of_the_compiler_change_no_tile():
    for name in ("xla_cpu_experimental_ynn_fusion_type", "xla_embed_ir_in_executable"):
        plan = in_flight(distances, (8, 3), jit=True, compiler_options={name: ""})
        assert plan.in_flight == 20


# One plan.


def test_what_the_plan_shows_is_what_runs():
    kernel, x = auto_vmap(2, chunk_size=500)(distances), clouds(1000)
    groups = [10, 5]  # a loop of 10 in a loop of 5
    for each, loops in ((kernel, [50]), (kernel.with_options(reduce="sum"), groups)):
        plan = each.plan(x)
        assert (plan.in_flight, plan.steps) == (20, 50)
        assert steps(each, x) == loops
    assert "axis 0: 50 chunks of 20 over 1000, mapping points" in str(kernel.plan(x))
    assert "chunk_size=500 is cut into tiles of 20, which stay in the cache" in str(kernel.plan(x))
    assert steps(chunked_vmap(distances, 500), x) == [50]
    assert steps(chunked_reduce(distances, "sum", 500), x) == groups


@pytest.mark.parametrize("reduce", [None, "sum"])
def test_the_kernel_is_traced_once_a_call(reduce):
    traces, x = [], clouds(300)
    counted = auto_vmap(2, chunk_size=100, reduce=reduce)(
        lambda points: traces.append(0) or distances(points)
    )
    want = jax.jit(jax.vmap(distances))(x)
    assert_same(counted(x), want if reduce is None else want.sum(), rtol=1e-4)
    assert len(traces) == 1


def test_a_plan_takes_shapes_and_values_in_any_place():
    @auto_vmap(2, None, None, chunk_size=500)
    def kernel(points, table, flags):
        return distances(points) * (2.0 if flags["values"][0] > 0 else table[0])

    points, table = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1000, 8, 3), (2,)))
    flags = {"values": np.ones(2)}  # looked at while the kernel is traced
    assert kernel.plan(points, table, flags).in_flight == 20
    assert kernel.plan(clouds(1000), jnp.ones(2), flags).in_flight == 20


# Values and derivatives.


def test_values_and_derivatives():
    x, mapped, plain = clouds(101), chunked_vmap(distances, 50), jax.vmap(distances)
    want = jax.jit(lambda x: (plain(x), *pushed(plain, x)))(x)
    got = jax.jit(lambda x: (mapped(x), *pushed(mapped, x)))(x)
    assert_same(got, want, rtol=1e-3, atol=1e-3)
    assert_same(mapped(x), want[0], rtol=1e-4)


def test_each_tile_of_a_gram_matrix_updates_all_of_it():
    """Tiles of 16 took three times as long, on JAX 0.10 and 0.12."""

    def waves(x):
        return jnp.sin(x @ jnp.ones((3, 500)) * jnp.arange(500.0))

    shapes = jax.ShapeDtypeStruct((10000, 3), jnp.float32)
    assert auto_vmap(1, chunk_size=1000, reduce="sum")(waves).plan(shapes).in_flight < 200
    assert auto_vmap(1, chunk_size=1000, reduce="gram")(waves).plan(shapes).in_flight == 500


# How an axis is cut, so that no promise about memory is broken.


@pytest.mark.parametrize(
    ("length", "chunk_size", "tile", "size", "even"),
    [
        (1000, 500, 21, 20, True),
        (1000, 10, 21, 10, True),
        (1009, 500, 21, 21, False),  # no chunk divides, so no tile needs to
        (1001, 143, 19, 13, True),  # where a chunk of 19 would overlap
        (31 * 37, 37, 21, 37, True),  # none near: each chunk is cut by itself
        (37, 37, 21, 19, False),
        (31 * 37, 37, 1, 1, True),
    ],
)
def test_where_the_chunk_divides_the_tile_does_too(length, chunk_size, tile, size, even):
    chunks = split_into_tiles(length, chunk_size, tile)
    assert (chunks.size, chunks.even) == (size, even)


@pytest.mark.optimized
def test_derivatives_are_as_small_as_without_tiles():
    x = jax.ShapeDtypeStruct((31 * 997, 8, 3), jnp.float32)
    mapped = chunked_vmap(lambda p: jnp.sin(p) * distances(p), 997)
    assert temporary_bytes(gradient(mapped), x) < 2_000_000


LONG = 269 * 1487  # both are primes


@pytest.mark.parametrize("tile", [4, 21, 100])
def test_a_tile_is_near_the_best_for_any_chunk(tile):
    for size in range(250, 351):
        (level,) = plan_levels(((LONG,),), (LONG,), size, tiles=Tiles(tile, tile))
        assert 0.8 * tile <= level.tile <= tile
        assert level.chunk == (269 if 269 <= size <= 336 else None)
    for size in range(tile + 1, 2000):  # a divisor may be small
        (level,) = plan_levels(((7 * size,),), (7 * size,), size, tiles=Tiles(tile, tile))
        assert tile / 4 < level.tile <= tile


def test_a_prime_chunk_is_walked_in_tiles():
    x = jax.ShapeDtypeStruct((LONG, 8, 3), jnp.float32)
    kernel = auto_vmap(2, chunk_size=300)(distances)
    assert (kernel.plan(x).in_flight, kernel.plan(x).steps) == (21, 13 * 1487)
    assert steps(kernel, x) == [13, 1487]  # the inner loop is printed first
    assert steps(chunked_vmap(distances, 300), x) == [13, 1487]


@pytest.mark.optimized
@pytest.mark.parametrize("axis", [0, slow(1)])
def test_derivatives_of_a_prime_chunk_copy_no_more_than_a_chunk(axis):
    x = jax.ShapeDtypeStruct((8, LONG, 3) if axis else (LONG, 8, 3), jnp.float32)
    out = jax.ShapeDtypeStruct((LONG, 8, 3), jnp.float32)
    mapped = chunked_vmap(lambda p: jnp.sin(p) * distances(p), 300, axis)
    chunk = 269 * 8 * 3 * 4
    assert temporary_bytes(mapped, x) < 3 * chunk
    assert temporary_bytes(lambda x, t: jax.vjp(mapped, x)[1](t), x, out) < 5 * chunk
    assert temporary_bytes(lambda x, t: jax.jvp(mapped, (x,), (t,)), x, x) < 6 * chunk
    assert temporary_bytes(lambda x, t: jax.jvp(gradient(mapped), (x,), (t,)), x, x) < 7 * chunk


def test_chunks_cut_by_themselves_are_those_of_vmap():
    def kernel(points, scale):
        return scale * jnp.sin(points) * distances(points), distances(points), jnp.ones(2)

    args = jnp.moveaxis(clouds(3 * 37), 0, 2), jnp.arange(111.0)
    axes = {"in_axes": (2, 0), "out_axes": (1, 0, None)}
    mapped, plain = chunked_vmap(kernel, 37, **axes), jax.vmap(kernel, **axes)
    assert steps(mapped, *args) == [2, 3]

    def derivatives(fun, *args):
        def loss(*args):
            return sum(jnp.sum(jnp.tanh(out)) for out in fun(*args))

        return jax.grad(loss, (0, 1))(*args), jax.jvp(fun, args, args)

    got, want = (jax.jit(derivatives, static_argnums=0)(f, *args) for f in (mapped, plain))
    assert_same(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("around", [(), slow((2, 1))], ids=["alone", "in a loop"])
def test_split_keys_are_the_same_in_chunks_cut_by_themselves(around):
    @auto_vmap(2, 0, SplitKey)
    def noisy(points, scale, key):
        return scale * distances(points) + jax.random.normal(key)

    args = clouds(3 * 37), jnp.ones(around), jax.random.key(0)
    small = noisy.with_options(chunk_size=37, hoist=False)
    assert small.plan(*args).in_flight == 19
    assert_same(small(*args), noisy(*args), rtol=1e-4)


def test_the_check_for_reused_keys_sees_no_tiles_that_overlap():
    keys = jax.random.split(jax.random.key(0), 3 * 37)
    mapped = chunked_vmap(lambda key: distances(jax.random.normal(key, (8, 3))), 37)
    mapped(keys)  # a program with tiles is kept
    with jax.debug_key_reuse(True):
        assert steps(mapped, keys) == [3]
        assert mapped(keys).shape == (111,)


def test_several_levels_of_tiles_fill_up_from_the_inside():
    batches = ((60, 1), (1, 50))

    def tiles(chunk_size, tile):
        levels = plan_levels(batches, (60, 50), chunk_size, tiles=Tiles(tile, tile))
        return [level.tile for level in levels]

    assert tiles(1000, None) == [20, 50]
    assert tiles(1000, 21) == [2, 10]
    assert tiles(1000, 100) == [2, 50]
    assert tiles(10, 21) == [1, 10]
    assert tiles(3000, 21) == [60, 50]  # all at once

    # A row of prime length, whose tiles overlap.
    rows, row = plan_levels(((60, 1), (1, 37)), (60, 37), 500, tiles=Tiles(21, 21))
    assert (rows.tile, row.tile, row.chunk) == (1, 19, None)


# A derivative has tiles of its own.


def stored(points):
    """Many numbers, without a sum."""
    return jnp.prod(jnp.cos(jnp.tanh(jnp.outer(points[:, 0], points[:, 1]))), axis=0)


def test_derivatives_have_smaller_tiles():
    x = jax.ShapeDtypeStruct((1024, 32, 3), jnp.float32)
    kernel = auto_vmap(2, chunk_size=512)(stored)
    (level,) = kernel.plan(x).levels
    assert level.derivative is not None
    forward, derivative = level.size // level.tile, level.derivative.steps
    assert forward < derivative
    assert steps(kernel, x) == [forward]
    assert steps(gradient(kernel), x) == [derivative, derivative]
    assert steps(lambda x: jax.jvp(kernel, (x,), (x,)), x) == [derivative]
    assert f"chunks of {level.tile} over 1024 ({level.derivative.size} in derivatives)" in str(
        kernel.plan(x)
    )


@pytest.mark.parametrize("length", [1024, slow(1021)])
def test_derivatives_in_tiles_of_their_own(length):
    x = jnp.tile(clouds(length), (1, 4, 1))
    kernel, plain = auto_vmap(2, chunk_size=512)(stored), jax.vmap(stored)

    @functools.partial(jax.jit, static_argnums=0)
    def all_of(fun, x):
        return (*pushed(fun, x), jax.vmap(fun)(jnp.stack([x, 2 * x])))

    want = all_of(plain, x)
    assert_same(all_of(kernel, x), want, rtol=1e-3, atol=1e-3)
    assert_same(gradient(kernel)(x), want[0], rtol=1e-4, atol=1e-5)


def test_derivatives_of_several_levels_have_tiles_of_their_own():
    def between(a, b):
        return stored(a) * jnp.sum(b)

    a, b = jnp.tile(clouds(97), (1, 4, 1)), clouds(5, 1)
    kernel = auto_vmap(2, 2, chunk_size=200, hoist=False)(between)
    levels = kernel.plan(a, b).levels
    assert [level.steps > 1 for level in levels] == [True, True]
    assert any(level.derivative for level in levels)
    plain = jax.vmap(jax.vmap(between, (0, None)), (None, 0))

    @jax.jit
    def both(a, b):
        def loss(a, b, fun):
            out = fun(a, b)
            return jnp.sum(jnp.tanh(out)), out

        slopes = jax.grad(loss, (0, 1), has_aux=True)
        return slopes(a, b, kernel), slopes(a, b, lambda a, b: plain(a, b[:, 0]))

    assert_same(*both(a, b), rtol=1e-3, atol=1e-3)


def test_what_is_cheap_is_computed_again():
    """Elementwise operations run faster in the cache than their results are read."""
    kernel = auto_vmap(1, chunk_size=8, memory_limit="100 MB")(lambda x: jnp.sin(x) ** 2)
    shapes = jax.ShapeDtypeStruct((20_000, 16), jnp.float32)
    assert not kernel.plan(shapes).memory.stored
    assert kernel.with_options(xla_cpu=False).plan(shapes).memory.stored
