# SPDX-License-Identifier: MIT
"""Trace: a kernel -> the program of one item, its derivatives, and its fingerprint."""
