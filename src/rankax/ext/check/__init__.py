# SPDX-License-Identifier: MIT
"""Check: sample items, and compare them with plain JAX."""
