# SPDX-License-Identifier: MIT
"""Names and locations of callables, for error messages and warnings."""

import contextlib
import functools
import inspect
import re
import traceback
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from rankax._base.words import table

_MOST_ROWS = 16  # of the table in a note


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


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Name positional arguments as ``fun`` does; by position if its signature has no names."""
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        for name, value in inspect.signature(fun).bind_partial(*range(count)).arguments.items():
            items = [f"{name}[{i}]" for i in range(len(value))] if type(value) is tuple else [name]
            names += items
    return names + [f"args[{i}]" for i in range(len(names), count)]


def traced_as(fun: Callable[..., Any], paths: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a decorator of what is traced in place of ``fun``, for JAX's errors about tracers.

    These name ``fun`` and its source line. With ``paths``, they also name the leaves that are
    passed one by one: ``pose_rotation`` for ``pose.rotation``, as Python names parameters.
    """

    def decorate(traced: Any) -> Any:
        traced = functools.wraps(fun, updated=())(traced)
        signature = _signature(tuple(paths)) if paths else getattr(fun, "__signature__", None)
        if signature is not None:
            traced.__signature__ = signature
        return traced

    return decorate


@functools.lru_cache(256)  # for calls that are made again and again
def _signature(paths: tuple[str, ...]) -> inspect.Signature:
    names: list[str] = []
    for path in paths:
        name = re.sub(r"\W+", "_", path).strip("_")
        names.append(f"{name}_{len(names)}" if name in names else name)
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


@contextlib.contextmanager
def noted_errors(
    fun: Callable[..., Any],
    describe: Callable[[], tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]],
) -> Generator[None]:
    """Note at the errors of a kernel, which is called in the ``with`` block, its arguments.

    Of kernels inside each other, the innermost one is named. Errors of this library have no note,
    because they name the place themselves: they are raised by a function inside the block that is
    one of rankax.

    Parameters
    ----------
    fun : callable
        The kernel.
    describe : callable
        Returns the header of a table, its rows, and more sentences.
    """
    try:
        yield
    except Exception as error:
        begin = "This error comes from "
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # The first two are those of this function and of the block.
        is_own = len(frames) > 2 and _package(frames[-1]) == "rankax"
        if not (is_own or any(n.startswith(begin) for n in getattr(error, "__notes__", ()))):
            header, rows, sentences = describe()
            note = f"{begin}{function_location(fun)}"
            if rows:
                note += ", called with\n\n" + table(header, rows[:_MOST_ROWS], ())
            if len(rows) > _MOST_ROWS:
                note += f"\n    ... {len(rows) - _MOST_ROWS} more"
            error.add_note("\n\n".join([note, *sentences]))
        raise


def _package(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


# JAX may stand between the caller and this library, as in `jax.vmap(kernel)`.
_BETWEEN = ("rankax", "jax", "contextlib")


def caller_level() -> int:
    """Return the ``stacklevel`` with which a warning shows the line that called this library."""
    frame, level = inspect.currentframe(), 0
    while frame and _package(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level  # this function's frame takes the place of that of `warnings.warn`
