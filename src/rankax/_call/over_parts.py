# SPDX-License-Identifier: MIT
"""Evaluate a call on each part of a sharded batch, and put the results together.

* `map_parts` joins outputs along the sharded axis.
* `reduce_parts` renumbers the state of each part, sends the states to every device (sums need not
  be sent), and merges them.

Each sharded axis is one more map, outside all loops. The cut itself is in `rankax._devices.parts`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rankax._base.arrays import zeros
from rankax._devices.parts import Parts, gathered, join, over_parts, part_shape
from rankax._loop.reuse import run_kept
from rankax._plan.batch import BatchPlan
from rankax._reduce.merge import RunStates
from rankax._reduce.run import Reduced, Reductions
from rankax._trace.item import ItemProgram

__all__ = ["Begins", "Layout", "map_parts", "mergeable_parts", "plan_of_all", "reduce_parts"]

Leaves = list[Any]
Begins = Mapping[int, Any]  # where a part begins, by axis of the batch


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a batch and its leaves are cut into parts along some batch axes."""

    shape: tuple[int, ...]
    parts: tuple[Parts, ...]
    axes: tuple[tuple[int | None, ...], ...]  # of each leaf: where it has each axis of the batch
    reduced: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of parts along all axes together."""
        return math.prod(parts.count for parts in self.parts)

    def shape_of_part(self, shape: Sequence[int], axes: Sequence[int | None]) -> tuple[int, ...]:
        """Return the shape of one part of a leaf with these batch axes."""
        for parts in self.parts:
            if (axis := axes[parts.axis]) is not None:
                shape = part_shape(shape, axis, parts)
        return tuple(shape)

    def inner(self) -> Layout:
        """Return the layout of one part along the first axis that is cut."""
        first, *rest = self.parts
        shape = part_shape(self.shape, first.axis, first)
        return dataclasses.replace(self, shape=shape, parts=tuple(rest))

    @property
    def first_axes(self) -> list[int | None]:
        return [axes[self.parts[0].axis] for axes in self.axes]

    def begins(self, outside: Begins, number: Any) -> Begins:
        """Return where a part begins, along its axis and those that were cut before."""
        axis = self.parts[0].axis
        each = np.asarray(self.shape[axis] // self.parts[0].count, number.dtype)
        return {**outside, axis: number * each}

    def place(self, axis: int, *, is_kept: bool) -> int | None:
        """Return where an output has an axis of the batch; None if the axis is reduced."""
        if is_kept:
            return axis
        if axis in self.reduced:
            return None
        return axis - sum(other < axis for other in self.reduced)

    @property
    def row(self) -> tuple[int, ...]:
        """The lengths of the reduced axes."""
        return tuple(self.shape[axis] for axis in self.reduced)


def mergeable_parts(
    parts: tuple[Parts, ...],
    plan: BatchPlan,
    reductions: Reductions | None,
    where: str,
    *,
    is_asked: bool,
) -> tuple[Parts, ...]:
    """Drop axes whose parts are not consecutive items of a row, if a reduction needs their order.

    It is an error if the caller asked for such parts, or if JAX could not evaluate them as one.
    """
    if reductions is None or not reductions.are_ordered:
        return parts
    runs: list[Parts] = []
    for each in parts:
        before = math.prod(plan.batch_shape[axis] for axis in plan.reduced if axis < each.axis)
        if each.axis not in plan.reduced or before == 1:
            runs.append(each)
        elif is_asked or each.is_explicit:
            raise ValueError(
                f"{where}: {reductions} takes items in their order, so of the axes that are "
                f"reduced, {plan.reduced}, only the first can be sharded, but axis {each.axis} is"
            )
    return tuple(runs)


def plan_of_all(plan: BatchPlan, whole: BatchPlan, parts: Sequence[Parts]) -> BatchPlan:
    """Return the plan of one part as that of the whole batch."""
    if plan.steps <= 1:  # each device has all of its items in flight
        return whole
    return dataclasses.replace(
        plan,
        batch_shape=whole.batch_shape,
        leaves=whole.leaves,
        parts=tuple((each.axis, each.count) for each in parts if each.count > 1),
    )


def map_parts(
    program: Callable[[ItemProgram, Leaves, Begins], Leaves],
    item: ItemProgram,
    leaves: Sequence[Any],
    layout: Layout,
    key: Any,
) -> Leaves:
    """Map an item over the whole batch by ``program``, which maps it over one part.

    Parameters
    ----------
    program : callable
        Takes the item, the leaves of one part and where the part begins; returns arrays.
    item : ItemProgram
    leaves : sequence of arrays
    layout : Layout
    key : hashable
        Everything else that ``program`` depends on.
    """

    def walk(layout: Layout, begins: Begins, item: ItemProgram, leaves: Leaves) -> Leaves:
        if not layout.parts:
            return program(item, leaves, begins)
        parts = layout.parts[0]

        def map_part(consts: Leaves, leaves: Leaves, number: Any) -> Leaves:
            inside = layout.begins(begins, number)
            return walk(layout.inner(), inside, item.with_constants(consts), leaves)

        outs = over_parts(map_part, parts, item.closed.consts, leaves, layout.first_axes)
        for i, axis in enumerate(item.out_axes):
            if axis is not None:  # with several batch axes, they are all in front
                outs[i] = join(outs[i], axis if len(layout.shape) == 1 else parts.axis, parts)
        return outs if None not in item.out_axes else _with_shared(outs, item)

    return run_kept(functools.partial(walk, layout, {}), item, leaves, (layout, key))


def _with_shared(outs: Leaves, item: ItemProgram) -> Leaves:
    """Recompute the outputs that are the same for all items, so that no device has to send them.

    They do not depend on the item, so any item will do; the other outputs are not computed.
    """
    shared = item(*(zeros(aval.shape, aval.dtype) for aval in item.closed.in_avals))
    triples = zip(outs, shared, item.out_axes, strict=True)
    return [one if axis is None else out for out, one, axis in triples]


def reduce_parts(
    program: Callable[[ItemProgram, Leaves, Begins, Reductions], Reduced],
    item: ItemProgram,
    leaves: Sequence[Any],
    layout: Layout,
    reductions: Reductions,
    key: Any,
) -> Any:
    """Reduce an item over the whole batch by ``program``, which reduces one part; return a tree."""

    def walk(
        layout: Layout, begins: Begins, reductions: Reductions, item: ItemProgram, leaves: Leaves
    ) -> Reduced:
        if not layout.parts:
            return program(item, leaves, begins, reductions)
        parts, inner = layout.parts[0], layout.inner()
        is_cut = parts.axis in layout.reduced
        of_part = reductions
        if is_cut:
            of_part = reductions.for_runs(math.prod(layout.row), over_devices=True)
        results: list[Reduced] = []

        def reduce_part(consts: Leaves, leaves: Leaves, number: Any) -> Leaves:
            inside = layout.begins(begins, number)
            reduced = walk(inner, inside, of_part, item.with_constants(consts), leaves)
            if is_cut:
                begin = layout.begins({}, number)
                starts = [begin.get(axis, 0) for axis in layout.reduced]
                runs = RunStates(reductions, reduced.outputs, layout.row)
                reduced = runs.reduced(runs.renumber(reduced.values, inner.row, starts))
            results.append(reduced)
            return reduced.arrays

        outs = over_parts(reduce_part, parts, item.closed.consts, leaves, layout.first_axes)
        return _joined(results[-1].with_arrays(outs), layout, reductions)

    def whole(item: ItemProgram, leaves: Leaves) -> Any:
        return walk(layout, {}, reductions, item, leaves).assembled()

    # A user-defined function may change between calls and stay the same object.
    kept = None if reductions.are_ordered else (layout, reductions, key)
    return run_kept(whole, item, leaves, kept)


def _joined(reduced: Reduced, layout: Layout, reductions: Reductions) -> Reduced:
    """Join kept outputs along the axis that was cut, and merge the states of reduced ones."""
    parts = layout.parts[0]
    arrays: list[jax.Array] = []
    for array, is_kept in zip(reduced.arrays, reduced.is_kept, strict=True):
        axis = layout.place(parts.axis, is_kept=is_kept)
        arrays.append(array if axis is None else join(array, axis, parts))
    reduced = reduced.with_arrays(arrays)
    if parts.axis not in layout.reduced:
        return reduced
    runs = RunStates(reductions, reduced.outputs, layout.row)
    batch = len(layout.shape) - len(layout.reduced)
    gather = functools.partial(gathered, parts=parts)
    values = runs.merge(reduced.values, batch, gather)
    return runs.reduced(values if reductions.of_run is not None else runs.finish(values, batch))
