# SPDX-License-Identifier: MIT
"""The simulation in ``examples/chain.py``: its physics, its memory, and what it prints."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

import chain
from helpers import assert_same, temporary_bytes


@pytest.fixture(autouse=True)
def _x64():
    """What ``chain.main`` switches on for itself, switched off again."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_every_kept_state_is_the_plain_scans():
    state = chain.initial_state()
    got = jax.jit(functools.partial(chain.run, steps=103, keep=10))(state)
    assert_same(got, chain.run_and_slice(state, steps=103, keep=10), rtol=1e-12, atol=1e-14)


def test_force_is_the_gradient_of_the_energy():
    q, p = jnp.sin(jnp.arange(32.0) ** 2), jnp.cos(jnp.arange(32.0))
    slope = jax.grad(chain.energy)((q, p))
    assert_same((-chain.force(q), p), slope)


def test_modes_are_those_of_the_harmonic_chain():
    """Their energies add up to that of the chain without its nonlinear term."""
    q, p = jnp.sin(jnp.arange(32.0) ** 2), jnp.cos(jnp.arange(32.0))
    harmonic = chain.energy((q, p)) - chain.ALPHA / 3 * jnp.sum(chain.stretches(q) ** 3)
    np.testing.assert_allclose(chain.mode_energies((q, p)).sum(), harmonic, rtol=1e-12)
    start = chain.mode_energies(chain.initial_state())
    np.testing.assert_allclose(start[1:], 0, atol=1e-15 * start[0] + 1e-20)


@pytest.mark.optimized
def test_full_size_needs_a_thousandth_of_the_memory():
    state = chain.initial_state()
    plain = functools.partial(chain.final_energy, scan=chain.run_and_slice)
    assert temporary_bytes(chain.run_and_slice, state) > 100e6
    assert temporary_bytes(chain.run, state) < 0.1e6
    checkpointed = functools.partial(
        chain.final_energy, scan=functools.partial(chain.run, checkpoint=True)
    )
    assert temporary_bytes(jax.grad(plain), state) > 100e6
    assert temporary_bytes(jax.grad(checkpointed), state) < 1e6


@pytest.mark.weekly
def test_main_prints_and_draws(tmp_path, capsys):
    chain.main(out=tmp_path, steps=4000, keep=100)
    printed = capsys.readouterr().out
    assert printed.startswith("temporaries (MB), 4000 steps, every 100th kept\n")
    error = float(re.search(r"gradient of the final energy: off by (\S+) of itself", printed)[1])
    assert 0 < error < 1e-2
    picture = imread(tmp_path / "chain.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 100  # colours
