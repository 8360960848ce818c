# SPDX-License-Identifier: MIT
"""The path of every call: plan, trace, fit, run.

A call without a loop nests maps around the kernel itself, so its program is the one that nesting by
hand gives (without ``cpu_math``). Otherwise the kernel is traced once, for one item, and all later
steps (the memory limit, the tile, the loops, the devices) work on the program of that item.
What ``plan`` prints is found by the same steps (`ext/explain`); an eager call that is known skips
those after the trace.

Words used throughout:

* chunk: the items of a map that one step of a loop evaluates at once, at most ``chunk_size``
* tile: the items of a reduction that one step evaluates at once; in a plan, also the items that a
  step of a map does (`Level.tile`)
* slot: the place of an item in a tile; a running state has one value for each slot
* row: the items along the reduced axes, for one item of the kept axes; in a loop, also one entry
  of the ``xs`` or ``ys`` of a scan
* run: items of a row that are folded into one state, such as one device's part or one dask block
* part: the contiguous items of a batch axis that one of several devices evaluates
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from rankax.core.base.target import inside_call, on_mesh
from rankax.core.call.bound import Bound
from rankax.core.call.nest import Nest, nest_of
from rankax.core.hooks import (
    CHOOSERS,
    TRACED,
    WARNINGS,
    Layout,
    Observer,
    Placement,
    observed,
    place_of,
)
from rankax.core.loop.reuse import Mode, Program, call_of_kernel, mode_of, run_kept
from rankax.core.options import Options
from rankax.core.plan.nesting import Nesting
from rankax.core.plan.schedule import WHOLE_CHUNKS, Tiles
from rankax.core.trace.programs import ItemProgram


class Traced(NamedTuple):
    """A bound call whose kernel is traced."""

    bound: Bound
    options: Options
    place: Placement
    whole: Nesting  # the plan of the whole batch, without chunks
    item: ItemProgram
    layout: Layout


class Fitted(NamedTuple):
    """How a call runs; extensions change it (`core/hooks.py`, `CHOOSERS`)."""

    planner: Callable[[Options], Nesting]  # plans one part
    options: Options
    found: dict[str, Any]  # what the plan shows
    tiles: Tiles = WHOLE_CHUNKS
    is_walked: bool = False  # otherwise it may be evaluated without its traced program

    @property
    def plan(self) -> Nesting:
        """The plan of one part."""
        return self.planner(self.options)


def run(bound: Bound, options: Options, place: Placement | None = None) -> Any:
    """Evaluate a bound call; pass its place if it is known already."""
    options = options.at(bound.leaves)
    with on_mesh(bound.leaves), inside_call(options.target):
        place = place_of(bound, options) if place is None else place
        bound = bound.prepared(options, place)
        if (plan := untraced(bound, options, place)) is not None:
            return bound.in_one_piece(plan)
        with observed(options, bound.name) as observer:
            return _run(traced(bound, options, place), observer)


def _run(call: Traced, observer: Observer | None) -> Any:
    bound, options, whole = call.bound, call.options, call.whole
    item, leaves = call.layout.placed(call.item, [bound.leaves[i] for i in whole.mapped])
    mode = mode_of([*leaves, *item.read, *item.closed.consts], on_mesh=bool(call.layout))
    make = functools.partial(_program, call, observer, is_now=mode is Mode.EAGER)
    reductions = options.reduce
    # A user-defined function may change between calls and stay the same object.
    is_ordered = reductions is not None and reductions.are_ordered
    of_call = whole, call.place.key, options, options.rules, observer
    key = None if is_ordered else (*of_call, tuple(bound.lengths), bound.cut)
    with call_of_kernel(item.site), call.place.around(bound.site):
        try:
            out = run_kept(make, item, leaves, key, mode, options.compiled)
        except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
            raise item.reuses_key() from error
    if out is None:
        return bound.in_one_piece(whole)
    if reductions is None:
        return item.out_tree.unflatten(out)
    return reductions.assembled(item.outputs, out)


def _program(call: Traced, observer: Observer | None, *, is_now: bool) -> Program | None:
    """Return the whole call as a function of its item and its leaves."""
    call = call._replace(item=call.item.whole)
    bound, whole, layout = call.bound, call.whole, call.layout
    fitted = fit(call)
    if not fitted.is_walked:
        return None
    plan, options = fitted.plan, fitted.options
    for warn in WARNINGS.of(options):
        warn(call, plan.plan)
    if observer is not None:
        is_shown = layout or plan.plan.steps > 1
        observer = observer.of_parts(layout.count) if is_shown else None

    def nest(plan: Nesting, observer: Observer | None = None) -> Nest:
        plan = dataclasses.replace(plan, splits=whole.splits)  # numbered within the whole batch
        return nest_of(plan, whole.mapped, options, observer, differentiable=not is_now)

    *others, shape = layout.shapes()
    nests = {other: nest(bound.part(whole, other).plan(options)) for other in others}
    nests[shape] = nest(plan, observer)
    # JAX keeps it, so it holds no arrays: neither the call nor its item.
    return functools.partial(layout.walk, nests)


def untraced(bound: Bound, options: Options, place: Placement) -> Nesting | None:
    """Return the plan of a call that is evaluated without tracing its kernel first."""
    if options.reduce is not None:
        return None
    plan = bound.plan(options)
    is_asked = any(hook(bound, options, plan) for hook in TRACED.of(options))
    if is_empty(plan):
        return None if is_asked else bound.plan_whole(options)
    is_traced = is_asked or place or any(plan.loops) or bound.is_kept
    return None if is_traced else plan


def is_empty(plan: Nesting) -> bool:
    """Whether there is no item, or no batch."""
    return not plan.plan.levels or 0 in plan.plan.batch_shape


def traced(bound: Bound, options: Options, place: Placement) -> Traced:
    """Trace the kernel of a call for one item."""
    whole = bound.plan_whole(options)
    with place.inside():
        item = bound.trace(whole, options.reduce)
        item = item.whole if place else item
    return Traced(bound, options, place, whole, item, place.layout(whole, item))


def fit(call: Traced) -> Fitted:
    """Choose how a call runs: tiles, and what extensions choose."""
    bound, options, item, layout = call.bound, call.options, call.item, call.layout
    if is_empty(call.whole):
        return Fitted(lambda _: call.whole, options, {}, is_walked=True)
    part = bound.part(call.whole, layout.shapes()[-1]) if layout else bound
    updated = options.reduce.numbers_of_tile(item.outputs) if options.reduce else 0
    is_whole = bound.form is not None and bound.form.takes_chunks
    tiles = WHOLE_CHUNKS if is_whole else options.rules.tiles(item.closed.jaxpr, updated)
    fitted = Fitted(lambda options: part.plan(options, tiles), options, {}, tiles)
    for choose in CHOOSERS.of(options):
        fitted = choose(call, part, fitted) or fitted
    is_walked = fitted.is_walked or layout or options.reduce or bound.is_kept
    return fitted._replace(is_walked=bool(is_walked or any(fitted.plan.loops)))
