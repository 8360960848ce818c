# SPDX-License-Identifier: MIT
"""``SplitKey``: the rank of a random key of which each item gets its own."""

from __future__ import annotations

import typing
from typing import Any, NoReturn

from rankax._declare.dims import Rank

__all__ = ["SplitKey", "key_rank", "marked"]


class SplitKey:
    r"""The rank of a key that is split: each item of the batch gets a key of its own.

    With ``key`` a single key, ``auto_vmap(x=1, key=SplitKey)(f)(x, key)`` with ``x`` of shape
    ``(4, 23, 3)`` is equivalent to ::

        keys = jax.random.split(key, (4, 23))
        jax.vmap(jax.vmap(f))(x, keys)

    but the keys are computed where they are used, those of one chunk at a time, and never stored as
    an array. They are the same for every ``chunk_size``, ``memory_limit``, tile and number of
    devices, and under ``reduce``.

    It stands where a rank does, without parentheses: ``key=SplitKey``, in a tree of ranks, or in an
    annotation, ``key: Annotated[PRNGKeyArray, SplitKey]``.

    Notes
    -----
    *Keys that are a batch.* Keys broadcast as any argument does. Along batch axes that they have
    themselves they are used as they are, and each is split over those that they lack, or have with
    length 1 where the batch is longer: in a batch of shape ``(4, 23)``, keys of shape ``(4, 1)``
    give item ``(i, j)`` the key ``jax.random.split(keys[i, 0], 23)[j]``. Where they lack none, as
    in a call of one item, nothing is split. So ``f(x, key)`` and ``f(x, jax.random.split(key, n))``
    return the same for ``n`` items, and so does `jax.vmap` of ``f`` over both. Several keys are
    split each on its own.

    *Generators.* An item gets ``jax.random.fold_in(key, i)``, where ``i`` counts the items in the
    order of the batch axes over which the key is split. For ``threefry2x32``, the default, and for
    ``rbg`` that is what `jax.random.split` returns, as JAX is set (without
    ``jax_threefry_partitionable`` it returns others). ``unsafe_rbg`` splits and folds in otherwise
    under `jax.vmap` than without, so its keys are split as those of ``rbg``. Under `jax.vmap` JAX
    draws with ``rbg`` and ``unsafe_rbg`` from the first key of all that it maps, so for those two
    the keys are the same, but what is drawn from them depends on the chunk size.

    *Parts of a batch.* Items are counted within the batch of the call. Where you cut a batch
    yourself, by `jax.shard_map` or a loop, each part counts from 0 and draws the same: give each a
    key of its own.

    *Limits.* One key is split into at most 2\ :sup:`32` keys, for so far does ``fold_in`` count; a
    call that needs more is a `ValueError`. Keys are made with `jax.random.key`: a raw key, as of
    `jax.random.PRNGKey`, is a `TypeError`, for its two numbers might be a batch.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import SplitKey, auto_vmap
    >>> @auto_vmap(mean=0, key=SplitKey, chunk_size=100, jit=True)
    ... def draw(mean, key):
    ...     return mean + jax.random.normal(key)
    >>> means = jnp.linspace(0.0, 1.0, 1000)
    >>> key = jax.random.key(0)
    >>> bool((draw(means, key) == draw(means, jax.random.split(key, 1000))).all())
    True
    """

    def __new__(cls, *_: object, **__: object) -> NoReturn:
        """Refuse to make an object, of which there is no use."""
        raise TypeError(
            "SplitKey is a rank as it stands, without parentheses: auto_vmap(key=SplitKey)"
        )


def key_rank() -> Rank:
    """Return what `SplitKey` declares, in normal form."""
    return Rank(0, (), is_key=True, is_split=True)


def marked(hint: Any) -> bool:
    """Whether a type is ``Annotated[..., SplitKey]``."""
    if typing.get_origin(hint) is not typing.Annotated:
        return False
    return any(entry is SplitKey for entry in hint.__metadata__)
