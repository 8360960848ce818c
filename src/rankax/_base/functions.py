# SPDX-License-Identifier: MIT
"""Names and locations of callables, for error messages and warnings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def unwrapped(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside partials and wrappers."""
    while True:
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        else:
            return fun


def function_name(fun: Callable[..., Any]) -> str:
    """Return the name of a callable; never a ``repr`` with a memory address."""
    fun = unwrapped(fun)
    return getattr(fun, "__name__", None) or type(fun).__name__


def function_location(fun: Callable[..., Any]) -> str:
    """Return ``name() at file:line``, or just ``name()`` if the source is unknown."""
    name = function_name(fun)
    fun = unwrapped(fun)
    if not hasattr(fun, "__code__"):
        fun = type(fun).__call__
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f"{name}()" if code is None else f"{name}() at {code.co_filename}:{code.co_firstlineno}"


# JAX may stand between the caller and this library, as in `jax.vmap(kernel)`.
_BETWEEN = ("rankax", "jax", "contextlib")


def caller_level() -> int:
    """Return the ``stacklevel`` with which a warning shows the line that called this library."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level  # this function's frame takes the place of that of `warnings.warn`
