# SPDX-License-Identifier: MIT
"""Ranks from annotations: jaxtyping's array types, and containers of them.

`typing.get_type_hints` evaluates strings. Of jaxtyping, only `jaxtyping.AbstractArray` with its
``dim_str`` is used, and the ``leaftype`` of `jaxtyping.PyTree`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jaxtyping
import numpy as np

from rankax.core.base.messages import listed
from rankax.core.base.trees import ByKey, Items, entries
from rankax.core.declare.dims import Rank, parse_dims
from rankax.core.declare.mask import Mask, mask_rank
from rankax.core.declare.ranks import Unpacked
from rankax.core.declare.split_key import SplitKey, key_rank

_NUMBERS = (bool, int, float, complex, np.generic)
_ARRAYS = (jax.Array, np.ndarray)
_ANYTHING = (Any, object, jaxtyping.PyTree, typing.Callable, collections.abc.Callable)
_KEYS = typing.get_args(jaxtyping.PRNGKeyArray)
_ONE_KEY: Any = jaxtyping.Key[jax.Array, ""]
_QUALIFIERS = (
    typing.Annotated,
    typing.Final,
    typing.Required,
    typing.NotRequired,
    getattr(typing, "ReadOnly", typing.Final),  # since Python 3.13
)
_ENDLESS = (
    "it contains itself, so it does not say at which depth the arrays are; give the parameter a "
    "rank or a rank tree explicitly"
)

Seen = dict[type, ByKey]  # the classes being read: one that contains itself is its own entry


def annotated_ranks(
    fun: Callable[..., Any], skip: Collection[str], signature: inspect.Signature, site: str
) -> tuple[dict[str, Any], set[str]]:
    """Read a rank tree from each annotation of ``fun``, by parameter name and ``"return"``.

    Annotations without arrays are absent. So is a return annotation without one rank, because no
    explicit rank could override it.

    Parameters
    ----------
    fun : callable
    skip : collection of str
        Names whose annotations are not read because explicit ranks override them.
    signature : inspect.Signature
        Of ``fun``.
    site : str
        The beginning of error messages.

    Returns
    -------
    dict, set of str
        The rank trees, and the names whose annotations have nothing to do with arrays.

    Raises
    ------
    ValueError
        If an annotation has dimensions that cannot be read, or is a union of two ranks.
    TypeError
        If a parameter's annotation cannot be resolved. With any explicit ranks, such an annotation
        declares no rank instead.
    """
    target: Any = fun.func if isinstance(fun, functools.partial) else fun
    if not (inspect.isroutine(target) or hasattr(target, "__wrapped__")):
        target = type(target).__call__
    ranks: dict[str, Any] = {}
    silent: set[str] = set()
    for name, written in getattr(target, "__annotations__", {}).items():
        if name in skip:
            continue
        # Each alone, because one that cannot be resolved may not be needed.
        alone = types.SimpleNamespace(__annotations__={name: written}, __wrapped__=target)
        text = f"{site}: the annotation of {name}:"
        try:
            hint = _hints(alone, repr(written))[name]
            rank = _rank(hint, {})
        except (AttributeError, NameError) as error:  # the first of a `type` statement
            if name in signature.parameters and not skip:
                raise TypeError(
                    f"{text} {error}; only names of its module are found, so give the parameter "
                    f"its rank explicitly, as in auto_vmap({name}=1) ({name}=None leaves it "
                    "untouched)"
                ) from None
        except (RecursionError, ValueError) as error:
            if name in signature.parameters:
                reason = _ENDLESS if isinstance(error, RecursionError) else error
                raise ValueError(f"{text} {reason}") from None
        else:
            if rank is not None:
                ranks[name] = rank
            elif not any(_is_for_arrays(part) for part in _parts(hint)):
                silent.add(name)
    return ranks, silent


def _hints(annotated: Any, text: str) -> dict[str, Any]:
    """Evaluate annotations; a `NameError` says what could not be resolved."""
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except Exception as error:
        raise NameError(f"{text} cannot be resolved ({error})") from None


def _is_for_arrays(hint: Any) -> bool:
    """Return whether a type is one of arrays, or of any value.

    An array type without dimensions, ``...``, ``Any``, a `jaxtyping.PyTree` or a function mean what
    they say: no rank. Of another type, such as a class of another library, a value may still hold
    arrays.
    """
    origin = typing.get_origin(hint)
    is_array = _is_subclass(origin or hint, (*_ARRAYS, np.generic, jaxtyping.AbstractArray))
    is_open = hint in _ANYTHING or origin in _ANYTHING or isinstance(hint, typing.TypeVar)
    return is_array or is_open or hasattr(hint, "leaftype")


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type, and the types that it is made of; but not those of the fields of a class."""
    hint = _bare(hint)
    yield hint
    for part in (*typing.get_args(hint), getattr(hint, "leaftype", ...)):
        if part is not Ellipsis:
            yield from _parts(part)


