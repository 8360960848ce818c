# SPDX-License-Identifier: MIT
"""The declaration of a kernel: every way of writing ranks, reduced to one normal form.

The normal form is a tree per parameter whose entries are `Rank` or ``None`` (untouched). It is
built and checked once, when the kernel is decorated.

A return annotation is checked only if it has one rank, because no explicit rank could override it.
An option that shares its name with a parameter is accepted only if the parameter has a rank from
elsewhere. Otherwise the call would be ambiguous.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.core.base.messages import checked_int, function_name, listed
from rankax.core.base.trees import (
    Items,
    Node,
    children_of,
    entries,
    field_names,
    flatten_once,
    is_leaf,
    spread_prefix,
    subtrees_with_entries,
)
from rankax.core.declare.binding import bind_ranks, checked_ranks, from_gufunc
from rankax.core.declare.dims import Dim, Rank, UnreadableError, parse_dims
from rankax.core.declare.split_key import SplitKey, key_rank
from rankax.ext.annotations import Unpacked, annotated_ranks, silent_parameters
from rankax.ext.ragged.type import Mask, mask_rank

Parameter = inspect.Parameter


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The ranks of one kernel.

    Attributes
    ----------
    signature : inspect.Signature
        Of the kernel as callers see it: without the parameters of rank `Mask`.
    ranks : dict
        Rank trees by parameter, without the parameters that are passed through untouched.
    outputs : pytree of Rank or None
        The declared ranks of the outputs, if any.
    silent : frozenset of str
        Parameters without a rank whose annotations have nothing to do with arrays.
    masks : dict
        The name of the dimension of each parameter of rank `Mask`.
    written : inspect.Signature, optional
        Of the kernel as it was written, if it has such parameters.
    """

    signature: inspect.Signature
    ranks: dict[str, Any]
    outputs: Any
    silent: frozenset[str] = frozenset()
    masks: dict[str, str] = dataclasses.field(default_factory=dict)
    written: inspect.Signature | None = None


def declare(
    fun: Callable[..., Any],
    positional: tuple[Any, ...],
    named: Mapping[str, Any],
    ranks: Any,
    options: Mapping[str, Any],
    known_options: Collection[str],
) -> Declaration:
    """Reduce all declared ranks of ``fun`` to the normal form.

    Parameters
    ----------
    fun : callable
    positional, named : tuple, dict
        The ranks that were passed to `auto_vmap` by position and by name.
    ranks : dict, optional
        The option of `auto_vmap` of this name, as passed.
    options : dict
        The options passed by name; a parameter may have the same name.
    known_options : collection of str
        The names of all options, to recognize misspelled ones.
    """
    site = f"auto_vmap({function_name(fun)})"
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # as many builtins
        raise TypeError(
            f"{site}: Python cannot tell the parameters of {function_name(fun)}, so ranks cannot "
            "be bound to them; wrap it in a function that names its own"
        ) from None
    by_parameter = checked_ranks(ranks, signature, site)
    if len(positional) == 1 and isinstance(positional[0], str) and "(" in positional[0]:
        masks = {**named, **by_parameter}
        if not all(isinstance(rank, Mask) for rank in masks.values()):
            raise TypeError(f"{site}: a gufunc signature declares every rank; drop the named ones")
        passed = [p for name, p in signature.parameters.items() if name not in masks]
        bound = from_gufunc(positional[0], signature.replace(parameters=passed), site)
        bound.whole.update(masks)
    else:
        bound = bind_ranks(positional, named, by_parameter, signature, site, known_options)
    explicit = {name: _normal(rank, f"{site}: {name}") for name, rank in bound.whole.items()}
    overridden = {*explicit, *([] if bound.outputs is None else ["return"])}
    # Those of a kernel that takes a batch itself describe the batch.
    is_batched = options.get("batched") is True
    annotated = {} if is_batched else annotated_ranks(fun, overridden, signature, site)
    for name, by_key in bound.items.items():
        items = {key: _normal(rank, f"{site}: {name}{key}") for key, rank in by_key.items()}
        rest = explicit.get(name, annotated.get(name))
        # Unpack[...] declares all items together, so explicit ranks override it as a whole.
        explicit[name] = Items(items, None if isinstance(rest, Unpacked) else rest)
    declared = {**annotated, **explicit}
    trees = {
        name: _for_parameter(declared.get(name), parameter)
        for name, parameter in signature.parameters.items()
    }
    _check_names(explicit, trees, site)
    in_conflict = {**options, "ranks": ranks} if by_parameter else options
    for name, value in in_conflict.items():
        if name in signature.parameters and name not in declared:
            raise TypeError(
                f"{site}: {name}={value!r} is the option of auto_vmap, but the kernel has a "
                f"parameter {name!r} too; give it its rank with ranks={{{name!r}: ...}}, by "
                "position, in a signature or by annotation (None leaves it untouched)"
            )
    if not explicit and not any(tree is not None for tree in trees.values()):
        other = "or annotate the parameters with jaxtyping"
        if is_batched:
            other = "because with batched=True, annotations describe the batch"
        raise TypeError(f"{site}: no rank is declared; give ranks, as in auto_vmap(0, 1), {other}")
    # With any explicit rank, a missing one is taken as deliberate.
    implicit = all(rank is None for rank in explicit.values())
    unranked = [name for name, tree in trees.items() if tree is None and name not in explicit]
    declaration = Declaration(
        signature,
        {name: tree for name, tree in trees.items() if tree is not None},
        bound.outputs if bound.outputs is not None else annotated.get("return"),
        silent_parameters(fun, unranked) if implicit else frozenset(),
    )
    return _without_masks(declaration, site)


