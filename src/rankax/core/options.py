# SPDX-License-Identifier: MIT
"""Options of kernels: their defaults, their checks, and the scope that sets them from outside.

An option is a field of `Options`, with its check, and a key of `Given` or `Scoped`. It is also a
parameter in the overloads of `auto_vmap`, because type checkers cannot read those from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, Literal, Self, TypedDict, Unpack, get_type_hints

from jax.sharding import PartitionSpec

from rankax.core.base.messages import check_bool, checked_int, listed, positive_int
from rankax.core.base.target import Target, is_cpu, target_of
from rankax.core.declare.binding import SYNONYMS
from rankax.core.loop.reuse import checking
from rankax.core.loop.rules import NO_RULES, Rules
from rankax.core.plan.shapes import Bucket, checked_bucket
from rankax.core.reduce.run import Reductions, checked_where, read_reductions
from rankax.ext import cpu_math
from rankax.ext.devices.place import Devices, checked_devices
from rankax.ext.memory.budget import checked_limit
from rankax.ext.progress.bars import checked_progress
from rankax.ext.xla_cpu import rules as xla_cpu

# The checks of values; where None is the default, it is not checked.


AUTO = "auto"  # a chunk size: for a reduction, a bound of its own; otherwise none


def _chunk_size(value: Any, site: str) -> int | str | None:
    is_word = value is None or (isinstance(value, str) and value == AUTO)
    return value if is_word else _number_of_items(value, site)


def _number_of_items(value: Any, site: str) -> int:
    if isinstance(value, str):
        raise TypeError(
            f"{site}: chunk_size must be a positive int, got {value!r}; memory_limit='2 GB' picks "
            "a size that fits the memory, and kernel.tune(...) the fastest one"
        )
    return positive_int(value, site, "chunk_size")


def _reduce_axis(value: Any, site: str) -> int | tuple[int, ...]:
    refusal = f"{site}: reduce_axis must be an int, a tuple of ints, or None, got"
    if isinstance(value, (tuple, list)):
        return tuple(checked_int(axis, refusal) for axis in value)  # pyright: ignore
    return checked_int(value, refusal)


def _batch_shape(value: Any, site: str) -> tuple[int, ...]:
    refusal = f"{site}: batch_shape must be an int or a tuple of ints, none of them negative, got"
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(checked_int(size, refusal, least=0) for size in sizes)  # pyright: ignore


def _compiler_options(value: Any, site: str) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{site}: compiler_options must be a dict, as in jax.jit, got "
            f"{type(value).__name__} {value!r}"
        )
    pairs = tuple(sorted(value.items()))
    for key, setting in pairs:
        if not isinstance(key, str) or not isinstance(setting, (str, bool, int, float)):
            raise TypeError(
                f"{site}: compiler_options must map names to strings, numbers or bools, got "
                f"{key!r}: {setting!r}"
            )
    return pairs


@dataclasses.dataclass(frozen=True)
class Options:
    """All options of one call, with their checks.

    Hashable because `jax.jit` keys its programs on them.
    """

    chunk_size: Annotated[int | Literal["auto"] | None, _chunk_size] = AUTO
    memory_limit: Annotated[int | str | None, checked_limit] = None
    reduce: Annotated[Reductions | None, read_reductions] = None
    reduce_axis: Annotated[int | tuple[int, ...] | None, _reduce_axis] = None
    where: Annotated[str | int | None, checked_where] = None
    batch_shape: Annotated[tuple[int, ...] | None, _batch_shape] = None
    checkpoint: Annotated[bool | None, functools.partial(check_bool, name="checkpoint")] = None
    jit: Annotated[bool, functools.partial(check_bool, name="jit")] = False
    compiler_options: Annotated[tuple[tuple[str, Any], ...] | None, _compiler_options] = None
    progress: Annotated[bool | str | Callable[[int, int], object], checked_progress] = False
    devices: Annotated[Devices, checked_devices] = None
    lockstep: Annotated[bool, functools.partial(check_bool, name="lockstep")] = True
    bucket: Annotated[Bucket, checked_bucket] = False
    batched: Annotated[bool, functools.partial(check_bool, name="batched")] = False
    cpu_math: Annotated[bool, functools.partial(check_bool, name="cpu_math")] = False
    xla_cpu: Annotated[bool, functools.partial(check_bool, name="xla_cpu")] = xla_cpu.DEFAULT
    #: Where the call runs: no option, the arrays say so (`at`). None: where JAX runs by default.
    target: Target | None = None

    def at(self, arrays: Iterable[Any]) -> Self:
        """Return the options of a call with these arrays, which know where it runs."""
        target = self.target or target_of(arrays)
        return self if target == self.target else dataclasses.replace(self, target=target)

    @property
    def on_cpu(self) -> bool:
        """Whether the call runs on a CPU."""
        return is_cpu(self.target)

    @property
    def rules(self) -> Rules:
        """The rules of this call for the compiler."""
        if not (self.xla_cpu and self.on_cpu):
            return NO_RULES
        return xla_cpu.rules_of(self.flags)

    @property
    def flags(self) -> dict[str, Any]:
        """The ``compiler_options``, as `jax.jit` takes them."""
        return dict(self.compiler_options or ())

    @property
    def most(self) -> int | None:
        """The chunk size, if the caller gave one."""
        return None if isinstance(self.chunk_size, str) else self.chunk_size

    @property
    def replaces_functions(self) -> bool:
        """Whether sines, angles and powers are evaluated by programs of our own."""
        return self.cpu_math and cpu_math.HOLDS and self.on_cpu

    def compiled(self, fun: Any, args: Sequence[Any]) -> Any:
        """Return `jax.jit` of a function, to be called with arguments like ``args``."""
        is_bounded = self.most is not None or self.memory_limit is not None
        is_at_once = not (is_bounded or self.devices) and self.lockstep
        rules = self.rules if is_at_once else NO_RULES
        return rules.compiled(fun, args, self.flags)

    def __post_init__(self) -> None:
        if self.where is not None and self.reduce is not None:
            object.__setattr__(self, "reduce", self.reduce.of_items(self.where))
        has_default = self.reduce is not None and self.memory_limit is None and self.lockstep
        if self.chunk_size == AUTO and not has_default:
            object.__setattr__(self, "chunk_size", None)


class Scoped(TypedDict, total=False):
    """The options that a scope can set."""

    chunk_size: int | Literal["auto"] | None
    memory_limit: int | str | None
    checkpoint: bool | None
    progress: bool | str | Callable[[int, int], object]
    devices: int | str | Sequence[Any] | PartitionSpec | None
    lockstep: bool
    cpu_math: bool
    xla_cpu: bool


class Entered(Scoped, total=False):
    """What a scope can set, options and more."""

    check: bool


class Given(Scoped, total=False):
    """All options of `auto_vmap`, as its caller passes them."""

    reduce: Any
    reduce_axis: int | Sequence[int] | None
    where: str | int | None
    batch_shape: int | Sequence[int] | None
    jit: bool
    compiler_options: Mapping[str, Any] | None
    bucket: bool | Sequence[int]
    batched: bool


_TYPES = get_type_hints(Options, include_extras=True)
_CHECKS = {
    name: kind.__metadata__[0] for name, kind in _TYPES.items() if hasattr(kind, "__metadata__")
}

DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(Options) if field.name in _CHECKS
}

_SCOPED = tuple(Scoped.__annotations__)


def checked_options(values: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return options in normal form; refuse an unknown option or a wrong value.

    Parameters
    ----------
    values : dict
        Options by name.
    site : str
        The beginning of error messages: the function that was called.
    """
    for name in values:
        if name not in _CHECKS:
            close = difflib.get_close_matches(name, _CHECKS, 1)
            hint = SYNONYMS.get(name, *(f"did you mean {other}?" for other in close))
            raise TypeError(
                f"{site}: no option is called {name!r}{f'; {hint}' if hint else ''} (options: "
                f"{listed(list(_CHECKS))})"
            )
    return {
        name: value if value is DEFAULTS[name] else _CHECKS[name](value, site)
        for name, value in values.items()
    }


