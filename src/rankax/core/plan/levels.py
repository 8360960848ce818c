# SPDX-License-Identifier: MIT
"""The levels of a plan: which maps cover a batch shape, and how each is cut into chunks.

A chunk fills the levels from the innermost outwards. A batch that fits one chunk has one level per
axis, all plain `jax.vmap`, as if there were no bound. Otherwise, adjacent axes that all leaves map
alike are merged first, so that a chunk can span them.

A chunk size that divides an axis is preferred, even at the cost of a quarter more steps: it needs
no overlap, and along axis 0 a derivative then copies nothing. If none is that close, the last chunk
starts early and overlaps the one before it; `core/loop/access.py` reads it.

In a reduction, items of the overlap that were counted before add nothing (`core/loop/loop.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How an axis of ``length`` items is walked: ``steps`` chunks of ``size`` items each.

    Where ``steps * size > length`` the last chunk starts early and overlaps the one before it, so
    that every chunk has the same size and no item is invented.

    A chunk is evaluated at once, unless ``tile`` says how many of its items are.
    """

    length: int
    size: int
    steps: int
    tile: int | None = None

    @property
    def even(self) -> bool:
        """Whether the chunks tile the axis without overlap."""
        return self.steps * self.size == self.length


def split_into_chunks(length: int, chunk_size: int) -> Chunks:
    """Cut an axis into chunks of at most ``chunk_size`` items, alike in size.

    The chunks are as few and then as small as possible, so that little is computed twice: 10 items
    by at most 6 are 5 + 5, not 6 + 6. A chunk that divides the axis is worth up to a quarter more
    steps because it needs no overlap, and so no copy of the outputs in a derivative.
    """
    steps = -(-length // chunk_size)
    size = -(-length // steps)
    if divisor := _divisor(length, -(-4 * size // 5), chunk_size):
        return Chunks(length, divisor, length // divisor)
    return Chunks(length, size, steps)


def even_chunk_size(sizes: Sequence[int], most: int) -> int:
    """Return a chunk size of at most ``most``, and of half as much, that divides all levels.

    Parameters
    ----------
    sizes : sequence of int
        Of the levels, outermost first; a chunk fills them from the innermost outwards.
    most : int
        Returned itself where there is no such chunk size.
    """
    whole = 1  # levels that a chunk covers
    for size in reversed(sizes):
        room = most // whole
        if size > room:
            return whole * (_divisor(size, -(-room // 2), room) or room)
        whole *= size
    return whole


def _divisor(number: int, least: int, most: int) -> int:
    """Return the largest divisor from ``least`` to ``most``, or 0 if there is none."""
    pairs = ((d, number // d) for d in range(1, math.isqrt(number) + 1) if number % d == 0)
    return max((d for pair in pairs for d in pair if least <= d <= most), default=0)


def split_into_tiles(length: int, chunk_size: int, tile: int) -> Chunks:
    """Cut an axis into chunks that are smaller than allowed: at most ``tile`` items, if possible.

    If the chunk divides the axis, so does the tile, so that no derivative copies what it would not
    have copied otherwise. If no divisor of the axis is near ``tile``, each chunk is cut by itself
    into tiles that overlap: then a derivative copies the outputs of one chunk only.
    """
    chunks = split_into_chunks(length, chunk_size)
    if tile >= chunks.size:
        return chunks
    tiles = split_into_chunks(length, tile)
    if tiles.even or not chunks.even:
        return tiles
    divisor = _divisor(length, tile // 4 + 1, tile)
    if divisor:
        return Chunks(length, divisor, length // divisor)
    if chunks.steps == 1:
        return tiles
    return dataclasses.replace(chunks, tile=split_into_chunks(chunks.size, tile).size)


Shape = tuple[int, ...]


class Tiles(NamedTuple):
    """How many items are best evaluated at once; None: as many as a chunk may have."""

    forward: int | None = None
    derivative: int | None = None


WHOLE_CHUNKS = Tiles()


@dataclasses.dataclass(frozen=True)
class Level:
    """One map of the nest.

    Attributes
    ----------
    size : int
        The number of items along this level.
    tile : int
        How many of them are evaluated at once; ``size`` where the level is a plain `jax.vmap`.
    axes : tuple of int
        The axes of the batch shape that this level covers; several where adjacent ones are merged.
    mapped : tuple of bool
        For each ranked leaf, whether this level maps it; the others are passed whole.
    reduced : bool
        Whether the items along this level are reduced.
    chunk : int or None
        If no good tile divides the level: how many items a chunk has, which is cut by itself.
    derivative : Chunks or None
        How a derivative walks this level, if in other tiles.
    in_lanes : bool
        Whether the items along this level end by themselves.
    """

    size: int
    tile: int
    axes: tuple[int, ...]
    mapped: tuple[bool, ...]
    reduced: bool = False
    chunk: int | None = None
    derivative: Chunks | None = None
    in_lanes: bool = False

    @property
    def steps(self) -> int:
        """How many tiles cover this level."""
        chunk = self.chunk or self.size
        return -(-chunk // self.tile) * (self.size // chunk) if self.tile else 0

    @property
    def chunks(self) -> Chunks:
        """How a call walks this level."""
        if self.chunk:
            return Chunks(self.size, self.chunk, self.size // self.chunk, self.tile)
        return Chunks(self.size, self.tile, self.steps)


@functools.lru_cache(maxsize=4096)  # pure, and the same few shapes come again and again
def plan_levels(
    batches: tuple[Shape, ...],
    batch_shape: Shape,
    chunk_size: int | None,
    reduced: frozenset[int] = frozenset(),
    tiles: Tiles = WHOLE_CHUNKS,
) -> tuple[Level, ...]:
    """Nest the maps that cover ``batch_shape``, outermost first; those that are reduced come last.

    Parameters
    ----------
    batches : tuple of shapes
        The batch axes of each leaf; they broadcast to ``batch_shape``.
    chunk_size : int or None
        How many items may be in flight over all levels together.
    reduced : frozenset of int
        The axes of ``batch_shape`` that are reduced.
    tiles : Tiles
        How many items a tile should have where there are chunks, because that is faster.
    """
    aligned = [(None,) * (len(batch_shape) - len(batch)) + batch for batch in batches]
    levels = [
        Level(size, size, (axis,), tuple(batch[axis] == size for batch in aligned), axis in reduced)
        for axis, size in enumerate(batch_shape)
    ]
    levels.sort(key=lambda level: level.reduced)
    if chunk_size is None or math.prod(batch_shape) <= chunk_size:
        return tuple(levels)
    tile, other = (min(chunk_size, best or chunk_size) for best in tiles)
    merged = _merged(levels, batch_shape)
    if reduced:  # what is left over is a tile of its own, so no derivative copies more
        cut = derivative = _cut(merged, tile, tile)
    else:
        cut, derivative = _cut(merged, chunk_size, tile), _cut(merged, chunk_size, other)
    return tuple(
        dataclasses.replace(
            level,
            tile=chunks.tile or chunks.size,
            chunk=chunks.size if chunks.tile else None,
            # A level that is mapped whole is no loop, in any direction.
            derivative=None if other == chunks or chunks.steps == 1 else other,
        )
        for level, chunks, other in zip(merged, cut, derivative, strict=True)
    )


def _merged(levels: Sequence[Level], batch_shape: Shape) -> list[Level]:
    """Make one level of adjacent axes that every leaf maps alike; drop those of length 1."""
    merged: list[Level] = []
    for level in levels:
        if level.size == 1:
            continue
        last = merged[-1] if merged else level
        between = batch_shape[last.axes[-1] + 1 : level.axes[0]]
        is_alike = (last.mapped, last.reduced) == (level.mapped, level.reduced)
        if merged and is_alike and math.prod(between) == 1:
            size = last.size * level.size
            axes = last.axes + level.axes
            merged[-1] = dataclasses.replace(last, size=size, tile=size, axes=axes)
        else:
            merged.append(level)
    return merged


def _cut(levels: Sequence[Level], chunk_size: int, tile: int) -> list[Chunks]:
    """Fill the tile from the innermost level outwards."""
    cut: list[Chunks] = []
    for level in reversed(levels):
        chunks = split_into_tiles(level.size, min(level.size, chunk_size), tile)
        cut.append(chunks)
        in_tile = chunks.tile or chunks.size
        chunk_size //= in_tile
        tile //= in_tile
    return cut[::-1]
