# SPDX-License-Identifier: MIT
"""What a package that evaluates arrays block by block has to provide, and helpers for it.

A new backend takes two files:

1. ``ext/blocks/on_<package>.py``, with an object ``BACKEND`` that implements `Backend`. The module
   is imported at the first call with arrays of the package, so it may import the package.
2. ``ext/blocks/arrays.py``, where one line of the table ``_CLASSES`` names the package, and the
   module and the classes of its arrays.

The arrays need ``shape``, ``dtype`` and ``chunks`` (a tuple of block lengths for each axis), and a
``rechunk`` method for the advice in error messages. Nothing else is required: the checks, the
shapes and the programs (`ext/blocks/programs.py`) are the same for every package.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from rankax.ext.blocks.programs import Items, OnBlocks

BatchChunks = tuple[tuple[int, ...], ...]  # the block lengths along each batch axis


class Input(NamedTuple):
    """One array of a call, chunked like the batch."""

    array: Any
    axes: tuple[int, ...]  # the axes of the batch that it has
    item: jax.ShapeDtypeStruct  # one item, such as the data of a PRNG key


class Batch(NamedTuple):
    """The inputs of an operation, and the chunks of their batch."""

    inputs: Sequence[Input]
    chunks: BatchChunks


class Backend(Protocol):
    """The operations that differ between packages.

    Attributes
    ----------
    can_rechunk : bool
        Whether an array can be rechunked without being stored.
    """

    can_rechunk: bool

    def cut(self, value: Any, chunks: BatchChunks, like: Any) -> Any:
        """Return an array of the package with these chunks along all its axes.

        Parameters
        ----------
        value : array
            Of the package, or a NumPy array.
        chunks : tuple of tuple of int
        like : array
            Any array of the package among the arguments of the call.
        """
        ...

    def map(self, fun: OnBlocks, batch: Batch, items: Items) -> list[Any]:
        """Apply ``fun`` to each block, once.

        Parameters
        ----------
        fun : callable
            Takes one block of each input. Returns one array, or a tuple of several.
        batch : Batch
        items : sequence of jax.ShapeDtypeStruct
            The shape and dtype of one item of each output, after the batch axes.
        """
        ...

    def positions(self, lengths: tuple[int, ...], like: Any) -> Any:
        """Return the numbers from 0 as an array of the package, in chunks of these lengths."""
        ...

    def reduce(self, state: OnBlocks, merge: OnBlocks, batch: Batch, axes: tuple[int, ...]) -> Any:
        """Reduce the batch along some axes, by a tree of merges, to states, which are bytes.

        Returns an array of uint8: the batch axes that are kept, and the state.

        Parameters
        ----------
        state : callable
            Takes one block of each input. Returns states: the batch axes, of which the reduced ones
            have length 1, and an axis of bytes, those of a `record` of ``state.program.items``.
        merge : callable
            Takes the states of adjacent blocks as one array, with ``axis`` and ``keepdims`` as in
            `numpy.sum`, and merges them along these axes in order.
        batch : Batch
            The last inputs are the positions of the items along each reduced axis.
        axes : tuple of int
            The reduced axes of the batch.
        """
        ...


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
    sizes = [[min(2, n) for n in array.shape[: len(axes)]] for array, axes, _ in inputs]
    pairs = zip(sizes, (item for *_, item in inputs), strict=True)
    return [jax.ShapeDtypeStruct((*size, *item.shape), item.dtype) for size, item in pairs]
