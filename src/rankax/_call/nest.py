# SPDX-License-Identifier: MIT
"""The nest of maps that a plan names, around a kernel for one item."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rankax._call.over_parts import First, Layout, map_parts, reduce_parts
from rankax._fit.cpu import with_tile
from rankax._loop.keys import PLACE, along, number_items
from rankax._loop.level import map_level
from rankax._loop.spec import LoopSpec
from rankax._plan.chunks import Chunks
from rankax._plan.nesting import Nesting, PlannedReduction
from rankax._progress.report import Progress
from rankax._reduce.row import most_lanes
from rankax._reduce.run import Reduced, Reductions, reduce_row
from rankax._trace.item import ItemProgram, with_axis

__all__ = ["Bounds", "PartNest", "map_levels", "planned_reduction", "reduce_levels", "tiled"]

_MOST_COMPONENTS = 16  # of an item that is stored by component
_MOST_BYTES_COPIED = 2**19


class Bounds(NamedTuple):
    """What bounds the memory of a nest, and who hears how far its outermost loop is."""

    chunk_size: int | None
    checkpoint: bool
    progress: Progress | None = None
    by_index: bool = False  # see `Chunks`


def planned_reduction(
    reductions: Reductions | None, axis: int | tuple[int, ...] | None
) -> PlannedReduction | None:
    """Return what a plan has to know of the reduction, if there is one."""
    if reductions is None:
        return None
    return PlannedReduction(str(reductions), axis, most_lanes())


def tiled(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    nesting: Nesting,
    compiler_options: Mapping[str, Any],
) -> tuple[Callable[..., Any], int | None]:
    """Return ``fun``, which takes one item of each leaf, and how many items a tile should have.

    None: as many as are allowed in flight. It is asked only where there is more than one chunk.
    """
    if nesting.plan.steps <= 1:
        return fun, None
    mapped = zip(*nesting.in_axes, strict=True)
    avals: list[Any] = []
    for leaf, axes in zip(leaves, mapped, strict=True):
        aval = jax.typeof(leaf)
        for _ in range(len(axes) - axes.count(None)):  # batch axes are in front
            aval = with_axis(aval, 0)
        avals.append(aval)
    avals += [PLACE for _ in nesting.splits]
    return with_tile(fun, avals, compiler_options)


def map_levels(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    nesting: Nesting,
    bounds: Bounds,
    first: Mapping[int, Any] | None = None,
) -> Any:
    """Map ``fun``, which takes one item of each leaf, over the levels of a plan.

    ``first`` is for a part of a batch whose keys are split (see `number_items`).
    """
    plan = nesting.plan
    trees: list[Any] = []

    # Only leaves pass through the maps: a class need not take what a level makes of them.
    @functools.wraps(fun)
    def flat(*items: Any) -> list[Any]:
        outs, tree = jax.tree.flatten(fun(*items))
        trees.append(tree)
        return outs

    on_item = flat
    if nesting.splits:
        on_item = number_items(flat, nesting.splits, plan.levels, plan.batch_shape, first)
    outs = _nested(on_item, _specs(nesting, bounds))(*leaves)
    # A level may cover more than one axis of the batch, or none where it has length 1.
    if tuple(level.size for level in plan.levels) != plan.batch_shape:
        shapes = [plan.batch_shape + leaf.shape[len(plan.levels) :] for leaf in outs]
        outs = [jnp.reshape(leaf, shape) for leaf, shape in zip(outs, shapes, strict=True)]
    return jax.tree.unflatten(trees[-1], outs)


def reduce_levels(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    nesting: Nesting,
    reductions: Reductions,
    bounds: Bounds,
    first: Mapping[int, Any] | None = None,
    where: str | None = None,
) -> Reduced:
    """Map ``fun`` over the kept levels of a plan, and reduce its outputs over the others.

    What is returned has the axes of the batch that are kept in front; of outputs that are kept
    whole, all of them. ``first`` is as in `map_levels`.
    """
    plan = nesting.plan
    kept = sum(not level.reduced for level in plan.levels)
    leaves, specs = _lanes_last(leaves, nesting, _specs(nesting, bounds))
    if nesting.splits:
        fun = number_items(fun, nesting.splits, plan.levels, plan.batch_shape, first)
    found: list[Reduced] = []

    @functools.wraps(fun)
    def on_row(*items: Any) -> list[Any]:
        reduced = reduce_row(fun, items, specs[kept:], reductions, where)
        found.append(reduced)
        return reduced.arrays

    arrays = _nested(on_row, specs[:kept])(*leaves)
    kept_shape = tuple(n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced)
    row_shape = tuple(plan.batch_shape[axis] for axis in plan.reduced)
    outs: list[Any] = []
    for array, is_kept in zip(arrays, found[-1].is_kept, strict=True):
        if is_kept:
            core = array.shape[len(plan.levels) :]
            array = jnp.reshape(array, kept_shape + row_shape + core)
            places = range(len(kept_shape), len(plan.batch_shape))
            outs.append(jnp.moveaxis(array, places, plan.reduced))
        else:
            outs.append(jnp.reshape(array, kept_shape + array.shape[kept:]))
    return found[-1].with_arrays(outs)


@dataclasses.dataclass(frozen=True)
class PartNest:
    """The nest of maps around an item for one of several parts of a batch, see `side_by_side.py`.

    ``given`` are the positions of the leaves that the item takes. A part may be a single item along
    an axis, so that the nest does not map all of them.
    """

    nesting: Nesting
    given: tuple[int, ...]
    bounds: Bounds

    def over(
        self,
        item: ItemProgram,
        leaves: Sequence[Any],
        layout: Layout,
        reductions: Reductions | None,
    ) -> Any:
        """Map the item over all parts, which lie as ``layout`` says."""
        nesting = self.nesting
        maps = nesting.plan, nesting.mapped, nesting.in_axes, nesting.reshaped, nesting.splits
        key = maps, self.given, self.bounds
        if reductions is not None:
            return reduce_parts(self._reduced, item, leaves, layout, reductions, key)
        out_axes = [tuple(range(len(layout.shape)))] * len(item.out_names)
        outs = map_parts(self._mapped, item, leaves, layout, out_axes, key)
        return item.out_tree.unflatten(outs)

    def _mapped(self, item: ItemProgram, leaves: list[Any], first: First) -> list[Any]:
        fun, mapped = self._of_part(item, leaves)
        return map_levels(fun, mapped, self.nesting, self.bounds, first)

    def _reduced(
        self, item: ItemProgram, leaves: list[Any], first: First, reductions: Reductions
    ) -> Reduced:
        fun, mapped = self._of_part(item, leaves)

        def in_tree(*items: Any) -> Any:
            return item.out_tree.unflatten(fun(*items))

        return reduce_levels(
            in_tree, mapped, self.nesting, reductions, self.bounds, first, item.where
        )

    def _of_part(
        self, item: ItemProgram, leaves: Sequence[Any]
    ) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Return the item as a function of the leaves that the nest maps, and those leaves."""
        arrays = dict(zip(self.given, leaves, strict=True))
        for position, shape in self.nesting.reshaped:
            if position in arrays:
                arrays[position] = jnp.reshape(arrays[position], shape)

        def of_mapped(*items: Any) -> list[Any]:
            mapped = self.nesting.mapped
            here = {**arrays, **dict(zip(mapped, items, strict=False))}
            numbers = items[len(mapped) :]  # of the item, one for each key that is split
            return item(*(here[position] for position in self.given), *numbers)

        return of_mapped, [arrays[position] for position in self.nesting.mapped]


