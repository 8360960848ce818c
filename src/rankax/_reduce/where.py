# SPDX-License-Identifier: MIT
"""Reductions of the items that count: those for which one output of the kernel, the mask, is true.

What is left out adds nothing and sends nothing back, even where its value or derivative is NaN:

* Forward, it is replaced by the identity of the reduction, or its lane keeps its state.
* In the derivative, a cotangent of 0 is not enough, because 0 times an infinite derivative is NaN.
  So a first pass over the row, which computes only the mask, finds an item that counts, and the
  inputs of this item take the place of those of each item that is left out. They are constants
  there: the transpose of the choice drops the cotangent. If no item counts, the cotangents of what
  all items share are dropped, too (`masked_row`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.arrays import scalar
from rankax._base.trees import leaves_with_names
from rankax._base.words import listed
from rankax._reduce.extrema import Arg, Top, no_index, sort_key
from rankax._reduce.protocol import MisfitError, counting
from rankax._reduce.row import Row, Steps, index_dtype
from rankax._reduce.states import Accumulation, Accumulator, Elementwise, Ordered, State, fill
from rankax._trace.derivatives import has_tangent

__all__ = ["find_mask", "fold_masked", "masked_row", "without"]


def find_mask(out: Any, where: str | int) -> tuple[str, Any]:
    """Return the output of an item that ``where`` names, with its name."""
    leaves = dict(leaves_with_names(out, "output"))
    wanted = (f"output.{where}", f"output[{where!r}]", f"output{where}")
    name = next((name for name in wanted if name in leaves), None)
    if name is None:
        names = [other for other in leaves if other != "output"]
        raise MisfitError(
            f"where={where!r}: there is no such output; there is {listed(names) or 'one array'}"
        )
    aval = jax.typeof(leaves[name])
    if aval.shape or aval.dtype != jnp.bool_:
        raise MisfitError(
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


# Accumulators of pairs: a tile, and whether each of its items counts.


class _Masked(Accumulator):
    """A lane keeps its state where its item is left out."""

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        values, counts = tile
        new = super().step(state, values, index)
        return jax.tree.map(lambda new, old: jnp.where(counts, new, old), new, state)


class _MaskedArg(_Masked, Arg):
    """A lane has no index until one of its items counts."""

    def start(self, lanes: int) -> State:
        best, at = super().start(lanes)
        return best, fill(no_index(at.dtype), at.dtype, at.shape)

    def merge(self, first: State, second: State) -> State:
        (best, at), (value, index) = first, second
        wins = self._wins(value, best) | (at == scalar(no_index(at.dtype), at.dtype))
        return jnp.where(wins, value, best), jnp.where(wins, index, at)


class _MaskedTop(Top):
    """An item that is left out is an empty entry."""

    def step(self, state: State, tile: Any, index: jax.Array) -> State:
        values, counts = tile
        keys = sort_key(values, largest=self.largest)
        lowest, none = (x[..., 0] for x in self.start(1))
        keys = jnp.where(counts, keys, lowest[..., None])
        return self.merge(state, (keys, jnp.where(counts, index, none[..., None])))


@functools.cache
def _masked_class(cls: type) -> type:
    if cls in (Arg, Top):
        return _MaskedArg if cls is Arg else _MaskedTop
    return type(f"Masked{cls.__name__}", (_Masked, cls), {})


def _identities(step: Any) -> Iterator[tuple[int, jax.Array]]:
    """Yield what takes the place of an output of an item that is left out."""
    accumulator = step.accumulator
    if isinstance(accumulator, Elementwise):
        yield step.outputs, scalar(accumulator.identity, accumulator.dtype)
    if isinstance(accumulator, Ordered):
        pairs = zip(*map(jax.tree.leaves, (step.outputs, accumulator.identity)), strict=True)
        yield from ((position, jax.device_put(identity)) for position, identity in pairs)


def fold_masked(
    row: Row,
    steps: Steps,
    masks: Sequence[int | None],
    *,
    linear: bool = True,
    by_identity: tuple[type, ...] = (Ordered,),
) -> list[Any]:
    """Do what `Row.fold` does; a step with a mask takes only the items that count.

    With the accumulators ``by_identity``, an item that is left out returns the identity.
    """

    def in_item(step: Any, mask: int | None) -> bool:
        return mask is not None and isinstance(step.accumulator, by_identity)

    both = list(zip(steps, masks, strict=True))
    replaced: list[Any] = [pair for pair in both if in_item(*pair)]

    def with_identities(outs: list[Any]) -> list[Any]:
        new = list(outs)
        for step, mask in replaced:
            for at, identity in _identities(step):
                new[at] = jnp.where(outs[mask], outs[at].astype(identity.dtype), identity)
        return new

    def masked(step: Any, mask: int | None) -> Any:
        if mask is None or in_item(step, mask):
            return step
        accumulator = _masked_class(type(step.accumulator))(**vars(step.accumulator))
        return dataclasses.replace(step, outputs=(step.outputs, mask), accumulator=accumulator)

    row = row.then(with_identities) if replaced else row
    return row.fold([masked(*pair) for pair in both], linear=linear)


# The derivative.


@dataclasses.dataclass(frozen=True)
class _MaskedRow(Row):
    """A row whose items that are left out can be differentiated as if they counted."""

    counts: Callable[..., jax.Array] = dataclasses.field(kw_only=True)  # of one item
    number: Any = dataclasses.field(kw_only=True)  # of the items that count

    @property
    def count(self) -> Any:
        return self.number

    def fold(self, steps: Steps, *, linear: bool = True) -> list[Any]:
        def item(*leaves: Any) -> list[jax.Array]:
            return [*self.item(*leaves), self.counts(*leaves)]

        row = Row(item, self.leaves, self.levels, self.is_expensive)
        # In the item, because a loop stores what a derivative of its states needs, for each item.
        by_identity = Elementwise, Ordered
        masks = [-1] * len(steps)
        return fold_masked(row, steps, masks, linear=linear, by_identity=by_identity)


def masked_row(
    row_of: Callable[[Sequence[Any], Sequence[Any]], Row],
    consts: Sequence[Any],
    leaves: Sequence[Any],
    mask: int,
) -> Row:
    """Return a row to differentiate, given the function that makes it from constants and leaves."""
    row = row_of([lax.stop_gradient(x) for x in consts], leaves)

    def counts(*leaves: Any) -> jax.Array:
        return row.item(*map(lax.stop_gradient, leaves))[mask]

    if not row.size:
        return _MaskedRow(**vars(row), counts=counts, number=scalar(0, index_dtype(0)))
    arg = Arg((), jnp.bool_, index_dtype(row.size), largest=True)
    (_, index), number = row.fold_constants([Accumulation(mask, arg), counting(mask, row.size)])

    def if_any(x: Any) -> Any:
        if not has_tangent(jax.typeof(x)):
            return x
        return jnp.where(number[0] > 0, x, lax.stop_gradient(x))

    by_leaf = [[level.in_axes[i] for level in row.levels] for i in range(len(leaves))]
    is_mapped = [any(axis is not None for axis in axes) for axes in by_leaf]
    pairs = zip(leaves, is_mapped, strict=True)
    safe = row_of(list(map(if_any, consts)), [x if own else if_any(x) for x, own in pairs])
    others = [lax.stop_gradient(x) for x in safe.leaves_at(index[0])]
    is_mapped += [True] * (len(others) - len(is_mapped))  # the numbers of items

    def item(*leaves: Any) -> list[jax.Array]:
        is_own = counts(*leaves)
        triples = zip(leaves, others, is_mapped, strict=True)
        return safe.item(*(lax.select(is_own, x, y) if own else x for x, y, own in triples))

    some = item, safe.leaves, safe.levels, safe.is_expensive
    return _MaskedRow(*some, counts=counts, number=number[0])
