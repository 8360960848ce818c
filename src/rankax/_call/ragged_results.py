# SPDX-License-Identifier: MIT
"""The result of a call with ragged arguments, from those of its groups (`ragged.py`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.arrays import index_dtype
from rankax._base.trees import entries, leaves_with_names
from rankax._call.bind import BoundKernel
from rankax._call.fill import as_inputs, resized
from rankax._call.ragged import Compiled, RaggedCall
from rankax._call.run import plan_of
from rankax._declare.dims import Rank
from rankax._declare.ragged import Ragged, span
from rankax._declare.ranks import ranks_of_leaves
from rankax._plan.batch import BatchPlan
from rankax._plan.lengths import Group
from rankax._reduce.passes import RunStates
from rankax._reduce.protocol import FILL
from rankax._reduce.run import Reductions


def call_ragged(call: BoundKernel, compiled: Compiled | None = None) -> Any:
    """Evaluate a call with ragged arguments."""
    ragged = RaggedCall.of(call, compiled)
    reductions = ragged.options.reduce
    _check_reduced_outputs(ragged)
    if reductions is not None and ragged.is_last_reduced and not ragged.is_direct:
        return _reduced(ragged, reductions)
    bounds = [ragged.bound(group, None) for group in ragged.groups]
    if len(bounds) == 1:
        _check_same_outputs(ragged, bounds[0])
    outs = list(map(ragged.evaluate, bounds))
    if reductions is None:
        return _in_order(ragged, outs, len(ragged.dense.plan.batch_shape) - 1)
    if ragged.is_direct:
        return outs[0]
    parts = [reductions.structure.flatten_up_to(out) for out in outs]
    return reductions.structure.unflatten(_kept_in_order(ragged, reductions, parts))


def _kept_in_order(ragged: RaggedCall, reductions: Reductions, parts: list[list[Any]]) -> list[Any]:
    """Put the results of groups in order, one for each reduction, where their axis is kept."""
    batch, reduced = ragged.dense.plan.batch_shape, ragged.dense.plan.reduced
    triples = zip(reductions.entries, *parts, strict=True)
    return [
        _in_order(ragged, own, len(batch) - 1 - (0 if entry.is_kept else len(reduced)))
        for entry, *own in triples
    ]


def _in_order(ragged: RaggedCall, outs: Sequence[Any], axis: int) -> Any:
    """Put results of the groups, which have their items on ``axis``, in the order given."""
    declared = ragged.call.kernel.declaration.outputs
    trees = [jax.tree.flatten(out) for out in outs]
    structure = trees[0][1]
    is_map = ragged.options.reduce is None and declared is not None
    ranks = ranks_of_leaves(declared, outs[0], "output") if is_map else [None] * len(trees[0][0])
    names = [path for path, _ in leaves_with_names(outs[0], "output")]
    leaves: list[Any] = []
    for path, rank, *parts in zip(names, ranks, *(leaves for leaves, _ in trees), strict=True):
        name = rank.dims[0].name if rank is not None and rank.dims else None
        if name in ragged.dims:
            leaves.append(_rows_in_order(ragged, path, name, parts))
            continue
        if len({part.shape[axis + 1 :] for part in parts}) > 1:
            raise _depends_on_length(ragged, path, parts[0].shape[axis + 1 :])
        if ragged.is_direct:
            leaves += parts
            continue
        held, size = None, ragged.size(ragged.count)
        for part, group in zip(parts, ragged.groups, strict=True):
            index = np.full(ragged.slots(group), size, np.int32)
            index[: len(group.items)] = group.items
            held = _put(held, part, as_inputs(index), axis, size)
        leaves.append(_cut(held, axis, ragged.count))
    return structure.unflatten(leaves)


def _rows_in_order(ragged: RaggedCall, path: str, name: str, parts: Sequence[Any]) -> Ragged:
    """Return an output that begins with a ragged dimension."""
    batch = ragged.dense.plan.batch_shape
    if len(batch) > 1 or batch[0] != ragged.count:
        raise ValueError(
            f"{ragged.call.where}: {path} begins with the ragged dimension {name!r}, so it would "
            f"be Ragged, which has one batch axis, but the batch shape is {batch}; use jax.vmap "
            "over the other axes"
        )
    at = ragged.dims.index(name)
    lengths, starts = ragged.lengths[:, at], ragged.starts[:, at]
    total = int(lengths.sum())
    held, size = None, max(1, ragged.size(total))
    for part, group in zip(parts, ragged.groups, strict=True):
        items = np.full((ragged.slots(group), 2), 0, np.int32)
        items[: len(group.items), 0] = starts[group.items]
        items[: len(group.items), 1] = lengths[group.items]
        held = _put_rows(held, part, as_inputs(items), size)
    return Ragged(_cut(held, 0, total), lengths)


def _cut(x: Any, axis: int, size: int) -> Any:
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return x if x.shape == shape else resized([x], [shape])[0]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _put(held: Any, part: Any, index: Any, axis: int, size: int) -> Any:
    """Put a part at some places along an axis; those that do not exist are dropped."""
    if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        data = None if held is None else jax.random.key_data(held)
        data = _put(data, jax.random.key_data(part), index, axis, size)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
    if held is None:
        held = jnp.zeros((*part.shape[:axis], size, *part.shape[axis + 1 :]), part.dtype)
    return held.at[(slice(None),) * axis + (index,)].set(part, mode="drop")


@functools.partial(jax.jit, static_argnums=3)
def _put_rows(held: Any, part: Any, items: Any, size: int) -> Any:
    starts, lengths = items[:, :1], items[:, 1:]
    rows = jnp.arange(part.shape[1], dtype=items.dtype)[None]
    index = jnp.where(rows < lengths, starts + rows, jnp.full_like(starts, size))
    return _put(held, jnp.reshape(part, (-1, *part.shape[2:])), jnp.ravel(index), 0, size)


# What is the same for all lengths.


def _check_reduced_outputs(ragged: RaggedCall) -> None:
    """Refuse outputs whose declaration has a ragged dimension where none can be."""
    call, dims = ragged.call, ragged.dims
    for rank in entries(call.kernel.declaration.outputs):
        for place, dim in enumerate((rank.dims or ()) if isinstance(rank, Rank) else ()):
            name = next((name for name in (dim.name, *dim.names) if name in dims), None)
            if name is None or (place == 0 and dim.name == name and ragged.options.reduce is None):
                continue
            reduced = "with reduce=, " if place == 0 and dim.name == name else ""
            raise TypeError(
                f"{call.where}: {reduced}an output of rank {rank} has the ragged dimension "
                f"{name!r}, but only the first core dimension of an output that is not reduced may "
                "be ragged; reduce that axis in the kernel, or return its rows in front"
            )


def _check_same_outputs(ragged: RaggedCall, bound: BoundKernel) -> None:
    """Refuse outputs that depend on the padded length, where there is one only."""
    longer = Group(ragged.groups[0].items, tuple(n + 1 for n in ragged.groups[0].lengths))
    pair = [dataclasses.replace(x, lengths={}) for x in (bound, ragged.bound(longer, None))]
    items = [each.trace(each.plan(ragged.options, None)) for each in pair]
    declared = ragged.call.kernel.declaration.outputs
    out = items[0].out_tree.unflatten(items[0].closed.out_avals)
    names = [path for path, _ in leaves_with_names(out, "output")]
    ranks = [None] * len(names) if declared is None else ranks_of_leaves(declared, out, "output")
    avals = [item.closed.out_avals for item in items]
    for path, rank, one, other in zip(names, ranks, *avals, strict=True):
        is_ragged = rank is not None and rank.dims and rank.dims[0].name in ragged.dims
        if one.shape != other.shape and not is_ragged:
            raise _depends_on_length(ragged, path, one.shape)


def _depends_on_length(ragged: RaggedCall, path: str, shape: tuple[int, ...]) -> ValueError:
    name = ragged.dims[0]
    return ValueError(
        f"{ragged.call.where}: {path} has the shape {shape} for one item, which depends on how "
        f"many rows the item is filled up to; declare the output, as in -> "
        f'Float[Array, "{name} 3"], if it has a row for each row, or reduce that axis in the kernel'
    )


# Reductions over the ragged items.


def _reduced(ragged: RaggedCall, reductions: Reductions) -> Any:
    """Merge the states of the groups, as those of devices are merged."""
    plan = ragged.dense.plan
    row = tuple(plan.batch_shape[axis] for axis in plan.reduced)
    total = int(np.prod(row))
    # The number of items decides the type of indices, and must not be part of the program.
    of_run = total if ragged.compiled is None else max(total, 2**31 - 1)
    bounds = [ragged.bound(group, reductions.for_runs(of_run)) for group in ragged.groups]
    reductions = reductions.of_items(FILL) if ragged.is_filled else reductions
    traced = [_outputs(ragged, bound, reductions, total) for bound in (bounds[0], bounds[-1])]
    if len(bounds) == 1:
        _check_same_outputs(ragged, bounds[0])
    for one, other in zip(*traced, strict=True):
        for path, aval, longer in zip(one.names, one.avals, other.avals, strict=True):
            if aval.shape != longer.shape:
                raise _depends_on_length(ragged, path, aval.shape)
    runs = RunStates(reductions, traced[0], ())
    batch = len(plan.batch_shape) - len(plan.reduced)
    held, kept = None, list[list[Any]]()
    for bound, group in zip(bounds, ragged.groups, strict=True):
        values = reductions.structure.flatten_up_to(ragged.evaluate(bound))
        kept.append(
            [v if e.is_kept else () for e, v in zip(reductions.entries, values, strict=True)]
        )
        states = [() if e.is_kept else v for e, v in zip(reductions.entries, values, strict=True)]
        size = ragged.slots(group)
        index = np.zeros(size, index_dtype(total))
        index[: len(group.items)] = group.items
        held = _merged(runs, batch, held, states, as_inputs(index), np.int64(ragged.count))
    results = dataclasses.replace(runs, sizes=row).finish(held or (), batch)
    return runs.assemble(results, _kept_in_order(ragged, reductions, kept))


def _outputs(ragged: RaggedCall, bound: BoundKernel, reductions: Reductions, total: int) -> Any:
    options = ragged.options
    plan = bound.plan(dataclasses.replace(options, batch_shape=None), None)
    return bound.trace(plan, reductions.for_runs(total)).outputs


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged(
    runs: RunStates, batch: int, held: Any, states: list[Any], items: Any, count: Any
) -> Any:
    """Merge the states of a group with those before; its items get the numbers they had."""
    size = items.shape[0]

    def place(index: jax.Array) -> jax.Array:
        index = index.astype(items.dtype)
        own = items.at[index % size].get(mode="clip")
        return index // size * count.astype(items.dtype) + own

    states = runs.placed(states, place)
    if held is None:
        return states
    both = jax.tree.map(lambda *pair: jnp.stack(pair), held, states)
    merged = runs.merge(both, batch)
    # Some merge tuples to lists.
    return jax.tree.unflatten(jax.tree.structure(states), jax.tree.leaves(merged))


# What `plan` prints.


def plan_ragged(call: BoundKernel, compiled: Compiled | None = None) -> BatchPlan:
    """Return what `call_ragged` would do."""
    ragged = RaggedCall.of(call, compiled)
    parts = [
        plan_of(bound, bound.kernel.options())
        for bound in (ragged.bound(group, None) for group in ragged.groups)
    ]
    groups = [(len(group.items), group.lengths) for group in ragged.groups]
    notes: list[str] = []
    for at, name in enumerate(ragged.dims):
        lengths = ragged.lengths[:, at]
        evaluated = sum(count * longest[at] for count, longest in groups)
        padding = 1 - lengths.sum() / max(1, evaluated)
        several = len({longest[at] for _, longest in groups})
        plural = "length" if several == 1 else "lengths"
        notes.append(
            f"ragged {name}: {span(lengths)} in {several} {plural}, padding {padding:.0%}".replace(
                "%", " %"
            )
        )
    if (slots := sum(map(ragged.slots, ragged.groups))) > ragged.count:
        notes.append(f"items of a length in buckets, {slots} in all")
    return dataclasses.replace(
        ragged.dense.plan,
        levels=(),
        untouched=call.untouched(),
        ragged=tuple(notes),
        parts=tuple((longest, part) for (_, longest), part in zip(groups, parts, strict=True)),
    )
