# SPDX-License-Identifier: MIT
"""The arrays of `rankax.stream`: nothing is evaluated, only the stages of a run are written down.

A call returns arrays that name the stage that will write them. A stage evaluates one function on
every block of its batch. A map is one stage. A reduction is two: the states of blocks, then their
merge and result for each item that is kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankax.core.plan.schedule import Shape
from rankax.ext.blocks.backend import Batch, BatchChunks, Input
from rankax.ext.blocks.programs import Items, Program, record

STATES = "_rankax/states"  # the array of a store that is not a result


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
    outputs : list of Streamed
        What it writes. States have no axes of the batch but those that are kept.
    reduced : tuple of int
        The axes of the batch of which the program returns the states.
    merge : Program or None
        Merges these states.
    rows : array of int or None
        Blocks may be of the rows of ragged items instead, of which these are the lengths; ``shape``
        is then the number of all rows.
    """

    program: Program
    numbers: Sequence[Any]
    inputs: Sequence[Input]
    shape: Shape
    outputs: list[Streamed] = dataclasses.field(default_factory=list)
    reduced: Shape = ()
    merge: Program | None = None
    rows: Any = None

    @property
    def batch(self) -> Shape:
        """The shape of the batch of its inputs."""
        return self.shape if self.rows is None else (len(self.rows),)

    @functools.cached_property
    def _ends(self) -> Any:
        return np.cumsum(self.rows)

    def items(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """Return the items from which a part along an axis is evaluated: the first, the end."""
        if self.rows is None:
            return start, stop
        ends = self._ends
        return np.searchsorted(ends, start, "right"), np.searchsorted(ends - self.rows, stop)

    def part(self, region: tuple[slice, ...], out: Any) -> Any:
        """Return the part of an output that belongs to a block: some rows of its items."""
        if self.rows is None:
            return out
        (part,) = region
        first, _ = self.items(part.start, part.stop)
        skipped = part.start - int(self.rows[:first].sum())
        return out[skipped : skipped + part.stop - part.start]

    @property
    def reads_states(self) -> bool:
        """Whether its inputs are the states that another stage writes."""
        return any(array.stage is not None for array, *_ in self.inputs)


@dataclasses.dataclass(eq=False)
class Streamed:
    """An array that is read (``value``), or that a stage writes."""

    shape: Shape
    dtype: Any
    value: Any = None
    stage: Stage | None = None
    path: str = ""  # of an argument, as errors name it, or in the store
    last: Any = None  # the region that was read last, and its block
    # Of ragged items, whose shape is that of items filled up to the longest; `value` has the rows.
    lengths: Any = None

    @property
    def chunks(self) -> BatchChunks:
        """One block; a run cuts it."""
        return tuple((size,) for size in self.shape)


CAN_RECHUNK = False


def cut(value: Any, chunks: BatchChunks, like: Any) -> Streamed:
    del chunks, like
    return value if isinstance(value, Streamed) else Streamed(value.shape, value.dtype, value)


def positions(lengths: Shape, like: Any) -> Streamed:
    del like
    return Streamed((sum(lengths),), np.dtype(np.int64), range(sum(lengths)))


def map_blocks(program: Program, batch: Batch, items: Items) -> list[Streamed]:
    stage = _stage(program, batch)
    stage.outputs += [Streamed((*stage.shape, *x.shape), x.dtype, stage=stage) for x in items]
    return list(stage.outputs)


def reduce_blocks(state: Program, merge: Program, batch: Batch, axes: Shape) -> Streamed:
    stage = _stage(state, batch, reduced=axes, merge=merge)
    kept = (n for axis, n in enumerate(stage.shape) if axis not in axes)
    whole = *kept, record(state.returns).itemsize
    stage.outputs += [Streamed(whole, np.dtype(np.uint8), stage=stage, path=STATES)]
    return stage.outputs[0]


def _stage(program: Program, batch: Batch, **options: Any) -> Stage:
    shape = tuple(map(sum, batch.chunks))
    return Stage(program, batch.numbers, batch.inputs, shape, **options)