def _bare(hint: Any) -> Any:
    """Strip what says nothing of shapes: ``NewType``, ``Final``, ``Annotated`` without a mark.

    A ``type X = ...`` statement is replaced by its value; `typing_extensions` has its own class.
    """
    while _mark(hint) is None:
        if typing.get_origin(hint) in _QUALIFIERS:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif _is_alias(hint):
            hint = hint.__value__
        else:
            break
    return hint


def _is_alias(hint: Any) -> bool:
    return type(hint).__name__ == "TypeAliasType"


def _mark(hint: Any) -> Any:
    """Return `SplitKey`, or the `Mask`, in ``Annotated[..., Mask("n")]``."""
    metadata = getattr(hint, "__metadata__", ())
    marks: Any = (Mask, SplitKey)
    return next((x for x in metadata if x is SplitKey or isinstance(x, marks)), None)


def _rank(hint: Any, seen: Seen) -> Any:
    """Return the rank tree of a type; None if it declares no rank."""
    hint = _bare(hint)
    mark = _mark(hint)
    if isinstance(hint, (str, typing.ForwardRef)):  # left by `typing.get_type_hints`
        raise RecursionError
    if isinstance(mark, Mask):
        return mask_rank(mark)
    if SplitKey in (hint, mark) or isinstance(mark, SplitKey):
        return _split_key(hint, seen, getattr(mark, "axes", ()))
    if _is_subclass(hint, jaxtyping.AbstractArray):
        rank = parse_dims(hint.dim_str)
        if rank is None or hint.dtypes != _ONE_KEY.dtypes:
            return rank
        return dataclasses.replace(rank, is_key=True)
    if isinstance(hint, type) and hasattr(hint, "leaftype"):
        return _pytree(hint.leaftype, seen)
    if isinstance(hint, typing.TypeVar):
        return _union(hint.__constraints__ or (hint.__bound__,), seen)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(args, seen)
    if origin is typing.Unpack:
        return Unpacked(_rank(args[0], seen))
    cls: Any = origin or hint
    is_class = _has_fields(cls)
    if _is_alias(origin) or (is_class and any(_rank(arg, seen) is not None for arg in args)):
        raise ValueError(
            f"the arguments of the generic {cls.__name__} are not read; give the parameter a rank "
            "tree explicitly, such as rankax.ranks_like(item) of an example of one item"
        )
    if is_class:
        return _class(cls, seen)
    if args and _is_subclass(origin, collections.abc.Collection):
        tree = _collection(cls, args, seen)
        return Unpacked(tree) if getattr(hint, "__unpacked__", False) else tree
    return None


def _split_key(hint: Any, seen: Seen, axes: tuple[str, ...]) -> Rank:
    """Read ``Annotated[PRNGKeyArray, SplitKey]``, also with `Any` in place of the key type."""
    if hint is not SplitKey:
        base = _rank(typing.get_args(hint)[0], seen)
        if base is None or (isinstance(base, Rank) and base.is_key and base.rank == 0):
            return key_rank(axes)
    raise ValueError(
        "SplitKey annotates the type of a single key, as in "
        "Annotated[jaxtyping.PRNGKeyArray, rankax.SplitKey]"
    )


def _pytree(leaf: Any, seen: Seen) -> Rank | None:
    rank = _rank(leaf, seen)
    if rank is None or isinstance(rank, Rank):
        return rank
    raise ValueError(
        f"PyTree[{getattr(leaf, '__name__', leaf)}] does not say at which depth the leaves are; "
        "give the parameter a rank tree explicitly"
    )


def _union(members: Sequence[Any], seen: Seen) -> Any:
    """Return the one rank of all array types of a union; other members are ignored."""
    members = [_bare(member) for member in members]
    if all(key in members for key in _KEYS):  # not as a set: some types are not hashable
        # PRNGKeyArray is a union: a typed key, which is one item, or a raw uint32[2].
        members = [member for member in members if member not in _KEYS] + [_ONE_KEY]
    ranks: list[Any] = []
    for member in members:
        rank = _rank(member, seen)
        is_array = member in _ARRAYS or _is_subclass(member, jaxtyping.AbstractArray)
        if rank is not None or is_array:
            ranks.append(rank)
    if any(isinstance(rank, Rank) and rank.rank for rank in ranks):
        ranks += [Rank(0) for member in members if _is_subclass(member, _NUMBERS)]
    return _common(ranks)


