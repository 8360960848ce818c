# SPDX-License-Identifier: MIT
"""``progress=``: a loop reports how many of its items are done, and a bar or a function shows it.

An observer that the caller passes takes the place of `Progress`, of its reports and its display.

A loop reports before each step, or every few steps, and after the last one. The number is the index
at which the chunk starts, which the loop carries, times the number of devices that the batch is cut
over (`rankax.pipeline`). The total is the length of the loop times that number. Lanes count
the items that have ended instead (`ext/lanes/call.py`). Only the outermost loop reports.

Only data dependencies order the reports, and the final count does not depend on the loop's work. So
the last report also takes a number from the outputs, and cannot come early.

The primitive ``rankax_report`` becomes a `jax.debug.callback` when it is lowered. Used directly, a
debug callback would report again where a derivative recomputes a step (`jax.checkpoint`), as both
scans do, and once per lane of a `jax.vmap`.

The reverse pass of a gradient does not report. A report there would have to be part of the
transposed program, which takes a second primitive with rules for batching, tangents, transposition
and dead code.

A call has one target, a label or a function. Reports come from the threads of the runtime, and
those of an earlier call may still come when the next one with the same target begins, or after a
call has failed. So there is one display per target: a report of 0 opens it and closes the one
before it, and reports without an open display are dropped.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, Self

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from rankax.core.base.arrays import is_staged
from rankax.core.plan.schedule import Plan, is_known
from rankax.core.protocols import Observer

Target = str | Callable[[int, int], object]
ProgressOption = bool | Target | Observer

_SECONDS = 0.1  # between two updates of a display
# Of one loop. A debug callback costs 0.2 to 0.7 ms on a CPU whose caches hold a chunk's data, up to
# 1 ms at worst. So a pass spends at most 50 ms on its reports: 1 % or less where 500 chunks take
# 10 ms each. A loop of fewer steps reports each of them, because its steps may take minutes.
_MOST_REPORTS = 50


def checked_progress(value: Any, site: str) -> ProgressOption:
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
    expected = (
        "True, False, a label, a function of (done, total), or an observer with the methods "
        "of_parts and reports"
    )
    if not callable(value) and not _is_observer(value):
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
    if _is_observer(value):
        return value
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


def _is_observer(value: Any) -> bool:
    return isinstance(value, Observer) and not isinstance(value, type)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of one call, and the reports of its loop."""

    #: The label of a bar, or a function.
    target: Target
    #: On how many devices the loop runs; each of its items counts once per device.
    parts: int = 1
    #: How many items the loop has, how many one step takes, and how many steps there are.
    length: int = 0
    size: int = 1
    steps: int = 0
    #: What a bar counts: the named axes of the loop, or items.
    unit: str = "items"

    def of_parts(self, count: int) -> Self:
        """Return the progress of a call whose loop runs on so many devices."""
        return dataclasses.replace(self, parts=count)

    def reports(self, length: int, size: int, steps: int) -> Self:
        """Return the reports of a loop over ``length`` items, ``size`` in each step."""
        if not is_known(length):
            raise ValueError(
                f"progress= counts the items, but the batch has the unknown length {length}; leave "
                "it out, or export a known length"
            )
        return dataclasses.replace(self, length=length, size=size, steps=steps)

    def step(self, done: jax.Array) -> None:
        """Report from a step, before which ``done`` items are done."""
        _report.bind(done, reports=self, is_end=False)

    def end(self, done: jax.Array, outputs: Any) -> None:
        """Report the end of the loop, which returned ``done`` and ``outputs``."""
        _report.bind(done, *_one_number(jax.tree.leaves(outputs)), reports=self, is_end=True)

    def show(self, done: Any) -> None:
        """Show on the host that ``done`` items are done, on each device."""
        show(self.target, int(done) * self.parts, self.length * self.parts, self.unit)


def naming_axes(observer: Any, plan: Plan) -> Any:
    """Return the observer of a call; a bar counts by the name of the axis of the loop."""
    loop = next((level for level in plan.levels if level.is_loop), None)
    unnamed = len(plan.batch_shape) - len(plan.names)
    if loop is None or not isinstance(observer, Progress) or min(loop.axes) < unnamed:
        return observer
    return dataclasses.replace(observer, unit=" ".join(plan.words[axis] for axis in loop.axes))


