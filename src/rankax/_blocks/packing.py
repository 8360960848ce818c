# SPDX-License-Identifier: MIT
"""Several arrays of one batch as one array of bytes, which any store and any scheduler takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

__all__ = ["Packing"]

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Packing:
    """The shapes and dtypes of what one item has, one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes each array has."""
        both = zip(self.shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in both)

    def items(self) -> list[jax.ShapeDtypeStruct]:
        """Return what stands for one item of each array."""
        both = zip(self.shapes, self.dtypes, strict=True)
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in both]

    def packed(self, arrays: Sequence[Any], batch: tuple[int, ...]) -> Array:
        """Return the bytes of arrays that all have ``batch`` in front, on a last axis."""
        rows = [
            np.ascontiguousarray(x).reshape(math.prod(batch), -1).view(np.uint8)
            if size
            else np.empty((math.prod(batch), 0), np.uint8)
            for x, size in zip(arrays, self.sizes, strict=True)
        ]
        return np.concatenate(rows, axis=1).reshape(*batch, sum(self.sizes))

    def unpacked(self, packed: Array) -> list[Array]:
        """Return the arrays again."""
        batch = packed.shape[:-1]
        arrays: list[Array] = []
        start = 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self.sizes, strict=True):
            own = np.ascontiguousarray(packed[..., start : start + size])
            arrays.append(own.reshape(-1).view(dtype).reshape(batch + shape))
            start += size
        return arrays
