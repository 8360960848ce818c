# SPDX-License-Identifier: MIT
"""A scan as nested `jax.lax.scan` loops around one step.

A *schedule* arranges the loops. It only cuts the items that it receives and passes them on to the
step, so `run_scan` can choose what the items are. In a derivative they are slices of ``xs``, whose
cotangents form one array. Otherwise they can be nothing at all: the step reads ``xs`` in place, by
a running index.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.arrays import scalar
from rankax._base.functions import function_name
from rankax._loop.reuse import Mode, call_of_kernel, mode_of, run_kept
from rankax._progress.bars import progress_of_call
from rankax._progress.report import Reports
from rankax._scan.body import ScanCall, trace_body
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.item import ItemProgram
from rankax._trace.programs import evaluate

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A traced scan, and how every loop of a schedule runs its steps."""

    length: int
    reverse: bool
    unroll: int | bool
    carry_tree: Any
    y_tree: Any
    jaxpr: Any = None  # of the body
    step: Any = None  # from lists of leaves to lists of leaves

    @property
    def y_avals(self) -> list[Any]:
        """The shapes and dtypes of the output of a step."""
        return [y.aval for y in self.jaxpr.outvars[self.carry_tree.num_leaves :]]

    def on(self, consts: list[Any]) -> Self:
        """Return the loop whose steps are those of the body, which closes over these arrays."""
        carried = self.carry_tree.num_leaves

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = evaluate(self.jaxpr, consts, *carry, *x)
            return out[:carried], out[carried:]

        return dataclasses.replace(self, step=step)

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


# What the body closes over, the first carry, and what the scan loops over.
ScanArrays = tuple[list[Any], list[Any], list[Any]]

# Takes a loop, the first carry and the items; returns the last carry and the tree of all outputs.
Schedule = Callable[[Loop, Any, Any], tuple[Any, Any]]


def run_scan(
    call: ScanCall,
    choose: Callable[[Loop, ScanArrays], tuple[Schedule, bool, Hashable]],
    kept: Callable[[Any], Any] = lambda ys: ys,
) -> tuple[Any, Any]:
    """Trace the body, choose a schedule and whether it reads ``xs`` in place, and run it.

    ``choose`` also returns by what an eager call finds its compiled program (`run_kept`), or None.

    Under `jax.disable_jit` the body itself runs, step by step, on values, and ``kept`` returns what
    the schedule would, given the outputs of all steps.
    """
    # The functions below must not hold `call`: JAX keeps them, and its leaves may be tracers.
    options = call.length, call.reverse, call.unroll
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        carry, ys = lax.scan(call.f, call.init, call.xs, *options)
        return carry, kept(ys)
    with progress_of_call(call.progress if call.length else False, function_name(call.f)) as shown:
        body, init, xs = trace_body(call)
        bare = Loop(*options, *body.out_tree.children())
        loop, consts = dataclasses.replace(bare, jaxpr=body.closed.jaxpr), body.closed.consts
        schedule, in_place, key = choose(loop, (list(consts), init, xs))
        reports = shown and Reports(shown, call.length, 1, call.length)
        carried = len(init)

        def program(body: ItemProgram, leaves: list[Any]) -> tuple[Any, Any]:
            loop = dataclasses.replace(bare, jaxpr=body.closed.jaxpr)
            arrays = list(body.closed.consts), leaves[:carried], leaves[carried:]
            return _run_schedule(schedule, loop, arrays, in_place=in_place, reports=reports)

        mode = mode_of([*init, *xs, *consts])
        if reports is not None or body.closed.effects:
            mode = Mode.STAGED
        key = None if key is None else (key, bare)
        with call_of_kernel(body.where):
            carry, ys = run_kept(lambda: program, body, [*init, *xs], key, mode)
        return bare.carry_tree.unflatten(carry), ys


def _run_schedule(
    schedule: Schedule, loop: Loop, arrays: ScanArrays, *, in_place: bool, reports: Reports | None
) -> tuple[Any, Any]:
    """Return the leaves of the last carry, and the tree of all outputs.

    In place is for a schedule that copies parts of ``xs``: reading ``xs`` by index copies nothing.
    Transposed, however, each inner loop would begin with a cotangent as large as ``xs`` and end by
    adding all of it. So derivatives, of every order, are those of the schedule that slices ``xs``.
    """
    length, reverse = loop.length, loop.reverse

    def run(consts: list[Any], init: list[Any], xs: list[Any], *, by_index: bool) -> Any:
        plain = loop.on(consts)
        if not by_index and reports is None:
            return schedule(plain, init, xs)

        def step(state: tuple[Any, jax.Array], x: Any) -> tuple[tuple[Any, jax.Array], Any]:
            carry, done = state
            if reports is not None:
                reports.step(done)
            if by_index:
                at = length - 1 - done if reverse else done
                x = [lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False) for leaf in xs]
            carry, y = plain.step(carry, x)
            return (carry, done + 1), y

        start = scalar(0, jnp.int32 if length < 2**31 else jnp.int64)
        counting = dataclasses.replace(plain, step=step)
        (carry, done), ys = schedule(counting, (init, start), None if by_index else xs)
        if reports is not None:
            reports.end(done, (carry, ys))
        return carry, ys

    sliced, indexed = (functools.partial(run, by_index=by_index) for by_index in (False, True))
    if in_place and arrays[2]:
        return call_with_derivative_of(sliced, indexed, *arrays)
    return sliced(*arrays)
