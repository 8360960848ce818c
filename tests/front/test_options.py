# SPDX-License-Identifier: MIT
"""Options at the call: `with_options` and the scope of `options`."""

import os
import pickle
import threading

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from helpers import refusal
from rankax import auto_vmap, chunked_vmap
from rankax._options import NAMES, Given
from rankax.plans import MemoryFit

X = jnp.asarray(np.arange(24.0).reshape(8, 3))


@auto_vmap(v=1)
def norm(v):
    return jnp.sqrt(v @ v)


def in_flight(kernel):
    return kernel.plan(X).in_flight


def test_type_checkers_know_every_option():
    assert Given.__annotations__.keys() == {*NAMES}


def test_with_options_keeps_the_declaration_and_changes_the_rest():
    chunked = norm.with_options(chunk_size=2)
    assert (in_flight(norm), in_flight(chunked)) == (8, 2)
    assert chunked.__wrapped__ is norm.__wrapped__
    assert chunked.__name__ == "norm"
    np.testing.assert_array_equal(chunked(X), norm(X))
    assert in_flight(chunked.with_options(checkpoint=False)) == 2
    assert in_flight(chunked.with_options(chunk_size=None)) == 8


def test_equal_options_are_one_kernel_that_compiles_once():
    traces = []
    kernel = auto_vmap(1, jit=True)(lambda v: traces.append(v) or v.sum())
    for _ in range(3):
        kernel.with_options(chunk_size=np.int64(2))(X)
    assert len(traces) == 1
    assert kernel.with_options() is kernel
    assert kernel.with_options(jit=True) is kernel
    chunked = kernel.with_options(chunk_size=2)
    assert chunked is kernel.with_options(chunk_size=2)


def test_jit_by_with_options():
    jitted = norm.with_options(jit=True, chunk_size=4)
    np.testing.assert_array_equal(jitted(X), norm(X))
    assert "while" in jitted.lower(X).as_text()
    assert not hasattr(jitted.with_options(jit=False), "lower")


def test_a_scope_sets_what_a_kernel_was_not_given():
    given = norm.with_options(chunk_size=4)
    reset = norm.with_options(chunk_size=None)
    with rankax.options(chunk_size=2):
        assert [in_flight(k) for k in (norm, given, reset)] == [2, 4, 8]
        with rankax.options(checkpoint=False):
            assert in_flight(norm) == 2
            with rankax.options(chunk_size=1):
                assert in_flight(norm) == 1
        with rankax.options(chunk_size=None):
            assert in_flight(norm) == 8
    assert in_flight(norm) == 8


def test_a_scope_ends_with_an_error_and_holds_in_its_thread_only():
    found = []

    @rankax.options(chunk_size=2)
    def fail():
        thread = threading.Thread(target=lambda: found.append(in_flight(norm)))
        thread.start()
        thread.join()
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert found == [8]
    assert in_flight(norm) == 8


def test_a_scope_is_part_of_what_jit_keys_its_programs_on():
    jitted = norm.with_options(jit=True)
    assert "while" not in jitted.lower(X).as_text()
    with rankax.options(chunk_size=2):
        assert "while" in jitted.lower(X).as_text()
    traces = []
    kernel = auto_vmap(1, jit=True)(lambda v: traces.append(v) or v.sum())
    for size in (2, 4, 2, 4):
        with rankax.options(chunk_size=size):
            kernel(X)
    assert len(traces) == 2


def test_a_scope_counts_while_a_jit_of_ones_own_is_traced():
    fun = jax.jit(lambda x: norm(x))
    with rankax.options(chunk_size=2):
        assert "scan" in str(jax.make_jaxpr(fun)(X))


def test_compiler_options_reach_xla():
    flag = {"xla_embed_ir_in_executable": True}
    kernel = norm.with_options(jit=True, compiler_options=flag)
    np.testing.assert_allclose(kernel(X), norm(X))
    wrong = norm.with_options(jit=True, compiler_options={"xla_no_such_flag": True})
    with pytest.raises(Exception, match="xla_no_such_flag"):
        wrong(X)
    np.testing.assert_allclose(jax.jit(kernel)(X), norm(X))


def test_pickles_never_lose_options():
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(norm.with_options(chunk_size=2))
    copy = cloudpickle.loads(cloudpickle.dumps(norm.with_options(chunk_size=2)))
    assert in_flight(copy) == 2
    assert in_flight(copy.with_options(chunk_size=3)) == 3


@pytest.mark.parametrize(
    ("give", "error", "text"),
    [
        (
            lambda: norm.with_options(chunksize=2),
            TypeError,
            "norm.with_options: no option is called 'chunksize'; did you mean chunk_size? "
            "(options: chunk_size, memory_limit, checkpoint, progress, devices, lockstep, "
            "cpu_math, xla_cpu, hoist, fused, reduce, reduce_axis, over, where, batch_shape, "
            "jit, compiler_options, bucket and batched)",
        ),
        (
            lambda: norm.with_options(compiler_options={"xla": True}),
            TypeError,
            "norm.with_options: compiler_options are those of jax.jit, so they need jit=True; "
            "if you call jax.jit yourself, pass them there",
        ),
        (
            lambda: auto_vmap(1, jit=True, compiler_options="fast")(norm.__wrapped__),
            TypeError,
            "auto_vmap(norm): compiler_options must be a dict, as in jax.jit, got str 'fast'",
        ),
        (
            lambda: auto_vmap(1, jit=True, compiler_options={"a": None})(norm.__wrapped__),
            TypeError,
            "auto_vmap(norm): compiler_options must map names to strings, numbers or bools, got "
            "'a': None",
        ),
        (
            lambda: rankax.options(chunk_size=0),
            ValueError,
            "rankax.options: chunk_size must be a positive int, got 0",
        ),
        (
            lambda: rankax.options(jit=True),
            TypeError,
            "rankax.options: jit belongs to a kernel; use kernel.with_options(jit=...) (a scope "
            "can set chunk_size, memory_limit, checkpoint, progress, devices, lockstep, "
            "cpu_math, xla_cpu, hoist and fused)",
        ),
    ],
)
def test_wrong_options_are_refused_at_once(give, error, text):
    assert refusal(error, give) == text


def test_memory_is_measured_anew_for_other_options(monkeypatch):
    measured = []

    def recorded(*args):
        measured.append(args)
        return MemoryFit(*args)

    monkeypatch.setattr("rankax.ext.memory.limit.MemoryFit", recorded)
    limited = norm.with_options(memory_limit=10**6, chunk_size=3)
    for devices in (None, 1, None):
        limited.with_options(devices=devices).plan(X)
    assert len(measured) == 2


def test_one_cpu_device_says_how_to_get_more():
    mapped = chunked_vmap(lambda x: x, 2, devices="all")
    assert refusal(ValueError, mapped, jnp.ones(4)) == (
        "chunked_vmap(<lambda>): devices='all', but JAX has 1 CPU device; for more CPU devices, "
        f'one for each core, call jax.config.update("jax_num_cpu_devices", {os.cpu_count()}) '
        "before JAX is first used"
    )
    for device in (jax.devices(), 1):
        out = chunked_vmap(lambda x: x * 2, 2, devices=device)(jnp.arange(4.0))
        np.testing.assert_array_equal(out, [0, 2, 4, 6])


def test_the_old_name_of_the_option_leads_to_the_new_one():
    hint = "'shards'; did you mean the option 'devices'?"
    assert hint in refusal(TypeError, auto_vmap(1, shards=2), norm.__wrapped__)
    assert hint in refusal(TypeError, norm.with_options, shards=2)
