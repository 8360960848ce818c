# SPDX-License-Identifier: MIT
"""Annotations without a rank whose author may not have meant to pass arrays untouched."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Callable, Collection
from typing import Any

import jax
import jaxtyping
import numpy as np

from rankax._declare.hints import (
    Names,
    UnresolvedError,
    alias_of,
    hints_and_names,
    resolved,
    stripped,
    value_of,
)

__all__ = ["silent_parameters"]


def silent_parameters(fun: Callable[..., Any], names: Collection[str]) -> frozenset[str]:
    """Return those of ``names`` whose annotations have nothing to do with arrays.

    A value of such a type, such as a class of another library, may still hold arrays. An array type
    without dimensions, ``...``, ``Any``, a `jaxtyping.PyTree`, a function, or no annotation at all
    mean what they say: no rank.
    """
    hints, scope = hints_and_names(fun)
    return frozenset(name for name in names if name in hints and not _is_meant(hints[name], scope))


_ARRAYS = (jax.Array, np.ndarray, np.generic, jaxtyping.AbstractArray)
_ANYTHING = (Any, object, jaxtyping.PyTree, typing.Callable, collections.abc.Callable)


def _is_meant(hint: Any, names: Names) -> bool:
    """Return whether a type is for arrays or for any value, or is a container of such a type."""
    try:
        hint = stripped(resolved(hint, names))
    except UnresolvedError:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _ANYTHING or origin in _ANYTHING or isinstance(hint, typing.TypeVar):
        return True
    if hasattr(hint, "leaftype"):  # a PyTree[...]
        return True
    if isinstance(origin or hint, type) and issubclass(origin or hint, _ARRAYS):
        return True
    if (alias := alias_of(hint)) is not None:
        return _is_meant(value_of(alias), names)
    return any(_is_meant(arg, names) for arg in args if arg is not Ellipsis)
