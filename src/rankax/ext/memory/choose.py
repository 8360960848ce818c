# SPDX-License-Identifier: MIT
"""How a bound on memory takes part in a call: it chooses the chunk size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr

from rankax.core.call.nest import nest_of
from rankax.core.call.run import Bound, Fitted, Traced
from rankax.core.hooks import CHOOSERS, NOTES, TRACED, WARNINGS
from rankax.core.loop.eager_programs import warn_once
from rankax.core.options import Option, Options, register
from rankax.core.plan.schedule import Plan
from rankax.core.trace.programs import ItemProgram
from rankax.ext.memory.budget import MemoryFit, checked_limit
from rankax.ext.memory.default import default_on_cpu, default_on_gpu, small_steps
from rankax.ext.memory.limit import fit_to_limit


def _choose_default(call: Traced, part: Bound, fitted: Fitted) -> Fitted:
    """Bound a reduction that nothing bounds."""
    options = call.options
    jaxpr, levels = call.item.closed.jaxpr, part.plan_whole(options).levels
    sizes = tuple(level.size for level in levels)
    if options.on_cpu:
        tile, most = fitted.tiles.forward, options.rules.most_reduced
        size = default_on_cpu(jaxpr, sizes, tile and min(tile, most or tile))
    else:
        row = math.prod(level.size for level in levels if level.reduced)
        size = default_on_gpu(jaxpr, sizes, row)
    return fitted._replace(options=fitted.options.replace(chunk_size=size))


def _choose_within_limit(call: Traced, part: Bound, fitted: Fitted) -> Fitted:
    """Choose the chunk size that meets a memory limit."""
    options = call.options
    memory = _fit(call, part, fitted)
    checkpoint = False if memory.stored else options.checkpoint
    options = fitted.options.replace(chunk_size=memory.chunk_size, checkpoint=checkpoint)
    return fitted._replace(options=options, found={**fitted.found, "memory": memory})


def _fit(call: Traced, part: Bound, fitted: Fitted) -> MemoryFit:
    options = call.options.replace(progress=False, jit=False)
    item, inputs = _of_lengths(call), call.whole.mapped

    def plan(chunk_size: int) -> Plan:
        return fitted.planner(options.replace(chunk_size=chunk_size))

    def program(chunk_size: int, checkpoint: bool | None) -> tuple[int, Callable[..., Any]]:
        planned = plan(chunk_size)
        nest = nest_of(planned, inputs, options.replace(checkpoint=checkpoint))
        own = _of_lengths(call, planned.in_flight)
        others = own.closed.consts[len(item.closed.consts) :]

        def measured(consts: list[Any], leaves: list[Any]) -> list[Any]:
            return jax.tree.leaves(nest.walk(own.with_constants([*consts, *others]), leaves))

        return planned.in_flight, measured

    sizes = tuple(level.size for level in plan(1).levels)
    leaves, key = [part.leaves[i] for i in inputs], (part.plan_whole(options), item.out_axes)
    return fit_to_limit(part.site, options, sizes, item.closed, leaves, program, key)


def _of_lengths(call: Traced, *lengths: int) -> ItemProgram:
    """Return the item; of a kernel that takes a chunk itself, for chunks of these lengths."""
    form = call.bound.form
    return call.item if form is None else form.of_lengths(call, *lengths)


def _warn_of_small_steps(call: Traced, plan: Any) -> None:
    if small := small_steps(call.item.closed.jaxpr, plan):
        warn_once("small steps", small)


def _notes(options: Options, jaxpr: Jaxpr, plan: Any) -> list[str]:
    return [] if options.on_cpu else list(filter(None, [small_steps(jaxpr, plan)]))


def _is_traced(_: Any, __: Options, plan: Plan) -> bool:
    return not plan.is_empty


CHOOSERS.add("auto", _choose_default)
CHOOSERS.add("memory_limit", _choose_within_limit)
WARNINGS.add("off_cpu", _warn_of_small_steps)
NOTES.append(_notes)
TRACED.add("memory_limit", _is_traced)
register(
    Option("memory_limit", None, checked_limit, scoped=True, bounds=lambda value: value is not None)
)
