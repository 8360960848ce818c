# SPDX-License-Identifier: MIT
"""Several arrays over one batch as a single array of bytes, for any store and any scheduler.

The states of a reduction travel as bytes too. A reduction has states of many kinds, some with
indices, some with user-defined trees. Cubed stores one array for each operation, and its
``apply_gufunc`` has one output; every scheduler, store and tree reduction takes an array of bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

__all__ = ["Packing", "layout_of"]

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Packing:
    """The shape and dtype of one item of each array, in their order."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of one item of each array."""
        both = zip(self.shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in both)

    def items(self) -> list[jax.ShapeDtypeStruct]:
        """Return one item of each array, as shape and dtype."""
        return [jax.ShapeDtypeStruct(*both) for both in zip(self.shapes, self.dtypes, strict=True)]

    def packed(self, arrays: Sequence[Any], batch: tuple[int, ...]) -> Array:
        """Return the bytes of arrays with the batch axes ``batch``, along a new last axis."""
        rows = [
            np.ascontiguousarray(x).reshape(math.prod(batch), -1).view(np.uint8)
            if size
            else np.empty((math.prod(batch), 0), np.uint8)
            for x, size in zip(arrays, self.sizes, strict=True)
        ]
        return np.concatenate(rows, axis=1).reshape(*batch, sum(self.sizes))

    def unpacked(self, packed: Array) -> list[Array]:
        """Return the arrays that `packed` was given."""
        batch = packed.shape[:-1]
        arrays: list[Array] = []
        start = 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self.sizes, strict=True):
            block = np.ascontiguousarray(packed[..., start : start + size])
            arrays.append(block.reshape(-1).view(dtype).reshape(batch + shape))
            start += size
        return arrays


def layout_of(avals: Sequence[Any], batch: int = 0) -> Packing:
    """Return the layout of arrays whose first ``batch`` axes are batch axes."""
    shapes = tuple(tuple(aval.shape[batch:]) for aval in avals)
    return Packing(shapes, tuple(np.dtype(aval.dtype) for aval in avals))