_has_progress = ContextVar("rankax_has_progress", default=False)


@contextlib.contextmanager
def progress_of_call(option: ProgressOption, name: str) -> Generator[Any]:
    """Enter a call of ``name``; yield its observer, or None if it is off or an outer call has one.

    Only the outermost loop reports: the calls that a kernel makes in turn do not.
    """
    if option is False or _has_progress.get():
        yield None
        return
    token = _has_progress.set(True)
    try:
        with wait_for_reports(option, name) as observer:
            yield observer
    finally:
        _has_progress.reset(token)


@contextlib.contextmanager
def wait_for_reports(option: ProgressOption, name: str) -> Generator[Any]:
    """Wait for the last report of an eager call; if the call fails, close its bar."""
    if option is False:
        yield None
        return
    observer = option
    if not isinstance(option, Observer):
        observer = Progress(name if isinstance(option, bool) else option)
    try:
        yield observer
        if not is_staged():
            jax.effects_barrier()
    except BaseException:
        if isinstance(observer, Progress):
            _close(observer.target)
        raise


# What a program reports.


def _one_number(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return a number that depends on a leaf; nothing if all leaves are empty."""
    for x in leaves:
        if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return [_first(x, *range(x.ndim))]
    return []


def _first(x: jax.Array, *axes: int) -> jax.Array:
    """Return what is first along some axes.

    On a mesh with explicit axes it is a sum, because such an array cannot be sliced.
    """
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jnp.sum(x, axes)
    ends = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
    return lax.squeeze(lax.slice(x, (0,) * x.ndim, ends), axes)


_report = jax.extend.core.Primitive("rankax_report")
_report.multiple_results = True


@_report.def_effectful_abstract_eval
def _(*_: Any, **__: Any) -> tuple[list[Any], Any]:
    return [], _effects()


@functools.cache
def _effects() -> Any:
    """Return the effects of an unordered debug callback, whose type JAX does not export."""
    return jax.make_jaxpr(lambda: jax.debug.callback(print))().effects


@_report.def_impl
def _call_back(done: Any, *after: Any, reports: Progress, is_end: bool) -> list[Any]:
    every = -(-reports.steps // _MOST_REPORTS) * reports.size
    call_back = functools.partial(jax.debug.callback, reports.show)
    if is_end:
        jax.debug.callback(lambda *_: reports.show(reports.length), done, *after)
    elif every == reports.size:
        call_back(done)
    else:
        number = done.dtype.type
        lax.cond(done % number(every) < number(reports.size), call_back, lambda _: None, done)
    return []


def _report_once(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Report once for all lanes of a `jax.vmap`, which run together."""
    pairs = list(zip(args, dims, strict=True))
    if all(dim is None or x.shape[dim] for x, dim in pairs):
        _report.bind(*(x if dim is None else _first(x, dim) for x, dim in pairs), **params)
    return [], []


def _report_primals(primals: Sequence[Any], _: Sequence[Any], **params: Any) -> Any:
    _report.bind(*primals, **params)
    return [], []


mlir.register_lowering(_report, mlir.lower_fun(_call_back, multiple_results=True))
batching.primitive_batchers[_report] = _report_once
ad.primitive_jvps[_report] = _report_primals


# What the host shows.


class _Display:
    """The bar or function that shows one pass over the items of a loop."""

    def __init__(self, target: Target, total: int, unit: str) -> None:
        self._total, self._done, self._updated = total, 0, time.monotonic()
        self._target: Any = target
        self._bar: Any = None
        if isinstance(target, str):
            # `update` decides instead of `mininterval` when to show a number.
            options = {"unit": f" {unit}", "unit_scale": True, "mininterval": 0}
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


def show(target: Target, done: int, total: int, unit: str = "items") -> None:
    """Show one report, in the first process only."""
    if jax.process_index():
        return
    with _lock:
        try:
            if done == 0:
                _close(target)
                _displays[target] = _Display(target, total, unit)
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
