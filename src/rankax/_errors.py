# SPDX-License-Identifier: MIT
"""The exception classes, and the one place that words a table of shapes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any


class RankError(ValueError):
    """A leaf has fewer axes than the rank declared for it."""


class BatchShapeError(ValueError):
    """The batch axes of the arguments do not broadcast together."""


class CoreDimensionError(ValueError):
    """A named or fixed core dimension has two different sizes."""


for _error in (RankError, BatchShapeError, CoreDimensionError):
    _error.__module__ = "rankax"  # the name a traceback shows is the one a user can import


def plural(count: int, noun: str) -> str:
    """``1 axis``, ``2 axes``, ``3 leaves``: counts read aloud."""
    irregular = {"axis": "axes", "leaf": "leaves", "entry": "entries"}
    return f"{count} {noun if count == 1 else irregular.get(noun, noun + 's')}"


def listed(items: Sequence[str], conjunction: str = "and") -> str:
    """Join words as a sentence does: ``a, b and c``."""
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Collection[int]) -> str:
    """Align rows under a header; marked rows begin with ``>`` so that the eye finds them."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(lead: str, cells: Sequence[str]) -> str:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return (lead + padded).rstrip()

    body = [line("  > " if i in marked else "    ", row) for i, row in enumerate(rows)]
    return "\n".join([line("    ", header), *body])


def unwrapped(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a user wrote, from inside partials and wrappers."""
    while True:
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        else:
            return fun


def function_name(fun: Callable[..., Any]) -> str:
    """Name a callable as its author does; never a ``repr`` with a memory address."""
    fun = unwrapped(fun)
    return getattr(fun, "__name__", None) or type(fun).__name__


def function_location(fun: Callable[..., Any]) -> str:
    """``name() at file:line``, or just ``name()`` where no source is known."""
    name = function_name(fun)
    fun = unwrapped(fun)
    if not hasattr(fun, "__code__"):
        fun = type(fun).__call__
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f"{name}()" if code is None else f"{name}() at {code.co_filename}:{code.co_firstlineno}"
