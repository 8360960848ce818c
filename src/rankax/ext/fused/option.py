# SPDX-License-Identifier: MIT
"""The option ``fused``: whether a reduction is one kernel."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

from rankax.core.base.arrays import Target


def is_installed() -> bool:
    """Whether there is a Warp that JAX can call."""
    return importlib.util.find_spec("warp") is not None


def checked_fused(value: Any, site: str) -> bool | str:
    """Return the option, if Warp is there to do what it asks for."""
    if not isinstance(value, bool) and value != "auto":
        raise TypeError(f"{site}: fused must be True, False or 'auto', got {value!r}")
    if value is True and not is_installed():
        raise ImportError(
            f"{site}: fused=True needs NVIDIA Warp, which is not installed: pip install "
            "'rankax[warp]'; fused='auto' uses it where it is"
        )
    return value


def can_fuse(target: Target | None) -> bool:
    """Whether "auto" fuses what runs there: on a GPU, because Warp is slow on a CPU."""
    platform = target.platform if target else jax.default_backend()
    return platform in ("gpu", "cuda") and is_installed()
