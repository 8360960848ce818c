# SPDX-License-Identifier: MIT
"""Trace: a kernel -> the program of one item, and its derivatives."""
