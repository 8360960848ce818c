# SPDX-License-Identifier: MIT
"""Arrays of cubed, on whatever executor they are computed.

Each operation says what memory it needs, by which cubed holds every task to its ``allowed_mem``:
besides the blocks themselves, which cubed counts, the copies of them that JAX makes, and the
``memory_limit`` of the kernel.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax._blocks.backend import Chunks, Input, block_indices, gufunc_signature
from rankax._blocks.packing import Packing
from rankax._blocks.programs import OnBlocks, Unpack

__all__ = ["BACKEND"]

# Not by `import`, for a type checker need not have it.
cubed: Any = importlib.import_module("cubed")
# Where `cubed.apply_gufunc` is made of; cubed has no other way to a block of another length.
_ops: Any = importlib.import_module("cubed.core.ops")

_MOST_IN_PLAN = 10**6  # bytes


class _Cubed:
    cuts_freely = False
    packs = True

    def cut(self, value: Any, chunks: Chunks, like: Any) -> Any:
        if isinstance(value, cubed.Array):
            return value
        # The first is held in the plan, and takes a megabyte at most; the second is read in steps.
        hold = cubed.asarray if value.nbytes <= _MOST_IN_PLAN else cubed.from_array
        return hold(value, chunks=tuple(own[0] for own in chunks), spec=like.spec)

    def map(
        self, fun: OnBlocks, inputs: Sequence[Input], layout: Packing, chunks: Chunks
    ) -> list[Any]:
        batch = math.prod(max(own) for own in chunks)
        copies = sum(given.array.chunkmem for given in inputs) + batch * sum(layout.sizes)
        needs = copies + fun.limit
        if len(layout.dtypes) == 1:
            return [_gufunc(fun, inputs, layout, needs)]
        # It has one output only, which is stored, so that each block is evaluated once.
        whole = Packing(((sum(layout.sizes),),), (np.dtype(np.uint8),))
        packed = _gufunc(fun, inputs, whole, needs)
        given = [Input(packed, len(chunks), whole.shapes[0])]
        return [
            _gufunc(
                Unpack(layout, number),
                given,
                Packing((shape,), (dtype,)),
                batch * 2 * layout.sizes[number],
            )
            for number, (shape, dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True))
        ]

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
        count = len(chunks)
        indices = [
            cubed.arange(sum(chunks[axis]), chunks=(chunks[axis][0],), spec=like.spec)
            for axis in axes
        ]
        fun, inputs = _core_axes_first(state, inputs, len(axes))
        names = block_indices(inputs, count)
        last = 1 + max((name for own in names for name in own), default=count)
        pairs = [*zip([given.array for given in inputs], names, strict=True)]
        pairs += [(index, (axis,)) for index, axis in zip(indices, axes, strict=True)]
        kept = math.prod(max(own) for axis, own in enumerate(chunks) if axis not in axes)
        copies = sum(array.chunkmem for array, _ in pairs) + 2 * kept * size
        states = _ops.blockwise(
            fun,
            (*range(count), last),
            *(value for pair in pairs for value in pair),
            adjust_chunks=dict.fromkeys(axes, 1),
            new_axes={last: size},
            dtype=np.dtype(np.uint8),
            extra_projected_mem=copies + state.limit,
        )
        return _ops.reduction(
            states,
            None,
            combine_func=merge,
            axis=axes,
            intermediate_dtype=np.dtype(np.uint8),
            dtype=np.dtype(np.uint8),
        )


def _gufunc(fun: Any, inputs: Sequence[Input], layout: Packing, needs: int) -> Any:
    fun, inputs = _core_axes_first(fun, inputs)
    signature, sizes = gufunc_signature(inputs, layout)
    return cubed.apply_gufunc(
        fun,
        signature,
        *(given.array for given in inputs),
        output_dtypes=layout.dtypes[0],
        output_sizes=sizes,
        extra_projected_mem=needs,
    )


@dataclasses.dataclass(frozen=True)
class _Reordered:
    """A function of blocks that come in another order."""

    fun: Any
    order: tuple[int, ...]  # where each block belongs

    def __call__(self, *blocks: Any, **given: Any) -> Any:
        ordered = list(blocks)
        for place, block in zip(self.order, blocks, strict=True):
            ordered[place] = block
        return self.fun(*ordered, **given)


def _core_axes_first(
    fun: Any, inputs: Sequence[Input], more: int = 0
) -> tuple[Any, Sequence[Input]]:
    """Let an array with core axes come first; ``more`` arrays come behind the inputs.

    cubed 0.27 unwraps blocks along axes that the output lacks only where the first has such axes.
    """
    order = sorted(range(len(inputs)), key=lambda i: not inputs[i].core)
    behind = range(len(inputs), len(inputs) + more)
    return _Reordered(fun, (*order, *behind)), [inputs[i] for i in order]


BACKEND = _Cubed()
