# SPDX-License-Identifier: MIT
"""Fit: choose a chunk size within a memory limit (`memory`), and a fast tile on a CPU (`cpu`)."""
