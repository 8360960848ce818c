# SPDX-License-Identifier: MIT
"""Where extensions act on a call: one place for each kind of hook, which the path of a call asks.

Without extensions there are none, and a call is a nest of maps, or of loops over the program of one
item. An extension adds its hooks when it is imported. What a hook receives and returns is described
at its place; one that does not apply returns None, or False if that is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import is_spread, on_every_device
from rankax.core.plan.schedule import WHOLE_CHUNKS, Shape, Tiles

F = TypeVar("F")


class Placement:
    """Where a batch is evaluated: in one piece, where its arrays are. A key of kept programs."""

    key: Hashable = ()

    def __bool__(self) -> bool:
        """Whether the batch is cut into parts."""
        return False

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the trace of the kernel."""
        return contextlib.nullcontext()

    def around(self, site: str) -> contextlib.AbstractContextManager[Any]:
        """Enter the evaluation of a call; ``site``: the call, for errors."""
        return contextlib.nullcontext()

    def put(self, values: Sequence[Any], bound: Any, options: Any) -> list[Any]:
        """Return the values of a call that is compiled whole, where it reads them."""
        return list(values)

    def layout(self, whole: Any, item: Any) -> Layout:
        """Return how a batch of this plan is cut."""
        return Layout(whole.batch_shape)


