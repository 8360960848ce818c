# SPDX-License-Identifier: MIT
"""Ranks read off an example of one item."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.nodes import children_of, field_names, is_leaf, names_fields

__all__ = ["ranks_like"]


def ranks_like(item: Any) -> Any:
    """Return the ranks of an example of one item, as `auto_vmap` takes them.

    Equivalent to ::

        jax.tree.map(lambda leaf: leaf.ndim, item)

    with rank 0 for a Python number, and None for a leaf that is no array and passes through
    untouched.

    Parameters
    ----------
    item : pytree
        One item, without batch axes: arrays, or `jax.ShapeDtypeStruct` in their place. Only their
        numbers of axes are looked at.

    Returns
    -------
    pytree of int and None
        In the containers of ``item``. A class that does not accept ints as its children is
        stood for by a dict of its fields, which says the same to `auto_vmap`.

    Raises
    ------
    ValueError
        If ``item`` holds an instance of a class that neither accepts ints nor has fields that
        JAX, or its attributes, could name.

    Examples
    --------
    >>> from typing import NamedTuple
    >>> import jax, jax.numpy as jnp
    >>> from rankax import auto_vmap, ranks_like
    >>> class Pose(NamedTuple):
    ...     rotation: jax.Array
    ...     translation: jax.Array
    >>> pose = Pose(jnp.eye(3), jnp.zeros(3))
    >>> ranks_like(pose)
    Pose(rotation=2, translation=1)
    >>> move = auto_vmap(ranks_like(pose), 1)(lambda pose, x: pose.rotation @ x + pose.translation)
    >>> move(Pose(jnp.eye(3), jnp.ones((6, 1, 3))), jnp.ones((1000, 3))).shape
    (6, 1000, 3)
    """
    return _ranks(item, "item")


def _ranks(item: Any, name: str) -> Any:
    if is_leaf(item):
        return _rank(item)
    children = children_of(item)
    ranks = [_ranks(child.value, name + child.name) for child in children]
    rebuilt = _rebuilt(item, ranks)
    if rebuilt is not None or item is None:
        return rebuilt
    if names_fields(item, children):
        return dict(zip(field_names(children), ranks, strict=True))
    raise ValueError(
        f"ranks_like: {name} is {type(item).__name__}, which accepts no ints in place of its "
        "arrays and has no field names; give one rank for all of it, or None"
    )


def _rank(leaf: Any) -> int | None:
    if isinstance(leaf, (int, float, complex)):
        return 0
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return len(leaf.shape)
    return jnp.ndim(leaf) if hasattr(leaf, "__jax_array__") else None


def _rebuilt(item: Any, ranks: list[Any]) -> Any:
    """Put the ranks in the container of ``item``; None where its class refuses or converts them."""
    treedef = jax.tree.structure(item, is_leaf=lambda part: part is not item)
    try:
        tree = treedef.unflatten(ranks)
        kept = jax.tree.leaves(tree, is_leaf=lambda part: part is None)
    except Exception:  # a class may check what it is made of
        return None
    given = jax.tree.leaves(ranks, is_leaf=lambda part: part is None)
    is_kept = len(kept) == len(given) and all(a is b for a, b in zip(kept, given, strict=True))
    return tree if is_kept else None
