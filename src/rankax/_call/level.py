# SPDX-License-Identifier: MIT
"""One level of a nest that is walked in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from rankax._call.mapping import ArgumentMapping
from rankax._call.over_parts import First, Layout, map_parts
from rankax._devices.parts import Parts
from rankax._loop.reuse import map_chunks
from rankax._loop.spec import LoopSpec
from rankax._trace.item import ItemProgram, trace_item

__all__ = ["LevelWalk", "item_program"]


def item_program(
    fun: Callable[..., Any],
    mapping: ArgumentMapping,
    out_axes: Any,
    axis_name: Hashable | None = None,
) -> ItemProgram:
    avals = mapping.item_avals
    return trace_item(fun, lambda *x: mapping.arguments(x), avals, out_axes, axis_name)


@dataclasses.dataclass(frozen=True)
class LevelWalk:
    """How the items of one call, or of each of its parts, are walked."""

    spec: LoopSpec

    def run(self, item: ItemProgram, leaves: list[Any]) -> list[Any]:
        return map_chunks(item, leaves, self.spec)

    def in_parts(self, item: ItemProgram, leaves: list[Any], parts: Parts) -> list[Any]:
        spec = dataclasses.replace(self.spec, by_index=True)
        axes = tuple((axis,) for axis in spec.axes)
        layout = Layout((spec.chunks.length * parts.count,), (parts,), axes)
        out_axes = [(axis,) for axis in item.out_axes]
        return map_parts(LevelWalk(spec).part, item, leaves, layout, out_axes, spec)

    def part(self, item: ItemProgram, leaves: list[Any], _: First) -> list[Any]:
        return self.run(item, leaves)
