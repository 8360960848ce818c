# SPDX-License-Identifier: MIT
"""Ranks from annotations: jaxtyping's array types, and the containers that hold them."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping

from rankax._dims import Rank, parse_dims
from rankax._errors import listed
from rankax._trees import ByKey, ForEach

__all__ = ["UnresolvedError", "annotated_ranks", "rank_of_annotation"]


class UnresolvedError(Exception):
    """An annotation is a string that cannot be evaluated where the kernel was written."""


def annotated_ranks(fun: Callable[..., Any]) -> dict[str, Any]:
    """Read a rank tree from every annotation of ``fun``, by parameter name and ``"return"``.

    Annotations without arrays are absent. One that cannot be resolved has an `UnresolvedError` in
    its place, because it matters only where no explicit rank overrides it.

    Raises
    ------
    ValueError
        If an annotation holds dimensions that cannot be read, or a union of two ranks.
    """
    ranks: dict[str, Any] = {}
    for name, hint in _resolved_hints(fun).items():
        if isinstance(hint, UnresolvedError):
            ranks[name] = hint
            continue
        try:
            rank = rank_of_annotation(hint)
        except ValueError as error:
            raise ValueError(f"the annotation of {name}: {error}") from None
        if rank is not None:
            ranks[name] = rank
    return ranks


def _resolved_hints(fun: Callable[..., Any]) -> dict[str, Any]:
    target = fun.func if isinstance(fun, functools.partial) else fun
    if not (inspect.isroutine(target) or hasattr(target, "__wrapped__")):
        target = type(target).__call__
    raw: dict[str, Any] = getattr(target, "__annotations__", {})
    if not any(isinstance(hint, str) for hint in raw.values()):
        return dict(raw)  # the usual case, and forty times cheaper than get_type_hints
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # one bad name spoils all: find out which
        return {name: _resolve_one(target, name, hint) for name, hint in raw.items()}


def _resolve_one(target: Any, name: str, hint: Any) -> Any:
    if not isinstance(hint, str):
        return hint
    module = sys.modules.get(getattr(inspect.unwrap(target), "__module__", ""))
    namespace = dict(vars(module)) if module else {}
    try:
        return eval(hint, namespace)  # as typing.get_type_hints does, for one annotation
    except Exception as error:
        return UnresolvedError(f"the annotation {hint!r} of {name} cannot be resolved ({error})")


def rank_of_annotation(hint: Any) -> Any:
    """Turn one annotation into a rank tree; None where it declares no rank.

    Only jaxtyping's introspection (`jaxtyping.AbstractArray` and its ``dim_str``) and `typing`'s
    are used.
    """
    hint = _stripped(hint)
    if hint == jaxtyping.PRNGKeyArray:
        return Rank(0, ())  # it also admits raw uint32[2]; a typed key is one item
    if _is_array_type(hint):
        return parse_dims(hint.dim_str)
    if _is_pytree_type(hint):
        return _rank_of_pytree(hint.leaftype)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _rank_of_union(args)
    if origin is tuple:
        return _rank_of_tuple(args)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return _or_none(ForEach, rank_of_annotation(args[-1]))
    if isinstance(origin, type) and issubclass(origin, collections.abc.Collection):
        entry = rank_of_annotation(args[0])
        return entry if entry is None else ForEach(entry)  # a list is meant, not an array
    cls = origin if isinstance(origin, type) else hint
    return _rank_of_fields(cls) if isinstance(cls, type) else None


def _stripped(hint: Any) -> Any:
    """Look through ``Annotated``, ``NewType``, ``type X = ...`` and ``Final``."""
    while True:
        if typing.get_origin(hint) in (typing.Annotated, typing.Final, typing.ClassVar):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif hasattr(hint, "__value__"):
            hint = hint.__value__
        else:
            return hint


def _is_array_type(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _is_pytree_type(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "leaftype") and hint is not jaxtyping.PyTree


def _rank_of_pytree(leaf: Any) -> Rank | None:
    rank = rank_of_annotation(leaf)
    if rank is None or isinstance(rank, Rank):
        return rank
    raise ValueError(
        f"PyTree[{getattr(leaf, '__name__', leaf)}] does not say at which depth the leaves are; "
        "give the parameter a rank tree explicitly"
    )


def _or_none(make: Callable[[Any], Any], entry: Any) -> Any:
    """Spread a tree of ranks over each child; a rank alone spreads by itself."""
    return entry if entry is None or isinstance(entry, Rank) else make(entry)


def _rank_of_union(members: tuple[Any, ...]) -> Any:
    """One rank for all array types of a union; what is no array has no say."""
    ranks = [rank_of_annotation(member) for member in members if not _is_plain(member)]
    if len(ranks) <= 1:
        return ranks[0] if ranks else None
    if not all(rank is None or isinstance(rank, Rank) for rank in ranks):
        raise ValueError(
            "it is a union of containers, so the ranks cannot be known; give the parameter a rank "
            "tree explicitly, or write two kernels"
        )
    numbers = {rank.rank if isinstance(rank, Rank) else None for rank in ranks}
    if len(numbers) > 1:
        described = ["no rank" if n is None else f"rank {n}" for n in sorted(numbers, key=str)]
        raise ValueError(
            f"it is a union of {listed(described)}, so the number of batch axes cannot be known; "
            "give the parameter one rank explicitly, or write two kernels"
        )
    same = all(rank == ranks[0] for rank in ranks)
    return ranks[0] if same else Rank(ranks[0].rank)  # "n" | "m": how many, but not which


def _is_plain(member: Any) -> bool:
    """``None``, and the scalars that ``ArrayLike`` brings along."""
    if member is type(None):
        return True
    return not _is_array_type(member) and rank_of_annotation(member) is None


def _rank_of_tuple(args: tuple[Any, ...]) -> Any:
    if len(args) == 2 and args[1] is Ellipsis:
        return _or_none(ForEach, rank_of_annotation(args[0]))
    entries = tuple(rank_of_annotation(arg) for arg in args)
    return entries if any(entry is not None for entry in entries) else None


def _rank_of_fields(cls: type) -> Any:
    """Ranks of a NamedTuple, TypedDict, dataclass or Equinox module by its fields."""
    is_dict = typing.is_typeddict(cls)
    is_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    if not (is_dict or is_tuple or dataclasses.is_dataclass(cls)):
        return None
    entries = _field_entries(cls, "['{}']" if is_dict else ".{}")
    return ByKey(dict if is_dict else cls, entries) if entries else None


@functools.lru_cache(maxsize=256)  # a class is read once however many kernels take it
def _field_entries(cls: type, key: str) -> dict[str, Any]:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    static = {field.name for field in fields if field.metadata.get("static", False)}
    entries = {
        key.format(name): rank_of_annotation(hint)
        for name, hint in _class_hints(cls).items()
        if name not in static
    }
    return {name: rank for name, rank in entries.items() if rank is not None}


def _class_hints(cls: type) -> dict[str, Any]:
    """Resolve the fields that can be; others (imported for a type checker only) hold no arrays."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # one bad name spoils all
        hints: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            for name, hint in vars(base).get("__annotations__", {}).items():
                resolved = _resolve_one(base, name, hint)
                if not isinstance(resolved, UnresolvedError):
                    hints[name] = resolved
        return hints
