# SPDX-License-Identifier: MIT
"""Ranks from annotations: jaxtyping's array types, and containers of them."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jaxtyping
import numpy as np

from rankax.core.base.messages import listed, unwrapped
from rankax.core.base.trees import ByKey, Items, entries
from rankax.core.declare.dims import Rank, UnreadableError, parse_dims
from rankax.core.declare.mask import Mask, mask_rank
from rankax.core.declare.ranks import READERS, Unpacked
from rankax.core.declare.split_key import SplitKey, key_rank, marked

Names = dict[str, Any]  # what the names in an annotation mean


def annotated_ranks(
    fun: Callable[..., Any], skip: Collection[str], signature: inspect.Signature, site: str
) -> dict[str, Any]:
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

    Raises
    ------
    ValueError
        If an annotation has dimensions that cannot be read, or is a union of two ranks.
    TypeError
        If a parameter's annotation cannot be resolved. With any explicit ranks, such an annotation
        declares no rank instead.
    """
    hints, names = _hints_and_names(fun)
    ranks: dict[str, Any] = {}
    for name, hint in hints.items():
        if name in skip:
            continue
        try:
            rank = _Reader().rank(hint, names)
        except (_UnresolvedError, UnreadableError) as error:
            is_read = isinstance(error, UnreadableError)
            if name not in signature.parameters or (skip and not is_read):
                continue
            text = f"{site}: the annotation of {name}: {error}"
            if is_read:
                raise ValueError(text) from None
            raise TypeError(
                f"{text}; give the parameter its rank explicitly ({name}=None leaves it untouched)"
            ) from None
        if rank is not None:
            ranks[name] = rank
    return ranks


def silent_parameters(fun: Callable[..., Any], names: Collection[str]) -> frozenset[str]:
    """Return those of ``names`` whose annotations have nothing to do with arrays.

    A value of such a type, such as a class of another library, may still hold arrays. An array type
    without dimensions, ``...``, ``Any``, a `jaxtyping.PyTree`, a function, or no annotation at all
    mean what they say: no rank.
    """
    hints, scope = _hints_and_names(fun)
    return frozenset(name for name in names if name in hints and _is_silent(hints[name], scope))


def _is_silent(hint: Any, names: Names) -> bool:
    """Return whether a type is neither for arrays, nor for any value, nor a container of such."""
    try:
        hint = _resolved(hint, names)
        if (alias := _alias_of(hint)) is not None:
            return _is_silent(_value_of(alias), names)
    except _UnresolvedError:
        return False
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    is_open = hint in _ANYTHING or origin in _ANYTHING or isinstance(hint, typing.TypeVar)
    is_array = _is_subclass(origin or hint, (*_ARRAYS, np.generic, jaxtyping.AbstractArray))
    if is_open or is_array or hasattr(hint, "leaftype"):  # of a PyTree[...]
        return False
    return all(_is_silent(arg, names) for arg in args if arg is not Ellipsis)


_NUMBERS = (bool, int, float, complex, np.generic)
_ARRAYS = (jax.Array, np.ndarray)
_ANYTHING = (Any, object, jaxtyping.PyTree, typing.Callable, collections.abc.Callable)
_KEYS = typing.get_args(jaxtyping.PRNGKeyArray)
_ONE_KEY: Any = jaxtyping.Key[jax.Array, ""]


