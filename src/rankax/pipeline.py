# SPDX-License-Identifier: MIT
"""The path of every call. This page knows all features; the order here is the order they act in.

`evaluate` says what happens to a call whose arguments are bound. A map without a loop nests maps
around the kernel itself, so its program is the one that nesting by hand gives (`by_hand`).
Otherwise the kernel is traced for one item, and all later steps work on the program of that item,
or on what `fit_apart` leaves of it. What ``plan`` prints is found by the same steps
(`ext/explain`); an eager call that is known skips those after the trace.

What makes calls of its own stands above this page: ragged items, blocks, streams, checks, and
compiled kernels (`ext/jit.py`), which place a call and enter its progress themselves.

Words used throughout:

* chunk: the items of a map that one step of a loop takes, at most ``chunk_size``
* tile: the items of a reduction that one step evaluates at once; in a plan, also the items that a
  step of a map does (`Level.tile`)
* slot: the place of an item in a tile; a running state has one value for each slot
* row: the items along the reduced axes, for one item of the kept axes; in a loop, also one entry
  of the ``xs`` or ``ys`` of a scan
* run: items of a row that are folded into one state, such as one device's part or one dask block
* part: the contiguous items of a batch axis that one of several devices evaluates
* hoisted: what depends on fewer axes than an item, and is evaluated before the loops
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax

from rankax._options import AUTO, Options, check_batched
from rankax.call.base import Call, sizes_of
from rankax.core.base.arrays import inside_call, is_spread, on_mesh
from rankax.core.loop.eager_programs import (
    Mode,
    Program,
    call_of_kernel,
    kept_program,
    mode_of,
    warn_once,
)
from rankax.core.plan.schedule import WHOLE_CHUNKS, Plan
from rankax.core.protocols import HERE, Observer, Pass, Placement
from rankax.core.reduce.protocol import FILL
from rankax.core.trace.derivatives import has_refs
from rankax.core.trace.programs import ItemProgram
from rankax.core.walk import Nest, nest_of
from rankax.ext import cpu_math, once
from rankax.ext.batched import Batched
from rankax.ext.devices.call import devices_of, warn_of_hidden_shardings
from rankax.ext.devices.place import sharded_like
from rankax.ext.fused import walk as fused
from rankax.ext.lanes import walker as lanes
from rankax.ext.memory import choose as memory
from rankax.ext.progress import naming_axes, progress_of_call


def evaluate(call: Call, options: Options, place: Placement | None = None) -> Any:
    """Evaluate a call; pass its place if it is known already."""
    options = options_of(call, options)
    with on_mesh(call.leaves), inside_call(options.target):
        place = place_of(call, options) if place is None else place
        call, options = prepared(call, options, place)
        if (plan := by_hand(call, options, place)) is not None:
            if place:
                leaves = place.put(call.leaves, call, options)
                call = dataclasses.replace(call, leaves=leaves)
            return call.in_one_piece(plan)
        with observed(options, call.name) as observer:
            out = _walked(traced(call, options, place), observer)
        if options.devices is not False or not any(map(is_spread, call.leaves)):
            return out
        whole = options.replace(chunk_size=None, memory_limit=None, lockstep=True, progress=False)
        if options == whole:
            return out
        return sharded_like(functools.partial(evaluate, call, whole, place), out, call.leaves)


def options_of(call: Call, options: Options) -> Options:
    """Return the options of a call, which know where it runs and what its kernel takes."""
    options = options.at(call.leaves)
    takes_batch = call.form.takes_chunks and not options.batched
    return options.replace(batched=True) if takes_batch else options


def place_of(call: Call, options: Options) -> Placement:
    """Return where a call is evaluated: where its arrays are, or in parts, on several devices."""
    is_alone = options.devices is None and not any(map(is_spread, call.leaves))
    place = None if is_alone else devices_of(call, options)
    if place is None and options.devices is None and not jax.sharding.get_abstract_mesh().empty:
        warn_of_hidden_shardings(call, options)
    return place or HERE


def prepared(call: Call, options: Options, place: Placement) -> tuple[Call, Options]:
    """Return the call to plan, and its options.

    A kernel that takes a batch is told how long its chunks are, for which it may be traced.
    """
    if not options.batched:
        return call, options
    check_batched(options, call.site)  # a scope may have changed them
    call = dataclasses.replace(call, form=Batched())
    whole = call.plan_whole(options)
    is_chosen = options.memory_limit is not None or options.chunk_size == AUTO
    if is_chosen and not whole.is_empty:
        options = fit(traced(call, options, place)).options
    parts = map(whole.part, place.shapes(whole))
    lengths = sorted({part.cut(*sizes_of(options, WHOLE_CHUNKS)).in_flight for part in parts})
    return dataclasses.replace(call, form=Batched(tuple(lengths))), options


def by_hand(call: Call, options: Options, place: Placement) -> Plan | None:
    """Return the plan of a call that is nested maps of the kernel itself, as one writes by hand.

    None: the kernel is traced for one item, because there is a loop, or a feature needs it. A
    kernel with a collective over its axis has no such program; a single chunk is all of its items.
    """
    if options.reduce is not None:
        return None
    plan = call.plan(options)
    if plan.is_empty:  # items that end by themselves are checked even if there are none
        return None if plan.levels and not options.lockstep else call.plan_whole(options)
    needs_item = (
        plan.has_loop
        or call.is_one_program
        or place
        or not options.lockstep
        or options.memory_limit is not None
        or (options.cpu_math and cpu_math.is_on(options))
    )
    if not needs_item:
        return plan
    is_whole = not plan.has_loop and options.lockstep and place.count == 1
    if not is_whole or not call.has_collective(plan):
        return None
    memory.check_whole(call, plan, options)
    return plan


def observed(options: Options, name: str) -> contextlib.AbstractContextManager[Observer | None]:
    """Enter a call of this name; the context returns who is told of its steps."""
    if options.progress is False:
        return contextlib.nullcontext()
    return progress_of_call(options.progress, name)


class Traced(NamedTuple):
    """A call whose kernel is traced."""

    call: Call
    options: Options
    place: Placement
    whole: Plan  # of the whole batch, without chunks
    item: ItemProgram
    layout: Placement  # how the batch is cut
    part: Plan  # of the part of a device, without chunks
    apart: once.Apart | None = None  # some is hoisted, and the rest is walked

    @property
    def walked(self) -> tuple[ItemProgram, Plan]:
        """The program that is walked, and the plan of the part, without chunks."""
        return (self.apart.item, self.apart.plan) if self.apart else (self.item, self.part)


def traced(call: Call, options: Options, place: Placement) -> Traced:
    """Trace the kernel of a call for one item; copies that fill a batch up are not reduced."""
    if options.reduce is not None and call.lengths:
        options = options.replace(reduce=options.reduce.of_items(FILL))
    whole = call.plan_whole(options)
    with place.inside():
        item = call.trace(whole, options.reduce)
    item = item.with_literals() if options.fused else item
    inputs = [x.shape for x in item.closed.in_avals] + [x.shape for x in item.closed.consts]
    lengths: Any = sum(itertools.chain(whole.batch_shape, *inputs))
    if not isinstance(lengths, int):  # one is unknown, as in `jax.export`
        options = options.replace(hoist=False, xla_cpu=False)
    layout = place.of_item(item)
    part = whole.part(layout.shapes(whole)[-1]) if layout else whole
    return Traced(call, options, place, whole, item, layout, part)


class Fitted(NamedTuple):
    """How a call runs."""

    plan: Plan  # of one part
    options: Options
    shown: dict[str, Any]  # what the plan shows


def fit(trace: Traced) -> Fitted:
    """Choose what walks the items, then how many at once: a limit measures what will run."""
    call, options, layout = trace.call, trace.options, trace.layout
    if trace.whole.is_empty:
        return Fitted(trace.whole, options, {})
    item, whole = trace.walked
    jaxpr, shown = item.closed.jaxpr, dict[str, Any]()
    if has_refs(jaxpr.constvars, item.closed.effects):
        options = options.replace(checkpoint=False)  # JAX cannot differentiate a checkpointed Ref
    updated = options.reduce.numbers_of_tile(item.outputs) if options.reduce else 0
    best = options.rules.tiles(jaxpr, updated)
    tiles = WHOLE_CHUNKS if options.batched else best
    if options.hoist and tiles.forward:
        tiles = once.with_sides(tiles, jaxpr, whole)

    def plan_of(chunk_size: Any, /) -> Plan:
        sized = options.replace(chunk_size=chunk_size)
        if whole is trace.whole:
            return call.plan(sized, tiles)  # a call keeps its plans
        return whole.cut(*sizes_of(sized, tiles))

    if not options.lockstep:
        shown["ends"], in_lanes = lanes.planner(item, options, whole)
        plan_of = in_lanes or plan_of

    if options.chunk_size == AUTO:
        of_items = best._replace(across=0) if options.batched else tiles
        size = memory.default_size(item, options, whole, of_items)
        options = options.replace(chunk_size=size)
    if options.memory_limit is not None:
        part = call.part(trace.whole, layout.shapes(trace.whole)[-1]) if layout else call
        nest = functools.partial(_nest, trace)
        of_lengths = functools.partial(_item_of_lengths, trace)
        shown["memory"] = chosen = memory.within_limit(
            trace.item, options, part, trace.whole.mapped, plan_of, nest, of_lengths, whole
        )
        checkpoint = False if chosen.stored else options.checkpoint
        options = options.replace(chunk_size=chosen.chunk_size, checkpoint=checkpoint)

    return Fitted(plan_of(options.chunk_size), options, shown)


def fit_apart(trace: Traced) -> tuple[Traced, Fitted]:
    """Choose how a call runs, with what is hoisted out of its loops."""
    options, fitted = trace.options, None
    if options.memory_limit is None:  # otherwise, only what will run is measured
        fitted = fit(trace)
        if not (fitted.plan.has_loop or fitted.plan.walked or options.fused):
            return trace, fitted
    is_filled = options.reduce is None and trace.call.lengths  # each item says what it sends back
    is_asked = options.hoist and not (options.batched or is_filled or trace.part.is_empty)
    apart = None
    if is_asked and len(trace.part.batch_shape) > 1:
        by_number = options.rules.by_number and not options.fused
        gated = once.is_gated(trace.item, options.reduce)
        apart = once.hoist(trace.item, trace.part, is_gated=gated, by_number=by_number)
    if apart is None or not memory.has_room(options, apart.bytes):
        return trace, fitted or fit(trace)
    trace = trace._replace(apart=apart)
    return trace, fit(trace)


def _item_of_lengths(trace: Traced, *lengths: int) -> ItemProgram:
    """Return the item; of a kernel that takes a batch, for chunks of these lengths."""
    if not trace.options.batched:
        return trace.item
    call = dataclasses.replace(trace.call, form=Batched(lengths))
    return traced(call, trace.options, trace.place).item


def walk_of(
    plan: Plan, options: Options, inputs: tuple[int, ...], *passes: Pass, **more: Any
) -> Nest:
    """Return what walks the levels of a plan: nested maps and loops, lanes, or one kernel.

    ``passes`` come after those of the options. ``more``: see `rankax.core.walk.nest_of`.
    """
    has_math = options.cpu_math and cpu_math.is_on(options)
    passes = (cpu_math.PASS, *passes) if has_math else passes
    passes = passes if options.lockstep else (lanes.REVERSE, *passes)
    nest = nest_of(
        plan,
        inputs,
        reductions=options.reduce,
        rules=options.rules,
        passes=passes,
        takes_chunks=options.batched,
        checkpoint=options.checkpoint is not False,
        **more,
    )
    return fused.walk_of(nest, options) if options.fused else nest


def _nest(
    trace: Traced,
    plan: Plan,
    options: Options,
    observer: Observer | None = None,
    *,
    differentiable: bool = True,
) -> Nest:
    """Return what walks a call: first what is hoisted, then the rest."""
    how = {"observer": observer, "differentiable": differentiable}
    if trace.apart is None:
        return walk_of(plan, options, trace.whole.mapped, **how)
    first: list[Nest] = []
    of_map = options.replace(reduce=None, fused=False)
    for piece in trace.apart.hoisted:
        _, in_lanes = lanes.planner(piece.item, of_map, piece.plan)
        tiles = options.rules.tiles(piece.item.closed.jaxpr, 0)
        plan_of_piece = piece.plan.cut(options.most if piece.is_dear else None, tiles)
        if in_lanes and not options.lockstep:
            plan_of_piece = in_lanes(options.chunk_size)
        inputs = piece.plan.mapped
        first.append(walk_of(plan_of_piece, of_map, inputs, differentiable=differentiable))
    before = once.Before(trace.part, trace.apart.chosen, tuple(first), trace.apart.is_gated)
    return walk_of(plan, options, trace.apart.plan.mapped, before=before, **how)


def _walked(trace: Traced, observer: Observer | None) -> Any:
    """Evaluate a traced call; an eager one by its kept program."""
    call, options, whole, reductions = trace.call, trace.options, trace.whole, trace.options.reduce
    leaves = [call.leaves[i] for i in whole.mapped]
    item, leaves = trace.layout.placed(whole, trace.item, leaves)
    mode = mode_of([*leaves, *item.closed.consts], on_mesh=bool(trace.layout))
    make = functools.partial(_program, trace, observer, is_now=mode is Mode.EAGER)
    # A user-defined function may change between calls and stay the same object.
    is_ordered = reductions is not None and reductions.are_ordered
    of_call = whole, trace.place, options, options.rules, observer
    key = None if is_ordered else (*of_call, tuple(call.lengths), call.cut)
    with call_of_kernel(item.site), trace.place.around(call.site):
        try:
            out = kept_program(make, item, leaves, key, mode, options.compiled)()
        except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
            raise item.reuses_key() from error
    if reductions is None:
        return item.out_tree.unflatten(out)
    return reductions.assembled(item.outputs, out)


def _program(trace: Traced, observer: Observer | None, *, is_now: bool) -> Program:
    """Return the whole call as a function of its item and its leaves."""
    trace, fitted = fit_apart(trace)
    options, layout = fitted.options, trace.layout
    if not options.on_cpu:
        for note in memory.notes(options, trace.item.closed.jaxpr, fitted.plan):
            warn_once("small steps", note)
    if observer is not None:
        is_shown = layout or fitted.plan.steps > 1
        observer = naming_axes(observer.of_parts(layout.count), fitted.plan) if is_shown else None
    *others, shape = layout.shapes(trace.whole)
    alone, walks = trace._replace(apart=None), dict[Any, Nest]()
    for other in others:  # one item along an axis
        plan = trace.whole.part(other).cut(*sizes_of(options, WHOLE_CHUNKS))
        walks[other] = _nest(alone, plan, options, differentiable=not is_now)
    walks[shape] = _nest(trace, fitted.plan, options, observer, differentiable=not is_now)
    # JAX keeps it, so it holds no arrays: neither the call nor its item.
    return functools.partial(layout.walk, trace.whole, walks)
