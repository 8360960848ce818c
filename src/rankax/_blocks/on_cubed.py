# SPDX-License-Identifier: MIT
"""Cubed arrays, on any executor.

Cubed holds every task to its ``allowed_mem``, so each operation states the memory that it needs.
Besides the blocks themselves, which cubed counts, these are the copies of them that JAX makes and
the ``memory_limit`` of the kernel.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import jax
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

# Imported by name because a type checker need not have cubed installed.
cubed: Any = importlib.import_module("cubed")
# What `cubed.apply_gufunc` is built on; cubed has no public way to change the length of a block.
_ops: Any = importlib.import_module("cubed.core.ops")

_MOST_IN_PLAN = 10**6  # bytes; `cubed.asarray` accepts no more
_BYTES = np.dtype(np.uint8)


class _Cubed:
    can_rechunk = False

    def cut(self, value: Any, chunks: BatchChunks, like: Any) -> Any:
        if isinstance(value, cubed.Array):
            return value
        # `asarray` holds the array in the plan; `from_array` reads it in the tasks.
        convert = cubed.asarray if value.nbytes <= _MOST_IN_PLAN else cubed.from_array
        return convert(value, chunks=tuple(lengths[0] for lengths in chunks), spec=like.spec)

    def map(self, fun: OnBlocks, batch: Batch, layout: Packing) -> list[Any]:
        items = math.prod(max(lengths) for lengths in batch.chunks)
        copies = sum(i.array.chunkmem for i in batch.inputs) + items * sum(layout.sizes)
        if len(layout.items) == 1:
            return [_gufunc(fun, batch.inputs, layout, copies + fun.limit)]
        # An operation has one output. The packed outputs are stored, so that each block is
        # evaluated once.
        item = jax.ShapeDtypeStruct((sum(layout.sizes),), _BYTES)
        pack = functools.partial(_packed, fun, layout)
        array = _gufunc(pack, batch.inputs, Packing((item,)), copies + fun.limit)
        packed = [Input(array, tuple(range(len(batch.chunks))), item.shape)]
        outs: list[Any] = []
        for n, (out, size) in enumerate(zip(layout.items, layout.sizes, strict=True)):
            unpack = functools.partial(_unpacked, layout, n)
            outs.append(_gufunc(unpack, packed, Packing((out,)), items * 2 * size))
        return outs

    def reduce(self, reduction: BlockReduction, batch: Batch) -> Any:
        state, merge, axes, size = reduction
        chunks, spec = batch.chunks, batch.inputs[0].array.spec
        indices = [
            cubed.arange(sum(chunks[axis]), chunks=(chunks[axis][0],), spec=spec) for axis in axes
        ]
        inputs = [Input(array, (axis,), ()) for array, axis in zip(indices, axes, strict=True)]
        fun, inputs = _core_axes_first(state, [*batch.inputs, *inputs])
        arguments, bytes_axis = blockwise_arguments(Batch(inputs, chunks))
        kept = math.prod(max(lengths) for axis, lengths in enumerate(chunks) if axis not in axes)
        copies = sum(array.chunkmem for array in arguments[::2]) + 2 * kept * size
        states = _ops.blockwise(
            fun,
            (*range(len(chunks)), bytes_axis),
            *arguments,
            adjust_chunks=dict.fromkeys(axes, 1),
            new_axes={bytes_axis: size},
            dtype=_BYTES,
            extra_projected_mem=copies + state.limit,
        )
        dtypes = {"intermediate_dtype": _BYTES, "dtype": _BYTES}
        return _ops.reduction(states, None, combine_func=merge, axis=axes, **dtypes)


def _gufunc(fun: Any, inputs: Sequence[Input], layout: Packing, memory: int) -> Any:
    fun, inputs = _core_axes_first(fun, inputs)
    signature, sizes = gufunc_signature(inputs, layout)
    return cubed.apply_gufunc(
        fun,
        signature,
        *(i.array for i in inputs),
        output_dtypes=layout.items[0].dtype,
        output_sizes=sizes,
        extra_projected_mem=memory,
    )


def _core_axes_first(fun: Any, inputs: Sequence[Input]) -> tuple[Any, Sequence[Input]]:
    """Put an array with core axes first.

    cubed 0.27 unwraps blocks along axes that the output lacks only if the first array has such
    axes.
    """
    order = sorted(range(len(inputs)), key=lambda i: not inputs[i].core)
    return functools.partial(_reordered, fun, tuple(order)), [inputs[i] for i in order]


def _reordered(fun: Any, order: tuple[int, ...], *blocks: Any, **options: Any) -> Any:
    """Call a function with blocks that arrive in another order than it takes them."""
    ordered = dict(zip(order, blocks, strict=True))
    return fun(*(ordered[i] for i in range(len(blocks))), **options)


def _packed(fun: OnBlocks, layout: Packing, *blocks: Any) -> Any:
    """Call a function of several outputs, and pack them into bytes."""
    return layout.packed(fun(*blocks))


def _unpacked(layout: Packing, number: int, packed: Any) -> Any:
    """Return one of the packed outputs."""
    return layout.unpacked(packed)[number]


BACKEND = _Cubed()
