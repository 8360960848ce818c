# SPDX-License-Identifier: MIT
"""The loop: one `jax.lax.scan` walks the chunks, in bounded memory.

How an operand reaches it, and how an output leaves it (`sinks.py`), decides the memory:

* Even chunks along axis 0 are the scan's own ``xs`` and ``ys``. Splitting the axis is a reshape, so
  nothing is copied in any direction of differentiation.
* Any other operand is read by index, and so is its tangent; the transpose adds each chunk's
  cotangent in place (`take_chunk` says what makes that so).
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
from rankax._progress.report import Reports
from rankax._trace.derivatives import call_with_derivative_of, keep_rules
from rankax._trace.item import ItemProgram, chunk_program, with_axis

__all__ = ["KEPT_IN_REVERSE", "apart_from_constants", "map_in_chunks"]


# The name of what a reverse pass keeps of each chunk: a few numbers that took a whole walk to find.
KEPT_IN_REVERSE = "rankax_kept"


class _Operands(NamedTuple):
    """What a chunk reads: ``shared`` whole, ``sliced`` by index, ``stacked`` as its own row.

    Before the loop those that are sliced are as `flatten_items` returns them, and `widen` where
    they are differentiated; inside as `take_chunk` does.
    """

    shared: list[Any]
    sliced: list[Any]
    stacked: list[Any]


Body = Callable[[_Operands, Any], list[Any]]  # of a chunk, and where it starts


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The fixed facts of one loop."""

    spec: LoopSpec
    sliced_axes: tuple[int, ...]
    sink: Sink
    reports: Reports | None


def map_in_chunks(
    item: ItemProgram,
    leaves: Sequence[Any],
    spec: LoopSpec,
    sink: Sink | None = None,
) -> list[Any]:
    """Run the program of one item for all items of ``leaves``, which are the mapped ones.

    ``sink`` takes all outputs; by default each output has a sink of its own.
    """
    chunks, axes = spec.chunks, spec.axes
    # A jaxpr, so that a kernel is traced once and everything it closes over becomes an operand,
    # which `call_with_derivative_of` requires.
    avals = [with_axis(x, axis, chunks.size) for x, axis in zip(leaves, axes, strict=True)]
    places = [with_axis(PLACE, 0, chunks.size)] if spec.numbered else []
    inputs = [*avals, *places]
    closed = keep_rules(chunk_program(item, [*axes, *(0 for _ in places)], inputs, chunks.size))
    evaluate = apart_from_constants(closed, inputs)
    if sink is None:
        outputs = zip(closed.out_avals, item.out_axes, strict=True)
        sink = Each(tuple(sink_for(aval, axis, chunks) for aval, axis in outputs))
    stacks = [
        is_stack(aval, axis, chunks) and not spec.by_index
        for aval, axis in zip(avals, axes, strict=True)
    ]
    sliced_axes = tuple(axis for axis, stack in zip(axes, stacks, strict=True) if not stack)

    def body(operands: _Operands, start: Any) -> list[Any]:
        sliced, stacked = iter(operands.sliced), iter(operands.stacked)
        chunk = [
            as_chunk(next(stacked if stack else sliced), aval)
            for stack, aval in zip(stacks, avals, strict=True)
        ]
        if spec.numbered:
            chunk.append(start.astype(PLACE.dtype) + counted(chunks.size, PLACE.dtype))
        return evaluate(operands.shared, chunk)

    operands = _Operands(list(closed.consts), [], [])
    for leaf, axis, stack in zip(leaves, axes, stacks, strict=True):
        if stack:
            operands.stacked.append(stack_chunks(leaf, chunks))
        else:
            operands.sliced.append(flatten_items(leaf, axis))
    reports = spec.progress and Reports(spec.progress, chunks.length, chunks.size, chunks.steps)
    walk = _Loop(spec, sliced_axes, sink, reports)
    try:
        return _run(body, walk, operands)
    except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
        raise item.reuses_key() from error


def apart_from_constants(closed: Any, avals: list[Any]) -> Callable[..., list[Any]]:
    """Return the program as a function ``(constants, inputs)`` that holds no constants itself.

    For they may be tracers of an outer trace, and JAX remembers such a function for a while.
    """
    jaxpr = closed.jaxpr
    if not any(isinstance(const, core.Tracer) for const in getattr(jaxpr, "consts", ())):
        return lambda constants, inputs: core.eval_jaxpr(jaxpr, constants, *inputs)
    # JAX 0.12 keeps them in the jaxpr, 0.10 does not, so they become inputs; `fun` is not rerun.
    opened = jax.make_jaxpr(lambda consts, inputs: core.eval_jaxpr(jaxpr, consts, *inputs))
    jaxpr = opened(list(closed.consts), avals).jaxpr
    return lambda constants, inputs: core.eval_jaxpr(jaxpr, (), *constants, *inputs)


def _run(body: Body, walk: _Loop, operands: _Operands) -> list[Any]:
    """Run the loop; where it reads or writes by index, its derivative is that of another one."""
    writes = isinstance(walk.sink, Each) and any(isinstance(s, Write) for s in walk.sink.sinks)
    if not operands.sliced and not writes:
        return _loop(body, walk, operands)

    def body_that_reads_once(operands: _Operands, start: Any) -> list[Any]:
        windows = zip(operands.sliced, walk.sliced_axes, strict=True)
        once = [use_once(window, walk.spec.chunks.size, axis) for window, axis in windows]
        return body(operands._replace(sliced=once), start)

    def to_differentiate(operands: _Operands) -> list[Any]:
        sink = walk.sink.to_differentiate()
        wide = operands._replace(sliced=[widen(leaf) for leaf in operands.sliced])
        return _loop(body_that_reads_once, dataclasses.replace(walk, sink=sink), wide)

    return call_with_derivative_of(to_differentiate, functools.partial(_loop, body, walk), operands)


def _loop(body: Body, walk: _Loop, operands: _Operands) -> list[Any]:
    """Walk the chunks once, and hand their outputs to the sink."""
    chunks, sink, reports = walk.spec.chunks, walk.sink, walk.reports

    def one_chunk(start: Any, operands: _Operands) -> list[Any]:
        window = [
            take_chunk(leaf, start, chunks, axis)
            for leaf, axis in zip(operands.sliced, walk.sliced_axes, strict=True)
        ]
        return body(operands._replace(sliced=window), start)

    # A scan keeps the recomputation apart by itself, so the barriers of prevent_cse are waste.
    policy = jax.checkpoint_policies.save_only_these_names(KEPT_IN_REVERSE)
    checkpointed = functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)
    if walk.spec.checkpoint:
        one_chunk = checkpointed(one_chunk)

    def one_step(held: Any, start: Any, operands: _Operands) -> Any:
        return sink.step(held, one_chunk(start, operands), start)

    if walk.spec.checkpoint and not walk.spec.linear:
        one_step = checkpointed(one_step)

    def step(carry: tuple[Any, Any], stacked: Any) -> Any:
        start, held = carry
        held, rows = one_step(held, start, operands._replace(stacked=stacked))
        if reports is not None:  # outside the checkpoints, which would report again
            reports.step(start)
        return (next_start(start, chunks), held), rows

    init = first_start(chunks), carried_with(sink.start(), operands)
    (end, held), rows = lax.scan(step, init, operands.stacked, chunks.steps)
    outs = sink.end(held, rows)
    if reports is not None:
        reports.end(end, outs)
    return outs
