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


def gaussian_likelihood(points: jax.Array) -> jax.Array:
    """Factor the covariance of a Gaussian process: library calls, which no compiler fuses."""
    separation = points[:, None] - points[None]
    covariance = jnp.exp(-jnp.sum(separation**2, axis=-1)) + 0.1 * jnp.eye(len(points))
    factor = jnp.linalg.cholesky(covariance)
    white = lax.linalg.triangular_solve(factor, points, left_side=True, lower=True)
    return jnp.sum(white**2) / 2 + jnp.sum(jnp.log(jnp.diagonal(factor)))


def pendulum(state: jax.Array) -> jax.Array:
    """Integrate a damped pendulum for 64 steps: a loop inside the item."""

    def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, jax.Array]:
        angle, speed = carry
        speed = speed - 0.05 * (jnp.sin(angle) + 0.1 * speed)
        angle = angle + 0.05 * speed
        return (angle, speed), angle**2

    return jnp.sum(lax.scan(step, (state[0], state[1]), None, length=64)[1])


PAIRS = Kernel("pairwise distances", pairwise_distances, (8, 3), "(n,d)->()")
CHOLESKY = Kernel("Cholesky 8x8", gaussian_likelihood, (8, 3), "(n,d)->()")
SCAN = Kernel("scan of 64 steps", pendulum, (2,), "(n)->()")
