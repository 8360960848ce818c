# SPDX-License-Identifier: MIT
"""For rules of differentiation given by hand: what moves, and where its tangent goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["is_live", "jvp_of_live", "with_tangent_of"]


def is_live(tangent: Any) -> bool:
    """Whether a tangent is more than a zero that JAX knows of."""
    if isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        return False
    return tangent.dtype != jax.dtypes.float0


def jvp_of_live(fun: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Return `jax.jvp` of ``fun``, in which the arguments that do not move are constants."""
    leaves, treedef = jax.tree.flatten(primals)
    directions = treedef.flatten_up_to(tangents)
    live = [is_live(t) for t in directions]

    def of_live(*moving: Any) -> Any:
        rest = iter(moving)
        merged = [next(rest) if moves else x for x, moves in zip(leaves, live, strict=True)]
        return fun(*jax.tree.unflatten(treedef, merged))

    moving = tuple(x for x, moves in zip(leaves, live, strict=True) if moves)
    return jax.jvp(of_live, moving, tuple(t for t, m in zip(directions, live, strict=True) if m))


@jax.custom_jvp
def with_tangent_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``value``, to whose tangent that of ``other`` is added.

    What ``other`` is worth is never read, so the compiler drops its computation. For use inside
    `jvp_of_live` only: JAX forgets rules in a scan that it has linearised, so a derivative of
    higher order must be right without this one.
    """
    del other
    return value


@with_tangent_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] + tangents[1]
