# SPDX-License-Identifier: MIT
"""What a loop does with the outputs of its chunks: the protocol, and the one that stores them.

A loop over a level that is kept stores every output. One over a level that is reduced folds some
(`rankax._reduce.states`) and stores the others, by the same `Store`. `Store.as_rows` decides
whether an output is written in place or leaves as rows of the scan; the rows of uneven chunks cost
a derivative one copy (`loop.py` explains why).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.arrays import counted, has_tangent, zeros
from rankax._loop.access import as_row, is_stack, join_chunks, write_chunk
from rankax._plan.chunks import Chunks


@dataclasses.dataclass(frozen=True)
class TileLanes:
    """How the items of a tile lie in lanes: its own, and those of the levels inside, mapped whole.

    An output that is folded has them on its last axes, those of the tile first.
    """

    size: int  # items of the level in a tile
    below: tuple[int, ...]  # the lengths of the levels inside
    dtype: Any  # of the indices of items

    @property
    def count(self) -> int:
        """The number of lanes."""
        return self.size * math.prod(self.below)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one step of a loop evaluated."""

    outs: list[Any]  # outputs of the items; of an item that is a loop itself, what that returns
    at: jax.Array  # the first item, counted along the level
    ok: jax.Array | None  # the items of the level that no earlier step had; None: all
    lanes: TileLanes

    @property
    def index(self) -> jax.Array:
        """The flat index of the item in each lane."""
        dtype = self.lanes.dtype
        each = np.asarray(math.prod(self.lanes.below)).astype(dtype)  # may overflow if not needed
        first = self.at.astype(dtype) * each
        return first + counted(self.lanes.count, dtype)

    @property
    def new(self) -> jax.Array | None:
        """Whether the item in each lane is one that no earlier step had; None: all are."""
        if self.ok is None:
            return None
        each = lax.broadcast_in_dim(self.ok, (self.lanes.size, *self.lanes.below), (0,))
        return lax.reshape(each, (self.lanes.count,))

    def in_lanes(self, position: int) -> jax.Array:
        """Return an output that is folded, with all lanes on the last axis."""
        out = self.outs[position]
        return lax.collapse(out, out.ndim - 1 - len(self.lanes.below))


class Sink:
    """What a loop asks of one output, or of several. Without a carry or rows, they are None."""

    def start(self, lanes: int) -> Any:
        """Return the carry of the first step."""
        raise NotImplementedError

    def step(self, held: Any, tile: Tile) -> tuple[Any, Any]:
        """Return the next carry, and the row of the scan."""
        raise NotImplementedError

    def end(self, held: Any, rows: Any) -> Any:
        """Return what the loop returns."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Store(Sink):
    """One output, an array or a tree of them, whole.

    * As rows: the ``ys`` of the scan. For even chunks along axis 0, joining them is a reshape.
    * Otherwise each chunk is written in place into a carried buffer, for any chunks and axis. The
      transpose would have to clear each chunk of the cotangent after reading it, so that an
      overlapping item does not count twice, and XLA copies the cotangent in every step. So where
      the loop is differentiated, outputs are rows, joined after the loop by one copy.
      A level that is reduced evaluates something else in place of items that an earlier chunk had
      (`without_repeated`), so there even those without a derivative are rows.
    * Without an axis, every chunk returns the same, and the last one is kept.
    """

    position: int
    axis: int | None
    chunks: Chunks
    chunk: Any  # the types of the output of a chunk
    back: bool = False
    reduced: bool = False
    in_lanes: bool = False  # where tiles are put together out of order, there are no rows

    @property
    def avals(self) -> list[Any]:
        """The types of the arrays of a chunk."""
        return jax.tree.leaves(self.chunk)

    @property
    def as_rows(self) -> list[bool]:
        return [
            self.axis is not None
            and not self.in_lanes
            and (
                is_stack(aval, self.axis, self.chunks)
                or (self.back and (self.reduced or has_tangent(aval)))
            )
            for aval in self.avals
        ]

    def start(self, lanes: int) -> list[Any]:
        pairs = zip(self.avals, self.as_rows, strict=True)
        return [None if is_row else self._buffer(aval) for aval, is_row in pairs]

    def _buffer(self, aval: Any) -> jax.Array:
        shape = list(aval.shape)
        if self.axis is not None:
            shape[self.axis] = self.chunks.length
        return zeros(tuple(shape), aval.dtype)

    def step(self, held: list[Any], tile: Tile) -> tuple[list[Any], list[Any]]:
        outs, axis = jax.tree.leaves(tile.outs[self.position]), self.axis
        if axis is None:
            return outs, [None] * len(outs)
        triples = list(zip(held, outs, self.as_rows, strict=True))
        written = [
            x if is_row else write_chunk(x, out, tile.at, axis) for x, out, is_row in triples
        ]
        rows = [as_row(out, self.chunks, axis) if is_row else None for _, out, is_row in triples]
        return written, rows

    def end(self, held: list[Any], rows: list[Any] | None) -> Any:
        none: list[Any] = [None] * len(held)
        triples = zip(held, rows or none, self.as_rows, strict=True)
        axis = self.axis or 0
        outs = [join_chunks(row, self.chunks, axis) if is_row else x for x, row, is_row in triples]
        return jax.tree.unflatten(jax.tree.structure(self.chunk), outs)


def steps_of(folds: Sequence[Sink], held: Sequence[Any], tile: Tile) -> tuple[list[Any], list[Any]]:
    """Return the next carry and the row of each fold."""
    pairs = [fold.step(own, tile) for fold, own in zip(folds, held, strict=True)]
    return [own for own, _ in pairs], [row for _, row in pairs]


def ends_of(folds: Sequence[Sink], held: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
    """Return what a loop returns for each fold."""
    return [fold.end(*own) for fold, *own in zip(folds, held, rows, strict=True)]


def new_items(at: jax.Array, chunks: Chunks) -> jax.Array | None:
    """Return which items of the chunk at an index no earlier chunk has; None: all, in every chunk.

    The last chunk starts early if no chunk divides the axis.
    """
    over = chunks.steps * chunks.size - chunks.length
    if not over:
        return None
    last = at.dtype.type(chunks.length - chunks.size)
    repeated = jnp.where(at == last, at.dtype.type(over), at.dtype.type(0))
    return counted(chunks.size, at.dtype) >= repeated


def without_repeated(chunk: Sequence[jax.Array], axes: Sequence[int], ok: jax.Array) -> list[Any]:
    """Put the last item in place of those that an earlier chunk had.

    The outputs of these count for nothing, but 0 times an infinite derivative is NaN. The transpose
    of this choice drops their cotangents; those of what all items share are finite where that of
    the last item is.
    """

    def each(x: jax.Array, axis: int) -> jax.Array:
        mask = lax.broadcast_in_dim(ok, x.shape, (axis,))
        last = lax.index_in_dim(x, x.shape[axis] - 1, axis)
        return jnp.where(mask, x, lax.stop_gradient(jnp.broadcast_to(last, x.shape)))

    # Chosen in every chunk, XLA:CPU would choose again in each use of the chunk: gradients of pairs
    # take six times as long (JAX 0.10).
    return lax.cond(ok[0], list, lambda chunk: list(map(each, chunk, axes)), list(chunk))
