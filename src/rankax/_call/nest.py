# SPDX-License-Identifier: MIT
"""The nest of a plan: one map per level (a `jax.vmap` or a loop) around the program of one item."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._call.over_parts import Begins
from rankax._lockstep.call import walk_in_lanes
from rankax._loop.keys import add_places, number_items
from rankax._loop.level import map_level
from rankax._loop.spec import LoopSpec
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._plan.chunks import Chunks
from rankax._plan.levels import Shape
from rankax._plan.nesting import Nesting
from rankax._plan.shapes import Split
from rankax._progress.bars import Progress
from rankax._reduce.run import Reduced, Reductions, reduce_row

_MOST_COMPONENTS = 16  # of an item that is stored by component
_MOST_BYTES_COPIED = 2**19

# An option with the name of a field of `LoopSpec` goes into every loop. Only one loop reports.
_LOOP_OPTIONS = {field.name for field in dataclasses.fields(LoopSpec)} - {"progress"}


@dataclasses.dataclass(frozen=True)
class Nest:
    """The nested maps of one call, or of one part of it; hashable, as a key of kept programs.

    Attributes
    ----------
    plan : BatchPlan
    specs : tuple of LoopSpec
        One for each level of the plan, outermost first.
    inputs : tuple of int
        The leaves that an item takes.
    mapped : tuple of int
        The inputs that a level maps: not all if a part has only one item along an axis.
    reshaped : tuple of (int, shape)
        Leaves, and their shapes without stretched axes.
    splits : tuple of Split
        The keys that are split, numbered within the whole batch.
    """

    plan: BatchPlan
    specs: tuple[LoopSpec, ...]
    inputs: tuple[int, ...]
    mapped: tuple[int, ...]
    reshaped: tuple[tuple[int, Shape], ...]
    splits: tuple[Split, ...]

    def map(self, item: Any, leaves: Sequence[Any], begins: Begins | None = None) -> list[Any]:
        """Map an item, which returns a list of arrays, over all levels.

        Parameters
        ----------
        item : callable
            Takes one item of each input, then one number for each split.
        leaves : sequence of arrays
            The inputs.
        begins : mapping, optional
            Where a part of a batch begins, if keys are split (see `number_items`).
        """
        plan = self.plan
        fun, leaves = self._entered(item, leaves)
        fun = self._placed(fun, begins)
        sizes = tuple(level.size for level in plan.levels)
        if plan.lanes is not None:
            outs, sizes = walk_in_lanes(fun, leaves, self.specs), (math.prod(sizes),)
        else:
            outs = _nested(fun, self.specs)(*leaves)
        # A level may cover more than one axis of the batch, or none where it has length 1.
        if sizes != plan.batch_shape:
            shapes = [plan.batch_shape + leaf.shape[len(sizes) :] for leaf in outs]
            outs = [jnp.reshape(leaf, shape) for leaf, shape in zip(outs, shapes, strict=True)]
        return outs

    def reduce(
        self,
        item: Any,
        leaves: Sequence[Any],
        reductions: Reductions,
        begins: Begins | None = None,
        where: str | None = None,
    ) -> Reduced:
        """Map an item, which returns a tree, over the kept levels, and reduce it over the others.

        In the result, the kept axes of the batch come first; outputs that are kept whole have all
        axes of the batch.
        """
        plan, kept = self.plan, sum(not level.reduced for level in self.plan.levels)
        fun, leaves = self._entered(item, leaves)
        specs = list(self.specs)
        # A plan of `chunked_reduce` names no leaves. It has one row, whose eager calls would take
        # longer by the copy than they gain.
        if plan.leaves and plan.lanes is None:
            leaves, specs = _lanes_last(leaves, specs, kept)
        fun = self._placed(fun, begins)
        rows: list[Reduced] = []

        @functools.wraps(fun)
        def on_row(*items: Any) -> list[Any]:
            rows.append(reduce_row(fun, items, specs[kept:], reductions, where))
            return rows[-1].arrays

        arrays = _nested(on_row, specs[:kept])(*leaves)
        kept_shape = tuple(n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced)
        row_shape = tuple(plan.batch_shape[axis] for axis in plan.reduced)
        outs: list[Any] = []
        for array, is_kept in zip(arrays, rows[-1].is_kept, strict=True):
            if is_kept:
                core = array.shape[len(plan.levels) :]
                array = jnp.reshape(array, kept_shape + row_shape + core)
                places = range(len(kept_shape), len(plan.batch_shape))
                outs.append(jnp.moveaxis(array, places, plan.reduced))
            else:
                outs.append(jnp.reshape(array, kept_shape + array.shape[kept:]))
        return rows[-1].with_arrays(outs)

    def keeping_rules(self) -> Nest:
        """Return the nest whose lanes leave functions with derivative rules whole."""
        specs = tuple(dataclasses.replace(spec, keep_rules=True) for spec in self.specs)
        return dataclasses.replace(self, specs=specs)

    def _entered(self, item: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the item as a function of the leaves that the nest maps, and those leaves."""
        arrays = dict(zip(self.inputs, leaves, strict=True))
        for position, shape in self.reshaped:
            if position in arrays:
                arrays[position] = jnp.reshape(arrays[position], shape)
        mapped = [arrays[position] for position in self.mapped]
        if self.mapped == self.inputs:
            return item, mapped

        def on_mapped(*items: Any) -> Any:
            here = {**arrays, **dict(zip(self.mapped, items, strict=False))}
            return item(*(here[position] for position in self.inputs), *items[len(mapped) :])

        return on_mapped, mapped

    def _placed(self, fun: Any, begins: Begins | None) -> Any:
        if not self.splits:
            return fun
        return number_items(fun, self.splits, self.plan.levels, self.plan.batch_shape, begins)


