# SPDX-License-Identifier: MIT
"""Reduce the outputs of a kernel over a row of items, as the argument ``reduce`` says."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
from rankax._reduce.protocol import Keep, MisfitError, Outputs, Reduction
from rankax._reduce.row import Row, evaluates_functions
from rankax._reduce.sums import All, AnyOf, LogSumExp, Mean, Prod, Sum
from rankax._reduce.winners import ArgMax, ArgMin, Max, Min
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.item import with_axis, with_shape

__all__ = ["Reduced", "Reductions", "RowProgram", "read_reductions", "reduce_row"]

BY_NAME: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        *(Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin()),
        *(AnyOf(), All(), LogSumExp()),
    )
}


def _is_entry(node: Any) -> bool:
    return isinstance(node, Reduction)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The argument ``reduce``: a tree of reductions.

    ``of_run`` is the number of items in all runs if each row is only one run; `reduce_row` then
    returns states for `merge.py`. None: rows are whole.
    """

    entries: tuple[Reduction, ...]
    structure: Any
    of_run: int | None = None

    @property
    def prefix(self) -> Any:
        """The tree of the entries."""
        return self.structure.unflatten(self.entries)

    def of_outputs(self, out: Any) -> list[Reduction]:
        """Return the entry of each leaf of the output of an item."""
        return spread_prefix(self.prefix, out, "output", is_entry=_is_entry, what="reduction")

    def for_runs(self, size: int, *, over_devices: bool = False) -> Reductions:
        """Return the same for runs of ``size`` items."""
        entries = self.entries
        if over_devices:
            entries = tuple(entry.over_devices() for entry in entries)
        return dataclasses.replace(self, entries=entries, of_run=size)

    @property
    def are_ordered(self) -> bool:
        """Whether one of them takes the items in order."""
        return any(entry.is_ordered for entry in self.entries)

    def __str__(self) -> str:
        return listed(list(dict.fromkeys(entry.name for entry in self.entries)))


