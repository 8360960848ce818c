# SPDX-License-Identifier: MIT
"""All pairs of 100,000 points with default options on an H100: bounded memory, few launches."""

import re

import jax
import jax.numpy as jnp
import pytest

import h100
from cases import compiled, distance, gradient, modes, mostly_weekly
from h100 import shaped
from hlo import launched, read
from rankax import auto_vmap
from rankax.ext.equations import operations
from rankax.reductions import BottomK, ByLabel, Histogram, Moments

N = 100_000
POINTS = shaped(N, 3)


def gaussian(x, y, w):
    return w * jnp.exp(-distance(x, y))


def gravity(x, y, m):
    d = y - x
    return m * d * jax.lax.rsqrt(jnp.sum(d * d) + 1e-3) ** 3


CASES = {
    "gaussian": (gaussian, "sum", (POINTS, POINTS, shaped(N))),
    "gravity": (gravity, "sum", (POINTS, POINTS, shaped(N))),
    "logsumexp": (lambda x, y: -distance(x, y), "logsumexp", (POINTS, POINTS)),
    "argmin": (distance, "argmin", (POINTS, POINTS)),
    "nearest 5": (distance, BottomK(5), (POINTS, POINTS)),
}


def mapped(fun, reduce, args, **options):
    ranks = [len(x.shape) - 1 for x in args]
    kernel = auto_vmap(*ranks, reduce=reduce, reduce_axis=-1, **options)(fun)
    return lambda x, *others: kernel(x[:, None], *others)


@pytest.mark.parametrize("name", CASES)
def test_default_options(name):
    fun, reduce, args = CASES[name]
    for mode, call in modes(name, mapped(fun, reduce, args), args):
        program = compiled(call, *args)
        assert program.temporaries <= 800e6, mode
        kernels = sum(loop.steps * loop.kernels for loop in program.loops)
        assert kernels <= 4_000, mode
        assert not any(loop.loops for loop in program.loops)
        assert not program.has_unknown_steps


def test_the_gradient_of_a_choice_stores_no_pairs():
    call = gradient(mapped(distance, "min", (POINTS, POINTS)), POINTS, POINTS)
    assert compiled(call, POINTS, POINTS).temporaries < 2.1e6


def test_a_net_is_evaluated_once_for_each_point():
    weights = [jnp.ones(shape) for shape in ((3, 64), (64, 3))]

    def net(x):
        return jnp.tanh(x @ weights[0]) @ weights[1]

    call = mapped(lambda x, y: jnp.exp(-distance(net(x), net(y))), "sum", (POINTS, POINTS))
    for fun, passes in ((call, 1), (gradient(call, POINTS, POINTS), 2)):
        found = operations(jax.make_jaxpr(fun)(POINTS, POINTS).jaxpr)
        tanhs = [each for each in found if each.name == "tanh" and not each.calls]
        numbers = sum(each.times * each.eqn.outvars[0].aval.size for each in tanhs)
        assert numbers <= passes * 2 * N * 64


def test_pairs_that_multiply_are_products_of_matrices():
    points = shaped(N, 64)
    call = mapped(lambda x, y: jnp.exp(x @ y), "sum", (points, points))
    text = jax.jit(call).trace(points, points).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    rows = [re.findall(r"tensor<(\d+)x(\d+)xf32>", line)[-1] for line in products]
    assert rows
    assert all(int(n) >= 64 and int(m) >= 64 for n, m in rows)


# What a step launches, and why. Sums over rows of 100,000 are made in parts, and then the parts.
ADDED = "add s32[]"  # the counter of `lax.scan`, which each loop has
STEPS = {
    "sum": [["reduce_sum f32[80,250]", "reduce_sum f32[80]", ADDED]],
    # As the sum; the division is part of the second kernel.
    "mean": [["reduce_sum f32[80,500]", "reduce_sum f32[80]", "dynamic_update_slice", ADDED]],
    # Two passes over the pairs, because the sum needs the largest; and the logarithm.
    "logsumexp": [
        [
            *("reduce_max f32[80,250]", "reduce_max f32[80]"),
            *("reduce_sum f32[80,250]", "abs f32[80]", "dynamic_update_slice", ADDED),
        ]
    ],
    # Two passes again, because the squares need the mean; and three results, of which each is
    # written to its own stack. Their number is the same in each row, and XLA writes it as well.
    "Moments": [
        [
            *("reduce_sum f32[80,500]", "reduce_sum f32[80]", "reduce_sum f32[80,250]"),
            *("dynamic_update_slice", "reduce_sum f32[80]"),
            *("dynamic_update_slice", "dynamic_update_slice", ADDED),
        ]
    ],
    # Forward, and then: the cotangent of w, with the values that the other sums read; that of x, in
    # parts; that of y. XLA adds to those of all rows in kernels of their own, with what is lost.
    "sum, gradient": [
        ["reduce_sum f32[80,250]", "reduce_sum f32[80]", ADDED],
        [
            *("reduce_sum f32[100000]", "reduce_sum f32[80,3,250]", "reduce_sum f32[80,3]"),
            *("select_n f32[100000]", "neg f32[100000,3]", "select_n f32[100000,3]", ADDED),
        ],
    ],
}