def _without_masks(declaration: Declaration, site: str) -> Declaration:
    """Take the parameters of rank `Mask` out of what callers pass."""
    masks: dict[str, str] = {}
    for name, tree in declaration.ranks.items():
        found = [rank for rank in entries(tree) if isinstance(rank, Rank) and rank.is_mask]
        if not found:
            continue
        kind = declaration.signature.parameters[name].kind
        if tree is not found[0] or kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            raise TypeError(
                f"{site}: {name}: Mask is the rank of a whole parameter, which callers do not pass"
            )
        masks[name] = str(found[0].dims[0].text) if found[0].dims else ""
    if not masks:
        return declaration
    ranks = {name: tree for name, tree in declaration.ranks.items() if name not in masks}
    first = [r.dims[0].name for t in ranks.values() for r in entries(t) if r and r.dims]
    for name, dim in masks.items():
        if dim not in first:
            raise ValueError(
                f"{site}: {name} is the mask of {dim!r}, but no parameter has {dim!r} as its first "
                f'core dimension, as in x="{dim} 3"'
            )
    parameters = declaration.signature.parameters
    signature = declaration.signature.replace(
        parameters=[parameter for name, parameter in parameters.items() if name not in masks]
    )
    changed = {"signature": signature, "written": declaration.signature}
    return dataclasses.replace(declaration, ranks=ranks, masks=masks, **changed)


def subtrees_with_ranks(tree: Any, value: Any, name: str) -> list[tuple[str, Any, Rank | None]]:
    """Return ``(path, subtree, rank)`` for each subtree of an argument under one rank."""
    return list(
        subtrees_with_entries(tree, value, name, is_entry=_is_rank, what="rank", by_field=True)
    )


def ranks_of_leaves(tree: Any, value: Any, name: str) -> list[Rank | None]:
    """Return the rank of each leaf of an argument."""
    return spread_prefix(tree, value, name, is_entry=_is_rank, what="rank")


def _is_rank(entry: Any) -> bool:
    return entry is None or isinstance(entry, Rank)


def _for_parameter(tree: Any, parameter: Parameter) -> Any:
    """Return the rank tree of the one container that ``*args`` or ``**kwargs`` arrive in."""
    if isinstance(tree, Unpacked):
        return tree.tree
    many = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return Items({}, tree) if many and not (_is_rank(tree) or isinstance(tree, Items)) else tree


def _normal(rank: Any, site: str) -> Any:
    """Turn an explicit rank, or a tree of ranks, into a tree of `Rank` and None."""
    if rank is None or isinstance(rank, Rank):
        return rank
    if rank is SplitKey:
        return key_rank()
    if isinstance(rank, Mask):
        return mask_rank(rank)
    if isinstance(rank, str):
        return _dims(rank, site)
    if rank is Mask:
        raise TypeError(f"{site}: Mask needs the name of a dimension, as in Mask('n')")
    if is_leaf(rank):
        expected = "a rank is an int >= 0, None, a dimension string, SplitKey, or a tree of those"
        return Rank(checked_int(rank, f"{site}: {expected}; got", least=0))
    # The class of a container may not accept `Rank` objects as children.
    return Node(type(rank), {c.key: _normal(c.value, site + c.name) for c in children_of(rank)})


def _dims(text: str, site: str) -> Rank | None:
    if "(" in text or "->" in text:
        raise ValueError(
            f"{site}: {text!r} looks like a gufunc signature, which stands alone: "
            "auto_vmap('(n,3),(n)->()'); a dimension string has no parentheses: 'n 3'"
        )
    try:
        return parse_dims(text)
    except UnreadableError as error:
        raise ValueError(f"{site}: {error}") from None


def _check_names(explicit: Mapping[str, Any], trees: Mapping[str, Any], site: str) -> None:
    """Refuse expressions in explicit ranks with a name that no parameter declares.

    Annotations may have them: jaxtyping evaluates any Python there.
    """
    declared = {dim.name for tree in trees.values() for dim in _dims_in(tree)}
    for parameter, tree in explicit.items():
        for dim in _dims_in(tree):
            problem = None
            if "{" in dim.text:
                problem = "the value of an argument is not looked up; name the size, or write '_'"
            elif unknown := [repr(name) for name in dim.names if name not in declared]:
                problem = f"no argument has a dimension named {listed(unknown, 'or')}"
            if problem is not None:
                raise ValueError(
                    f"{site}: {parameter}: the dimension {dim.text!r} could never be checked: "
                    f"{problem}"
                )


def _dims_in(tree: Any) -> list[Dim]:
    ranks = [rank for rank in entries(tree) if isinstance(rank, Rank)]
    return [dim for rank in ranks for dim in rank.dims or ()]


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
    return _ranks_of(item, "item")


def _ranks_of(item: Any, name: str) -> Any:
    if item is None or is_leaf(item):
        return _rank_of(item)
    children = children_of(item)
    ranks = [_ranks_of(child.value, name + child.name) for child in children]
    with contextlib.suppress(Exception):  # a class may check its children, or convert them
        tree = flatten_once(item)[1].unflatten(ranks)
        inside = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
        given = jax.tree.leaves(ranks, is_leaf=lambda x: x is None)
        if list(map(id, inside)) == list(map(id, given)):
            return tree
    if (fields := field_names(item, children)) is not None:
        return dict(zip(fields, ranks, strict=True))
    raise ValueError(
        f"ranks_like: {name} is {type(item).__name__}, which accepts no ints in place of its "
        "arrays and has no field names; give one rank for all of it, or None"
    )


def _rank_of(leaf: Any) -> int | None:
    if isinstance(leaf, (int, float, complex)):
        return 0
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return len(leaf.shape)
    return jnp.ndim(leaf) if hasattr(leaf, "__jax_array__") else None
