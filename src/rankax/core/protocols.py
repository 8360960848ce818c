# SPDX-License-Identifier: MIT
"""What the engine asks of features: where a batch is evaluated, what walks it, who is told of it.

Each class says what it returns; what does not apply returns None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import on_every_device
from rankax.core.plan.schedule import WHOLE_CHUNKS, Shape, Tiles


class Placement:
    """Where a batch is evaluated: in one piece, where its arrays are. A key of kept programs."""

    count = 1  # of the parts that run at the same time
    shown: Mapping[str, Any] = MappingProxyType({})  # fields of the plan, by name

    def __bool__(self) -> bool:
        """Whether the batch is cut into parts."""
        return False

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the trace of the kernel."""
        return contextlib.nullcontext()

    def around(self, site: str) -> contextlib.AbstractContextManager[Any]:
        """Enter the evaluation of a call; ``site``: the call, for errors."""
        return contextlib.nullcontext()

    def put(self, values: Sequence[Any], call: Any, options: Any) -> list[Any]:
        """Return the values of a call that is compiled whole, where it reads them."""
        return list(values)

    def of_item(self, item: Any) -> Placement:
        """Return where items of this program are evaluated; in one piece if their order matters."""
        return self

    # Of a batch, by its plan without chunks.

    def shapes(self, whole: Any) -> list[Shape]:
        """Return the batch shapes of the pieces of a part, the main one last."""
        return [whole.batch_shape]

    def placed(self, whole: Any, item: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the arrays of a call where its parts read them."""
        return item, list(map(on_every_device, leaves))

    def walk(self, whole: Any, nests: Any, item: Any, leaves: Sequence[Any]) -> list[Any]:
        """Evaluate an item over the whole batch; ``nests`` has one for each of `shapes`."""
        return nests[whole.batch_shape].walk(item, leaves)


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


@runtime_checkable
class Observer(Protocol):
    """Who is told of the steps of the outermost loop of a call; hashable."""

    def of_parts(self, count: int) -> Any:
        """Return who is told if so many loops run at the same time."""

    def reports(self, length: int, size: int, steps: int) -> Any:
        """Return the reports of a loop over ``length`` items, ``size`` in each of its steps.

        Their ``step(done)`` is traced in a step, before which ``done`` items are done. Their
        ``end(done, outputs)`` is traced after the last one, with where that began, and what the
        loop returned.
        """


class Form:
    """How a kernel is called to evaluate one item; by default, with that item. Hashable."""

    in_front: Sequence[str] = ()  # sentences that are added to an error of the kernel
    takes_chunks = False  # whether a chunk becomes one call, so that it is not cut into tiles

    def evaluate(self, call: Any, leaves: Sequence[Any], plan: Any) -> Any:
        """Return the output of the kernel of a call for the leaves of one item."""
        return call.call(leaves, plan)


ITEM = Form()


class Rules:
    """What a call does to work around a compiler: nothing, unless the rules for one say more.

    A call asks one object, `Options.rules`, at each place where such a rule may act. These are the
    answers without rules, which leave the program that one would write by hand. The rules for XLA
    on a CPU are in `rankax.ext.xla_cpu`.
    """

    most_reduced: int | None = None  # how many items a reduction evaluates at once, at most
    by_number: bool = False  # whether items take the numbers that they read of small vectors

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
        self, leaves: Sequence[Any], levels: tuple[Any, ...]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the arrays that a reduction reads as it reads them best, and levels to match."""
        return list(leaves), levels

    def folded(self, step: Any, jaxpr: Jaxpr, moving: set[Any], *, again: bool) -> Any:
        """Return an `Accumulation` as tiles enter it.

        Its joined states equal the ones of ``step``, once `Accumulator.found` has completed them,
        which may evaluate the best tile ``again``. ``moving``: the inputs of an item that differ
        along the row.
        """
        return step

    def compiled(self, fun: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return `jax.jit` of ``fun``, which is called with arguments like ``args``."""
        return jax.jit(fun, compiler_options=dict(options) or None)


NO_RULES = Rules()