@pytest.mark.parametrize("name", STEPS)
def test_kernels_of_a_step(name):
    reduce, _, is_gradient = name.partition(", ")
    fun, args = (
        (gaussian, CASES["gaussian"][2]) if reduce == "sum" else (distance, (POINTS, POINTS))
    )
    reduce = Moments() if reduce == "Moments" else reduce
    call = mapped(fun, reduce, args, chunk_size=8_000_000)  # 80 rows
    call = gradient(call, *args) if is_gradient else call
    found = launched(h100.compiled(call, *args).as_text())
    # A write to a stack, whatever its shape.
    stack = "dynamic_update_slice"
    assert [[stack if stack in each else each for each in step] for step in found] == STEPS[name]


GAUSSIAN = auto_vmap(1, 1, 0, reduce="sum", reduce_axis=-1)(gaussian)
SHAPES = shaped(N, 1, 3), POINTS, shaped(N)


def test_small_chunks_are_slow_and_named():
    with pytest.warns(UserWarning, match="200000 steps of 50000 on a GPU.*chunk_size=62500000"):
        small = compiled(GAUSSIAN.with_options(chunk_size=2**16), *SHAPES)
    assert small.launches > 100 * compiled(GAUSSIAN, *SHAPES).launches


def test_a_memory_limit_is_measured_for_the_gpu():
    kernel = GAUSSIAN.with_options(memory_limit="100 MB")
    plan = kernel.plan(*SHAPES)
    assert 50e6 < plan.memory.gradient <= 100e6
    assert plan.in_flight > 2**22
    # Where the default is within the limit, it is the choice.
    roomy = GAUSSIAN.with_options(memory_limit="1 GB").plan(*SHAPES)
    assert roomy.in_flight == GAUSSIAN.plan(*SHAPES).in_flight
    # In a compiled call a mesh tells the platform, but no device to compile for.
    with pytest.raises(ValueError, match="cannot measure a call compiled for a gpu"):
        h100.compiled(kernel, *SHAPES)


def test_where_jax_runs_is_not_what_decides():
    assert GAUSSIAN.plan(*SHAPES).in_flight == 62_500_000
    here = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in SHAPES]
    assert GAUSSIAN.plan(*here).in_flight <= 1024


# Pairs in bins: of their distance, or of the label of a row.


def weighted(x, y, v, w):
    return {"r": jnp.sqrt(distance(x, y)), "w": v * w}


def labelled(x, y, v, w, group):
    return {"w": v * w * jnp.exp(-distance(x, y))}


SHELLS = {"range": (0, 1.8), "by": "r"}
BINS = {
    "histogram": (weighted, Histogram(64, "sum", **SHELLS), ()),
    "counts": (weighted, Histogram(64, **SHELLS), ()),
    "label": (labelled, ByLabel("group", 64), (shaped(N, dtype=jnp.int32),)),
}


@pytest.mark.parametrize(
    "name",
    mostly_weekly(
        ["histogram", "histogram, gradient", "counts", "label", "label, gradient"],
        {"histogram", "histogram, gradient"},
    ),
)
def test_bins_are_one_scatter_and_no_sort(name):
    which, _, is_gradient = name.partition(", ")
    fun, reduce, labels = BINS[which]
    kernel = auto_vmap(1, 1, 0, 0, *(0 for _ in labels), reduce=reduce)(fun)

    def call(x, y, v, w, *labels):
        return kernel(x[:, None], y, v[:, None], w, *labels)

    args = (POINTS, POINTS, shaped(N), shaped(N), *labels)
    program = h100.compiled(gradient(call, *args) if is_gradient else call, *args)
    text = program.as_text()
    assert " sort(" not in text
    assert text.count(" scatter(") == 1  # a gradient gathers from the bins
    assert read(program).temporaries <= 800e6
