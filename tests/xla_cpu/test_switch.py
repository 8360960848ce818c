# SPDX-License-Identifier: MIT
"""Without the rules, a call is the program that one writes by hand."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from helpers import primitives, slow, weekly
from rankax import auto_vmap, chunked_vmap, options
from rankax._options import Options
from rankax.core.protocols import NO_RULES
from rankax.ext.xla_cpu import rules

X = jax.ShapeDtypeStruct((6000, 5), jnp.float32)
UNEVEN = jax.ShapeDtypeStruct((6007, 5), jnp.float32)
SIZE = 1000


def kernel(x):
    """Each of the rules for maps has something to do here, and so have tiles."""
    y = x
    for _ in range(3):
        y = jnp.tanh(y) + y * jnp.sqrt(jnp.sum(jnp.exp(y)))  # of five numbers: tiles of 819
    return jnp.sum(jnp.tanh(y[1:] - y[:-1]) / (1 + y[1:] ** 2))


def by_scan(x):
    """Even chunks, as `lax.map` has them, with a checkpoint."""
    chunks = x.reshape(-1, SIZE, 5)
    on_chunk = jax.checkpoint(jax.vmap(kernel), prevent_cse=False)
    return lax.scan(lambda _, chunk: (None, on_chunk(chunk)), None, chunks)[1].ravel()


def by_slices(x):
    """Chunks of which the last one overlaps the one before it."""
    n = len(x)
    flat, size = x.ravel(), -(-n // -(-n // SIZE))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def values(flat, start):
        chunk = lax.dynamic_slice(flat, [start * 5], [size * 5], allow_negative_indices=False)
        return jax.vmap(kernel)(chunk.reshape(size, 5))

    def step(carry, _):
        start, out = carry
        own = values(flat, start)
        out = lax.dynamic_update_slice(out, own, (start,), allow_negative_indices=False)
        return (jnp.minimum(start + size, n - size), out), None

    carry = jnp.int32(0), jnp.zeros(n)
    return lax.scan(step, carry, None, -(-n // size))[0][1]


def gradient(fun):
    return jax.grad(lambda x: jnp.sum(fun(x)))


def text(fun, x):
    """Return the instructions of a compiled program in order, with types and without names."""
    found = jax.jit(fun).lower(x).compile().as_text()
    found = found[found.index("\n\n\n") :]  # behind the tables of source lines
    found = re.sub(r", metadata=\{[^}]*\}", "", found)
    return re.sub(r"%[\w.-]+|[\w.-]+(?=: )", "%", found)


def plain(fun):
    """Return a call without the rules."""

    def call(x):
        with options(xla_cpu=False):
            return fun(x)

    return call


mapped = chunked_vmap(kernel, SIZE)
PROGRAMS = {
    "gradient": (gradient(mapped), gradient(by_scan), X),
    "uneven": (mapped, by_slices, UNEVEN),
}


@pytest.mark.parametrize("name", ["gradient", slow("uneven")])
def test_without_rules_the_program_is_that_by_hand(name):
    fun, by_hand, x = PROGRAMS[name]
    assert text(plain(fun), x) == text(by_hand, x)
    assert text(fun, x) != text(by_hand, x)


def test_each_way_to_say_so():
    x = jnp.ones((6000, 5))
    assert auto_vmap(1, chunk_size=SIZE, xla_cpu=False)(kernel).plan(x).in_flight == SIZE
    inside = auto_vmap(1, chunk_size=SIZE)(kernel)
    assert inside.plan(x).in_flight < SIZE
    assert inside.with_options(xla_cpu=False).plan(x).in_flight == SIZE
    with options(xla_cpu=False):
        assert inside.plan(x).in_flight == SIZE
        assert primitives(chunked_vmap(kernel, SIZE), x)["optimization_barrier"] == 0
        assert inside.with_options(xla_cpu=True).plan(x).in_flight < SIZE
    with pytest.raises(TypeError, match=r"rankax\.options: xla_cpu must be True or False, got 0"):
        options(xla_cpu=0)


def test_the_environment_sets_the_default():
    program = "from rankax._options import Options; print(type(Options().rules).__name__)"
    command, env = [sys.executable, "-c", program], os.environ | {"RANKAX_XLA_CPU": "off"}
    assert subprocess.check_output(command, env=env, text=True) == "Rules\n"


def test_on_a_gpu_there_are_no_rules(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert Options(xla_cpu=True).rules is NO_RULES


def test_jax_0_11_1_has_no_tiles(monkeypatch):
    monkeypatch.setattr(rules, "_ARE_TILES_SLOW", True)
    assert Options(xla_cpu=True).rules is NO_RULES


@pytest.mark.parametrize(
    ("version", "is_tuned"),
    [((0, 10, 2), False), weekly((0, 12, 0), True), ((0, 13, 0), True), weekly((1, 0, 0), True)],
    ids=str,
)
def test_each_jax_has_tiles_and_a_new_one_loses_no_rule(version, is_tuned):
    program = (
        "import jax; jax.__version_info__ = {}; from rankax._options import Options; "
        "from rankax.ext.xla_cpu.library import IS_TUNED; "
        "print(type(Options(xla_cpu=True).rules).__name__, IS_TUNED)"
    )
    command = [sys.executable, "-c", program.format(version)]
    assert subprocess.check_output(command, text=True) == f"XlaCpu {is_tuned}\n"
