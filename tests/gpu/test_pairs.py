# SPDX-License-Identifier: MIT
"""All pairs of 100,000 points with default options on an H100: bounded memory, few launches."""

import jax
import jax.numpy as jnp
import pytest

import h100
from cases import compiled, distance, modes
from h100 import shaped
from rankax import auto_vmap
from rankax.reductions import BottomK

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


@pytest.mark.parametrize("name", CASES)
def test_default_options(name):
    fun, reduce, args = CASES[name]
    kernel = auto_vmap(*[len(x.shape) - 1 for x in args], reduce=reduce, reduce_axis=-1)(fun)
    for mode, call in modes(name, lambda x, *others: kernel(x[:, None], *others), args):
        program = compiled(call, *args)
        assert program.temporaries <= 800e6, mode
        kernels = sum(loop.steps * loop.kernels for loop in program.loops)
        assert kernels <= 4_000, mode
        assert not any(loop.loops for loop in program.loops)
        assert not program.has_unknown_steps


GAUSSIAN = auto_vmap(1, 1, 0, reduce="sum", reduce_axis=-1)(gaussian)
SHAPES = shaped(N, 1, 3), POINTS, shaped(N)


def test_small_chunks_are_slow_and_named():
    with pytest.warns(UserWarning, match="200000 steps of 50000 on a GPU.*chunk_size=62500000"):
        small = compiled(GAUSSIAN.with_options(chunk_size=2**16), *SHAPES)
    assert small.launches > 100 * compiled(GAUSSIAN, *SHAPES).launches


def test_a_memory_limit_is_measured_for_the_gpu():
    kernel = GAUSSIAN.with_options(memory_limit="1 GB")
    plan = kernel.plan(*SHAPES)
    assert 500e6 < plan.memory.gradient <= 1e9
    assert plan.in_flight > 2**24
    # In a compiled call a mesh tells the platform, but no device to compile for.
    with pytest.raises(ValueError, match="cannot measure a call compiled for a gpu"):
        h100.compiled(kernel, *SHAPES)


def test_where_jax_runs_is_not_what_decides():
    assert GAUSSIAN.plan(*SHAPES).in_flight == 62_500_000
    here = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in SHAPES]
    assert GAUSSIAN.plan(*here).in_flight <= 1024
