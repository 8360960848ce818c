# SPDX-License-Identifier: MIT
"""What a mapped call means: a Python loop over the items of its batch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["item_by_item", "wave"]


def wave(*shape: int) -> jax.Array:
    return jnp.sin(jnp.arange(float(np.prod(shape)), dtype=jnp.float32)).reshape(shape)


def item_by_item(fun: Callable[..., Any], ranks: Sequence[int], *arrays: Any) -> Any:
    """Evaluate ``fun`` for each item of the batch, with NumPy's broadcasting, and stack."""
    pairs = list(zip(arrays, ranks, strict=True))
    batch = np.broadcast_shapes(*(jnp.shape(a)[: jnp.ndim(a) - rank] for a, rank in pairs))
    whole = [jnp.broadcast_to(a, batch + jnp.shape(a)[jnp.ndim(a) - rank :]) for a, rank in pairs]
    places = list(itertools.product(*map(range, batch)))
    one = jax.jit(fun)  # compiled once, and run for each item
    items = [one(*(a[place] for a in whole)) for place in places]
    return jax.tree.map(lambda *x: jnp.stack(x).reshape(batch + jnp.shape(x[0])), *items)
