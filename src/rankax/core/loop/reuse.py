# SPDX-License-Identifier: MIT
"""Eager calls reuse compiled programs, which are looked up by what their kernel computes.

Outside `jax.jit`, a kernel is traced at each call: only a new trace sees that a number, an array or
a function that the kernel uses has changed. Tracing is cheap, but JAX compiles a new loop for every
new trace, because its caches identify programs by object. A key made of the kernel and its shapes
would be stale as soon as a global changes. So the program of a whole call is looked up (`run_kept`)
by the fingerprint of the traced program of one item (`core/trace/fingerprint.py`) and by the key of
the call: its plan without chunks, its options and its parts (`core/call/run.py`). Arrays that the
kernel closes over are inputs of that program: they may change, and are not kept alive.

The scans of `ext/scan` keep their programs here, too. ``jit=True`` (`ext/jit.py`) and blocks
(`ext/blocks/programs.py`) keep theirs in their own ways.

Under tracers of `jax.grad`, `jax.jvp` or `jax.vmap`, a kept program is called as well: JAX looks up
the derivatives of a compiled function by its identity. The kernel must then use no derivative rules
of its own, because rules are functions, which cannot be compared.

Each kept program is a function of its own for `jax.jit`, which compares everything else on which
the compilation depends: shapes, devices, contexts, the configuration of JAX.

A call that is not eager, or whose program cannot be compared, takes the uncached path. Where rules
are what cannot be compared, a warning says so when the same derivative is compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType

from rankax.core.base.arrays import is_ref, is_staged
from rankax.core.base.cache import Kept, switch
from rankax.core.base.messages import caller_level
from rankax.core.trace import fingerprint
from rankax.core.trace.programs import ItemProgram


class Mode(enum.Enum):
    """How a call is evaluated."""

    EAGER = "now"
    TRANSFORMED = "now, under tracers of `jax.grad`, `jvp` or `vmap` only"
    STAGED = "later, as part of a program that is being traced; or uncached"


# A program as a function of the program of one item and of arrays.
Program = Callable[[ItemProgram, list[Any]], Any]

_MOST_KEPT = 128  # compiled loops, of one or two megabytes each


def mode_of(arrays: Sequence[Any], *, on_mesh: bool = False) -> Mode:
    """Return how a call with these arrays is evaluated; ``on_mesh``: its parts have a mesh."""
    # On a mesh with explicit axes, arrays made inside `jax.jit` have types that arrays from outside
    # lack.
    # JAX cannot differentiate a call of `jax.jit` that keeps a `jax.Ref` for its reverse pass.
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if is_staged() or (is_explicit and not on_mesh) or any(map(is_ref, arrays)):
        return Mode.STAGED
    tracers = [x for x in arrays if isinstance(x, core.Tracer)]
    if not tracers:
        return Mode.EAGER
    of_jax = all(type(x).__module__.partition(".")[0] == "jax" for x in tracers)
    return Mode.TRANSFORMED if of_jax else Mode.STAGED


def run_kept(
    make: Callable[[], Program | None],
    item: ItemProgram,
    leaves: Sequence[Any],
    key: Hashable,
    mode: Mode,
    compiled: Callable[[Any, Sequence[Any]], Any],
) -> Any:
    """Return ``make()(item, leaves)``, which is compiled and kept unless the call is staged.

    What ``make`` returns holds no object of the caller, and follows from the item, the key and the
    mode; None stands for a call that has no such program, and so do the results. With a key of
    None, the program is compiled but not kept. ``compiled`` is `jax.jit`, which also gets the
    arguments of the function. Inside `checking`, an eager call that finds a program also compiles
    a new one, and compares the results.
    """
    if mode is Mode.STAGED:
        program = make()
        return program and program(item.whole, list(leaves))
    closed = fingerprint.opened(item.closed)
    # The transfer guard of JAX permits to put NumPy arrays on the device explicitly.
    consts = [*item.read, *closed.consts]
    consts = [x if isinstance(x, jax.Array) else jax.device_put(x) for x in consts]
    args = consts, list(leaves)
    try:
        whole = _key_of(closed, (item.site, item.out_axes, item.how, key), leaves, mode)
    except fingerprint.Unknown:
        run = _compiled(make(), item, _same, args, compiled)
    else:
        bare = fingerprint.without_rules if mode is Mode.EAGER else fingerprint.without_constants

        def new() -> Any:
            return _compiled(make(), item, bare, args, compiled)

        made: list[Any] = []
        run = _kept.get_or_make(whole, lambda: made.append(new()) or made[0])
        if run and not made and mode is Mode.EAGER and _checks.get():
            return _checked(run(*args), new()(*args), item)
    return run and run(*args)


_CHECKS = switch("RANKAX_CHECK", default=False)
_checks: ContextVar[bool] = ContextVar("rankax_checks", default=_CHECKS)


@contextlib.contextmanager
def checking(value: bool) -> Generator[None]:
    """Enter a scope in which calls that reuse a program compare it with a new one, or do not."""
    token = _checks.set(value)
    try:
        yield
    finally:
        _checks.reset(token)


def _checked(kept: Any, new: Any, item: ItemProgram) -> Any:
    """Return results of a kept program if a new one has the same, bit for bit."""
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(new), strict=True)
    for place, (x, y) in enumerate(pairs):
        if _bits(x) != _bits(y):
            names = item.out_names
            name = names[place] if place < len(names) else f"output {place}"
            raise RuntimeError(
                f"{item.site}: the compiled program of an earlier call was taken for that of this "
                f"one, but its {name}, {jax.typeof(x)}, differs from that of a new program, "
                f"{jax.typeof(y)}; please report it with the kernel. rankax.clear_caches() forgets "
                "the earlier program"
            )
    return kept


def _bits(x: Any) -> tuple[Any, ...]:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    return x.shape, x.dtype, np.asarray(x).tobytes()


def _same(jaxpr: Jaxpr) -> Any:
    return jaxpr


def _key_of(
    closed: ClosedJaxpr, of_call: tuple[Any, ...], leaves: Sequence[Any], mode: Mode
) -> _Key:
    """Return the key of a program that can be compared."""
    if of_call[-1] is None:
        raise fingerprint.Unknown
    key = fingerprint.fingerprint(closed), *of_call
    rules = None
    if mode is Mode.TRANSFORMED:
        try:
            rules = fingerprint.derivatives_key(closed.jaxpr)
        except fingerprint.UnknownRule:
            _warn_if_compiled_again(_Key(key), [*leaves, *closed.consts])
            raise
    return _Key((*key, mode, rules))


def _compiled(
    program: Program | None,
    item: ItemProgram,
    bare: Callable[[Any], Any],
    args: Sequence[Any],
    compiled: Any,
) -> Any:
    if program is None:
        return None
    item = item.whole
    closed = fingerprint.opened(item.closed)
    jaxpr, more = bare(closed.jaxpr), closed.consts[len(args[0]) :]
    # Without the constants, and the tree, which may hold user-defined classes.
    item = dataclasses.replace(item, closed=None, out_tree=None)

    def run(consts: list[Any], leaves: list[Any]) -> Any:
        closed = ClosedJaxpr(jaxpr, [*consts, *more])
        return program(dataclasses.replace(item, closed=closed), leaves)

    return compiled(run, args)


class _Key:
    """A key whose hash is computed once."""

    def __init__(self, value: Hashable) -> None:
        self._value = value
        try:
            self._hash = hash(value)
        except TypeError:  # such as a sink that calls user-defined functions
            raise fingerprint.Unknown from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value


_kernel = ContextVar("rankax_kernel", default="a kernel")


@contextlib.contextmanager
def call_of_kernel(site: str) -> Generator[None]:
    """Enter a call of the kernel at ``site``, whose loops belong to functions of this library."""
    token = _kernel.set(site)
    try:
        yield
    finally:
        _kernel.reset(token)


def kernel_of_call() -> str:
    """Return the kernel that is called, and its source line."""
    return _kernel.get()


def warn_once(kind: str, text: str) -> None:
    """Warn of the kernel that is called, once for each kind of warning."""
    site = kernel_of_call()
    if not next(_warnings.get_or_make((kind, site), itertools.count)):
        warnings.warn(f"{site}: {text}", stacklevel=caller_level())


def _warn_if_compiled_again(key: _Key, arrays: Sequence[Any]) -> None:
    """Warn when the derivative of a program of this key is compiled again."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir or config.jax_disable_jit:
        return  # JAX finds it in a file, or compiles nothing
    kinds = tuple((jax.typeof(x), *_transforms(x)) for x in arrays)
    if next(_compilations.get_or_make((key, kinds), itertools.count)):
        warn_once(
            "compiled again",
            "outside jax.jit, its derivative (or vmap) in chunks is compiled at every call, "
            "because it uses a jax.custom_jvp or jax.custom_vjp function or a checkpoint policy, "
            "which may have changed; call it inside jax.jit, or give auto_vmap jit=True",
        )


def _transforms(x: Any) -> Iterator[type]:
    """Yield the kinds of the tracers around an array, so that derivatives of two orders differ."""
    while isinstance(x, core.Tracer):
        yield type(x)
        x = getattr(x, "primal", getattr(x, "val", None))


_kept: Kept[Any] = Kept(_MOST_KEPT, "programs of eager calls")
_compilations: Kept[Iterator[int]] = Kept(_MOST_KEPT, "derivatives compiled once")
_warnings: Kept[Iterator[int]] = Kept(_MOST_KEPT, "warnings given")
