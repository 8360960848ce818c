# SPDX-License-Identifier: MIT
"""Kernels that the workers of test_clusters.py import."""

import jax.numpy as jnp

from rankax import auto_vmap


@auto_vmap(p="level", t="level")
def heat(p, t):
    """Return the mean potential temperature, and the profile."""
    theta = t * (1000 / p) ** 0.286
    return {"mean": jnp.trapezoid(theta, p) / (p[-1] - p[0]), "theta": theta}


@auto_vmap(p="level", t="level", reduce="argmax", chunk_size=16)
def hottest(p, t):
    """Return how warm a column is."""
    return jnp.sum(t * (1000 / p) ** 0.286)