def nest_of(
    plan: Nesting,
    inputs: tuple[int, ...],
    options: Options,
    progress: Progress | None = None,
    *,
    splits: tuple[Split, ...] | None = None,
    by_index: bool = False,
) -> Nest:
    """Build the nested maps of a plan.

    Parameters
    ----------
    inputs : tuple of int
        The leaves that an item takes.
    splits : tuple of Split, optional
        The splits of the whole batch, if the plan is that of a part.
    by_index : bool
        As in `LoopSpec`.
    """
    splits = plan.splits if splits is None else splits
    shared = {name: value for name, value in vars(options).items() if name in _LOOP_OPTIONS}
    shared["checkpoint"] = options.checkpoint is not False
    specs: list[LoopSpec] = []
    for around, (level, is_loop) in enumerate(zip(plan.plan.levels, plan.loops, strict=True)):
        chunks = Chunks(level.size, level.tile, level.steps)
        if level.reduced and is_loop:  # the remainder is a tile of its own
            chunks = Chunks(level.size, level.tile, level.size // level.tile)
        if level.chunk:
            chunks = Chunks(level.size, level.chunk, level.size // level.chunk, level.tile)
        shared["derivative"] = level.derivative if is_loop else None
        axes = add_places(plan.in_axes[around], around) if splits else plan.in_axes[around]
        may_report = is_loop or level.reduced or level.in_lanes  # only the outermost loop does
        shared["progress"] = progress if may_report else None
        progress = None if may_report else progress
        shared["lanes"] = plan.plan.lanes if level.in_lanes else None
        specs.append(LoopSpec(chunks, axes, is_loop, bool(splits), by_index, **shared))
    return Nest(plan.plan, tuple(specs), inputs, plan.mapped, plan.reshaped, splits)


def _nested(fun: Any, specs: Sequence[LoopSpec]) -> Callable[..., Any]:
    for spec in reversed(specs):
        fun = map_level(fun, spec)
    return fun


def _lanes_last(
    leaves: Sequence[Any], specs: Sequence[LoopSpec], kept: int
) -> tuple[list[Any], list[LoopSpec]]:
    """Store small vectors by component, if a loop over tiles reads them again for every row.

    They are stored with the items on the last axis, which makes their gradient three times as fast:
    XLA:CPU does not vectorise otherwise. This is a copy, so it is bounded by half a megabyte.
    """
    stored, changed = list(leaves), list(specs)
    for i, leaf in enumerate(leaves):
        levels = [number for number, spec in enumerate(specs) if spec.in_axes[i] is not None]
        if len(levels) != 1 or levels[0] < kept or not specs[levels[0]].is_loop:
            continue
        (level,) = levels
        axis = changed[level].in_axes[i]
        if axis is not None and _is_small_vector(leaf, axis):
            stored[i] = jnp.moveaxis(leaf, axis, -1)
            in_axes = list(changed[level].in_axes)
            in_axes[i] = jnp.ndim(leaf) - 1
            changed[level] = dataclasses.replace(changed[level], in_axes=tuple(in_axes))
    return stored, changed


def _is_small_vector(leaf: Any, axis: int) -> bool:
    if jax.default_backend() != "cpu" or not jnp.issubdtype(jnp.result_type(leaf), jnp.number):
        return False
    components = leaf.size // leaf.shape[axis]
    return 1 < components <= _MOST_COMPONENTS and leaf.nbytes <= _MOST_BYTES_COPIED
