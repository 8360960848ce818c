# SPDX-License-Identifier: MIT
"""Cubed arrays, on any executor.

Cubed holds every task to its ``allowed_mem``, so each operation states the memory that it needs.
Besides the blocks themselves, which cubed counts, these are the copies of them that JAX makes and
the ``memory_limit`` of the kernel.
"""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import numpy as np

from rankax.ext.blocks.backend import Batch, BatchChunks, Input, blockwise_arguments
from rankax.ext.blocks.programs import Items, Program, kept, record, unpacked

# Imported by name because a type checker need not have cubed installed.
cubed: Any = importlib.import_module("cubed")
# What `cubed.apply_gufunc` is built on; cubed has no public way to change the length of a block.
_ops: Any = importlib.import_module("cubed.core.ops")

CAN_RECHUNK = False
_MOST_IN_PLAN = 10**6  # bytes; `cubed.asarray` accepts no more
_BYTES = np.dtype(np.uint8)


def cut(value: Any, chunks: BatchChunks, like: Any) -> Any:
    if isinstance(value, cubed.Array):
        return value
    # `asarray` holds the array in the plan; `from_array` reads it in the tasks.
    convert = cubed.asarray if value.nbytes <= _MOST_IN_PLAN else cubed.from_array
    return convert(value, chunks=tuple(lengths[0] for lengths in chunks), spec=like.spec)


def positions(lengths: tuple[int, ...], like: Any) -> Any:
    return cubed.arange(sum(lengths), chunks=lengths[:1], spec=like.spec)


def map_blocks(program: Program, batch: Batch, items: Items) -> list[Any]:
    count = math.prod(map(max, batch.chunks))
    memory = _memory(program, batch) + count * record(items).itemsize
    if len(items) == 1:
        return [_blockwise(program, batch, items[0], memory)]
    # An operation has one output. The packed outputs are stored, so that each block is
    # evaluated once.
    item = _packed_item(items)
    array = _blockwise(kept(dataclasses.replace(program, returns=items)), batch, item, memory)
    whole = Batch((), [Input(array, tuple(range(len(batch.chunks))), item)], batch.chunks)
    return [
        _blockwise(
            functools.partial(_unpacked, items, n), whole, out, count * 2 * record([out]).itemsize
        )
        for n, out in enumerate(items)
    ]


def reduce_blocks(state: Program, merge: Program, batch: Batch, axes: tuple[int, ...]) -> Any:
    count = math.prod(max(n) for axis, n in enumerate(batch.chunks) if axis not in axes)
    item = _packed_item(state.returns)
    memory = _memory(state, batch) + 2 * count * item.shape[0]
    states = _blockwise(state, batch, item, memory, axes)
    dtypes = {"intermediate_dtype": _BYTES, "dtype": _BYTES}
    return _ops.reduction(states, None, combine_func=merge.along, axis=axes, **dtypes)


def _memory(program: Program, batch: Batch) -> int:
    """Return the bytes of one block of each input, and the kernel's memory limit."""
    limit = program.setup.options.memory_limit
    # A share depends on the machine that runs it.
    own = limit if isinstance(limit, int) else 0
    return own + sum(i.array.chunkmem for i in batch.inputs)


def _packed_item(items: Items) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((record(items).itemsize,), _BYTES)


def _blockwise(
    fun: Any, batch: Batch, item: jax.ShapeDtypeStruct, memory: int, reduced: tuple[int, ...] = ()
) -> Any:
    arguments, unused = blockwise_arguments(batch)
    core = dict(enumerate(item.shape, unused))
    return _ops.blockwise(
        functools.partial(fun, *batch.numbers),
        (*range(len(batch.chunks)), *core),
        *arguments,
        adjust_chunks=dict.fromkeys(reduced, 1),
        new_axes=core,
        dtype=item.dtype,
        extra_projected_mem=memory,
    )


def _unpacked(items: Items, number: int, data: Any) -> Any:
    """Return one of the packed outputs."""
    return unpacked(items, data)[number]
