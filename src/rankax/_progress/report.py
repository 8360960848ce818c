# SPDX-License-Identifier: MIT
"""Progress of a loop: reports from a compiled program, and the bar or function that gets them.

A loop reports at the start of a step how many items are done, and behind its end. Nothing but data
orders these reports, and XLA knows what a loop counts. So a number that has to be computed first
goes along where that matters: behind the end, and in the reverse pass, where all counts are known
in advance. Two primitives do it:

* ``rankax_report`` calls back. It is one of ours, and not `jax.debug.callback` itself, for that
  would be called once for each lane where what it is given is mapped, and a second time where a
  `jax.checkpoint` around the loop recomputes it. It also costs more.
* ``rankax_reverse`` hands arrays on as they are; where it is transposed, it reports. It stands in
  the path of the tangents only, so that a program that is not transposed is left without it.

Neither is there where no progress is asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from rankax._base.arrays import is_staged, scalar

__all__ = ["Progress", "Reports", "checked_progress", "told", "until_done"]

T = TypeVar("T")

Given = bool | str | Callable[[int, int], object]

_MOST_REPORTS = 200  # of one loop, for each costs a fifth of a millisecond
_SECONDS = 0.1  # between two updates of a bar


# What is asked for.


def checked_progress(value: Any, where: str) -> Given:
    """Return ``value``, or say what is wrong; a bar needs tqdm."""
    if value is False:
        return value
    if value is True or isinstance(value, str):
        if value == "":
            raise ValueError(f"{where}: progress must not be an empty label; True shows the name")
        try:
            importlib.import_module("tqdm.auto")
        except ImportError:
            raise ImportError(
                f"{where}: progress={value!r} shows a bar by tqdm, which is not installed; "
                'pip install "rankax[progress]", or give a function of (done, total)'
            ) from None
        return value
    expected = "True, False, a label, or a function of (done, total)"
    if not callable(value):
        raise TypeError(
            f"{where}: progress must be {expected}, got {type(value).__name__} {value!r}"
        )
    name = getattr(value, "__name__", type(value).__name__)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{where}: progress must be hashable, for compiled programs are found by it, but "
            f"{name} is not"
        ) from None
    try:
        inspect.signature(value).bind(0, 1)
    except TypeError:
        raise TypeError(
            f"{where}: progress must be {expected}, but {name}{inspect.signature(value)} cannot be "
            "called with two numbers"
        ) from None
    except ValueError:  # a builtin that has no signature
        pass
    return value


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where the progress of a call goes: the label of a bar, or a function."""

    to: str | Callable[[int, int], object]
    #: How many parts of the batch are walked side by side, each item of a loop standing for one.
    parts: int = dataclasses.field(default=1, compare=False)


_is_told = ContextVar("rankax_is_told", default=False)


@contextlib.contextmanager
def told(value: Given, name: str, parts: int = 1) -> Generator[Progress | None]:
    """Give the progress of a call of ``name``; none inside a call that has one already."""
    if value is False or _is_told.get():
        yield None
        return
    token = _is_told.set(True)
    try:
        with until_done(value, name):
            yield dataclasses.replace(_progress(value, name), parts=parts)
    finally:
        _is_told.reset(token)


@contextlib.contextmanager
def until_done(value: Given, name: str) -> Generator[None]:
    """Wait for the last report where a call is evaluated now; close its bar if it fails."""
    try:
        yield
        if value is not False and not is_staged():
            jax.effects_barrier()
    except BaseException:
        if value is not False:
            _close(_progress(value, name))
        raise


def _progress(value: Given, name: str) -> Progress:
    return Progress(name if isinstance(value, bool) else value)


