# SPDX-License-Identifier: MIT
"""Cubed arrays, on any executor.

Cubed holds every task to its ``allowed_mem``, so each operation states the memory that it needs.
Besides the blocks themselves, which cubed counts, these are the copies of them that JAX makes and
the ``memory_limit`` of the kernel.
"""

import functools
import importlib
import math
from typing import Any

import jax
import numpy as np

from rankax.ext.blocks.backend import Batch, BatchChunks, Input, blockwise_arguments
from rankax.ext.blocks.programs import Items, OnBlocks, packed, record, unpacked

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

    def map(self, fun: OnBlocks, batch: Batch, items: Items) -> list[Any]:
        count = math.prod(map(max, batch.chunks))
        memory = _copies(batch) + count * record(items).itemsize + fun.limit
        if len(items) == 1:
            return [_blockwise(fun, batch, items[0], memory)]
        # An operation has one output. The packed outputs are stored, so that each block is
        # evaluated once.
        item = jax.ShapeDtypeStruct((record(items).itemsize,), _BYTES)
        array = _blockwise(functools.partial(_packed, fun, items), batch, item, memory)
        whole = Batch([Input(array, tuple(range(len(batch.chunks))), item)], batch.chunks)
        outs: list[Any] = []
        for n, out in enumerate(items):
            unpack = functools.partial(_unpacked, items, n)
            outs.append(_blockwise(unpack, whole, out, count * 2 * record([out]).itemsize))
        return outs

    def positions(self, lengths: tuple[int, ...], like: Any) -> Any:
        return cubed.arange(sum(lengths), chunks=lengths[:1], spec=like.spec)

    def reduce(self, state: OnBlocks, merge: OnBlocks, batch: Batch, axes: tuple[int, ...]) -> Any:
        kept = math.prod(max(n) for axis, n in enumerate(batch.chunks) if axis not in axes)
        item = jax.ShapeDtypeStruct((record(state.program.items).itemsize,), _BYTES)
        memory = _copies(batch) + 2 * kept * item.shape[0] + state.limit
        states = _blockwise(state, batch, item, memory, axes)
        dtypes = {"intermediate_dtype": _BYTES, "dtype": _BYTES}
        return _ops.reduction(states, None, combine_func=merge, axis=axes, **dtypes)


def _copies(batch: Batch) -> int:
    """Return the bytes of one block of each input."""
    return sum(i.array.chunkmem for i in batch.inputs)


def _blockwise(
    fun: Any, batch: Batch, item: jax.ShapeDtypeStruct, memory: int, reduced: tuple[int, ...] = ()
) -> Any:
    arguments, unused = blockwise_arguments(batch)
    core = dict(enumerate(item.shape, unused))
    return _ops.blockwise(
        fun,
        (*range(len(batch.chunks)), *core),
        *arguments,
        adjust_chunks=dict.fromkeys(reduced, 1),
        new_axes=core,
        dtype=item.dtype,
        extra_projected_mem=memory,
    )


def _packed(fun: OnBlocks, items: Items, *blocks: Any) -> Any:
    """Call a function of several outputs, and pack them into bytes."""
    return packed(items, fun(*blocks))


def _unpacked(items: Items, number: int, data: Any) -> Any:
    """Return one of the packed outputs."""
    return unpacked(items, data)[number]


BACKEND = _Cubed()
