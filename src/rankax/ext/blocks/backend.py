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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from rankax.ext.blocks.programs import Items, Program, kept, packed_item, unpacked

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


def blockwise(
    of_package: Callable[..., Any],
    fun: Any,
    batch: Batch,
    item: jax.ShapeDtypeStruct,
    reduced: tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """Apply a function of one output to each block, by the ``blockwise`` of a package.

    The output has length 1 in each block along the ``reduced`` axes.
    """
    # Axes are ints: first those of the batch, then the core axes of each array.
    count = unused = len(batch.chunks)
    arguments: list[Any] = []
    for array, axes, of_input in batch.inputs:
        arguments += [array, (*axes, *range(unused, unused + len(of_input.shape)))]
        unused += len(of_input.shape)
    core = dict(enumerate(item.shape, unused))
    return of_package(
        functools.partial(fun, *batch.numbers),
        (*range(count), *core),
        *arguments,
        adjust_chunks=dict.fromkeys(reduced, 1),
        new_axes=core,
        dtype=item.dtype,
        **options,
    )


def map_packed(
    blockwise: Callable[..., Any], program: Program, batch: Batch, items: Items
) -> list[Any]:
    """Apply a program to each block by operations of one output.

    Several outputs are packed into one, so that each block is evaluated once.
    """
    if len(items) == 1:
        return [blockwise(program, batch, items[0])]
    item = packed_item(items)
    array = blockwise(kept(dataclasses.replace(program, returns=items)), batch, item)
    whole = Batch((), [Input(array, tuple(range(len(batch.chunks))), item)], batch.chunks)
    unpack = [functools.partial(_unpacked, items, n) for n in range(len(items))]
    return [blockwise(fun, whole, out) for fun, out in zip(unpack, items, strict=True)]


def _unpacked(items: Items, number: int, data: Any) -> Any:
    """Return one of the packed outputs."""
    return unpacked(items, data)[number]


def small_blocks(inputs: Sequence[Input]) -> list[jax.ShapeDtypeStruct]:
    """Return a block of each input, as shape and dtype: two items along an axis, if it has two."""
    return [
        jax.ShapeDtypeStruct(
            (*(min(2, n) for n in array.shape[: len(axes)]), *item.shape), item.dtype
        )
        for array, axes, item in inputs
    ]
