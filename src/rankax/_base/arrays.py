# SPDX-License-Identifier: MIT
"""Small arrays, made so that they fit where they are made: in a program, or in a call made now."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["counted", "is_staged", "scalar", "zeros"]


class _StagedError(Exception):
    """Raised in place of adding a step to a program that is being traced."""


_probe = jax.extend.core.Primitive("rankax_probe")
_probe.multiple_results = True  # none at all, which other tracers (those of Quax, say) rely on
_probe.def_impl(list)


@_probe.def_abstract_eval
def _() -> Any:
    raise _StagedError


def is_staged() -> bool:
    """Whether what is called now becomes part of an outer program, as inside `jax.jit`.

    It does not under a bare `jax.vmap` or `jax.grad`. The abstract value of a primitive is asked
    for only where it would become a step of a program; everywhere else it is simply run.
    (``jax.jit(inline=True)`` would do, if every version of JAX inlined while it traces.)
    """
    try:
        _probe.bind()
    except _StagedError:
        return True
    return False


def scalar(value: Any, dtype: Any) -> jax.Array:
    """Return a number: by an explicit transfer, which `jax.transfer_guard` permits, where eager.

    Inside a program that is traced it is a literal, so that the program holds no array.
    """
    return lax.full((), value, dtype) if is_staged() else jax.device_put(np.asarray(value, dtype))


def counted(count: int, dtype: Any) -> jax.Array:
    """Return `jax.numpy.arange`, made as `scalar` is."""
    return lax.iota(dtype, count) if is_staged() else jax.device_put(np.arange(count, dtype=dtype))


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return `jax.numpy.zeros`, made as `scalar` is; PRNG keys too."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.zeros(shape, dtype)
    return lax.broadcast(scalar(0, dtype), shape)
