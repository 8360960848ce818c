# SPDX-License-Identifier: MIT
"""The stages of a run, and the arrays that they read and write.

A call with these arrays is checked as one with arrays of dask is (`ext/blocks/call.py`), for which
this file is a backend (`ext/blocks/backend.py`): nothing is evaluated, only the stages of the run
are written down. The call returns arrays that name the stage that will write them. A stage
evaluates one program on every block of its batch. A map is one stage. A reduction is two: the
states of blocks, then their merge and result for each item that is kept.

Of the memory limit, one half is for what the kernel needs beyond its inputs and outputs, and one
half is for the blocks in flight: one that is read, one that is evaluated, one that is written. Of
inputs there are at most four copies at a time, and of outputs five:

* read: the block, and what the source decodes to make it;
* evaluated: the block, and its copy on the device; outputs there, and their copy on the host;
* written: the outputs, their copy in the shape of a chunk, and the compressed chunk.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankax.core.plan.schedule import Shape
from rankax.ext.blocks.backend import Batch, BatchChunks, Input
from rankax.ext.blocks.programs import Items, Program, packed_item
from rankax.ext.ragged.type import Ragged

STATES = "_rankax/states"  # the array of a store that is not a result
COPIES_IN, COPIES_OUT = 4, 5
_SMALL = 1 << 22  # bytes of states that are read at once

Region = tuple[slice, ...]


class Block(NamedTuple):
    """A block of a stage."""

    place: Shape  # in the grid of blocks
    region: Region  # of the batch

    @property
    def items(self) -> int:
        """The number of its items."""
        return math.prod(part.stop - part.start for part in self.region)


@dataclasses.dataclass(eq=False)
class Stage:
    """One function, evaluated on every block of a batch.

    Attributes
    ----------
    program : Program
        Takes the numbers and one block of each input. Returns one array, or a tuple of several.
    numbers : sequence
    inputs : sequence of Input
    shape : tuple of int
        That of the batch.
    reduced : tuple of int
        The axes of the batch of which the program returns the states.
    merge : Program or None
        Merges these states.
    outputs : list of Streamed
        What it writes. States have no axes of the batch but those that are kept.
    bounds : array of int or None
        Blocks may be of the rows of ragged items instead, of which these are the bounds, as in
        `Streamed`; ``shape`` is then the number of all rows.
    block : tuple of int
        The shape of its blocks, but for those at the ends of axes.
    """

    program: Program
    numbers: Sequence[Any]
    inputs: Sequence[Input]
    shape: Shape
    reduced: Shape = ()
    merge: Program | None = None
    outputs: list[Streamed] = dataclasses.field(default_factory=list)
    bounds: Any = None
    block: Shape = ()

    @property
    def reads_states(self) -> bool:
        """Whether its inputs are the states that another stage writes."""
        return any(array.stage is not None for array, *_ in self.inputs)

    @property
    def grid(self) -> Shape:
        """The number of blocks along each axis; a reduction of no items has one."""
        sizes, least = zip(self.shape, self.block, strict=True), len(self.reduced[:1])
        return tuple(max(-(-size // length), least) for size, length in sizes)

    def blocks(self) -> Iterator[Block]:
        for place in itertools.product(*map(range, self.grid)):
            ends = zip(place, self.block, self.shape, strict=True)
            yield Block(place, tuple(slice(i * n, min(i * n + n, size)) for i, n, size in ends))

    def read(self, block: Block) -> list[Any]:
        """Read a block of each input; an axis of length 1 is stretched."""
        of_batch = [slice(*self.items(part.start, part.stop)) for part in block.region]
        blocks: list[Any] = []
        for array, axes, _ in self.inputs:
            region = [slice(0, n) for n in array.shape]
            for i, axis in self._mapped_axes(array, axes):
                region[i] = of_batch[axis]
            blocks.append(array.read(tuple(region)))
        return blocks

    def items(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """Return the items from which a part along an axis is evaluated: the first, the end."""
        if self.bounds is None:
            return start, stop
        after = np.searchsorted(self.bounds[:-1], stop)
        return np.searchsorted(self.bounds[1:], start, "right"), after

    def items_of_blocks(self, axis: int) -> tuple[Any, Any]:
        """Return the first item of each block along an axis, and the end of its items."""
        starts = np.arange(0, self.shape[axis], self.block[axis])
        return self.items(starts, np.minimum(starts + self.block[axis], self.shape[axis]))

    def part(self, region: Region, out: Any) -> Any:
        """Return the part of an output that belongs to a block: some rows of its items."""
        if self.bounds is None:
            return out
        (part,) = region
        first, _ = self.items(part.start, part.stop)
        skipped = part.start - int(self.bounds[first])
        return out[skipped : skipped + part.stop - part.start]

    def _mapped_axes(self, array: Streamed, axes: Shape) -> list[tuple[int, int]]:
        """Return each axis of an array that the blocks cut, and that of the batch."""
        batch = self.shape if self.bounds is None else (len(self.bounds) - 1,)
        return [(i, axis) for i, axis in enumerate(axes) if array.shape[i] == batch[axis]]

    def sizes(self) -> tuple[int, int, int]:
        """Return the bytes that a block reads (whole chunks of sources), writes, and holds."""
        read = 0
        for array, axes, item in self.inputs:
            mapped, core = self._mapped_axes(array, axes), item.shape
            core = core[1:] if mapped and array.bounds is not None else core
            items = math.prod(self._most(array, i, axis) for i, axis in mapped)
            read += items * math.prod(core) * array.dtype.itemsize
        kept = [n for axis, n in enumerate(self.block) if axis not in self.reduced]
        cores = [math.prod(x.shape[len(kept) :]) * x.dtype.itemsize for x in self.outputs]
        written = math.prod(kept) * sum(cores)
        return read, written, COPIES_IN * read + COPIES_OUT * written

    def _most(self, array: Streamed, i: int, axis: int) -> int:
        """Return how many items, or rows of ragged items, a block reads along an axis at most."""
        if array.bounds is None and self.bounds is None:
            return max(self.block[axis], array.grain[i])
        first, after = self.items_of_blocks(axis)
        if array.bounds is not None:
            array, first, after = array.value, array.bounds[first], array.bounds[after]
        return int((after - first).max(initial=0)) + array.grain[i] - 1

    def halved(self, axis: int) -> Stage:
        """Return twice as many blocks along an axis, of whole chunks of the sources."""
        steps = [
            array.grain[i]
            for array, axes, _ in self.inputs
            for i, a in self._mapped_axes(array, axes)
            if a == axis
        ]
        length, step = -(-self.block[axis] // 2), max(steps, default=1)
        length -= length % step if step < length else 0
        block = *self.block[:axis], length, *self.block[axis + 1 :]
        return dataclasses.replace(self, block=block)


@dataclasses.dataclass(eq=False)
class Streamed:
    """An array that is read (``value``), or that a stage writes."""

    shape: Shape
    dtype: Any
    value: Any = None
    stage: Stage | None = None
    path: str = ""  # of an argument, as errors name it, or in the store
    last: Any = None  # the region that was read last, and its block
    # Of ragged items: where each one begins in the array of all rows (`value`), and where the last
    # one ends. The shape is that of items filled up to the longest.
    bounds: Any = None

    @property
    def chunks(self) -> BatchChunks:
        """One block; a stage has more."""
        return tuple((size,) for size in self.shape)

    @property
    def grain(self) -> Shape:
        """The shape of what is read at once, such as a chunk of zarr."""
        chunks: Any = getattr(self.value, "chunks", None)
        is_grid = isinstance(chunks, tuple) and all(isinstance(n, int) for n in chunks)
        return chunks if is_grid else (1,) * len(self.shape)

    def read(self, region: Region) -> Any:
        """Read a block. The last one is kept, because the next may need the same."""
        if self.bounds is not None:
            items, _, *core = region
            bounds = self.bounds[items.start : items.stop + 1]
            rows = slice(int(bounds[0]), int(bounds[-1]))
            return Ragged(self.value.read((rows, *core)), np.diff(bounds))
        if self.last is None or self.last[0] != region:
            self.last = None  # freed before another is read
            self.last = region, self._read(region)
        return self.last[1]

    def _read(self, region: Region) -> Any:
        value = self.value
        if self.stage is not None:
            return _merged(value, self.stage, region)
        mapping, size = mapping_of(value)
        if mapping is not None and mapping.size() < size:
            raise OSError(
                f"the file of {self.path} has {mapping.size()} bytes now, and had at least {size}"
            )
        block = value[region[0] if isinstance(value, range) else region]
        if np.ma.is_masked(block):  # as netCDF4 does for missing values
            raise TypeError(f"{self.path} has a block with masked items, whose mask would be lost")
        block = np.asarray(block) if mapping is None else np.array(block)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Pages that were read count as memory of this process until it lets go of them.
            mapping.madvise(mmap.MADV_DONTNEED)
        shape = tuple(len(range(n)[s]) for n, s in zip(self.shape, region, strict=True))
        if block.shape != shape:
            raise OSError(
                f"{self.path} has a block of shape {block.shape}, but {shape} is expected"
            )
        return block


def _merged(states: Any, stage: Any, region: Region) -> Any:
    """Return the states of all blocks along the reduced axes, merged in their order, in pairs.

    In pairs, rounding errors of a sum do not add up.
    """
    places = [*itertools.product(*(range(states.shape[axis]) for axis in stage.reduced))]
    whole: list[Any] = [*region]
    for axis in stage.reduced:
        whole.insert(axis, slice(None))
    numbers = math.prod(len(range(n)[s]) for n, s in zip(states.shape, whole, strict=True))
    if numbers * states.dtype.itemsize <= _SMALL:  # zarr reads many files as fast as one
        states, region = states[*whole], (slice(None),) * len(region)

    def merged(start: int, stop: int) -> Any:
        if stop - start > 1:
            half = start + (1 << (stop - start - 1).bit_length() - 1)  # a power of 2 comes first
            return stage.merge(merged(start, half), merged(half, stop))
        index: list[Any] = [*region]
        for axis, i in zip(stage.reduced, places[start], strict=True):
            index.insert(axis, i)
        return states[*index]

    return merged(0, len(places))


def mapping_of(array: Any) -> tuple[mmap.mmap | None, int]:
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


# The backend.

CAN_RECHUNK = False


def cut(value: Any, chunks: BatchChunks, like: Any) -> Streamed:
    del chunks, like
    return value if isinstance(value, Streamed) else Streamed(value.shape, value.dtype, value)


def positions(lengths: Shape, like: Any) -> Streamed:
    del like
    return Streamed((sum(lengths),), np.dtype(np.int64), range(sum(lengths)))


def map_blocks(program: Program, batch: Batch, items: Items) -> list[Streamed]:
    stage = Stage(program, batch.numbers, batch.inputs, tuple(map(sum, batch.chunks)))
    stage.outputs += [Streamed((*stage.shape, *x.shape), x.dtype, stage=stage) for x in items]
    return list(stage.outputs)


def reduce_blocks(state: Program, merge: Program, batch: Batch, axes: Shape) -> Streamed:
    shape = tuple(map(sum, batch.chunks))
    stage = Stage(state, batch.numbers, batch.inputs, shape, axes, merge)
    kept = (n for axis, n in enumerate(shape) if axis not in axes)
    item = packed_item(state.returns)
    stage.outputs += [Streamed((*kept, *item.shape), item.dtype, stage=stage, path=STATES)]
    return stage.outputs[0]
