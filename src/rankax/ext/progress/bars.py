# SPDX-License-Identifier: MIT
"""The host side of progress: the option ``progress=``, and the bar or function that shows it.

A call has one target, a label or a function. Reports come from the threads of the runtime, and
those of an earlier call may still come when the next one with the same target begins, or after a
call has failed. So there is one display per target: a report of 0 opens it and closes the one
before it, and reports without an open display are dropped.
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import inspect
import threading
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import jax

from rankax.core.base.arrays import is_staged

Target = str | Callable[[int, int], object]

_SECONDS = 0.1  # between two updates of a display


def checked_progress(value: Any, site: str) -> bool | Target:
    """Check the option ``progress=``. A bar needs tqdm."""
    if value is False:
        return value
    if value is True or isinstance(value, str):
        if value == "":
            raise ValueError(f"{site}: progress must not be an empty label; True shows the name")
        if importlib.util.find_spec("tqdm") is None:
            raise ImportError(
                f"{site}: progress={value!r} shows a bar with tqdm, which is not installed; "
                "pip install tqdm, or give a function of (done, total)"
            )
        return value
    expected = "True, False, a label, or a function of (done, total)"
    if not callable(value):
        raise TypeError(
            f"{site}: progress must be {expected}, got {type(value).__name__} {value!r}"
        )
    name = getattr(value, "__name__", type(value).__name__)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{site}: progress must be hashable because it is part of the key of a compiled "
            f"program, but {name} is not"
        ) from None
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(value)
        try:
            signature.bind(0, 1)
        except TypeError:
            raise TypeError(
                f"{site}: progress must be {expected}, but {name}{signature} cannot be called with "
                "two numbers"
            ) from None
    return value


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of one call."""

    #: The label of a bar, or a function.
    target: Target
    #: On how many devices the loop runs; each of its items counts once per device.
    parts: int = 1

    def of_parts(self, count: int) -> "Progress":
        """Return the progress of a call whose loop runs on so many devices."""
        return dataclasses.replace(self, parts=count)

    def reports(self, length: int, size: int, steps: int) -> Any:
        """Return the reports of a loop over ``length`` items, ``size`` in each step."""
        report = importlib.import_module("rankax.ext.progress.report")  # which imports this file
        return report.Reports(self, length, size, steps)


_has_progress = ContextVar("rankax_has_progress", default=False)


@contextlib.contextmanager
def progress_of_call(option: bool | Target, name: str) -> Generator[Progress | None]:
    """Enter a call of ``name``; yield its progress, or None if it is off or an outer call has one.

    Only the outermost loop reports: the calls that a kernel makes in turn do not.
    """
    if option is False or _has_progress.get():
        yield None
        return
    token = _has_progress.set(True)
    try:
        with wait_for_reports(option, name) as progress:
            yield progress
    finally:
        _has_progress.reset(token)


@contextlib.contextmanager
def wait_for_reports(option: bool | Target, name: str) -> Generator[Progress | None]:
    """Wait for the last report of an eager call; if the call fails, close its bar."""
    if option is False:
        yield None
        return
    target = name if isinstance(option, bool) else option
    try:
        yield Progress(target)
        if not is_staged():
            jax.effects_barrier()
    except BaseException:
        _close(target)
        raise


class _Display:
    """The bar or function that shows one pass over the items of a loop."""

    def __init__(self, target: Target, total: int) -> None:
        self._total, self._done, self._updated = total, 0, time.monotonic()
        self._target: Any = target
        self._bar: Any = None
        if isinstance(target, str):
            # `update` decides instead of `mininterval` when to show a number.
            options = {"unit": " items", "unit_scale": True, "mininterval": 0}
            bars = importlib.import_module("tqdm.auto")
            self._bar = bars.tqdm(desc=target, total=total, **options)
        else:
            target(0, total)

    def update(self, done: int) -> None:
        """Show a larger number than before, unless the last update was a moment ago."""
        now = time.monotonic()
        if done <= self._done or (done < self._total and now - self._updated < _SECONDS):
            return
        if self._bar is None:
            self._target(done, self._total)
        else:
            self._bar.update(done - self._done)
        self._done, self._updated = done, now

    def close(self) -> None:
        """Leave a bar as it is; a function needs nothing."""
        if self._bar is not None:
            self._bar.close()


_lock = threading.RLock()
_displays: dict[Target, _Display] = {}


def show(target: Target, done: int, total: int) -> None:
    """Show one report, in the first process only."""
    if jax.process_index():
        return
    with _lock:
        try:
            if done == 0:
                _close(target)
                _displays[target] = _Display(target, total)
            elif display := _displays.get(target):
                display.update(done)
                if done >= total:
                    _close(target)
        except BaseException:
            _close(target)
            raise


def _close(target: Target) -> None:
    with _lock:
        if display := _displays.pop(target, None):
            display.close()


@atexit.register
def _close_all() -> None:
    for target in list(_displays):
        _close(target)
