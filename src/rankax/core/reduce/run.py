# SPDX-License-Identifier: MIT
"""The argument ``reduce``: what it asks of an item, and of a row in each pass.

A run is some items of a row, such as one device's part or one dask block; for a reduction that
depends on their order, they are consecutive. For `Reductions` with ``of_run``, `RowReduction`
returns states instead of results, and `ext/runs.py` merges the states of all runs.

With ``where``, an item counts if its mask, an argument or one of the outputs of the kernel, is
true. Others add nothing and send nothing back, even where their value or derivative is NaN:

* Forward, it is replaced by the identity of the reduction, or the accumulator passes over it.
* In the derivative, a cotangent of 0 is not enough, because 0 times an infinite derivative is NaN.
  So a first pass over the row, which computes only the mask, finds an item that counts, and the
  inputs of this item replace the inputs of each item that is left out. They are constants
  there: the transpose of the choice drops the cotangent. It also drops those of what all items
  share, if that is small. If no item counts, so are the cotangents of all else (`_masked_row`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import gated, gated_if_small, has_tangent, index_dtype, too_many
from rankax.core.base.messages import function_location, listed, plural, traced_as
from rankax.core.base.trees import (
    TooDeepError,
    check_outputs,
    leaves_with_names,
    subtrees_with_entries,
)
from rankax.core.loop.loop import group_of
from rankax.core.loop.spec import item_of, items_at, own_places
from rankax.core.plan.schedule import Level, at_most
from rankax.core.protocols import Rules
from rankax.core.reduce.extrema import Arg
from rankax.core.reduce.protocol import (
    FILL,
    Marked,
    MisfitError,
    Outputs,
    Reduction,
    count_dtype,
)
from rankax.core.reduce.row import Accumulation, Row
from rankax.core.trace.programs import ItemProgram, trace_item


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The argument ``reduce``: a tree of reductions.

    ``places`` has the positions of the ``entries`` at each leaf of the given ``tree``: one, unless
    the leaf is `Several`. The results have the structure ``structure``.

    ``of_run`` is the number of items in all runs if each row is only one run; `RowReduction` then
    returns states for `RunStates` (`ext/runs.py`). None: rows are whole.
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
        """Return the same for runs that have ``size`` items together."""
        return dataclasses.replace(self, of_run=size)

    def of_items(self, where: str | int) -> Self:
        """Return the same for the items that count."""
        entries = tuple([entry.of_items(where) for entry in self.entries])
        return dataclasses.replace(self, entries=entries)

    def marked(self, out: Any, paths: Sequence[str], leaves: Sequence[Any], counts: Any) -> Any:
        """Return the output of an item with whether it counts, and the arguments that are named."""
        named = {key for entry in self.entries for key in (entry.where, entry.argument)}
        keys = named.intersection(paths)
        if counts is True and not keys:
            return out
        pairs = zip(paths, leaves, strict=True)
        return Marked(out, counts, {path: leaf for path, leaf in pairs if path in keys})

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

    def chosen(self, outputs: Sequence[Outputs]) -> int:
        """Return how many items of a row a derivative evaluates again (`Reduction.chosen`)."""
        return sum(entry.chosen(own) for entry, own in self.each(outputs))

    def assembled(self, outputs: Sequence[Outputs], values: Sequence[Any]) -> Any:
        """Return the result, once all maps are done. States are returned as they are."""
        if self.of_run is None:
            values = [entry.assemble(*own) for entry, *own in self.each(outputs, values)]
        return self.structure.unflatten(values)

    def __str__(self) -> str:
        return listed(list(dict.fromkeys(entry.label for entry in self.entries)))


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
        The number of items of a row, in all runs.
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
        names = tuple([name for name, _ in leaves_with_names(tree, path)])
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
    total: Any = outputs.total  # unknown with `jax.export`, perhaps
    if isinstance(total, int) and total < reduction.least_items:
        raise ValueError(
            f"{site}: {reduction.label} needs at least "
            f"{plural(reduction.least_items, 'item')}; the reduced axes have {outputs.total}"
        )


def _by_reduction(
    site: str, out: Any, reductions: Reductions, keys: Sequence[str | int]
) -> tuple[list[tuple[_Path, Any]], list[Any]]:
    """Split the output of an item by reduction, and lift it; return the masks, too."""
    out, counts, arguments = Marked.opened(out)
    try:
        masks = {
            key: ("", counts) if key == FILL else find_mask(out, key, arguments) for key in keys
        }
        subtrees = reductions.subtrees(out)
    except ValueError as error:
        hint = "; for more than one reduction of an output, use rankax.reductions.Several"
        hint = hint if isinstance(error, TooDeepError) else ""
        raise ValueError(f"{site}: {error}{hint}") from None
    pairs: list[tuple[_Path, Any]] = []
    for path, tree, place in subtrees:
        for entry in reductions.entries[place.start : place.stop]:
            own = tree if entry.where is None else without(tree, path, masks[entry.where][0])
            pairs.append((_Path(path), entry.lifted(own, arguments)))
    return pairs, [mask if counts is True else mask & counts for _, mask in masks.values()]


def find_mask(out: Any, where: str | int, arguments: Mapping[Any, Any]) -> tuple[str, Any]:
    """Return the argument, or the output, of an item that ``where`` names, with its name."""
    leaves = dict(leaves_with_names(out, "output"))
    wanted = (f"output.{where}", f"output[{where!r}]", f"output{where}")
    name = next((name for name in wanted if name in leaves), None)
    if name is not None and where in arguments and leaves[name] is not arguments[where]:
        raise ValueError(
            f"where={where!r}: {name} and the argument {where} have this name; rename one"
        )
    if name is None and where in arguments:
        name, leaves = str(where), arguments
    if name is None:
        names = [other for other in leaves if other != "output"]
        raise ValueError(
            f"where={where!r}: there is no such output; there is {listed(names) or 'one array'}"
            f"{f', and no argument {where} with a rank' if isinstance(where, str) else ''}"
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


class GivenMask(NamedTuple):
    """A mask that is an argument: what to evaluate in place of the items that it leaves out.

    It is found once for the whole batch. To look for it in each row would select, in each row, what
    all items share: a gradient of 10,000 lists of 48 neighbours took 80 times as long.

    If only some axes have the mask, and each array has either all of those or none, an item that
    counts does so with all of the other axes. Then what is left out is replaced before the loops
    (`replaced`): to select it in each item took four times as long in a gradient of pairs.
    """

    place: int  # among the leaves
    items: list[Any]  # the inputs of an item that counts
    is_mapped: list[bool]  # the leaves that differ between items
    consts: list[Any]  # of the program; nothing flows back to them if no item counts
    is_replaced: list[bool] | None = None  # the leaves, before the loops

    @classmethod
    def of(
        cls, place: int, consts: Sequence[Any], leaves: Sequence[Any], levels: Sequence[Level]
    ) -> Self:
        """Look for an item that counts among those of all levels."""
        # XLA would reduce a constant at compile time, by an interpreter: 48 s for 2 million items.
        mask = lax.optimization_barrier(leaves[place])
        dtype = index_dtype(mask.size)
        rest, places = lax.argmax(jnp.ravel(mask), 0, dtype), list[Any]()
        for level in reversed(levels):
            is_own, length = level.in_axes[place] is not None, np.asarray(level.size, dtype)
            places.append(rest % length if is_own else jnp.zeros((), dtype))
            rest = rest // length if is_own else rest
        some, places = jnp.any(mask), places[::-1]
        by_leaf = [[level.in_axes[i] for level in levels] for i in range(len(leaves))]
        items = [item_of(x, i, places, levels) for i, x in enumerate(leaves)]
        items = [lax.stop_gradient(x) for x in (*items, *own_places(places, levels))]
        is_mapped = [any(axis is not None for axis in axes) for axes in by_leaf]
        return cls(place, items, is_mapped, [_if_any(some, x) for x in consts])

    def replaced(self, leaves: list[Any], levels: Sequence[Level]) -> tuple[Self, list[Any]]:
        """Return the mask, and the leaves of which some are replaced, if that is possible."""
        of_leaf = [
            [level for level in levels if level.in_axes[i] is not None] for i in range(len(leaves))
        ]
        own = of_leaf[self.place]
        are_apart = all(its == own or own[0] not in its for its in of_leaf) if own else False
        if len(own) != 1 or len(levels) == 1 or levels[0].numbered or not are_apart:
            return self, leaves
        mask, found = leaves[self.place], list(leaves)
        is_replaced = [its == own and i != self.place for i, its in enumerate(of_leaf)]
        for i in itertools.compress(range(len(leaves)), is_replaced):
            select = jax.vmap(lax.select, (0, own[0].in_axes[i], None), own[0].in_axes[i])
            found[i] = select(mask, leaves[i], self.items[i])
        return self._replace(is_replaced=is_replaced), found


def _if_any(some: Any, x: Any) -> Any:
    """Return an array to which nothing flows back unless some item counts."""
    return jnp.where(some, x, lax.stop_gradient(x)) if has_tangent(jax.typeof(x)) else x


# The reductions of a row, in the pass that is evaluated or in the one that is differentiated.

# A row has at least so many items for each that is evaluated again. The derivative of the others is
# not computed then: with 16 to 200 items, gradients of min, max, `TopK` and `Best` take 0.3 to 0.7
# of the time on a CPU, and on a GPU, nothing of a row is stored.
_ITEMS_PER_CHOSEN = 8


@dataclasses.dataclass(frozen=True)
class RowReduction:
    """How the items of a row are reduced: in the pass that is evaluated, or that differentiated.

    Attributes
    ----------
    item_of : callable
        Makes the function of one item from the constants of its program.
    levels : tuple of Level
        The levels of the row, outermost first.
    outputs : tuple of Outputs
        As `trace_reduced` returns them.
    reductions : Reductions
    jaxpr : Jaxpr
        The program of an item.
    rules : Rules
    masks : dict
        By position among the outputs, the masks that are arguments.
    """

    item_of: Callable[[Sequence[Any]], Callable[..., list[Any]]]
    levels: tuple[Level, ...]
    outputs: tuple[Outputs, ...]
    reductions: Reductions
    jaxpr: Jaxpr
    rules: Rules
    masks: Mapping[int, GivenMask] = dataclasses.field(default_factory=dict)

    def values(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> list[Any]:
        """Return one value for each reduction: its result, or its state."""
        row, every = self._row(consts, leaves, back=back), self.reductions.each(self.outputs)
        if self.is_at_once:
            outs, row = row.whole(), dataclasses.replace(row, picks=back and self.chooses_few)
            return [entry.plain(own, row, [outs[i] for i in own.positions]) for entry, own in every]
        # A row of no items has no winner to take a derivative from.
        if not back or not row.size:
            return self._fold_each(row, every, back=False)
        # One loop for each mask, after one that finds constants.
        values: dict[int, Any] = {}
        for mask in dict.fromkeys(outputs.mask for outputs in self.outputs):
            each = {i: pair for i, pair in enumerate(every) if pair[1].mask == mask}
            pairs = list(each.values())
            own = row if mask is None else self._masked_row(consts, leaves, pairs[0][1])
            values.update(zip(each, self._fold_each(own, pairs, back=True), strict=True))
        return [values[i] for i in range(len(values))]

    @property
    def is_linear(self) -> bool:
        """Whether the pass that is evaluated can be differentiated as it is."""
        return not self._is_masked and all(entry.is_linear for entry in self.reductions.entries)

    @property
    def has_groups(self) -> bool:
        """Whether the pass that is evaluated may take steps in groups (`Row`)."""
        loops = [level for level in self.levels if level.is_loop]
        return bool(loops) and group_of(loops[-1].chunks.steps) > 0

    @property
    def is_at_once(self) -> bool:
        """Whether all items are evaluated at once, and reduced as `jax.numpy` does."""
        has_loop = any(level.is_loop or level.walker for level in self.levels)
        return self.reductions.of_run is None and not (has_loop or self._is_masked)

    @property
    def chooses_few(self) -> bool:
        """Whether a derivative had better evaluate the chosen items of a row again."""
        chosen = self.reductions.chosen(self.outputs)
        items = math.prod(level.chunks.length for level in self.levels)
        return chosen > 0 and not at_most(items, _ITEMS_PER_CHOSEN * chosen - 1)

    @property
    def _is_masked(self) -> bool:
        return any(outputs.mask is not None for outputs in self.outputs)

    def _row(self, consts: Sequence[Any], leaves: Sequence[Any], *, back: bool) -> Row:
        count = len(self.jaxpr.outvars)
        item, is_run = self.item_of(consts), self.reductions.of_run is not None
        row = Row(item, tuple(leaves), self.levels, self.jaxpr, self.rules, count, back)
        return dataclasses.replace(row, is_run=is_run)

    def _masked_row(self, consts: Sequence[Any], leaves: Sequence[Any], outputs: Outputs) -> Row:
        """Return a row whose items that are left out can be differentiated as if they counted.

        ``outputs`` are some that the mask is for.
        """
        if (given := self.masks.get(outputs.mask)) is not None:
            return self._row_of_given(given, leaves)
        row = self._row([lax.stop_gradient(x) for x in consts], leaves, back=True)

        def counts(*leaves: Any) -> jax.Array:
            return row.item(*map(lax.stop_gradient, leaves))[outputs.mask]

        arg = Arg((), jnp.bool_, index_dtype(row.size), largest=True)
        if words := too_many(row.size):
            raise ValueError(f"a reduction with where or bucket has no derivative: {words}")
        steps = Accumulation(outputs.mask, arg), outputs.counting()
        (_, (index,)), (number,) = row.fold_constants(steps)
        if_any = functools.partial(_if_any, number > 0)
        by_leaf = [[level.in_axes[i] for level in row.levels] for i in range(len(leaves))]
        is_mapped = [any(axis is not None for axis in axes) for axes in by_leaf]
        pairs = zip(leaves, is_mapped, strict=True)
        shared = [x if own else if_any(x) for x, own in pairs]
        consts = list(map(if_any, consts))
        safe = self._row(consts, shared, back=True)
        others = [lax.stop_gradient(x) for x in items_at(safe.leaves, index, safe.levels)]
        item = self._safe_item(counts, consts, others, is_mapped)
        return dataclasses.replace(safe, item=item, counts=counts, number=number)

    def _row_of_given(self, mask: GivenMask, leaves: Sequence[Any]) -> Row:
        """Return such a row for a mask that is an argument."""

        def counts(*leaves: Any) -> jax.Array:
            return leaves[mask.place]

        row = self._row(mask.consts, leaves, back=True)
        number = jnp.sum(leaves[mask.place], dtype=count_dtype(row.size))
        for level in self.levels:
            if level.in_axes[mask.place] is None:
                number = number * np.asarray(level.size, number.dtype)
        if mask.is_replaced is None:
            item = self._safe_item(counts, mask.consts, mask.items, mask.is_mapped)
        else:
            item = self._gated_item(mask.place, mask.consts, mask.is_replaced)
        return dataclasses.replace(row, item=item, counts=counts, number=number)

    def _gated_item(
        self, place: int, consts: Sequence[Any], is_replaced: Sequence[bool]
    ) -> Callable[..., list[jax.Array]]:
        """Return the item of which some leaves are replaced, and which sends nothing to others."""

        def item(*leaves: Any) -> list[jax.Array]:
            pairs = zip(leaves, is_replaced, strict=True)
            own = [x if done else gated(leaves[place], x) for x, done in pairs]
            gate = functools.partial(gated_if_small, leaves[place])
            return self.item_of(list(map(gate, consts)))(*own)

        return item

    def _safe_item(
        self,
        counts: Callable[..., jax.Array],
        consts: Sequence[Any],
        others: Sequence[Any],
        is_mapped: Sequence[bool],
    ) -> Callable[..., list[jax.Array]]:
        """Return the item, which evaluates ``others`` in place of what is left out."""
        is_mapped = [*is_mapped, *[True] * (len(others) - len(is_mapped))]  # the numbers of items

        def item(*leaves: Any) -> list[jax.Array]:
            is_own = counts(*leaves)
            gate = functools.partial(gated_if_small, is_own)
            triples = zip(leaves, others, is_mapped, strict=True)
            chosen = [lax.select(is_own, x, y) if own else gate(x) for x, y, own in triples]
            return self.item_of(list(map(gate, consts)))(*chosen)

        return item

    def _fold_each(self, row: Row, pairs: Sequence[tuple[Any, ...]], *, back: bool) -> list[Any]:
        """Fold reductions in one loop; to be differentiated, as they ask for it."""
        groups = [
            reduction.differentiable(outputs, row)
            if back
            else reduction.accumulations(outputs, row.size)
            for reduction, outputs in pairs
        ]
        every = list(itertools.chain(*groups))
        if back:
            states, whole = iter(row.found_together(every)), iter(())
        else:
            kept = [i for entry, outputs in pairs if entry.is_kept for i in outputs.positions]
            folded = row.fold(every, kept)
            states, whole = iter(folded[: len(every)]), iter(folded[len(every) :])
        values: list[Any] = []
        for (reduction, outputs), group in zip(pairs, groups, strict=True):
            state = list(itertools.islice(states, len(group)))
            if reduction.is_kept:
                state = state or list(itertools.islice(whole, len(outputs.positions)))
            else:
                state = reduction.partial(outputs, row, state)
            if self.reductions.of_run is None:
                state = reduction.finish_state(outputs, state, row.size)
            values.append(state)
        return values