def options_of(site: str, /, **values: Any) -> Options:
    """Return the options of a function that takes them as parameters; refuse a wrong value."""
    if values.get("chunk_size") is not None:
        _number_of_items(values["chunk_size"], site)
    return Options(**checked_options(values, site))


# What an option does without another one.
_NEEDS = {
    "reduce_axis": ("reduce", "reduce_axis={} has no effect without reduce=, such as reduce='sum'"),
    "where": ("reduce", "where={!r} has no effect without reduce=, such as reduce='sum'"),
    "compiler_options": (
        "jit",
        "compiler_options are those of jax.jit, so they need jit=True; if you call jax.jit "
        "yourself, pass them there",
    ),
    "bucket": (
        "jit",
        "bucket={} is for programs that jit=True compiles, so it needs jit=True; if you call "
        "jax.jit yourself, pad the arrays first",
    ),
}


def check_together(options: Options, site: str) -> None:
    """Refuse options that exclude each other."""
    check_batched(options, site)
    for name, (other, refusal) in _NEEDS.items():
        value = getattr(options, name)
        if value != DEFAULTS[name] and not getattr(options, other):
            raise TypeError(f"{site}: {refusal.format(value)}")


def check_batched(options: Options, site: str) -> None:
    """Refuse items that end by themselves inside a function that takes a batch itself."""
    if options.batched and not options.lockstep:
        raise TypeError(
            f"{site}: lockstep=False lets each item end by itself, but with batched=True the "
            "function takes a whole chunk; leave out one of them"
        )


