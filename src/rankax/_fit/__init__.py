# SPDX-License-Identifier: MIT
"""Fit: choose the chunk that keeps to a memory limit (`memory`) and the tile for a CPU (`cpu`)."""
