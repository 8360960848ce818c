# SPDX-License-Identifier: MIT
"""Core dimensions that are an expression of others: ``n+1``, ``2*n``, ``max(n,m)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

from rankax._base.words import listed

__all__ = ["CannotComputeError", "evaluated", "for_sizes", "free_names", "why_never_checked"]

_FUNCTIONS = {"abs": abs, "int": int, "max": max, "min": min, "round": round}


class CannotComputeError(Exception):
    """An expression of dimensions has no value for the sizes of one call."""


def free_names(expression: str) -> tuple[str, ...]:
    """Return the names of dimensions that an expression is made of, in order."""
    nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return tuple(
        dict.fromkeys(
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and not (id(node) in called and node.id in _FUNCTIONS)
        )
    )


def evaluated(expression: str, sizes: Mapping[str, int]) -> Any:
    """Return the value of an expression.

    Raises
    ------
    CannotComputeError
        If it fails for these sizes.
    """
    try:
        # The text is the kernel author's own, and jaxtyping evaluates it in the same way.
        return eval(expression, {"__builtins__": _FUNCTIONS}, dict(sizes))
    except Exception as error:
        raise CannotComputeError(f"{type(error).__name__}: {error}") from None


def for_sizes(sizes: Mapping[str, int]) -> str:
    """Word the sizes that an expression was evaluated for: `` for n = 3 and m = 4``."""
    return f" for {listed([f'{name} = {size}' for name, size in sizes.items()])}" if sizes else ""


_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub),
)


def why_never_checked(expression: str, bound: Collection[str]) -> str | None:
    """Say why no call could compare an expression with a size; None where one can.

    Parameters
    ----------
    expression : str
    bound : collection of str
        The names that some argument binds.
    """
    nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    if any(isinstance(node, ast.Div) for node in nodes):
        better = re.sub(r"(?<!/)/(?!/)", "//", expression)
        return f"'/' does not give an integer; write {better!r}"
    if not all(isinstance(node, _ARITHMETIC) and _is_integral(node) for node in nodes):
        return "an expression is made of names, integers and + - * // % **"
    names = free_names(expression)
    if unbound := [repr(name) for name in names if name not in bound]:
        return f"no argument has a dimension named {listed(unbound, 'or')}"
    return _why_no_size(expression, names)


def _is_integral(node: ast.AST) -> bool:
    return not isinstance(node, ast.Constant) or type(node.value) is int


def _why_no_size(expression: str, names: tuple[str, ...]) -> str | None:
    """Evaluate an expression for a few sizes, and say what is wrong if it is a size for none."""
    count = len(names)
    problem = None
    for sizes in (range(3, 3 + count), range(2 + count, 2, -1), [17] * count):
        by_name = dict(zip(names, sizes, strict=True))
        try:
            value = evaluated(expression, by_name)
        except CannotComputeError as error:
            found = f"it cannot be computed{for_sizes(by_name)} ({error})"
        else:
            if isinstance(value, int) and value >= 0:
                return None
            found = f"it is {value}{for_sizes(by_name)}"
        problem = problem or found
    return f"{problem}, which is no size"