# What a loop reports.


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One pass over the items of a loop."""

    progress: Progress
    total: int
    is_reverse: bool

    def at(self, done: Any, *_: Any) -> None:
        """Say that so many items are done. A number of NumPy or JAX comes."""
        _tell(self, int(done) * self.progress.parts)

    def end(self, *_: Any) -> None:
        """Say that all items are done."""
        _tell(self, self.total)


@dataclasses.dataclass(frozen=True)
class Reports:
    """The reports of one loop over ``length`` items, ``size`` of them at each of ``steps``."""

    progress: Progress
    length: int
    size: int
    steps: int

    @property
    def _total(self) -> int:
        return self.length * self.progress.parts

    @property
    def _every(self) -> int | None:
        """How many items lie between two reports; None where each step reports."""
        stride = -(-self.steps // _MOST_REPORTS)
        return None if stride <= 1 else stride * self.size

    def at(self, done: jax.Array) -> None:
        """Report from a step before which ``done`` items are done."""
        forward = _Pass(self.progress, self._total, is_reverse=False)
        _report.bind(done, call=forward.at, every=self._every, size=self.size)

    def end(self, done: jax.Array, outputs: Any) -> None:
        """Report that the loop is over, which returned these."""
        forward = _Pass(self.progress, self._total, is_reverse=False)
        after = _one_number(jax.tree.leaves(outputs))
        _report.bind(done, *after, call=forward.end, every=None, size=self.size)

    def on_the_way_back(self, done: jax.Array, tree: T) -> T:
        """Let the reverse pass of this step report; what it returns is ``tree``."""
        return self._passed(done, tree, is_end=False)

    def behind_the_way_back(self, tree: T) -> T:
        """Let the reverse pass report its end, where it has the cotangent of ``tree``."""
        return self._passed(scalar(0, jnp.int32), tree, is_end=True)

    def _passed(self, done: jax.Array, tree: T, *, is_end: bool) -> T:
        leaves, structure = jax.tree.flatten(tree)
        moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if moving:
            passed = _reverse.bind(done, *(leaves[i] for i in moving), reports=self, is_end=is_end)
            for i, leaf in zip(moving, passed, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)

    def came_back(self, done: jax.Array, cotangents: Sequence[jax.Array], *, is_end: bool) -> None:
        """Report from the reverse pass, which has these cotangents now."""
        reverse = _Pass(self.progress, self._total, is_reverse=True)
        after = _one_number(cotangents)
        if is_end:
            _report.bind(done, *after, call=reverse.end, every=None, size=self.size)
            return
        # The reverse pass has behind it what was in front of this step.
        left = done.dtype.type(self.length - self.size) - done
        _report.bind(left, *after, call=reverse.at, every=self._every, size=self.size)


def _one_number(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return a number that cannot be there before one of the leaves is; nothing if all are empty.

    A pass through all of them, where axes of a mesh are explicit, for it refuses to be sliced.
    """
    for x in leaves:
        if not x.size or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            continue
        if _is_explicit():
            return [jnp.sum(x)]
        return [lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))]
    return []


def _is_explicit() -> bool:
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


_report = jax.extend.core.Primitive("rankax_report")
_report.multiple_results = True


@functools.cache
def _effects() -> Any:
    """Return what JAX notes of a callback whose order does not matter."""
    return jax.make_jaxpr(lambda: jax.debug.callback(print))().effects


@_report.def_effectful_abstract_eval
def _(*_: Any, **__: Any) -> tuple[list[Any], Any]:
    return [], _effects()


_report.def_impl(lambda *args, **params: jax.jit(functools.partial(_report.bind, **params))(*args))


def _when_due(done: jax.Array, *after: Any, call: Any, every: int, size: int) -> list[Any]:
    number = done.dtype.type
    report = functools.partial(_report.bind, call=call, every=None, size=size)
    lax.cond(done % number(every) < number(size), report, lambda *_: [], done, *after)
    return []


def _by_jax(*args: Any, call: Any, **_: Any) -> list[Any]:
    jax.debug.callback(call, *args)
    return []


