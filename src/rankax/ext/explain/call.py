# SPDX-License-Identifier: MIT
"""What a call would do: the steps of `rankax.pipeline`, up to the first program."""

import dataclasses
from typing import Any

import jax

from rankax._options import AUTO, Options
from rankax.call.kernels import KernelCall
from rankax.core.base.arrays import inside_call, on_mesh, shape_of
from rankax.core.plan.schedule import Plan
from rankax.core.protocols import Placement
from rankax.ext import cpu_math, once
from rankax.ext.bucket import filled, filling_of
from rankax.ext.devices import call as devices
from rankax.ext.explain.plan import BatchPlan, shown
from rankax.ext.fused import walk as fused
from rankax.ext.memory import choose as memory
from rankax.pipeline import (
    Traced,
    by_hand,
    fit_apart,
    observed,
    options_of,
    place_of,
    prepared,
    traced,
    walk_of,
)

_LEAST_SHARE = 0.1


def plan_kernel(call: KernelCall) -> BatchPlan:
    options = call.kernel.options()
    filling = filling_of(call, options)
    return plan_of(filled(call, filling, only_shapes=True) if filling else call, options)


def plan_of(call: KernelCall, options: Options) -> BatchPlan:
    """Return what a call would do; the arguments may be shapes, for which tracers stand in."""
    values, shell = call.split()
    at = [i for i, value in enumerate(values) if isinstance(value, jax.ShapeDtypeStruct)]
    # A dtype of 64 bits that JAX narrows is a warning in `jax.eval_shape` of JAX 0.12.
    shapes = [values[i] if values[i].sharding else shape_of(values[i]) for i in at]
    plans: list[BatchPlan] = []
    options = options_of(call, options)
    with on_mesh(call.leaves), inside_call(options.target):
        place = place_of(call, options)
        if not shapes:
            return _planned(call, options, place)

        def plan(arrays: list[Any]) -> None:
            tracers = dict(zip(at, arrays, strict=True))
            staged = shell.call(call.kernel, [tracers.get(i, x) for i, x in enumerate(values)])
            again = dataclasses.replace(call, leaves=staged.leaves, bound=staged.bound)
            plans.append(_planned(again, options, place))

        jax.eval_shape(plan, shapes)
    return plans[0]


def _planned(call: KernelCall, options: Options, place: Placement) -> BatchPlan:
    ready, options = prepared(call, options, place)
    fields = {"untouched": call.untouched(), "filled": tuple(call.lengths.items())}
    if (plan := by_hand(ready, options, place)) is not None:
        return shown(plan, **fields)
    with observed(options, call.name):
        trace = traced(ready, options, place)
    trace, fitted = fit_apart(trace)
    plan, whole = fitted.plan, trace.whole
    schedule = once.shown(plan, whole, trace.apart.hoisted) if trace.apart else plan
    fields |= {"batch_shape": whole.batch_shape, **fitted.shown}
    fields |= {} if trace.apart else {"leaves": whole.leaves}
    item, part = trace.walked
    nest = walk_of(plan, fitted.options, part.mapped)
    notes = *_notes(trace, schedule), *fused.notes(nest, item)
    fields |= {**trace.layout.shown, "notes": notes}
    return shown(schedule, **fields)


def _notes(trace: Traced, plan: Plan) -> tuple[str, ...]:
    """Return what else there is to say about a call."""
    options, jaxpr = trace.options, trace.item.closed.jaxpr
    notes: list[str] = []
    if options.chunk_size == AUTO and plan.steps > 1:
        is_limited = options.memory_limit is not None
        rest = "as many as fit the limit" if is_limited else "all"
        notes.append(f"bounded by default; chunk_size=None takes {rest}")
    is_cut = options.on_cpu and options.lockstep and options.reduce is None
    if is_cut and plan.steps > 1 and options.most and 2 * plan.in_flight <= options.most:
        size = f"chunk_size={options.most}"
        notes.append(f"{size} is cut into tiles of {plan.in_flight}, which stay in the cache")
    notes += once.notes(trace.apart.hoisted, plan) if trace.apart else []
    notes += _notes_of_masks(trace)
    notes += devices.notes(trace.place, options)
    walked, _ = trace.walked
    if options.reduce is None or not options.rules.tiles(walked.closed.jaxpr, 0).reduced:
        notes += cpu_math.notes(options, jaxpr)
    return (*notes, *memory.notes(options, jaxpr, plan))


def _notes_of_masks(trace: Traced) -> list[str]:
    """Say which masks derivatives evaluate again, unless that is little of an item."""
    if trace.options.reduce is None:
        return []
    jaxpr, shares = trace.item.closed.jaxpr, dict[Any, float]()
    for entry, outputs in trace.options.reduce.each(trace.item.outputs):
        if outputs.mask is not None:
            shares[entry.where] = once.share(jaxpr, jaxpr.outvars[outputs.mask])
    return [
        f"derivatives evaluate where={where!r} twice more, {100 * share:.0f} % of an item; an "
        "argument as mask costs nothing"
        for where, share in shares.items()
        if share >= _LEAST_SHARE
    ]
