# SPDX-License-Identifier: MIT
"""The argument ``reduce``: how it is read, and the program of one item that it asks for."""

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from rankax.core.base.arrays import too_many
from rankax.core.base.messages import function_location, listed, plural, traced_as
from rankax.core.base.trees import (
    TooDeepError,
    check_outputs,
    leaves_with_names,
    subtrees_with_entries,
)
from rankax.core.hooks import HINTS
from rankax.core.reduce.protocol import FILL, Keep, Marked, MisfitError, Outputs, Reduction, Several
from rankax.core.trace.programs import ItemProgram, trace_item

#: The reductions that `reduce` knows by name; extensions add theirs.
BY_NAME: dict[str, Reduction] = {}


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The argument ``reduce``: a tree of reductions.

    ``places`` has the positions of the ``entries`` at each leaf of the given ``tree``: one, unless
    the leaf is `Several`. The results have the structure ``structure``.

    ``of_run`` is the number of items in all runs if each row is only one run; `reduce_row` then
    returns states for `RunStates`. None: rows are whole.
    """

    entries: tuple[Reduction, ...]
    structure: Any
    tree: Any
    places: tuple[range, ...]
    of_run: int | None = None

    def subtrees(self, out: Any) -> list[tuple[str, Any, range]]:
        """Return the name of each part of the output of an item, the part, and its places."""
        prefix, name = self.tree.unflatten(self.places), "output"
        found = subtrees_with_entries(
            prefix, out, name, is_entry=lambda node: isinstance(node, range), what="reduction"
        )
        return list(found)

    def of_outputs(self, out: Any) -> list[Reduction]:
        """Return an entry of each leaf of the output of an item."""
        triples = self.subtrees(out)
        return [self.entries[at.start] for _, tree, at in triples for _ in jax.tree.leaves(tree)]

    def for_runs(self, size: int) -> Self:
        """Return the same for runs of ``size`` items."""
        return dataclasses.replace(self, of_run=size)

    def of_items(self, where: str | int) -> Self:
        """Return the same for the items that count."""
        entries = tuple(entry.of_items(where) for entry in self.entries)
        return dataclasses.replace(self, entries=entries)

    @property
    def are_ordered(self) -> bool:
        """Whether one of them takes the items in order."""
        return any(entry.is_ordered for entry in self.entries)

    def each(self, outputs: Sequence[Outputs], *values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return each entry with its outputs and its values."""
        return list(zip(self.entries, outputs, *values, strict=True))

    def numbers_of_tile(self, outputs: Sequence[Outputs]) -> int:
        """Return how many numbers of their states each tile updates, however few items it has."""
        return sum(entry.numbers_of_tile(own) for entry, own in self.each(outputs))

    def assembled(self, outputs: Sequence[Outputs], values: Sequence[Any]) -> Any:
        """Return the result, once all maps are done. States are returned as they are."""
        if self.of_run is None:
            values = [entry.assemble(*own) for entry, *own in self.each(outputs, values)]
        return self.structure.unflatten(values)

    def __str__(self) -> str:
        return listed(list(dict.fromkeys(entry.label for entry in self.entries)))


def read_reductions(value: Any, site: str) -> Reductions:
    """Read names and objects; refuse anything else.

    Parameters
    ----------
    value : str, Reduction, None, or a pytree of those
    site : str
        The name of the called function, for errors.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    parts = [_parts(leaf, site) for leaf in leaves]
    entries, structure = jax.tree.flatten(tree.unflatten(parts))
    if all(entry.is_kept for entry in entries):
        raise ValueError(f"{site}: reduce names no reduction, got {value!r}")
    ends = list(itertools.accumulate(len(jax.tree.leaves(part)) for part in parts))
    places = tuple(map(range, [0, *ends], ends))
    return Reductions(tuple(entries), structure, tree, places)


def _parts(leaf: Any, site: str) -> Any:
    """Return a reduction, or a tuple or dict of several."""
    if not isinstance(leaf, Several):
        return _reduction(leaf, site)
    mask = checked_where(leaf.where, site)
    return jax.tree.map(lambda part: _reduction(part, site).of_items(mask), leaf.reductions)


def _reduction(leaf: Any, site: str) -> Reduction:
    if leaf is None:
        return Keep()
    if isinstance(leaf, Reduction):
        checked_where(leaf.where, site)
        return leaf
    if isinstance(leaf, type) and issubclass(leaf, Reduction):
        raise TypeError(
            f"{site}: reduce got the class {leaf.__name__}; call it: {leaf.__name__}(...)"
        )
    known = listed(list(BY_NAME), "or")
    if not isinstance(leaf, str):
        name = getattr(leaf, "__name__", None)  # such as jnp.sum
        hint = f"; did you mean {name!r}?" if name in BY_NAME else ""
        raise TypeError(
            f"{site}: reduce must hold names ({known}), objects of rankax.reductions and None, "
            f"got {type(leaf).__name__} {name or repr(leaf)}{hint}"
        )
    if leaf not in BY_NAME:
        close = difflib.get_close_matches(leaf, BY_NAME, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"available: {listed(list(BY_NAME))}"
        hint = HINTS.get(leaf, hint)
        raise ValueError(f"{site}: no reduction is called {leaf!r}; {hint}")
    return BY_NAME[leaf]


def checked_where(value: Any, site: str) -> str | int | None:
    """Return the name of a mask; refuse anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise TypeError(
            f"{site}: where must be the key, field or index of an output, got "
            f"{type(value).__name__} {value!r}"
            + ("; pass the array to the kernel, and return it" if hasattr(value, "shape") else "")
        )
    return value


