# SPDX-License-Identifier: MIT
"""A kernel on arrays in blocks, which dask or cubed evaluate wherever they run."""
