# SPDX-License-Identifier: MIT
"""Plan a call: from the shapes of its leaves to levels, and how leaves enter the nested maps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankax.core.base.messages import function_location, function_name
from rankax.core.declare.dims import Rank
from rankax.core.plan.report import call_error
from rankax.core.plan.schedule import (
    WHOLE_CHUNKS,
    Level,
    Schedule,
    Shape,
    Split,
    Tiles,
    bind_sizes,
    broadcast,
    leaf_plan,
    plan_levels,
    plan_splits,
)

InAxes = tuple[int | None, ...]

NO_ARRAY = -1  # the position of a leaf that is only a shape, as the option batch_shape is


@dataclasses.dataclass(frozen=True)
class Nesting:
    """A plan, and what follows from it for the arrays of a call.

    Arrays are identified by their leaf position.
    """

    plan: Schedule
    sizes: Mapping[str, int] = dataclasses.field(hash=False)  # of the named core dimensions
    mapped: tuple[int, ...]  # the arrays that some level maps
    cores: tuple[Shape, ...]  # of one item of each of them
    batch_axes: tuple[InAxes, ...]  # where each of them, as passed, has each axis of the batch
    in_axes: tuple[InAxes, ...]  # per level, for the mapped arrays
    loops: tuple[bool, ...]  # per level, whether its chunks are evaluated one after another
    reshaped: tuple[tuple[int, Shape], ...] = ()  # array, and its shape without stretched axes
    splits: tuple[Split, ...] = ()  # the keys of which each item gets its own


def plan_nesting(
    fun: Callable[..., Any],
    arrays: Sequence[tuple[int, str, Shape, Rank]],
    chunk_size: int | None,
    tiles: Tiles = WHOLE_CHUNKS,
    untouched: Callable[[], Sequence[tuple[str, Shape]]] = tuple,
    reduce: str = "",
    reduce_axis: int | tuple[int, ...] | None = (),
) -> Nesting:
    """Check the shapes of a call, and plan it.

    Parameters
    ----------
    fun : callable
        The kernel.
    arrays : sequence of (position, path, shape, rank)
        Each leaf that has a rank; last, `NO_ARRAY` for a shape that only broadcasts with them.
    chunk_size : int or None
        How many items may be in flight.
    tiles : Tiles
        How many items a tile should have where there are chunks, because that is faster.
    untouched : callable
        Returns path and shape of the arrays without a rank; called for an error only.
    reduce, reduce_axis
        The name of the reduction, and what it reduces, as the caller says it; by default nothing.

    Raises
    ------
    RankError, CoreDimensionError, BatchShapeError
        As `call_error` words them.
    ValueError
        If an axis to reduce is out of range, or named twice.
    """
    leaves = tuple(leaf_plan(path, shape, rank) for _, path, shape, rank in arrays)
    ranks = [rank for *_, rank in arrays]
    sizes: dict[str, int] = {}
    whole = [i for i, leaf in enumerate(leaves) if len(leaf.shape) >= leaf.rank]
    clashes = bind_sizes([(i, leaves[i].core_shape, ranks[i]) for i in whole], sizes)
    batch_shape, batch_clashes = broadcast([(i, leaves[i].batch_axes) for i in whole])
    clashes += batch_clashes
    if clashes or len(whole) < len(leaves):
        raise call_error(fun, leaves, ranks, clashes, sizes, untouched())
    batches = tuple(leaf.batch_axes for leaf in leaves)
    axes = reduced_axes(fun, reduce_axis, batch_shape)
    levels = plan_levels(batches, batch_shape, chunk_size, frozenset(axes), tiles)
    plan = Schedule(function_name(fun), batch_shape, leaves, levels, reduced=axes, reduce=reduce)
    positions = [position for position, *_ in arrays]
    in_order = sorted(plan.levels, key=lambda level: level.axes)
    batch = [tuple(level.size for level in in_order if level.mapped[i]) for i in range(len(leaves))]
    mapped = [i for i, shape in enumerate(batch) if shape and positions[i] != NO_ARRAY]
    return Nesting(
        plan,
        sizes,
        tuple(positions[i] for i in mapped),
        tuple(leaves[i].core_shape for i in mapped),
        tuple(_batch_axes(leaves[i].batch_axes, batch_shape) for i in mapped),
        tuple(_in_axes(plan.levels[number:], mapped) for number in range(len(plan.levels))),
        loops_of(levels, chunk_size),
        tuple(
            (position, shape + leaf.core_shape)
            for position, shape, leaf in zip(positions, batch, leaves, strict=True)
            if shape != leaf.batch_axes and position != NO_ARRAY
        ),
        plan_splits(fun, leaves, positions, batch_shape),
    )


def loops_of(levels: Sequence[Level], chunk_size: int | None) -> tuple[bool, ...]:
    """Say which levels are loops.

    With a bound of 1 even a single item is a chunk, so that branches are always branches.
    """
    return tuple(
        level.tile != level.size or (level.size == chunk_size == 1 and not level.reduced)
        for level in levels
    )


def reduced_axes(
    fun: Callable[..., Any], axis: int | tuple[int, ...] | None, batch_shape: Shape
) -> tuple[int, ...]:
    """Return the axes to reduce, counted from the front, in order."""
    count = len(batch_shape)
    given = tuple(range(count)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if wrong := [number for number in given if not -count <= number < count]:
        raise ValueError(
            f"{function_location(fun)}: reduce_axis {wrong[0]} is out of range for the batch shape "
            f"{batch_shape}"
        )
    axes = tuple(sorted(number % count for number in given))
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"{function_location(fun)}: reduce_axis {axis} names an axis of the batch shape "
            f"{batch_shape} twice"
        )
    return axes


def _batch_axes(leaf: Shape, batch_shape: Shape) -> InAxes:
    """Return where a leaf with these batch axes has each axis of the batch."""
    absent = len(batch_shape) - len(leaf)
    return tuple(
        axis - absent if axis >= absent and leaf[axis - absent] == size else None
        for axis, size in enumerate(batch_shape)
    )


def _in_axes(levels: Sequence[Level], mapped: Sequence[int]) -> InAxes:
    """Return where each leaf has the first of these levels, while those inside are there too."""
    first, *inside = levels
    return tuple(
        sum(level.mapped[i] and level.axes < first.axes for level in inside)
        if first.mapped[i]
        else None
        for i in mapped
    )
