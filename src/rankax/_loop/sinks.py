# SPDX-License-Identifier: MIT
"""Sinks: how the outputs of the chunks leave the loop and become one.

Each sink has a value to carry at the ``start``, takes what a ``step`` returns into it or hands it
on as a row of the scan, and makes the whole of both at the ``end``.

* `Stack`: the rows are the scan's ``ys``. For even chunks along axis 0, joining them is a reshape.
* `Write`: each chunk is written in place into a carried buffer. That is as good forward, for any
  chunks and axis. But transposed it has to clear from the cotangent what it read, lest an
  overlapped item counts twice, and XLA copies the cotangent at every step. So where such a loop is
  differentiated, its outputs are rows, joined behind the loop by one copy.
* `Last`: every chunk returns the same, and the last one is kept.

`Each` gives every output its own. A reduction folds several outputs at once (`rows.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rankax._base.arrays import zeros
from rankax._loop.access import as_row, is_stack, join_chunks, write_chunk
from rankax._plan.chunks import Chunks

__all__ = ["Each", "Last", "Sink", "Stack", "Write", "sink_for"]


class Sink(Protocol):
    """What a loop asks of an output, or of all. Where there is no carry, or no row, it is None."""

    def start(self) -> Any:
        """Return what is carried into the first step."""
        ...

    def step(self, carry: Any, chunk: Any, at: jax.Array) -> tuple[Any, Any]:
        """Return what is carried on, and the row, for the chunk of the items from ``at``."""
        ...

    def end(self, carry: Any, rows: Any) -> Any:
        """Return the whole output."""
        ...

    def to_differentiate(self) -> Sink:
        """Return the sink to use where the output may have a tangent."""
        ...


@dataclasses.dataclass(frozen=True)
class Stack:
    """Rows of the scan, joined along ``axis``."""

    chunks: Chunks
    axis: int

    def start(self) -> None:
        return None

    def step(self, carry: None, chunk: jax.Array, at: jax.Array) -> tuple[None, jax.Array]:
        del at
        return carry, as_row(chunk, self.chunks, self.axis)

    def end(self, carry: None, rows: jax.Array) -> jax.Array:
        del carry
        return join_chunks(rows, self.chunks, self.axis)

    def to_differentiate(self) -> Stack:
        return self


@dataclasses.dataclass(frozen=True)
class Write:
    """A buffer of the whole output, into which each chunk is written along ``axis``."""

    chunks: Chunks
    axis: int
    chunk: Any  # shape and dtype

    def start(self) -> jax.Array:
        shape = list(self.chunk.shape)
        shape[self.axis] = self.chunks.length
        return zeros(tuple(shape), self.chunk.dtype)

    def step(self, carry: jax.Array, chunk: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
        return write_chunk(carry, chunk, at, self.axis), None

    def end(self, carry: jax.Array, rows: None) -> jax.Array:
        del rows
        return carry

    def to_differentiate(self) -> Sink:
        moves = jnp.issubdtype(self.chunk.dtype, jnp.inexact)
        return Stack(self.chunks, self.axis) if moves else self


@dataclasses.dataclass(frozen=True)
class Last:
    """The output of the last chunk, which is that of every chunk."""

    chunk: Any  # shape and dtype

    def start(self) -> jax.Array:
        return zeros(self.chunk.shape, self.chunk.dtype)

    def step(self, carry: jax.Array, chunk: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
        del carry, at
        return chunk, None

    def end(self, carry: jax.Array, rows: None) -> jax.Array:
        del rows
        return carry

    def to_differentiate(self) -> Last:
        return self


@dataclasses.dataclass(frozen=True)
class Each:
    """A sink of its own for each output."""

    sinks: tuple[Sink, ...]

    def start(self) -> list[Any]:
        return [sink.start() for sink in self.sinks]

    def step(
        self, carry: list[Any], chunk: list[jax.Array], at: jax.Array
    ) -> tuple[list[Any], list[Any]]:
        taken = [
            sink.step(value, out, at)
            for sink, value, out in zip(self.sinks, carry, chunk, strict=True)
        ]
        return [value for value, _ in taken], [row for _, row in taken]

    def end(self, carry: list[Any], rows: list[Any]) -> list[Any]:
        return [sink.end(*found) for sink, *found in zip(self.sinks, carry, rows, strict=True)]

    def to_differentiate(self) -> Each:
        return Each(tuple(sink.to_differentiate() for sink in self.sinks))


def sink_for(chunk: Any, axis: int | None, chunks: Chunks) -> Sink:
    """Choose the sink of an output that has the items of a chunk along ``axis``, if anywhere."""
    if axis is None:
        return Last(chunk)
    return Stack(chunks, axis) if is_stack(chunk, axis, chunks) else Write(chunks, axis, chunk)
