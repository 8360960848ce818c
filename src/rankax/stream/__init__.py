# SPDX-License-Identifier: MIT
"""Kernels on data larger than memory: ``pip install "rankax[stream]"``."""

import importlib.util

if not (importlib.util.find_spec("zarr") and importlib.util.find_spec("tqdm")):
    raise ImportError('rankax.stream needs zarr and tqdm: pip install "rankax[stream]"')

from rankax.stream._run import run as run

__all__ = ["run"]

run.__module__ = __name__
