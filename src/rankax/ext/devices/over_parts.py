# SPDX-License-Identifier: MIT
"""Evaluate a call on each part of a batch that devices share, and put the results together.

Outputs are joined along the axis that is cut. The state of a reduction is renumbered on its device,
then all states are sent to every device (sums need not be sent), and merged there.

Each device runs one program with its part, by one `jax.shard_map` over the mesh axes that share the
batch. So XLA divides no operation of a kernel, as it would along a sharded axis: it gets gradients
of some convolutions wrong then, sends all items to all devices for an FFT, and puts collectives
into loops. Other axes of the mesh stay as they are, so that weights may be sharded along them.

* What the item closes over is passed in, because a function inside `jax.shard_map` cannot close
  over an array of the mesh. The item is traced before, so that all of it is known.
* The check of what varies among devices (``check_vma``) is off, because the traced item has no such
  types. All that is passed in then counts as varying: each device sums its own cotangent of what
  all items share, and these are added once, after the loops.

Where the devices do not divide an axis, not every first item of a part counts. So each device
evaluates the first item by itself, then the others. A mask inside the loop would cost time in each
step. If the item does not count, its state is not merged, and it sends nothing back (`gated`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from rankax.core.base.arrays import SMALL, as_weak, counted, gated, in_32_bits
from rankax.core.plan.schedule import Shape
from rankax.core.protocols import Layout
from rankax.core.reduce.run import Reductions
from rankax.core.trace.programs import ItemProgram
from rankax.core.walk import Begins, Nest
from rankax.ext.devices.mesh import Parts, divided, gathered, join, with_auto_axes, without_mesh
from rankax.ext.devices.place import put, warn_of_hang
from rankax.ext.runs import RunStates

Leaves = list[Any]
Places = Sequence[int | None]  # where an array has each axis of the batch


@dataclasses.dataclass(frozen=True)
class SharedLayout(Layout):
    """How a batch and its leaves are cut into parts along some batch axes."""

    shape: Shape
    parts: tuple[Parts, ...]
    axes: tuple[tuple[int | None, ...], ...]  # of each leaf: where it has each axis of the batch
    reduced: tuple[int, ...]

    def __bool__(self) -> bool:
        return True

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return math.prod(each.count for each in self.parts)

    @property
    def shown(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"devices": tuple((each.axis, each.count) for each in self.parts if each.count > 1)}

    def placed(self, item: ItemProgram, leaves: Sequence[Any]) -> tuple[ItemProgram, Leaves]:
        return placed(item, leaves, self)

    def walk(self, nests: Mapping[Shape, Nest], item: ItemProgram, leaves: Sequence[Any]) -> Any:
        return over_parts(nests, item, leaves, self)

    @property
    def batch(self) -> int:
        """The number of axes that are kept."""
        return len(self.shape) - len(self.reduced)

    def sizes(self, axis: int) -> list[int]:
        """Return the lengths of the runs of a part along an axis.

        Of an axis that the parts do not divide, the first item is a run of its own.
        """
        count = next((parts.count for parts in self.parts if parts.axis == axis), 1)
        shorter, longer = divmod(self.shape[axis], count)
        return [1, shorter] if longer else [shorter]

    def shapes(self) -> list[Shape]:
        """Return the batch shape of each run of a part."""
        return list(itertools.product(*map(self.sizes, range(len(self.shape)))))

    def begins(self, numbers: Sequence[Any]) -> dict[int, Any]:
        """Return where the parts of these numbers begin."""
        pairs = zip(self.parts, numbers, strict=True)
        return {parts.axis: parts.begin(self.shape[parts.axis], n) for parts, n in pairs}

    def places(self, item: ItemProgram, reductions: Reductions | None) -> list[Places]:
        """Return where the value of each output, or of each reduction, has the axes of the batch.

        Those of a level are where the item says; more than one are all in front.
        """
        every = range(len(self.shape))
        if reductions is None:
            several = len(self.shape) > 1
            return [every if several and a is not None else [a] * len(every) for a in item.out_axes]
        count = itertools.count()
        others = [None if axis in self.reduced else next(count) for axis in every]
        return [every if entry.is_kept else others for entry in reductions.entries]

    def spec(self, places: Places, *, joined: bool = False) -> PartitionSpec:
        """Return how the devices share an array; if it is `joined`, as far as they divide it."""
        names = {
            places[parts.axis]: parts.names
            for parts in self.parts
            if not (joined and self.shape[parts.axis] % parts.count)
        }
        size = max((place for place in names if place is not None), default=-1) + 1
        return PartitionSpec(*(names.get(place) for place in range(size)))

    def joined(self, value: Any, places: Places) -> Any:
        """Return arrays without the items that two parts have."""
        for parts in self.parts:
            if (axis := places[parts.axis]) is not None:
                of_whole = axis, self.shape[parts.axis], parts
                value = jax.tree.map(lambda x, of_whole=of_whole: join(x, *of_whole), value)
        return value


def placed(
    item: ItemProgram, leaves: Sequence[Any], layout: SharedLayout
) -> tuple[ItemProgram, Leaves]:
    """Put the arrays of an eager call on its devices."""
    parts, item = layout.parts[0], without_mesh(item)
    consts = [put(x, None, parts) for x in item.closed.consts]
    pairs = zip(leaves, layout.axes, strict=True)
    return item.with_constants(consts), [put(x, axes[parts.axis], parts) for x, axes in pairs]


def over_parts(
    nests: Mapping[Shape, Nest], item: ItemProgram, leaves: Sequence[Any], layout: SharedLayout
) -> list[Any]:
    """Evaluate an item over the whole batch: each device walks its part.

    Parameters
    ----------
    nests : mapping of Shape to Nest
        One for each of `SharedLayout.shapes`.
    item : ItemProgram
    leaves : sequence of arrays
    layout : SharedLayout

    Returns
    -------
    list
        What `Nest.walk` returns.
    """
    (reductions,) = {nest.reductions for nest in nests.values()}
    places, parts = layout.places(item, reductions), layout.parts
    specs, joined_specs = ([layout.spec(p, joined=j) for p in places] for j in (False, True))
    states = None
    if reductions is not None and (cut := [each for each in parts if each.axis in layout.reduced]):
        # A state gets the parts on an axis in front.
        row = tuple(layout.shape[axis] for axis in layout.reduced)
        states = RunStates(reductions, item.outputs, row)
        names = tuple(name for each in cut for name in each.names)
        pairs = zip(reductions.entries, specs, strict=True)
        specs = [x if entry.is_kept else PartitionSpec(names, *x) for entry, x in pairs]

    warn_of_hang(item)
    arrays = list(map(jnp.asarray, item.closed.consts)), list(map(jnp.asarray, leaves))
    avals = jax.tree.map(jax.typeof, arrays)

    def on_device(numbers: Leaves, consts: Leaves, leaves: Leaves) -> list[Any]:
        consts, leaves = jax.tree.map(as_weak, (consts, leaves), avals)
        part = _Part(nests, item.with_constants(consts), layout, places, states)
        values = part.walk(leaves, layout.begins([lax.squeeze(n, (0,)) for n in numbers]))
        if states is None:
            return values
        pairs = zip(states.reductions.entries, values, strict=True)
        in_front = functools.partial(jax.tree.map, lambda x: lax.expand_dims(x, (0,)))
        return [own if entry.is_kept else in_front(own) for entry, own in pairs]

    def on_all(consts: Leaves, leaves: Leaves) -> list[Any]:
        numbers = [counted(each.count, jnp.uint32) for each in parts]
        of_numbers = [PartitionSpec(each.names) for each in parts]
        mapped = jax.shard_map(
            on_device,
            mesh=parts[0].mesh_here,
            axis_names={name for each in parts for name in each.names},
            in_specs=(of_numbers, PartitionSpec(), list(map(layout.spec, layout.axes))),
            out_specs=specs,
            check_vma=False,
        )
        cut = [divided(x, axes, parts) for x, axes in zip(leaves, layout.axes, strict=True)]
        # Devices add to the cotangents of what they share. If that is small, they are rounded once.
        is_cut = [any(axes[each.axis] is not None for each in parts) for axes in layout.axes]
        shared = [x if own else _in_32_bits_if_small(x) for x, own in zip(cut, is_cut, strict=True)]
        values = mapped(numbers, list(map(_in_32_bits_if_small, consts)), shared)
        if states is not None:
            gather = functools.partial(gathered, mesh=parts[0].mesh_here)
            values = states.merge(values, layout.batch, gather)
            is_whole = states.reductions.of_run is None
            values = states.finish(values, layout.batch) if is_whole else values
        return list(map(layout.joined, values, places))

    # What sums the cotangents of the devices makes their types strong; this conversion, weak again.
    strong = jax.tree.map(_strong, arrays)
    return with_auto_axes(on_all, parts[0].mesh, joined_specs)(*strong)


def _strong(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


@dataclasses.dataclass(frozen=True)
class _Part:
    """The walk of one device."""

    nests: Mapping[Shape, Nest]
    item: ItemProgram
    layout: SharedLayout
    places: Sequence[Places]  # see `SharedLayout.places`
    states: RunStates | None  # if parts are merged

    def walk(self, leaves: Leaves, begins: Begins, shape: Shape = ()) -> list[Any]:
        """Walk a part of which the first axes have this shape, its runs one after another."""
        layout, states, axis = self.layout, self.states, len(shape)
        if axis == len(layout.shape):
            nest = self.nests[shape]
            if states is None:
                return nest.walk(self.item, leaves, begins)
            nest = dataclasses.replace(nest, reductions=states.reductions.for_runs(states.size))
            values = nest.walk(self.item, leaves, begins)
            starts = [begins.get(axis, 0) for axis in layout.reduced]
            return states.renumber(values, [shape[axis] for axis in layout.reduced], starts)
        sizes = layout.sizes(axis)
        if len(sizes) == 1:
            return self.walk(leaves, begins, (*shape, *sizes))
        (parts,) = (parts for parts in layout.parts if parts.axis == axis)
        counts = parts.has_first(layout.shape[axis], begins[axis])
        gate = functools.partial(_gate, counts)
        # Without this, XLA keeps the whole arrays that parts were read from, to read each run.
        leaves = lax.optimization_barrier(leaves)
        first = dataclasses.replace(
            self, item=self.item.with_constants(gate(self.item.closed.consts))
        )

        def items(start: int, stop: int | None) -> Leaves:
            pairs = zip(leaves, (axes[axis] for axes in layout.axes), strict=True)
            return [x if i is None else lax.slice_in_dim(x, start, stop, axis=i) for x, i in pairs]

        after = {**begins, axis: begins[axis] + np.asarray(1, begins[axis].dtype)}
        one = first.walk(gate(items(0, 1)), begins, (*shape, sizes[0]))
        rest = self.walk(items(1, None), after, (*shape, sizes[1]))
        return self._joined(one, rest, axis, counts)

    def _joined(self, first: list[Any], rest: list[Any], axis: int, counts: Any) -> list[Any]:
        """Join the first item with the others; merge their states if the item counts."""
        layout, merged = self.layout, rest
        if axis in layout.reduced:
            assert self.states is not None
            both = _gate(counts, first), _gate(counts, rest)
            merged = self.states.merge_two(*both, layout.batch)

        def joined(place: int | None, merged: Any, first: Any, rest: Any) -> Any:
            if place is not None:
                return jax.tree.map(lambda *pair: jnp.concatenate(pair, place), first, rest)
            if axis in layout.reduced:
                return jax.tree.map(functools.partial(jnp.where, counts), merged, rest)
            return rest  # the same for all items

        places = (own[axis] for own in self.places)
        return list(map(joined, places, merged, first, rest))


def _gate(counts: Any, tree: Any) -> Any:
    return jax.tree.map(functools.partial(gated, counts), tree)


def _in_32_bits_if_small(x: jax.Array) -> jax.Array:
    return in_32_bits(x) if x.size <= SMALL else x
