# SPDX-License-Identifier: MIT
"""Dask arrays, on any scheduler."""

import functools
import importlib
from typing import Any

import jax
import numpy as np

from rankax.ext.blocks.backend import Batch, BatchChunks, blockwise, map_packed
from rankax.ext.blocks.programs import Program, packed_item

# Imported by name because a type checker need not have dask installed.
da: Any = importlib.import_module("dask.array")

CAN_RECHUNK = True


def cut(value: Any, chunks: BatchChunks, like: Any) -> Any:
    del like
    return value.rechunk(chunks) if isinstance(value, da.Array) else da.from_array(value, chunks)


def positions(lengths: tuple[int, ...], like: Any) -> Any:
    del like
    return da.arange(sum(lengths), chunks=(lengths,))


def reduce_blocks(state: Program, merge: Program, batch: Batch, axes: tuple[int, ...]) -> Any:
    states = _blockwise(state, batch, packed_item(state.returns), axes)
    meta = np.empty((0,) * (states.ndim - len(axes)), states.dtype)
    named = {"name": merge.__name__, "dtype": states.dtype, "meta": meta}
    return da.reduction(states, _unchanged, merge.along, axis=axes, **named)


def _blockwise(fun: Any, batch: Batch, item: jax.ShapeDtypeStruct, reduced: Any = ()) -> Any:
    meta = np.empty((0,) * (len(batch.chunks) + len(item.shape)), item.dtype)
    return blockwise(da.blockwise, fun, batch, item, reduced, concatenate=True, meta=meta)


map_blocks = functools.partial(map_packed, _blockwise)


def _unchanged(block: Any, **_: Any) -> Any:
    return block
