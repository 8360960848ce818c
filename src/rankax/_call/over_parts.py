# SPDX-License-Identifier: MIT
"""Evaluate a call on each part of a batch that devices share, and put the results together.

* `map_parts` joins outputs along the axis that is cut.
* `reduce_parts` renumbers the state of each part, sends the states to every device (sums need not
  be sent), and merges them.

Each axis that is cut is one more map, outside all loops. The cut itself is in
`rankax._devices.parts`.

Where the devices do not divide a reduced axis, not every first item of a part counts. So each
device reduces the first item by itself, then the others, and merges the two states only if the
item counts. A mask inside the loop would cost time in each step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.arrays import zeros
from rankax._devices.parts import Parts, gathered, join, over_parts
from rankax._devices.place import put
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._reduce.merge import RunStates
from rankax._reduce.run import Reduced, Reductions
from rankax._trace.item import ItemProgram

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

    def runs(self) -> list[Layout]:
        """Return the layout of one part along the first axis that is cut.

        Of a reduced axis that the parts do not divide, those of its first item and of all others.
        """
        (axis, count), rest = (self.parts[0].axis, self.parts[0].count), self.parts[1:]
        shorter, longer = divmod(self.shape[axis], count)
        sizes = [1, shorter] if longer and axis in self.reduced else [shorter + bool(longer)]
        shapes = [(*self.shape[:axis], size, *self.shape[axis + 1 :]) for size in sizes]
        return [dataclasses.replace(self, shape=shape, parts=rest) for shape in shapes]

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the batch shape of each run of a part along all axes that are cut."""
        return [s for run in self.runs() for s in run.shapes()] if self.parts else [self.shape]

    @property
    def first_axes(self) -> list[int | None]:
        return [axes[self.parts[0].axis] for axes in self.axes]

    def begins(self, outside: Begins, number: Any) -> Begins:
        """Return where a part begins, along its axis and those that were cut before."""
        axis = self.parts[0].axis
        return {**outside, axis: self.parts[0].begin(self.shape[axis], number)}

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


def is_mergeable(axis: int, plan: BatchPlan, reductions: Reductions | None) -> bool:
    """Whether parts of an axis are consecutive items of a row, if a reduction needs their order."""
    before = math.prod(plan.batch_shape[other] for other in plan.reduced if other < axis)
    is_ordered = reductions is not None and reductions.are_ordered
    return not is_ordered or axis not in plan.reduced or before == 1


def mergeable_parts(
    parts: tuple[Parts, ...], plan: BatchPlan, options: Options, where: str
) -> tuple[Parts, ...]:
    """Drop axes whose parts are not `is_mergeable`.

    It is an error if the caller asked for such parts, or if JAX could not evaluate them as one.
    """
    odd = [each for each in parts if not is_mergeable(each.axis, plan, options.reduce)]
    for each in odd:
        if options.devices is not None or each.is_explicit:
            raise ValueError(
                f"{where}: {options.reduce} takes items in their order, so of the axes that are "
                f"reduced, {plan.reduced}, only the first can be sharded, but axis {each.axis} is"
            )
    return tuple(each for each in parts if each not in odd)


def map_parts(
    program: Callable[[ItemProgram, Leaves, Begins], Leaves],
    item: ItemProgram,
    leaves: Sequence[Any],
    layout: Layout,
) -> Leaves:
    """Map an item over the whole batch by ``program``, which maps it over one part.

    Parameters
    ----------
    program : callable
        Takes the item, the leaves of one part and where the part begins; returns arrays.
    item : ItemProgram
    leaves : sequence of arrays
    layout : Layout
    """

    def walk(layout: Layout, begins: Begins, item: ItemProgram, leaves: Leaves) -> Leaves:
        if not layout.parts:
            return program(item, leaves, begins)
        parts = layout.parts[0]

        def map_part(consts: Leaves, leaves: Leaves, number: Any) -> Leaves:
            inside = layout.begins(begins, number)
            return walk(layout.runs()[0], inside, item.with_constants(consts), leaves)

        outs = over_parts(map_part, parts, item.closed.consts, leaves, layout.first_axes)
        for i, axis in enumerate(item.out_axes):
            if axis is not None:  # with several batch axes, they are all in front
                place = axis if len(layout.shape) == 1 else parts.axis
                outs[i] = join(outs[i], place, layout.shape[parts.axis], parts)
        return outs if None not in item.out_axes else _with_shared(outs, item)

    return walk(layout, {}, item, list(leaves))


def placed(item: ItemProgram, leaves: Sequence[Any], layout: Layout) -> tuple[ItemProgram, Leaves]:
    """Put the arrays of an eager call on its devices."""
    pairs, parts = zip(leaves, layout.first_axes, strict=True), layout.parts[0]
    consts = [put(x, None, parts) for x in item.closed.consts]
    return item.with_constants(consts), [put(x, axis, parts) for x, axis in pairs]


