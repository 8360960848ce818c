# SPDX-License-Identifier: MIT
"""One level of a nest, around a function of one item: a `jax.vmap`, or a loop over chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._loop.keys import PLACE, vmap_level
from rankax._loop.loop import map_in_chunks
from rankax._loop.spec import LoopSpec
from rankax._trace.item import ItemProgram, trace_item, with_axis, with_shape


def map_level(fun: Callable[..., Any], spec: LoopSpec) -> Callable[..., Any]:
    """Return ``fun``, which takes arrays and returns a list of them, mapped over one level.

    A traced program whose inputs are exactly those that the level maps is not traced again.
    """
    program = fun if isinstance(fun, ItemProgram) else None
    if not spec.is_loop:
        out_axes = 0 if program is None else list(program.out_axes)
        size = spec.chunks.length
        return vmap_level(fun, spec.in_axes, size, out_axes, numbered=spec.numbered)
    if None in spec.in_axes or spec.numbered:
        program = None

    def mapped(*leaves: Any) -> list[Any]:
        item = program or trace_level(fun, leaves, spec)
        return map_in_chunks(item, mapped_arrays(leaves, spec), spec)

    return mapped


def mapped_arrays(leaves: Sequence[Any], spec: LoopSpec) -> list[jax.Array]:
    """Return the leaves that a level maps, as arrays of JAX."""
    # `jnp.asarray` of such an array takes ten microseconds, in every eager call.
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in spec.mapped(leaves)]


def trace_level(
    fun: Callable[..., Any], leaves: Sequence[Any], spec: LoopSpec, out_axes: int = 0
) -> ItemProgram:
    """Trace ``fun`` for one item of a level, with the leaves that the level does not map."""
    pairs = zip(mapped_arrays(leaves, spec), spec.axes, strict=True)
    avals = [with_axis(x, axis) for x, axis in pairs]
    avals += [with_shape(PLACE, ())] if spec.numbered else []
    return trace_item(
        fun, lambda *items: (tuple(spec.with_items(leaves, items)), {}), avals, out_axes
    )


def places_of(index: Any, levels: Sequence[LoopSpec]) -> list[Any]:
    """Return the place of an item along each level, given its flat index."""
    places: list[Any] = []
    for level in reversed(levels):
        size = np.asarray(max(level.chunks.length, 1), index.dtype)
        places.append(index % size)
        index = index // size
    return places[::-1]
