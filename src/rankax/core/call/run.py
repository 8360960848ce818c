# SPDX-License-Identifier: MIT
"""The path of every call: plan, trace, fit, run.

A call without a loop nests maps around the kernel itself, so its program is the one that nesting by
hand gives (without ``cpu_math``). Otherwise the kernel is traced once, for one item, and all later
steps (the memory limit, the tile, the loops, the devices) work on the program of that item.
`plan_of` returns what ``plan`` prints; `run` takes the same steps, but an eager call that is known
skips those after the trace.

Words used throughout:

* chunk: the items of a map that one step of a loop evaluates at once, at most ``chunk_size``
* tile: the items of a reduction that one step evaluates at once; in a plan, also the chunk size
  that was chosen for a level (`Level.tile`)
* lane: the place of an item in a tile; a running state has one value for each lane
* row: the items along the reduced axes, for one item of the kept axes; in `_loop`, also one entry
  of the ``xs`` or ``ys`` of a scan
* run: items of a row that are folded into one state, such as one device's part or one dask block
* part: the contiguous items of a batch axis that one of several devices evaluates
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from rankax.core.base.target import inside_call
from rankax.core.call.bind import BoundKernel
from rankax.core.call.bound import Bound
from rankax.core.call.nest import Nest, nest_of
from rankax.core.loop.reuse import Mode, Program, call_of_kernel, mode_of, run_kept, warn_once
from rankax.core.options import AUTO, Options, check_batched
from rankax.core.plan.batch import BatchPlan
from rankax.core.plan.levels import WHOLE_CHUNKS, Tiles
from rankax.core.plan.nesting import Nesting, plan_lanes
from rankax.core.trace.programs import ItemProgram, has_order
from rankax.ext.cpu_math import hints_of_cpu_math
from rankax.ext.devices.mesh import Parts, inside, is_spread, on_every_device, on_mesh
from rankax.ext.devices.over_parts import Layout, over_parts, placed
from rankax.ext.devices.place import committed_elsewhere, find_parts
from rankax.ext.lanes.call import check_lanes, most_lanes
from rankax.ext.lanes.machine import cut_program
from rankax.ext.memory.budget import MemoryFit
from rankax.ext.memory.default import default_on_cpu, default_on_gpu, small_steps
from rankax.ext.memory.limit import fit_to_limit, shape_of
from rankax.ext.progress.bars import Progress, progress_of_call
from rankax.ext.scan.while_loop import has_plain_loop


class Traced(NamedTuple):
    """A bound call whose kernel is traced."""

    bound: Bound
    options: Options
    whole: Nesting  # the plan of the whole batch, without chunks
    item: ItemProgram
    layout: Layout


class Fitted(NamedTuple):
    """How a call runs."""

    plan: Nesting  # of one part, if the batch has parts
    options: Options  # with a chunk size that meets the memory limit
    memory: MemoryFit | None = None
    is_walked: bool = True  # otherwise it is evaluated without its traced program


def run(bound: Bound, options: Options, parts: tuple[Parts, ...] | None = None) -> Any:
    """Evaluate a bound call; pass its parts if they are known already."""
    options = options.at(bound.leaves)
    with on_mesh(bound.leaves), inside_call(options.target):
        parts = parts_of(bound, options) if parts is None else parts
        bound = _in_chunks(bound, options, parts)
        if (plan := _untraced(bound, options, parts)) is not None:
            return bound.in_one_piece(plan)
        if options.progress is False:
            return _run(_traced(bound, options, parts), None)
        # Decorated kernels that this one calls must not report as well.
        with progress_of_call(options.progress, bound.name) as progress:
            return _run(_traced(bound, options, parts), progress)


def _run(call: Traced, progress: Progress | None) -> Any:
    bound, options, whole, item, layout = call
    leaves, parts = [bound.leaves[i] for i in whole.mapped], layout.parts
    if parts:
        item, leaves = placed(item, leaves, layout)
    else:
        leaves = list(map(on_every_device, leaves))
    mode = mode_of([*leaves, *item.read, *item.closed.consts], on_mesh=bool(parts))
    make = functools.partial(_program, call, progress, is_now=mode is Mode.EAGER)
    reductions = options.reduce
    # A user-defined function may change between calls and stay the same object.
    is_ordered = reductions is not None and reductions.are_ordered
    of_bound = tuple(bound.lengths), bound.cut
    key = None if is_ordered else (whole, parts, options, options.rules, progress, *of_bound)
    committed = committed_elsewhere(bound.where, parts) if parts else contextlib.nullcontext()
    with call_of_kernel(item.where), committed:
        try:
            out = run_kept(make, item, leaves, key, mode, options.compiled)
        except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
            raise item.reuses_key() from error
    if out is None:
        return bound.in_one_piece(whole)
    if reductions is None:
        return item.out_tree.unflatten(out)
    return reductions.assembled(item.outputs, out)


def _program(call: Traced, progress: Progress | None, *, is_now: bool) -> Program | None:
    """Return the whole call as a function of its item and its leaves."""
    call = call._replace(item=call.item.whole)
    bound, _, whole, _, layout = call
    plan, options, _, is_walked = _fitted(call)
    if not is_walked:
        return None
    if not options.on_cpu and (small := small_steps(call.item.closed.jaxpr, plan.plan)):
        warn_once("small steps", small)
    if progress is not None:
        is_shown = layout.parts or plan.plan.steps > 1
        count = math.prod(each.count for each in layout.parts)
        progress = dataclasses.replace(progress, parts=count) if is_shown else None
    if is_now:  # not differentiated, so nothing is ever recomputed
        options = dataclasses.replace(options, checkpoint=False)

    def nest(plan: Nesting, progress: Progress | None = None) -> Nest:
        plan = dataclasses.replace(plan, splits=whole.splits)  # numbered within the whole batch
        return nest_of(plan, whole.mapped, options, progress, differentiable=not is_now)

    *others, shape = layout.shapes()
    nests = {other: nest(bound.part(whole, other).plan(options)) for other in others}
    main = nest(plan, progress)

    # JAX keeps it, so it holds no arrays: neither the call nor its item.
    def program(item: ItemProgram, leaves: list[Any]) -> Any:
        if not layout.parts:
            return main.walk(item, leaves)
        return over_parts({**nests, shape: main}, item, leaves, layout)

    return program


def plan_of(bound: BoundKernel, options: Options) -> BatchPlan:
    """Return what `run` would do; the arguments may be shapes, for which tracers stand in."""
    values, shell = bound.split()
    at = [i for i, value in enumerate(values) if isinstance(value, jax.ShapeDtypeStruct)]
    # A dtype of 64 bits that JAX narrows is a warning in `jax.eval_shape` of JAX 0.12.
    shapes = [values[i] if values[i].sharding else shape_of(values[i]) for i in at]
    plans: list[BatchPlan] = []
    options = options.at(bound.leaves)
    with on_mesh(bound.leaves), inside_call(options.target):
        parts = parts_of(bound, options)
        if not shapes:
            return _plan_of(bound, options, parts)

        def plan(arrays: list[Any]) -> None:
            given = dict(zip(at, arrays, strict=True))
            own = shell.call(bound.kernel, [given.get(i, x) for i, x in enumerate(values)])
            call = dataclasses.replace(bound, leaves=own.leaves, arguments=own.arguments)
            plans.append(_plan_of(call, options, parts))

        jax.eval_shape(plan, shapes)
    return plans[0]


def _plan_of(bound: BoundKernel, options: Options, parts: tuple[Parts, ...]) -> BatchPlan:
    call = _in_chunks(bound, options, parts)
    filled = tuple(bound.lengths.items())
    found: dict[str, Any] = {"untouched": bound.untouched(), "filled": filled}
    if (plan := _untraced(call, options, parts)) is None:
        with progress_of_call(options.progress, bound.name):
            traced = _traced(call, options, parts)
        traced = traced._replace(item=traced.item.whole)
        plan, _, found["memory"], _ = _fitted(traced)
        whole = traced.whole.plan
        found |= {"batch_shape": whole.batch_shape, "leaves": whole.leaves}
        found["notes"] = _notes(traced, plan.plan)
        found["devices"] = tuple(
            (each.axis, each.count) for each in traced.layout.parts if each.count > 1
        )
    changed = {name: value for name, value in found.items() if getattr(plan.plan, name) != value}
    return dataclasses.replace(plan.plan, **changed) if changed else plan.plan


def _notes(call: Traced, plan: BatchPlan) -> tuple[str, ...]:
    """Return what else there is to say about a call."""
    options, jaxpr = call.options, call.item.closed.jaxpr
    notes: list[str] = []
    if options.chunk_size == AUTO and plan.steps > 1:
        notes.append("bounded by default; chunk_size=None evaluates all items at once")
    if not options.on_cpu:
        notes += filter(None, [small_steps(jaxpr, plan)])
    elif not options.cpu_math:
        notes += hints_of_cpu_math(jaxpr)
    return tuple(notes)


def _in_chunks(bound: Bound, options: Options, parts: tuple[Parts, ...]) -> Bound:
    """Return a call whose kernel knows the lengths of its chunks, if it takes a batch itself."""
    if not bound.batched:
        return bound
    check_batched(dataclasses.replace(options, batched=True), bound.where)  # a scope may ask for it
    whole = bound.plan(options, None)
    is_chosen = options.memory_limit is not None or options.chunk_size == AUTO
    if is_chosen and not _is_empty(whole):
        options = _fitted(_traced(bound, options, parts)).options
    runs = [bound.part(whole, shape) for shape in _layout(whole, parts).shapes()]
    lengths = sorted({run.plan(options).plan.in_flight for run in runs})
    return dataclasses.replace(bound, in_chunks=tuple(lengths))


def _untraced(bound: Bound, options: Options, parts: tuple[Parts, ...]) -> Nesting | None:
    """Return the plan of a call that is evaluated without tracing its kernel first."""
    if options.reduce is not None:
        return None
    if not bound.is_kept:
        planned = bound.plan(options)
        is_traced = parts or any(planned.loops) or options.memory_limit
        # A collective needs the whole axis.
        is_rewritten = options.replaces_functions and bound.axis_name is None
        is_traced = is_traced or (is_rewritten and not _is_empty(planned))
        if not is_traced and options.lockstep:
            return planned
    whole = bound.plan(options, None)
    may_reverse = not options.lockstep and whole.plan.levels
    return whole if _is_empty(whole) and not may_reverse else None


def _is_empty(plan: Nesting) -> bool:
    """Whether there is no item, or no batch."""
    return not plan.plan.levels or 0 in plan.plan.batch_shape


def _traced(bound: Bound, options: Options, parts: tuple[Parts, ...]) -> Traced:
    """Trace the kernel of a call for one item."""
    whole = bound.plan(options, None)
    with inside(parts):
        item = bound.trace(whole, options.reduce)
        item = item.whole if parts else item
    layout = _layout(whole, () if has_order(item.closed) else parts)
    return Traced(bound, options, whole, item, layout)


def _layout(whole: Nesting, parts: tuple[Parts, ...]) -> Layout:
    plan = whole.plan
    return Layout(plan.batch_shape, parts, whole.batch_axes, plan.reduced)


def _fitted(call: Traced) -> Fitted:
    """Choose tiles, lanes and, with a memory limit, chunks."""
    bound, options, whole, item, layout = call
    if _is_empty(whole):
        return Fitted(whole, options)
    part = bound.part(whole, layout.shapes()[-1]) if layout.parts else bound
    updated = options.reduce.numbers_of_tile(item.outputs) if options.reduce else 0
    tiles = WHOLE_CHUNKS if bound.batched else options.rules.tiles(item.closed.jaxpr, updated)
    machine = None if options.lockstep else cut_program(item.closed)
    ends = machine and machine.ends
    if options.chunk_size == AUTO:
        options = dataclasses.replace(options, chunk_size=_default(call, part, tiles))
    memory = None
    if options.memory_limit is not None:
        memory = _fit(call, part, tiles, ends)
        checkpoint = False if memory.stored else options.checkpoint
        options = dataclasses.replace(options, chunk_size=memory.chunk_size, checkpoint=checkpoint)
    if ends:
        check_lanes(item)
    lanes = most_lanes(machine, on_cpu=options.on_cpu) if machine else 1
    plan = _plan_in(part, options, tiles, ends, lanes)
    is_reversed = not options.lockstep and has_plain_loop(item.closed.eqns)
    is_walked = layout.parts or options.reduce or any(plan.loops) or plan.plan.lanes or is_reversed
    is_walked = is_walked or bound.is_kept or options.replaces_functions
    return Fitted(plan, options, memory, bool(is_walked))


def _default(call: Traced, part: Bound, tiles: Tiles) -> int | None:
    """Return the chunk size of a reduction that nothing bounds."""
    jaxpr, options = call.item.closed.jaxpr, call.options
    levels = part.plan(options, None).plan.levels
    sizes = tuple(level.size for level in levels)
    if not options.on_cpu:
        row = math.prod(level.size for level in levels if level.reduced)
        return default_on_gpu(jaxpr, sizes, row)
    most = options.rules.most_reduced
    return default_on_cpu(jaxpr, sizes, tiles.forward and min(tiles.forward, most or tiles.forward))


def _plan_in(
    part: Bound, options: Options, tiles: Tiles, ends: Sequence[str] | None, lanes: int = 1
) -> Nesting:
    """Plan a call in tiles, or in lanes if items end by themselves: without chunks in ``lanes``."""
    if ends:
        return plan_lanes(part.plan(options, None), options.most or lanes, ends)
    plan = part.plan(options, tiles)
    if ends is None:
        return plan
    return dataclasses.replace(plan, plan=dataclasses.replace(plan.plan, ends=()))


def parts_of(bound: Bound, options: Options) -> tuple[Parts, ...]:
    """Return the parts of the batch of a call; none if `jax.vmap` will do."""
    devices = options.devices
    if devices is False or (devices is None and not any(map(is_spread, bound.leaves))):
        return ()
    whole = bound.plan(options, None)
    leaves = [bound.leaves[i] for i in whole.mapped]
    shape, reduced = whole.plan.batch_shape, whole.plan.reduced
    is_ordered = options.reduce is not None and options.reduce.are_ordered

    def is_mergeable(axis: int) -> bool:
        # Parts that are merged in order are consecutive items of a row.
        before = math.prod(shape[other] for other in reduced if other < axis)
        return not is_ordered or axis not in reduced or before == 1

    serves = list(filter(is_mergeable, range(len(shape))))
    # The longest axis first; of equals one that is kept, because its parts need not be merged.
    serves.sort(key=lambda axis: (-shape[axis], axis in reduced))
    parts = find_parts(devices, leaves, whole.batch_axes, shape, bound.where, serves)
    odd = [each.axis for each in parts if each.axis not in serves]
    if odd and devices is not None:
        raise ValueError(
            f"{bound.where}: {options.reduce} takes items in order, so only the first of the "
            f"reduced axes {reduced} can be sharded, but axis {odd[0]} is"
        )
    return () if 0 in shape else tuple(each for each in parts if each.axis in serves)


def cut_axes(bound: Bound, options: Options, parts: tuple[Parts, ...]) -> dict[int, int | None]:
    """Return the axis of each leaf that the devices divide; a compiled call cuts all others."""
    whole = bound.plan(options, None)
    axis = parts[0].axis
    if whole.plan.batch_shape[axis] % parts[0].count:
        return {}
    return {i: axes[axis] for i, axes in zip(whole.mapped, whole.batch_axes, strict=True)}


def _fit(call: Traced, part: Bound, tiles: Tiles, ends: Sequence[str] | None) -> MemoryFit:
    """Return the chunk size that meets the memory limit, with its measurements."""
    options = dataclasses.replace(call.options, progress=False, jit=False)
    item, inputs = _of_lengths(call), call.whole.mapped

    def plan(chunk_size: int) -> Nesting:
        return _plan_in(part, dataclasses.replace(options, chunk_size=chunk_size), tiles, ends)

    def program(chunk_size: int, checkpoint: bool | None) -> tuple[int, Callable[..., Any]]:
        planned = plan(chunk_size)
        nest = nest_of(planned, inputs, dataclasses.replace(options, checkpoint=checkpoint))
        own = _of_lengths(call, planned.plan.in_flight)
        others = own.closed.consts[len(item.closed.consts) :]

        def measured(consts: list[Any], leaves: list[Any]) -> list[Any]:
            return jax.tree.leaves(nest.walk(own.with_constants([*consts, *others]), leaves))

        return planned.plan.in_flight, measured

    sizes = tuple(level.size for level in plan(1).plan.levels)
    leaves, key = [part.leaves[i] for i in inputs], (part.plan(options, None), item.out_axes)
    return fit_to_limit(part.where, options, sizes, item.closed, leaves, program, key)


def _of_lengths(call: Traced, *lengths: int) -> ItemProgram:
    """Return the item; of a kernel that takes a batch itself, for chunks of these lengths."""
    if not call.bound.batched:
        return call.item
    bound = dataclasses.replace(call.bound, in_chunks=lengths)
    return _traced(bound, call.options, call.layout.parts).item
