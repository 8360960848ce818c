# SPDX-License-Identifier: MIT
"""Dask arrays, on any scheduler.

Maps use `apply_gufunc`; reductions use a state for each block (`blockwise`) and a tree of merges
(`da.reduction`).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from rankax._blocks.backend import (
    Batch,
    BatchChunks,
    BlockReduction,
    Input,
    blockwise_arguments,
    gufunc_signature,
)
from rankax._blocks.programs import OnBlocks, Packing

# Imported by name because a type checker need not have dask installed.
da: Any = importlib.import_module("dask.array")


class _Dask:
    can_rechunk = True

    def cut(self, value: Any, chunks: BatchChunks, like: Any) -> Any:
        del like
        if not isinstance(value, da.Array):
            return da.from_array(value, chunks=chunks)
        return value if value.chunks == chunks else value.rechunk(chunks)

    def map(self, fun: OnBlocks, batch: Batch, layout: Packing) -> list[Any]:
        signature, sizes = gufunc_signature(batch.inputs, layout)
        dtypes = [item.dtype for item in layout.items]
        outs = da.apply_gufunc(
            fun,
            signature,
            *(i.array for i in batch.inputs),
            output_dtypes=dtypes[0] if len(dtypes) == 1 else dtypes,
            output_sizes=sizes,
        )
        return [outs] if len(dtypes) == 1 else list(outs)

    def reduce(self, reduction: BlockReduction, batch: Batch) -> Any:
        state, merge, axes, size = reduction
        lengths = {axis: batch.chunks[axis] for axis in axes}
        indices = [
            Input(da.arange(sum(cuts), chunks=(cuts,)), (axis,), ())
            for axis, cuts in lengths.items()
        ]
        inputs = [*batch.inputs, *indices]
        arguments, bytes_axis = blockwise_arguments(Batch(inputs, batch.chunks))
        count = len(batch.chunks)
        states = da.blockwise(
            state,
            (*range(count), bytes_axis),
            *arguments,
            adjust_chunks={axis: (1,) * len(lengths[axis]) for axis in axes},
            new_axes={bytes_axis: size},
            concatenate=True,
            dtype=np.uint8,
            meta=np.empty((0,) * (count + 1), np.uint8),
        )
        meta = np.empty((0,) * (count + 1 - len(axes)), np.uint8)
        return da.reduction(states, _unchanged, merge, axis=axes, dtype=np.uint8, meta=meta)


def _unchanged(block: Any, **_: Any) -> Any:
    return block


BACKEND = _Dask()
