# SPDX-License-Identifier: MIT
"""Arithmetic along one axis that every loop shares: its length, its chunks, one chunk of it."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._errors import listed, table

__all__ = [
    "Chunks",
    "KeptSteps",
    "common_length",
    "cut_steps",
    "find_kept_steps",
    "flatten_items",
    "join_chunks",
    "positive_int",
    "read_apart",
    "scalar",
    "split_into_chunks",
    "stack_chunks",
    "take_chunk",
    "widen",
    "write_chunk",
    "zeros",
]


def positive_int(value: Any, function: str, name: str) -> int:
    """Return ``value`` as a positive ``int``, or say which parameter of which function is wrong."""
    if isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a positive int, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {name} must be a positive int, got {type(value).__name__} {value!r}"
        ) from None
    if number < 1:
        raise ValueError(f"{function}: {name} must be a positive int, got {number}")
    return number


def common_length(leaves: Sequence[tuple[str, Any, int]], function: str) -> int:
    """Return the length that every ``(name, leaf, axis)`` has along its own axis.

    Raises
    ------
    ValueError
        If a leaf has no such axis, or the lengths differ: a table of all leaves, the odd ones
        marked. Nothing is ever cut to the shortest.
    """
    if short := [i for i, (_, leaf, axis) in enumerate(leaves) if not _has_axis(leaf, axis)]:
        rows = [(name, str(jnp.shape(leaf)), str(axis)) for name, leaf, axis in leaves]
        raise ValueError(
            f"{function}: {listed([leaves[i][0] for i in short])} "
            f"{'lacks' if len(short) == 1 else 'lack'} the axis to loop over\n\n"
            + table(("leaf", "shape", "axis"), rows, short)
        )
    lengths = [jnp.shape(leaf)[axis] for _, leaf, axis in leaves]
    usual = Counter(lengths).most_common(1)[0][0]
    if odd := [i for i, length in enumerate(lengths) if length != usual]:
        rows = [
            (name, str(jnp.shape(leaf)), str(axis), str(length))
            for (name, leaf, axis), length in zip(leaves, lengths, strict=True)
        ]
        raise ValueError(
            f"{function}: the looped axes must have one length, got "
            f"{listed([str(n) for n in dict.fromkeys(lengths)])}\n\n"
            + table(("leaf", "shape", "axis", "length"), rows, odd)
        )
    return usual


def _has_axis(leaf: Any, axis: int) -> bool:
    return -jnp.ndim(leaf) <= axis < jnp.ndim(leaf)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How an axis of ``length`` items is walked: ``steps`` chunks of ``size`` items each.

    Where ``steps * size > length`` the last chunk starts early and overlaps the one before it, so
    that every chunk has the same size and no item is invented.
    """

    length: int
    size: int
    steps: int

    @property
    def even(self) -> bool:
        """Whether the chunks tile the axis without overlap."""
        return self.steps * self.size == self.length

    def first(self) -> jax.Array:
        """Where the first chunk starts: a number for a loop to carry.

        Carried and not looked up in an array, for XLA:CPU fuses the lookup with what reads the
        chunk, and repeats it for each element.
        """
        # 64 bits where 32 would overflow, which needs jax_enable_x64 as such arrays do. Signed, for
        # JAX 0.7 differentiates a batched slice at an unsigned index wrongly.
        return scalar(0, jnp.int32 if self.length < 2**31 else jnp.int64)

    def following(self, start: jax.Array) -> jax.Array:
        """Where the next chunk starts."""
        number = start.dtype.type
        return jnp.minimum(start + number(self.size), number(self.length - self.size))