# The scope.

_scope: ContextVar[dict[str, Any] | None] = ContextVar("rankax_options", default=None)


def resolve(explicit: Mapping[str, Any], preset: Options) -> Options:
    """Return the options of one call: the ``explicit`` ones of its kernel override the scope.

    ``preset`` is returned without a scope; it has the same explicit options, and defaults.
    """
    scope = _scope.get()
    return preset if scope is None else Options(**{**scope, **explicit})


# What a scope also decides for functions that are no kernels.
_FOR_ALL = ("cpu_math", "xla_cpu")


def in_scope(options: Options, given: Collection[str] = ()) -> Options:
    """Return the options of a call of a function that takes its own as parameters.

    A scope decides how a compiler is treated, unless that is ``given``.
    """
    scope = _scope.get() or {}
    changes = {name: scope[name] for name in _FOR_ALL if name in scope and name not in given}
    return dataclasses.replace(options, **changes) if changes else options


def options(**values: Unpack[Entered]) -> contextlib.AbstractContextManager[None]:
    r"""Set options for every kernel that is called inside a ``with`` block.

    ``with options(chunk_size=100): fit(x)`` is equivalent to running ``fit`` with
    ``kernel.with_options(chunk_size=100)`` in place of each kernel of `auto_vmap` that sets no
    ``chunk_size``. An option that a kernel sets, in its decorator or by ``with_options``, takes
    precedence.

    Parameters
    ----------
    chunk_size, memory_limit, checkpoint, progress, devices, lockstep
        As in `auto_vmap`. The other options change what a kernel returns or takes, so they belong
        to the kernel.
    cpu_math, xla_cpu
        As in `auto_vmap`; also for `chunked_vmap`, `chunked_reduce` and the chunked Jacobians.
    check
        Whether an eager call that reuses the compiled program of an earlier call also evaluates a
        new one, and compares the results bit for bit. A difference is a ``RuntimeError`` that names
        the kernel: a fault of rankax. Calls take as long as first calls, and report their progress
        twice. The environment variable ``RANKAX_CHECK=1``, set before rankax is imported, makes
        that the default.

    Returns
    -------
    context manager
        Scopes nest: an inner one adds to the outer one. A scope applies to the thread (and the
        asyncio task) that entered it.

    Raises
    ------
    TypeError, ValueError
        Immediately, for an unknown option or a wrong value.

    Notes
    -----
    Kernels with ``jit=True`` keep one program for each set of options. Inside a `jax.jit` of your
    own, the scope counts while JAX traces: a function that was compiled outside the scope is not
    compiled again inside.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import rankax
    >>> norm = rankax.auto_vmap(1)(lambda v: jnp.sqrt(v @ v))
    >>> with rankax.options(chunk_size=10):
    ...     norm.plan(jnp.ones((100, 3))).in_flight
    10
    """
    given: dict[str, Any] = dict(values)
    checks = given.pop("check", None)
    if checks is not None:
        check_bool(checks, "rankax.options", "check")
    checked = checked_options(given, "rankax.options")
    for name in checked:
        if name not in _SCOPED:
            raise TypeError(
                f"rankax.options: {name} belongs to a kernel; use "
                f"kernel.with_options({name}=...) (a scope can set {listed(list(_SCOPED))})"
            )
    return _entered(checked, checks)


@contextlib.contextmanager
def _entered(checked: dict[str, Any], checks: bool | None) -> Generator[None]:
    token = _scope.set({**(_scope.get() or {}), **checked})
    try:
        with contextlib.nullcontext() if checks is None else checking(checks):
            yield
    finally:
        _scope.reset(token)


# What `help` shows.
_kind = inspect.Parameter.KEYWORD_ONLY
_shown = [inspect.Parameter(name, _kind, default=DEFAULTS[name]) for name in _SCOPED]
_shown.append(inspect.Parameter("check", _kind, default=False))
vars(options)["__signature__"] = inspect.Signature(_shown)
