# SPDX-License-Identifier: MIT
"""Blocks: calls with arrays of dask or cubed, evaluated block by block in any process."""
