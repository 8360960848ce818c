# SPDX-License-Identifier: MIT
"""Evaluate a call on each part of a batch that devices share, and put the results together.

* `map_parts` joins outputs along the axis that is cut.
* `reduce_parts` renumbers the state of each part, sends the states to every device (sums need not
  be sent), and merges them.

`on_devices` runs one program on each device, with its part, by one `jax.shard_map` over the mesh
axes that share the batch. So XLA divides no operation of a kernel, as it would along a sharded
axis: it gets gradients of some convolutions wrong then, sends all items to all devices for an FFT,
and puts collectives into loops. Other axes of the mesh stay as they are, so that weights may be
sharded along them.

* What the item closes over is passed in, because a function inside `jax.shard_map` cannot close
  over an array of the mesh. The item is traced before, so that all of it is known.
* The check of what varies among devices (``check_vma``) is off, because the traced item has no such
  types. All that is passed in then counts as varying: each device sums its own cotangent of what
  all items share, and these are added once, after the loops.

Where the devices do not divide a reduced axis, not every first item of a part counts. So each
device reduces the first item by itself, then the others, and merges the two states only if the
item counts. A mask inside the loop would cost time in each step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from rankax._base.arrays import counted
from rankax._devices.mesh import with_auto_axes, without_mesh
from rankax._devices.parts import Parts, divided, gathered, join
from rankax._devices.place import put, warn_of_hang
from rankax._loop.reuse import run_kept
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._plan.levels import Shape
from rankax._reduce.merge import RunStates
from rankax._reduce.run import Reduced, Reductions
from rankax._trace.item import ItemProgram

Leaves = list[Any]
Begins = Mapping[int, Any]  # where a part begins, by axis of the batch
Places = Sequence[int | None]  # where an array has each axis of the batch


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a batch and its leaves are cut into parts along some batch axes."""

    shape: Shape
    parts: tuple[Parts, ...]
    axes: tuple[tuple[int | None, ...], ...]  # of each leaf: where it has each axis of the batch
    reduced: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of parts along all axes together."""
        return math.prod(parts.count for parts in self.parts)

    @property
    def row(self) -> Shape:
        """The lengths of the reduced axes."""
        return tuple(self.shape[axis] for axis in self.reduced)

    @property
    def batch(self) -> int:
        """The number of axes that are kept."""
        return len(self.shape) - len(self.reduced)

    @property
    def merged(self) -> tuple[Parts, ...]:
        """The parts of reduced axes, whose states are merged."""
        return tuple(parts for parts in self.parts if parts.axis in self.reduced)

    def sizes(self, axis: int) -> list[int]:
        """Return the lengths of the runs of a part along an axis.

        Of a reduced axis that the parts do not divide, the first item is a run of its own.
        """
        count = next((parts.count for parts in self.parts if parts.axis == axis), 1)
        shorter, longer = divmod(self.shape[axis], count)
        is_two = longer and axis in self.reduced
        return [1, shorter] if is_two else [shorter + bool(longer)]

    def shapes(self) -> list[Shape]:
        """Return the batch shape of each run of a part."""
        return list(itertools.product(*map(self.sizes, range(len(self.shape)))))

    def begins(self, numbers: Sequence[Any]) -> dict[int, Any]:
        """Return where the parts of these numbers begin."""
        pairs = zip(self.parts, numbers, strict=True)
        return {parts.axis: parts.begin(self.shape[parts.axis], n) for parts, n in pairs}

    def places(self, first: int) -> Places:
        """Return where an array has the axes of the batch that are kept, from the ``first`` on."""
        count = itertools.count(first)
        every = range(len(self.shape))
        return [None if axis in self.reduced else next(count) for axis in every]

    def spec(
        self, places: Places, *, is_state: bool = False, joined: bool = False
    ) -> PartitionSpec:
        """Return how the devices share an array; if it is `joined`, as far as they divide it."""
        names = {
            places[parts.axis]: parts.names
            for parts in self.parts
            if not (joined and self.shape[parts.axis] % parts.count)
        }
        if is_state and self.merged:
            names[0] = tuple(name for parts in self.merged for name in parts.names)
        size = max((place for place in names if place is not None), default=-1) + 1
        return PartitionSpec(*(names.get(place) for place in range(size)))

    def joined(self, out: Any, places: Places) -> Any:
        """Return an array without the items that two parts have."""
        for parts in self.parts:
            if (axis := places[parts.axis]) is not None:
                out = join(out, axis, self.shape[parts.axis], parts)
        return out


def is_mergeable(axis: int, plan: BatchPlan, reductions: Reductions | None) -> bool:
    """Whether parts of an axis are consecutive items of a row, if a reduction needs their order."""
    before = math.prod(plan.batch_shape[other] for other in plan.reduced if other < axis)
    is_ordered = reductions is not None and reductions.are_ordered
    return not is_ordered or axis not in plan.reduced or before == 1


def mergeable_parts(
    parts: tuple[Parts, ...], plan: BatchPlan, options: Options, where: str
) -> tuple[Parts, ...]:
    """Drop axes whose parts are not `is_mergeable`.

    It is an error if the caller asked for such parts.
    """
    odd = [each for each in parts if not is_mergeable(each.axis, plan, options.reduce)]
    for each in odd:
        if options.devices is not None:
            raise ValueError(
                f"{where}: {options.reduce} takes items in their order, so of the axes that are "
                f"reduced, {plan.reduced}, only the first can be sharded, but axis {each.axis} is"
            )
    return tuple(each for each in parts if each not in odd)


def on_devices(
    fun: Callable[[Leaves, Leaves, Begins], Any],
    item: ItemProgram,
    leaves: Sequence[Any],
    layout: Layout,
    specs: Any,
    join: Callable[[Any], Any],
    joined_specs: Any,
) -> Any:
    """Call ``fun(constants of the item, leaves, begins)`` on each device, with its part.

    Return what ``join`` makes of all outputs. They are shared as ``specs`` say, before and after.
    """

    def on_device(numbers: Leaves, consts: Leaves, leaves: Leaves) -> Any:
        begins = layout.begins([lax.squeeze(number, (0,)) for number in numbers])
        return fun(consts, leaves, begins)

    def on_all(consts: Leaves, leaves: Leaves) -> Any:
        numbers = [counted(parts.count, jnp.uint32) for parts in layout.parts]
        in_specs = (
            [PartitionSpec(parts.names) for parts in layout.parts],
            PartitionSpec(),
            list(map(layout.spec, layout.axes)),
        )
        names = {name for parts in layout.parts for name in parts.names}
        mapped = jax.shard_map(
            on_device,
            mesh=layout.parts[0].mesh_here,
            axis_names=names,
            in_specs=in_specs,
            out_specs=specs,
            check_vma=False,
        )
        cut = [divided(x, axes, layout.parts) for x, axes in zip(leaves, layout.axes, strict=True)]
        return join(mapped(numbers, consts, cut))

    warn_of_hang(item)
    arrays = list(map(jnp.asarray, item.closed.consts)), list(map(jnp.asarray, leaves))
    return with_auto_axes(on_all, layout.parts[0].mesh, joined_specs)(*arrays)


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
    # With several batch axes, outputs have them all in front.
    several = len(layout.shape) > 1
    places = [
        range(len(layout.shape)) if several and axis is not None else [axis] * len(layout.shape)
        for axis in item.out_axes
    ]
    specs, joined_specs = (
        [layout.spec(axes, joined=joined) for axes in places] for joined in (False, True)
    )

    def whole(item: ItemProgram, leaves: Leaves) -> Leaves:
        def on_part(consts: Leaves, leaves: Leaves, begins: Begins) -> Leaves:
            return program(item.with_constants(consts), leaves, begins)

        def join(outs: Leaves) -> Leaves:
            return list(map(layout.joined, outs, places))

        return on_devices(on_part, item, leaves, layout, specs, join, joined_specs)

    item, leaves = _placed(item, leaves, layout)
    return run_kept(whole, item, leaves, (layout, key))


def _placed(item: ItemProgram, leaves: Sequence[Any], layout: Layout) -> tuple[ItemProgram, Leaves]:
    """Put the arrays of an eager call on its devices."""
    parts, item = layout.parts[0], without_mesh(item)
    consts = [put(x, None, parts) for x in item.closed.consts]
    pairs = zip(leaves, layout.axes, strict=True)
    return item.with_constants(consts), [put(x, axes[parts.axis], parts) for x, axes in pairs]


def reduce_parts(
    program: Callable[[ItemProgram, Leaves, Shape, Begins, Reductions], Reduced],
    item: ItemProgram,
    leaves: Sequence[Any],
    layout: Layout,
    reductions: Reductions,
    key: Any,
) -> Any:
    """Reduce an item over the whole batch by ``program``, which reduces one run; return a tree.

    It takes the item, the leaves of the run, its batch shape (`Layout.shapes`), where it begins,
    and the reductions.
    """
    own = reductions
    if layout.merged:
        own = reductions.for_runs(math.prod(layout.row))
    # Of outputs that are kept whole, and of others; states have the parts on an axis in front.
    places = range(len(layout.shape)), layout.places(int(bool(layout.merged)))
    specs = layout.spec(places[0]), layout.spec(places[1], is_state=True)
    joined_specs = tuple(layout.spec(axes, joined=True) for axes in (places[0], layout.places(0)))

    def whole(item: ItemProgram, leaves: Leaves) -> Any:
        results: list[Reduced] = []

        def on_part(consts: Leaves, leaves: Leaves, begins: Begins) -> tuple[Leaves, Leaves]:
            run = functools.partial(program, item.with_constants(consts))
            results.append(_reduced_part(run, leaves, begins, layout, reductions, own))
            kept, states = _apart(results[-1])
            return kept, [lax.expand_dims(x, (0,)) for x in states] if layout.merged else states

        def join(outs: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            pairs = zip(outs, places, strict=True)
            joined = ([layout.joined(x, axes) for x in group] for group, axes in pairs)
            results.append(_merged(_together(results[-1], *joined), layout, reductions))
            return _apart(results[-1])

        outs = on_devices(on_part, item, leaves, layout, specs, join, joined_specs)
        return _together(results[-1], *outs).assembled()

    item, leaves = _placed(item, leaves, layout)
    # A user-defined function may change between calls and stay the same object.
    kept = None if reductions.are_ordered else (layout, reductions, key)
    return run_kept(whole, item, leaves, kept)


def _apart(reduced: Reduced) -> tuple[Leaves, Leaves]:
    """Return the arrays that still have the reduced axes, and the others."""
    pairs = list(zip(reduced.arrays, reduced.is_kept, strict=True))
    return [x for x, is_kept in pairs if is_kept], [x for x, is_kept in pairs if not is_kept]


def _together(reduced: Reduced, kept: Leaves, others: Leaves) -> Reduced:
    """Undo `_apart`."""
    groups = iter(kept), iter(others)
    return reduced.with_arrays([next(groups[not is_kept]) for is_kept in reduced.is_kept])


def _reduced_part(
    program: Callable[[Leaves, Shape, Begins, Reductions], Reduced],
    leaves: Leaves,
    begins: Begins,
    layout: Layout,
    reductions: Reductions,
    own: Reductions,
) -> Reduced:
    """Reduce a part: its runs one after another."""

    def walk(leaves: Leaves, begins: Begins, shape: Shape) -> Reduced:
        """Reduce a part of which the first axes have this shape."""
        if len(shape) == len(layout.shape):
            reduced = program(leaves, shape, begins, own)
            if not layout.merged:
                return reduced
            states = RunStates(reductions, reduced.outputs, layout.row)
            starts = [begins.get(axis, 0) for axis in layout.reduced]
            row = [shape[axis] for axis in layout.reduced]
            return states.reduced(states.renumber(reduced.values, row, starts))
        axis, sizes = len(shape), layout.sizes(len(shape))
        if len(sizes) == 1:
            return walk(leaves, begins, (*shape, *sizes))
        runs: list[Reduced] = []
        for at, size in enumerate(sizes):  # the first item, then all others
            pairs = zip(leaves, (axes[axis] for axes in layout.axes), strict=True)
            some = [
                x if i is None else lax.slice_in_dim(x, at, at + size, axis=i) for x, i in pairs
            ]
            begin = begins[axis] + np.asarray(at, begins[axis].dtype)
            runs.append(walk(some, {**begins, axis: begin}, (*shape, size)))
        return _with_first(runs, layout, axis, begins[axis])

    return walk(leaves, begins, ())


def _with_first(runs: Sequence[Reduced], layout: Layout, axis: int, begin: Any) -> Reduced:
    """Merge the first item of a part into its state, if the part before does not have the item."""
    first, rest = runs
    (parts,) = (parts for parts in layout.parts if parts.axis == axis)
    counts = parts.has_first(layout.shape[axis], begin)
    states = RunStates(rest.reductions, rest.outputs, layout.row)
    both = [
        jnp.concatenate(pair, axis) if is_kept else jnp.stack(pair)
        for *pair, is_kept in zip(first.arrays, rest.arrays, rest.is_kept, strict=True)
    ]
    merged = jax.tree.leaves(states.merge(rest.with_arrays(both).values, layout.batch))
    flat = zip(merged, rest.arrays, rest.is_kept, strict=True)
    return rest.with_arrays([x if is_kept else jnp.where(counts, x, y) for x, y, is_kept in flat])


def _merged(reduced: Reduced, layout: Layout, reductions: Reductions) -> Reduced:
    """Merge the states of all parts, if any are merged."""
    if not layout.merged:
        return reduced
    runs = RunStates(reductions, reduced.outputs, layout.row)
    gather = functools.partial(gathered, mesh=layout.parts[0].mesh_here)
    values = runs.merge(reduced.values, layout.batch, gather)
    if reductions.of_run is None:
        values = runs.finish(values, layout.batch)
    return runs.reduced(values)