class _Reader:
    """Turns one annotation into a rank tree.

    It uses the introspection of `typing`, and of jaxtyping only `jaxtyping.AbstractArray` with its
    ``dim_str``, and the ``leaftype`` of `jaxtyping.PyTree`.
    """

    def __init__(self) -> None:
        # Aliases and classes being read. An alias must not contain itself. A class that contains
        # itself is its own entry.
        self.aliases: set[Any] = set()
        self.classes: dict[type, ByKey] = {}
        # For each class being read, the variadics of the current field, and whether each is alone.
        self.variadics: list[list[tuple[str, bool]]] = []

    def rank(self, hint: Any, names: Names) -> Any:
        """Return the rank tree of an annotation; None if it declares no rank."""
        hint = _resolved(hint, names)
        if hint is SplitKey or marked(hint):
            return self._split_key(hint, names)
        if (mask := mask_in(hint)) is not None:
            return mask_rank(mask)
        if _is_subclass(hint, jaxtyping.AbstractArray):
            return self._array(hint)
        if isinstance(hint, type) and hasattr(hint, "leaftype"):
            return self._pytree(hint.leaftype, names)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if (alias := _alias_of(hint)) is not None:
            return self._alias(alias, args, names)
        if isinstance(hint, typing.TypeVar):
            return self._union(hint.__constraints__ or (hint.__bound__,), names)
        if origin in (typing.Union, types.UnionType):
            return self._union(args, names)
        if origin is typing.Unpack:
            return _unpacked(self.rank(args[0], names))
        cls: Any = origin or hint
        if _has_fields(cls):
            return self._class(cls, names, _arguments(cls, args))
        if _is_subclass(origin, collections.abc.Collection):
            tree = self._collection(cls, args, names)
            return _unpacked(tree) if getattr(hint, "__unpacked__", False) else tree
        return None

    def _split_key(self, hint: Any, names: Names) -> Rank:
        """Read ``Annotated[PRNGKeyArray, SplitKey]``, also with `Any` in place of the key type."""
        if marked(hint):
            base = self.rank(typing.get_args(hint)[0], names)
            if base is None or (isinstance(base, Rank) and base.is_key and base.rank == 0):
                return key_rank()
        raise UnreadableError(
            "SplitKey annotates the type of a single key, as in "
            "Annotated[jaxtyping.PRNGKeyArray, rankax.SplitKey]"
        )

    def _array(self, hint: Any) -> Rank | None:
        first, *core = hint.dim_str.split() or [""]
        if self.variadics and first.lstrip("#").startswith("*"):
            self.variadics[-1].append((first, not core))
        rank = parse_dims(hint.dim_str)
        if rank is None or hint.dtypes != _ONE_KEY.dtypes:
            return rank
        return dataclasses.replace(rank, is_key=True)

    def _pytree(self, leaf: Any, names: Names) -> Rank | None:
        rank = self.rank(leaf, names)
        if rank is None or isinstance(rank, Rank):
            return rank
        raise UnreadableError(
            f"PyTree[{getattr(leaf, '__name__', leaf)}] does not say at which depth the leaves "
            "are; give the parameter a rank tree explicitly"
        )

    def _alias(self, alias: Any, args: tuple[Any, ...], names: Names) -> Any:
        """Read a ``type X = ...`` statement."""
        if alias in self.aliases:
            raise UnreadableError(
                f"the type {alias.__name__} contains itself, so it does not say at which depth the "
                "arrays are; give the parameter a rank or a rank tree explicitly"
            )
        self.aliases.add(alias)
        rank = self.rank(_substituted(_value_of(alias), _arguments(alias, args)), names)
        self.aliases.discard(alias)
        return rank

    def _union(self, members: Sequence[Any], names: Names) -> Any:
        """Return the one rank of all array types of a union; other members are ignored."""
        members = [_resolved(member, names) for member in members]
        if all(key in members for key in _KEYS):  # not as a set: some types are not hashable
            # PRNGKeyArray is a union: a typed key, which is one item, or a raw uint32[2].
            members = [m for m in members if m not in _KEYS] + [_ONE_KEY]
        ranks: list[Any] = []
        for member in members:
            rank = self.rank(member, names)
            is_array = member in _ARRAYS or _is_subclass(member, jaxtyping.AbstractArray)
            if rank is not None or is_array:
                ranks.append(rank)
        if any(isinstance(rank, Rank) and rank.rank for rank in ranks):
            ranks += [Rank(0) for member in members if _is_subclass(member, _NUMBERS)]
        return _common(ranks)

    def _collection(self, origin: type, args: tuple[Any, ...], names: Names) -> Any:
        if issubclass(origin, tuple) and not (len(args) == 2 and args[1] is Ellipsis):
            items = tuple(self.rank(arg, names) for arg in args)
            return items if any(item is not None for item in items) else None
        is_mapping = issubclass(origin, collections.abc.Mapping)
        entry = self.rank(args[-1] if is_mapping else args[0], names)
        spreads = isinstance(entry, Rank) and (is_mapping or issubclass(origin, tuple))
        # One rank applies to all leaves below it, but a list under one rank means an array.
        return entry if entry is None or spreads else Items({}, entry)

    def _class(self, cls: type, names: Names, bound: dict[Any, Any]) -> ByKey | None:
        """Read a NamedTuple, TypedDict, dataclass or Equinox module by its fields."""
        if cls in self.classes:
            return self.classes[cls]
        fields: dict[str, Any] = {}
        is_dict = typing.is_typeddict(cls)
        node = ByKey(dict if is_dict else cls, fields, _fields_of_subclass)
        self.classes[cls] = node
        variadics: list[tuple[str, str, bool]] = []
        for name, (hint, scope) in _field_hints(cls, names).items():
            self.variadics.append([])
            try:
                entry = self.rank(_substituted(_resolved(hint, scope), bound), scope)
            except (_UnresolvedError, UnreadableError) as error:
                raise type(error)(f"{cls.__name__}.{name}: {error}") from None
            if entry is not None:
                fields[f"['{name}']" if is_dict else f".{name}"] = entry
            variadics += [(name, word, alone) for word, alone in self.variadics.pop()]
        _check_variadics(cls, variadics)
        del self.classes[cls]
        return node if any(entry is not None for entry in entries(node)) else None


