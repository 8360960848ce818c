# SPDX-License-Identifier: MIT
"""Paths and prefixes of pytrees, in the caller's words."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from rankax._base.functions import function_location
from rankax._base.nodes import (
    Child,
    children_of,
    field_names,
    is_leaf,
    keyed_children,
    names_fields,
)
from rankax._base.words import listed, plural, with_article

__all__ = [
    "ByKey",
    "ForEach",
    "Items",
    "Node",
    "check_outputs",
    "entries",
    "leaves_with_names",
    "parts_with_entries",
    "spread_prefix",
]


@dataclasses.dataclass(frozen=True)
class Items:
    """A prefix for a container of any size, some of whose children have an entry of their own."""

    entries: Mapping[str, Any]  # by the key as a path prints it: "[0]", "['mass']"
    rest: Any  # for each of the others


@dataclasses.dataclass(frozen=True)
class Node:
    """A prefix for one container of exactly this type and these children.

    It stands for an instance of ``cls`` that holds the entries, which its class may not accept.
    """

    cls: type
    entries: Mapping[str, Any]  # by the key as a path prints it: ".rotation", "['mass']"


@dataclasses.dataclass(frozen=True)
class ByKey:
    """A prefix for an instance of ``cls`` that is known by its fields, without making one.

    A field without an entry has ``None``.
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
        if isinstance(node, (ByKey, Node)):
            if id(node) not in seen:
                waiting += node.entries.values()
            seen.add(id(node))
        elif isinstance(node, ForEach):
            waiting.append(node.entry)
        elif isinstance(node, Items):
            waiting += [*node.entries.values(), node.rest]
        elif node is None or is_leaf(node):
            yield node
        else:
            waiting += keyed_children(node).values()


def leaves_with_names(
    tree: Any, name: str, *, stops: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Flatten ``tree`` into ``(name, leaf)`` pairs: ``pose.rotation``, ``params['k'][0]``.

    ``stops`` tells what is a leaf besides the leaves of JAX.
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]
    if any(isinstance(k, jax.tree_util.FlattenedIndexKey) for path, _ in pairs for k in path):
        return list(_named_leaves(tree, name, stops))
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def check_outputs(fun: Callable[..., Any], out: Any) -> None:
    """Refuse what a kernel returned where it holds anything but arrays and numbers."""
    if all(isinstance(leaf, jax.Array) or _is_value(leaf) for leaf in jax.tree.leaves(out)):
        return
    name, leaf = next(pair for pair in leaves_with_names(out, "output") if not _is_value(pair[1]))
    raise TypeError(
        f"{function_location(fun)} returned {with_article(type(leaf).__name__)} at {name}, where "
        "an array or a number is due; leave it out, or wrap it in rankax.Static"
    )


