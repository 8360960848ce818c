# SPDX-License-Identifier: MIT
"""The argument ``reduce``: how it is read, and the program of one item that it asks for."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rankax._base.functions import function_location, traced_as
from rankax._base.trees import (
    check_outputs,
    leaves_with_names,
    spread_prefix,
    subtrees_with_entries,
)
from rankax._base.words import listed, plural
from rankax._reduce.gram import Gram
from rankax._reduce.protocol import FILL, Keep, Marked, MisfitError, Outputs, Reduction, Several
from rankax._reduce.sums import All, AnyOf, LogSumExp, Mean, Prod, Sum
from rankax._reduce.winners import ArgMax, ArgMin, Max, Min
from rankax._trace.item import ItemProgram, trace_item

BY_NAME: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        *(Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin()),
        *(AnyOf(), All(), LogSumExp(), Gram()),
    )
}


_OTHER_NAMES = {
    "average": "did you mean 'mean'?",
    "median": "a median needs all outputs at once, so it cannot be folded; keep them, without "
    "reduce= or with None for this output, and call jnp.median",
    **dict.fromkeys(("std", "var"), "use rankax.reductions.Moments(), which has the variance"),
}


def _is_place(node: Any) -> bool:
    return isinstance(node, range)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The argument ``reduce``: a tree of reductions.

    ``places`` has the positions of the ``entries`` at each leaf of the given ``tree``: one, unless
    the leaf is `Several`. The results have the structure ``structure``.

    ``of_run`` is the number of items in all runs if each row is only one run; `reduce_row` then
    returns states for `merge.py`. None: rows are whole.
    """

    entries: tuple[Reduction, ...]
    structure: Any
    tree: Any
    places: tuple[range, ...]
    of_run: int | None = None

    @property
    def prefix(self) -> Any:
        """The tree of the places."""
        return self.tree.unflatten(self.places)

    def of_outputs(self, out: Any) -> list[Reduction]:
        """Return an entry of each leaf of the output of an item."""
        places = spread_prefix(self.prefix, out, "output", is_entry=_is_place, what="reduction")
        return [self.entries[place.start] for place in places]

    def for_runs(self, size: int) -> Reductions:
        """Return the same for runs of ``size`` items."""
        return dataclasses.replace(self, of_run=size)

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
    ends = list(itertools.accumulate(len(jax.tree.leaves(part)) for part in parts))
    places = tuple(map(range, [0, *ends], ends))
    return Reductions(tuple(entries), structure, tree, places)


def _parts(leaf: Any, where: str) -> Any:
    """Return a reduction, or a tuple or dict of several."""
    if not isinstance(leaf, Several):
        return _reduction(leaf, where)
    mask = checked_where(leaf.where, where)
    return jax.tree.map(lambda part: _reduction(part, where).of_items(mask), leaf.reductions)


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
        hint = f"did you mean {close[0]!r}?" if close else f"available: {listed(list(BY_NAME))}"
        hint = _OTHER_NAMES.get(leaf, hint)
        raise ValueError(f"{where}: no reduction is called {leaf!r}; {hint}")
    return BY_NAME[leaf]


