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

Where the devices do not divide an axis, not every last item of a part counts. So each device
evaluates the others, then the last one by itself. If it does not count, its state is not merged,
and it sends nothing back (`gated`). Two other ways lost (CPU, JAX 0.12):

* A mask, as copies have in a bucket (`ext/bucket.py`). What items share then has a cotangent for
  each item: gradients took 2 to 3 times as long in chunks, and up to 30 times, with 37 times the
  memory, without (100,000 items, weights of 4 x 16). An array of more than 64 numbers has no such
  cotangents, so copies would send it their derivative times 0.
* `jax.lax.cond` of a part with and one without the item: a gradient stores what both compute.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from rankax.core.base.arrays import SMALL, as_weak, counted, gated, in_32_bits
from rankax.core.loop.spec import number_of
from rankax.core.plan.schedule import Plan, Shape
from rankax.core.reduce.run import Reductions
from rankax.core.trace.programs import ItemProgram, evaluate, with_variables
from rankax.core.walk import Nest
from rankax.ext.devices.mesh import Parts, gathered, with_auto_axes
from rankax.ext.devices.plain_types import compares_types, with_plain_types
from rankax.ext.runs import RunStates

Leaves = list[Any]
Places = Sequence[int | None]  # where an array has each axis of the batch


def shapes_of(whole: Plan, parts: Sequence[Parts]) -> list[Shape]:
    """Return the batch shapes of the pieces of a part, the main one last."""
    sizes: list[tuple[int, ...]] = [(n,) for n in whole.batch_shape]
    for each in parts:
        sizes[each.axis] = (1, each.shorter) if each.longer else (each.shorter,)
    return list(itertools.product(*sizes))


def _places(whole: Plan, item: ItemProgram, reductions: Reductions | None) -> list[Places]:
    """Return where the value of each output, or of each reduction, has the axes of the batch.

    Those of a level are where the item says; more than one are all in front.
    """
    every = range(len(whole.batch_shape))
    if reductions is None:
        several = len(every) > 1
        return [every if several and a is not None else [a] * len(every) for a in item.out_axes]
    count = itertools.count()
    others = [None if axis in whole.reduced else next(count) for axis in every]
    return [every if entry.is_kept else others for entry in reductions.entries]


def over_parts(
    nests: Mapping[Shape, Nest],
    item: ItemProgram,
    leaves: Sequence[Any],
    whole: Plan,
    parts: Sequence[Parts],
) -> list[Any]:
    """Evaluate an item over the whole batch: each device walks its part.

    Parameters
    ----------
    nests : mapping of Shape to Nest
        One for each of `shapes_of`.
    item : ItemProgram
    leaves : sequence of arrays
    whole : Plan
        Of the whole batch, without chunks.
    parts : sequence of Parts

    Returns
    -------
    list
        What `Nest.walk` returns.
    """
    *_, shape = shapes_of(whole, parts)
    reductions, kept = nests[shape].reductions, len(whole.batch_shape) - len(whole.reduced)
    places = _places(whole, item, reductions)
    specs, states = [_spec(own, parts) for own in places], None
    if reductions is not None and (cut := [each for each in parts if each.axis in whole.reduced]):
        # A state gets the parts on an axis in front.
        row = tuple(whole.batch_shape[axis] for axis in whole.reduced)
        states = RunStates(reductions, item.outputs, row)
        names = tuple(name for each in cut for name in each.names)
        pairs = zip(reductions.entries, specs, strict=True)
        specs = [x if entry.is_kept else PartitionSpec(names, *x) for entry, x in pairs]
    walk = _walk_on_device(nests, whole, places, states)
    arrays = list(map(jnp.asarray, item.closed.consts)), list(map(jnp.asarray, leaves))
    avals = jax.tree.map(jax.typeof, arrays)

    def on_device(numbers: Leaves, consts: Leaves, leaves: Leaves) -> list[Any]:
        if compares_types(item.closed.jaxpr):
            return with_plain_types(of_part, numbers, consts, leaves)
        return of_part(numbers, consts, leaves)

    def of_part(numbers: Leaves, consts: Leaves, leaves: Leaves) -> list[Any]:
        consts, leaves = jax.tree.map(as_weak, (consts, leaves), avals)
        numbers = [lax.squeeze(n, (0,)) for n in numbers]
        pairs = list(zip(parts, numbers, strict=True))
        begins = {each.axis: each.begin(n) for each, n in pairs}
        uneven = [(each, n < n.dtype.type(each.longer)) for each, n in pairs if each.longer]
        values = walk(item.with_constants(consts), leaves, begins, shape, uneven)
        if states is None:
            return values
        in_front = functools.partial(jax.tree.map, lambda x: lax.expand_dims(x, (0,)))
        pairs = zip(states.reductions.entries, values, strict=True)
        return [own if entry.is_kept else in_front(own) for entry, own in pairs]

    def on_all(consts: Leaves, leaves: Leaves) -> list[Any]:
        here, leaf_specs = parts[0].mesh_here, [_spec(axes, parts) for axes in whole.batch_axes]
        mapped = jax.shard_map(
            on_device,
            mesh=here,
            axis_names={name for each in parts for name in each.names},
            in_specs=([PartitionSpec(each.names) for each in parts], PartitionSpec(), leaf_specs),
            out_specs=specs,
            check_vma=False,
        )
        numbers = [counted(each.count, jnp.uint32) for each in parts]
        # Devices add to the cotangents of what they share. If that is small, they are rounded once.
        leaves = [
            _along_axes(Parts.dealt, x, axes, parts) if spec else _in_32_bits_if_small(x)
            for x, axes, spec in zip(leaves, whole.batch_axes, leaf_specs, strict=True)
        ]
        values = mapped(numbers, list(map(_in_32_bits_if_small, consts)), leaves)
        if states is not None:
            values = states.merge(values, kept, functools.partial(gathered, mesh=here))
            is_whole = states.reductions.of_run is None
            values = states.finish(values, kept) if is_whole else values
        pairs = zip(values, places, strict=True)
        return [_along_axes(Parts.joined, value, own, parts) for value, own in pairs]

    even = [each for each in parts if not each.longer]
    # What sums the cotangents of the devices makes their types strong; this conversion, weak again.
    strong = jax.tree.map(_strong, arrays)
    return with_auto_axes(on_all, parts[0].mesh, [_spec(own, even) for own in places])(*strong)