@jax.tree_util.register_static
class _Path(str):
    """The name of an output, as part of the structure of a pytree."""

    __slots__ = ()


def trace_reduced(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    reductions: Reductions,
    total: int,
    site: str | None = None,
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
    site : str, optional
        The kernel and its source line, for errors, if they are not those of ``fun``.
    """
    site = site or function_location(fun)
    keys = [entry.where for entry in reductions.entries if entry.where is not None]
    masks = list(dict.fromkeys(keys))

    @traced_as(fun)
    def lifted(*items: Any) -> Any:
        out = fun(*items)
        check_outputs(fun, out)
        return _by_reduction(site, out, reductions, masks)

    item = trace_item(lifted, lambda *items: (items, {}), avals, 0)
    # Without the mesh of what the kernel closes over: each device reduces its own part.
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in item.closed.out_avals]
    outputs: list[Outputs] = []
    pairs, _ = item.out_tree.unflatten(types)
    end = 0
    for (path, tree), entry in zip(pairs, reductions.entries, strict=True):
        leaves, structure = jax.tree.flatten(tree)
        first, end = end, end + len(leaves)
        names = tuple(name for name, _ in leaves_with_names(tree, path))
        positions = tuple(range(first, end))
        mask = None if entry.where is None else masks.index(entry.where) - len(masks) + len(types)
        own = Outputs(path, names, structure, tuple(leaves), positions, mask, total)
        _check(entry, own, site)
        outputs.append(own)
    return dataclasses.replace(item, site=site, outputs=tuple(outputs))


def _check(reduction: Reduction, outputs: Outputs, site: str) -> None:
    """Refuse outputs that cannot be reduced."""
    try:
        _check_fit(reduction, outputs)
    except MisfitError as error:
        raise ValueError(f"{site}: it cannot be reduced by {reduction.label}: {error}") from None
    if outputs.total < reduction.least_items:
        raise ValueError(
            f"{site}: {reduction.label} needs at least "
            f"{plural(reduction.least_items, 'item')}; the reduced axes have {outputs.total}"
        )


def _by_reduction(
    site: str, out: Any, reductions: Reductions, keys: Sequence[str | int]
) -> tuple[list[tuple[_Path, Any]], list[Any]]:
    """Split the output of an item by reduction, and lift it; return the masks, too."""
    out, counts = out if isinstance(out, Marked) else (out, True)
    try:
        masks = {key: ("", counts) if key == FILL else find_mask(out, key) for key in keys}
        subtrees = reductions.subtrees(out)
    except ValueError as error:
        hint = "; for more than one reduction of an output, use rankax.reductions.Several"
        hint = hint if isinstance(error, TooDeepError) else ""
        raise ValueError(f"{site}: {error}{hint}") from None
    pairs: list[tuple[_Path, Any]] = []
    for path, tree, place in subtrees:
        for entry in reductions.entries[place.start : place.stop]:
            own = tree if entry.where is None else without(tree, path, masks[entry.where][0])
            pairs.append((_Path(path), entry.lifted(own)))
    return pairs, [mask & counts for _, mask in masks.values()]


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


def _check_fit(reduction: Reduction, outputs: Outputs) -> None:
    for name, aval in zip(outputs.names, outputs.avals, strict=True):
        is_number = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
        if not (is_number or reduction.is_kept):
            raise MisfitError(f"{name} has non-numeric dtype {aval.dtype}")
    reduction.check(outputs, outputs.total)
    if reduction.finds_items and (words := too_many(outputs.total)):
        raise MisfitError(words)
