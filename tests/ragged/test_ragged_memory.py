# SPDX-License-Identifier: MIT
"""What ragged calls need: the memory of a chunk, and no pass over all values in each step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import operations_on, temporary_bytes
from rankax import Mask, Ragged, auto_vmap

pytestmark = pytest.mark.optimized

LENGTHS = np.random.default_rng(0).integers(1, 9, 4000)
WEIGHTS = np.ones((3, 16), np.float32)


@auto_vmap(x="n 3", mask=Mask("n"), chunk_size=32)
def energy(x, mask):
    return jnp.sum(jnp.tanh(x @ WEIGHTS).sum(-1) ** 2, where=mask)


def arguments(count):
    lengths = LENGTHS[:count]
    values = jax.ShapeDtypeStruct((int(lengths.sum()), 3), jnp.float32)
    return values, lambda values: Ragged(values, lengths)


def test_memory_is_that_of_a_chunk():
    """It grows by the results, which the groups have before they are put in order."""
    needs = []
    for count in (1000, 4000):
        values, make = arguments(count)
        needs.append(temporary_bytes(lambda v, make=make: energy(make(v)), values))
    chunk = 32 * 8 * 16 * 4
    assert needs[1] - needs[0] < 3000 * 4 * 12
    assert needs[1] < 4 * chunk + 4000 * 4 * 12


def test_the_gradient_needs_one_cotangent_of_all_lengths():
    """Each length has the cotangent of its own items only; XLA joins some of them, with indices."""
    lengths = np.repeat([4, 16, 64, 400], [3000, 3000, 1000, 50])
    values = jax.ShapeDtypeStruct((int(lengths.sum()), 3), jnp.float32)
    kernel = energy.with_options(chunk_size=8)
    gradient = jax.grad(lambda v: kernel(Ragged(v, lengths)).sum())
    chunk = 8 * int(lengths.max()) * 16 * 4
    assert temporary_bytes(gradient, values) < 2 * chunk + 2.5 * values.size * 4


def test_the_gradient_adds_in_place():
    """Cotangents of the values are scattered into one array, and never added as a whole."""
    values, make = arguments(1000)
    gradient = jax.grad(lambda v: energy(make(v)).sum())
    found = operations_on(values.shape, gradient, values)
    assert found["scatter"] > 0
    assert found["add"] == 0
    assert found["select"] == 0
