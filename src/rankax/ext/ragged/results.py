# SPDX-License-Identifier: MIT
"""The result of a call with ragged arguments, from those of its groups (`call.py`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.call.kernels import KernelCall
from rankax.core.base.messages import plural
from rankax.core.base.trees import entries
from rankax.core.declare.dims import Rank
from rankax.core.reduce.protocol import FILL
from rankax.core.reduce.run import Reductions
from rankax.ext.bucket import as_inputs, resized
from rankax.ext.explain.call import plan_of
from rankax.ext.explain.plan import BatchPlan, shown
from rankax.ext.jit import kept_with_programs
from rankax.ext.lengths import Shared
from rankax.ext.ragged.call import RaggedCall
from rankax.ext.ragged.padded import depends_on_length
from rankax.ext.ragged.type import Ragged, span
from rankax.ext.runs import RunStates


def call_ragged(call: KernelCall, shared: Shared | None = None) -> Any:
    """Evaluate a call with ragged arguments."""
    ragged = RaggedCall.of(call, shared)
    reductions = ragged.options.reduce
    check_declared_outputs(ragged)
    if reductions is not None and ragged.is_last_reduced and not ragged.is_direct:
        return _reduced(ragged, reductions)
    calls = list(map(ragged.call_of, ragged.groups))
    outs = list(map(ragged.evaluate, calls))
    if reductions is None:
        return _in_order(ragged, outs, len(ragged.dense.batch_shape) - 1)
    if ragged.is_direct:
        return outs[0]
    parts = [reductions.structure.flatten_up_to(out) for out in outs]
    return reductions.structure.unflatten(_kept_in_order(ragged, reductions, parts))


def _kept_in_order(ragged: RaggedCall, reductions: Reductions, parts: list[list[Any]]) -> list[Any]:
    """Put the results of groups in order, one for each reduction, where their axis is kept."""
    batch, reduced = ragged.dense.batch_shape, ragged.dense.reduced
    triples = zip(reductions.entries, *parts, strict=True)
    return [
        _in_order(ragged, outs, len(batch) - 1 - (0 if entry.is_kept else len(reduced)))
        for entry, *outs in triples
    ]


def _in_order(ragged: RaggedCall, outs: Sequence[Any], axis: int) -> Any:
    """Put results of the groups, which have their items on ``axis``, in the order given."""
    parts, dims = [jax.tree.leaves(out) for out in outs], list[int | None]()
    places, shapes = list[tuple[int, int, int]](), list[tuple[int, ...]]()
    for (path, dim), *same in zip(ragged.dims_of(outs[0]), *parts, strict=True):
        core, total, column = same[0].shape[axis + 1 :], ragged.count, 0
        if dim is not None:
            check_one_axis(ragged, path, dim)
            core, total, column = core[1:], int(ragged.lengths[:, dim].sum()), 2 + 2 * dim
        elif any(part.shape[axis + 1 :] != core for part in same):
            raise depends_on_length(ragged.call.name, ragged.dims[0], path, core)
        dims.append(dim)
        places.append((axis, column, max(1, ragged.size(total, dim))))
        shapes.append((*same[0].shape[:axis], total, *core))
    if not dims or (ragged.is_direct and {*dims} == {None}):
        return outs[0]
    if len(outs) == 1 and {*dims} == {None}:  # they are in order, but filled up
        return jax.tree.structure(outs[0]).unflatten(resized(parts[0], shapes))
    held = None
    for step in _steps(ragged, parts):
        held = _put(tuple(places), held, step)
    assert held is not None
    leaves = [
        x if dim is None else Ragged(x, ragged.lengths[:, dim])
        for x, dim in zip(resized(held, shapes), dims, strict=True)
    ]
    return jax.tree.structure(outs[0]).unflatten(leaves)


def check_one_axis(ragged: RaggedCall, path: str, dim: int) -> None:
    if (batch := ragged.dense.batch_shape) != (ragged.count,):
        raise ValueError(
            f"{ragged.call.site}: {path} begins with the ragged dimension {ragged.dims[dim]!r}, "
            f"so it would be Ragged, which has one batch axis, but the batch shape is {batch}; use "
            "jax.vmap over the other axes"
        )


def _steps(ragged: RaggedCall, parts: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Return each part with a row for each of its items, which has no rows if it fills up.

    All are one step, and so one program. With ``jit=True``, each is a step of its own, whose
    program does not depend on the sizes of the others.
    """
    pairs: list[tuple[Any, Any]] = []
    for group, part in zip(ragged.groups, parts, strict=True):
        items = ragged.items_of(group)
        items[len(group.items) :, 1::2] = 0
        pairs.append((part, as_inputs(items)))
    return [[pair] for pair in pairs] if ragged.is_compiled else [pairs]


@functools.partial(jax.jit, static_argnums=0)
def _put(
    places: Sequence[tuple[int, int, int]], held: Any, step: Sequence[tuple[Any, Any]]
) -> list[Any]:
    """Put results at their places; what fills a group up is dropped.

    ``places``: of each output the axis of the items, or of their rows; the column that says where
    these are (`RaggedCall.items_of`); and how many there are, at most.
    """
    held = [None] * len(places) if held is None else held
    for parts, items in step:
        triples = zip(places, held, parts, strict=True)
        held = [_put_one(*place, x, part, items) for place, x, part in triples]
    return held


