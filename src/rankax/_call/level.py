# SPDX-License-Identifier: MIT
"""One level of a nest that is walked in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._call.mapping import ArgumentMapping
from rankax._call.over_parts import First, Layout, map_parts
from rankax._devices.parts import Parts
from rankax._loop.keys import PLACE
from rankax._loop.reuse import map_chunks
from rankax._plan.chunks import Chunks, split_into_chunks
from rankax._progress.report import Progress
from rankax._trace.item import ItemProgram, trace_item

__all__ = ["LevelWalk", "chunked_level", "item_program"]


def item_program(
    fun: Callable[..., Any],
    mapping: ArgumentMapping,
    out_axes: Any,
    axis_name: Hashable | None = None,
    *,
    numbered: bool = False,
) -> ItemProgram:
    avals = mapping.item_avals
    if not numbered:
        return trace_item(fun, lambda *x: mapping.arguments(x), avals, out_axes, axis_name)

    def arguments(*items: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = mapping.arguments(items[:-1])
        return (*args, items[-1]), kwargs

    return trace_item(fun, arguments, [*avals, PLACE], out_axes, axis_name)


@dataclasses.dataclass(frozen=True)
class LevelWalk:
    """How the items of one call, or of each of its parts, are walked."""

    axes: tuple[int, ...]  # of the mapped leaves
    chunks: Chunks
    checkpoint: bool
    progress: Progress | None
    numbered: bool = False

    def run(self, item: ItemProgram, leaves: list[Any]) -> list[Any]:
        return map_chunks(
            item,
            leaves,
            self.axes,
            self.chunks,
            checkpoint=self.checkpoint,
            numbered=self.numbered,
            progress=self.progress,
        )

    def in_parts(self, item: ItemProgram, leaves: list[Any], parts: Parts) -> list[Any]:
        walk = dataclasses.replace(self, chunks=dataclasses.replace(self.chunks, by_index=True))
        layout = Layout(
            (self.chunks.length * parts.count,), (parts,), tuple((axis,) for axis in self.axes)
        )
        out_axes = [(axis,) for axis in item.out_axes]
        return map_parts(walk.part, item, leaves, layout, out_axes, walk)

    def part(self, item: ItemProgram, leaves: list[Any], _: First) -> list[Any]:
        return self.run(item, leaves)


def chunked_level(
    fun: Callable[..., Any],
    in_axes: Sequence[int | None],
    size: int,
    tile: int,
    *,
    checkpoint: bool,
    progress: Progress | None,
    numbered: bool = False,
    by_index: bool = False,
) -> Callable[..., Any]:
    """Return `chunked_vmap` of ``fun`` for one level of a nest, of which nothing has to be checked.

    ``fun`` takes arrays, mapped along ``in_axes`` of length ``size``, and returns a list of them.
    Where it is ``numbered``, it takes the place of its item last (see `keys.py`).
    """
    chunks = dataclasses.replace(split_into_chunks(size, tile), by_index=by_index)

    def mapped(*leaves: Any) -> Any:
        treedef = jax.tree.structure((leaves, {}))
        arrays = [x if a is None else jnp.asarray(x) for x, a in zip(leaves, in_axes, strict=True)]
        mapping = ArgumentMapping(arrays, list(in_axes), treedef, size)
        item = item_program(fun, mapping, 0, numbered=numbered)
        walk = LevelWalk(mapping.mapped_axes, chunks, checkpoint, progress, numbered)
        return jax.tree.unflatten(item.out_tree, walk.run(item, mapping.mapped))

    return mapped
