# SPDX-License-Identifier: MIT
"""Reduce: what reductions are, how a row of items is folded, and how partial states merge."""
