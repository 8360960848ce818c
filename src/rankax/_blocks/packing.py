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

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Packing:
    """The shape and dtype of one item of each array, in their order."""

    items: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, avals: Sequence[Any], batch: int = 0) -> Packing:
        """Return the layout of arrays whose first ``batch`` axes are batch axes."""
        return cls(tuple(jax.ShapeDtypeStruct(x.shape[batch:], np.dtype(x.dtype)) for x in avals))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of one item of each array."""
        return tuple(math.prod(item.shape) * item.dtype.itemsize for item in self.items)

    def batch_shape(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """Return the batch axes of these arrays."""
        return arrays[0].shape[: arrays[0].ndim - len(self.items[0].shape)]

    def packed(self, arrays: Sequence[Any]) -> Array:
        """Return the bytes of arrays along a new last axis, after their batch axes."""
        batch = self.batch_shape(arrays)
        rows = [
            np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(*batch, size)
            for x, size in zip(arrays, self.sizes, strict=True)
        ]
        return np.concatenate(rows, axis=-1)

    def unpacked(self, packed: Array) -> list[Array]:
        """Return the arrays that `packed` was given."""
        parts = np.split(packed, np.cumsum(self.sizes)[:-1], axis=-1)
        return [
            np.ascontiguousarray(x)
            .reshape(-1)
            .view(item.dtype)
            .reshape(packed.shape[:-1] + item.shape)
            for x, item in zip(parts, self.items, strict=True)
        ]