def _report_lowering(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
    """Call back, on one device without what `jax.debug.callback` does around the call.

    That makes an array of JAX of each number, which between chunks that fill the caches takes a
    millisecond instead of a fifth of one. Who of several devices calls is for JAX to decide.
    """
    if params["every"] is not None:
        return mlir.lower_fun(_when_due, multiple_results=True)(ctx, *args, **params)
    if getattr(ctx.module_context.axis_context, "num_devices", None) != 1:
        return mlir.lower_fun(_by_jax, multiple_results=True)(ctx, *args, **params)

    def call(*numbers: Any) -> tuple[()]:
        params["call"](*numbers)
        return ()

    emit: Any = mlir.emit_python_callback  # its types are narrower than those of a context
    return emit(ctx, call, None, args, ctx.avals_in, ctx.avals_out, has_side_effect=True)[0]


mlir.register_lowering(_report, _report_lowering)


def _report_of_one_lane(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Report once for all lanes of a `jax.vmap`, which walk together."""
    pairs = list(zip(args, dims, strict=True))
    if all(dim is None or x.shape[dim] for x, dim in pairs):
        _report.bind(*(x if dim is None else _of_one_lane(x, dim) for x, dim in pairs), **params)
    return [], []


def _of_one_lane(x: jax.Array, dim: int) -> jax.Array:
    if _is_explicit():
        return jnp.sum(x, dim)
    return lax.index_in_dim(x, 0, dim, keepdims=False)


def _report_of_primals(primals: Sequence[Any], _: Sequence[Any], **params: Any) -> Any:
    _report.bind(*primals, **params)
    return [], []


batching.primitive_batchers[_report] = _report_of_one_lane
ad.primitive_jvps[_report] = _report_of_primals


_reverse = jax.extend.core.Primitive("rankax_reverse")
_reverse.multiple_results = True


@_reverse.def_impl
def _same(done: Any, *leaves: Any, reports: Reports, is_end: bool) -> list[Any]:
    del done, reports, is_end
    return list(leaves)


_reverse.def_abstract_eval(_same)
mlir.register_lowering(_reverse, mlir.lower_fun(_same, multiple_results=True))


def _reverse_of_lanes(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    done, *leaves = args
    if dims[0] is not None:
        done = lax.index_in_dim(done, 0, dims[0], keepdims=False)
    return _reverse.bind(done, *leaves, **params), list(dims[1:])


def _reverse_of_tangents(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    passed = list(tangents[1:])
    live = [i for i, tangent in enumerate(passed) if not isinstance(tangent, ad.Zero)]
    moved = _reverse.bind(primals[0], *(passed[i] for i in live), **params)
    for i, tangent in zip(live, moved, strict=True):
        passed[i] = tangent
    return list(primals[1:]), passed


def _reverse_transposed(
    cotangents: Sequence[Any], done: Any, *leaves: Any, reports: Reports, is_end: bool
) -> list[Any]:
    live = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    if live:
        reports.came_back(done, live, is_end=is_end)
    pairs = zip(leaves, cotangents, strict=True)
    return [None, *(ct if ad.is_undefined_primal(x) else None for x, ct in pairs)]


def _reverse_of_used(used: list[bool], *others: Any) -> tuple[list[bool], Any]:
    """Leave out arrays that nobody uses, so that nothing is computed for them."""
    eqn = others[-1]  # JAX 0.12 puts something between
    if not any(used):
        return [False] * len(eqn.invars), None
    keep = [True, *used]
    invars = [v for v, is_used in zip(eqn.invars, keep, strict=True) if is_used]
    outvars = [v for v, is_used in zip(eqn.outvars, used, strict=True) if is_used]
    return keep, eqn.replace(invars=invars, outvars=outvars)


batching.primitive_batchers[_reverse] = _reverse_of_lanes
ad.primitive_jvps[_reverse] = _reverse_of_tangents
ad.primitive_transposes[_reverse] = _reverse_transposed
pe.dce_rules[_reverse] = _reverse_of_used


# Who hears of it, on the host.


class _Run:
    """A pass that runs now, and its bar if it has one."""

    def __init__(self, of: _Pass) -> None:
        self.of = of
        self.done = -1
        self._last = -float("inf")
        self._bar: Any = None
        to = of.progress.to
        if isinstance(to, str):
            self._bar = importlib.import_module("tqdm.auto").tqdm(
                desc=f"{to} (reverse)" if of.is_reverse else to,
                total=of.total,
                unit=" items",
                unit_scale=True,
                mininterval=0,  # which updates there are is decided here
            )

    def show(self, done: int) -> None:
        """Show a number that is larger than those before, but not too often."""
        now = time.monotonic()
        if done <= self.done or (now - self._last < _SECONDS and done < self.of.total):
            return
        if self._bar is not None:
            if done:  # a new bar is drawn as it is
                self._bar.update(done - max(self.done, 0))
        elif callable(self.of.progress.to):
            self.of.progress.to(done, self.of.total)
        self.done, self._last = done, now

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


_lock = threading.RLock()
_runs: dict[tuple[Progress, bool], _Run] = {}


@functools.cache
def _is_first_process() -> bool:
    return jax.process_index() == 0


def _tell(of: _Pass, done: int) -> None:
    """Take one report; 0 begins a new run.

    A reverse pass may begin later, for what nothing depends on has no reverse pass.
    """
    if not _is_first_process():
        return
    with _lock:
        key = of.progress, of.is_reverse
        try:
            run = _runs.get(key)
            if done == 0 or (run is None and of.is_reverse and done < of.total):
                run = _begin(of)
            if run is None:  # it was closed when the call failed
                return
            run.show(done)
            if done >= of.total:
                _close(of.progress, of.is_reverse)
        except BaseException:
            _close(of.progress, of.is_reverse)
            raise


def _begin(of: _Pass) -> _Run:
    """Begin a pass, and end what was before it."""
    if of.is_reverse and (forward := _runs.get((of.progress, False))):
        forward.show(forward.of.total)  # XLA may put off the report of its end
    _close(of.progress)
    run = _runs[of.progress, of.is_reverse] = _Run(of)
    return run


def _close(progress: Progress, *which: bool) -> None:
    """Close the bars of a call, if they are open."""
    with _lock:
        for is_reverse in which or (False, True):
            if run := _runs.pop((progress, is_reverse), None):
                run.close()


@atexit.register
def _close_all() -> None:
    for progress, _ in list(_runs):
        _close(progress)
