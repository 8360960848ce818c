# SPDX-License-Identifier: MIT
"""Lanes that make several rounds before the host looks, as on a GPU; here the CPU makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, at_each_run
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.core.base.arrays import Target, inside_call
from rankax.ext.lanes import engine
from test_lockstep import halvings, newton
from test_lockstep_derivatives import nested

X = jnp.asarray(np.linspace(0.5, 90, 37))


pytestmark = pytest.mark.usefixtures("on_gpu")


@pytest.fixture
def on_gpu():
    """A process that calls a GPU."""
    with inside_call(Target("gpu")):
        yield


def branches(x):
    expensive = lambda x: jnp.cumsum(jnp.full(8192, x))[-1]  # noqa: E731
    return newton(lax.cond(x < 40, expensive, lambda x: x, x))


KERNELS = {
    "a tree": halvings,
    "nested": lambda x: nested(x, x + 1),
    "branches": branches,
    "no loop inside": lambda x: newton(x) + jnp.cumsum(jnp.full(20, x)),
}


def in_rounds(rounds, monkeypatch, kernel):
    """Return what lanes compute in as many rounds, as a new function, which is compiled again."""
    monkeypatch.setitem(engine.ROUNDS, False, rounds)
    return jax.jit(chunked_vmap(lambda x: kernel(x), 5, lockstep=False))(X)


@pytest.mark.parametrize("kernel", at_each_run(["a tree", "branches"], KERNELS))
def test_values_are_the_same_to_the_bit(monkeypatch, kernel):
    one, several = (in_rounds(rounds, monkeypatch, kernel) for rounds in (1, 8))
    assert_same(several, one, rtol=0, atol=0)
    assert_same(several, jax.jit(jax.vmap(kernel))(X), rtol=1e-4)


def test_items_wait_for_a_slow_one_until_no_lane_goes_on():
    """The window is full when the first item ends, so both lanes are free, and items are left."""
    counts = jnp.zeros(99, jnp.int32).at[0].set(1000)

    def kernel(count):
        return lax.while_loop(lambda n: n < count, lambda n: n + 1, jnp.int32(0)) + 1

    total = jax.jit(chunked_reduce(kernel, "sum", 2, lockstep=False))(counts)
    assert total == 1000 + 99


def test_a_round_too_many_calls_nothing(monkeypatch):
    """A state that calls the host is evaluated as often as with one round."""

    def called(rounds):
        seen: list[float] = []

        def half(x):
            seen.append(float(x))
            return np.float32(x / 2)

        def step(x):
            like = jax.ShapeDtypeStruct((), jnp.float32)
            return jax.pure_callback(half, like, x, vmap_method="sequential")

        def kernel(x):
            return lax.while_loop(lambda x: x > 1, step, x)

        out = in_rounds(rounds, monkeypatch, kernel)
        return jax.block_until_ready(out), sorted(seen)

    (one, seen), (several, seen_by_several) = called(1), called(8)
    assert_same(several, one, rtol=0, atol=0)
    assert seen_by_several == seen


def test_large_steps_ask(monkeypatch):
    """What takes longer than a wait is not evaluated for lanes that have ended."""

    def whiles(large):
        monkeypatch.setattr(engine, "_LARGE", large)
        mapped = chunked_vmap(lambda x: newton(x), 5, lockstep=False)
        text = str(jax.make_jaxpr(mapped)(X))
        assert_same(jax.jit(mapped)(X), jax.jit(jax.vmap(newton))(X))
        return text.count("while[")

    assert (whiles(2**24), whiles(1)) == (1, 2)


def test_gradients():
    def value_and_gradient(mapped):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sin(mapped(x))))(X)

    lanes = chunked_reduce(newton, "sum", 5, lockstep=False)
    want = value_and_gradient(lambda x: jnp.sqrt(x).sum())
    assert_same(value_and_gradient(lanes), want, rtol=3e-3)


def test_progress_counts_items(monkeypatch):
    monkeypatch.setattr("rankax.ext.progress._SECONDS", 0)
    told: list[int] = []

    def show(done, total):
        assert total == 37
        told.append(done)

    jax.block_until_ready(chunked_vmap(halvings, 2, lockstep=False, progress=show)(X))
    assert told[0] == 0
    assert told[-1] == 37
    assert told == sorted(told)
    assert len(set(told)) > 3


@pytest.mark.parametrize(("kept", "lanes"), [(1, 2**16), (33, 2**15), (10**7, 2**12)])
def test_the_more_a_lane_keeps_the_fewer_there_are(kept, lanes):
    def kernel(x):
        return lax.while_loop(lambda v: v[0] > 1, lambda v: v / 2, jnp.full(kept, x))

    mapped = auto_vmap(0, lockstep=False)(kernel)
    assert mapped.plan(jax.ShapeDtypeStruct((10**6,), jnp.float32)).lanes == lanes
