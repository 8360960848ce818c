# SPDX-License-Identifier: MIT
"""Cut the batch of a stage into blocks.

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
from collections.abc import Iterator
from typing import Any, NamedTuple

from rankax._blocks.on_streamed import Stage, Streamed
from rankax._plan.budget import shown_bytes
from rankax._plan.levels import Shape
from rankax.stream._sources import grain, read

_COPIES_IN, _COPIES_OUT = 4, 5
_LEAST = 100  # blocks, so that a run that is killed loses a few percent at most


class Block(NamedTuple):
    """A block of a stage."""

    place: Shape  # in the grid of blocks
    region: tuple[slice, ...]  # of the batch

    @property
    def items(self) -> int:
        """The number of its items."""
        return math.prod(part.stop - part.start for part in self.region)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The blocks of a stage, all of one shape except at the ends of axes."""

    stage: Stage
    block: Shape

    @property
    def grid(self) -> Shape:
        """The number of blocks along each axis; a reduction of no items has one."""
        sizes, least = zip(self.stage.shape, self.block, strict=True), len(self.stage.reduced[:1])
        return tuple(max(-(-size // length), least) for size, length in sizes)

    def __iter__(self) -> Iterator[Block]:
        for place in itertools.product(*map(range, self.grid)):
            ends = zip(place, self.block, self.stage.shape, strict=True)
            yield Block(place, tuple(slice(i * n, min(i * n + n, size)) for i, n, size in ends))

    def read(self, block: Block) -> list[Any]:
        """Read a block of each input; an axis of length 1 is stretched."""
        regions = [[slice(0, n) for n in array.shape] for array, *_ in self.stage.inputs]
        for region, (array, axes, _) in zip(regions, self.stage.inputs, strict=True):
            for i, axis in self._mapped(array, axes):
                region[i] = block.region[axis]
        pairs = zip(self.stage.inputs, regions, strict=True)
        return [read(array, tuple(region)) for (array, *_), region in pairs]

    def _mapped(self, array: Streamed, axes: Shape) -> list[tuple[int, int]]:
        """Return each axis of an array that the blocks cut, and that of the batch."""
        return [(i, a) for i, a in enumerate(axes) if array.shape[i] == self.stage.shape[a]]

    def sizes(self) -> tuple[int, int, int]:
        """Return the bytes that a block reads (whole chunks of sources), writes, and holds."""
        read, stage = 0, self.stage
        for array, axes, item in stage.inputs:
            steps = grain(array)
            items = [max(self.block[axis], steps[i]) for i, axis in self._mapped(array, axes)]
            read += math.prod(items) * math.prod(item.shape) * array.dtype.itemsize
        kept = [n for axis, n in enumerate(self.block) if axis not in stage.reduced]
        cores = [math.prod(x.shape[len(kept) :]) * x.dtype.itemsize for x in stage.outputs]
        written = math.prod(kept) * sum(cores)
        return read, written, _COPIES_IN * read + _COPIES_OUT * written

    def halved(self, axis: int) -> Cuts:
        """Return twice as many blocks along an axis, of whole chunks of the sources."""
        inputs = self.stage.inputs
        steps = [
            grain(x)[i] for x, axes, _ in inputs for i, a in self._mapped(x, axes) if a == axis
        ]
        length, step = -(-self.block[axis] // 2), max(steps, default=1)
        length -= length % step if step < length else 0
        return Cuts(self.stage, (*self.block[:axis], length, *self.block[axis + 1 :]))


def cut(stage: Stage, limit: int, where: str) -> Cuts:
    """Return blocks that stay within a limit, and read as little as possible more than once.

    Of equal choices the outermost axis is cut, along which arrays are stored one after another.
    """
    cuts = Cuts(stage, tuple(max(1, n) for n in stage.shape))
    least = 1 if stage.reads_states else _LEAST
    reduced = [axis for axis in stage.reduced if stage.shape[axis] > 1]
    fixed = reduced[1:] if any(each.is_ordered for each in stage.fun.reductions) else []
    while (held := cuts.sizes()[2]) > limit // 2 or math.prod(cuts.grid) < least:
        axes = [axis for axis, n in enumerate(cuts.block) if n > 1 and axis not in fixed]
        if not axes:
            break
        cuts = min(map(cuts.halved, axes), key=lambda c: math.prod(c.grid) * c.sizes()[0])
    if held > limit // 2:
        raise ValueError(
            f"{where}: the smallest block, of shape {cuts.block}, needs {shown_bytes(held)} in "
            f"flight, more than half of memory_limit={shown_bytes(limit)}; raise it to at least "
            f"{2 * held} bytes"
        )
    return cuts
