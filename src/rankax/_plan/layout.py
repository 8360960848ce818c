# SPDX-License-Identifier: MIT
"""How the leaves of one call enter the nested maps: decided by shapes alone, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from rankax._plan.levels import Level, Shape, plan_levels
from rankax._plan.report import Item, check_items

__all__ = ["Layout", "lay_out"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The batch and the maps of one call, and how each leaf enters them.

    Leaves are meant by their position among all leaves of the call.
    """

    items: tuple[Item, ...]  # the leaves that have a rank
    batch_shape: Shape
    levels: tuple[Level, ...]
    reshaped: tuple[tuple[int, Shape], ...]  # leaf, and its shape without stretched axes
    mapped: tuple[int, ...]  # the leaves that some level maps
    in_axes: tuple[tuple[int | None, ...], ...]  # per level, for the mapped leaves
    sizes: dict[str, int]  # of the named core dimensions

    def unmerged(self, outs: list[Any]) -> list[Any]:
        """Give outputs the batch shape again where a level covers more, or less, than one axis."""
        if tuple(level.size for level in self.levels) == self.batch_shape:
            return outs
        depth = len(self.levels)
        return [jnp.reshape(leaf, self.batch_shape + leaf.shape[depth:]) for leaf in outs]


def lay_out(
    fun: Callable[..., Any],
    items: Sequence[Item],
    positions: Sequence[int],
    chunk_size: int | None,
    untouched: Callable[[], Sequence[tuple[str, Shape]]] = tuple,
) -> Layout:
    """Check the shapes of a call and lay out its maps.

    Parameters
    ----------
    fun : callable
        The kernel, for error messages.
    items, positions : sequences of equal length
        Each leaf that has a rank, and its position among all leaves.
    chunk_size : int or None
        How many items may be in flight.
    untouched : callable
        Returns path and shape of the arrays without a rank; asked for an error only.
    """
    sizes: dict[str, int] = {}
    batch_shape = check_items(fun, items, sizes, untouched)
    levels = plan_levels(tuple(item.batch for item in items), batch_shape, chunk_size)
    reshaped: list[tuple[int, Shape]] = []
    mapped: list[int] = []
    for i, (item, position) in enumerate(zip(items, positions, strict=True)):
        batch = tuple(level.size for level in levels if level.mapped[i])
        if batch:
            mapped.append(i)
        if batch != item.batch:
            reshaped.append((position, batch + item.core))
    return Layout(
        tuple(items),
        batch_shape,
        levels,
        tuple(reshaped),
        tuple(positions[i] for i in mapped),
        tuple(tuple(0 if level.mapped[i] else None for i in mapped) for level in levels),
        sizes,
    )
