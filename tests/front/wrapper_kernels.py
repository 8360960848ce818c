# SPDX-License-Identifier: MIT
"""Decorated kernels at module level, which pickle finds by name."""

import jax.numpy as jnp

from rankax import auto_vmap


@auto_vmap(0, 1)
def plain(s, v):
    """Scale the sum."""
    return s * jnp.sum(v)


@auto_vmap(0, 1, jit=True)
def jitted(s, v):
    return s * jnp.sum(v)


class Body:
    def __init__(self, mass):
        self.mass = mass

    @auto_vmap(x=1, chunk_size=2)
    def pull(self, x):
        """Pull towards the origin."""
        return -self.mass * x / jnp.dot(x, x)

    @auto_vmap(x=1)
    @classmethod
    def unit(cls, x):
        return x * cls.__name__.count("o")

    @auto_vmap(1)
    @staticmethod
    def norm(x):
        return jnp.dot(x, x)

    @classmethod
    @auto_vmap(x=1)
    def total(cls, x):
        return jnp.sum(x) * len(cls.__name__)

    @staticmethod
    @auto_vmap(1)
    def largest(x):
        return jnp.max(x)


class Comet(Body):
    @auto_vmap(x=1)
    def pull(self, x):
        return super().pull(x) + x

    @auto_vmap(x=1)
    @classmethod
    def unit(cls, x):
        return super().unit(x) + 1.0
