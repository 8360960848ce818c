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

from rankax.ext.blocks.backend import Batch, BatchChunks, blockwise, map_packed
from rankax.ext.blocks.programs import Program, packed_item

# Imported by name because a type checker need not have cubed installed.
cubed: Any = importlib.import_module("cubed")
# What `cubed.apply_gufunc` is built on; cubed has no public way to change the length of a block.
_ops: Any = importlib.import_module("cubed.core.ops")

CAN_RECHUNK = False
_MOST_IN_PLAN = 10**6  # bytes; `cubed.asarray` accepts no more


def cut(value: Any, chunks: BatchChunks, like: Any) -> Any:
    if isinstance(value, cubed.Array):
        return value
    # `asarray` holds the array in the plan; `from_array` reads it in the tasks.
    convert = cubed.asarray if value.nbytes <= _MOST_IN_PLAN else cubed.from_array
    return convert(value, chunks=tuple(lengths[0] for lengths in chunks), spec=like.spec)


def positions(lengths: tuple[int, ...], like: Any) -> Any:
    return cubed.arange(sum(lengths), chunks=lengths[:1], spec=like.spec)


def reduce_blocks(state: Program, merge: Program, batch: Batch, axes: tuple[int, ...]) -> Any:
    states = _blockwise(state, batch, packed_item(state.returns), axes)
    dtypes = {"intermediate_dtype": states.dtype, "dtype": states.dtype}
    return _ops.reduction(states, None, combine_func=merge.along, axis=axes, **dtypes)


def _blockwise(fun: Any, batch: Batch, item: jax.ShapeDtypeStruct, reduced: Any = ()) -> Any:
    copies = sum(array.chunkmem for array, *_ in batch.inputs)
    count = math.prod(max(n) for axis, n in enumerate(batch.chunks) if axis not in reduced)
    copies += 2 * count * math.prod(item.shape) * item.dtype.itemsize
    limit = fun.setup.options.memory_limit if isinstance(fun, Program) else None
    # A share depends on the machine that runs it.
    memory = copies + (limit if isinstance(limit, int) else 0)
    return blockwise(_ops.blockwise, fun, batch, item, reduced, extra_projected_mem=memory)


map_blocks = functools.partial(map_packed, _blockwise)
