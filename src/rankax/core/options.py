# SPDX-License-Identifier: MIT
"""Options of kernels: their defaults, their checks, and the scope that sets them from outside.

An option is registered, with its check, where it acts (`register`); the options in this file belong
to the core. Type checkers cannot read a registry, so its names also stand in the signatures that
users see (`_front/options.py`, `_front/kernel.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from rankax.core.base.arrays import Target, is_cpu, target_of
from rankax.core.base.messages import check_bool, checked_int, listed, positive_int
from rankax.core.declare.ranks import SYNONYMS
from rankax.core.hooks import NO_RULES, Rules
from rankax.core.loop.eager_programs import checking
from rankax.core.reduce.run import Reductions, checked_where, read_reductions

AUTO = "auto"  # a chunk size: for a reduction, a bound of its own; otherwise none


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of kernels.

    Attributes
    ----------
    name : str
    default : object
    check : callable
        ``check(value, site)`` returns a value in normal form, or raises; the message begins with
        ``site``. The default is not checked.
    scoped : bool
        Whether `rankax.options` can set it; otherwise it changes what a kernel returns or takes.
    for_all : bool
        Whether a scope also decides it for functions that are no kernels.
    needs : tuple of str, or None
        An option without which this one does nothing, and the sentence that says so.
    bounds : callable, or None
        Whether a value bounds memory in a way of its own.
    cuts : callable, or None
        Whether a value cuts the batch, so that it is not evaluated at once.
    """

    name: str
    default: Any
    check: Callable[[Any, str], Any]
    scoped: bool = False
    for_all: bool = False
    needs: tuple[str, str] | None = None
    bounds: Callable[[Any], bool] | None = None
    cuts: Callable[[Any], bool] | None = None


OPTIONS: dict[str, Option] = {}
DEFAULTS: dict[str, Any] = {}
_KINDS: dict[str, list[tuple[str, Callable[[Any], bool]]]] = {"bounds": [], "cuts": []}
_TOGETHER: dict[str, Callable[[Options, str], None]] = {}


def register(*options: Option, together: Callable[[Options, str], None] | None = None) -> None:
    """Add options; where one is given, ``together(options, site)`` refuses what it excludes."""
    for option in options:
        OPTIONS[option.name] = option
        DEFAULTS[option.name] = option.default
        for kind, holds in (("bounds", option.bounds), ("cuts", option.cuts)):
            _KINDS[kind] += [] if holds is None else [(option.name, holds)]
        if together is not None:
            _TOGETHER[option.name] = together


class Options:
    """All options of one call, by name: attributes that cannot be set.

    Hashable because kept programs are looked up by them.
    """

    if TYPE_CHECKING:
        chunk_size: int | str | None
        reduce: Reductions | None
        reduce_axis: int | tuple[int, ...] | None
        where: str | int | None
        batch_shape: tuple[int, ...] | None
        checkpoint: bool | None
        compiler_options: tuple[tuple[str, Any], ...] | None
        #: Where the call runs: no option, the arrays say so. None: where JAX runs by default.
        target: Target | None

    def __init__(self, *, target: Target | None = None, **given: Any) -> None:
        values = {**DEFAULTS, **given}
        if unknown := given.keys() - DEFAULTS.keys():
            raise TypeError(f"no option is called {', '.join(map(repr, sorted(unknown)))}")
        if values["where"] is not None and values["reduce"] is not None:
            values["reduce"] = values["reduce"].of_items(values["where"])
        if values["chunk_size"] == AUTO and (values["reduce"] is None or _any(values, "bounds")):
            values["chunk_size"] = None
        self.__dict__ = {**values, "target": target}

    def __getattr__(self, name: str) -> Any:
        """Return the default of an option that was registered after these were made."""
        if name not in DEFAULTS:
            raise AttributeError(f"no option is called {name!r}")
        return DEFAULTS[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__dict__":
            raise AttributeError(f"options cannot be set; replace({name}=...) returns others")
        super().__setattr__(name, value)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return (*self.values().values(), self.target)

    @functools.cached_property
    def given(self) -> frozenset[str]:
        """The options whose values are not the default, or with "auto", replaced by another.

        And ``auto``, if a default chooses the chunk size.
        """
        given = {name for name, value in self.values().items() if value != DEFAULTS[name]}
        return frozenset(given | {"auto"} if self.chunk_size == AUTO else given)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Options) and self._key == other._key)

    def values(self) -> dict[str, Any]:
        """Return the options by name."""
        return {name: getattr(self, name) for name in DEFAULTS}

    def replace(self, **changes: Any) -> Self:
        """Return other options."""
        return type(self)(**{**self.values(), "target": self.target, **changes})

    def at(self, arrays: Iterable[Any]) -> Self:
        """Return the options of a call with these arrays, which know where it runs."""
        target = self.target or target_of(arrays)
        return self if target == self.target else self.replace(target=target)

    @property
    def on_cpu(self) -> bool:
        """Whether the call runs on a CPU."""
        return is_cpu(self.target)

    @property
    def rules(self) -> Rules:
        """The rules of this call for the compiler."""
        found = (rules(self) for rules in COMPILER_RULES)
        return next((each for each in found if each is not None), NO_RULES)

    @property
    def most(self) -> int | None:
        """The chunk size, if the caller gave one."""
        return None if isinstance(self.chunk_size, str) else self.chunk_size

    def compiled(self, fun: Any, args: Sequence[Any]) -> Any:
        """Return `jax.jit` of a function, to be called with arguments like ``args``."""
        # What a rule adds to the compiler's options is for calls that evaluate all items at once.
        is_cut = self.most is not None or any(_any(self.values(), kind) for kind in _KINDS)
        rules = NO_RULES if is_cut else self.rules
        return rules.compiled(fun, args, dict(self.compiler_options or ()))


