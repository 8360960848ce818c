# SPDX-License-Identifier: MIT
"""For rules of differentiation given by hand: the derivative of another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["jvp_of_live"]


def _is_live(tangent: Any) -> bool:
    """Whether a tangent is more than a zero that JAX knows of."""
    if isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        return False
    return tangent.dtype != jax.dtypes.float0


def jvp_of_live(fun: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Return `jax.jvp` of ``fun``, in which the arguments that do not move are constants."""
    leaves, treedef = jax.tree.flatten(primals)
    # `jax.jvp` of a closed-over Python number may hand on a Python number as its tangent.
    directions = [
        t if hasattr(t, "dtype") else jnp.asarray(t, jnp.result_type(x))
        for x, t in zip(leaves, treedef.flatten_up_to(tangents), strict=True)
    ]
    live = [_is_live(t) for t in directions]

    def of_live(*moving: Any) -> Any:
        rest = iter(moving)
        merged = [next(rest) if moves else x for x, moves in zip(leaves, live, strict=True)]
        return fun(*jax.tree.unflatten(treedef, merged))

    moving = tuple(x for x, moves in zip(leaves, live, strict=True) if moves)
    return jax.jvp(of_live, moving, tuple(t for t, m in zip(directions, live, strict=True) if m))
