# SPDX-License-Identifier: MIT
"""From a kernel, the items of a row and what was given as ``reduce``, to the reduced outputs."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.functions import function_location
from rankax._base.trees import (
    check_outputs,
    leaves_with_names,
    spread_prefix,
    subtrees_with_entries,
)
from rankax._base.words import listed
from rankax._loop.keys import PLACE
from rankax._loop.loop import apart_from_constants
from rankax._loop.reuse import is_eager
from rankax._loop.spec import LoopSpec
from rankax._reduce.protocol import MisfitError, Part, Places, Reduction
from rankax._reduce.row import Row, Task, whole_level
from rankax._reduce.sums import All, AnyOf, LogSumExp, Mean, Prod, Sum
from rankax._reduce.winners import ArgMax, ArgMin, Max, Min
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.item import with_axis, with_shape

__all__ = [
    "Reduced",
    "Reductions",
    "merge_parts",
    "read_reductions",
    "reduce_row",
    "traced_parts",
]

BY_NAME: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        *(Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin()),
        *(AnyOf(), All(), LogSumExp()),
    )
}


def _is_entry(node: Any) -> bool:
    return node is None or isinstance(node, Reduction)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """What was given as ``reduce``: a tree of reductions, and of None for what is kept."""

    entries: tuple[Reduction | None, ...]
    structure: Any

    @property
    def prefix(self) -> Any:
        """The tree of the entries."""
        return self.structure.unflatten(self.entries)

    def of_outputs(self, out: Any) -> list[Reduction | None]:
        """Return the entry of each leaf of what an item returned."""
        return spread_prefix(self.prefix, out, "output", is_entry=_is_entry, what="reduction")

    def of_part(self, count: int) -> Reductions:
        """Return what reduces one of several parts of a row, which has ``count`` items."""
        entries = tuple(None if e is None else e.of_part(count) for e in self.entries)
        return Reductions(entries, self.structure)

    @property
    def are_ordered(self) -> bool:
        """Whether one of them takes the items in their order."""
        return any(e is not None and e.is_ordered for e in self.entries)

    def __str__(self) -> str:
        names = dict.fromkeys("kept" if e is None else e.name for e in self.entries)
        return listed(list(names))


def read_reductions(value: Any, where: str) -> Reductions:
    """Read names and objects; refuse anything else.

    Parameters
    ----------
    value : str, Reduction, None, or a pytree of those
    where : str
        The function that was called, for errors.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    entries = tuple(_reduction(leaf, where) for leaf in leaves)
    if all(entry is None for entry in entries):
        raise ValueError(f"{where}: reduce names no reduction, got {value!r}")
    return Reductions(entries, structure)