def _is_value(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _named_leaves(
    tree: Any, name: str, stops: Callable[[Any], bool] | None
) -> Iterator[tuple[str, Any]]:
    if is_leaf(tree) or (stops is not None and stops(tree)):
        yield name, tree
        return
    for child in children_of(tree):
        yield from _named_leaves(child.value, name + child.name, stops)


def spread_prefix(
    prefix: Any, tree: Any, name: str, *, is_entry: Callable[[Any], bool], what: str
) -> list[Any]:
    """Return the entry of ``prefix`` that governs each leaf of ``tree``, in order of the leaves.

    Equivalent to `jax.tree.broadcast`, but a tree that does not fit is a ``ValueError`` that names
    the place; ``None`` in ``tree`` fits anything (it has no leaves to govern).

    Parameters
    ----------
    prefix, tree : pytree
        ``prefix`` ends at or above the leaves of ``tree``; it may hold `ByKey`, `ForEach`,
        `Items` and `Node`.
    name : str
        How the caller knows ``tree``, for error messages.
    is_entry : callable
        Tells an entry (an int, ``None``) from a container of entries.
    what : str
        What an entry is, for error messages: ``"rank"``, ``"in_axes"``.
    """
    return [
        entry
        for _, subtree, entry in parts_with_entries(
            prefix, tree, name, is_entry=is_entry, what=what
        )
        for _ in range(jax.tree.structure(subtree).num_leaves)
    ]


def parts_with_entries(
    prefix: Any,
    tree: Any,
    name: str,
    *,
    is_entry: Callable[[Any], bool],
    what: str,
    by_field: bool = False,
) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, subtree, entry)`` for each part of ``tree`` that one entry governs.

    With ``by_field`` a dict in ``prefix`` is also one for a class that has fields of those names.
    """
    if is_entry(prefix) or tree is None:
        yield name, tree, prefix
        return
    for at, child, entry in _paired(prefix, tree, name, what, by_field):
        yield from parts_with_entries(
            entry, child, name + at, is_entry=is_entry, what=what, by_field=by_field
        )


def _paired(
    prefix: Any, tree: Any, name: str, what: str, by_field: bool
) -> list[tuple[str, Any, Any]]:
    """Pair each child of ``tree`` with its part of ``prefix``."""
    children = children_of(tree)
    if isinstance(prefix, ForEach):
        return [(child.name, child.value, prefix.entry) for child in children]
    if isinstance(prefix, Items):
        own = prefix.entries
        return [(child.name, child.value, own.get(child.key, prefix.rest)) for child in children]
    if isinstance(prefix, ByKey):
        if not isinstance(tree, prefix.cls) or not names_fields(tree, children):
            raise ValueError(_not_an_instance(prefix.cls, tree, children, name))
        is_same = type(tree) is prefix.cls or isinstance(tree, dict)
        fields = prefix.entries if is_same else prefix.of_subclass(type(tree))
        return [(child.name, child.value, fields.get(child.name)) for child in children]
    if not isinstance(prefix, Node):
        prefix = Node(type(prefix), keyed_children(prefix))
    if by_field and prefix.cls is dict and _is_object(tree, children):
        fields = {f".{key.strip(_QUOTES)}": entry for key, entry in prefix.entries.items()}
        if fields.keys() != {child.name for child in children}:
            raise ValueError(_other_fields(fields, tree, children, name, what))
        return [(child.name, child.value, fields[child.name]) for child in children]
    if prefix.cls is not type(tree) or prefix.entries.keys() != {child.key for child in children}:
        raise ValueError(_misfit(prefix, tree, children, name, what))
    return [(child.name, child.value, prefix.entries[child.key]) for child in children]


_QUOTES = "[']"  # around a field in the path of a dict


def _is_object(tree: Any, children: list[Child]) -> bool:
    return not isinstance(tree, dict) and bool(children) and names_fields(tree, children)


def _not_an_instance(cls: type, tree: Any, children: list[Child], name: str) -> str:
    came = _kind(tree)
    if not isinstance(tree, cls):
        return f"{name} is annotated as {cls.__name__}, but it is {came}"
    if is_leaf(tree):
        return (
            f"{name} is {came}, which JAX does not know as a pytree; register it with "
            "jax.tree_util.register_dataclass"
        )
    unknown = next(i for i, child in enumerate(children) if not child.name.startswith("."))
    return (
        f"{name} is {came}, which JAX knows as a pytree without field names, and its child "
        f"{unknown} is none of its attributes; give the parameter a rank explicitly, such as "
        "rankax.ranks_like(item) of an example of one item"
    )


def _kind(tree: Any) -> str:
    """Name the type of a value; that of an array would be one of JAX's own."""
    is_array = isinstance(tree, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    return f"an array of shape {tree.shape}" if is_array else type(tree).__name__


def _misfit(prefix: Node, tree: Any, children: list[Child], name: str, what: str) -> str:
    declared, came = prefix.cls.__name__, _kind(tree)
    if declared != came:
        return (
            f"the {what} of {name} is a {declared} of {plural(len(prefix.entries), 'entry')}, "
            f"but {name} is {came}"
        )
    keys = {child.key for child in children}
    missing = [name + key for key in prefix.entries if key not in keys]
    extra = [name + child.name for child in children if child.key not in prefix.entries]
    sentences: list[str] = []
    if missing:
        sentences.append(
            f"the {what} of {name} has an entry for {listed(missing)}, which is absent"
        )
    return "; ".join([*sentences, *_no_entry(extra, name, what)])


def _no_entry(extra: list[str], name: str, what: str) -> list[str]:
    if not extra:
        return []
    return [f"the {what} of {name} has no entry for {listed(extra)} (None would leave it as it is)"]


def _other_fields(
    fields: Mapping[str, Any], tree: Any, children: list[Child], name: str, what: str
) -> str:
    known = field_names(children)
    sentences: list[str] = []
    for field in [field.removeprefix(".") for field in fields]:
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {listed(known)}"
            sentences.append(
                f"the {what} of {name} has an entry for {field!r}, which is no field of "
                f"{_kind(tree)} that holds arrays; {hint}"
            )
    extra = [name + child.name for child in children if child.name not in fields]
    return "; ".join([*sentences, *_no_entry(extra, name, what)])