def _spec(places: Places, parts: Sequence[Parts]) -> PartitionSpec:
    """Return how the parts of devices share an array."""
    names = {places[each.axis]: each.names for each in parts}
    size = max((place for place in names if place is not None), default=-1) + 1
    return PartitionSpec(*map(names.get, range(size)))


def _along_axes(
    fun: Callable[..., Any], value: Any, places: Places, all_parts: Sequence[Parts]
) -> Any:
    """Return a tree of arrays, changed along each axis that the parts do not divide."""
    for parts in all_parts:
        axis = places[parts.axis]
        if parts.longer and axis is not None:
            value = jax.tree.map(functools.partial(fun, parts, axis=axis), value)
    return value


def _strong(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _in_32_bits_if_small(x: jax.Array) -> jax.Array:
    return in_32_bits(x) if x.size <= SMALL else x


def _walk_on_device(
    nests: Mapping[Shape, Nest], whole: Plan, places: Sequence[Places], states: RunStates | None
) -> Callable[..., list[Any]]:
    """Return the walk of one device. ``places``: see `_places`; ``states``: if parts are merged."""

    def walk(
        item: ItemProgram,
        leaves: Leaves,
        begins: Mapping[int, Any],
        shape: Shape,
        uneven: Sequence[tuple[Parts, Any]],
    ) -> list[Any]:
        """Walk a part, or some of it.

        ``shape`` is without the items that may not count: one along each axis of ``uneven``, which
        says whether it does.
        """
        if not uneven:
            return walk_piece(item, leaves, begins, shape)
        (parts, counts), *others = uneven
        axis, size = parts.axis, parts.shorter
        gate = functools.partial(jax.tree.map, functools.partial(gated, counts))
        # Without this, XLA keeps the whole arrays that parts were read from, to read each run.
        leaves = lax.optimization_barrier(leaves)

        def items(start: int, stop: int | None) -> Leaves:
            pairs = zip(leaves, (axes[axis] for axes in whole.batch_axes), strict=True)
            return [x if i is None else lax.slice_in_dim(x, start, stop, axis=i) for x, i in pairs]

        after = {**begins, axis: begins[axis] + begins[axis].dtype.type(size)}
        alone = item.with_constants(gate(item.closed.consts))
        one = (*shape[:axis], 1, *shape[axis + 1 :])
        most = walk(item, items(0, size), begins, shape, others)
        last = walk(alone, gate(items(size, None)), after, one, others)
        merged = most
        if axis in whole.reduced:
            assert states is not None
            kept = len(shape) - len(whole.reduced)
            merged = states.merge_two(gate(most), gate(last), kept)

        def joined(places: Places, merged: Any, most: Any, last: Any) -> Any:
            if (place := places[axis]) is not None:
                return jax.tree.map(lambda *pair: jnp.concatenate(pair, place), most, last)
            return jax.tree.map(functools.partial(jnp.where, counts), merged, most)

        return list(map(joined, places, merged, most, last))

    def walk_piece(
        item: ItemProgram, leaves: Leaves, begins: Mapping[int, Any], shape: Shape
    ) -> list[Any]:
        """Walk items of one shape, whose numbers are those in the whole batch."""
        nest = nests[shape]
        if splits := nest.plan.splits:
            item = _from([number_of(split, begins.items()) for split in splits], item)
        if states is None:
            return nest.walk(item, leaves)
        nest = dataclasses.replace(nest, reductions=states.reductions.for_runs(states.size))
        starts = [begins.get(axis, 0) for axis in whole.reduced]
        lengths = [shape[axis] for axis in whole.reduced]
        return states.renumber(nest.walk(item, leaves), lengths, starts)

    return walk


def _from(starts: Sequence[jax.Array], item: ItemProgram) -> ItemProgram:
    """Return an item whose places, its last inputs, are counted from these on."""
    jaxpr, consts = item.closed.jaxpr, item.closed.consts

    # Constants may have more bits than the program says, so their values stay outside.
    def numbered(consts: Leaves, starts: Leaves, *args: Any) -> list[Any]:
        own, numbers = args[: -len(starts)], args[-len(starts) :]
        return evaluate(jaxpr, consts, *own, *map(jnp.add, numbers, starts))

    pairs = zip(consts, jaxpr.constvars, strict=True)
    avals = [jax.typeof(x).update(dtype=v.aval.dtype) for x, v in pairs]
    program = jax.make_jaxpr(numbered)(avals, list(starts), *item.closed.in_avals).jaxpr
    values = [*consts, *starts]
    first, inputs = program.invars[: len(values)], program.invars[len(values) :]
    program = with_variables(program, inputs, program.outvars, constvars=first)
    return dataclasses.replace(item, closed=ClosedJaxpr(program, values))
