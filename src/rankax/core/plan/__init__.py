# SPDX-License-Identifier: MIT
"""Plan: ranks and shapes -> what one call does. No array is touched, and JAX is not imported."""
