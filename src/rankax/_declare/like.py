# SPDX-License-Identifier: MIT
"""``ranks_like``: a tree of ranks, read from an example of one item."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.trees import children_of, field_names, flatten_once, is_leaf


def ranks_like(item: Any) -> Any:
    """Return the ranks of an example of one item, as `auto_vmap` takes them.

    Equivalent to ::

        jax.tree.map(lambda leaf: leaf.ndim, item)

    with rank 0 for a Python number, and None for any other leaf, which passes through untouched.

    Parameters
    ----------
    item : pytree
        One item without batch axes, of arrays or `jax.ShapeDtypeStruct`. Only their numbers of
        axes count.

    Returns
    -------
    pytree of int and None
        In the containers of ``item``. A class that does not accept ints as its children is
        replaced by a dict of its fields, which means the same to `auto_vmap`.

    Raises
    ------
    ValueError
        If ``item`` holds an instance of a class that does not accept ints and whose children have
        no names, neither in JAX nor as attributes.

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
    if (fields := field_names(item, children)) is not None:
        return dict(zip(fields, ranks, strict=True))
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
    """Put the ranks in the container of ``item``; None if its class refuses or converts them."""
    try:
        tree = flatten_once(item)[1].unflatten(ranks)
        inside = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    except Exception:  # a class may check its children
        return None
    leaves = jax.tree.leaves(ranks, is_leaf=lambda x: x is None)
    same = len(inside) == len(leaves) and all(a is b for a, b in zip(inside, leaves, strict=True))
    return tree if same else None
