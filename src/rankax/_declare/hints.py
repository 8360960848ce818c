# SPDX-License-Identifier: MIT
"""The type annotations of functions and classes; those written as strings are evaluated."""

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
from rankax._declare.ragged import mask_in
from rankax._declare.split_key import marked

_QUALIFIERS = {
    typing.Annotated,
    typing.Final,
    typing.ClassVar,
    typing.Required,
    typing.NotRequired,
    getattr(typing, "ReadOnly", typing.Required),  # since Python 3.13
}


class UnresolvedError(Exception):
    """An annotation is a string that cannot be evaluated."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The scopes in which the names of an annotation are looked up."""

    module: dict[str, Any]
    local: Mapping[str, Any]  # the class body and type parameters
    enclosing: Callable[[], Mapping[str, Any]]  # the enclosing functions; called only when needed


def hints_and_names(fun: Callable[..., Any]) -> tuple[dict[str, Any], Names]:
    """Return the annotations of a kernel as written, and the scopes of their names."""
    target: Any = fun.func if isinstance(fun, functools.partial) else fun
    if not (inspect.isroutine(target) or hasattr(target, "__wrapped__")):
        target = type(target).__call__
    written: Any = unwrapped(target)
    names = Names(
        getattr(written, "__globals__", {}),
        {parameter.__name__: parameter for parameter in getattr(written, "__type_params__", ())},
        functools.cache(functools.partial(_enclosing_names, written)),
    )
    return getattr(target, "__annotations__", {}), names


def _enclosing_names(fun: Any) -> dict[str, Any]:
    """Collect the local names of the functions that enclose ``fun``.

    Python keeps those that the body of ``fun`` uses. While a decorator is applied, the others are
    still in the frame of each enclosing function or class body. These frames are searched so that a
    kernel defined inside a function can annotate with a local class under ``from __future__ import
    annotations``.
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
    """Return the ``type X = ...`` statement that a hint names, or None.

    The name of its class tells, because `typing_extensions` has a class of its own. Accessing the
    value would evaluate the statement, which may fail.
    """
    alias = typing.get_origin(hint) or hint
    return alias if type(alias).__name__ == "TypeAliasType" else None


def value_of(alias: Any) -> Any:
    """Evaluate a ``type X = ...`` statement.

    Raises
    ------
    UnresolvedError
        If it cannot be evaluated.
    """
    try:
        return alias.__value__
    except Exception as error:
        raise UnresolvedError(f"the type {alias.__name__} cannot be resolved ({error})") from None


def field_hints(cls: type, names: Names) -> dict[str, tuple[Any, Names]]:
    """Return the annotation of each field of a class, with the scopes of its names."""
    hints: dict[str, tuple[Any, Names]] = {}
    for base in reversed(cls.__mro__):
        annotations = inspect.get_annotations(base)
        if annotations:
            module = sys.modules.get(base.__module__)
            parameters = {p.__name__: p for p in getattr(base, "__type_params__", ())}
            local = collections.ChainMap(dict(vars(base)), parameters)
            scope = Names(vars(module) if module else {}, local, names.enclosing)
            hints.update({name: (hint, scope) for name, hint in annotations.items()})
    return hints


def resolved(hint: Any, names: Names) -> Any:
    """Evaluate an annotation that is a string or a forward reference, as Python would.

    Wrappers without meaning for shapes are stripped: ``Annotated``, ``NewType``, ``Final``.
    ``Annotated[..., SplitKey]`` and ``Annotated[..., Mask("n")]`` stay.

    Raises
    ------
    UnresolvedError
        If it cannot be evaluated.
    """
    while isinstance(hint, (str, typing.ForwardRef)):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        try:
            try:
                hint = eval(text, names.module, names.local)
            except NameError:
                hint = eval(text, names.module, {**names.enclosing(), **names.local})
        except Exception as error:
            raise UnresolvedError(f"{text!r} cannot be resolved ({error})") from None
    while not (marked(hint) or mask_in(hint)):
        if typing.get_origin(hint) in _QUALIFIERS:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            break
    return hint
