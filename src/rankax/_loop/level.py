# SPDX-License-Identifier: MIT
"""One level of a nest around a function of one item: a `jax.vmap`, or a loop over chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._loop.keys import PLACE, vmap_level
from rankax._loop.reuse import map_chunks
from rankax._loop.spec import LoopSpec
from rankax._trace.item import ItemProgram, trace_item, with_axis

__all__ = ["map_level", "trace_level"]


def map_level(fun: Callable[..., Any], spec: LoopSpec) -> Callable[..., Any]:
    """Return ``fun``, which takes arrays and returns a list of them, mapped over one level."""
    if not spec.is_loop:
        return vmap_level(fun, spec.in_axes, spec.chunks.length, numbered=spec.numbered)

    def mapped(*leaves: Any) -> Any:
        item = trace_level(fun, leaves, spec)
        outs = map_chunks(item, [jnp.asarray(x) for x in spec.mapped(leaves)], spec)
        return jax.tree.unflatten(item.out_tree, outs)

    return mapped


def trace_level(
    fun: Callable[..., Any], leaves: Sequence[Any], spec: LoopSpec, out_axes: int = 0
) -> ItemProgram:
    """Trace ``fun`` for one item of a level, with the leaves that the level does not map."""
    pairs = zip(spec.mapped(leaves), spec.axes, strict=True)
    avals = [with_axis(jnp.asarray(x), axis) for x, axis in pairs]
    avals += [PLACE] if spec.numbered else []
    return trace_item(
        fun, lambda *items: (tuple(spec.with_items(leaves, items)), {}), avals, out_axes
    )