class Layout:
    """How a batch is cut into parts: it is one."""

    count = 1  # of the parts that run at the same time
    shown: Mapping[str, Any] = MappingProxyType({})  # fields of the plan, by name

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __bool__(self) -> bool:
        return False

    def shapes(self) -> list[Shape]:
        """Return the batch shapes of the pieces of a part, the main one last."""
        return [self.shape]

    def placed(self, item: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the arrays of a call where its parts read them."""
        return item, list(map(on_every_device, leaves))

    def walk(self, nests: Any, item: Any, leaves: Sequence[Any]) -> list[Any]:
        """Evaluate an item over the whole batch; ``nests`` has one for each of `shapes`."""
        return nests[self.shape].walk(item, leaves)


HERE = Placement()


class Pass(Protocol):
    """What changes the program of an item before it is walked; hashable, part of a `Nest`."""

    def both(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return the program as every pass evaluates it."""
        ...

    def differs_back(self, jaxpr: Jaxpr) -> bool:
        """Whether `back` returns a program."""
        ...

    def back(self, jaxpr: Jaxpr, site: str) -> Jaxpr | None:
        """Return the program that is differentiated in place of another one, or None."""


class Walker(Protocol):
    """What walks the items of all levels in place of loops; hashable, part of a `Nest`."""

    def walk(
        self, fun: Any, leaves: Sequence[Any], levels: Sequence[Any], item: Any, *, back: bool
    ) -> list[Any]:
        """Return outputs with the items of all levels on one axis."""
        ...

    def fold(self, row: Any, steps: Sequence[Any], kept: Sequence[int], *, linear: bool) -> Any:
        """Fold a row of items (`core/reduce/row.py`)."""


class Observer(Protocol):
    """Who is told of the steps of the outermost loop of a call; hashable."""

    def of_parts(self, count: int) -> Any:
        """Return who is told if so many loops run at the same time."""

    def reports(self, length: int, size: int, steps: int) -> Any:
        """Return the reports of a loop: ``step(done)`` and ``end(done, outputs)``."""


class Form:
    """How a kernel that does not take one item is called to evaluate one; hashable."""

    in_front: Sequence[str] = ()  # sentences that are added to an error of the kernel
    takes_chunks = False  # whether a chunk becomes one call, so that it is not cut into tiles

    def evaluate(self, bound: Any, leaves: Sequence[Any], plan: Any) -> Any:
        """Return the output of the kernel of a bound call for the leaves of one item."""
        return bound.call(leaves, plan)

    def prepared(self, bound: Any, options: Any, place: Placement) -> Any:
        """Return the call before it is planned. Calls with ragged items are not asked."""
        return bound

    def of_lengths(self, call: Any, *lengths: int) -> Any:
        """Return the item of a traced call for chunks of these lengths."""
        return call.item


class Rules:
    """What a call does to work around a compiler: nothing, unless the rules for one say more.

    A call asks one object, `Options.rules`, at each place where such a rule may act. These are the
    answers without rules, which leave the program that one would write by hand. The rules for XLA
    on a CPU are in `rankax.ext.xla_cpu`.
    """

    most_reduced: int | None = None  # how many items a reduction evaluates at once, at most

    def tiles(self, jaxpr: Jaxpr, updated: int) -> Tiles:
        """Return how many items are best evaluated at once.

        Parameters
        ----------
        jaxpr : Jaxpr
            The program of an item.
        updated : int
            How many numbers of its state a reduction updates with each tile.
        """
        return WHOLE_CHUNKS

    def pays_to_store(self, jaxpr: Jaxpr) -> bool:
        """Whether to store what an item computes takes less time than to compute it again."""
        return True

    def evaluated(self, jaxpr: Jaxpr, mapped: Sequence[int]) -> Jaxpr:
        """Return the program of an item as a loop evaluates it; ``mapped``: inputs of chunks."""
        return jaxpr

    def differentiated(self, jaxpr: Jaxpr, mapped: Sequence[int]) -> Jaxpr:
        """Return the program of an item as a loop that is differentiated evaluates it."""
        return jaxpr

    def differs_back(self, jaxpr: Jaxpr) -> bool:
        """Whether `differentiated` may return another program than `evaluated`."""
        return False

    def stored(
        self, leaves: Sequence[Any], specs: tuple[Any, ...]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the arrays that a reduction reads as it reads them best, and levels to match."""
        return list(leaves), specs

    def folded(self, step: Any, jaxpr: Jaxpr, *, again: bool) -> Any:
        """Return an `Accumulation` as tiles enter it.

        Its joined states equal the ones of ``step``, once `Accumulator.found` has completed them,
        which may evaluate the best tile ``again``.
        """
        return step

    def compiled(self, fun: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return `jax.jit` of ``fun``, which is called with arguments like ``args``."""
        return jax.jit(fun, compiler_options=dict(options) or None)


NO_RULES = Rules()


class Hooks(Generic[F]):
    """Functions of extensions, each for the calls that give an option (`Options.given`).

    The functions of ``off_cpu`` are for calls that do not run on a CPU; only they ask where a call
    runs.
    """

    def __init__(self) -> None:
        self.all: list[tuple[str, F]] = []
        self.names: set[str] = set()

    def add(self, option: str, hook: F) -> None:
        """Add a function for calls that give this option."""
        self.all.append((option, hook))
        self.names.add(option)

    def of(self, options: Any) -> list[F]:
        """Return those for a call with these options."""
        names = options.given
        if "off_cpu" in self.names and not options.on_cpu:
            names = {*names, "off_cpu"}
        if names.isdisjoint(self.names):  # as in most calls, each of which asks several times
            return []
        return [hook for name, hook in self.all if name in names]


#: ``(bound, options) -> Placement``; also asked where an array is on several devices
PLACES: Hooks[Callable[[Any, Any], Placement | None]] = Hooks()
#: ``options -> Form``; a call has one, so options that have one exclude each other
FORMS: Hooks[Callable[[Any], Form]] = Hooks()
#: ``(options, name) -> context manager``, which returns an observer or None
OBSERVERS: Hooks[Callable[[Any, str], contextlib.AbstractContextManager[Observer | None]]] = Hooks()
#: ``options -> Pass``, or None
PASSES: Hooks[Callable[[Any], Pass | None]] = Hooks()
#: ``(bound, options, plan) -> bool``: whether a call without a loop needs the program of an item
TRACED: Hooks[Callable[[Any, Any, Any], bool]] = Hooks()
#: ``(call, part, fitted) -> fitted``: how a call that is traced runs, see `core/call/run.py`
CHOOSERS: Hooks[Callable[[Any, Any, Any], Any]] = Hooks()
#: ``(call, plan)``: before a call is compiled
WARNINGS: Hooks[Callable[[Any, Any], None]] = Hooks()
#: ``(options, jaxpr, plan) -> sentences`` for what ``plan`` prints, of any call
NOTES: list[Callable[[Any, Any, Any], Iterable[str]]] = []
#: what to suggest when ``reduce`` gets an unknown name
HINTS: dict[str, str] = {}


def place_of(bound: Any, options: Any) -> Placement:
    """Return where a call is evaluated."""
    is_asked = any(map(is_spread, bound.leaves))
    hooks = [hook for _, hook in PLACES.all] if is_asked else PLACES.of(options)
    for hook in hooks:
        if (place := hook(bound, options)) is not None:
            return place
    return HERE


def form_of(options: Any) -> Form | None:
    """Return how a kernel with these options is called, if it does not take one item."""
    forms = [form(options) for form in FORMS.of(options)]
    if len(forms) > 1:
        names = " and ".join(sorted(FORMS.names & options.given))
        raise TypeError(f"{names} exclude each other: each says how the kernel is called")
    return forms[0] if forms else None


def passes_of(options: Any) -> tuple[Pass, ...]:
    """Return what changes the program of an item."""
    return tuple(found for each in PASSES.of(options) if (found := each(options)) is not None)


def observed(options: Any, name: str) -> contextlib.AbstractContextManager[Observer | None]:
    """Enter a call of this name; the context returns who is told of its steps."""
    return next((each(options, name) for each in OBSERVERS.of(options)), contextlib.nullcontext())


#: Classes of nodes of the arguments that a wrapper replaces before a call is evaluated, each with
#: what returns the refusal where there is none: ``(call, path) -> error``.
NODES: dict[type, Callable[[Any, str], Exception]] = {}
#: ``leaf -> name of the package`` of an array that another package evaluates, and
#: ``(package, kernel, path) -> error`` where that is not possible.
FOREIGN: list[tuple[Callable[[Any], str | None], Callable[[str, str, str], Exception]]] = []


#: What the methods of a kernel do, by name, and how a call is made that has foreign arrays
#: (``foreign``) or nodes (``nodes``); each has the parameters of the caller in `_front/kernel.py`.
METHODS: dict[str, Callable[..., Any]] = {}

#: ``call -> pairs of chunk sizes and changes``: what else is tried where the fastest options of a
#: call are searched; ``call`` has ``defaults``, ``bound``, ``gradient``, ``values``, ``item()``
TRIED: list[Callable[[Any], Iterable[tuple[Sequence[int | None], dict[str, Any]]]]] = []


def is_node(node: Any) -> bool:
    """Whether a node of the arguments is one that a wrapper replaces."""
    return isinstance(node, tuple(NODES))


def foreign(leaf: Any) -> str | None:
    """Return the name of the package that evaluates a leaf, or None."""
    return next((name for package_of, _ in FOREIGN if (name := package_of(leaf))), None)


def refusal_of_foreign(leaf: Any, kernel: str, path: str) -> Exception | None:
    """Return the error that says why a function cannot take a leaf of another package."""
    return next((new(name, kernel, path) for of, new in FOREIGN if (name := of(leaf))), None)
