# SPDX-License-Identifier: MIT
"""A reduction that nothing bounds has a bound of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, slow, temporary_bytes
from rankax import SplitKey, auto_vmap, chunked_reduce, options
from rankax.reductions import BottomK, Moments, Several

POINTS = np.random.default_rng(0).normal(size=(3000, 3)).astype("float32")
FEW = 50  # points whose pairs are all evaluated at once


def distance(x, y):
    return jnp.sum((x - y) ** 2)


def near(x, y):
    return jnp.exp(-distance(x, y))


def pairs(reduce, **settings):
    kernel = auto_vmap(1, 1, reduce=reduce, **settings)(distance)
    return kernel, lambda x: kernel(x[:, None], x)


@pytest.mark.parametrize("axis", [None, slow(-1)])
def test_values_are_those_of_all_items_at_once(axis):
    reduce = Several("mean", "argmin", Moments(), BottomK(2))
    kernel = auto_vmap(1, 1, reduce=reduce, reduce_axis=axis)(distance)
    args = POINTS[:300, None], POINTS[:300]
    assert kernel.plan(*args).steps > 1
    assert_same(kernel(*args), kernel.with_options(chunk_size=None)(*args), rtol=2e-5)


def test_memory_does_not_grow_with_the_batch():
    def gradient(size):
        kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1, chunk_size=size)(near)
        return jax.grad(lambda x: jnp.sum(kernel(x[:, None], x) ** 2))

    assert temporary_bytes(gradient("auto"), POINTS) < 2**20
    assert temporary_bytes(gradient(None), POINTS) > 4 * len(POINTS) ** 2


@pytest.mark.optimized
@pytest.mark.parametrize("numbers", [1, 3])
def test_sines_that_fill_no_tile_are_evaluated_after_the_loop(numbers):
    row = jnp.arange(3.0)[:numbers]
    gradient = jax.grad(auto_vmap(1, reduce="sum")(lambda x: jnp.sin(x @ row)))
    x = jax.ShapeDtypeStruct((200_003, numbers), jnp.float32)
    assert "cond[" not in str(jax.make_jaxpr(gradient)(x))
    assert temporary_bytes(gradient, x) < 200_000  # both parts add to one cotangent


def test_few_items_are_evaluated_at_once():
    x = POINTS[:FEW]
    kernel, fun = pairs("sum")
    programs = [jax.make_jaxpr(fun)(x), jax.make_jaxpr(pairs("sum", chunk_size=None)[1])(x)]
    assert str(programs[0]) == str(programs[1])
    plan = kernel.plan(x[:, None], x)
    assert plan.steps == 1
    assert plan.notes == ()


def test_the_plan_shows_it():
    kernel, _ = pairs("sum")
    plan = kernel.plan(POINTS[:, None], POINTS)
    assert 1 < plan.in_flight <= 1024
    assert "bounded by default; chunk_size=None takes all" in str(plan)
    for size in (1000, None):
        other = kernel.with_options(chunk_size=size).plan(POINTS[:, None], POINTS)
        assert "by default" not in str(other)


def test_a_limit_that_the_default_fits_changes_nothing():
    """With as many items as the limit allows, a sum of pairs took nine times as long."""
    kernel, _ = pairs("sum")
    args = POINTS[:, None], POINTS
    default = kernel.plan(*args)
    limited = kernel.with_options(memory_limit="1 GB")
    plan = limited.plan(*args)
    assert (plan.in_flight, plan.levels) == (default.in_flight, default.levels)
    assert plan.memory.gradient <= plan.memory.limit
    assert "bounded by default; chunk_size=None takes as many as fit the limit" in str(plan)
    assert limited.with_options(chunk_size=None).plan(*args).steps == 1
    small = limited.with_options(
        memory_limit=max(plan.memory.gradient, plan.memory.forward) - 1
    ).plan(*args)
    assert small.in_flight < default.in_flight
    np.testing.assert_allclose(limited(*args), kernel(*args), rtol=1e-6)


def test_a_scope_and_options_override_it():
    kernel, _ = pairs("sum")
    args = POINTS[:, None], POINTS
    default = kernel.plan(*args)
    with options(chunk_size=None):
        assert kernel.plan(*args).steps == 1
        assert kernel.with_options(chunk_size="auto").plan(*args) == default
    with options(chunk_size=7):
        assert kernel.plan(*args).in_flight <= 7
        with options(chunk_size="auto"):
            assert kernel.plan(*args) == default
    assert kernel.with_options(chunk_size=7).with_options(chunk_size="auto") is not kernel
    assert kernel.with_options(chunk_size=7).with_options(chunk_size="auto").plan(*args) == default


def test_maps_have_no_bound():
    assert auto_vmap(1, chunk_size="auto")(jnp.sum).plan(POINTS).steps == 1


def test_functions_with_a_bound_as_a_parameter_take_a_number():
    message = r"chunked_reduce\(distance\): chunk_size must be a positive int, got 'auto'"
    with pytest.raises(TypeError, match=message):
        chunked_reduce(distance, "sum", "auto")
    with pytest.raises(TypeError, match="chunk_size must be a positive int, got 'automatic'"):
        auto_vmap(1, chunk_size="automatic")(jnp.sum)


KERNELS = {
    "batched": auto_vmap(1, reduce="sum", batched=True)(lambda x: jnp.sum(x**2, -1)),
    "where": auto_vmap(1, reduce="sum", where="ok")(lambda x: {"v": x @ x, "ok": x[0] > 0}),
    "keys": auto_vmap(SplitKey, 1, reduce="sum")(lambda key, x: jax.random.uniform(key) + x @ x),
    "bucket": auto_vmap(1, reduce="sum", jit=True, bucket=True)(lambda x: x @ x),
}


@pytest.mark.parametrize("option", KERNELS)
def test_beside_other_options(option):
    x = np.tile(POINTS, (20, 1))
    args = (jax.random.key(0), x) if option == "keys" else (x,)
    kernel = KERNELS[option]
    at_once = kernel.with_options(chunk_size=None)
    assert kernel.plan(*args).in_flight < len(x) <= at_once.plan(*args).in_flight
    assert_same(kernel(*args), at_once(*args), rtol=1e-4)


def test_an_empty_batch():
    kernel, fun = pairs("sum")
    assert fun(POINTS[:0]) == 0
    assert kernel.plan(POINTS[:0, None], POINTS[:0]).steps in (0, 1)


# On a GPU.


def on_gpu(kernel, *shapes):
    """Return the plan of a call on a GPU, which is not asked to be there."""
    with jax.default_device("gpu"):
        return kernel.plan(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


N = 100_000


def test_on_a_gpu_rows_are_whole():
    kernel, _ = pairs("sum", reduce_axis=-1)
    plan = on_gpu(kernel, (N, 1, 3), (N, 3))
    assert [level.tile for level in plan.levels] == [625, N]
    assert plan.in_flight * 4 <= 2**28


def test_on_a_gpu_what_is_stored_decides():
    def layer(x, y):
        return jnp.sum(jnp.tanh(x - y))

    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(layer)
    stored = [on_gpu(kernel, (N, 1, k), (N, k)).in_flight * 4 * k for k in (1, 3, 8, 64)]
    assert all(2**27 < each < 2**28 for each in stored)
    # A row is whole up to twice that size, and is cut beyond.
    assert on_gpu(kernel, (N, 1, 1300), (N, 1300)).in_flight == N
    cut = on_gpu(kernel, (N, 1, 1600), (N, 1600))
    assert cut.in_flight * 4 * 1600 < 2**28


def test_on_a_gpu_each_item_of_a_cut_row_has_a_state():
    def scaled(x):
        return jnp.exp(x[0]) * x

    rows = [auto_vmap(1, reduce="sum")(scaled), auto_vmap(1, 1, reduce="sum")(distance)]
    plans = [on_gpu(rows[0], (2**30, 16)), on_gpu(rows[1], (2**30, 3), (3,))]
    assert [plan.in_flight for plan in plans] == [2**28 // (4 * 16), 2**28 // 4]


def small_steps(size, *shapes, kernel=None):
    kernel = kernel or pairs("sum", reduce_axis=-1)[0]
    return on_gpu(kernel.with_options(chunk_size=size), *shapes).notes


def test_small_steps_on_a_gpu_are_named():
    shapes = (N, 1, 3), (N, 3)
    (note,) = small_steps(2**16, *shapes)
    assert note == (
        "200000 steps of 50000 on a GPU, where each launches a few kernels; chunk_size=62500000 "
        "makes 160"
    )
    assert small_steps(62_500_000, *shapes) == ()
    assert small_steps(2**16, (1000, 1, 3), (1000, 3)) == ()  # few steps
    wide = auto_vmap(1, chunk_size=64)(lambda x: jnp.tanh(x[:, None] * x[None]))
    assert small_steps(64, (10**7, 200), kernel=wide) == ()  # many numbers in each


def test_a_call_warns_of_small_steps_once():
    kernel = auto_vmap(0, chunk_size=1)(lambda x: 2 * x)
    x = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    with jax.default_device("gpu"):
        with pytest.warns(UserWarning, match=r"<lambda>\(\) at .*: 100000 steps of 1 on a GPU"):
            jax.make_jaxpr(kernel)(x)
        jax.make_jaxpr(kernel)(x)  # warnings are errors here
    jax.make_jaxpr(kernel)(x)


def test_the_target_is_not_an_option():
    with pytest.raises(TypeError, match="no option is called 'target'"):
        options(target="gpu")
