# SPDX-License-Identifier: MIT
"""Reductions: those that `reduce` knows by name, and others."""