def _put_one(axis: int, column: int, size: int, held: Any, part: Any, items: Any) -> Any:
    if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        data = None if held is None else jax.random.key_data(held)
        data = _put_one(axis, column, size, data, jax.random.key_data(part), items)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
    width = part.shape[1] if column else 1
    part = jnp.reshape(part, (-1, *part.shape[2:])) if column else part
    start, length = items[:, column, None], items[:, column + 1, None]
    rows = jnp.arange(width, dtype=items.dtype)[None]
    index = jnp.ravel(jnp.where(rows < length, start + rows, jnp.full_like(start, size)))
    if held is None:
        held = jnp.zeros((*part.shape[:axis], size, *part.shape[axis + 1 :]), part.dtype)
    return held.at[(slice(None),) * axis + (index,)].set(part, mode="drop")


# What is the same for all lengths.


def check_declared_outputs(ragged: RaggedCall) -> None:
    """Refuse outputs whose declaration has a ragged dimension where none can be."""
    call, dims = ragged.call, ragged.dims
    for rank in entries(call.kernel.declaration.outputs):
        for place, dim in enumerate((rank.dims or ()) if isinstance(rank, Rank) else ()):
            name = next((name for name in (dim.name, *dim.names) if name in dims), None)
            if name is None or (place == 0 and dim.name == name and ragged.options.reduce is None):
                continue
            reduced = "with reduce=, " if place == 0 and dim.name == name else ""
            raise TypeError(
                f"{call.site}: {reduced}an output of rank {rank} has the ragged dimension "
                f"{name!r}, but only the first core dimension of an output that is not reduced may "
                "be ragged; reduce that axis in the kernel, or return its rows in front"
            )


# Reductions over the ragged items.


def _reduced(ragged: RaggedCall, reductions: Reductions) -> Any:
    """Merge the states of the groups, as those of devices are merged."""
    plan = ragged.dense
    row = tuple(plan.batch_shape[axis] for axis in plan.reduced)
    total = math.prod(row)
    # The number of items decides the type of indices, and must not be part of the program.
    of_run = max(total, 2**31 - 1) if ragged.is_compiled else total
    of_run = max(of_run, reductions.of_run or 0)
    calls = [ragged.call_of(group, reductions.for_runs(of_run)) for group in ragged.groups]
    reductions = reductions.of_items(FILL) if ragged.is_filled else reductions
    options = ragged.options.replace(batch_shape=None)
    of_item = reductions.for_runs(reductions.of_run or total)

    def outputs() -> Any:
        return calls[-1].trace(calls[-1].plan_whole(options), of_item).outputs

    item = kept_with_programs(calls[-1], outputs) if ragged.is_compiled else outputs()
    runs = RunStates(reductions, item, ())
    batch = len(plan.batch_shape) - len(plan.reduced)
    states, kept = list[list[Any]](), list[list[Any]]()
    for call in calls:
        values = reductions.structure.flatten_up_to(ragged.evaluate(call))
        pairs = list(zip(reductions.entries, values, strict=True))
        states.append([() if entry.is_kept else value for entry, value in pairs])
        kept.append([value if entry.is_kept else () for entry, value in pairs])
    held = None
    for step in _steps(ragged, states):
        held = _merged(runs, batch, held, step, np.int64(ragged.count))
    results = held or ()
    if reductions.of_run is None:
        results = dataclasses.replace(runs, sizes=row).finish(results, batch)
    return runs.assemble(results, _kept_in_order(ragged, reductions, kept))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged(
    runs: RunStates, batch: int, held: Any, step: Sequence[tuple[Any, Any]], count: Any
) -> Any:
    """Merge the states of groups with those before; their items get the numbers they had."""
    for states, items in step:

        def place(index: jax.Array, numbers: Any = items[:, 0]) -> jax.Array:
            size = numbers.shape[0]
            number = numbers.at[index % size].get(mode="clip").astype(index.dtype)
            return index // size * count.astype(index.dtype) + number

        states = runs.placed(states, place)
        held = states if held is None else runs.merge_two(held, states, batch)
    return held


# What `plan` prints.


def plan_ragged(call: KernelCall) -> BatchPlan:
    """Return what `call_ragged` would do."""
    ragged = RaggedCall.of(call)
    parts = [
        dataclasses.replace(plan_of(part, part.kernel.options()), names=ragged.dense.names)
        for part in (ragged.call_of(group) for group in ragged.groups)
    ]
    groups = [(len(group.items), group.lengths) for group in ragged.groups]
    notes, unmasked = list[str](), list[str]()
    for at, name in enumerate(ragged.dims):
        lengths = ragged.lengths[:, at]
        evaluated = sum(count * longest[at] for count, longest in groups)
        padding = 1 - lengths.sum() / max(1, evaluated)
        different = plural(len({longest[at] for _, longest in groups}), "length")
        share = f"padding {100 * padding:.0f} %"
        notes.append(f"ragged {name}: {span(lengths)} in {different}, {share}")
        if padding and name not in call.kernel.declaration.masks.values():
            counted = f"sums over {name} count copies of each item's last row, too"
            unmasked.append(f'no parameter is Mask("{name}"): {counted}')
    if (slots := sum(map(ragged.slots, ragged.groups))) > ragged.count:
        notes.append(f"items of a length in buckets, {slots} in all")
    return shown(
        ragged.dense,
        levels=(),
        untouched=call.untouched(),
        ragged=tuple(notes),
        notes=tuple(unmasked),
        parts=tuple((longest, part) for (_, longest), part in zip(groups, parts, strict=True)),
    )
