# SPDX-License-Identifier: MIT
"""Arrays of dask, on whatever scheduler they are computed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax._blocks.backend import Chunks, Input, block_indices, gufunc_signature
from rankax._blocks.packing import Packing
from rankax._blocks.programs import OnBlocks

__all__ = ["BACKEND"]

# Not by `import`, for a type checker need not have it.
da: Any = importlib.import_module("dask.array")


class _Dask:
    cuts_freely = True
    packs = False

    def cut(self, value: Any, chunks: Chunks, like: Any) -> Any:
        del like
        if not isinstance(value, da.Array):
            return da.from_array(value, chunks=chunks)
        return value if value.chunks == chunks else value.rechunk(chunks)

    def map(
        self, fun: OnBlocks, inputs: Sequence[Input], layout: Packing, chunks: Chunks
    ) -> list[Any]:
        del chunks
        signature, sizes = gufunc_signature(inputs, layout)
        one = len(layout.dtypes) == 1
        found = da.apply_gufunc(
            fun,
            signature,
            *(given.array for given in inputs),
            output_dtypes=layout.dtypes[0] if one else list(layout.dtypes),
            output_sizes=sizes,
        )
        return [found] if one else list(found)

    def reduce(
        self,
        state: OnBlocks,
        merge: OnBlocks,
        inputs: Sequence[Input],
        axes: tuple[int, ...],
        size: int,
        chunks: Chunks,
        like: Any,
    ) -> Any:
        del like
        count = len(chunks)
        indices = [da.arange(sum(chunks[axis]), chunks=(chunks[axis],)) for axis in axes]
        names = block_indices(inputs, count)
        last = 1 + max((name for own in names for name in own), default=count)
        pairs = [*zip([given.array for given in inputs], names, strict=True)]
        pairs += [(index, (axis,)) for index, axis in zip(indices, axes, strict=True)]
        states = da.blockwise(
            state,
            (*range(count), last),
            *(value for pair in pairs for value in pair),
            adjust_chunks={axis: (1,) * len(chunks[axis]) for axis in axes},
            new_axes={last: size},
            concatenate=True,
            dtype=np.uint8,
            meta=np.empty((0,) * (count + 1), np.uint8),
        )
        return da.reduction(
            states,
            _as_it_is,
            merge,
            axis=axes,
            dtype=np.uint8,
            meta=np.empty((0,) * (count + 1 - len(axes)), np.uint8),
        )


def _as_it_is(block: Any, **_: Any) -> Any:
    return block


BACKEND = _Dask()
