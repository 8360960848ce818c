# SPDX-License-Identifier: MIT
"""Kernels on data larger than memory: ``pip install "rankax[stream]"``."""

import importlib.util

missing = [name for name in ("filelock", "tqdm", "zarr") if not importlib.util.find_spec(name)]
if missing:
    raise ImportError(f'rankax.stream needs {", ".join(missing)}: pip install "rankax[stream]"')

from rankax.stream._run import run as run

__all__ = ["run"]

run.__module__ = __name__
