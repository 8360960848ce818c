# SPDX-License-Identifier: MIT
"""Reductions that choose items: the largest, the first, the best few.

The items are compared in the loop; those that win are evaluated once more, which is all that a
derivative has to look at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.checks import check_bool, positive_int
from rankax._base.words import listed
from rankax._reduce.protocol import (
    EachLeaf,
    MisfitError,
    Part,
    Places,
    Reduction,
    dtype_of,
    is_float,
)
from rankax._reduce.row import Row, Task
from rankax._reduce.states import Accumulator, Arg, Elementwise, Top, best_keys, sort_key
from rankax._trace.derivatives import call_with_derivative_of

__all__ = ["ArgMax", "ArgMin", "Best", "Max", "Min", "TopK", "TopKResult"]


class _Compared(EachLeaf):
    """What needs numbers that can be compared, and at least one of them."""

    def check(self, part: Part, count: int) -> None:
        for name, aval in zip(part.names, part.avals, strict=True):
            if jnp.issubdtype(aval.dtype, jnp.complexfloating):
                raise MisfitError(
                    f"{name} has dtype {aval.dtype}, and complex numbers have no order"
                )
        if not count:
            raise MisfitError(
                f"there is no item to reduce {part.path} over, and {self.name} needs one"
            )


class _ArgExtremum(_Compared):
    largest = False
    numbers_items = True

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        return Arg(aval.shape, aval.dtype, row.index_dtype, self.largest)

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        return state[1][..., 0].astype(dtype_of(jnp.argmin, aval))

    def of_part(self, count: int) -> Reduction:
        return _Found(self)

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        return [index for _, index in _Found(self).of_parts(part, values, places)]


@dataclasses.dataclass(frozen=True)
class _Found(_Compared):
    """The extreme value of one part of a row, and its index."""

    arg: _ArgExtremum

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        return self.arg.accumulator(aval, row)

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        return state[0][..., 0], self.arg.result(state, aval, row, position)

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        def found(out: jax.Array) -> tuple[jax.Array, jax.Array]:
            at = type(self.arg).function(out, axis=0, keepdims=True)
            value = jnp.take_along_axis(lax.stop_gradient(out), at, axis=0)
            return jnp.squeeze(value, 0), jnp.squeeze(at, 0)

        return [found(out) for out in outs]

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        return [
            _best_of(value, places.in_whole(index), largest=self.arg.largest)
            for value, index in values
        ]


def _best_of(values: jax.Array, index: jax.Array, *, largest: bool) -> tuple[Any, Any]:
    """Return the best of the values along axis 0, and its index; of equals the first index."""
    arg = Arg(values.shape[1:], values.dtype, index.dtype, largest)
    state = arg.join((jnp.moveaxis(values, 0, -1), jnp.moveaxis(index, 0, -1)))
    return state[0][..., 0], state[1][..., 0]


@dataclasses.dataclass(frozen=True)
class ArgMax(_ArgExtremum):
    """`jax.numpy.argmax`: the index into the reduced axes, as if they were one."""

    name = "argmax"
    function = staticmethod(jnp.argmax)
    largest = True


@dataclasses.dataclass(frozen=True)
class ArgMin(_ArgExtremum):
    """`jax.numpy.argmin`: the index into the reduced axes, as if they were one."""

    name = "argmin"
    function = staticmethod(jnp.argmin)


class _Extremum(_Compared):
    arg: _ArgExtremum  # which finds where it is

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        arg = Arg(aval.shape, aval.dtype, row.index_dtype, self.arg.largest)
        combine = lax.max if self.arg.largest else lax.min
        return Elementwise(aval.shape, aval.dtype, arg.worst, combine, type(self).function)

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        return state[..., 0]

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        return [call_with_derivative_of(self._chosen, self._extreme, out) for out in outs]

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        def chosen(value: jax.Array) -> jax.Array:
            return self._chosen(*places.gathered(value))

        return [call_with_derivative_of(chosen, self._extreme, value) for value in values]

    def _extreme(self, out: jax.Array) -> jax.Array:
        return type(self).function(out, axis=0)

    def _chosen(self, out: jax.Array) -> jax.Array:
        # That of jax.numpy looks for items equal to the largest one; where XLA computes an item
        # twice, not quite alike, there are none, and the derivative is 0/0.
        index = type(self.arg).function(out, axis=0, keepdims=True)
        return jnp.squeeze(jnp.take_along_axis(out, index, axis=0), 0)

    def of_leaf(self, aval: Any, row: Row, position: int) -> Any:
        if not is_float(aval.dtype):
            return super().of_leaf(aval, row, position)
        return row.pick(self.arg.of_leaf(aval, row, position), position)


@dataclasses.dataclass(frozen=True)
class Max(_Extremum):
    """`jax.numpy.max`. Of equal items the first has the whole derivative."""

    name = "max"
    function = staticmethod(jnp.max)
    arg = ArgMax()


@dataclasses.dataclass(frozen=True)
class Min(_Extremum):
    """`jax.numpy.min`. Of equal items the first has the whole derivative."""

    name = "min"
    function = staticmethod(jnp.min)
    arg = ArgMin()


def _if_largest(largest: bool) -> str:
    return ", largest=True" if largest else ""


class TopKResult(NamedTuple):
    """The best items in order, on the first axis, and their flat indices."""

    values: Any
    indices: Any


@dataclasses.dataclass(frozen=True)
class TopK(_Compared):
    """The ``k`` smallest items, or the largest, sorted; the first of equals first, nan as largest.

    The result is a NamedTuple of ``values`` and ``indices`` (into the reduced axes, as if they were
    one), both with an axis of length ``k`` in the place of the reduced ones.
    """

    k: int
    largest: bool = False
    _by_sort: ClassVar[bool] = False  # see `best_keys`

    numbers_items = True

    def __post_init__(self) -> None:
        positive_int(self.k, "TopK", "k")
        check_bool(self.largest, "TopK", "largest")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"TopK({self.k}{_if_largest(self.largest)})"

    def check(self, part: Part, count: int) -> None:
        super().check(part, count)
        if self.k > count:
            raise MisfitError(f"there are only {count} items to reduce {part.path} over")

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        dtype = jax.eval_shape(lambda x: sort_key(x, largest=self.largest), aval).dtype
        return Top(aval.shape, dtype, row.index_dtype, self.k, self.largest, self._by_sort)

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        indices = jnp.moveaxis(state[1], -1, 0)
        values = jax.vmap(lambda index: row.pick(index, position))(indices)
        return TopKResult(values, indices)

    # In blocks the values go along with the keys, for no block has the items of another.

    def block_state(self, part: Part, row: Row, states: list[Any]) -> Any:
        found: list[Any] = []
        for state, aval, position in zip(states, part.avals, part.positions, strict=True):
            if row.size:
                values = jnp.moveaxis(self.result(state, aval, row, position).values, 0, -1)
            else:
                values = jnp.zeros((*aval.shape, self.k), aval.dtype)
            found.append((state, values))
        return found

    def placed_state(
        self, part: Part, whole: Row, state: Any, in_whole: Callable[[jax.Array], jax.Array]
    ) -> Any:
        placed = super().placed_state(part, whole, [own for own, _ in state], in_whole)
        return [(own, values) for own, (_, values) in zip(placed, state, strict=True)]

    def merged_states(self, part: Part, whole: Row, first: Any, second: Any) -> Any:
        def merge(a: Any, b: Any) -> Any:
            ((keys, index), values), ((more, other), found) = a, b
            both = [(~keys, ~more), (index, other), (values, found)]
            joined = tuple(lax.concatenate(pair, pair[0].ndim - 1) for pair in both)
            # Sorted as `Top.merge` sorts, and the values with it.
            sorted_ = lax.sort(joined, dimension=-1, num_keys=2)
            flipped, index, values = (x[..., : self.k] for x in sorted_)
            return (~flipped, index), values

        return [merge(a, b) for a, b in zip(first, second, strict=True)]

    def from_block_state(self, part: Part, whole: Row, state: Any) -> Any:
        return [
            TopKResult(jnp.moveaxis(values, -1, 0), jnp.moveaxis(index, -1, 0))
            for (_, index), values in state
        ]

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        def top(out: jax.Array) -> TopKResult:
            keys = jnp.moveaxis(sort_key(out, largest=self.largest), 0, -1)
            _, indices = best_keys(keys, self.k, by_sort=self._by_sort)
            indices = jnp.moveaxis(indices, -1, 0).astype(row.index_dtype)
            return TopKResult(jnp.take_along_axis(out, indices, axis=0), indices)

        return [top(out) for out in outs]

    def of_part(self, count: int) -> Reduction:
        return _TopKOfPart(min(self.k, count), self.largest)

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        return [self._merged(found, places) for found in values]

    def _merged(self, parts: TopKResult, places: Places) -> TopKResult:
        values, indices = places.gathered(parts.values, places.in_whole(parts.indices))
        values, indices = lax.collapse(values, 0, 2), lax.collapse(indices, 0, 2)
        # Sorted by the flipped key, so that the best comes first, and then by the index.
        keys = ~sort_key(lax.stop_gradient(values), largest=self.largest)
        at = lax.broadcasted_iota(jnp.int32, keys.shape, 0)
        _, indices, at = lax.sort((keys, indices, at), dimension=0, num_keys=2)
        return TopKResult(jnp.take_along_axis(values, at[: self.k], axis=0), indices[: self.k])


class _TopKOfPart(TopK):
    """The best items of one part of a row."""

    _by_sort = True


@dataclasses.dataclass(frozen=True)
class Best(Reduction):
    """The whole output of the item with the smallest ``by``, or the largest.

    Parameters
    ----------
    by : str or int
        The key, field or index of the output that decides: one real number. The first of equals
        is taken, and an item with nan before all others, as `jax.numpy.argmin` does.
    largest : bool, default False
        Take the largest instead.

    Notes
    -----
    Only ``by`` is computed for every item; the winner is then evaluated once more. So the other
    outputs cost nothing, and neither does the derivative, but for that one item.
    """

    by: str | int
    largest: bool = False

    numbers_items = True

    def __post_init__(self) -> None:
        if isinstance(self.by, bool) or not isinstance(self.by, (str, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "Best: by must be the key, field or index of an output, got "
                f"{type(self.by).__name__} {self.by!r}"
            )
        check_bool(self.largest, "Best", "largest")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"Best({self.by!r}{_if_largest(self.largest)})"

    def check(self, part: Part, count: int) -> None:
        number = self._number(part)
        name, aval = part.names[number], part.avals[number]
        if aval.shape or jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise MisfitError(
                f"{name} decides, so it must be one real number, but it has shape {aval.shape} "
                f"and dtype {aval.dtype}"
            )
        if not count:
            raise MisfitError(f"there is no item to choose {part.path} from")

    def _number(self, part: Part) -> int:
        """Return which leaf decides."""
        wanted = {f"{part.path}.{self.by}", f"{part.path}[{self.by!r}]"}
        found = [i for i, name in enumerate(part.names) if name in wanted]
        if not found:
            has = listed([name for name in part.names if name != part.path]) or "one array alone"
            raise MisfitError(f"{part.path} has no output {self.by!r}; it has {has}")
        return found[0]

    def tasks(self, part: Part, row: Row) -> list[Task]:
        number = self._number(part)
        arg = Arg((), part.avals[number].dtype, row.index_dtype, self.largest)
        return [Task((part.positions[number],), arg, ())]

    def from_states(self, part: Part, row: Row, states: list[Any]) -> Any:
        ((_, index),) = states
        outs = row.at(index[0])
        return [outs[i] for i in part.positions]

    # In blocks the output of the winner goes along, for no block has the items of another.

    def block_state(self, part: Part, row: Row, states: list[Any]) -> Any:
        if row.size:
            return states[0], self.from_states(part, row, states)
        return states[0], [jnp.zeros(aval.shape, aval.dtype) for aval in part.avals]

    def placed_state(
        self, part: Part, whole: Row, state: Any, in_whole: Callable[[jax.Array], jax.Array]
    ) -> Any:
        (placed,) = super().placed_state(part, whole, [state[0]], in_whole)
        return placed, state[1]

    def merged_states(self, part: Part, whole: Row, first: Any, second: Any) -> Any:
        (own, outs), (other, more) = first, second
        ((_, index),) = merged = super().merged_states(part, whole, [own], [other])
        is_first = index[0] == own[1][0]
        return merged[0], [jnp.where(is_first, a, b) for a, b in zip(outs, more, strict=True)]

    def from_block_state(self, part: Part, whole: Row, state: Any) -> Any:
        return state[1]

    def differentiable(self, part: Part, row: Row) -> Any:
        return self.from_states(part, row, row.stopped().found(self.tasks(part, row)))

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        pick = jnp.argmax if self.largest else jnp.argmin
        index = pick(outs[self._number(part)], axis=0)
        return [lax.dynamic_index_in_dim(out, index, 0, keepdims=False) for out in outs]

    def of_part(self, count: int) -> Reduction:
        return _BestOfPart(self.by, self.largest)

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        outs, _ = _BestOfPart(self.by, self.largest).of_parts(part, values, places)
        return outs


@dataclasses.dataclass(frozen=True)
class _BestOfPart(Best):
    """The outputs of the best item of one part of a row, and its index."""

    def from_states(self, part: Part, row: Row, states: list[Any]) -> Any:
        ((_, index),) = states
        return super().from_states(part, row, states), index[0]

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        pick = jnp.argmax if self.largest else jnp.argmin
        index = pick(outs[self._number(part)], axis=0)
        return super().plain(part, row, outs), index.astype(row.index_dtype)

    def of_part(self, count: int) -> Reduction:
        return self

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        outs, index = values
        *outs, index = places.gathered(*outs, places.in_whole(index))
        by = lax.stop_gradient(outs[self._number(part)])
        _, best = _best_of(by, index, largest=self.largest)
        at = jnp.argmax(index == best)
        return [lax.dynamic_index_in_dim(out, at, 0, keepdims=False) for out in outs], best
