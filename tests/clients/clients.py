# SPDX-License-Identifier: MIT
"""The comparison that every client program makes: chunks against `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same
from rankax import auto_vmap

BATCH = 6
SCALARS = jnp.linspace(0.5, 2.0, BATCH)
forward_and_gradient = pytest.mark.parametrize(
    "gradient", [False, True], ids=["forward", "gradient"]
)


# A chunk that divides the batch, compiled; one that does not, eager; lanes.
WAYS = {
    "chunk_size=3, jit": (jax.jit, {"chunk_size": 3}),
    "chunk_size=4, eager": (lambda run: run, {"chunk_size": 4}),
    "lanes": (jax.jit, {"chunk_size": 4, "lockstep": False}),
}


def check_against_vmap(
    fun: Callable[..., Any],
    ranks: tuple[int, ...],
    *arrays: Any,
    gradient: bool = False,
    rtol: float = 2e-4,
) -> None:
    """Assert that ``fun`` in chunks returns what `jax.vmap` does, or has the same gradient.

    The gradient is with respect to all arrays, of a sum in which each number of the output has
    another weight, so that two items or two numbers that change places are noticed.
    """
    items = tuple(range(len(arrays)))

    def call(mapped: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *a: weighted_sum(mapped(*a)), items) if gradient else mapped

    want = jax.jit(call(jax.vmap(fun)))(*arrays)
    _assert_depends_on_item(want)
    for name, (wrap, options) in WAYS.items():
        try:
            got = wrap(call(auto_vmap(*ranks, **options)(fun)))(*arrays)
            assert_same(got, want, rtol=rtol, atol=rtol / 10)
        except Exception as error:
            error.add_note(f"with {name}")
            raise


def weighted_sum(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert leaves
    weights = [jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)) + 2 for leaf in leaves]
    return jnp.sum(jnp.stack([leaf.ravel() @ w for leaf, w in zip(leaves, weights, strict=True)]))


def _assert_depends_on_item(tree: Any) -> None:
    """A program that gives the same for each item would pass whichever item it was given."""
    leaves = [np.asarray(leaf, dtype=float) for leaf in jax.tree.leaves(tree)]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any(np.ptp(leaf, axis=0).max() > 1e-3 for leaf in leaves)
