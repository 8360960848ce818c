# SPDX-License-Identifier: MIT
"""What is kept between calls can be seen, emptied and checked."""

import functools
import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from rankax import auto_vmap, chunked_vmap, options, sliced_scan
from rankax.core.base.cache import caches
from rankax.core.loop import eager_programs
from rankax.reductions import Fold

X = jnp.arange(30.0)


def kept():
    """Return how much is kept, besides kernels that someone has."""
    return sum(count for what, count in caches.counts().items() if what != "kernels")


def calls():
    """Fill caches of several kinds; return the kernels, without which their caches are gone."""
    square = auto_vmap(0, chunk_size=4)(jnp.square)
    fast = auto_vmap(0, jit=True, chunk_size=4)(jnp.square)
    limited = auto_vmap(0, memory_limit="1 kB")(jnp.square)
    bucketed = fast.with_options(bucket=True)
    for kernel in (square, fast, limited, bucketed):
        np.testing.assert_array_equal(kernel(X), X**2)
    sliced_scan(lambda c, x: (c + x, c), jnp.float32(0), X, step=3)
    return square, fast, limited, bucketed


def test_all_can_be_seen_and_emptied():
    rankax.clear_caches()
    assert kept() == 0
    kernels = calls()
    found = caches.counts()
    assert {name for name, count in found.items() if count} - {"how often a result was cut"} == {
        "chunk sizes by memory limit",
        "functions of jit=True",
        "kernels",
        "plans",
        "programs of eager calls",
        "programs of jit=True",
        "structures of arguments",
        "how batches are padded",
    }
    lines = repr(rankax.caches).splitlines()
    assert lines[0] == "caches of rankax"
    assert f"{found['programs of eager calls']:>8}  programs of eager calls" in lines
    rankax.clear_caches()
    alive = caches.counts()
    assert {name for name, count in alive.items() if count} <= {"kernels"}  # the caller has them
    for kernel in kernels:
        np.testing.assert_array_equal(kernel(X), X**2)


def live_programs():
    gc.collect()
    return len(jax.extend.backend.get_backend().live_executables())


def test_jax_frees_compiled_programs():
    jax.clear_caches()
    rankax.clear_caches()
    before = live_programs()
    kernels = calls()
    assert live_programs() > before
    jax.clear_caches()
    assert live_programs() <= before
    for kernel in kernels:
        np.testing.assert_array_equal(kernel(X), X**2)


def total_of(size):
    return Fold(jnp.zeros(size), lambda x: jnp.full(size, x), jnp.add)


def test_kernels_of_a_loop_do_not_stay():
    base = auto_vmap(0)(jnp.sin)
    made = [weakref.ref(base.with_options(reduce=total_of(size))) for size in range(1, 21)]
    gc.collect()
    assert [ref() is not None for ref in made] == [False] * 12 + [True] * 8
    rankax.clear_caches()
    gc.collect()
    assert not any(ref() for ref in made)


def test_a_kernel_that_someone_has_is_found_again():
    base = auto_vmap(0)(jnp.sin)
    mine = base.with_options(chunk_size=3)
    for size in range(4, 30):
        base.with_options(chunk_size=size)
    assert base.with_options(chunk_size=3) is mine


@pytest.fixture
def collision(monkeypatch):
    """Programs that all have the same fingerprint."""
    rankax.clear_caches()
    monkeypatch.setattr(eager_programs, "fingerprint", lambda closed: "always equal")
    yield
    rankax.clear_caches()


@pytest.mark.usefixtures("collision", "unchecked")
def test_a_wrong_program_is_noticed():
    def scaled(factor, x):
        return {"value": factor * x}

    one, two = (chunked_vmap(functools.partial(scaled, factor), 4) for factor in (2, 3))
    with options(check=True):
        np.testing.assert_array_equal(one(X)["value"], 2 * X)
        np.testing.assert_array_equal(one(X)["value"], 2 * X)
        message = (
            r"scaled\(\) at .*test_caches.py:\d+: the compiled program of an earlier call was "
            r"taken for that of this one, but its output\['value'\], float32\[30\], differs from"
        )
        with pytest.raises(RuntimeError, match=message):
            two(X)
        with options(check=False):
            np.testing.assert_array_equal(two(X)["value"], 2 * X)
    np.testing.assert_array_equal(two(X)["value"], 2 * X)  # silently wrong: why the option exists


def test_check_is_one_of_the_scope():
    with pytest.raises(TypeError, match=r"rankax\.options: check must be True or False, got 1"):
        options(check=1)
    with pytest.raises(TypeError, match="no option is called 'check'"):
        auto_vmap(0)(jnp.sin).with_options(check=True)


@pytest.mark.slow
def test_the_environment_switches_checks_on():
    program = "from rankax.core.loop.eager_programs import _checks; print(_checks.get())"
    env = os.environ | {"RANKAX_CHECK": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.stdout.strip() == "True"