COMPILER_RULES: list[Callable[[Options], Rules | None]] = []  # the first that are not None hold


def _any(values: Mapping[str, Any], kind: str) -> bool:
    """Whether a value of some option is of this kind, ``"bounds"`` or ``"cuts"``."""
    return any(holds(values[name]) for name, holds in _KINDS[kind])


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
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, 1)
            hint = SYNONYMS.get(name, *(f"did you mean {other}?" for other in close))
            raise TypeError(
                f"{site}: no option is called {name!r}{f'; {hint}' if hint else ''} (options: "
                f"{listed(list(OPTIONS))})"
            )
    return {
        name: value if value is DEFAULTS[name] else OPTIONS[name].check(value, site)
        for name, value in values.items()
    }


def options_of(site: str, /, **values: Any) -> Options:
    """Return the options of a function that takes them as parameters; refuse a wrong value."""
    if values.get("chunk_size") is not None:
        _number_of_items(values["chunk_size"], site)
    return Options(**checked_options(values, site))


def check_together(options: Options, site: str) -> None:
    """Refuse options that exclude each other, and those that do nothing without another one."""
    for name in _TOGETHER.keys() & options.given:
        _TOGETHER[name](options, site)
    for name, option in OPTIONS.items():
        if option.needs is None:
            continue
        (other, refusal), value = option.needs, getattr(options, name)
        if value != option.default and not getattr(options, other, None):
            raise TypeError(f"{site}: {refusal.format(value)}")


# The scope.

scope: ContextVar[dict[str, Any] | None] = ContextVar("rankax_options", default=None)


def resolve(explicit: Mapping[str, Any], preset: Options) -> Options:
    """Return the options of one call: the ``explicit`` ones of its kernel override the scope.

    ``preset`` is returned without a scope; it has the same explicit options, and defaults.
    """
    return preset if (given := scope.get()) is None else Options(**{**given, **explicit})


@contextlib.contextmanager
def entered(checked: dict[str, Any], checks: bool | None) -> Generator[None]:
    """Enter a scope of options, which are checked; ``checks``: see `checking`."""
    token = scope.set({**(scope.get() or {}), **checked})
    try:
        with contextlib.nullcontext() if checks is None else checking(checks):
            yield
    finally:
        scope.reset(token)


# The options of the core.


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


def bool_option(name: str, default: bool | None, **more: Any) -> Option:
    """Return an option that is a bool."""
    return Option(name, default, functools.partial(check_bool, name=name), **more)


register(
    Option("chunk_size", AUTO, _chunk_size, scoped=True),
    Option("reduce", None, read_reductions),
    Option(
        "reduce_axis",
        None,
        _reduce_axis,
        needs=("reduce", "reduce_axis={} has no effect without reduce=, such as reduce='sum'"),
    ),
    Option(
        "where",
        None,
        checked_where,
        needs=("reduce", "where={!r} has no effect without reduce=, such as reduce='sum'"),
    ),
    Option("batch_shape", None, _batch_shape),
    bool_option("checkpoint", None, scoped=True),
    Option(
        "compiler_options",
        None,
        _compiler_options,
        needs=(
            "jit",
            "compiler_options are those of jax.jit, so they need jit=True; if you call "
            "jax.jit yourself, pass them there",
        ),
    ),
)
