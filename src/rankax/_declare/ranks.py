# SPDX-License-Identifier: MIT
"""What a kernel declares: every way of writing ranks, reduced to one normal form.

The normal form is a tree per parameter whose entries are `Rank` or ``None`` (untouched). It is made
and checked once, when the kernel is decorated.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rankax._base.checks import checked_int
from rankax._base.functions import function_name
from rankax._base.nodes import children_of, is_leaf
from rankax._base.trees import ForEach, Items, Node, entries, parts_with_entries, spread_prefix
from rankax._declare.annotations import Unpacked, UnresolvedError, annotated_ranks
from rankax._declare.binding import ANNOTATED, bind_ranks, items_of_args, leaves_rest, with_rest
from rankax._declare.dims import Rank, check_comparable, parse_dims
from rankax._declare.gufunc import from_gufunc
from rankax._declare.silent import silent_parameters
from rankax._declare.split_key import SplitKey, key_rank

__all__ = ["Declaration", "declare", "parts_with_ranks", "ranks_of_leaves"]

Parameter = inspect.Parameter


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The ranks of one kernel.

    Attributes
    ----------
    signature : inspect.Signature
        Of the kernel as it was written.
    ranks : dict
        Rank tree by parameter, without the parameters that are passed through untouched.
    outputs : pytree of Rank or None
        What the kernel says it returns; None where it says nothing.
    silent : frozenset of str
        Parameters that have no rank only because their annotation says nothing of arrays.
    """

    signature: inspect.Signature
    ranks: dict[str, Any]
    outputs: Any
    silent: frozenset[str] = frozenset()


def declare(
    fun: Callable[..., Any],
    ranks: tuple[Any, ...],
    named_ranks: Mapping[str, Any],
    options: Mapping[str, Any],
    known_options: Collection[str] = (),
) -> Declaration:
    """Reduce whatever declares the ranks of ``fun`` to the normal form.

    Parameters
    ----------
    fun : callable
    ranks, named_ranks
        As given to `auto_vmap`.
    options : dict
        The options that were given by name, which a parameter may share its name with.
    known_options : collection of str
        All options, for one may be misspelled.
    """
    where = f"auto_vmap({function_name(fun)})"
    signature = _signature(fun, where)
    outputs: Any = None
    texts: dict[str, Rank] = {}  # dimension strings, by where they stand
    if len(ranks) == 1 and isinstance(ranks[0], str) and "(" in ranks[0]:
        if named_ranks:
            raise TypeError(f"{where}: a gufunc signature declares every rank; drop the named ones")
        groups, outputs = from_gufunc(ranks[0], signature, where)
        bound = items_of_args([name for name, _ in groups], [rank for _, rank in groups])
    else:
        bound = bind_ranks(ranks, named_ranks, signature, where, known_options)
    explicit = {
        name: _normal_bound(rank, f"{where}: {name}", texts) for name, rank in bound.items()
    }
    overridden = {name for name, rank in explicit.items() if not leaves_rest(rank)}
    overridden |= {"return"} if outputs is not None else set()
    annotated = _from_annotations(fun, overridden, signature, where)
    explicit = {name: with_rest(rank, annotated.get(name)) for name, rank in explicit.items()}
    _check_texts(texts, {**annotated, **explicit})
    _check_options(options, {**annotated, **explicit}, signature, where)
    trees = {
        name: _for_parameter(explicit.get(name, annotated.get(name)), parameter)
        for name, parameter in signature.parameters.items()
    }
    if not explicit and not any(tree is not None for tree in trees.values()):
        raise TypeError(
            f"{where}: no rank is declared; give ranks, as in auto_vmap(0, 1), or annotate the "
            "parameters with jaxtyping"
        )
    # Whoever gave one rank by hand knows that what has none is untouched.
    alone = all(rank is None for rank in explicit.values())
    unsaid = [name for name, tree in trees.items() if tree is None and name not in explicit]
    return Declaration(
        signature,
        {name: tree for name, tree in trees.items() if tree is not None},
        outputs if outputs is not None else annotated.get("return"),
        silent_parameters(fun, unsaid) if alone else frozenset(),
    )


