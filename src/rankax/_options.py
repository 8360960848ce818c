# SPDX-License-Identifier: MIT
"""The options of a call, their checks, and the scope that sets them from outside.

An option is a field of `Options`, with its check. It also stands in the signatures that take it:
`Given`, for `auto_vmap`, and the functions that take options as parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Self, TypedDict, Unpack

from jax.sharding import PartitionSpec

from rankax.core.base.arrays import Target, is_cpu, plainly, target_of
from rankax.core.base.messages import check_bool, checked_int, listed, positive_int
from rankax.core.declare.ranks import SYNONYMS
from rankax.core.loop.eager_programs import checking
from rankax.core.protocols import NO_RULES, Rules
from rankax.core.reduce.run import Reductions
from rankax.ext.devices.place import checked_devices
from rankax.ext.fused.option import can_fuse, checked_fused
from rankax.ext.lengths import checked_bucket
from rankax.ext.memory.budget import checked_limit
from rankax.ext.progress import ProgressOption, checked_progress
from rankax.ext.reductions.read import Reduce, checked_where, read_reductions
from rankax.ext.xla_cpu import rules

AUTO = "auto"  # a chunk size: for a reduction, a bound of its own; otherwise none


# The checks: each takes a value and the beginning of an error message, and returns the value in
# normal form.


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
    if isinstance(value, str):
        raise TypeError(f"{refusal} {value!r}; over={value!r} reduces the batch axis of that name")
    return checked_int(value, refusal)


def _over(value: Any, site: str) -> tuple[str, ...]:
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{site}: over must be the name of a batch axis, or a tuple of names, got {value!r}"
        )
    if not names or len({*names}) < len(names):
        asked = "different batch axes" if names else "at least one batch axis"
        raise ValueError(f"{site}: over must name {asked}, got {value!r}")
    return tuple(names)


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


def option(default: Any, check: Callable[[Any, str], Any] | None = None) -> Any:
    """Return a field; without a check, it is a bool. The default is not checked."""
    return dataclasses.field(default=default, metadata={"check": check})


@dataclasses.dataclass(frozen=True)
class Options:
    """All options of one call; hashable, because kept programs are looked up by them.

    `rankax.options` sets those of `Scoped`. The others change what a kernel returns or takes.
    """

    chunk_size: int | str | None = option(AUTO, _chunk_size)
    memory_limit: Any = option(None, checked_limit)
    checkpoint: bool | None = option(None)
    progress: Any = option(False, checked_progress)
    devices: Any = option(None, checked_devices)
    lockstep: bool = option(True)
    cpu_math: bool = option(False)
    xla_cpu: bool = option(rules.DEFAULT)
    hoist: bool = option(True)
    fused: bool | str = option(False, checked_fused)
    reduce: Reductions | None = option(None, read_reductions)
    reduce_axis: int | tuple[int, ...] | None = option(None, _reduce_axis)
    over: tuple[str, ...] | None = option(None, _over)
    where: str | int | None = option(None, checked_where)
    batch_shape: tuple[int, ...] | None = option(None, _batch_shape)
    jit: bool = option(False)
    compiler_options: tuple[tuple[str, Any], ...] | None = option(None, _compiler_options)
    bucket: bool | tuple[int, ...] = option(False, checked_bucket)
    batched: bool = option(False)
    #: Where the call runs: no option, the arrays say so. None: where JAX runs by default.
    target: Target | None = None

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)
        if self.where is not None and self.reduce is not None:
            set_field("reduce", self.reduce.of_items(self.where))
        if self.chunk_size == AUTO and (self.reduce is None or not self.lockstep):
            set_field("chunk_size", None)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, field.name) for field in dataclasses.fields(self)]))

    def __hash__(self) -> int:
        return self._hash

    def values(self) -> dict[str, Any]:
        """Return the options by name."""
        return {name: getattr(self, name) for name in NAMES}

    def replace(self, **changes: Any) -> Self:
        """Return other options."""
        return dataclasses.replace(self, **changes)

    def at(self, arrays: Iterable[Any]) -> Self:
        """Return the options of a call with these arrays, which know where it runs."""
        target = self.target or target_of(arrays)
        found = self if target == self.target else self.replace(target=target)
        is_off = self.reduce is None or (self.fused == "auto" and not can_fuse(target))
        return found.replace(fused=False) if self.fused and is_off else found

    @property
    def on_cpu(self) -> bool:
        """Whether the call runs on a CPU."""
        return is_cpu(self.target)

    @property
    def rules(self) -> Rules:
        """The rules of this call for the compiler."""
        return rules.rules_of(self)

    @property
    def most(self) -> int | None:
        """The chunk size, if it is a number of items."""
        return None if isinstance(self.chunk_size, str) else self.chunk_size

    def compiled(self, fun: Any, args: Sequence[Any]) -> Any:
        """Return `jax.jit` of a function, to be called with arguments like ``args``."""
        # What a rule adds to the compiler's options is for calls that evaluate all items at once.
        is_cut = self.memory_limit is not None or not self.lockstep or bool(self.devices)
        own = NO_RULES if is_cut or self.most is not None else self.rules
        return own.compiled(fun, args, dict(self.compiler_options or ()))


DEFAULTS = Options()
_FIELDS = {field.name: field for field in dataclasses.fields(Options) if field.name != "target"}
NAMES = list(_FIELDS)


def checked_options(values: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return options in normal form; refuse an unknown option or a wrong value.

    Parameters
    ----------
    values : dict
        Options by name.
    site : str
        The beginning of error messages: the function that was called.
    """
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, NAMES, 1)
            hint = SYNONYMS.get(name, *(f"did you mean {other}?" for other in close))
            raise TypeError(
                f"{site}: no option is called {name!r}{f'; {hint}' if hint else ''} (options: "
                f"{listed(NAMES)})"
            )
        check = _FIELDS[name].metadata["check"] or functools.partial(check_bool, name=name)
        checked[name] = value if value is _FIELDS[name].default else check(value, site)
    return checked


