# SPDX-License-Identifier: MIT
"""``SplitKey``: the rank of a random key that is split, one key for each item."""

from __future__ import annotations

from rankax.core.declare.dims import Rank, parse_axes


class SplitKey:
    r"""The rank of a key that is split: each item of the batch gets its own key.

    With ``key`` a single key, ``auto_vmap(x=1, key=SplitKey)(f)(x, key)`` with ``x`` of shape
    ``(4, 23, 3)`` is equivalent to ::

        keys = jax.random.split(key, (4, 23))
        jax.vmap(jax.vmap(f))(x, keys)

    but the keys are computed as they are needed, one chunk at a time, and never stored as an array.
    They are the same for every ``chunk_size``, ``memory_limit``, tile and number of devices, and
    under ``reduce``.

    Use it as a rank, without parentheses: ``key=SplitKey``, in a tree of ranks, or in an
    annotation, ``key: Annotated[PRNGKeyArray, SplitKey]``.

    Notes
    -----
    *Names.* ``SplitKey("i |")`` is the rank of keys that have the batch axis ``i``, as other ranks
    name their axes (:ref:`names`). Each of them is split over the other axes.

    *How many keys.* One for each item of the batch, so a key alone gives one draw. The option
    ``batch_shape=2000`` asks for 2000.

    *Batches of keys.* Keys broadcast like any argument. Along batch axes that they have, they are
    used directly. Each is split over the axes that they lack, or have with length 1 where the batch
    is longer: in a batch of shape ``(4, 23)``, keys of shape ``(4, 1)`` give item ``(i, j)`` the
    key ``jax.random.split(keys[i, 0], 23)[j]``. If they lack no axis, as in a call of one item,
    nothing is split. So ``f(x, key)`` and ``f(x, jax.random.split(key, n))`` return the same for
    ``n`` items, and so does `jax.vmap` of ``f`` over both. Several keys are split independently.

    *Generators.* An item gets ``jax.random.fold_in(key, i)``, where ``i`` counts the items in the
    order of the batch axes over which the key is split. For ``threefry2x32``, the default, and for
    ``rbg`` this equals `jax.random.split` with JAX's default settings (without
    ``jax_threefry_partitionable`` the keys differ). ``unsafe_rbg`` splits and folds in differently
    under `jax.vmap`, so its keys are split as with ``rbg``. Under `jax.vmap`, JAX draws with
    ``rbg`` and ``unsafe_rbg`` from the first of the mapped keys only. So for these two the keys are
    the same, but the numbers drawn from them depend on the chunk size.

    *Slices of a batch.* Items are counted within the batch of one call. If you cut a batch
    yourself, with `jax.shard_map` or a loop, each slice counts from 0 and draws the same numbers:
    pass a different key to each.

    *Limits.* One key is split into at most 2\ :sup:`32` keys because ``fold_in`` takes a 32-bit
    counter; a call that needs more raises a `ValueError`. Make keys with `jax.random.key`: a raw
    key, as of `jax.random.PRNGKey`, is a `TypeError` because its two numbers might be a batch.

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

    def __init__(self, axes: str = "", /) -> None:
        try:
            self.axes, core = parse_axes(axes)
        except (AttributeError, ValueError):
            self.axes, core = (), axes
        if not self.axes or core.strip():
            named = f'; SplitKey("i |") names batch axes, got {axes!r}' if axes else ""
            raise TypeError(
                f"SplitKey is the rank itself, without parentheses: auto_vmap(key=SplitKey){named}"
            )


def key_rank(axes: tuple[str, ...] = ()) -> Rank:
    """Return the normal form of `SplitKey`."""
    return Rank(0, (), is_key=True, is_split=True, batch=axes)
