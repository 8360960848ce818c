# SPDX-License-Identifier: MIT
"""Paths and prefixes of pytrees, in the caller's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from rankax._base.words import listed, plural

__all__ = ["ByKey", "ForEach", "entries", "governed", "leaves_with_names", "spread_prefix"]


@dataclasses.dataclass(frozen=True)
class ByKey:
    """A prefix for an instance of ``cls`` that is known by its fields, without making one.

    Fields without an entry are governed by ``None``.
    """

    cls: type
    entries: Mapping[str, Any]  # by the key as a path prints it: ".rotation", "['mass']"
    of_subclass: Callable[[type], Mapping[str, Any]]  # the entries, where a subclass came


@dataclasses.dataclass(frozen=True)
class ForEach:
    """A prefix for a container of any size: one entry governs each of its children."""

    entry: Any


def entries(prefix: Any) -> Iterator[Any]:
    """Yield the entries of a prefix, in any order; one that holds itself is looked at once."""
    seen: set[int] = set()
    waiting = [prefix]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ByKey):
            if id(node) not in seen:
                waiting += node.entries.values()
            seen.add(id(node))
        elif isinstance(node, ForEach):
            waiting.append(node.entry)
        elif node is None or jax.tree_util.all_leaves([node]):
            yield node
        else:
            waiting += _children(node).values()


def leaves_with_names(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Flatten ``tree`` into ``(name, leaf)`` pairs: ``pose.rotation``, ``params['k'][0]``."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def spread_prefix(
    prefix: Any, tree: Any, name: str, *, is_entry: Callable[[Any], bool], what: str
) -> list[Any]:
    """Return the entry of ``prefix`` that governs each leaf of ``tree``, in order of the leaves.

    Equivalent to `jax.tree.broadcast`, but a tree that does not fit is a ``ValueError`` that names
    the place; ``None`` in ``tree`` fits anything (it has no leaves to govern).

    Parameters
    ----------
    prefix, tree : pytree
        ``prefix`` ends at or above the leaves of ``tree``; it may hold `ByKey` and `ForEach`.
    name : str
        How the caller knows ``tree``, for error messages.
    is_entry : callable
        Tells an entry (an int, ``None``) from a container of entries.
    what : str
        What an entry is, for error messages: ``"rank"``, ``"in_axes"``.
    """
    return [
        entry
        for _, subtree, entry in governed(prefix, tree, name, is_entry=is_entry, what=what)
        for _ in range(jax.tree.structure(subtree).num_leaves)
    ]


def governed(
    prefix: Any, tree: Any, name: str, *, is_entry: Callable[[Any], bool], what: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, subtree, entry)`` for each part of ``tree`` that one entry governs."""
    if is_entry(prefix) or tree is None:
        yield name, tree, prefix
        return
    for key, child, entry in _paired(prefix, tree, name, what):
        yield from governed(entry, child, name + key, is_entry=is_entry, what=what)


def _paired(prefix: Any, tree: Any, name: str, what: str) -> list[tuple[str, Any, Any]]:
    """Pair each child of ``tree`` with its part of ``prefix``."""
    children = _children(tree)
    if isinstance(prefix, ForEach):
        return [(key, child, prefix.entry) for key, child in children.items()]
    if isinstance(prefix, ByKey):
        if not isinstance(tree, prefix.cls) or not _has_named_fields(tree, children):
            raise ValueError(_not_an_instance(prefix.cls, tree, name))
        is_same = type(tree) is prefix.cls or isinstance(tree, dict)
        fields = prefix.entries if is_same else prefix.of_subclass(type(tree))
        return [(key, child, fields.get(key)) for key, child in children.items()]
    entries = _children(prefix)
    if type(prefix) is not type(tree) or entries.keys() != children.keys():
        raise ValueError(_misfit(prefix, tree, entries, children, name, what))
    return [(key, child, entries[key]) for key, child in children.items()]


def _children(tree: Any) -> dict[str, Any]:
    """Return the children one level down by their key; a leaf or ``None`` has none."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return {jax.tree_util.keystr(path): child for path, child in pairs if path}


def _has_named_fields(tree: Any, children: dict[str, Any]) -> bool:
    """Whether JAX's paths into ``tree`` name its fields; a leaf, or a flat index, does not."""
    if jax.tree_util.all_leaves([tree]):
        return False
    return isinstance(tree, dict) or all(key.startswith(".") for key in children)


def _not_an_instance(cls: type, tree: Any, name: str) -> str:
    came = _kind(tree)
    if not isinstance(tree, cls):
        return f"{name} is annotated as {cls.__name__}, but it is {came}"
    if jax.tree_util.all_leaves([tree]):
        unknown = f"{name} is {came}, which JAX does not know as a pytree; register it"
    else:
        unknown = f"{name} is {came}, which JAX knows as a pytree without field names; register it"
    return f"{unknown} with jax.tree_util.register_dataclass"


def _kind(tree: Any) -> str:
    """Name the type of a value; that of an array would be one of JAX's own."""
    is_array = isinstance(tree, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    return f"an array of shape {tree.shape}" if is_array else type(tree).__name__


def _misfit(
    prefix: Any, tree: Any, entries: dict[str, Any], children: dict[str, Any], name: str, what: str
) -> str:
    declared, came = type(prefix).__name__, _kind(tree)
    if declared != came:
        return (
            f"the {what} of {name} is a {declared} of {plural(len(entries), 'entry')}, "
            f"but {name} is {came}"
        )
    missing = [name + key for key in entries if key not in children]
    extra = [name + key for key in children if key not in entries]
    sentences: list[str] = []
    if missing:
        sentences.append(
            f"the {what} of {name} has an entry for {listed(missing)}, which is absent"
        )
    if extra:
        sentences.append(
            f"the {what} of {name} has no entry for {listed(extra)} (None would leave it as it is)"
        )
    return "; ".join(sentences)
