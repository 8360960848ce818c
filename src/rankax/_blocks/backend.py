# SPDX-License-Identifier: MIT
"""What a package that evaluates arrays in blocks has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rankax._blocks.packing import Packing
from rankax._blocks.programs import OnBlocks

__all__ = ["Backend", "Chunks", "Input"]

Chunks = tuple[tuple[int, ...], ...]


class Input(NamedTuple):
    """One array of a call, cut as the batch is."""

    array: Any
    batch: int  # how many batch axes it has
    core: tuple[int, ...]  # with what the data of a PRNG key add


class Backend(Protocol):
    """A package, as `_blocks/call.py` knows it."""

    cuts_freely: bool  # whether an array can be cut anew without being stored
    packs: bool  # whether several outputs have to be packed into one

    def cut(self, value: Any, chunks: Chunks, like: Any) -> Any:
        """Return an array of the package's, cut so; ``like`` is one that came."""
        ...

    def map(
        self, fun: OnBlocks, inputs: Sequence[Input], layout: Packing, chunks: Chunks
    ) -> list[Any]:
        """Return arrays that have the batch in front, and items of this layout."""
        ...

    def reduce(
        self,
        state: OnBlocks,
        merge: OnBlocks,
        inputs: Sequence[Input],
        axes: tuple[int, ...],
        size: int,
        chunks: Chunks,
        like: Any,
    ) -> Any:
        """Return packed states of so many bytes, merged along axes of the batch in a tree."""
        ...


def gufunc_signature(inputs: Sequence[Input], layout: Packing) -> tuple[str, dict[str, int]]:
    """Return a signature in which each core axis has a name of its own, and the sizes of outputs.

    That core axes of one name agree is checked before, in better words.
    """
    cores = [[f"i{n}_{axis}" for axis in range(len(i.core))] for n, i in enumerate(inputs)]
    outs = [[f"o{n}_{axis}" for axis in range(len(s))] for n, s in enumerate(layout.shapes)]
    sizes = {
        name: size
        for names, shape in zip(outs, layout.shapes, strict=True)
        for name, size in zip(names, shape, strict=True)
    }
    sides = [",".join(f"({','.join(names)})" for names in side) for side in (cores, outs)]
    return "->".join(sides), sizes


def block_indices(inputs: Sequence[Input], count: int) -> list[tuple[int, ...]]:
    """Name the axes of each array by ints: those of the batch first, then each core axis."""
    names: list[tuple[int, ...]] = []
    new = count
    for given in inputs:
        core = tuple(range(new, new + len(given.core)))
        names.append(tuple(range(count - given.batch, count)) + core)
        new += len(core)
    return names