def _lanes_last(
    leaves: Sequence[Any], nesting: Nesting, specs: Sequence[LoopSpec]
) -> tuple[list[Any], list[LoopSpec]]:
    """Store small vectors by component, where one loop over tiles reads them for every row.

    XLA:CPU fills the lanes of a processor from one component of many items, not from the three of
    one: the derivative is three times as fast. Larger arrays are not copied.
    """
    stored, changed = list(leaves), list(specs)
    for i, leaf in enumerate(leaves):
        mapping = [number for number, axes in enumerate(nesting.in_axes) if axes[i] is not None]
        if len(mapping) != 1 or not _is_small_vector(leaf):
            continue
        level = nesting.plan.levels[mapping[0]]
        if level.reduced and level.tile < level.size:
            stored[i] = jnp.moveaxis(leaf, 0, -1)
            in_axes = list(changed[mapping[0]].in_axes)
            in_axes[i] = jnp.ndim(leaf) - 1
            changed[mapping[0]] = dataclasses.replace(changed[mapping[0]], in_axes=tuple(in_axes))
    return stored, changed


def _is_small_vector(leaf: Any) -> bool:
    if jax.default_backend() != "cpu" or not jnp.issubdtype(jnp.result_type(leaf), jnp.number):
        return False
    components = leaf.size // leaf.shape[0]
    return 1 < components <= _MOST_COMPONENTS and leaf.nbytes <= _MOST_BYTES_COPIED


def _specs(nesting: Nesting, bounds: Bounds) -> list[LoopSpec]:
    """Return one spec for each level of a plan, outermost first."""
    numbered = bool(nesting.splits)
    specs: list[LoopSpec] = []
    reports = bounds.progress
    for around, level in enumerate(nesting.plan.levels):
        axes = nesting.in_axes[around]
        # With a bound of 1 even a single item is a chunk, so that branches are always branches.
        is_loop = level.tile != level.size or (
            level.size == bounds.chunk_size == 1 and not level.reduced
        )
        chunks = Chunks(level.size, level.tile, level.steps)
        if level.reduced and is_loop:  # the remainder is a tile of its own
            chunks = Chunks(level.size, level.tile, level.size // level.tile)
        reports_here = is_loop or level.reduced
        specs.append(
            LoopSpec(
                chunks,
                along(axes, around) if numbered else tuple(axes),
                is_loop,
                numbered,
                bounds.by_index,
                bounds.checkpoint,
                progress=reports if reports_here else None,
            )
        )
        reports = None if reports_here else reports
    return specs


def _nested(fun: Callable[..., Any], specs: Sequence[LoopSpec]) -> Callable[..., Any]:
    for spec in reversed(specs):
        fun = map_level(fun, spec)
    return fun
