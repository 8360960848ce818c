# SPDX-License-Identifier: MIT
"""Ragged: batches of items with different numbers of rows."""
