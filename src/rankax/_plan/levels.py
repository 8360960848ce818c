# SPDX-License-Identifier: MIT
"""Which maps cover a batch shape, and how each is cut into chunks."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from rankax._plan.chunks import split_into_chunks

__all__ = ["Level", "Shape", "plan_levels"]

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
