# SPDX-License-Identifier: MIT
"""The option ``batch_shape``: beside a dummy argument that has these axes."""

import functools
import math

import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import rankax.xarray
from helpers import assert_same, refusal, slow, temporary_bytes
from rankax import BatchShapeError, SplitKey, auto_vmap
from rankax.reductions import Moments

KEY = jax.random.key(3)


def draw(scale, key):
    return scale * jax.random.normal(key, (2,)), key


def draw_sums(scale, key):
    # As if a key could be summed.
    return draw(scale, key)[0].sum(), jax.random.key_data(key).astype(jnp.float32)[0]


@functools.cache
def with_dummy(kernel, ranks, **options):
    """The same kernel with one more argument, whose only use is to be counted."""
    mapped = auto_vmap(0, *ranks, **options)(lambda dummy, *args: kernel(*args))
    return jax.jit(lambda shape, *args: mapped(jnp.zeros(shape), *args), static_argnums=0)


@pytest.mark.parametrize(
    ("shape", "scale", "options"),
    [
        ((4, 6), (4, 1), {}),
        ((4, 6), (6,), {"chunk_size": 7, "jit": True}),
        slow((6,), (4, 6), {"chunk_size": 7}),
        slow((4, 1, 3), (2, 1), {"chunk_size": 1}),
    ],
    ids=str,
)
def test_items_are_those_with_a_dummy_argument(shape, scale, options):
    scale = np.arange(1, 1 + math.prod(scale), dtype="float32").reshape(scale)
    kernel = auto_vmap(0, SplitKey, batch_shape=shape, **options)(draw)
    want = with_dummy(draw, (0, SplitKey))(shape, scale, KEY)
    assert_same(kernel(scale, KEY), want)


@pytest.mark.parametrize("options", [{"chunk_size": 7}, slow({"jit": True})], ids=str)
def test_every_item_counts_in_a_reduction(options):
    shape, scale = (4, 6), np.float32([[1], [2], [3], [4]])
    each = [(("sum", None), 0), ((Moments(), "sum"), 1), (("argmax", "sum"), None)]
    hows = [{"reduce": reduce, "reduce_axis": axis} for reduce, axis in each]
    kernels = [
        auto_vmap(0, SplitKey, batch_shape=shape, **how, **options)(draw_sums) for how in hows
    ]
    found = jax.jit(lambda *args: [kernel(*args) for kernel in kernels])(scale, KEY)
    want = [with_dummy(draw_sums, (0, SplitKey), **how)(shape, scale, KEY) for how in hows]
    assert_same(found, want)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 4), {"chunk_size": 7}), ((4, 0), {"chunk_size": 2}), slow((), {"chunk_size": 2})],
    ids=str,
)
def test_a_kernel_without_a_mapped_argument_fills_the_batch(shape, options):
    def kernel(x, label):
        assert label == "untouched"
        return {"x": x + 1, "number": jnp.asarray(3)}

    x = jnp.float32(2)
    want = {"x": np.full(shape, 3, "float32"), "number": np.full(shape, 3, "int32")}
    for ranks in [(0, None), (None, None)]:
        assert_same(auto_vmap(*ranks, batch_shape=shape, **options)(kernel)(x, "untouched"), want)
    total = auto_vmap(0, None, batch_shape=shape, reduce={"x": "sum", "number": "max"}, **options)
    if math.prod(shape):
        want = {"x": np.float32(3 * math.prod(shape)), "number": np.int32(3)}
        assert_same(total(kernel)(x, "untouched"), want)


def test_an_int_is_one_axis_and_none_takes_it_back():
    kernel = auto_vmap(key=SplitKey, batch_shape=np.int64(5))(jax.random.bits)
    assert_same(kernel(KEY), jax.jit(jax.vmap(jax.random.bits))(jax.random.split(KEY, 5)))
    assert kernel.with_options(batch_shape=[5]) is kernel.with_options(batch_shape=5)
    assert_same(kernel.with_options(batch_shape=None)(KEY), jax.random.bits(KEY))
    assert_same(kernel.with_options(batch_shape=())(KEY), jax.random.bits(KEY))
    one = jax.random.bits(jax.random.split(KEY, 1)[0])
    assert_same(kernel.with_options(batch_shape=1)(KEY), one[None])