def _check_variadics(cls: type, variadics: Sequence[tuple[str, str, bool]]) -> None:
    """Refuse a variadic that only ever stands alone in the fields of a class.

    On a parameter, ``"*batch"`` is a number for each item. A class describes one value of itself:
    in one with ``"*batch"`` and ``"*batch 3"`` the variadic is the batch, but a lone ``"*shape"``
    could also be an array of any rank, which would be torn into its components as a number.
    """
    batch = {word.lstrip("#*") for _, word, alone in variadics if not alone}
    for field, word, _ in variadics:
        if word.lstrip("#*") not in batch:
            raise UnreadableError(
                f"{cls.__name__}.{field}: {word!r} alone could be the batch axes of a number, or "
                "an array of any rank; write '' for a number and '...' to leave it untouched, or "
                "give the parameter a rank explicitly"
            )


def _fields_of_subclass(cls: type) -> dict[str, Any]:
    """Read a subclass that was passed for the annotated class; it may have more fields."""
    tree = _Reader().rank(cls, {})
    return {} if tree is None else dict(tree.entries)


def _unpacked(tree: Any) -> Unpacked | None:
    return None if tree is None else Unpacked(tree)


def _is_subclass(hint: Any, classes: type | tuple[type, ...]) -> bool:
    return isinstance(hint, type) and issubclass(hint, classes)


def _arguments(generic: Any, args: tuple[Any, ...]) -> dict[Any, Any]:
    """Return the arguments of a generic class or alias by type variable."""
    variables = getattr(generic, "__type_params__", ()) or getattr(generic, "__parameters__", ())
    return dict(zip(variables, args, strict=False))


def _substituted(hint: Any, bound: dict[Any, Any]) -> Any:
    """Replace the type variables of a generic class or alias by its arguments."""
    if isinstance(hint, typing.TypeVar):
        return bound.get(hint, hint)
    parameters = typing.get_origin(hint) and getattr(hint, "__parameters__", ())
    return hint[tuple(bound.get(p, p) for p in parameters)] if bound and parameters else hint


def _has_fields(cls: Any) -> bool:
    if typing.is_typeddict(cls) or (_is_subclass(cls, tuple) and hasattr(cls, "_fields")):
        return True
    return isinstance(cls, type) and dataclasses.is_dataclass(cls)


def _common(ranks: list[Any]) -> Any:
    """Return the one rank that the members of a union share."""
    if len(ranks) <= 1:
        return ranks[0] if ranks else None
    if not all(rank is None or isinstance(rank, Rank) for rank in ranks):
        raise UnreadableError(
            "it is a union of containers, so the ranks cannot be known; give the parameter a rank "
            "tree explicitly, or write two kernels"
        )
    numbers = {rank and (str(rank) if rank.is_split else rank.rank) for rank in ranks}
    if len(numbers) > 1:
        described = ["no rank" if n is None else f"rank {n}" for n in sorted(numbers, key=str)]
        raise UnreadableError(
            f"it is a union of {listed(described)}, so the number of batch axes cannot be known; "
            "give the parameter one rank explicitly, or write two kernels"
        )
    same = all(rank == ranks[0] for rank in ranks)
    return ranks[0] if same else Rank(ranks[0].rank)  # "n" | "m": one axis of unknown name


# The annotations as written; those that are strings are evaluated.


