# SPDX-License-Identifier: MIT
"""One step in nested `jax.lax.scan` loops.

A layout only cuts the items it is given, and hands them to the step. So `run_layout` can choose
what they are: nothing, where the step reads ``xs`` in place by a running index, as long as nobody
differentiates; slices of ``xs``, whose cotangents form one array, in a derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.arrays import scalar
from rankax._progress.bars import Progress
from rankax._progress.report import Reports
from rankax._scan.body import Body, Operands, Step
from rankax._scan.steps import cut_steps
from rankax._trace.derivatives import call_with_derivative_of

__all__ = ["Loop", "run_layout"]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A step and how it is looped, which is alike in all parts of a layout."""

    step: Step
    reverse: bool
    unroll: int | bool

    def run(self, carry: Any, items: Any, length: int) -> tuple[Any, Any]:
        return lax.scan(self.step, carry, items, length, self.reverse, self.unroll)

    def skip(self, carry: Any, items: Any, length: int) -> Any:
        if not length:
            return carry
        only_carry = dataclasses.replace(self, step=lambda c, x: (self.step(c, x)[0], None))
        return only_carry.run(carry, items, length)[0]

    def blocks(self, block: Step, carry: Any, items: Any, count: int, size: int) -> tuple[Any, Any]:
        """Loop over ``count`` blocks of ``size`` items; splitting the axis is only a reshape."""
        stacked = jax.tree.map(lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), items)
        unroll = self.unroll if self.unroll is True else max(1, self.unroll // size)
        return lax.scan(block, carry, stacked, count, self.reverse, unroll)

    def cut(self, items: Any, begin: int, end: int) -> Any:
        return cut_steps(items, begin, end, reverse=self.reverse)

    def join(self, ys: Any, later: Any) -> Any:
        """Join the outputs of two successive parts; a reversed loop writes backwards."""
        parts = (later, ys) if self.reverse else (ys, later)
        return jax.tree.map(lambda *leaves: lax.concatenate(leaves, 0), *parts)


def run_layout(
    layout: Callable[[Loop, Any, Any], tuple[Any, Any]],
    body: Body,
    operands: Operands,
    length: int,
    reverse: bool,
    unroll: int | bool,
    *,
    in_place: bool,
    progress: Progress | None = None,
) -> tuple[Any, Any]:
    """Run a layout of the body, and read ``xs`` in place where the layout would copy parts of it.

    Reading by index copies nothing, but transposed, each inner loop would begin with a cotangent as
    large as ``xs`` and end with adding all of it. So a derivative, of any order, is that of the
    layout which slices ``xs``.
    """
    reports = progress and Reports(progress, length, 1, length)
    if reports is not None:
        layout = _reporting(layout, reports)

    def sliced(operands: Operands) -> tuple[Any, Any]:
        loop = Loop(body.step(operands.consts), reverse, unroll)
        return layout(loop, operands.init, operands.xs)

    def indexed(operands: Operands) -> tuple[Any, Any]:
        body_step = body.step(operands.consts)

        def step(state: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], Any]:
            carry, done = state
            at = length - 1 - done if reverse else done
            take = functools.partial(lax.dynamic_index_in_dim, index=at, axis=0, keepdims=False)
            carry, y = body_step(carry, jax.tree.map(take, operands.xs))
            return (carry, done + 1), y

        none_done = scalar(0, jnp.int32 if length < 2**31 else jnp.int64)
        (carry, _), ys = layout(Loop(step, reverse, unroll), (operands.init, none_done), None)
        return carry, ys

    if not in_place or not operands.xs:
        return sliced(operands)
    return call_with_derivative_of(sliced, indexed, operands)


def _reporting(
    layout: Callable[[Loop, Any, Any], tuple[Any, Any]], reports: Reports
) -> Callable[[Loop, Any, Any], tuple[Any, Any]]:
    """Let each step of a layout count, in the carry, and report."""

    def counted(loop: Loop, carry: Any, items: Any) -> tuple[Any, Any]:
        def step(state: tuple[Any, jax.Array], x: Any) -> tuple[tuple[Any, jax.Array], Any]:
            carry, done = state
            reports.step(done)
            carry, y = loop.step(carry, x)
            return (carry, done + 1), y

        none_done = scalar(0, jnp.int32 if reports.length < 2**31 else jnp.int64)
        (carry, done), ys = layout(dataclasses.replace(loop, step=step), (carry, none_done), items)
        reports.end(done, (carry, ys))
        return carry, ys

    return counted
