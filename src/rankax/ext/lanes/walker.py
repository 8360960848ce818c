# SPDX-License-Identifier: MIT
"""How lanes take part in a call: they are chosen, planned, and walk the levels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from rankax._options import Options
from rankax.core.loop.loop import sinks_of
from rankax.core.plan.schedule import Chunks, Plan, is_known
from rankax.core.reduce.row import Ordered, Row, Steps
from rankax.core.trace.programs import ItemProgram
from rankax.ext.lanes.branches import gated_loops
from rankax.ext.lanes.call import (
    check_lanes,
    in_lockstep,
    map_in_lockstep,
    most_lanes,
    walk_in_lanes,
)
from rankax.ext.lanes.engine import ROUNDS
from rankax.ext.lanes.machine import cut_program
from rankax.ext.scan.while_loop import has_plain_loop, with_reverse_pass


@dataclasses.dataclass(frozen=True)
class LaneWalker:
    """Lanes that walk the items of all levels (`core/protocols.py`, `Walker`)."""

    count: int
    rounds: int  # between two conditions, see `engine.py`

    def __str__(self) -> str:
        return "in the lanes"

    def walk(
        self, fun: Any, leaves: Sequence[Any], levels: Sequence[Any], item: Any, *, back: bool
    ) -> list[Any]:
        """Evaluate an item for all items of the levels."""
        by = map_in_lockstep if back else walk_in_lanes
        return by(fun, leaves, levels, item)

    def fold(self, row: Row, steps: Steps, kept: Sequence[int], *, linear: bool) -> list[Any]:
        """Fold a row whose items end by themselves."""
        if row.back:
            return _differentiated(row, steps, kept, linear)
        folds, tile = sinks_of(steps, kept, scattered=True), min(self.count, row.size)
        tile = min(tile, row.rules.most_reduced or tile)
        states = walk_in_lanes(row.item, row.leaves, row.levels, None, folds, tile)
        return [*states[: len(steps)], *map(row.split, states[len(steps) :])]


def _differentiated(row: Row, steps: Steps, kept: Sequence[int], linear: bool) -> list[Any]:
    """Fold a row in lockstep, to be differentiated."""
    is_ordered = any(isinstance(step.accumulator, Ordered) for step in steps)
    item, leaves, level, stored, _ = in_lockstep(
        row.item, row.leaves, row.levels, sort=not is_ordered
    )
    own = dataclasses.replace(row, item=item, leaves=tuple(leaves), levels=(level,))
    states = own.fold(steps, kept, linear=linear)
    return [*states[: len(steps)], *map(row.split, map(stored, states[len(steps) :]))]


class ReversePass:
    """The pass that gives `while` loops a reverse pass."""

    def both(self, jaxpr: Jaxpr) -> Any:
        return jaxpr

    def differs_back(self, jaxpr: Jaxpr) -> bool:
        return has_plain_loop(jaxpr.eqns)

    def back(self, jaxpr: Jaxpr, site: str) -> Any:
        return with_reverse_pass(gated_loops(jaxpr), site) if has_plain_loop(jaxpr.eqns) else None


REVERSE = ReversePass()


def plan_lanes(plan: Plan, lanes: LaneWalker) -> Plan:
    """Plan a call whose items end by themselves, from its plan without chunks.

    The axes that a reduction keeps are walked item by item.
    """
    walked = [level.reduced or not plan.reduced for level in plan.levels]
    items = math.prod(level.size for level, own in zip(plan.levels, walked, strict=True) if own)
    if not is_known(items):
        raise ValueError(
            f"{plan.kernel}(): lockstep=False counts the items, but the batch has the unknown "
            f"length {items}; leave it out, or export a known length"
        )
    lanes = dataclasses.replace(lanes, count=min(lanes.count, items))
    levels = tuple(
        dataclasses.replace(level, walker=lanes, is_loop=False)
        if own
        else dataclasses.replace(level, chunks=Chunks(level.size, 1, level.size), is_loop=True)
        for level, own in zip(plan.levels, walked, strict=True)
    )
    return dataclasses.replace(plan, levels=levels)


def planner(
    item: ItemProgram, options: Options, whole: Plan
) -> tuple[tuple[str, ...], Callable[[Any], Plan] | None]:
    """Return where items part, and how their call is planned, from the chunk size, if they do.

    ``whole``: the plan without chunks.
    """
    machine, on_cpu = cut_program(item.closed), options.on_cpu
    if not machine.ends:
        return machine.ends, None
    check_lanes(item)

    def plan(chunk_size: Any) -> Plan:
        count = chunk_size if isinstance(chunk_size, int) else most_lanes(machine, on_cpu=on_cpu)
        return plan_lanes(whole, LaneWalker(count, ROUNDS[on_cpu]))

    return machine.ends, plan
