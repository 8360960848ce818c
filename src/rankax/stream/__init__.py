# SPDX-License-Identifier: MIT
"""Kernels on data larger than memory; needs the extra ``stream``."""

import importlib.util

if not all(map(importlib.util.find_spec, ("filelock", "tqdm", "zarr"))):
    raise ImportError("rankax.stream needs filelock, tqdm and zarr: pip install filelock tqdm zarr")

from rankax.stream._run import run as run

__all__ = ["run"]

run.__module__ = __name__