def _with_shared(outs: Leaves, item: ItemProgram) -> Leaves:
    """Recompute the outputs that are the same for all items, so that no device has to send them.

    They do not depend on the item, so any item will do; the other outputs are not computed.
    """
    shared = item(*(zeros(aval.shape, aval.dtype) for aval in item.closed.in_avals))
    triples = zip(outs, shared, item.out_axes, strict=True)
    return [one if axis is None else out for out, one, axis in triples]


def reduce_parts(
    program: Callable[[ItemProgram, Leaves, tuple[int, ...], Begins, Reductions], Reduced],
    item: ItemProgram,
    leaves: Sequence[Any],
    layout: Layout,
    reductions: Reductions,
) -> Reduced:
    """Reduce an item over the whole batch by ``program``, which reduces one run.

    It takes the item, the leaves of the run, its batch shape (`Layout.shapes`), where it begins,
    and the reductions.
    """

    def walk(
        layout: Layout, begins: Begins, reductions: Reductions, item: ItemProgram, leaves: Leaves
    ) -> Reduced:
        if not layout.parts:
            return program(item, leaves, layout.shape, begins, reductions)
        parts, is_cut = layout.parts[0], layout.parts[0].axis in layout.reduced
        of_part = reductions
        if is_cut:
            of_part = reductions.for_runs(math.prod(layout.row), over_devices=True)
        results: list[Reduced] = []

        def reduce_part(consts: Leaves, leaves: Leaves, number: Any) -> Leaves:
            here, begin = item.with_constants(consts), layout.begins({}, number)
            runs: list[Reduced] = []
            for at, run in enumerate(layout.runs()):
                own = leaves
                if len(layout.runs()) > 1:  # the first item, then all others
                    ends = at, at + run.shape[parts.axis]
                    pairs = zip(leaves, layout.first_axes, strict=True)
                    own = [x if i is None else lax.slice_in_dim(x, *ends, axis=i) for x, i in pairs]
                    begin = {i: start + np.asarray(at, start.dtype) for i, start in begin.items()}
                reduced = walk(run, {**begins, **begin}, of_part, here, own)
                if is_cut:
                    states = RunStates(reductions, reduced.outputs, layout.row)
                    starts = [begin.get(axis, 0) for axis in layout.reduced]
                    reduced = states.reduced(states.renumber(reduced.values, run.row, starts))
                runs.append(reduced)
            results.append(_with_first(runs, layout, number) if len(runs) > 1 else runs[0])
            return results[-1].arrays

        outs = over_parts(reduce_part, parts, item.closed.consts, leaves, layout.first_axes)
        return _joined(results[-1].with_arrays(outs), layout, reductions)

    return walk(layout, {}, reductions, item, list(leaves))


def _with_first(runs: Sequence[Reduced], layout: Layout, number: Any) -> Reduced:
    """Merge the first item of a part into its state, if the part before does not have the item."""
    first, rest = runs
    axis, count = layout.parts[0].axis, layout.parts[0].count
    counts = number < np.asarray(layout.shape[axis] % count, number.dtype)
    states = RunStates(rest.reductions, rest.outputs, layout.row)
    both = [
        jnp.concatenate(pair, axis) if is_kept else jnp.stack(pair)
        for *pair, is_kept in zip(first.arrays, rest.arrays, rest.is_kept, strict=True)
    ]
    batch = len(layout.shape) - len(layout.reduced)
    merged = jax.tree.leaves(states.merge(rest.with_arrays(both).values, batch))
    flat = zip(merged, rest.arrays, rest.is_kept, strict=True)
    return rest.with_arrays([x if is_kept else jnp.where(counts, x, y) for x, y, is_kept in flat])


def _joined(reduced: Reduced, layout: Layout, reductions: Reductions) -> Reduced:
    """Join kept outputs along the axis that was cut, and merge the states of reduced ones."""
    parts = layout.parts[0]
    arrays: list[jax.Array] = []
    for array, is_kept in zip(reduced.arrays, reduced.is_kept, strict=True):
        axis = layout.place(parts.axis, is_kept=is_kept)
        array = array if axis is None else join(array, axis, layout.shape[parts.axis], parts)
        arrays.append(array)
    reduced = reduced.with_arrays(arrays)
    if parts.axis not in layout.reduced:
        return reduced
    runs = RunStates(reductions, reduced.outputs, layout.row)
    batch = len(layout.shape) - len(layout.reduced)
    gather = functools.partial(gathered, parts=parts)
    values = runs.merge(reduced.values, batch, gather)
    return runs.reduced(values if reductions.of_run is not None else runs.finish(values, batch))
