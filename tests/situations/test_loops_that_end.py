# SPDX-License-Identifier: MIT
"""Reported elsewhere: loops and branches that take longer for some items than for others."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from helpers import assert_same
from plain import item_by_item
from rankax import auto_vmap, chunked_vmap


def decay(rate):
    """Solve y' = -rate * y from 0 to 1, by steps of Heun's method that fit a tolerance."""

    def step(state):
        y, time, length, count = state
        length = jnp.minimum(length, 1 - time)
        first = -rate * y
        second = -rate * (y + length * first)
        error = jnp.abs(length / 2 * (second - first)) * 1e4 + 1e-6
        fits = error < 1
        y = jnp.where(fits, y + length / 2 * (first + second), y)
        time = jnp.where(fits, time + length, time)
        return y, time, length * jnp.clip(0.9 / jnp.sqrt(error), 0.2, 5.0), count + 1

    start = jnp.ones_like(rate), jnp.zeros_like(rate), 0.1 * jnp.ones_like(rate), 0
    y, _, _, count = lax.while_loop(lambda state: (state[1] < 1) & (state[3] < 500), step, start)
    return {"y": y, "steps": count}


RATES = jnp.asarray([0.1, 30.0, 1.0, 0.3, 4.0, 0.1, 60.0, 2.0, 0.5])


def test_an_ode_with_steps_of_its_own_for_each_item():
    """patrick-kidger/diffrax#500, jax-ml/jax#2586: each takes the steps that it takes alone."""
    want = item_by_item(decay, [0], RATES)
    assert int(jnp.max(want["steps"])) > 5 * int(jnp.min(want["steps"]))
    got = jax.jit(auto_vmap(0, lockstep=False, chunk_size=4)(decay))(RATES)
    assert_same(got, want, rtol=1e-4)


def evaluations(mapped, kernel, *args):
    """Return the result of a mapped kernel, and for how many items its body was evaluated."""
    seen = []
    got = jax.block_until_ready(jax.jit(mapped(kernel(seen.append)))(*args))
    jax.effects_barrier()
    return got, len(seen)


def test_no_item_waits_for_the_slowest():
    """jax-ml/jax#485: with `jax.vmap`, all items run as long as the slowest."""

    def counter(report):
        def count(n):
            def step(i):
                jax.debug.callback(report, i)
                return i + 1

            return lax.while_loop(lambda i: i < n, step, 0)

        return count

    lengths = jnp.asarray([1, 2, 50, 3, 1, 2, 4, 1])
    got, together = evaluations(jax.vmap, counter, lengths)
    assert_same(got, lengths)
    assert together == 8 * 50
    got, apart = evaluations(lambda fun: chunked_vmap(fun, 2, lockstep=False), counter, lengths)
    assert_same(got, lengths)
    assert apart < 3 * 50


def test_an_expensive_branch_runs_only_where_it_is_taken():
    """jax-ml/jax#8409: `jax.vmap` evaluates both branches for every item."""
    matrix = jnp.eye(64) / 2

    def repair(report):
        def expensive(x):
            def step(_, v):
                jax.debug.callback(report, v[0])
                return matrix @ v

            return lax.fori_loop(0, 4, step, jnp.full(64, x))

        return lambda x: lax.cond(x > 6, expensive, lambda x: jnp.full(64, x), x)

    x = jnp.arange(8.0)
    want, everywhere = evaluations(jax.vmap, repair, x)
    assert everywhere == 4 * 8
    got, once = evaluations(lambda fun: chunked_vmap(fun, 2, lockstep=False), repair, x)
    assert_same(got, want)
    assert once <= 4 * 2


def test_the_gradient_of_a_loop_that_ends_by_itself():
    """google-research/ott#7, google-deepmind/mujoco#1207: `while_loop` has no reverse mode."""

    def grown(x):
        return lax.while_loop(lambda y: y < 10, lambda y: y * (1 + x / 4), x)

    def slope(x):  # by hand: x * (1 + x / 4) ** n
        n = jnp.log(grown(x) / x) / jnp.log1p(x / 4)
        return grown(x) / x + grown(x) * n / 4 / (1 + x / 4)

    x = jnp.asarray([0.9, 2.2, 11.0, 1.3, 4.0])
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: jnp.sum(jax.vmap(grown)(x)))(x)
    kernel = auto_vmap(0, lockstep=False, chunk_size=2, jit=True)(grown)
    assert_same(kernel(x), item_by_item(grown, [0], x))
    assert_same(jax.grad(lambda x: jnp.sum(kernel(x)))(x), item_by_item(slope, [0], x), rtol=1e-4)
