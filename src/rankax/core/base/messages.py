# SPDX-License-Identifier: MIT
"""Words for messages: names of callables, counts, lists, tables; and the checks of arguments.

Arguments are checked before anything is traced.
"""

import contextlib
import functools
import inspect
import operator
import re
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_T = TypeVar("_T")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 axis``, ``2 core axes``, ``3 leaves``."""
    irregular = {"axis": "axes", "core axis": "core axes", "leaf": "leaves", "entry": "entries"}
    return f"{count} {noun if count == 1 else irregular.get(noun, noun + 's')}"


def listed(items: Sequence[str], conjunction: str = "and") -> str:
    """Join words into a list: ``a, b and c``."""
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Collection[int]) -> str:
    """Align rows under a header; marked rows begin with ``>``."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(lead: str, cells: Sequence[str]) -> str:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return (lead + padded).rstrip()

    body = [line("  > " if i in marked else "    ", row) for i, row in enumerate(rows)]
    return "\n".join([line("    ", header), *body])


def shortened(names: Sequence[str]) -> str:
    """Join names by commas; after the first few, give only the number of the others."""
    return first_of(names if len(names) <= 6 else names[:4], len(names))


def first_of(names: Sequence[str], count: int) -> str:
    """Join the first of ``count`` names by commas, and give the number of the others."""
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + more


def with_article(noun: str) -> str:
    """Return a noun with its article: ``a str``, ``an object``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


_MOST_ROWS = 16  # of the table in a note


def unwrapped(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside partials and wrappers."""
    while isinstance(fun, functools.partial) or hasattr(fun, "__wrapped__"):
        wrapper: Any = fun
        fun = wrapper.func if isinstance(wrapper, functools.partial) else wrapper.__wrapped__
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
        name = re.sub(r"\W+", "_", path).rstrip("_") or "_"
        while name in names:
            name += "_"
        names.append(name)
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


@contextlib.contextmanager
def noted_errors(
    fun: Callable[..., Any],
    describe: Callable[[], tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]],
) -> Generator[None]:
    """Add the kernel's arguments as a note to errors raised in the ``with`` block that calls it.

    If kernels call each other, the innermost one is named. Errors of this library have no note,
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
        # The first two frames belong to this function and to the block.
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
    return level  # this function's frame stands for the frame of `warnings.warn`


def positive_int(value: Any, site: str, name: str) -> int:
    """Return ``value`` as a positive ``int``; the error begins with ``site``."""
    return checked_int(value, f"{site}: {name} must be a positive int, got", least=1)


def checked_int(
    value: Any, refusal: str, *, least: int | None = None, bools: bool = False, came: str = ""
) -> int:
    """Return ``value`` as an ``int`` of at least ``least``.

    Parameters
    ----------
    value : object
    refusal : str
        The beginning of the error: the parameter, what it must be, and "got".
    bools : bool
        Whether ``True`` and ``False`` count as ints, as in Python.
    came : str
        How the error describes a value of another type; by default by its type and ``repr``.
    """
    if isinstance(value, bool) and not bools:
        raise TypeError(f"{refusal} {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        came = came or f"{type(value).__name__} {value!r}"
        raise TypeError(f"{refusal} {came}") from None
    if least is not None and number < least:
        raise ValueError(f"{refusal} {number}")
    return number


def check_output_key(value: Any, site: str, name: str) -> None:
    """Refuse what cannot name an output."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        hint = "; pass the array to the kernel, and return it" if hasattr(value, "shape") else ""
        raise TypeError(
            f"{site}: {name} must be the key, field or index of an output, got "
            f"{type(value).__name__} {value!r}{hint}"
        )


def check_bool(value: Any, site: str, name: str) -> bool:
    """Return ``value``; refuse one that is neither ``True`` nor ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{site}: {name} must be True or False, got {value!r}")
    return value


def refuses_jit(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function that returns another one: an option ``jit`` is refused with what to write."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "jit" in kwargs:
            name = function.__name__
            raise TypeError(f"{name}: there is no option jit; write jax.jit({name}(...))")
        return function(*args, **kwargs)

    return called


def check_callable(value: Any, site: str, name: str) -> None:
    """Refuse a value that is not callable."""
    if not callable(value):
        raise TypeError(f"{site}: {name} must be callable, got {type(value).__name__}")


def common_length(leaves: Sequence[tuple[str, Any, int]], site: str) -> int:
    """Return the common length of the looped axes of all ``(name, leaf, axis)``.

    Raises
    ------
    ValueError
        If a leaf lacks its axis, or the lengths differ. The error shows a table of all leaves with
        the offending ones marked. No axis is ever cut to the shortest length.
    """
    header = ("leaf", "shape", "axis", "length")
    rows = [(name, str(np.shape(leaf)), str(axis)) for name, leaf, axis in leaves]
    lacking = [
        i for i, (_, leaf, axis) in enumerate(leaves) if not -np.ndim(leaf) <= axis < np.ndim(leaf)
    ]
    if lacking:
        raise ValueError(
            f"{site}: {listed([leaves[i][0] for i in lacking])} "
            f"{'lacks' if len(lacking) == 1 else 'lack'} the axis to loop over\n\n"
            + table(header[:3], rows, lacking)
        )
    lengths = [np.shape(leaf)[axis] for _, leaf, axis in leaves]
    usual = Counter(lengths).most_common(1)[0][0]
    if odd := [i for i, length in enumerate(lengths) if length != usual]:
        raise ValueError(
            f"{site}: the looped axes must have one length, got "
            f"{listed([str(n) for n in dict.fromkeys(lengths)])}\n\n"
            + table(header, [(*row, str(n)) for row, n in zip(rows, lengths, strict=True)], odd)
        )
    return usual
