# SPDX-License-Identifier: MIT
"""What one call needs, from shapes alone: the batch shape and the maps that cover it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from rankax._slicing import split_into_chunks

__all__ = ["BatchPlan", "LeafPlan", "Level", "Shape", "plan_levels"]

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Level:
    """One map of the nest.

    Attributes
    ----------
    size : int
        Items along this level.
    tile : int
        How many of them are evaluated at once; ``size`` where the level is a plain `jax.vmap`.
    axes : tuple of int
        The axes of the batch shape that this level covers; several where adjacent ones are merged.
    mapped : tuple of bool
        For each ranked leaf, whether this level maps it; the others are passed whole.
    """

    size: int
    tile: int
    axes: tuple[int, ...]
    mapped: tuple[bool, ...]

    @property
    def steps(self) -> int:
        """How many tiles cover this level."""
        return -(-self.size // self.tile) if self.tile else 0


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One ranked leaf of a call.

    Attributes
    ----------
    path : str
        Where it is, in the caller's words: ``pose.rotation``.
    shape : tuple of int
        As it was passed.
    rank : int
        How many core axes are declared for it.
    core_shape : tuple of int
        ``shape`` without its leading batch axes.
    batch_axes : tuple of int
        ``shape`` with those axes only.
    declared : str
        The rank as it was written; not compared, since it says the same in other words.
    """

    path: str
    shape: Shape
    rank: int
    core_shape: Shape
    batch_axes: Shape
    declared: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """What one call of a kernel does: printed by ``print(kernel.plan(...))``.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    batch_shape : tuple of int
        What every output gains in front.
    leaves : tuple of LeafPlan
        Every leaf that has a rank, in the order of the parameters.
    levels : tuple of Level
        The nested maps, outermost first.
    """

    kernel: str
    batch_shape: Shape
    leaves: tuple[LeafPlan, ...]
    levels: tuple[Level, ...]

    @property
    def evaluations(self) -> int:
        """How many items the kernel is evaluated for, which is the size of the batch."""
        return math.prod(self.batch_shape)

    @property
    def in_flight(self) -> int:
        """How many of them are evaluated at once."""
        return math.prod(level.tile for level in self.levels)

    @property
    def steps(self) -> int:
        """How many times the kernel's batched program runs, one after another."""
        return math.prod(level.steps for level in self.levels)

    def __str__(self) -> str:
        from rankax._plan_text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from rankax._plan_html import plan_html

        return plan_html(self)


for _public in (BatchPlan, LeafPlan, Level):
    _public.__module__ = "rankax"  # the name that a pickle stores is the one a user can import


@functools.lru_cache(maxsize=4096)  # pure, and the same few shapes come again and again
def plan_levels(
    batches: tuple[Shape, ...], batch_shape: Shape, chunk_size: int | None
) -> tuple[Level, ...]:
    """Nest the maps that cover ``batch_shape``, outermost first.

    Parameters
    ----------
    batches : tuple of shapes
        The batch axes of each leaf; they broadcast to ``batch_shape``.
    chunk_size : int or None
        How many items may be in flight over all levels together.
    """
    columns = [
        tuple(_is_mapped(batch, axis - len(batch_shape), size) for batch in batches)
        for axis, size in enumerate(batch_shape)
    ]
    if chunk_size is None or math.prod(batch_shape) <= chunk_size:
        return tuple(
            Level(size, size, (axis,), column)
            for axis, (size, column) in enumerate(zip(batch_shape, columns, strict=True))
        )
    return _tiled(_merged(batch_shape, columns), chunk_size)


def _is_mapped(batch: Shape, axis: int, size: int) -> bool:
    """Whether a leaf has this axis (counted from the right) at its full length."""
    return -axis <= len(batch) and batch[axis] == size


def _merged(batch_shape: Shape, columns: Sequence[tuple[bool, ...]]) -> list[Level]:
    """Make one level of adjacent axes that every leaf maps alike; drop those of length 1."""
    axes = [axis for axis, size in enumerate(batch_shape) if size != 1]
    levels: list[Level] = []
    for column, group in itertools.groupby(axes, key=lambda axis: columns[axis]):
        members = tuple(group)
        size = math.prod(batch_shape[axis] for axis in members)
        levels.append(Level(size, size, members, column))
    return levels


def _tiled(levels: list[Level], chunk_size: int) -> tuple[Level, ...]:
    """Fill the tile from the innermost level outwards."""
    room = chunk_size
    tiled: list[Level] = []
    for level in reversed(levels):
        tile = level.size if level.size <= room else split_into_chunks(level.size, room).size
        tiled.append(dataclasses.replace(level, tile=tile))
        room //= tile
    return tuple(reversed(tiled))
