# SPDX-License-Identifier: MIT
"""Paths and prefixes of pytrees, in the caller's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from rankax._errors import listed, plural

__all__ = ["leaves_with_names", "spread_prefix"]


def leaves_with_names(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Flatten ``tree`` into ``(name, leaf)`` pairs: ``pose.rotation``, ``params['k'][0]``."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def _children(tree: Any) -> dict[str, Any]:
    """Return the children one level down by their key; a leaf or ``None`` has none."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return {jax.tree_util.keystr(path): child for path, child in pairs if path}


def spread_prefix(
    prefix: Any, tree: Any, name: str, *, is_prefix_leaf: Callable[[Any], bool], what: str
) -> Iterator[Any]:
    """Yield the entry of ``prefix`` that governs each leaf of ``tree``, in order of the leaves.

    Equivalent to `jax.tree.broadcast`, but a tree that does not fit is a ``ValueError`` that names
    the place; ``None`` in ``tree`` fits anything (it has no leaves to govern).

    Parameters
    ----------
    prefix, tree : pytree
        ``prefix`` ends at or above the leaves of ``tree``.
    name : str
        How the caller knows ``tree``, for error messages.
    is_prefix_leaf : callable
        Tells an entry (an int, ``None``) from a container of entries.
    what : str
        What an entry is, for error messages: ``"rank"``, ``"in_axes"``.
    """
    if tree is None:
        return
    if is_prefix_leaf(prefix):
        yield from [prefix] * jax.tree.structure(tree).num_leaves
        return
    entries, children = _children(prefix), _children(tree)
    same_type = type(prefix) is type(tree)
    if not same_type or entries.keys() != children.keys():
        raise ValueError(_misfit(prefix, tree, entries, children, name, what))
    for key, entry in entries.items():
        yield from spread_prefix(
            entry, children[key], name + key, is_prefix_leaf=is_prefix_leaf, what=what
        )


def _misfit(
    prefix: Any, tree: Any, entries: dict[str, Any], children: dict[str, Any], name: str, what: str
) -> str:
    declared, came = type(prefix).__name__, type(tree).__name__
    if declared != came:
        return (
            f"the {what} of {name} is a {declared} of {plural(len(entries), 'entry')}, "
            f"but {name} is {came}"
        )
    missing = listed([f"{name}{key}" for key in entries if key not in children])
    extra = listed([f"{name}{key}" for key in children if key not in entries])
    return "; ".join(
        text
        for text in (
            missing and f"the {what} of {name} has an entry for {missing}, which {name} lacks",
            extra and f"the {what} of {name} has no entry for {extra} (None leaves it as it is)",
        )
        if text
    )