def _reduction(leaf: Any, where: str) -> Reduction | None:
    if leaf is None or isinstance(leaf, Reduction):
        return leaf
    if isinstance(leaf, type) and issubclass(leaf, Reduction):
        raise TypeError(
            f"{where}: reduce got the class {leaf.__name__}; call it: {leaf.__name__}(...)"
        )
    known = listed(list(BY_NAME), "or")
    if not isinstance(leaf, str):
        raise TypeError(
            f"{where}: reduce must hold names ({known}), objects of rankax.reductions and None, "
            f"got {type(leaf).__name__} {leaf!r}"
        )
    if leaf not in BY_NAME:
        close = difflib.get_close_matches(leaf, BY_NAME, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is {known}"
        raise ValueError(f"{where}: no reduction is called {leaf!r}; {hint}")
    return BY_NAME[leaf]


class Reduced(NamedTuple):
    """What a row makes: flat arrays, and how they become the result once all maps are done."""

    arrays: list[Any]
    reductions: Reductions
    parts: tuple[Part, ...]
    structure: Any  # of the values, one for each reduction, of which the arrays are the leaves

    @property
    def values(self) -> list[Any]:
        """What each reduction made, or the leaves that are kept."""
        return self.structure.unflatten(self.arrays)

    @property
    def is_kept(self) -> list[bool]:
        """Whether an array still has the reduced levels, in front."""
        return [
            reduction is None
            for reduction, value in zip(self.reductions.entries, self.values, strict=True)
            for _ in jax.tree.leaves(value)
        ]

    def with_arrays(self, arrays: Sequence[Any]) -> Reduced:
        return self._replace(arrays=list(arrays))

    def assembled(self) -> Any:
        """Return the result, of arrays that have been through all maps."""
        triples = zip(self.parts, self.reductions.entries, self.values, strict=True)
        results = [
            part.structure.unflatten(value) if r is None else r.assembled(part, value)
            for part, r, value in triples
        ]
        return self.reductions.structure.unflatten(results)


def merge_parts(
    found: Reduced, reductions: Reductions, places: Places, kept: int, where: str
) -> Reduced:
    """Return what ``reductions`` make of a row whose parts were reduced by their `of_part`.

    Parameters
    ----------
    found : Reduced
        Arrays with the parts on axis 0, and ``kept`` axes of the batch behind it. Those that are
        kept whole are left as they are.
    where : str
        The kernel and its source line, for errors.
    """
    values: list[Any] = []
    for reduction, part, value in zip(reductions.entries, found.parts, found.values, strict=True):
        if reduction is None:
            values.append(value)
            continue
        _check(where, reduction, part, places.size)
        merge = functools.partial(reduction.of_parts, part, places=places)
        for _ in range(kept):
            merge = jax.vmap(merge, in_axes=1)
        values.append(merge(value))
    arrays, structure = jax.tree.flatten(values)
    return Reduced(arrays, reductions, found.parts, structure)


def reduce_row(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    levels: Sequence[LoopSpec],
    reductions: Reductions,
    where: str | None = None,
) -> Reduced:
    """Reduce the outputs of ``fun`` over the levels of ``leaves``.

    Parameters
    ----------
    fun : callable
        The kernel, of one item of each leaf.
    leaves : sequence of arrays
    levels : sequence of LoopSpec
        The outermost first.
    where : str, optional
        The kernel and its source line, for errors, if ``fun`` does not know.
    """
    leaves = tuple(jnp.asarray(leaf) for leaf in leaves)
    program = RowProgram.of(fun, leaves, levels, reductions, where or function_location(fun))

    def row(consts: Sequence[Any], leaves: Sequence[Any]) -> Row:
        def item(*items: Any) -> list[Any]:
            return program.evaluate(consts, items)

        return Row(item, tuple(leaves), tuple(levels))

    values = program.values(row, leaves)
    arrays, structure = jax.tree.flatten(values)
    return Reduced(arrays, reductions, program.parts, structure)


class RowProgram(NamedTuple):
    """The traced kernel, and its outputs in parts, one for each reduction."""

    evaluate: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    consts: list[Any]
    parts: tuple[Part, ...]
    reductions: tuple[Reduction | None, ...]

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        leaves: Sequence[Any],
        levels: Sequence[LoopSpec],
        reductions: Reductions,
        where: str,
    ) -> RowProgram:
        """Trace the kernel for one item, and check that its outputs can be reduced."""
        avals = [_item_aval(leaf, i, levels) for i, leaf in enumerate(leaves)]
        avals += [with_shape(PLACE, ()) for level in levels if level.numbered]
        found: list[list[tuple[str, Any]]] = []

        def lifted(*items: Any) -> list[Any]:
            out = fun(*items)
            check_outputs(fun, out)
            found.append(_parts(where, out, reductions))
            return jax.tree.leaves([part for _, part in found[-1]])

        closed = jax.make_jaxpr(lifted)(*avals)
        parts: list[Part] = []
        first = 0
        for path, part in found[-1]:
            structure = jax.tree.structure(part)
            outs = closed.out_avals[first : first + structure.num_leaves]
            names = tuple(name for name, _ in leaves_with_names(part, path))
            parts.append(Part(path, names, structure, tuple(outs), first))
            first += structure.num_leaves
        program = cls(
            apart_from_constants(closed, avals),
            list(closed.consts),
            tuple(parts),
            reductions.entries,
        )
        program.check(where, levels)
        return program

    def check(self, where: str, levels: Sequence[LoopSpec]) -> None:
        count = math.prod(level.chunks.length for level in levels)
        for part, reduction in zip(self.parts, self.reductions, strict=True):
            if reduction is None:
                continue
            for name, aval in zip(part.names, part.avals, strict=True):
                if not jnp.issubdtype(aval.dtype, jnp.number) and aval.dtype != jnp.bool_:
                    raise _misfit(where, reduction, f"{name} holds {aval.dtype}, and no numbers")
            _check(where, reduction, part, count)

    def values(self, row: Callable[..., Row], leaves: Sequence[Any]) -> list[Any]:
        """Return what each reduction makes of a row; of what is kept, its leaves."""
        here = row(self.consts, leaves)
        if here.is_whole or not here.size:
            return self._at_once(here)
        is_linear = all(r is None or r.is_linear for r in self.reductions)
        if is_linear or is_eager([*leaves, *self.consts]):
            return self._folded(here)
        return call_with_derivative_of(
            lambda consts, leaves: self._differentiable(row(consts, leaves)),
            lambda consts, leaves: self._folded(row(consts, leaves)),
            self.consts,
            list(leaves),
        )

    def _at_once(self, row: Row) -> list[Any]:
        outs = row.whole()
        values: list[Any] = []
        for part, reduction in zip(self.parts, self.reductions, strict=True):
            own = [outs[i] for i in part.positions]
            values.append(
                [_split_row(out, row) for out in own]
                if reduction is None
                else reduction.plain(part, row, own)
            )
        return values

    def _folded(self, row: Row, only: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """Fold all in one walk; None for the reductions that are left out."""
        chosen = [(part, r) for part, r in zip(self.parts, self.reductions, strict=True) if only(r)]
        tasks = [_kept_tasks(part) if r is None else r.tasks(part, row) for part, r in chosen]
        states = iter(row.fold([task for group in tasks for task in group]))
        own = iter([[next(states) for _ in group] for group in tasks])
        values: list[Any] = []
        for part, reduction in zip(self.parts, self.reductions, strict=True):
            if not only(reduction):
                values.append(None)
            elif reduction is None:
                kept = [jnp.moveaxis(state, -1, 0) for state in next(own)]
                values.append([_split_row(out, row) for out in kept])
            else:
                values.append(reduction.from_states(part, row, next(own)))
        return values

    def _differentiable(self, row: Row) -> list[Any]:
        """Fold in one walk what can be differentiated as it stands, and the rest one by one."""

        def is_linear(reduction: Reduction | None) -> bool:
            return reduction is None or reduction.is_linear

        values = [None] * len(self.parts)
        if any(is_linear(reduction) for reduction in self.reductions):
            values = self._folded(row, is_linear)
        return [
            value
            if reduction is None or is_linear(reduction)
            else reduction.differentiable(part, row)
            for value, part, reduction in zip(values, self.parts, self.reductions, strict=True)
        ]


def traced_parts(
    fun: Callable[..., Any], items: Sequence[Any], reductions: Reductions, sizes: Sequence[int]
) -> tuple[Part, ...]:
    """Trace ``fun`` for one item, and return its outputs in parts, one for each reduction.

    They are checked for a row of these sizes.
    """
    nowhere = (None,) * len(items)
    levels = [whole_level(size, nowhere) for size in sizes]
    return RowProgram.of(fun, items, levels, reductions, function_location(fun)).parts


def _item_aval(leaf: Any, number: int, levels: Sequence[LoopSpec]) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    for level in levels:
        axis = level.in_axes[number]
        aval = aval if axis is None else with_axis(aval, axis)
    return with_shape(aval, aval.shape)


def _parts(where: str, out: Any, reductions: Reductions) -> list[tuple[str, Any]]:
    """Cut what one item returned into the parts of the reductions, and lift them."""
    try:
        found = list(
            subtrees_with_entries(
                reductions.prefix, out, "output", is_entry=_is_entry, what="reduction"
            )
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return [(path, part if r is None else r.lifted(part)) for path, part, r in found]


def _check(where: str, reduction: Reduction, part: Part, count: int) -> None:
    try:
        reduction.check(part, count)
    except MisfitError as error:
        raise _misfit(where, reduction, str(error)) from None


def _misfit(where: str, reduction: Reduction, why: str) -> ValueError:
    return ValueError(f"{where}: it cannot be reduced by {reduction.name}: {why}")


def _kept_tasks(part: Part) -> list[Task]:
    return [
        Task((position,), None, aval.shape)
        for position, aval in zip(part.positions, part.avals, strict=True)
    ]


def _split_row(out: jax.Array, row: Row) -> jax.Array:
    """Make axis 0, which is that of the row, those of its levels again."""
    return lax.reshape(out, (*(level.chunks.length for level in row.levels), *out.shape[1:]))
