# SPDX-License-Identifier: MIT
"""Arrays: small ones that are made on the way, and what kind of array a value is.

A small array is a literal inside a traced program, and an explicit transfer in an eager call.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax import lax


class _StagedError(Exception):
    """Raised instead of adding a step to a program that is being traced."""


_probe = jax.extend.core.Primitive("rankax_probe")
_probe.multiple_results = True  # it returns none; tracers of other packages (Quax) need this
_probe.def_impl(list)


@_probe.def_abstract_eval
def _() -> Any:
    raise _StagedError


def is_staged() -> bool:
    """Return whether an outer program is being traced, as inside `jax.jit`.

    A bare `jax.vmap` or `jax.grad` traces no program. JAX asks for the abstract value of a
    primitive only when it adds the primitive to a program; otherwise it runs the primitive.
    (``jax.jit(inline=True)`` would also tell, but not every version of JAX inlines while tracing.)
    """
    try:
        _probe.bind()
    except _StagedError:
        return True
    return False


def scalar(value: Any, dtype: Any) -> jax.Array:
    """Return a number as an array.

    In a traced program it is a literal, so that the program holds no array. In an eager call it is
    transferred explicitly, which `jax.transfer_guard` permits.
    """
    return lax.full((), value, dtype) if is_staged() else jax.device_put(np.asarray(value, dtype))


def counted(count: int, dtype: Any) -> jax.Array:
    """Return ``jnp.arange(count)``, made like `scalar`."""
    return lax.iota(dtype, count) if is_staged() else jax.device_put(np.arange(count, dtype=dtype))


def places_of(index: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the place along each axis of the item with a flat index."""
    places: list[Any] = []
    for size in reversed(sizes):
        number = scalar(max(size, 1), index.dtype)
        places.append(index % number)
        index = index // number
    return places[::-1]


def flat_index(places: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return the flat index of the item at some places, whose type the ``sizes`` take."""
    first, *others = places
    for place, size in zip(others, sizes[1:], strict=True):
        first = first * jnp.asarray(size, first.dtype) + place
    return first


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return ``jnp.zeros(shape)``, made like `scalar`; ``dtype`` may be a dtype of PRNG keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.zeros(shape, dtype)
    return lax.broadcast(scalar(0, dtype), shape)


def is_ref(value: Any) -> bool:
    """Whether a value, or a variable of a program, is a `jax.Ref`."""
    return isinstance(getattr(value, "aval", None), jax.ref.AbstractRef)


def index_dtype(size: int) -> Any:
    """Return the dtype of the flat indices of ``size`` items, which may not fit it."""
    return jnp.int32 if size < 2**31 else jax.dtypes.canonicalize_dtype(jnp.int64)


def too_many(size: int) -> str:
    """Say that the indices of ``size`` items do not fit their dtype, if they do not."""
    if size <= jnp.iinfo(index_dtype(size)).max:
        return ""
    return (
        f"the indices of {size} items need 64 bits; call "
        'jax.config.update("jax_enable_x64", True) first, or reduce one axis at a time'
    )


def check_no_ref(value: Any, site: str, name: str) -> None:
    """Refuse a `jax.Ref`: `jax.numpy.asarray` of one fails, or does not return."""
    if is_ref(value):
        raise TypeError(
            f"{site}: {name} is a jax.Ref, not an array; read it before the call: {name}[...]"
        )


def has_tangent(value: Any) -> bool:
    """Whether numbers of the type of an array, or of a Python scalar, have derivatives."""
    return jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact)


def shape_of(value: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array, a number or a stand-in, or the same with ``shape``."""
    if not hasattr(value, "dtype"):
        value = jax.eval_shape(lambda: jnp.asarray(value))
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak_type = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(
        tuple(value.shape) if shape is None else shape, dtype, weak_type=bool(weak_type)
    )