def _signature(fun: Callable[..., Any], where: str) -> inspect.Signature:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # as many builtins
        raise TypeError(
            f"{where}: Python cannot tell the parameters of {function_name(fun)}, so ranks cannot "
            "be bound to them; wrap it in a function that names its own"
        ) from None


def parts_with_ranks(tree: Any, value: Any, name: str) -> list[tuple[str, Any, Rank | None]]:
    """Cut an argument into ``(path, part, rank)``, each part under one rank."""
    return list(
        parts_with_entries(tree, value, name, is_entry=_is_rank, what="rank", by_field=True)
    )


def ranks_of_leaves(tree: Any, value: Any, name: str) -> list[Rank | None]:
    """Spread a rank tree over the leaves of an argument."""
    return spread_prefix(tree, value, name, is_entry=_is_rank, what="rank")


def _is_rank(entry: Any) -> bool:
    return entry is None or isinstance(entry, Rank)


def _for_parameter(tree: Any, parameter: Parameter) -> Any:
    """``*args`` and ``**kwargs`` arrive as one container, and a rank holds for each item."""
    if isinstance(tree, Unpacked):
        return tree.tree
    if isinstance(tree, Items):
        return tree
    many = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return ForEach(tree) if many and not _is_rank(tree) else tree


# Ranks given to the decorator, in normal form.


def _normal_bound(rank: Any, where: str, texts: dict[str, Rank]) -> Any:
    if not isinstance(rank, Items):
        return _normal(rank, where, texts)
    entries = {key: _normal(entry, where + key, texts) for key, entry in rank.entries.items()}
    rest = rank.rest if rank.rest is ANNOTATED else _normal(rank.rest, where, texts)
    return Items(entries, rest)


def _normal(rank: Any, where: str, texts: dict[str, Rank]) -> Any:
    """Turn one rank, or a tree of them, into a tree of `Rank` and None; collect the strings."""
    if rank is None or isinstance(rank, Rank):
        return rank
    if rank is SplitKey:
        return key_rank()
    if isinstance(rank, str):
        dims = _dims(rank, where)
        if dims is not None:
            texts[where] = dims
        return dims
    if is_leaf(rank):
        expected = "a rank is an int >= 0, None, a dimension string, SplitKey, or a tree of those"
        return Rank(checked_int(rank, f"{where}: {expected}; got", least=0))
    children = children_of(rank)
    # The class of a container may accept ranks, but not what stands for them here.
    return Node(type(rank), {c.key: _normal(c.value, where + c.name, texts) for c in children})


def _dims(text: str, at: str) -> Rank | None:
    if "(" in text or "->" in text:
        raise ValueError(
            f"{at}: {text!r} looks like a gufunc signature, which stands alone: "
            "auto_vmap('(n,3),(n)->()'); a dimension string has no parentheses: 'n 3'"
        )
    try:
        return parse_dims(text)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from None


def _check_texts(texts: Mapping[str, Rank], declared: Mapping[str, Any]) -> None:
    """Refuse what no call could compare, now that it is known which names the parameters bind."""
    bound = {
        dim.name
        for name, tree in declared.items()
        if name != "return"
        for rank in entries(tree.tree if isinstance(tree, Unpacked) else tree)
        for dim in getattr(rank, "dims", None) or ()
        if dim.name is not None
    }
    for at, rank in texts.items():
        try:
            check_comparable(rank, bound)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None


def _check_options(
    options: Mapping[str, Any],
    declared: Mapping[str, Any],
    signature: inspect.Signature,
    where: str,
) -> None:
    for name, value in options.items():
        if name in signature.parameters and name not in declared:
            raise TypeError(
                f"{where}: {name}={value!r} is the option of auto_vmap, but the kernel has a "
                f"parameter {name!r} too; give that parameter its rank by position, in a "
                "signature or by annotation (None leaves it untouched)"
            )


def _from_annotations(
    fun: Callable[..., Any], overridden: Collection[str], signature: inspect.Signature, where: str
) -> dict[str, Any]:
    try:
        annotated = annotated_ranks(fun, skip=overridden)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for name, rank in list(annotated.items()):
        if not isinstance(rank, UnresolvedError):
            continue
        if not overridden and name in signature.parameters:
            raise TypeError(
                f"{where}: {rank}; give the parameter its rank explicitly "
                f"({name}=None leaves it untouched)"
            )
        del annotated[name]
    return annotated
