# SPDX-License-Identifier: MIT
"""One node of a pytree and its children, with the names that JAX and the caller use for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey, keystr


@dataclasses.dataclass(frozen=True)
class Child:
    """One child of a node.

    Attributes
    ----------
    key : str
        The path to the child as JAX prints it: ``.rotation``, ``['k']``, ``[0]``,
        ``[<flat index 0>]``.
    name : str
        The same, but with the name of the attribute where JAX only has a flat index.
    value : object
    """

    key: str
    name: str
    value: Any


def is_leaf(tree: Any) -> bool:
    """Return whether JAX treats this as a leaf; ``None`` and empty containers are not leaves."""
    return jax.tree_util.all_leaves([tree])


def flatten_once(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return ``(path, child)`` pairs one level down, and the tree structure of that level."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def keyed_children(node: Any) -> dict[str, Any]:
    """Return the children one level down by key; a leaf or ``None`` has none."""
    return {keystr(path): child for path, child in flatten_once(node)[0] if path}


def children_of(node: Any) -> list[Child]:
    """Return the children one level down, each with its name."""
    pairs = [(path[0], child) for path, child in flatten_once(node)[0] if path]
    keys = names = [keystr((key,)) for key, _ in pairs]
    if any(isinstance(key, FlattenedIndexKey) for key, _ in pairs):
        attributes = _attributes_of(node, [child for _, child in pairs])
        names = [f".{at}" if at else key for at, key in zip(attributes, keys, strict=True)]
    return [Child(*child) for child in zip(keys, names, (c for _, c in pairs), strict=True)]


def field_names(node: Any, children: list[Child]) -> list[str] | None:
    """Return the field name of each child; None for a leaf, or if a child has no field name.

    The fields of a dict are its keys, as JAX prints them.
    """
    if is_leaf(node):
        return None
    if isinstance(node, dict) or all(child.name.startswith(".") for child in children):
        return [child.name.removeprefix(".") for child in children]
    return None


_SHARED = (int, float, complex, str, bytes, type(None))  # Python may share equal objects


def _attributes_of(node: Any, children: list[Any]) -> list[str | None]:
    """Return the attribute that holds each child of a class registered without keys.

    An attribute holds a child if it is the same object. If that is ambiguous (an object occurs
    twice, or Python shares it, like small ints), the attributes of a copy of the node with distinct
    children decide. A child without an unambiguous attribute has None.
    """
    attributes = _attributes(node)
    names = [{name for name, value in attributes.items() if value is child} for child in children]
    if any(len(n) > 1 or isinstance(c, _SHARED) for n, c in zip(names, children, strict=True)):
        marks = [object() for _ in children]
        try:
            copied = _attributes(flatten_once(node)[1].unflatten(marks))
        except Exception:  # the class does not accept such children
            copied = None
        if copied is not None:
            names = [
                {name for name in known if copied.get(name) is mark}
                for known, mark in zip(names, marks, strict=True)
            ]
    single = [next(iter(known)) if len(known) == 1 else None for known in names]
    return [name if single.count(name) == 1 else None for name in single]


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, without running any code of its class."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(node).__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    attributes: dict[str, Any] = dict(getattr(node, "__dict__", {}))
    for name in names:
        try:
            attributes.setdefault(name, object.__getattribute__(node, name))
        except AttributeError:  # never assigned
            continue
    return attributes