@pytest.mark.parametrize(
    "options", [{"chunk_size": 4}, slow({"chunk_size": 5, "jit": True})], ids=str
)
def test_derivatives_sum_over_the_items(options):
    shape, scale = (3, 4), np.float32([[1], [2], [3]])

    def derivatives(mapped, *before):
        def value(scale):
            return jnp.sum(mapped(*before, scale, KEY)[0] ** 2)

        return jax.grad(value)(scale), jax.jvp(value, (scale,), (scale,))[1]

    kernel = auto_vmap(0, SplitKey, batch_shape=shape, **options)(draw)
    program = jax.jit(derivatives, static_argnums=(0, 1))
    assert_same(program(kernel), program(with_dummy(draw, (0, SplitKey)), shape))
    mapped = auto_vmap(0, batch_shape=7, reduce="sum", **options)(jnp.sin)
    assert_same(jax.grad(mapped)(2.0), 7 * np.cos(np.float32(2)))


@pytest.mark.optimized
def test_nothing_of_the_batch_is_stored():
    kernel = auto_vmap(key=SplitKey, batch_shape=400_000, reduce="mean", chunk_size=100)(
        lambda key: jax.random.normal(key, (16,))
    )
    assert temporary_bytes(kernel, KEY) < 100_000


def test_a_plan_shows_it_as_an_argument():
    kernel = auto_vmap(scale=0, key=SplitKey, batch_shape=(4, 6), chunk_size=5)(draw)
    assert str(kernel.plan(jnp.ones((4, 1)), KEY)) == (
        "draw: batch shape (4, 6), 24 evaluations, 3 in flight, 8 steps\n"
        "  leaf         shape   rank      core  batch axes\n"
        "  scale        (4, 1)  0         ()    4 1*\n"
        "  key          ()      SplitKey  ()    /  /\n"
        "  batch_shape  (4, 6)  0         ()    4  6\n"
        "  batch        (4, 6)                  4  6\n"
        "  axis 0: 4 chunks of 1 over 4, mapping scale, batch_shape\n"
        "  axis 1: 2 chunks of 3 over 6, mapping batch_shape\n"
        "  (1* stretched: used again for each item, never copied)\n"
        "  (/ split: each item has a key of its own)"
    )


def test_tune_takes_it():
    kernel = auto_vmap(0, SplitKey, batch_shape=(3, 50))(draw)
    assert_same(kernel.tune(1.0, KEY, seconds=0.005)(1.0, KEY), kernel(1.0, KEY))


# Refusals.


def test_axes_that_clash_are_named_like_arguments():
    kernel = auto_vmap(scale=0, key=SplitKey, batch_shape=(3,))(draw)
    assert refusal(BatchShapeError, kernel, jnp.ones(5), KEY).partition("\n\n")[2] == (
        "    argument     shape  rank      batch axes\n"
        "  > scale        (5,)   0         (5,)\n"
        "    key          ()     SplitKey  ()\n"
        "  > batch_shape  (3,)   0         (3,)\n"
        "\n"
        "Batch axis -1 is 5 (scale) and 3 (batch_shape).\n"
        "To combine every scale with every batch_shape, pass scale[:, None]."
    )
    assert kernel(jnp.ones(5)[:, None], KEY)[1].shape == (5, 3)


X = np.arange(6, dtype=np.float32)
SINES = auto_vmap(x=0, batch_shape=(2, 6))(jnp.sin)
SHAPE = "auto_vmap(draw): batch_shape must be an int or a tuple of ints, none of them negative, got"
REFUSED = {
    "a negative length": (lambda: auto_vmap(0, SplitKey, batch_shape=(3, -2))(draw), f"{SHAPE} -2"),
    "none in a tuple": (
        lambda: auto_vmap(0, SplitKey, batch_shape=(2, None))(draw),
        f"{SHAPE} NoneType None",
    ),
    "a bool": (lambda: auto_vmap(0, SplitKey, batch_shape=True)(draw), f"{SHAPE} True"),
    "blocks": (
        lambda: SINES(da.from_array(X, chunks=2)),
        "sin(): batch_shape=(2, 6) has no chunks, by which dask would evaluate it; pass a dask "
        "array that has these axes, and sin.with_options(batch_shape=None)",
    ),
    "names": (
        lambda: rankax.xarray.apply(SINES, xr.DataArray(X, dims="time")),
        "rankax.xarray.apply(sin): the axes of batch_shape=(2, 6) have no names; pass a DataArray "
        "that has these dimensions, and kernel.with_options(batch_shape=None)",
    ),
    "the name that JAX has": (
        lambda: auto_vmap(0, SplitKey, axis_size=3)(draw),
        "auto_vmap(draw): the kernel has no parameter 'axis_size'; did you mean the option "
        "'batch_shape'?",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, text):
    assert refusal((TypeError, ValueError), call) == text
