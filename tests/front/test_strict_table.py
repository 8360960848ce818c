# SPDX-License-Identifier: MIT
"""Every front end in every strict mode of JAX, and in every place that JAX has.

What JAX itself cannot do there is in docs/limits.md.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import assert_same
from strict_calls import CALLS, NO_GRADIENT, X, called

CALLED = list(CALLS)


def mesh_of(kind):
    return jax.make_mesh((1,), ("s",), axis_types=(AxisType[kind],))


def debug_nans(fun):
    with jax.debug_nans(True):
        return fun(jnp.asarray(X))


def key_checker(fun):
    with jax.debug_key_reuse(True):
        return fun(jnp.asarray(X))


def checked_leaks(fun):
    with jax.checking_leaks():
        return fun(jnp.asarray(X))


def ranks_raise(fun):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        return fun(jnp.asarray(X))


def in_shard_map(fun):
    def on_device(x):
        return jax.tree.map(lambda y: jnp.asarray(y)[None], fun(x))

    mapped = jax.shard_map(on_device, mesh=mesh_of("Auto"), in_specs=P("s"), out_specs=P("s"))
    return jax.tree.map(lambda y: y[0], jax.jit(mapped)(jnp.asarray(X)))


def auto_mesh(fun):
    return fun(jax.device_put(X, NamedSharding(mesh_of("Auto"), P("s"))))


def explicit_mesh(fun):
    mesh = mesh_of("Explicit")
    with jax.set_mesh(mesh):
        return jax.device_get(fun(jax.device_put(X, NamedSharding(mesh, P()))))


def no_transfers(fun):
    x, compiled = jnp.asarray(X), jax.jit(fun)
    compiled(x)
    with jax.transfer_guard("disallow"):
        return compiled(x)


def exported(fun):
    call = jax.export.export(jax.jit(fun))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    return jax.export.deserialize(call.serialize()).call(jnp.asarray(X))


def exported_for_any_length(fun):
    like = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2*n, 3"), X.dtype)
    return jax.export.export(jax.jit(fun))(like).call(jnp.asarray(X))


def lowered(fun):
    return jax.jit(fun).lower(jnp.asarray(X)).compile()(jnp.asarray(X))


def in_threads(fun):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(fun, [jnp.asarray(X)] * 2))[1]


MODES = [
    *(debug_nans, key_checker, checked_leaks, ranks_raise, in_shard_map, auto_mesh, explicit_mesh),
    *(no_transfers, exported, exported_for_any_length, lowered, in_threads),
]


def on_the_host(x):
    return jnp.asarray(np.asarray(x))


def six_labels(x):
    return x * jnp.repeat(jnp.arange(3.0), np.array([1, 3, 2]), total_repeat_length=6)[:, None]


def in_fours(x):
    return x.reshape(-1, 4, 3)


TRACED = [in_shard_map, no_transfers, exported, exported_for_any_length, lowered]
PADDED = ("bucket", "ragged")
UNKNOWN = "has the unknown length 2\\*n"
# What is refused, with which words, and the plain program that JAX itself refuses there. None: JAX
# has one that works, so it is a limit of rankax, in docs/limits.md.
REFUSED = {
    **{(explicit_mesh, name): ("is sharded over devices, but ", None) for name in PADDED},
    **{(mode, "stream"): ("is traced, but a stream reads it", on_the_host) for mode in TRACED},
    (exported_for_any_length, "ragged"): ("values has 2\\*n rows", six_labels),
    (exported_for_any_length, "checkpointed"): (f"{UNKNOWN}; use jax.lax.scan", in_fours),
    (exported_for_any_length, "sliced_scan"): (f"{UNKNOWN}; use jax.lax.scan", None),
    (exported_for_any_length, "lanes"): ("counts the items, but the batch has the unknown", None),
}
AT_EACH_RUN = ("map", "max", "jacfwd")


def cells():
    for mode in MODES:
        for name in CALLED:
            is_quick = name in AT_EACH_RUN and mode in (in_shard_map, explicit_mesh, no_transfers)
            marks = () if is_quick else pytest.mark.weekly
            yield pytest.param(mode, name, id=f"{mode.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("mode", "name"), [*cells()])
def test_each_call_in_each_mode(mode, name):
    fun, plain = CALLS[name]
    gradient = name not in NO_GRADIENT
    if (mode, name) in REFUSED:
        words, _ = REFUSED[mode, name]
        with pytest.raises((TypeError, ValueError), match=words):
            mode(fun)
        return
    got = mode(lambda x: called(fun, x, gradient=gradient))
    want = jax.jit(lambda x: called(plain, x, gradient=gradient))(jnp.asarray(X))
    assert_same(got, want, rtol=1e-3, atol=1e-5)


def cells_refused():
    for (mode, name), (_, refused) in REFUSED.items():
        marks = pytest.mark.weekly if refused is None else ()
        yield pytest.param(mode, name, refused, id=f"{mode.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("mode", "name", "refused"), [*cells_refused()])
def test_jax_itself_refuses_or_it_is_a_limit(mode, name, refused):
    if refused is None:
        plain = CALLS[name][1]
        assert_same(mode(plain), plain(jnp.asarray(X)), rtol=1e-3)
        return
    with pytest.raises(Exception, match=r"Tracer|incompatible shapes|Cannot divide evenly"):
        mode(refused)


def test_no_program_reads_arrays_on_the_host():
    for traced in (jax.jit(CALLS["stream"][0]), jax.grad(lambda x: CALLS["stream"][0](x).sum())):
        with pytest.raises(TypeError, match=r"v is traced, .* outside of jax.jit and jax.grad"):
            traced(jnp.asarray(X))


def in_a_process(names, **environment):
    """Run the script in a process of its own, which remembers nothing."""
    script = str(Path(__file__).with_name("strict_calls.py"))
    found = subprocess.run(
        [sys.executable, script, *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not found.returncode, found.stderr


SWITCHES = ["JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_ENABLE_CHECKS"]


@pytest.mark.weekly
@pytest.mark.parametrize("switch", SWITCHES[1:])
def test_switches_of_a_process(switch):
    in_a_process([], **{switch: "1"})


@pytest.mark.weekly
@pytest.mark.parametrize("name", CALLED)
def test_the_first_call_of_a_process_without_jit(name):
    in_a_process([name], JAX_DISABLE_JIT="1")


def test_calls_without_jit():
    in_a_process(["map", "jacfwd", "ragged"], JAX_DISABLE_JIT="1")
