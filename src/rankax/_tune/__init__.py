# SPDX-License-Identifier: MIT
"""Tune: options are measured, and what was found is kept as a table."""
