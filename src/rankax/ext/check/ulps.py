# SPDX-License-Identifier: MIT
"""How far results are apart, and how far rounding may put them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.core.base.arrays import Target, is_cpu


def _eps(dtype: Any, target: Target | None) -> float:
    eps = float(jnp.finfo(dtype).eps)
    # Elsewhere, products of float32 may have the precision of a shorter format.
    return eps if is_cpu(target) else max(eps, 2**-10)


def difference(want: Any, got: Any, target: Target | None) -> tuple[float, tuple[int, ...]]:
    """Return the largest difference, in ulps of the largest number, and where it is.

    ``target``: where the call ran.
    """
    want, got = (np.asarray(numbers_of(x)) for x in (want, got))
    if not want.size:
        return 0.0, (0,) * max(1, want.ndim)
    dtype, apart = want.dtype, np.where(want == got, 0, np.inf)
    if jnp.issubdtype(dtype, jnp.inexact):
        wide = complex if jnp.issubdtype(dtype, jnp.complexfloating) else float
        want, got = want.astype(wide), got.astype(wide)
        least = float(jnp.finfo(dtype).tiny)
        with np.errstate(invalid="ignore", over="ignore"):
            largest = np.max(np.abs(want), where=np.isfinite(want), initial=least)
            ulps = np.abs(want - got) / (_eps(dtype, target) * largest)
        ulps = np.nan_to_num(ulps, nan=np.inf, posinf=np.inf)
        apart = np.where(np.isnan(want) & np.isnan(got), 0, np.minimum(apart, ulps))
    at = np.unravel_index(np.argmax(apart), want.shape)
    return float(np.max(apart)), tuple(map(int, at))


def most_ulps(dtype: Any, target: Target | None) -> float:
    """Return what may be rounding: a chunk adds in another order, and fuses other operations."""
    return _eps(dtype, target) ** -0.5 if jnp.issubdtype(dtype, jnp.inexact) else 0


def is_rounding(ulps: float, dtype: Any, inside: Iterable[Any], target: Target | None) -> bool:
    """Whether a difference in results of ``dtype`` may be rounding of narrower floats inside."""
    floats = [each for each in inside if jnp.issubdtype(each, jnp.floating)]
    if not floats or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    eps = max(_eps(each, target) for each in floats)
    return ulps * _eps(dtype, target) <= eps**0.5


def numbers_of(value: Any) -> Any:
    is_key = jnp.issubdtype(getattr(value, "dtype", type(value)), jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value
