# SPDX-License-Identifier: MIT
"""What a package that evaluates arrays block by block has to provide, and helpers for it.

A new backend takes two files:

1. ``_blocks/on_<package>.py``, with an object ``BACKEND`` that implements `Backend`. The module is
   imported at the first call with arrays of the package, so it may import the package.
2. ``_base/blocks.py``, where one line of the table ``_CLASSES`` names the package, and the module
   and the classes of its arrays.

The arrays need ``shape``, ``dtype`` and ``chunks`` (a tuple of block lengths for each axis), and a
``rechunk`` method for the advice in error messages. Nothing else is required: the checks, the
shapes and the programs (`_blocks/programs.py`) are the same for every package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rankax._blocks.programs import OnBlocks, Packing

BatchChunks = tuple[tuple[int, ...], ...]  # the block lengths along each batch axis


class Input(NamedTuple):
    """One array of a call, chunked like the batch."""

    array: Any
    axes: tuple[int, ...]  # the axes of the batch that it has
    core: tuple[int, ...]  # its core shape, including the axes of the data of a PRNG key


class Batch(NamedTuple):
    """The inputs of an operation, and the chunks of their batch."""

    inputs: Sequence[Input]
    chunks: BatchChunks


class BlockReduction(NamedTuple):
    """A reduction over blocks, whose states are bytes.

    Attributes
    ----------
    state : callable
        Takes one block of each input, then one array of ints for each reduced axis: the positions
        in the batch of the items of the block. Returns states: the batch axes, of which the reduced
        ones have length 1, and an axis of ``size`` bytes.
    merge : callable
        Takes the states of adjacent blocks as one array, with ``axis`` and ``keepdims`` as in
        `numpy.sum`, and merges them along these axes in order.
    axes : tuple of int
        The reduced axes of the batch.
    size : int
    """

    state: OnBlocks
    merge: OnBlocks
    axes: tuple[int, ...]
    size: int


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

    def map(self, fun: OnBlocks, batch: Batch, layout: Packing) -> list[Any]:
        """Apply ``fun`` to each block, once.

        Parameters
        ----------
        fun : callable
            Takes one block of each input. Returns one array, or a tuple of several.
        batch : Batch
        layout : Packing
            The shape and dtype of one item of each output, after the batch axes.
        """
        ...

    def reduce(self, reduction: BlockReduction, batch: Batch) -> Any:
        """Reduce the batch along some axes, by a tree of merges.

        Returns bytes, that is an array of uint8: the batch axes that are kept, and the state.
        """
        ...


def gufunc_signature(inputs: Sequence[Input], layout: Packing) -> tuple[str, dict[str, int]]:
    """Return a gufunc signature that names each core axis differently, and the output sizes.

    Whether core axes of one name agree has been checked before, with a better message.
    """
    cores = [[f"i{n}_{axis}" for axis in range(len(i.core))] for n, i in enumerate(inputs)]
    outs: list[list[str]] = []
    sizes: dict[str, int] = {}
    for n, item in enumerate(layout.items):
        named = {f"o{n}_{axis}": size for axis, size in enumerate(item.shape)}
        outs.append([*named])
        sizes |= named
    sides = [",".join(f"({','.join(names)})" for names in side) for side in (cores, outs)]
    return "->".join(sides), sizes


def blockwise_arguments(batch: Batch) -> tuple[list[Any], int]:
    """Return each array followed by its axes, as ``blockwise`` takes them, and an unused axis.

    Axes are ints: first those of the batch, then the core axes of each input.
    """
    arguments: list[Any] = []
    unused = len(batch.chunks)
    for array, axes, core in batch.inputs:
        arguments += [array, (*axes, *range(unused, unused + len(core)))]
        unused += len(core)
    return arguments, unused
