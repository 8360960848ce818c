# SPDX-License-Identifier: MIT
"""Eager calls reuse compiled loops, which are looked up by what their kernel computes.

Outside `jax.jit`, a kernel is traced at each call: only a new trace sees that a number, an array or
a function that the kernel uses has changed. Tracing is cheap, but JAX compiles a new loop for every
new trace, because its caches identify programs by object. A key made of the kernel and its shapes
would be stale as soon as a global changes. So a loop is looked up by the fingerprint of the traced
program of one item (`_trace/fingerprint.py`), its `LoopSpec` and its sink. Arrays that the kernel
closes over are inputs of that loop: they may change, and are not kept alive.

A call over sharded parts is kept as a whole (`run_kept`). ``jit=True`` (`_front/jit.py`) and blocks
(`_blocks/programs.py`) keep their programs in their own ways.

Under tracers of `jax.grad`, `jax.jvp` or `jax.vmap`, a kept loop is called as well: JAX looks up
the derivatives of a compiled function by its identity. The kernel must then use no derivative rules
of its own, because rules are functions, which cannot be compared.

Each kept loop is a function of its own for `jax.jit`, which compares everything else on which the
compilation depends: shapes, devices, contexts, the configuration of JAX.

A call that is not eager, or whose program cannot be compared, takes the uncached path. Where rules
are what cannot be compared, a warning says so when the same derivative is compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax import core

from rankax._base.arrays import is_staged
from rankax._base.cache import Kept
from rankax._base.functions import caller_level
from rankax._loop.loop import map_in_chunks
from rankax._loop.sinks import Sink
from rankax._loop.spec import LoopSpec
from rankax._trace.fingerprint import (
    Unknown,
    UnknownRule,
    derivatives_key,
    fingerprint,
    opened,
    without_constants,
    without_rules,
)
from rankax._trace.item import ItemProgram
from rankax._trace.programs import ClosedJaxpr

# A program as a function of the program of one item and of arrays.
Program = Callable[[ItemProgram, list[Any]], Any]

_MOST_KEPT = 128  # compiled loops, of one or two megabytes each


def map_chunks(
    item: ItemProgram,
    leaves: Sequence[Any],
    spec: LoopSpec,
    sink: Sink | None = None,
    walk: Callable[..., Any] = map_in_chunks,
) -> Any:
    """Do what `map_in_chunks`, or another ``walk``, does; outside a trace, by a kept loop."""
    arrays = [*leaves, *item.closed.consts]
    is_now = is_eager(arrays)
    kept = None
    if is_now:  # not differentiated, so nothing is ever recomputed
        spec = dataclasses.replace(spec, checkpoint=False, linear=True)
    if is_now or _is_transformed(arrays):
        bare = dataclasses.replace(item, out_tree=None)  # it may hold user-defined classes
        with contextlib.suppress(Unknown):
            kept = _find(
                lambda item, leaves: walk(item, leaves, spec, sink),
                bare,
                leaves,
                (spec, sink, walk),
                differentiable=not is_now,
            )
    try:
        if kept is None:
            return walk(item, leaves, spec, sink)
        loop, consts = kept
        return loop(consts, list(leaves))
    except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
        raise item.reuses_key() from error


def run_kept(program: Program, item: ItemProgram, leaves: Sequence[Any], key: Hashable) -> Any:
    """Return ``program(item, leaves)``; if the call is eager, compiled and kept.

    ``program`` holds no object of the caller, and equal keys stand for equal programs. With a key
    of None, it is compiled but not kept.
    """
    arrays = [*leaves, *item.closed.consts]
    is_now = _is_evaluated(arrays)
    if not is_now and not _is_transformed(arrays):
        return program(item, list(leaves))
    try:
        run, consts = _find(program, item, leaves, key, differentiable=not is_now)
    except Unknown:
        run, consts = _compiled(program, item, item.closed.jaxpr), _on_device(item.closed.consts)
    return run(consts, list(leaves))


def is_eager(arrays: Sequence[Any]) -> bool:
    """Whether a call with these arrays is evaluated now, and not transformed."""
    return _is_evaluated(arrays) and not _is_explicit()


def _is_transformed(arrays: Sequence[Any]) -> bool:
    """Whether such a call is evaluated now, under tracers of `jax.grad`, `jvp` or `vmap` only."""
    tracers = [x for x in arrays if isinstance(x, core.Tracer)]
    of_jax = all(type(x).__module__.partition(".")[0] == "jax" for x in tracers)
    return of_jax and not _is_explicit() and not is_staged()


def _is_explicit() -> bool:
    # On a mesh with explicit axes, arrays made inside `jax.jit` have types that arrays from outside
    # lack.
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _is_evaluated(arrays: Sequence[Any]) -> bool:
    return not (any(isinstance(x, core.Tracer) for x in arrays) or is_staged())


def _find(
    program: Program,
    item: ItemProgram,
    leaves: Sequence[Any],
    key: Hashable,
    *,
    differentiable: bool = False,
) -> tuple[Any, list[jax.Array]]:
    """Return the kept program as a function of constants and leaves, and the current constants."""
    if key is None:
        raise Unknown
    closed = opened(item.closed)
    jaxpr = closed.jaxpr
    of_call = fingerprint(closed), item.where, item.out_axes, item.out_tree, key
    rules = None
    if differentiable:
        try:
            rules = derivatives_key(jaxpr)
        except UnknownRule:
            _warn_if_compiled_again(_Key(of_call), [*leaves, *closed.consts])
            raise
    whole = _Key((*of_call, rules))
    bare = without_constants if differentiable else without_rules
    run = _kept.find(whole, lambda: _compiled(program, item, bare(jaxpr)))
    return run, _on_device(closed.consts)


def _compiled(program: Program, item: ItemProgram, jaxpr: Any) -> Any:
    bare = dataclasses.replace(item, closed=None)  # without the constants

    def run(consts: list[Any], leaves: list[Any]) -> Any:
        return program(dataclasses.replace(bare, closed=ClosedJaxpr(jaxpr, consts)), leaves)

    return jax.jit(run)


def _on_device(consts: Sequence[Any]) -> list[jax.Array]:
    """Put NumPy arrays on the device explicitly, which the transfer guard of JAX permits."""
    return [const if isinstance(const, jax.Array) else jax.device_put(const) for const in consts]


class _Key:
    """A key whose hash is computed once."""

    def __init__(self, value: Hashable) -> None:
        self._value = value
        try:
            self._hash = hash(value)
        except TypeError:  # such as a sink that calls user-defined functions
            raise Unknown from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value


_kernel = ContextVar("rankax_kernel", default="a kernel")


@contextlib.contextmanager
def call_of_kernel(where: str) -> Generator[None]:
    """Enter a call of the kernel at ``where``, whose loops belong to functions of this library."""
    token = _kernel.set(where)
    try:
        yield
    finally:
        _kernel.reset(token)


def _warn_if_compiled_again(key: _Key, arrays: Sequence[Any]) -> None:
    """Warn, once per kernel, when the derivative of a program of this key is compiled again."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir or config.jax_disable_jit:
        return  # JAX finds it in a file, or compiles nothing
    kinds = tuple((jax.typeof(x), *_transforms(x)) for x in arrays)
    is_again = next(_compilations.find((key, kinds), itertools.count))
    if is_again and not next(_warnings.find(where := _kernel.get(), itertools.count)):
        warnings.warn(
            f"{where}: outside jax.jit, its derivative (or vmap) in chunks is compiled at every "
            "call, because it uses a jax.custom_jvp or jax.custom_vjp function or a checkpoint "
            "policy, which may have changed; call it inside jax.jit, or give auto_vmap jit=True",
            stacklevel=caller_level(),
        )


def _transforms(x: Any) -> Iterator[type]:
    """Yield the kinds of the tracers around an array, so that a second derivative is another."""
    while isinstance(x, core.Tracer):
        yield type(x)
        x = getattr(x, "primal", getattr(x, "val", None))


_kept: Kept[Any] = Kept(_MOST_KEPT)
_compilations: Kept[Iterator[int]] = Kept(_MOST_KEPT)
_warnings: Kept[Iterator[int]] = Kept(_MOST_KEPT)
