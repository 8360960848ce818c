# SPDX-License-Identifier: MIT
"""Which dtypes JAX can take from another package without a loss."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["checked_dtype", "in_native_order"]


def checked_dtype(dtype: Any, came: str, path: str) -> Any:
    """Return a dtype in native byte order, or say why JAX cannot compute with it.

    An array of JAX or NumPy that a call is given may be narrowed, as JAX always does. One in blocks
    is data from a store, and nobody would see that its digits or its counts are cut off.

    Parameters
    ----------
    dtype : dtype
    came : str
        How an error begins: what came from where.
    path : str
        The array, as the caller knows it.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "OSTUMm" or dtype.type is np.void:
        raise TypeError(f"{came} of dtype {dtype}, which JAX has not; convert it to numbers")
    native = dtype.newbyteorder("=")
    narrow = jax.dtypes.canonicalize_dtype(native)
    if narrow != native:
        raise TypeError(
            f"{came} of dtype {native}, and JAX computes with {narrow} unless it is told "
            "otherwise, which would lose digits unseen; call jax.config.update("
            f'"jax_enable_x64", True) first, or pass {path}.astype("{narrow}")'
        )
    return native


def in_native_order(array: Any) -> Any:
    """Return an array of NumPy with its bytes in the order of this machine, as JAX wants them."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
