# SPDX-License-Identifier: MIT
"""Kernels on arrays with named dimensions; needs the extra ``xarray``."""

import importlib.util

if importlib.util.find_spec("xarray") is None:
    raise ImportError("rankax.xarray needs xarray, which is not installed: pip install xarray")

from rankax.xarray._apply import apply as apply

__all__ = ["apply"]

apply.__module__ = __name__