def _common(ranks: list[Any]) -> Any:
    """Return the one rank that the members of a union share."""
    if len(ranks) <= 1:
        return ranks[0] if ranks else None
    if not all(rank is None or isinstance(rank, Rank) for rank in ranks):
        raise ValueError(
            "it is a union of containers, so the ranks cannot be known; give the parameter a rank "
            "tree explicitly, or write two kernels"
        )
    numbers = {rank and (str(rank) if rank.is_split else rank.rank) for rank in ranks}
    if len(numbers) > 1:
        described = ["no rank" if n is None else f"rank {n}" for n in sorted(numbers, key=str)]
        raise ValueError(
            f"it is a union of {listed(described)}, so the number of batch axes cannot be known; "
            "give the parameter one rank explicitly, or write two kernels"
        )
    same = all(rank == ranks[0] for rank in ranks)
    return ranks[0] if same else Rank(ranks[0].rank)  # "n" | "m": one axis of unknown name


def _collection(cls: type, args: tuple[Any, ...], seen: Seen) -> Any:
    if issubclass(cls, tuple) and not (len(args) == 2 and args[1] is Ellipsis):
        items = tuple(_rank(arg, seen) for arg in args)
        return items if any(item is not None for item in items) else None
    is_mapping = issubclass(cls, collections.abc.Mapping)
    entry = _rank(args[-1] if is_mapping else args[0], seen)
    spreads = isinstance(entry, Rank) and (is_mapping or issubclass(cls, tuple))
    # One rank applies to all leaves below it, but a list under one rank means an array.
    return entry if entry is None or spreads else Items({}, entry)


def _class(cls: type, seen: Seen) -> ByKey | None:
    """Read a NamedTuple, TypedDict, dataclass or Equinox module by its fields."""
    if cls in seen:
        return seen[cls]
    ranks: dict[str, Any] = {}
    is_dict = typing.is_typeddict(cls)
    node = ByKey(dict if is_dict else cls, ranks, _fields_of_subclass)
    hints = _hints(cls, cls.__name__)
    fields = getattr(cls, "_fields", hints)
    if dataclasses.is_dataclass(cls):
        fields = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static", False)]
    fields = [name for name in fields if name in hints]
    for name in fields:
        try:
            rank = _rank(hints[name], {**seen, cls: node})
        except (NameError, ValueError) as error:
            raise type(error)(f"{cls.__name__}.{name}: {error}") from None
        if rank is not None:
            ranks[f"['{name}']" if is_dict else f".{name}"] = rank
    _check_variadics(cls.__name__, {name: hints[name] for name in fields})
    return node if any(rank is not None for rank in entries(node)) else None


def _has_fields(cls: Any) -> bool:
    is_record = dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or hasattr(cls, "_fields")
    return is_record and isinstance(cls, type)


def _fields_of_subclass(cls: type) -> dict[str, Any]:
    """Read a subclass that was passed for the annotated class; it may have more fields."""
    tree = _rank(cls, {})
    return {} if tree is None else dict(tree.entries)


def _check_variadics(cls: str, hints: dict[str, Any]) -> None:
    """Refuse a variadic that only ever stands alone in the fields of a class.

    On a parameter, ``"*batch"`` is a number for each item. A class describes one value of itself:
    in one with ``"*batch"`` and ``"*batch 3"`` the variadic is the batch, but a lone ``"*shape"``
    could also be an array of any rank, which would be torn into its components as a number.
    """
    arrays = [
        (name, *part.dim_str.split())
        for name, hint in hints.items()
        for part in _parts(hint)
        if _is_subclass(part, jaxtyping.AbstractArray)
        if part.dim_str.lstrip("#").startswith("*")
    ]
    batch = {first.lstrip("#*") for _, first, *core in arrays if core}
    for name, first, *_ in arrays:
        if first.lstrip("#*") not in batch:
            raise ValueError(
                f"{cls}.{name}: {first!r} alone could be the batch axes of a number, or an array "
                "of any rank; write '' for a number and '...' to leave it untouched, or give the "
                "parameter a rank explicitly"
            )


def _is_subclass(hint: Any, classes: type | tuple[type, ...]) -> bool:
    return isinstance(hint, type) and issubclass(hint, classes)
