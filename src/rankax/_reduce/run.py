# SPDX-License-Identifier: MIT
"""Reduce the outputs of a kernel over a row of items, as the argument ``reduce`` says."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rankax._base.functions import function_location
from rankax._base.trees import (
    check_outputs,
    leaves_with_names,
    subtrees_with_entries,
)
from rankax._base.words import listed
from rankax._loop.keys import PLACE
from rankax._loop.loop import apart_from_constants
from rankax._loop.reuse import is_eager
from rankax._loop.spec import LoopSpec
from rankax._reduce.protocol import Keep, MisfitError, Outputs, Reduction, Several
from rankax._reduce.row import Row, evaluates_functions
from rankax._reduce.sums import All, AnyOf, LogSumExp, Mean, Prod, Sum
from rankax._reduce.where import find_mask, fold_masked, masked_row, without
from rankax._reduce.winners import ArgMax, ArgMin, Max, Min
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.item import with_axis, with_shape

__all__ = [
    "Reduced",
    "Reductions",
    "RowProgram",
    "checked_where",
    "read_reductions",
    "reduce_row",
]

BY_NAME: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        *(Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin()),
        *(AnyOf(), All(), LogSumExp()),
    )
}


class _Place(NamedTuple):
    """The reductions of the same output."""

    entries: tuple[Reduction, ...]


def _is_place(node: Any) -> bool:
    return isinstance(node, _Place)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The argument ``reduce``: a tree of reductions.

    ``entries`` has all of them, and ``structure`` is that of the results. The tree that was given
    is ``tree``, with one or several entries in each of its ``places``.

    ``of_run`` is the number of items in all runs if each row is only one run; `reduce_row` then
    returns states for `merge.py`. None: rows are whole.
    """

    entries: tuple[Reduction, ...]
    structure: Any
    tree: Any
    places: tuple[int, ...]
    of_run: int | None = None

    def spread(self, out: Any) -> Iterator[tuple[str, Any, Sequence[Reduction]]]:
        """Yield the name of each subtree of an item's output, the subtree, and its entries."""
        entries = iter(self.entries)
        places = [_Place(tuple(itertools.islice(entries, count))) for count in self.places]
        prefix = self.tree.unflatten(places)
        for path, tree, place in subtrees_with_entries(
            prefix, out, "output", is_entry=_is_place, what="reduction"
        ):
            yield path, tree, place.entries

    def of_outputs(self, out: Any) -> list[Reduction]:
        """Return an entry of each leaf of the output of an item."""
        return [entries[0] for _, tree, entries in self.spread(out) for _ in jax.tree.leaves(tree)]

    def for_runs(self, size: int, *, over_devices: bool = False) -> Reductions:
        """Return the same for runs of ``size`` items."""
        entries = self.entries
        if over_devices:
            entries = tuple(entry.over_devices() for entry in entries)
        return dataclasses.replace(self, entries=entries, of_run=size)

    def of_items(self, where: str | int) -> Reductions:
        """Return the same for the items that count."""
        entries = tuple(entry.of_items(where) for entry in self.entries)
        return dataclasses.replace(self, entries=entries)

    @property
    def are_ordered(self) -> bool:
        """Whether one of them takes the items in order."""
        return any(entry.is_ordered for entry in self.entries)

    def __str__(self) -> str:
        return listed(list(dict.fromkeys(entry.label for entry in self.entries)))


def read_reductions(value: Any, where: str) -> Reductions:
    """Read names and objects; refuse anything else.

    Parameters
    ----------
    value : str, Reduction, None, or a pytree of those
    where : str
        The name of the called function, for errors.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    parts = [_parts(leaf, where) for leaf in leaves]
    entries, structure = jax.tree.flatten(tree.unflatten(parts))
    if all(entry.is_kept for entry in entries):
        raise ValueError(f"{where}: reduce names no reduction, got {value!r}")
    places = tuple(len(jax.tree.leaves(part)) for part in parts)
    return Reductions(tuple(entries), structure, tree, places)


def checked_where(value: Any, where: str) -> str | int | None:
    """Return the name of a mask; refuse anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise TypeError(
            f"{where}: where must be the key, field or index of an output, got "
            f"{type(value).__name__} {value!r}"
        )
    return value


def _parts(leaf: Any, where: str) -> Any:
    """Return a reduction, or a tuple or dict of several."""
    if not isinstance(leaf, Several):
        return _reduction(leaf, where)
    mask = checked_where(leaf.where, where)
    parts = [_reduction(part, where).of_items(mask) for part in leaf.reductions]
    return dict(zip(leaf.keys, parts, strict=True)) if leaf.keys else tuple(parts)