def read_reductions(value: Any, where: str) -> Reductions:
    """Read names and objects; refuse anything else.

    Parameters
    ----------
    value : str, Reduction, None, or a pytree of those
    where : str
        The name of the called function, for errors.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    entries = tuple(_reduction(leaf, where) for leaf in leaves)
    if all(entry.is_kept for entry in entries):
        raise ValueError(f"{where}: reduce names no reduction, got {value!r}")
    return Reductions(entries, structure)


def _reduction(leaf: Any, where: str) -> Reduction:
    if leaf is None:
        return Keep()
    if isinstance(leaf, Reduction):
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
    """A reduced row, as flat arrays that can be mapped, and what turns them into the result."""

    arrays: list[Any]
    reductions: Reductions
    outputs: tuple[Outputs, ...]
    structure: Any  # of the values: results, or states with `Reductions.of_run`

    @classmethod
    def of(
        cls, values: Sequence[Any], reductions: Reductions, outputs: tuple[Outputs, ...]
    ) -> Reduced:
        """Flatten one value for each reduction."""
        arrays, structure = jax.tree.flatten(list(values))
        return cls(arrays, reductions, outputs, structure)

    @property
    def values(self) -> list[Any]:
        """One value for each reduction."""
        return self.structure.unflatten(self.arrays)

    @property
    def is_kept(self) -> list[bool]:
        """Whether an array still has the reduced levels in front."""
        return [
            reduction.is_kept
            for reduction, value in zip(self.reductions.entries, self.values, strict=True)
            for _ in jax.tree.leaves(value)
        ]

    def with_arrays(self, arrays: Sequence[Any]) -> Reduced:
        """Return the same with other arrays."""
        return self._replace(arrays=list(arrays))

    def assembled(self) -> Any:
        """Return the result, once all maps are done. States are returned as they are."""
        values = self.values
        if self.reductions.of_run is None:
            triples = zip(self.reductions.entries, self.outputs, values, strict=True)
            values = [reduction.assemble(outputs, value) for reduction, outputs, value in triples]
        return self.reductions.structure.unflatten(values)


def reduce_row(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    specs: Sequence[LoopSpec],
    reductions: Reductions,
    where: str | None = None,
) -> Reduced:
    """Reduce the outputs of ``fun`` over the levels of ``leaves``.

    Parameters
    ----------
    fun : callable
        The kernel, of one item of each leaf.
    leaves : sequence of arrays
    specs : sequence of LoopSpec
        The levels, outermost first.
    reductions : Reductions
    where : str, optional
        The kernel and its source line, for errors, if they are not those of ``fun``.
    """
    program = RowProgram.trace(fun, leaves, specs, reductions, where or function_location(fun))
    return Reduced.of(program.values(leaves), reductions, program.outputs)


class RowProgram(NamedTuple):
    """The traced kernel, and its outputs by reduction."""

    evaluate: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    consts: list[Any]
    specs: tuple[LoopSpec, ...]
    outputs: tuple[Outputs, ...]
    reductions: Reductions
    is_expensive: bool

    @classmethod
    def trace(
        cls,
        fun: Callable[..., Any],
        leaves: Sequence[Any],
        specs: Sequence[LoopSpec],
        reductions: Reductions,
        where: str,
    ) -> RowProgram:
        """Trace the kernel for one item, and check that its outputs can be reduced."""
        avals = [_item_aval(leaf, i, specs) for i, leaf in enumerate(leaves)]
        avals += [with_shape(PLACE, ()) for spec in specs if spec.numbered]
        traces: list[list[tuple[str, Any]]] = []

        def lifted(*items: Any) -> list[Any]:
            out = fun(*items)
            check_outputs(fun, out)
            trees = _by_reduction(where, out, reductions)
            # Types, because a tracer kept here would be a leak.
            traces.append([(path, jax.tree.map(jax.typeof, tree)) for path, tree in trees])
            return jax.tree.leaves([tree for _, tree in trees])

        closed = jax.make_jaxpr(lifted)(*avals)
        outputs: list[Outputs] = []
        first = 0
        for path, tree in traces[-1]:
            structure = jax.tree.structure(tree)
            outs = closed.out_avals[first : first + structure.num_leaves]
            names = tuple(name for name, _ in leaves_with_names(tree, path))
            outputs.append(Outputs(path, names, structure, tuple(outs), first))
            first += structure.num_leaves
        program = cls(
            apart_from_constants(closed, avals),
            list(closed.consts),
            tuple(specs),
            tuple(outputs),
            reductions,
            evaluates_functions(closed.jaxpr),
        )
        program.check(where)
        return program

    def _each(self) -> list[tuple[Reduction, Outputs]]:
        return list(zip(self.reductions.entries, self.outputs, strict=True))

    def check(self, where: str) -> None:
        """Refuse outputs that cannot be reduced."""
        size = self.reductions.of_run
        if size is None:
            size = math.prod(spec.chunks.length for spec in self.specs)
        for reduction, outputs in self._each():
            try:
                if not reduction.is_kept:
                    _check_numbers(outputs)
                reduction.check(outputs, size)
            except MisfitError as error:
                raise ValueError(
                    f"{where}: it cannot be reduced by {reduction.name}: {error}"
                ) from None

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """Return one value for each reduction of a row: its result, or its state."""
        row = self._row(self.consts, leaves)
        if self.reductions.of_run is None and (row.is_whole or not row.size):
            outs = row.whole()
            return [
                reduction.plain(outputs, row, [outs[i] for i in outputs.positions])
                for reduction, outputs in self._each()
            ]
        is_linear = all(reduction.is_linear for reduction in self.reductions.entries)
        if is_linear or is_eager([*leaves, *self.consts]):
            return self._fold(self.consts, leaves)
        differentiable = functools.partial(self._fold, differentiable=True)
        return call_with_derivative_of(differentiable, self._fold, self.consts, list(leaves))

    def _row(self, consts: Sequence[Any], leaves: Sequence[Any]) -> Row:
        item = functools.partial(self.evaluate, consts)
        return Row(lambda *items: item(items), tuple(leaves), self.specs, self.is_expensive)

    def _fold(
        self, consts: Sequence[Any], leaves: Sequence[Any], *, differentiable: bool = False
    ) -> list[Any]:
        """Fold all reductions in one loop.

        To differentiate them, that loop folds the linear ones; the others are folded one by one.
        """
        row = self._row(consts, leaves)
        pairs = self._each()
        in_loop = [reduction.is_linear or not differentiable for reduction, _ in pairs]
        groups = [
            reduction.accumulations(outputs, row.size) if is_in_loop else []
            for (reduction, outputs), is_in_loop in zip(pairs, in_loop, strict=True)
        ]
        steps = [step for group in groups for step in group]
        folded = iter(row.fold(steps) if any(in_loop) else ())
        values: list[Any] = []
        for (reduction, outputs), group, is_in_loop in zip(pairs, groups, in_loop, strict=True):
            if is_in_loop:
                state = reduction.partial(outputs, row, [next(folded) for _ in group])
            else:
                state = reduction.differentiable(outputs, row)
            if self.reductions.of_run is None:
                state = reduction.finish_state(outputs, state, row.size)
            values.append(state)
        return values


def _item_aval(leaf: Any, number: int, specs: Sequence[LoopSpec]) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    for spec in specs:
        axis = spec.in_axes[number]
        aval = aval if axis is None else with_axis(aval, axis)
    return with_shape(aval, aval.shape)


def _by_reduction(where: str, out: Any, reductions: Reductions) -> list[tuple[str, Any]]:
    """Split the output of an item by reduction, and lift it."""
    try:
        pairs = list(
            subtrees_with_entries(
                reductions.prefix, out, "output", is_entry=_is_entry, what="reduction"
            )
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return [(path, entry.lifted(tree)) for path, tree, entry in pairs]


def _check_numbers(outputs: Outputs) -> None:
    for name, aval in zip(outputs.names, outputs.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.number) and aval.dtype != jnp.bool_:
            raise MisfitError(f"{name} holds {aval.dtype}, and no numbers")
