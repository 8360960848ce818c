# SPDX-License-Identifier: MIT
"""What a package that evaluates arrays block by block has to provide, and helpers for it.

A new backend takes two files:

1. ``ext/blocks/on_<package>.py``, with what is listed below. The module is imported at the first
   call with arrays of the package, so it may import the package.
2. ``ext/blocks/arrays.py``, where one line of the table ``_CLASSES`` names the package, and the
   module and the classes of its arrays.

The arrays need ``shape``, ``dtype`` and ``chunks`` (a tuple of block lengths for each axis), and a
``rechunk`` method for the advice in error messages. Nothing else is required: the checks, the
shapes and the programs (`ext/blocks/programs.py`) are the same for every package.

The module has a flag and four functions. Their argument ``like`` is any array of the package among
the arguments of the call:

``CAN_RECHUNK``
    Whether an array can be rechunked without being stored.
``cut(value, chunks, like)``
    Return an array of the package with these chunks along all its axes; ``value`` is one, too, or
    an array of NumPy.
``positions(lengths, like)``
    Return the numbers from 0 as an array of the package, in chunks of these lengths.
``map_blocks(program, batch, items)``
    Apply a `Program` to each block, once, and return an array for each output. ``items`` are the
    shapes and dtypes of one item of each, after the batch axes.
``reduce_blocks(state, merge, batch, axes)``
    Reduce a batch along some axes, by a tree of merges, to states, which are bytes: return an array
    of uint8 with the batch axes that are kept, and the bytes of a `record` of ``state.returns``.
    The program ``state`` returns the states of one block, which have length 1 along the reduced
    axes; the last inputs of the batch are the positions of the items along these.
    ``merge.along(states, axis, keepdims)`` merges the states of adjacent blocks, with arguments as
    in `numpy.sum`; ``merge(one, other)`` merges two states.

The backend of `rankax.stream`, ``stream/_stages.py``, has the same functions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

BatchChunks = tuple[tuple[int, ...], ...]  # the block lengths along each batch axis


class Input(NamedTuple):
    """One array of a call, chunked like the batch."""

    array: Any
    axes: tuple[int, ...]  # the axes of the batch that it has
    item: jax.ShapeDtypeStruct  # one item, such as the data of a PRNG key


class Batch(NamedTuple):
    """The inputs of an operation, after the numbers, and the chunks of their batch."""

    numbers: Sequence[Any]
    inputs: Sequence[Input]
    chunks: BatchChunks


def blockwise_arguments(batch: Batch) -> tuple[list[Any], int]:
    """Return each array followed by its axes, as ``blockwise`` takes them, and an unused axis.

    Axes are ints: first those of the batch, then the core axes of each input.
    """
    arguments: list[Any] = []
    unused = len(batch.chunks)
    for array, axes, item in batch.inputs:
        arguments += [array, (*axes, *range(unused, unused + len(item.shape)))]
        unused += len(item.shape)
    return arguments, unused


def small_blocks(inputs: Sequence[Input]) -> list[jax.ShapeDtypeStruct]:
    """Return a block of each input, as shape and dtype: two items along an axis, if it has two."""
    return [
        jax.ShapeDtypeStruct(
            (*(min(2, n) for n in array.shape[: len(axes)]), *item.shape), item.dtype
        )
        for array, axes, item in inputs
    ]
