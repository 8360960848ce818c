# SPDX-License-Identifier: MIT
"""Three kernels of different character, each for one item, and inputs to map them over."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Kernel(NamedTuple):
    """A function of one item, and the shape of that item."""

    name: str
    fun: Callable[[jax.Array], jax.Array]
    item_shape: tuple[int, ...]
    signature: str  # for `jnp.vectorize`

    def inputs(self, length: int) -> jax.Array:
        """Draw ``length`` items, always the same ones."""
        rng = np.random.default_rng(0)
        return jnp.asarray(rng.normal(size=(length, *self.item_shape)), jnp.float32)

    def shape(self, length: int) -> Any:
        """Describe ``length`` items without drawing them."""
        return jax.ShapeDtypeStruct((length, *self.item_shape), jnp.float32)


def pairwise_distances(points: jax.Array) -> jax.Array:
    """Sum the distances of all pairs of points: elementwise work, which a compiler fuses."""
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


def spectrum(points: jax.Array) -> jax.Array:
    """Diagonalise the kernel matrix of the points: library calls, which no compiler fuses."""
    separation = points[:, None] - points[None]
    # Levels apart on the diagonal, for eigenvectors of equal ones have no derivative.
    weights = jnp.exp(-jnp.sum(separation**2, axis=-1)) + jnp.diag(jnp.arange(1.0, 1 + len(points)))
    levels, modes = jnp.linalg.eigh(weights)
    return jnp.sum(jnp.sqrt(levels)) + jnp.sum(modes[:, -1] ** 4)


def pendulum(state: jax.Array) -> jax.Array:
    """Integrate a damped pendulum for 64 steps: a loop inside the item."""

    def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, jax.Array]:
        angle, speed = carry
        speed = speed - 0.05 * (jnp.sin(angle) + 0.1 * speed)
        angle = angle + 0.05 * speed
        return (angle, speed), angle**2

    return jnp.sum(lax.scan(step, (state[0], state[1]), None, length=64)[1])


PAIRS = Kernel("pairwise distances", pairwise_distances, (8, 3), "(n,d)->()")
EIGH = Kernel("eigh 8x8", spectrum, (8, 3), "(n,d)->()")
SCAN = Kernel("scan of 64 steps", pendulum, (2,), "(n)->()")
