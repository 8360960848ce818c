# SPDX-License-Identifier: MIT
"""Nodes, paths and prefixes of pytrees, and errors that name places as the caller writes them."""

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import FlattenedIndexKey, keystr

from rankax.core.base.arrays import check_no_ref
from rankax.core.base.messages import function_location, listed, plural, with_article


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


def is_sparse(node: Any) -> bool:
    """Whether this is a sparse matrix of JAX, whose structure says how many batch axes it has."""
    if isinstance(node, (jax.Array, np.ndarray, int, float)):
        return False
    return any("jax.experimental.sparse" in base.__module__ for base in type(node).__mro__)


def refusal_of_sparse(site: str, path: str, node: Any) -> TypeError:
    """Return the error that says that a batch of sparse matrices cannot be taken apart."""
    kind = type(node).__name__
    return TypeError(
        f"{site}: {path} is a batch of sparse matrices ({kind}), and only jax.vmap can take one "
        f"apart; pass its arrays, such as {path}.data and {path}.indices, and make the {kind} of "
        "one item in the function"
    )


def flatten_once(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return ``(path, child)`` pairs one level down, and the tree structure of that level."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def children_of(node: Any) -> list[Child]:
    """Return the children one level down, each with its name."""
    pairs = [(path[0], child) for path, child in flatten_once(node)[0] if path]
    children = [child for _, child in pairs]
    keys = names = [keystr((key,)) for key, _ in pairs]
    if any(isinstance(key, FlattenedIndexKey) for key, _ in pairs):
        attributes = _attributes_of(node, children)
        names = [f".{at}" if at else key for at, key in zip(attributes, keys, strict=True)]
    return list(map(Child, keys, names, children))


def field_names(node: Any, children: list[Child]) -> list[str] | None:
    """Return the field name of each child; None for a leaf, or if a child has no field name.

    The fields of a dict are its keys, as JAX prints them.
    """
    if is_leaf(node):
        return None
    if isinstance(node, dict) or all(child.name.startswith(".") for child in children):
        return [child.name.removeprefix(".") for child in children]
    return None


def _attributes_of(node: Any, children: list[Any]) -> list[str | None]:
    """Return the attribute that holds each child of a class registered without keys.

    An attribute holds a child if it is the same object, in a copy of the node with distinct
    children if there can be one: an object may occur twice, and Python shares some, like small
    ints. A child without an unambiguous attribute has None.
    """
    attributes = _attributes(node)
    with contextlib.suppress(Exception):  # the class may not accept such children
        marks: list[Any] = [object() for _ in children]
        attributes = _attributes(flatten_once(node)[1].unflatten(marks))
        children = marks
    names = [[name for name, value in attributes.items() if value is child] for child in children]
    single = [known[0] if len(known) == 1 else None for known in names]
    return [name if single.count(name) == 1 else None for name in single]


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, without its properties."""
    state: Any = object.__getstate__(node)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


# Prefixes. Their entries have keys as JAX prints them in a path: "[0]", "['mass']", ".rotation".


@dataclasses.dataclass(frozen=True)
class Items:
    """A prefix for a container of any size: some children have an entry, ``rest`` is for others."""

    entries: Mapping[str, Any]
    rest: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """A prefix for one container of exactly this type and these children.

    It replaces an instance of ``cls`` that holds the entries, which the class might not accept.
    """

    cls: type
    entries: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ByKey:
    """A prefix for any instance of ``cls``, by field; a field without an entry has ``None``."""

    cls: type
    entries: Mapping[str, Any]
    of_subclass: Callable[[type], Mapping[str, Any]]  # returns the entries for a subclass


class HasFields(Protocol):
    """A dataclass, such as a pytree of entries."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class TooDeepError(ValueError):
    """Raised for a prefix with a container in the place of an array."""


def entries(prefix: Any) -> Iterator[Any]:
    """Yield the entries of a prefix, those of a node last; a recursive prefix is visited once."""
    seen: set[int] = set()
    waiting = [prefix]
    while waiting:
        for node in jax.tree.leaves(waiting.pop(0), is_leaf=lambda x: x is None):
            if not isinstance(node, (ByKey, Items, Node)):
                yield node
            elif id(node) not in seen:
                seen.add(id(node))
                waiting += [*node.entries.values(), getattr(node, "rest", None)]


def leaves_with_names(
    tree: Any, name: str, *, stops: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Flatten ``tree`` into ``(name, leaf)`` pairs: ``pose.rotation``, ``params['k'][0]``.

    ``stops`` is the ``is_leaf`` of `jax.tree.leaves`.
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]
    if any(isinstance(key, FlattenedIndexKey) for path, _ in pairs for key in path):
        below = ((child.value, name + child.name) for child in children_of(tree))
        return [pair for node, at in below for pair in leaves_with_names(node, at, stops=stops)]
    return [(name + keystr(path), leaf) for path, leaf in pairs]


def check_returned(fun: Callable[..., Any], out: Any) -> None:
    """Refuse None as the output of a kernel."""
    if out is None:
        raise TypeError(
            f"{function_location(fun)} returned None, but outputs must be arrays or numbers; add "
            "the missing return, or return () from a kernel that is called for its effects"
        )


def check_outputs(fun: Callable[..., Any], out: Any) -> None:
    """Refuse outputs of a kernel other than arrays and numbers."""
    check_returned(fun, out)
    try:
        leaves = jax.tree.leaves(out)
    except (TypeError, ValueError) as error:  # such as a dict whose keys JAX cannot sort
        raise TypeError(
            f"{function_location(fun)} returned outputs that JAX cannot flatten; the keys of a "
            "dict must have an order, so use keys of one type, such as strings"
        ) from error
    for i, leaf in enumerate(leaves):
        if not _is_value(leaf):
            name, kind = leaves_with_names(out, "output")[i][0], type(leaf).__name__
            got, hint = with_article(kind), "leave it out, or wrap it in rankax.Static"
            if isinstance(leaf, np.ndarray):
                got, hint = f"an array of dtype {leaf.dtype}", "leave it out"
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                hint = f"make {kind} a pytree: jax.tree_util.register_dataclass({kind})"
            raise TypeError(
                f"{function_location(fun)} returned {got} at {name}, but outputs must be arrays or "
                f"numbers; {hint}"
            )


def check_no_sparse(fun: Callable[..., Any], out: Any) -> None:
    """Refuse an output that is a sparse matrix, of which only `jax.vmap` makes a batch."""
    named: list[Any] = []
    with contextlib.suppress(ValueError):  # of keys without an order: see `check_outputs`
        named = leaves_with_names(out, "output", stops=is_sparse)
    for path, node in named:
        if is_sparse(node):
            raise TypeError(
                f"{function_location(fun)} returned a sparse matrix ({type(node).__name__}) at "
                f"{path}, and only jax.vmap can make a batch of them; return its arrays, such as "
                f"{path}.data"
            )


def _is_value(leaf: Any) -> bool:
    with contextlib.suppress(TypeError):
        jax.typeof(leaf)
        return not isinstance(leaf, jax.ShapeDtypeStruct)
    return False


def spread_prefix(
    prefix: Any, tree: Any, name: str, *, is_entry: Callable[[Any], bool], what: str
) -> list[Any]:
    """Return the entry of ``prefix`` that applies to each leaf of ``tree``, in leaf order.

    Equivalent to `jax.tree.broadcast`, but if the two do not match, a ``ValueError`` names the
    place. ``None`` in ``tree`` matches any prefix because it has no leaves.

    Parameters
    ----------
    prefix, tree : pytree
        ``prefix`` ends at or above the leaves of ``tree``; it may hold `ByKey`, `Items` and `Node`.
    name : str
        The caller's name of ``tree``, for error messages.
    is_entry : callable
        Tells an entry (an int, ``None``) from a container of entries.
    what : str
        What an entry is, for error messages: ``"rank"``, ``"in_axes"``.
    """
    subtrees = subtrees_with_entries(prefix, tree, name, is_entry=is_entry, what=what)
    return [entry for _, subtree, entry in subtrees for _ in jax.tree.leaves(subtree)]


def subtrees_with_entries(
    prefix: Any,
    tree: Any,
    name: str,
    *,
    is_entry: Callable[[Any], bool],
    what: str,
    by_field: bool = False,
) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, subtree, entry)`` for each subtree of ``tree`` that has one entry.

    With ``by_field``, a dict in ``prefix`` also matches a class with fields of those names.
    """
    if is_entry(prefix) or tree is None:
        yield name, tree, prefix
        return
    for at, child, entry in _paired(prefix, tree, name, what, by_field):
        yield from subtrees_with_entries(
            entry, child, name + at, is_entry=is_entry, what=what, by_field=by_field
        )


def _paired(
    prefix: Any, tree: Any, name: str, what: str, by_field: bool
) -> list[tuple[str, Any, Any]]:
    """Pair each child of ``tree`` with its entry or subtree of ``prefix``."""
    children = children_of(tree)
    if isinstance(prefix, Items):
        return [(c.name, c.value, prefix.entries.get(c.key, prefix.rest)) for c in children]
    fields = field_names(tree, children)
    if isinstance(prefix, ByKey):
        if not isinstance(tree, prefix.cls) or fields is None:
            raise ValueError(_not_an_instance(prefix.cls, tree, children, name))
        exact = type(tree) is prefix.cls or isinstance(tree, dict)
        by_name = prefix.entries if exact else prefix.of_subclass(type(tree))
        return [(c.name, c.value, by_name.get(c.name)) for c in children]
    if not isinstance(prefix, Node):
        pairs = flatten_once(prefix)[0]
        prefix = Node(type(prefix), {keystr(path): entry for path, entry in pairs if path})
    if by_field and prefix.cls is dict and fields and not isinstance(tree, dict):
        by_name = {key.strip("[']"): entry for key, entry in prefix.entries.items()}
        if by_name.keys() != set(fields):
            raise ValueError(_other_fields(by_name, tree, fields, name, what))
        return [(c.name, c.value, by_name[at]) for c, at in zip(children, fields, strict=True)]
    if prefix.cls is not type(tree) or prefix.entries.keys() != {c.key for c in children}:
        error = TooDeepError if _is_array(tree) else ValueError
        raise error(_misfit(prefix, tree, children, name, what))
    return [(c.name, c.value, prefix.entries[c.key]) for c in children]


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
        f"{unknown} is not one of its attributes; give the parameter a rank explicitly, such as "
        "rankax.ranks_like(item) of an example of one item"
    )


def _kind(tree: Any) -> str:
    """Return the name of a value's type, or the shape of an array, whose type is JAX's."""
    return f"an array of shape {tree.shape}" if _is_array(tree) else type(tree).__name__


def _is_array(tree: Any) -> bool:
    return isinstance(tree, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


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
    absent = f"the {what} of {name} has an entry for {listed(missing)}, which is absent"
    return _joined([absent] if missing else [], extra, name, what)


def _other_fields(
    by_name: Mapping[str, Any], tree: Any, fields: list[str], name: str, what: str
) -> str:
    sentences: list[str] = []
    for field in [field for field in by_name if field not in fields]:
        close = difflib.get_close_matches(field, fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {listed(fields)}"
        sentences.append(
            f"the {what} of {name} has an entry for {field!r}, which is not a field of "
            f"{_kind(tree)} that holds arrays; {hint}"
        )
    extra = [f"{name}.{field}" for field in fields if field not in by_name]
    return _joined(sentences, extra, name, what)


def _joined(sentences: list[str], extra: list[str], name: str, what: str) -> str:
    no_entry = (
        f"the {what} of {name} has no entry for {listed(extra)} (None would leave it as it is)"
    )
    return "; ".join([*sentences, *([no_entry] if extra else [])])


def check_leaves(site: str, tree: Any, name: str) -> None:
    """Refuse a leaf that is not an array or a scalar."""
    for path, leaf in leaves_with_names(tree, name):
        check_no_ref(leaf, site, path)
        if not (isinstance(leaf, (jax.Array, int, float, complex)) or _is_array_like(leaf)):
            raise TypeError(f"{site}: {path} must be an array or a scalar, got {type_name(leaf)}")


def _is_array_like(leaf: Any) -> bool:
    if isinstance(leaf, str):  # JAX reads "a" and "b" as the names of dtypes
        return False
    try:
        jax.eval_shape(lambda: jnp.asarray(leaf))
    except TypeError:
        return False
    return True


def type_name(value: Any) -> str:
    """Return ``float32[3]`` for an array and the name of its type for anything else."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__name__
