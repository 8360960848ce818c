# SPDX-License-Identifier: MIT
"""The loop: one `jax.lax.scan` evaluates the chunks of a batch in bounded memory.

How an operand enters the loop and how an output leaves it (`sinks.py`) decides the memory:

* Even chunks along axis 0 are the ``xs`` and ``ys`` of the scan. Cutting the axis is a reshape, so
  memory stays flat in every direction of differentiation.
* Any other operand is read by index, and so is its tangent. It needs no derivative rule of our own:
  the transpose adds the cotangent of each chunk in place (`access.take_chunk` says when), so that
  no input is copied, for any length and axis.
* Where such a loop is differentiated, its outputs leave as ``ys`` (`Sink.to_differentiate`), which
  costs one copy of them and of their tangents or cotangents. Two alternatives
  that avoid this copy were tried and rejected, on XLA:CPU with JAX 0.10 and 0.12. If chunks are
  written in place, the transpose reads a chunk of the cotangent and then clears it, and XLA copies
  the cotangent in every step. If they are added in place, overlapping items have to be masked, and
  the zeros of that mask made the gradient of the distances in the benchmark a fifth slower.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import core, lax

from rankax._base.arrays import counted
from rankax._loop.access import (
    as_chunk,
    carried_with,
    first_start,
    flatten_items,
    is_stack,
    next_start,
    stack_chunks,
    take_chunk,
    use_once,
    widen,
)
from rankax._loop.keys import PLACE
from rankax._loop.sinks import Each, Sink, Write, sink_for
from rankax._loop.spec import LoopSpec
from rankax._plan.chunks import Chunks
from rankax._progress.report import Reports
from rankax._trace.derivatives import call_with_derivative_of, keep_rules
from rankax._trace.item import ItemProgram, chunk_program, with_axis
from rankax._trace.programs import evaluate

# The checkpoint name of values that a reverse pass keeps: few numbers, each found by a whole loop.
KEPT_IN_REVERSE = "rankax_kept"


class _Policy:
    """What a checkpoint saves.

    JAX's own policy fails for primitives with a parameter named ``prim``, such as those of Equinox.
    Test: ``test_chunked_kernels.py``.
    """

    rankax_key = KEPT_IN_REVERSE  # for `_trace/fingerprint.py`

    def __init__(self) -> None:
        self._of_jax = jax.checkpoint_policies.save_only_these_names(KEPT_IN_REVERSE)

    def __call__(self, primitive: Any, /, *_: Any, **params: Any) -> Any:
        return self._of_jax(primitive, name=params.get("name"))


_policy = _Policy()


class _Operands(NamedTuple):
    """The arrays of a loop: ``shared`` by all chunks, ``sliced`` by index, or ``stacked`` rows.

    Before the loop, sliced operands have the shape that `flatten_items` returns, and if they are
    differentiated, the dtype that `widen` returns. A step reads them with `take_chunk`.
    """

    shared: list[Any]
    sliced: list[Any]
    stacked: list[Any]


Chunk = Callable[[Any, _Operands], list[Any]]  # the outputs of the chunk that starts at an index


def map_in_chunks(
    item: ItemProgram,
    leaves: Sequence[Any],
    spec: LoopSpec,
    sink: Sink | None = None,
) -> list[Any]:
    """Evaluate the program of one item for all items of ``leaves``, which are all mapped.

    ``sink`` takes all outputs; by default, each output has a sink of its own.
    """
    key = spec, sink
    if spec.derivative is None or not spec.differentiable:
        loop = _loop_of(item, leaves, spec, sink)
        if loop.differentiated is None or not spec.differentiable:
            return loop.evaluated(loop.operands)
        return call_with_derivative_of(loop.differentiated, loop.evaluated, loop.operands, key=key)
    here = dataclasses.replace(spec, derivative=None)
    there = dataclasses.replace(here, chunks=spec.derivative)

    def differentiated(consts: list[Any], leaves: list[Any]) -> list[Any]:
        return map_in_chunks(item.with_constants(consts), leaves, there, sink)

    def evaluated(consts: list[Any], leaves: list[Any]) -> list[Any]:
        loop = _loop_of(item.with_constants(consts), leaves, here, sink)
        return loop.evaluated(loop.operands)

    arrays = list(item.closed.consts), list(leaves)
    return call_with_derivative_of(differentiated, evaluated, *arrays, key=key)


class _Loop(NamedTuple):
    """A loop as a function of its operands, and the one to differentiate in its place, if any."""

    evaluated: Callable[[_Operands], list[Any]]
    differentiated: Callable[[_Operands], list[Any]] | None
    operands: _Operands


def _loop_of(item: ItemProgram, leaves: Sequence[Any], spec: LoopSpec, sink: Sink | None) -> _Loop:
    chunks, axes = spec.chunks, spec.axes
    # As a jaxpr: the kernel is traced once, and all that it closes over becomes an operand, as
    # `call_with_derivative_of` requires.
    avals = [with_axis(x, axis, chunks.size) for x, axis in zip(leaves, axes, strict=True)]
    places = [with_axis(PLACE, 0, chunks.size)] if spec.numbered else []
    inputs = [*avals, *places]
    closed = keep_rules(_chunk_program(item, inputs, spec))
    run = apart_from_constants(closed, inputs)
    if sink is None:
        outputs = zip(closed.out_avals, item.out_axes, strict=True)
        sink = Each(tuple(sink_for(aval, axis, chunks) for aval, axis in outputs))
    is_stacked = [
        is_stack(aval, axis, chunks) and not spec.by_index
        for aval, axis in zip(avals, axes, strict=True)
    ]
    operands = _Operands(list(closed.consts), [], [])
    for leaf, axis, stacked in zip(leaves, axes, is_stacked, strict=True):
        if stacked:
            operands.stacked.append(stack_chunks(leaf, chunks))
        else:
            operands.sliced.append(flatten_items(leaf, axis))
    sliced_axes = [axis for axis, stacked in zip(axes, is_stacked, strict=True) if not stacked]

    def chunk_at(start: Any, operands: _Operands, *, once: bool = False) -> list[Any]:
        pairs = zip(operands.sliced, sliced_axes, strict=True)
        windows = [take_chunk(leaf, start, chunks, axis) for leaf, axis in pairs]
        if once:
            pairs = zip(windows, sliced_axes, strict=True)
            windows = [use_once(window, chunks.size, axis) for window, axis in pairs]
        sliced, rows = iter(windows), iter(operands.stacked)
        chunk = [
            as_chunk(next(rows if stacked else sliced), aval)
            for stacked, aval in zip(is_stacked, avals, strict=True)
        ]
        if spec.numbered:
            chunk.append(start.astype(PLACE.dtype) + counted(chunks.size, PLACE.dtype))
        return run(operands.shared, chunk)

    def differentiated(operands: _Operands) -> list[Any]:
        wide = operands._replace(sliced=[widen(leaf) for leaf in operands.sliced])
        read_once = functools.partial(chunk_at, once=True)
        return _scan_chunks(read_once, wide, spec, sink.to_differentiate())

    scan = functools.partial(_scan_chunks, chunk_at, spec=spec, sink=sink)
    writes = isinstance(sink, Each) and any(isinstance(s, Write) for s in sink.sinks)
    return _Loop(scan, differentiated if operands.sliced or writes else None, operands)


def _chunk_program(item: ItemProgram, inputs: Sequence[Any], spec: LoopSpec) -> Any:
    """Trace the program of a chunk, which is itself a loop if the chunk is cut into tiles."""
    chunks = spec.chunks
    axes = (*spec.axes, *([0] if spec.numbered else []))
    if chunks.tile is None:
        return chunk_program(item, axes, inputs, chunks.size)
    tiles = Chunks(chunks.size, chunks.tile, -(-chunks.size // chunks.tile))
    within = dataclasses.replace(
        spec, chunks=tiles, in_axes=axes, numbered=False, by_index=False, progress=None
    )
    return jax.make_jaxpr(lambda *chunk: map_in_chunks(item, chunk, within))(*inputs)


def apart_from_constants(closed: Any, avals: list[Any]) -> Callable[..., list[Any]]:
    """Return the program as a function ``(constants, inputs)`` that holds no constants itself.

    They may be tracers of an outer trace, and JAX keeps such a function alive for a while.
    """
    jaxpr = closed.jaxpr
    if not any(isinstance(const, core.Tracer) for const in getattr(jaxpr, "consts", ())):
        return lambda constants, inputs: evaluate(jaxpr, constants, *inputs)
    # JAX 0.12 keeps constants in the jaxpr, 0.10 does not; tracing turns them into inputs.
    trace = jax.make_jaxpr(lambda consts, inputs: evaluate(jaxpr, consts, *inputs))
    jaxpr = trace(list(closed.consts), avals).jaxpr
    return lambda constants, inputs: evaluate(jaxpr, (), *constants, *inputs)


def _scan_chunks(chunk_at: Chunk, operands: _Operands, spec: LoopSpec, sink: Sink) -> list[Any]:
    """Evaluate the chunks one after another, and pass their outputs to the sink."""
    chunks = spec.chunks
    reports = spec.progress and Reports(spec.progress, chunks.length, chunks.size, chunks.steps)
    # Inside a scan, XLA cannot merge the recomputation with the forward pass, so the barriers of
    # prevent_cse are not needed.
    checkpointed = functools.partial(jax.checkpoint, prevent_cse=False, policy=_policy)
    if spec.checkpoint:
        chunk_at = checkpointed(chunk_at)

    def one_step(held: Any, start: Any, operands: _Operands) -> Any:
        return sink.step(held, chunk_at(start, operands), start)

    if spec.checkpoint and not spec.linear:
        one_step = checkpointed(one_step)

    def step(carry: tuple[Any, Any], stacked: Any) -> Any:
        start, held = carry
        held, rows = one_step(held, start, operands._replace(stacked=stacked))
        if reports is not None:  # outside the checkpoints, which would report again
            reports.step(start)
        return (next_start(start, chunks), carried_with(held, operands)), rows

    init = first_start(chunks), carried_with(sink.start(), operands)
    (end, held), rows = lax.scan(step, init, operands.stacked, chunks.steps)
    outs = sink.end(held, rows)
    if reports is not None:
        reports.end(end, outs)
    return outs
