# SPDX-License-Identifier: MIT
"""One node of a pytree and its children, as JAX and as the caller know them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey, keystr

__all__ = ["Child", "children_of", "field_names", "is_leaf", "keyed_children", "names_fields"]


@dataclasses.dataclass(frozen=True)
class Child:
    """One child of a node.

    Attributes
    ----------
    key : str
        As JAX prints it in a path: ``.rotation``, ``['k']``, ``[0]``, ``[<flat index 0>]``.
    name : str
        The same, with the attribute that holds the child where JAX only counts.
    value : object
    """

    key: str
    name: str
    value: Any


def is_leaf(tree: Any) -> bool:
    """Whether JAX takes this for a leaf; ``None`` and an empty container are none."""
    return jax.tree_util.all_leaves([tree])


def keyed_children(node: Any) -> dict[str, Any]:
    """Return the children one level down by their key; a leaf or ``None`` has none."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    return {keystr(path): child for path, child in pairs if path}


def children_of(node: Any) -> list[Child]:
    """Return the children one level down, each with its name."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    pairs = [(path[0], child) for path, child in pairs if path]
    names = [keystr((key,)) for key, _ in pairs]
    if any(isinstance(key, FlattenedIndexKey) for key, _ in pairs):
        found = _attributes_of(node, [child for _, child in pairs])
        names = [f".{at}" if at else name for at, name in zip(found, names, strict=True)]
    return [Child(keystr((k,)), name, child) for (k, child), name in zip(pairs, names, strict=True)]


def names_fields(node: Any, children: list[Child]) -> bool:
    """Whether every child of ``node`` is known as a field of it."""
    if is_leaf(node):
        return False
    return isinstance(node, dict) or all(child.name.startswith(".") for child in children)


def field_names(children: list[Child]) -> list[str]:
    """Name the fields of a node that `names_fields`."""
    return [child.name.removeprefix(".") for child in children]


def _attributes_of(node: Any, children: list[Any]) -> list[str | None]:
    """Find the attribute that is each child, of a class registered without names.

    An attribute is a child's where it is the same object. Where that does not decide (the same
    object stands twice, or is one that Python shares, as small ints are), a copy of the node with
    distinct children does. A child that is no attribute, or not surely one, has None.
    """
    held = _attributes(node)
    found = [{name for name, value in held.items() if value is child} for child in children]
    if any(
        len(names) > 1 or isinstance(c, _SHARED) for names, c in zip(found, children, strict=True)
    ):
        probed = _attributes_of_copy(node, len(children))
        if probed is not None:
            found = [names & copied for names, copied in zip(found, probed, strict=True)]
    alone = [next(iter(names)) if len(names) == 1 else None for names in found]
    return [name if alone.count(name) == 1 else None for name in alone]


_SHARED = (int, float, complex, str, bytes, type(None))


def _attributes_of_copy(node: Any, count: int) -> list[set[str]] | None:
    """Say which attributes hold each child once all are distinct; None where that cannot be."""
    treedef = jax.tree.structure(node, is_leaf=lambda part: part is not node)
    marks = [object() for _ in range(count)]
    try:
        held = _attributes(treedef.unflatten(marks))
    except Exception:  # the class accepts no such children, which is its right
        return None
    return [{name for name, value in held.items() if value is mark} for mark in marks]


def _attributes(node: Any) -> dict[str, Any]:
    """Return what an object holds by name, without running any code of its class."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(node).__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    held: dict[str, Any] = dict(getattr(node, "__dict__", {}))
    for name in names:
        try:
            held.setdefault(name, object.__getattribute__(node, name))
        except AttributeError:  # never assigned
            continue
    return held
