# SPDX-License-Identifier: MIT
"""Scan: loops that carry a state and store less than `jax.lax.scan`."""