def _reduction(leaf: Any, where: str) -> Reduction:
    if leaf is None:
        return Keep()
    if isinstance(leaf, Reduction):
        checked_where(leaf.where, where)
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
        traces: list[tuple[list[tuple[str, Any]], list[Any]]] = []

        def lifted(*items: Any) -> list[Any]:
            out = fun(*items)
            check_outputs(fun, out)
            pairs, masks = _by_reduction(where, out, reductions)
            traces.append((pairs, list(masks)))
            return [*jax.tree.leaves([tree for _, tree in pairs]), *masks.values()]

        closed = jax.make_jaxpr(lifted)(*avals)
        outputs: list[Outputs] = []
        pairs, masks = traces[-1]
        first, end = 0, len(closed.out_avals) - len(masks)
        for (path, tree), entry in zip(pairs, reductions.entries, strict=True):
            structure = jax.tree.structure(tree)
            outs = closed.out_avals[first : first + structure.num_leaves]
            names = tuple(name for name, _ in leaves_with_names(tree, path))
            mask = None if entry.where is None else end + masks.index(entry.where)
            outputs.append(Outputs(path, names, structure, tuple(outs), first, mask))
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
                    f"{where}: it cannot be reduced by {reduction.label}: {error}"
                ) from None

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """Return one value for each reduction of a row: its result, or its state."""
        row = self._row(self.consts, leaves)
        has_masks = any(outputs.mask is not None for outputs in self.outputs)
        is_at_once = not has_masks and (row.is_whole or not row.size)
        if self.reductions.of_run is None and is_at_once:
            outs = row.whole()
            return [
                reduction.plain(outputs, row, [outs[i] for i in outputs.positions])
                for reduction, outputs in self._each()
            ]
        is_linear = all(reduction.is_linear for reduction in self.reductions.entries)
        if (is_linear and not has_masks) or is_eager([*leaves, *self.consts]):
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

        To differentiate them, one loop for each mask folds the linear ones; the others are folded
        one by one.
        """
        row = self._row(consts, leaves)
        pairs = self._each()
        rows: dict[int | None, Row] = {None: row}
        if differentiable:
            for mask in {outputs.mask for outputs in self.outputs if outputs.mask is not None}:
                rows[mask] = masked_row(self._row, consts, leaves, mask)
        states: dict[int, Any] = {}
        for mask, own in rows.items():
            groups = {
                i: reduction.accumulations(outputs, row.size)
                for i, (reduction, outputs) in enumerate(pairs)
                if not differentiable or (reduction.is_linear and outputs.mask == mask)
            }
            steps = [step for group in groups.values() for step in group]
            masks = [
                None if differentiable else pairs[i][1].mask
                for i, group in groups.items()
                for _ in group
            ]
            folded = iter(fold_masked(own, steps, masks) if groups else ())
            for i, group in groups.items():
                reduction, outputs = pairs[i]
                states[i] = reduction.partial(outputs, own, [next(folded) for _ in group])
        values: list[Any] = []
        for i, (reduction, outputs) in enumerate(pairs):
            if i not in states:
                states[i] = reduction.differentiable(outputs, rows[outputs.mask])
            if self.reductions.of_run is None:
                states[i] = reduction.finish_state(outputs, states[i], row.size)
            values.append(states[i])
        return values


def _item_aval(leaf: Any, number: int, specs: Sequence[LoopSpec]) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    for spec in specs:
        axis = spec.in_axes[number]
        aval = aval if axis is None else with_axis(aval, axis)
    return with_shape(aval, aval.shape)


def _by_reduction(
    where: str, out: Any, reductions: Reductions
) -> tuple[list[tuple[str, Any]], dict[Any, Any]]:
    """Split the output of an item by reduction, and lift it; return the masks, too."""
    named: dict[Any, tuple[str, Any]] = {}
    try:
        for entry in reductions.entries:
            if entry.where is not None:
                named[entry.where] = find_mask(out, entry.where)
    except MisfitError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        triples = list(reductions.spread(out))
    except ValueError as error:
        is_tuple = "is a tuple of" in str(error)
        hint = "; for more than one reduction of an output, use rankax.reductions.Several"
        raise ValueError(f"{where}: {error}{hint if is_tuple else ''}") from None
    pairs: list[tuple[str, Any]] = []
    for path, tree, entries in triples:
        for entry in entries:
            own = without(tree, path, named[entry.where][0]) if entry.where in named else tree
            pairs.append((path, entry.lifted(own)))
    return pairs, {key: mask for key, (_, mask) in named.items()}


def _check_numbers(outputs: Outputs) -> None:
    for name, aval in zip(outputs.names, outputs.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.number) and aval.dtype != jnp.bool_:
            raise MisfitError(f"{name} holds {aval.dtype}, and no numbers")
