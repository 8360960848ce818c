# SPDX-License-Identifier: MIT
"""Read blocks of arrays that memory does not hold, and recognize these arrays again."""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._blocks.on_streamed import Streamed

_WHOLE = 1 << 20  # bytes; of a larger array that is not in memory, samples are read
_SAMPLES = 16
_IN_A_SAMPLE = 256  # items along the last axis


def streamed(value: Any, path: str, where: str) -> Any:
    """Return an array as one to be read in blocks, and any other value as it is."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{where}: {path} is a masked array, whose mask would be lost; pass {path}.filled(...) "
            "and the mask as an argument of its own"
        )
    shape: Any = getattr(value, "shape", None) if hasattr(value, "__getitem__") else None
    if shape is None or isinstance(value, np.generic):
        return value
    if isinstance(value, jax.Array):
        if not shape or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        value = np.asarray(value)
    return Streamed(tuple(shape), np.dtype(value.dtype), value, path=path)


def grain(source: Streamed) -> tuple[int, ...]:
    """Return the shape of what is read at once, such as a chunk of zarr."""
    chunks: Any = getattr(source.value, "chunks", None)
    is_grid = isinstance(chunks, tuple) and all(isinstance(n, int) for n in chunks)
    return chunks if is_grid else (1,) * len(source.shape)


def read(source: Streamed, region: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """Return a block in memory. The last one is kept, because the next may need the same."""
    if source.last is None or source.last[0] != region:
        source.last = None  # freed before another is read
        source.last = region, _read(source, region)
    return source.last[1]


def _read(source: Streamed, region: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    value = source.value
    if source.stage is not None:
        return _merged(value, source.stage, region)
    mapping, size = _mapping(value)
    if mapping is not None and mapping.size() < size:
        raise OSError(
            f"the file of {source.path} has {mapping.size()} bytes now, and had at least {size}"
        )
    block = value[region[0] if isinstance(value, range) else region]
    if np.ma.is_masked(block):  # as netCDF4 does for missing values
        raise TypeError(f"{source.path} has a block with masked items, whose mask would be lost")
    block = np.asarray(block) if mapping is None else np.array(block)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        # Pages that were read count as memory of this process until it lets go of them.
        mapping.madvise(mmap.MADV_DONTNEED)
    shape = tuple(len(range(n)[s]) for n, s in zip(source.shape, region, strict=True))
    if block.shape != shape:
        raise OSError(f"{source.path} has a block of shape {block.shape}, where {shape} was due")
    return block


def _merged(states: Any, stage: Any, region: tuple[slice, ...]) -> Any:
    """Return the states of all blocks along the reduced axes, merged in their order."""
    merged: list[Any] = []
    for place in itertools.product(*(range(states.shape[axis]) for axis in stage.reduced)):
        index: list[Any] = [*region]
        for axis, i in zip(stage.reduced, place, strict=True):
            index.insert(axis, i)
        merged = [stage.merge(np.stack([*merged, states[*index]]), axis=(0,), keepdims=False)]
    return merged[0]


def _mapping(array: Any) -> tuple[mmap.mmap | None, int]:
    """Return the mapped file of an array, and how long it should be.

    Reading beyond the end of a file that has become shorter would kill the process. What was
    changed in a private mapping is in memory only, so that is an array like others.
    """
    begin = 0
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            offset = array.offset or 0  # None in a copy, which is in memory
            begin = offset - offset % mmap.ALLOCATIONGRANULARITY
            if array.mode == "c":
                return None, 0
        array = array.base
    return (array, begin + len(array)) if isinstance(array, mmap.mmap) else (None, 0)


def digest(source: Streamed) -> str:
    """Return a digest of the numbers of an array; of a large one on disk, of some of them."""
    checksum, shape = hashlib.sha256(), source.shape
    in_memory = type(source.value) is np.ndarray and _mapping(source.value)[0] is None
    is_whole = in_memory or math.prod(shape) * source.dtype.itemsize <= _WHOLE
    for i in range(1 if is_whole else _SAMPLES):
        starts = [(n - 1) * i // (_SAMPLES - 1) for n in shape]
        lengths = shape if is_whole else (*(1 for _ in shape[1:]), _IN_A_SAMPLE)
        region = tuple(slice(i, i + length) for i, length in zip(starts, lengths, strict=True))
        checksum.update(np.ascontiguousarray(read(source, region)).tobytes())
    return checksum.hexdigest()[:16]