_QUALIFIERS = {
    typing.Annotated,
    typing.Final,
    typing.ClassVar,
    typing.Required,
    typing.NotRequired,
    getattr(typing, "ReadOnly", typing.Required),  # since Python 3.13
}


class _UnresolvedError(Exception):
    """An annotation is a string that cannot be evaluated."""


def _hints_and_names(fun: Callable[..., Any]) -> tuple[dict[str, Any], Names]:
    """Return the annotations of a kernel as written, and what their names mean."""
    target: Any = fun.func if isinstance(fun, functools.partial) else fun
    if not (inspect.isroutine(target) or hasattr(target, "__wrapped__")):
        target = type(target).__call__
    written: Any = unwrapped(target)
    if not (hints := getattr(target, "__annotations__", {})):
        return {}, {}
    names = {**_enclosing_names(written), **getattr(written, "__globals__", {})}
    return hints, {**names, **_type_parameters(written)}


def _type_parameters(generic: Any) -> dict[str, Any]:
    return {parameter.__name__: parameter for parameter in getattr(generic, "__type_params__", ())}


def _enclosing_names(fun: Any) -> dict[str, Any]:
    """Collect the local names of the functions that enclose ``fun``.

    Python keeps those that the body of ``fun`` uses. While a decorator is applied, the others are
    still in the frame of each enclosing function or class body. These frames are searched so that a
    kernel defined inside a function can annotate with a local class under ``from __future__ import
    annotations``.
    """
    code = getattr(fun, "__code__", None)
    names: dict[str, Any] = {}
    cells = getattr(fun, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        with contextlib.suppress(ValueError):  # not assigned yet
            names[name] = cell.cell_contents
    frame = inspect.currentframe()
    while frame is not None and code is not None:
        if code in frame.f_code.co_consts:
            names = {**frame.f_locals, **names}
            code = frame.f_code
        frame = frame.f_back
    return names


def _alias_of(hint: Any) -> Any:
    """Return the ``type X = ...`` statement that a hint names, or None.

    The name of its class tells, because `typing_extensions` has a class of its own. Accessing the
    value would evaluate the statement, which may fail.
    """
    alias = typing.get_origin(hint) or hint
    return alias if type(alias).__name__ == "TypeAliasType" else None


def _value_of(alias: Any) -> Any:
    """Evaluate a ``type X = ...`` statement.

    Raises
    ------
    _UnresolvedError
        If it cannot be evaluated.
    """
    try:
        return alias.__value__
    except Exception as error:
        raise _UnresolvedError(f"the type {alias.__name__} cannot be resolved ({error})") from None


def _field_hints(cls: Any, names: Names) -> dict[str, tuple[Any, Names]]:
    """Return the annotation of each field of a class, and what its names mean."""
    hints: dict[str, tuple[Any, Names]] = {}
    for base in reversed(cls.__mro__):
        if annotations := inspect.get_annotations(base):
            module = getattr(sys.modules.get(base.__module__), "__dict__", {})
            scope = {**names, **module, **_type_parameters(base), **vars(base)}
            hints.update({name: (hint, scope) for name, hint in annotations.items()})
    fields = getattr(cls, "_fields", hints)
    if dataclasses.is_dataclass(cls):
        fields = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static", False)]
    return {name: hints[name] for name in fields if name in hints}


def _resolved(hint: Any, names: Names) -> Any:
    """Evaluate an annotation that is a string or a forward reference, as Python would.

    Wrappers without meaning for shapes are stripped: ``Annotated``, ``NewType``, ``Final``.
    ``Annotated[..., SplitKey]`` and ``Annotated[..., Mask("n")]`` stay.

    Raises
    ------
    _UnresolvedError
        If it cannot be evaluated.
    """
    while isinstance(hint, (str, typing.ForwardRef)):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        try:
            hint = eval(text, names)
        except Exception as error:
            raise _UnresolvedError(f"{text!r} cannot be resolved ({error})") from None
    while not (marked(hint) or mask_in(hint)):
        if typing.get_origin(hint) in _QUALIFIERS:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            break
    return hint


def mask_in(hint: Any) -> Mask | None:
    """Return the `Mask` in ``Annotated[..., Mask("n")]``."""
    if typing.get_origin(hint) is not typing.Annotated:
        return None
    return next((entry for entry in hint.__metadata__ if isinstance(entry, Mask)), None)


READERS.append((annotated_ranks, silent_parameters))
