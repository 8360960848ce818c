# SPDX-License-Identifier: MIT
"""Calls: their arguments are bound here, and evaluated by `rankax.pipeline`."""
