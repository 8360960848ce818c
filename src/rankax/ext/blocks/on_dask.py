# SPDX-License-Identifier: MIT
"""Dask arrays, on any scheduler.

Maps use `apply_gufunc`; reductions use a state for each block (`blockwise`) and a tree of merges
(`da.reduction`).
"""

import functools
import importlib
from collections import ChainMap
from typing import Any

import jax
import numpy as np

from rankax.ext.blocks.backend import Batch, BatchChunks, blockwise_arguments
from rankax.ext.blocks.programs import Items, Program, record

# Imported by name because a type checker need not have dask installed.
da: Any = importlib.import_module("dask.array")

CAN_RECHUNK = True


def cut(value: Any, chunks: BatchChunks, like: Any) -> Any:
    del like
    return value.rechunk(chunks) if isinstance(value, da.Array) else da.from_array(value, chunks)


def positions(lengths: tuple[int, ...], like: Any) -> Any:
    del like
    return da.arange(sum(lengths), chunks=(lengths,))


def map_blocks(program: Program, batch: Batch, items: Items) -> list[Any]:
    ins = [_core_axes(f"i{n}", i.item) for n, i in enumerate(batch.inputs)]
    sizes = [_core_axes(f"o{n}", item) for n, item in enumerate(items)]
    sides = [",".join(f"({','.join(names)})" for names in side) for side in (ins, sizes)]
    dtypes = [item.dtype for item in items]
    outs = da.apply_gufunc(
        functools.partial(program, *batch.numbers),
        "->".join(sides),
        *(i.array for i in batch.inputs),
        output_dtypes=dtypes[0] if len(dtypes) == 1 else dtypes,
        output_sizes=dict(ChainMap(*sizes)),
    )
    return [outs] if len(dtypes) == 1 else list(outs)


def reduce_blocks(state: Program, merge: Program, batch: Batch, axes: tuple[int, ...]) -> Any:
    arguments, bytes_axis = blockwise_arguments(batch)
    count = len(batch.chunks)
    states = da.blockwise(
        functools.partial(state, *batch.numbers),
        (*range(count), bytes_axis),
        *arguments,
        adjust_chunks={axis: (1,) * len(batch.chunks[axis]) for axis in axes},
        new_axes={bytes_axis: record(state.returns).itemsize},
        concatenate=True,
        dtype=np.uint8,
        meta=np.empty((0,) * (count + 1), np.uint8),
    )
    meta = np.empty((0,) * (count + 1 - len(axes)), np.uint8)
    named = {"name": merge.__name__, "dtype": np.uint8, "meta": meta}
    return da.reduction(states, _unchanged, merge.along, axis=axes, **named)


def _core_axes(name: str, item: jax.ShapeDtypeStruct) -> dict[str, int]:
    """Name each core axis differently: whether some agree has been checked before."""
    return {f"{name}_{axis}": size for axis, size in enumerate(item.shape)}


def _unchanged(block: Any, **_: Any) -> Any:
    return block
