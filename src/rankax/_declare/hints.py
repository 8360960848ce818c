# SPDX-License-Identifier: MIT
"""What an annotation written as a string means, where it was written."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rankax._base.functions import unwrapped
from rankax._declare.split_key import marked

__all__ = [
    "Names",
    "UnresolvedError",
    "alias_of",
    "field_hints",
    "hints_and_names",
    "resolved",
    "stripped",
    "value_of",
]

_QUALIFIERS = {
    typing.Annotated,
    typing.Final,
    typing.ClassVar,
    typing.Required,
    typing.NotRequired,
    getattr(typing, "ReadOnly", typing.Required),  # since Python 3.13
}


class UnresolvedError(Exception):
    """An annotation is a string that cannot be evaluated where it was written."""


@dataclasses.dataclass(frozen=True)
class Names:
    """Where the names of an annotation are looked up."""

    module: dict[str, Any]
    own: Mapping[str, Any]  # of the class body, and type parameters
    around: Callable[[], Mapping[str, Any]]  # of the functions around; only asked when needed


def hints_and_names(fun: Callable[..., Any]) -> tuple[dict[str, Any], Names]:
    """Return the annotations of a kernel as written, and where their names are looked up."""
    target: Any = fun.func if isinstance(fun, functools.partial) else fun
    if not (inspect.isroutine(target) or hasattr(target, "__wrapped__")):
        target = type(target).__call__
    written: Any = unwrapped(target)
    names = Names(
        getattr(written, "__globals__", {}),
        {parameter.__name__: parameter for parameter in getattr(written, "__type_params__", ())},
        functools.cache(functools.partial(_names_around, written)),
    )
    return getattr(target, "__annotations__", {}), names


def _names_around(fun: Any) -> dict[str, Any]:
    """Collect the local names that ``fun`` could see where it was defined.

    Those that its body uses are kept by Python; the others are still there while a decorator is
    applied, in the frame of each function (or class body) that encloses it. Kept, for else a kernel
    in a function could not use a class of that function under ``from __future__ import
    annotations``; REASON
    """
    code = getattr(fun, "__code__", None)
    names: dict[str, Any] = {}
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(fun, "__closure__", None) or (), strict=False
    ):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    frame = inspect.currentframe()
    while frame is not None and code is not None:
        if code in frame.f_code.co_consts:
            names = {**frame.f_locals, **names}
            code = frame.f_code
        frame = frame.f_back
    return names


def alias_of(hint: Any) -> Any:
    """Return the ``type X = ...`` statement that a hint names; None where it names none.

    It is known by its class (`typing_extensions` has one of its own), since Python evaluates the
    statement as soon as anyone asks for its value, and that may fail.
    """
    alias = typing.get_origin(hint) or hint
    return alias if type(alias).__name__ == "TypeAliasType" else None


def value_of(alias: Any) -> Any:
    """Evaluate a ``type X = ...`` statement.

    Raises
    ------
    UnresolvedError
        If that fails.
    """
    try:
        return alias.__value__
    except Exception as error:
        raise UnresolvedError(f"the type {alias.__name__} cannot be resolved ({error})") from None


def field_hints(cls: type, names: Names) -> dict[str, tuple[Any, Names]]:
    """Return the annotation of each field of a class, with where its names are looked up."""
    hints: dict[str, tuple[Any, Names]] = {}
    for base in reversed(cls.__mro__):
        annotations = inspect.get_annotations(base)
        if annotations:
            module = sys.modules.get(base.__module__)
            parameters = {p.__name__: p for p in getattr(base, "__type_params__", ())}
            own = collections.ChainMap(dict(vars(base)), parameters)
            scope = Names(vars(module) if module else {}, own, names.around)
            hints.update({name: (hint, scope) for name, hint in annotations.items()})
    return hints


def resolved(hint: Any, names: Names) -> Any:
    """Evaluate an annotation that is a string, or a forward reference, as Python would have.

    Raises
    ------
    UnresolvedError
        If a name in it is not known.
    """
    while isinstance(hint, (str, typing.ForwardRef)):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        try:
            hint = eval(text, names.module, names.own)
        except NameError:
            hint = _evaluated_locally(text, names)
        except Exception as error:
            raise _unresolved(text, error) from None
    return hint


def _evaluated_locally(text: str, names: Names) -> Any:
    try:
        return eval(text, names.module, collections.ChainMap({**names.around(), **names.own}))
    except Exception as error:
        raise _unresolved(text, error) from None


def _unresolved(text: str, error: Exception) -> UnresolvedError:
    return UnresolvedError(f"{text!r} cannot be resolved ({error})")


def stripped(hint: Any) -> Any:
    """Look through what says nothing about shapes: ``Annotated``, ``NewType``, ``Final``.

    ``Annotated[..., SplitKey]`` does say something, and stays.
    """
    while not marked(hint):
        if typing.get_origin(hint) in _QUALIFIERS:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            break
    return hint
