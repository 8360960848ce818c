# SPDX-License-Identifier: MIT
"""How a bound on memory takes part in a call: it chooses the chunk size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from rankax._options import Options
from rankax.call.base import Call
from rankax.core.plan.schedule import Plan, Tiles, is_known
from rankax.core.trace.programs import ItemProgram
from rankax.core.walk import Nest
from rankax.ext.memory.budget import MemoryFit, limit_in_bytes
from rankax.ext.memory.default import default_on_cpu, default_on_gpu, small_steps
from rankax.ext.memory.limit import check_fits, fit_to_limit, free_bytes


def default_size(item: ItemProgram, options: Options, whole: Plan, tiles: Tiles) -> int | None:
    """Return how many items of a reduction are evaluated at once, if nothing else bounds them."""
    jaxpr, sizes = item.closed.jaxpr, tuple(level.size for level in whole.levels)
    if not all(map(is_known, sizes)):
        return None
    if options.on_cpu:
        if tiles.side and math.prod(sizes) > tiles.side**2:
            return tiles.side**2
        if across := whole.across(tiles):
            return across
        tile, most = tiles.forward, tiles.reduced or options.rules.most_reduced
        return default_on_cpu(jaxpr, sizes, tile and min(tile, most or tile))
    row = math.prod(level.size for level in whole.levels if level.reduced)
    return default_on_gpu(jaxpr, sizes, row)


def within_limit(
    item: ItemProgram,
    options: Options,
    part: Call,
    inputs: Sequence[int],
    plan_of: Callable[[Any], Plan],
    walk_of: Callable[[Plan, Options], Nest],
    item_of_lengths: Callable[..., ItemProgram],
    key: Any,
) -> MemoryFit:
    """Return the chunk size that meets a memory limit.

    Parameters
    ----------
    item : ItemProgram
    options : Options
    part : Call
        Of one device.
    inputs : sequence of int
        The leaves that an item takes.
    plan_of, walk_of
        Plan the call, from a chunk size, and walk a plan.
    item_of_lengths : callable
        Returns the item for chunks of some lengths, if it takes a whole chunk.
    key : hashable
        What else the memory depends on.
    """
    options = options.replace(progress=False, jit=False)
    whole = item_of_lengths()

    def program(chunk_size: int, checkpoint: bool | None) -> tuple[int, Callable[..., Any]]:
        plan = plan_of(chunk_size)
        walk = walk_of(plan, options.replace(chunk_size=chunk_size, checkpoint=checkpoint))
        own = item_of_lengths(plan.in_flight)
        others = own.closed.consts[len(whole.closed.consts) :]

        def measured(consts: list[Any], leaves: list[Any]) -> list[Any]:
            return jax.tree.leaves(walk.walk(own.with_constants([*consts, *others]), leaves))

        return plan.in_flight, measured

    sizes, leaves = (
        tuple(level.size for level in plan_of(1).levels),
        [part.leaves[i] for i in inputs],
    )
    key = key, item.out_axes
    return fit_to_limit(part.site, options, sizes, whole.closed, leaves, program, key)


def has_room(options: Options, size: int) -> bool:
    """Whether a limit leaves room for results of so many bytes, their cotangents, and chunks."""
    if options.memory_limit is None:
        return True
    return 4 * size <= limit_in_bytes(options.memory_limit, lambda: free_bytes(options.target))


def check_whole(call: Call, plan: Plan, options: Options) -> None:
    """Refuse a call with a collective over its axis that needs more than its memory limit."""
    if options.memory_limit is None:
        return

    def whole(*mapped: Any) -> list[Any]:
        leaves = {**dict(enumerate(call.leaves)), **dict(zip(plan.mapped, mapped, strict=True))}
        own = dataclasses.replace(call, leaves=[*leaves.values()])
        return jax.tree.leaves(own.in_one_piece(plan))

    why = f"a collective over axis_name={call.axis_name!r} allows no chunks"
    check_fits(call.site, options, whole, [call.leaves[i] for i in plan.mapped], why)


def notes(options: Options, jaxpr: Jaxpr, plan: Plan) -> list[str]:
    """Say which chunk size makes fewer steps, if a call makes many small ones on a GPU."""
    return [] if options.on_cpu else list(filter(None, [small_steps(jaxpr, plan)]))
