# SPDX-License-Identifier: MIT
"""Which dtypes of other packages JAX can compute with, without losing digits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def checked_dtype(dtype: Any, subject: str, path: str) -> Any:
    """Return a dtype in native byte order, or say why JAX cannot compute with it.

    JAX narrows the arrays that it is given, and so does a call with arrays of JAX or NumPy. An
    array in blocks holds data from a store, and nothing would show that its digits are cut off.

    Parameters
    ----------
    dtype : dtype
    subject : str
        How an error message begins: what arrived where.
    path : str
        The array, as the caller knows it.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "OSTUMm" or dtype.type is np.void:
        raise TypeError(
            f"{subject} of dtype {dtype}, which JAX does not support; convert it to numbers"
        )
    native = dtype.newbyteorder("=")
    narrow = jax.dtypes.canonicalize_dtype(native)
    if narrow != native:
        raise TypeError(
            f"{subject} of dtype {native}, but JAX computes with {narrow} by default, which would "
            'silently lose digits; call jax.config.update("jax_enable_x64", True) first, or '
            f"convert {path} to {narrow}"
        )
    return native


def in_native_order(array: Any) -> Any:
    """Return a NumPy array in the byte order of this machine, which JAX requires."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
