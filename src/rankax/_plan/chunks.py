# SPDX-License-Identifier: MIT
"""How an axis is cut into chunks of one size.

A chunk size that divides the axis is preferred, even at the cost of a quarter more steps: it needs
no overlap, and along axis 0 a derivative then copies nothing. If none is that close, the last chunk
starts early and overlaps the one before it; `_loop/access.py` reads it.

In a reduction, items of the overlap that were counted before add nothing (`_loop/loop.py`).
"""

import dataclasses
import math
from collections.abc import Sequence


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