def checked_where(value: Any, where: str) -> str | int | None:
    """Return the name of a mask; refuse anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise TypeError(
            f"{where}: where must be the key, field or index of an output, got "
            f"{type(value).__name__} {value!r}"
        )
    return value


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


def trace_reduced(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    reductions: Reductions,
    total: int,
    where: str | None = None,
) -> ItemProgram:
    """Trace a kernel for one item; its outputs are those that the reductions take, then the masks.

    Parameters
    ----------
    fun : callable
        The kernel, of one item of each leaf.
    avals : sequence
        The types of the leaves of one item.
    reductions : Reductions
    total : int
        The number of items of a row.
    where : str, optional
        The kernel and its source line, for errors, if they are not those of ``fun``.
    """
    where = where or function_location(fun)
    traces: list[tuple[list[tuple[str, Any]], list[Any]]] = []

    @traced_as(fun)
    def lifted(*items: Any) -> list[Any]:
        out = fun(*items)
        check_outputs(fun, out)
        trees, masks = _by_reduction(where, out, reductions)
        # Types, because a tracer kept here would be a leak.
        types = [(path, jax.tree.map(jax.typeof, tree)) for path, tree in trees]
        traces.append((types, list(masks)))
        return [*jax.tree.leaves([tree for _, tree in trees]), *masks.values()]

    item = trace_item(lifted, lambda *items: (items, {}), avals, 0)
    outputs: list[Outputs] = []
    # Without the mesh of what the kernel closes over: each device reduces its own part.
    out_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in item.closed.out_avals]
    pairs, masks = traces[-1]
    first, end = 0, len(item.closed.out_avals) - len(masks)
    for (path, tree), entry in zip(pairs, reductions.entries, strict=True):
        structure = jax.tree.structure(tree)
        outs = out_types[first : first + structure.num_leaves]
        names = tuple(name for name, _ in leaves_with_names(tree, path))
        mask = None if entry.where is None else end + masks.index(entry.where)
        outputs.append(Outputs(path, names, structure, tuple(outs), first, mask, total))
        first += structure.num_leaves
    _check(reductions, outputs, where)
    return dataclasses.replace(item, where=where, outputs=tuple(outputs))


def _check(reductions: Reductions, outputs: Sequence[Outputs], where: str) -> None:
    """Refuse outputs that cannot be reduced."""
    for reduction, own in zip(reductions.entries, outputs, strict=True):
        try:
            if not reduction.is_kept:
                _check_numbers(own)
            reduction.check(own, own.total)
        except MisfitError as error:
            raise ValueError(
                f"{where}: it cannot be reduced by {reduction.label}: {error}"
            ) from None
        if own.total < reduction.least_items:
            raise ValueError(
                f"{where}: {reduction.label} needs at least "
                f"{plural(reduction.least_items, 'item')}; the reduced axes have {own.total}"
            )


def _by_reduction(
    where: str, out: Any, reductions: Reductions
) -> tuple[list[tuple[str, Any]], dict[Any, Any]]:
    """Split the output of an item by reduction, and lift it; return the masks, too."""
    names = {entry.where: None for entry in reductions.entries if entry.where is not None}
    out, counts = out if isinstance(out, Marked) else (out, True)
    try:
        masks = {name: ("", counts) if name == FILL else find_mask(out, name) for name in names}
        subtrees = list(
            subtrees_with_entries(
                reductions.prefix, out, "output", is_entry=_is_place, what="reduction"
            )
        )
    except ValueError as error:
        hint = "; for more than one reduction of an output, use rankax.reductions.Several"
        is_array = "is an array" in str(error)
        raise ValueError(f"{where}: {error}{hint if is_array else ''}") from None
    pairs: list[tuple[str, Any]] = []
    for path, tree, place in subtrees:
        for entry in reductions.entries[place.start : place.stop]:
            own = tree if entry.where is None else without(tree, path, masks[entry.where][0])
            pairs.append((path, entry.lifted(own)))
    return pairs, {name: mask & counts for name, (_, mask) in masks.items()}


def find_mask(out: Any, where: str | int) -> tuple[str, Any]:
    """Return the output of an item that ``where`` names, with its name."""
    leaves = dict(leaves_with_names(out, "output"))
    wanted = (f"output.{where}", f"output[{where!r}]", f"output{where}")
    name = next((name for name in wanted if name in leaves), None)
    if name is None:
        names = [other for other in leaves if other != "output"]
        raise ValueError(
            f"where={where!r}: there is no such output; there is {listed(names) or 'one array'}"
        )
    aval = jax.typeof(leaves[name])
    if aval.shape or aval.dtype != jnp.bool_:
        raise ValueError(
            f"where={where!r}: {name} must be one boolean, which says whether the item counts, but "
            f"it has shape {aval.shape} and dtype {aval.dtype}"
        )
    return name, leaves[name]


def without(tree: Any, path: str, name: str) -> Any:
    """Return the outputs at ``path`` with None in place of the one called ``name`` among them."""
    names = [each for each, _ in leaves_with_names(tree, path)]
    if name == path or name not in names:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    leaves[names.index(name)] = None
    return structure.unflatten(leaves)


def _check_numbers(outputs: Outputs) -> None:
    for name, aval in zip(outputs.names, outputs.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.number) and aval.dtype != jnp.bool_:
            raise MisfitError(f"{name} holds {aval.dtype}, and no numbers")