def check_batched(options: Options, site: str) -> None:
    """Refuse items that end by themselves inside a function that takes a batch itself."""
    if options.batched and not options.lockstep:
        raise TypeError(
            f"{site}: lockstep=False lets each item end by itself, but with batched=True the "
            "function takes a whole chunk; leave out one of them"
        )


def check_together(options: Options, site: str) -> None:
    """Refuse options that exclude each other, and those that do nothing without another one."""
    check_batched(options, site)
    for name in ("reduce_axis", "over", "where", "fused"):
        value = getattr(options, name)
        is_given = value is not None and value is not False and value != "auto"
        if is_given and options.reduce is None:
            raise TypeError(
                f"{site}: {name}={value!r} has no effect without reduce=, such as reduce='sum'"
            )
    if options.over is not None and options.reduce_axis is not None:
        raise TypeError(
            f"{site}: over={options.over} and reduce_axis={options.reduce_axis} both say which "
            "axes are reduced; leave out one of them"
        )
    if options.compiler_options is not None and not options.jit:
        raise TypeError(
            f"{site}: compiler_options are those of jax.jit, so they need jit=True; if you call "
            "jax.jit yourself, pass them there"
        )
    if options.bucket and not options.jit:
        raise TypeError(
            f"{site}: bucket={options.bucket} is for programs that jit=True compiles, so it needs "
            "jit=True; if you call jax.jit yourself, pad the arrays first"
        )


# The scope.

_scope: ContextVar[dict[str, Any] | None] = ContextVar("rankax_options", default=None)


def resolve(explicit: Mapping[str, Any], preset: Options) -> Options:
    """Return the options of one call: the ``explicit`` ones override the scope.

    ``preset`` is returned without a scope; it has the same explicit options, and defaults.
    """
    return preset if (given := _scope.get()) is None else Options(**{**given, **explicit})


def given_options(site: str, /, **values: Any) -> dict[str, Any]:
    """Return the options that a function got as parameters; None: as a scope says."""
    if values.get("chunk_size") is not None:
        _number_of_items(values["chunk_size"], site)
    given = {k: v for k, v in values.items() if v is not None or k == "chunk_size"}
    return checked_options(given, site)


