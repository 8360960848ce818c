# SPDX-License-Identifier: MIT
"""Fit: a program and a limit -> a chunk; a program and a processor -> a tile."""
