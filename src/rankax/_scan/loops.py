# SPDX-License-Identifier: MIT
"""A scan as nested `jax.lax.scan` loops around one step.

A *schedule* arranges the loops. It only cuts the items that it receives and passes them on to the
step, so `run_scan` can choose what the items are. In a derivative they are slices of ``xs``, whose
cotangents form one array. Otherwise they can be nothing at all: the step reads ``xs`` in place, by
a running index.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.arrays import scalar
from rankax._base.functions import function_location, function_name
from rankax._loop.reuse import Mode, call_of_kernel, mode_of, run_kept
from rankax._progress.bars import progress_of_call
from rankax._progress.report import Reports
from rankax._scan.arguments import ScanCall
from rankax._scan.body import Body, ScanArrays, Step, trace_body
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.item import ItemProgram
from rankax._trace.programs import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class StepLoop:
    """A step of a body, and how every loop of a schedule runs it."""

    step: Step
    body: Body
    reverse: bool
    unroll: int | bool

    def run(self, carry: Any, items: Any, length: int) -> tuple[Any, Any]:
        return lax.scan(self.step, carry, items, length, self.reverse, self.unroll)

    def skip(
        self, carry: Any, items: Any, begin: int, end: int, *, checkpoint: bool = False
    ) -> Any:
        """Return the carry after some steps, counted as in `cut`, without outputs."""
        if begin == end:
            return carry
        only_carry = dataclasses.replace(self, step=lambda c, x: (self.step(c, x)[0], None))
        run = functools.partial(only_carry.run, length=end - begin)
        return (jax.checkpoint(run) if checkpoint else run)(carry, self.cut(items, begin, end))[0]

    def blocks(self, block: Step, carry: Any, items: Any, count: int, size: int) -> tuple[Any, Any]:
        """Loop over ``count`` blocks of ``size`` items; splitting the axis is only a reshape."""
        stacked = jax.tree.map(lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), items)
        unroll = self.unroll if self.unroll is True else max(1, self.unroll // size)
        return lax.scan(block, carry, stacked, count, self.reverse, unroll)

    def cut(self, items: Any, begin: int, end: int) -> Any:
        """Cut the leading axis to some steps, counted in the order of execution."""

        def cut(leaf: jax.Array) -> jax.Array:
            length = leaf.shape[0]
            low, high = (length - end, length - begin) if self.reverse else (begin, end)
            return lax.slice_in_dim(leaf, low, high)

        return jax.tree.map(cut, items)

    def join(self, ys: Any, later: Any) -> Any:
        """Join the outputs of two successive loops; a reversed loop writes backwards."""
        pieces = (later, ys) if self.reverse else (ys, later)
        return jax.tree.map(lambda *leaves: lax.concatenate(leaves, 0), *pieces)


# Takes a loop, the first carry and the items; returns the last carry and the tree of all outputs.
Schedule = Callable[[StepLoop, Any, Any], tuple[Any, Any]]


def run_scan(
    call: ScanCall,
    choose: Callable[[Body, ScanArrays], tuple[Schedule, bool, Hashable]],
    kept: Callable[[Any], Any] = lambda ys: ys,
) -> tuple[Any, Any]:
    """Trace the body, choose a schedule and whether it reads ``xs`` in place, and run it.

    ``choose`` also returns by what an eager call finds its compiled program (`run_kept`), or None.

    Under `jax.disable_jit` the body itself runs, step by step, on values, and ``kept`` returns what
    the schedule would, given the outputs of all steps.

    In place is for a schedule that copies parts of ``xs``: reading ``xs`` by index copies nothing.
    Transposed, however, each inner loop would begin with a cotangent as large as ``xs`` and end by
    adding all of it. So derivatives, of every order, are those of the schedule that slices ``xs``.
    """
    # The functions below must not hold `call`: JAX keeps them, and its leaves may be tracers.
    length, reverse, unroll = call.length, call.reverse, call.unroll
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        carry, ys = lax.scan(call.f, call.init, call.xs, length, reverse, unroll)
        return carry, kept(ys)
    with progress_of_call(call.progress if length else False, function_name(call.f)) as shown:
        body, arrays = trace_body(call)
        schedule, in_place, key = choose(body, arrays)
        if shown is not None:
            schedule = _with_reports(schedule, Reports(shown, length, 1, length))

        bare, count = dataclasses.replace(body, jaxpr=None), len(arrays.init)

        def program(item: ItemProgram, leaves: list[Any]) -> tuple[Any, Any]:
            whole = dataclasses.replace(bare, jaxpr=item.closed.jaxpr)
            own = ScanArrays(list(item.closed.consts), leaves[:count], leaves[count:])
            return _run_schedule(schedule, in_place, whole, own, (length, reverse, unroll))

        closed, leaves = ClosedJaxpr(body.jaxpr, arrays.consts), [*arrays.init, *arrays.xs]
        mode = mode_of([*leaves, *arrays.consts])
        if shown is not None or closed.effects:
            mode = Mode.STAGED
        if key is not None:
            key = key, bare, in_place, length, reverse, unroll
        item = ItemProgram(function_location(call.f), closed, None, (), ())
        with call_of_kernel(item.where):
            carry, ys = run_kept(lambda: program, item, leaves, key, mode)
        return body.carry_tree.unflatten(carry), ys


def _run_schedule(
    schedule: Schedule,
    in_place: bool,
    body: Body,
    arrays: ScanArrays,
    options: tuple[int, bool, int | bool],
) -> tuple[Any, Any]:
    """Return the leaves of the last carry, and the tree of all outputs."""
    length, reverse, unroll = options

    def sliced(arrays: ScanArrays) -> tuple[Any, Any]:
        loop = StepLoop(body.step(arrays.consts), body, reverse, unroll)
        return schedule(loop, arrays.init, arrays.xs)

    def indexed(arrays: ScanArrays) -> tuple[Any, Any]:
        body_step = body.step(arrays.consts)

        def step(state: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], Any]:
            carry, done = state
            at = length - 1 - done if reverse else done
            take = functools.partial(lax.dynamic_index_in_dim, index=at, axis=0, keepdims=False)
            carry, y = body_step(carry, jax.tree.map(take, arrays.xs))
            return (carry, done + 1), y

        loop = StepLoop(step, body, reverse, unroll)
        (carry, _), ys = schedule(loop, (arrays.init, _no_steps(length)), None)
        return carry, ys

    if in_place and arrays.xs:
        return call_with_derivative_of(sliced, indexed, arrays)
    return sliced(arrays)


def _with_reports(schedule: Schedule, reports: Reports) -> Schedule:
    """Return a schedule whose steps count themselves, in the carry, and report."""

    def reporting(loop: StepLoop, carry: Any, items: Any) -> tuple[Any, Any]:
        def step(state: tuple[Any, jax.Array], x: Any) -> tuple[tuple[Any, jax.Array], Any]:
            carry, done = state
            reports.step(done)
            carry, y = loop.step(carry, x)
            return (carry, done + 1), y

        start = carry, _no_steps(reports.length)
        (carry, done), ys = schedule(dataclasses.replace(loop, step=step), start, items)
        reports.end(done, (carry, ys))
        return carry, ys

    return reporting


def _no_steps(length: int) -> jax.Array:
    return scalar(0, jnp.int32 if length < 2**31 else jnp.int64)