def split_into_chunks(length: int, chunk_size: int) -> Chunks:
    """Cut an axis into chunks of at most ``chunk_size`` items, alike in size.

    The chunks are as few and then as small as possible, so that little is computed twice: 10 items
    by at most 6 are 5 + 5, not 6 + 6. A chunk that divides the axis is worth up to a quarter more
    steps, for it needs no overlap, and so no copy of the inputs in a derivative.
    """
    steps = -(-length // chunk_size)
    size = -(-length // steps)
    for divisor in range(chunk_size, (4 * size - 1) // 5, -1):
        if length % divisor == 0:
            return Chunks(length, divisor, length // divisor)
    return Chunks(length, size, steps)


def scalar(value: int, dtype: Any) -> jax.Array:
    """Put a number on the device by an explicit transfer, which `jax.transfer_guard` permits."""
    return jax.device_put(np.asarray(value, dtype))


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return `jax.numpy.zeros`, made as `scalar` is; PRNG keys too."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.zeros(shape, dtype)
    return lax.broadcast(scalar(0, dtype), shape)


def flatten_items(leaf: Any, axis: int) -> jax.Array:
    """Prepare ``leaf`` for `take_chunk`: ``axis`` and those behind it become one, by a reshape.

    For a kernel that takes its items in another layout, as LAPACK does, would have XLA copy the
    whole leaf into that layout, and memory would grow with the axis.

    See `read_apart` for what else this is good for.
    """
    before, rest = leaf.shape[:axis], leaf.shape[axis:]
    flat = math.prod(rest)
    # One axis, unless numbers of 32 bits could not count along it.
    behind = (flat,) if flat < 2**31 else (rest[0], math.prod(rest[1:]))
    return lax.reshape(leaf, (*before, *behind))


def widen(leaf: jax.Array) -> jax.Array:
    """Prepare ``leaf`` for `take_chunk` where it is differentiated: a dtype that XLA adds in place.

    XLA:CPU adds floats like `bfloat16` as `float32`, and would convert the whole cotangent at every
    step before it could see that only a chunk of it changes.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float16:
        return leaf
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 32 else leaf


def take_chunk(leaf: jax.Array, start: jax.Array, chunks: Chunks, axis: int) -> jax.Array:
    """Read the chunk from ``start`` along ``axis`` of what `flatten_items` returned, still flat.

    Nothing may come between the leaf and this read, not even a reshape. Its transpose in a loop
    adds a cotangent that is zero but for the chunk to that of the leaf, as a whole, and XLA makes
    of that an addition in place where it sees just that: a sum with a `dynamic_update_slice` of
    zeros. Else every step would cost as much as the leaf is long.
    """
    each = leaf.shape[axis] // chunks.length  # numbers along the axis that are one item's
    start = start * start.dtype.type(each)
    # With negative indices XLA:CPU would fuse the question whether this is one with what reads the
    # chunk, and ask it for each element.
    return lax.dynamic_slice_in_dim(
        leaf, start, chunks.size * each, axis, allow_negative_indices=False
    )


def read_apart(chunk: jax.Array, size: int, axis: int) -> jax.Array:
    """Return a chunk that `take_chunk` read, so that the reading has a single use.

    XLA:CPU of JAX 0.10 makes functions of reads that have several, and takes two for one if their
    names differ in a dash only, as those of a value and of its tangent do where `jax.vmap` maps
    the tangent alone; then it fails. A chunk that is given its shape back is read apart already.
    """
    if chunk.shape[axis] != size:
        return chunk
    return lax.reshape(lax.optimization_barrier(lax.reshape(chunk, (1, chunk.size))), chunk.shape)


def write_chunk(leaf: jax.Array, chunk: jax.Array, start: Any, axis: int) -> jax.Array:
    """Replace the items of ``leaf`` along ``axis`` from ``start``; in place inside a loop."""
    return lax.dynamic_update_slice_in_dim(leaf, chunk, start, axis, allow_negative_indices=False)


def stack_chunks(leaf: Any, chunks: Chunks) -> jax.Array:
    """Reorder axis 0 of ``leaf`` into ``(steps, size)``, which costs nothing; for even chunks."""
    return lax.reshape(leaf, (chunks.steps, chunks.size, *leaf.shape[1:]))


def join_chunks(stack: jax.Array, chunks: Chunks, axis: int) -> jax.Array:
    """Join the chunks of ``stack``, each with its items on ``axis``, along that axis.

    A reshape where the chunks are even and ``axis`` is 0; one copy otherwise. Of an item that two
    chunks hold, the earlier one's is taken.
    """
    leaf = lax.collapse(jnp.moveaxis(stack, 0, axis), axis, axis + 2)
    if chunks.even:
        return leaf
    whole = (chunks.steps - 1) * chunks.size
    head = lax.slice_in_dim(leaf, 0, whole, axis=axis)
    tail = lax.slice_in_dim(leaf, -(chunks.length - whole), None, axis=axis)
    return lax.concatenate([head, tail], axis)


@dataclasses.dataclass(frozen=True)
class KeptSteps:
    """Where the kept steps of a loop lie, in the order in which the steps are executed.

    First ``lead`` skipped steps; then ``blocks`` times a block of ``before`` skipped steps, one
    that is kept and ``after`` skipped ones; then, if ``partial``, a last block that ends at its
    kept step; then ``trail`` skipped steps.
    """

    lead: int
    blocks: int
    before: int
    after: int
    partial: bool
    trail: int

    @property
    def stride(self) -> int:
        """Steps in one block."""
        return self.before + 1 + self.after

    @property
    def all(self) -> bool:
        """Whether no step is skipped."""
        return not self.lead and self.stride == 1 and not self.trail


def find_kept_steps(length: int, window: slice, *, reverse: bool) -> KeptSteps:
    """Lay out the steps ``range(length)[window]`` of a loop that runs up, or down if ``reverse``.

    The blocks begin as early as they can, so that they tile the loop where the stride divides its
    length and no block is left out.
    """
    kept = range(length)[window]
    if kept.step < 0:
        kept = kept[::-1]
    if not kept:
        return KeptSteps(length, 0, 0, 0, False, 0)
    first = length - 1 - kept[-1] if reverse else kept[0]
    stride = kept.step if len(kept) > 1 else 1
    before = min(first, stride - 1)
    lead = first - before
    blocks = min(len(kept), (length - lead) // stride)
    partial = blocks < len(kept)
    trail = length - lead - blocks * stride - (before + 1 if partial else 0)
    return KeptSteps(lead, blocks, before, stride - 1 - before, partial, trail)


def cut_steps(tree: Any, begin: int, end: int, *, reverse: bool) -> Any:
    """Cut the leading axis of every leaf to the steps from ``begin`` to ``end``.

    Steps are counted in the order of a loop that starts at the last item if ``reverse``.
    """

    def cut(leaf: jax.Array) -> jax.Array:
        length = leaf.shape[0]
        low, high = (length - end, length - begin) if reverse else (begin, end)
        return lax.slice_in_dim(leaf, low, high)

    return jax.tree.map(cut, tree)