class Scoped(TypedDict, total=False):
    """The options that a scope can set."""

    chunk_size: int | Literal["auto"] | None
    memory_limit: int | str | None
    checkpoint: bool | None
    progress: ProgressOption
    devices: int | str | Sequence[Any] | PartitionSpec | None
    lockstep: bool
    cpu_math: bool
    xla_cpu: bool
    hoist: bool
    fused: bool | Literal["auto"]


_SCOPED = [name for name in NAMES if name in Scoped.__annotations__]


class OfMaps(Scoped, total=False):
    """The options that do not change the type of what a kernel returns."""

    batch_shape: int | Sequence[int] | None
    jit: bool
    compiler_options: Mapping[str, Any] | None
    bucket: bool | Sequence[int]
    batched: bool


class Given(OfMaps, total=False):
    """All options of `auto_vmap`, as its caller passes them."""

    reduce: Reduce
    reduce_axis: int | Sequence[int] | None
    over: str | Sequence[str] | None
    where: str | int | None


def options(
    *, check: bool | None = None, plain: bool | None = None, **values: Unpack[Scoped]
) -> contextlib.AbstractContextManager[None]:
    r"""Set options for every kernel that is called inside a ``with`` block.

    ``with options(chunk_size=100): fit(x)`` is equivalent to running ``fit`` with
    ``kernel.with_options(chunk_size=100)`` in place of each kernel of `auto_vmap` that sets no
    ``chunk_size``. An option that a kernel sets, in its decorator or by ``with_options``, takes
    precedence.

    Parameters
    ----------
    chunk_size, memory_limit, checkpoint, progress, devices
        As in `auto_vmap`.
    lockstep, cpu_math, xla_cpu, hoist, fused
        As in `auto_vmap`. The other options change what a kernel returns or takes, so they belong
        to the kernel. `chunked_vmap`, `chunked_reduce` and the chunked Jacobians follow a scope,
        too, in each option for which they are given None.
    check
        Whether an eager call that reuses the compiled program of an earlier call also evaluates a
        new one, and compares the results bit for bit. A difference is a ``RuntimeError`` that names
        the kernel: a fault of rankax. Calls take as long as first calls, and report their progress
        twice. The environment variable ``RANKAX_CHECK=1``, set before rankax is imported, makes
        that the default.

    plain
        Whether programs consist of `jax.vmap`, loops and operations of JAX alone, for packages that
        read them equation by equation, such as folx and asdex. Derivatives are those of such loops:
        right, but not bounded in memory. ``xla_cpu=False`` and ``chunk_size=None`` become defaults,
        because some of these packages read no loops. Eager calls are compiled each time. Only
        ``batched=True`` is a primitive all the same. No call knows whether it is inside
        `jax.make_jaxpr`, so the scope has to be entered where a program is made to be read.

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
    for name, value in (("check", check), ("plain", plain)):
        if value is not None:
            check_bool(value, "rankax.options", name)
    given = {"xla_cpu": False, "chunk_size": None, **values} if plain else values
    checked = checked_options(given, "rankax.options")
    for name in checked:
        if name not in _SCOPED:
            raise TypeError(
                f"rankax.options: {name} belongs to a kernel; use "
                f"kernel.with_options({name}=...) (a scope can set {listed(_SCOPED)})"
            )
    return _entered(checked, check, plain)


@contextlib.contextmanager
def _entered(checked: dict[str, Any], checks: bool | None, plain: bool | None) -> Generator[None]:
    token = _scope.set({**(_scope.get() or {}), **checked})
    none = contextlib.nullcontext()
    try:
        with (
            none if checks is None else checking(checks),
            none if plain is None else plainly(plain),
        ):
            yield
    finally:
        _scope.reset(token)


# What `help` shows.
_defaults = {**{name: _FIELDS[name].default for name in _SCOPED}, "check": False, "plain": False}
vars(options)["__signature__"] = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in _defaults.items()
    ]
)
