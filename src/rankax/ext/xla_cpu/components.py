# SPDX-License-Identifier: MIT
"""Small vectors by component, where a loop over tiles reads them again for every row of results.

They are stored with the items on the last axis, so that XLA:CPU reads each component of a tile in
order: sums and minima over pairs are 1.2 to 1.45 times as fast. This is a copy, so it is bounded by
half a megabyte. Derivatives are up to three times as fast without it, because sums over the items
of a tile would copy the vectors there.

Test: ``tests/xla_cpu/test_components.py``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from rankax.core.protocol import LoopSpec

_MOST_COMPONENTS = 16  # of an item
_MOST_BYTES = 2**19


def by_component(
    leaves: Sequence[Any], specs: Sequence[LoopSpec]
) -> tuple[list[Any], tuple[LoopSpec, ...]]:
    """Store small vectors by component if a loop reads them again; return where the items are."""
    stored, changed = list(leaves), list(specs)
    if any(spec.walker for spec in specs):
        return stored, tuple(changed)  # items are read one by one
    for i, leaf in enumerate(leaves):
        number, *others = [n for n, spec in enumerate(specs) if spec.in_axes[i] is not None]
        spec, around = changed[number], specs[:number]
        axis, is_loop = spec.in_axes[i], spec.reduced and spec.is_loop and not others
        # Kept levels are outside of those that are reduced.
        is_again = is_loop and bool(around)
        if axis is not None and is_again and _is_small_vector(leaf, axis):
            stored[i] = jnp.moveaxis(leaf, axis, -1)
            in_axes = (*spec.in_axes[:i], jnp.ndim(leaf) - 1, *spec.in_axes[i + 1 :])
            changed[number] = dataclasses.replace(spec, in_axes=in_axes)
    return stored, tuple(changed)


def _is_small_vector(leaf: Any, axis: int) -> bool:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.number):
        return False
    components = leaf.size // leaf.shape[axis]
    return 1 < components <= _MOST_COMPONENTS and leaf.nbytes <= _MOST_BYTES
