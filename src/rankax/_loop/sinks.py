# SPDX-License-Identifier: MIT
"""Sinks: how the outputs of the chunks leave the loop and become one array.

A sink starts with a carry (`start`), either adds each chunk to it or emits it as a row of the scan
(`step`), and builds the whole output from both (`end`).

* `Stack`: the rows are the ``ys`` of the scan. For even chunks along axis 0, joining them is a
  reshape.
* `Write`: each chunk is written in place into a carried buffer, for any chunks and axis. Forward,
  that is as good as a stack. Its transpose would have to clear each chunk of the cotangent after
  reading it, so that an overlapping item does not count twice, and XLA copies the cotangent in
  every step. So if such a loop is differentiated, its outputs are rows, joined after the loop by
  one copy.
* `Last`: every chunk returns the same, and the last one is kept.

`Each` gives every output a sink of its own. A reduction folds several outputs at once
(`_reduce/row.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rankax._base.arrays import zeros
from rankax._loop.access import as_row, is_stack, join_chunks, write_chunk
from rankax._plan.chunks import Chunks
from rankax._trace.derivatives import has_tangent


class Sink:
    """What a loop asks of one output, or of all. A sink without a carry or rows returns None."""

    def start(self) -> Any:
        """Return the carry of the first step."""
        return None

    def step(self, carry: Any, chunk: Any, at: jax.Array) -> tuple[Any, Any]:
        """Return the next carry and the row, given the chunk of the items from ``at`` on."""
        raise NotImplementedError

    def end(self, carry: Any, rows: Any) -> Any:
        """Return the whole output."""
        return carry

    def to_differentiate(self) -> Sink:
        """Return the sink of a loop that is differentiated."""
        return self


@dataclasses.dataclass(frozen=True)
class Stack(Sink):
    """Rows of the scan, joined along ``axis``."""

    chunks: Chunks
    axis: int

    def step(self, carry: None, chunk: jax.Array, at: jax.Array) -> tuple[None, jax.Array]:
        return carry, as_row(chunk, self.chunks, self.axis)

    def end(self, carry: None, rows: jax.Array) -> jax.Array:
        return join_chunks(rows, self.chunks, self.axis)


@dataclasses.dataclass(frozen=True)
class Write(Sink):
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

    def to_differentiate(self) -> Sink:
        return Stack(self.chunks, self.axis) if has_tangent(self.chunk) else self


@dataclasses.dataclass(frozen=True)
class Last(Sink):
    """The output of the last chunk, which equals that of every chunk."""

    chunk: Any  # shape and dtype

    def start(self) -> jax.Array:
        return zeros(self.chunk.shape, self.chunk.dtype)

    def step(self, carry: jax.Array, chunk: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
        return chunk, None


@dataclasses.dataclass(frozen=True)
class Each(Sink):
    """A sink of its own for each output."""

    sinks: tuple[Sink, ...]

    def start(self) -> list[Any]:
        return [sink.start() for sink in self.sinks]

    def step(
        self, carry: list[Any], chunk: list[jax.Array], at: jax.Array
    ) -> tuple[list[Any], list[Any]]:
        triples = zip(self.sinks, carry, chunk, strict=True)
        steps = [sink.step(value, out, at) for sink, value, out in triples]
        return [value for value, _ in steps], [row for _, row in steps]

    def end(self, carry: list[Any], rows: list[Any]) -> list[Any]:
        return [
            sink.end(value, row) for sink, value, row in zip(self.sinks, carry, rows, strict=True)
        ]

    def to_differentiate(self) -> Each:
        return Each(tuple(sink.to_differentiate() for sink in self.sinks))


def sink_for(chunk: Any, axis: int | None, chunks: Chunks) -> Sink:
    """Choose the sink of an output with its items along ``axis``; None: the same for all items."""
    if axis is None:
        return Last(chunk)
    return Stack(chunks, axis) if is_stack(chunk, axis, chunks) else Write(chunks, axis, chunk)
