# SPDX-License-Identifier: MIT
"""Reductions that choose items: the largest, the first, the best few.

The loop only compares items. `TopK`, `BottomK` and `Best` evaluate the winners once more, because a
state needs their outputs, which no other run can evaluate. `Max` and `Min` do so only if they are
differentiated; `ArgMax` and `ArgMin` never do. A derivative goes back through the winners alone,
but through all items of a call without loops, and of a row of few items.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.base.arrays import has_tangent, index_dtype, scalar, too_many
from rankax.core.base.messages import check_bool, check_output_key, listed, positive_int
from rankax.core.loop.loop import saved
from rankax.core.reduce.extrema import Arg, no_index, worst_value
from rankax.core.reduce.protocol import EachLeaf, MisfitError, Outputs, Place, Reduction
from rankax.core.reduce.row import (
    Accumulation,
    Accumulator,
    Elementwise,
    Finding,
    Row,
    alone,
)
from rankax.core.trace.derivatives import call_with_derivative_of
from rankax.ext.reductions.sums import dtype_of
from rankax.ext.reductions.top import Top, as_floats, first_k, has_floats, if_found, sort_key
from rankax.ext.reductions.unused import unless_unused


def _again(row: Row) -> Row:
    """Return a row to evaluate winners of; those of a run may lose against those of others."""
    may_lose = row.back and row.is_run
    return dataclasses.replace(row, item=unless_unused(row.item)) if may_lose else row


class _Compared(EachLeaf):
    """A reduction of numbers that can be compared, over at least one item."""

    least_items = 1

    def misfit(self, aval: Any) -> str:
        is_complex = jnp.issubdtype(aval.dtype, jnp.complexfloating)
        words = "complex numbers have no order; return their real part or jnp.abs of them"
        return words if is_complex else ""


class _ArgExtremum(_Compared):
    largest = False
    finds_items = folds_constants = True

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        some = self.where is not None
        return Arg(aval.shape, aval.dtype, index_dtype(size), self.largest, some=some)

    def result(self, state: Any, aval: Any, size: int) -> Any:
        index = state[1][..., 0]
        index = index if self.where is None else if_found(index, index, -1)
        return index.astype(dtype_of(jnp.argmin, aval))

    def with_places(self, result: Any, place: Place) -> Any:
        return jax.tree.map(place, result)


@dataclasses.dataclass(frozen=True)
class ArgMax(_ArgExtremum):
    """`jax.numpy.argmax`: the index into the reduced axes, as if they were one."""

    function = staticmethod(jnp.argmax)
    largest = True


@dataclasses.dataclass(frozen=True)
class ArgMin(_ArgExtremum):
    """`jax.numpy.argmin`: the index into the reduced axes, as if they were one."""

    function = staticmethod(jnp.argmin)


class _Extremum(_Compared):
    arg: _ArgExtremum  # finds its index

    def misfit(self, aval: Any) -> str:
        name = type(self).function.__name__
        words = f", or take jnp.{name} of what chunked_vmap returns: it compares real parts first"
        return (found := super().misfit(aval)) and found + words

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        worst = worst_value(aval.dtype, largest=self.arg.largest)
        combine = lax.max if self.arg.largest else lax.min
        return Elementwise(aval.shape, aval.dtype, worst, combine, type(self).function)

    def chosen(self, outputs: Outputs) -> int:
        return sum(aval.size for aval in outputs.avals if has_tangent(aval))

    def result(self, state: Any, aval: Any, size: int) -> Any:
        return state[..., 0]

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        extreme = functools.partial(type(self).function, axis=0)
        if not row.picks:
            return [call_with_derivative_of(self._first, extreme, out) for out in outs]
        find = functools.partial(type(self.arg).function, axis=0)
        return [
            self._picked(row, saved(find(out)), position) if has_tangent(aval) else extreme(out)
            for out, position, aval in zip(outs, outputs.positions, outputs.avals, strict=True)
        ]

    def merge_states(self, outputs: Outputs, states: list[jax.Array]) -> Any:
        return [self._first(state) for state in states]

    # Both return a strong type, as `jax.numpy.max` does.

    def _picked(self, row: Row, index: Any, position: int) -> jax.Array:
        out = row.pick(index, position)
        return out.astype(out.dtype)

    def _first(self, out: jax.Array) -> jax.Array:
        # The derivative of `jax.numpy.max` looks for items equal to the largest one. Where XLA
        # computes an item twice, with different rounding, it finds none and is 0/0.
        index = type(self.arg).function(out, axis=0, keepdims=True)
        first = jnp.squeeze(jnp.take_along_axis(out, index, axis=0), 0)
        return first.astype(out.dtype)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Finding:
        if words := too_many(row.size):  # only the derivative needs an index
            raise ValueError(f"{self.label} cannot be differentiated: {words}")
        arg = self.arg.of_items(self.where)
        _, index = yield from arg.differentiable_leaf(aval, row, position)
        picked = self._picked(_again(row), index[..., 0], position)
        if self.where is not None:
            worst = worst_value(aval.dtype, largest=self.arg.largest)
            picked = if_found(index[..., 0], picked, worst)
        return lax.expand_dims(picked, (picked.ndim,))


@dataclasses.dataclass(frozen=True)
class Max(_Extremum):
    """`jax.numpy.max` of real numbers. Among equal items, the first gets the whole derivative."""

    function = staticmethod(jnp.max)
    arg = ArgMax()


@dataclasses.dataclass(frozen=True)
class Min(_Extremum):
    """`jax.numpy.min` of real numbers. Among equal items, the first gets the whole derivative."""

    function = staticmethod(jnp.min)
    arg = ArgMin()


class TopKResult(NamedTuple):
    """The chosen items in order, on the first axis, and their flat indices."""

    values: Any
    indices: Any


@dataclasses.dataclass(frozen=True)
class FirstK(_Compared):
    """The first ``k`` items in descending or ascending order: what `TopK` and `BottomK` share."""

    k: int

    largest = True
    finds_items = folds_constants = True

    def __post_init__(self) -> None:
        positive_int(self.k, type(self).__name__, "k")

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.k})"

    @property
    def least_items(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.k

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        found = [self._indices(out, row) for out in outs]
        if row.picks:
            return self._picked(outputs, row, saved(found))
        pairs = zip(outs, found, strict=True)
        return [TopKResult(jnp.take_along_axis(out, at, axis=0), at) for out, at in pairs]

    def chosen(self, outputs: Outputs) -> int:
        return self.k * sum(aval.size for aval in outputs.avals)

    def numbers_of_tile(self, outputs: Outputs) -> int:
        return self.chosen(outputs)

    def _indices(self, out: jax.Array, row: Row) -> jax.Array:
        """Return those of the first items of a row on axis 0."""
        keys = jnp.moveaxis(sort_key(out, largest=self.largest), 0, -1)
        _, indices = lax.top_k(as_floats(keys) if has_floats(out.dtype) else keys, self.k)
        return jnp.moveaxis(indices, -1, 0).astype(index_dtype(row.size))

    def _picked(self, outputs: Outputs, row: Row, found: list[jax.Array]) -> list[TopKResult]:
        row = _again(row)

        def values(indices: jax.Array, position: int) -> jax.Array:
            return jax.vmap(lambda index: row.pick(index, position))(indices)

        pairs = zip(found, outputs.positions, strict=True)
        return [TopKResult(values(indices, position), indices) for indices, position in pairs]

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        dtype = jax.eval_shape(lambda x: sort_key(x, largest=self.largest), aval).dtype
        return Top(
            aval.shape,
            dtype,
            index_dtype(size),
            largest=True,
            k=self.k,
            descending=self.largest,
            has_floats=has_floats(aval.dtype),
            some=self.where is not None,
        )

    def partial(self, outputs: Outputs, row: Row, states: list[Any]) -> list[TopKResult]:
        """Return values in place of keys. Those without an item are arbitrary."""
        return self._picked(outputs, row, [jnp.moveaxis(index, -1, 0) for _, index in states])

    def merge_states(self, outputs: Outputs, states: list[Any]) -> Any:
        def merge(runs: Sequence[jax.Array]) -> TopKResult:
            values, indices = (jnp.moveaxis(lax.collapse(x, 0, 2), 0, -1) for x in runs)
            keys = sort_key(lax.stop_gradient(values), largest=self.largest)
            is_empty = indices == no_index(indices.dtype)
            keys = jnp.where(is_empty, scalar(jnp.iinfo(keys.dtype).min, keys.dtype), keys)
            _, indices, values = first_k(self.k, keys, indices, values)
            return TopKResult(jnp.moveaxis(values, -1, 0), jnp.moveaxis(indices, -1, 0))

        return list(map(merge, states))

    def result(self, state: Any, aval: Any, size: Any) -> TopKResult:
        values, indices = state
        if self.where is None:
            return TopKResult(values, indices)
        worst = worst_value(aval.dtype, largest=self.largest)
        return TopKResult(if_found(indices, values, worst), if_found(indices, indices, -1))

    def with_places(self, result: Any, place: Place) -> Any:
        def placed(top: TopKResult) -> TopKResult:
            return TopKResult(top.values, place(top.indices))

        return jax.tree.map(placed, result, is_leaf=lambda node: isinstance(node, TopKResult))


@dataclasses.dataclass(frozen=True)
class TopK(FirstK):
    """The ``k`` largest items, largest first, as `jax.lax.top_k` chooses them; no complex numbers.

    Any nan is the largest (`jax.lax.top_k` puts one with a negative sign last). Equal items stay in
    order: the first comes first. Of float32, 0 and denormals up to 2.8e-45 can count as equal. The
    result is a NamedTuple of ``values`` and ``indices`` (into the reduced axes, as if they were
    one), both with an axis of length ``k`` in place of the reduced axes.
    """


@dataclasses.dataclass(frozen=True)
class BottomK(FirstK):
    """The ``k`` smallest items, smallest first; nan is the largest, so it comes last.

    Equal items stay in order, and the result has the form of that of `TopK`.
    """

    largest = False


@dataclasses.dataclass(frozen=True)
class Best(Reduction):
    """The whole output of the item with the smallest ``by``, or the largest.

    Parameters
    ----------
    by : str or int
        The key, field or index of the output that decides: one real number. Among equals, the first
        is taken, and an item with nan before all others, as in `jax.numpy.argmin`.
    largest : bool, default False
        Take the largest instead.

    Notes
    -----
    Only ``by`` is computed for every item; the winner is then evaluated once more. The other
    outputs and the derivative cost no more than this one evaluation.
    """

    by: str | int
    largest: bool = False

    finds_items = True
    least_items = 1

    def __post_init__(self) -> None:
        check_output_key(self.by, "Best", "by")
        check_bool(self.largest, "Best", "largest")

    @property
    def name(self) -> str:
        return f"Best({self.by!r}{', largest=True' if self.largest else ''})"

    def check(self, outputs: Outputs, count: int) -> None:
        number = self._number(outputs)
        name, aval = outputs.names[number], outputs.avals[number]
        if aval.shape or jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise MisfitError(
                f"{name} decides, so it must be one real number, but it has shape {aval.shape} "
                f"and dtype {aval.dtype}"
            )

    def _number(self, outputs: Outputs) -> int:
        """Return which leaf decides."""
        if (number := outputs.number(self.by)) is None:
            found = f"it has {listed(outputs.names) or 'none'}"
            if outputs.names == (outputs.path,):
                tree = f"a dict with the key {self.by!r}" if isinstance(self.by, str) else "a tuple"
                extreme, word = ("max", "largest") if self.largest else ("min", "smallest")
                found = (
                    f"it is one array; return {tree}, or take the {word} number alone by "
                    f"reduce={extreme!r}"
                )
            raise MisfitError(f"{outputs.path} has no output {self.by!r}; {found}")
        return number

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        pick = jnp.argmax if self.largest else jnp.argmin
        index = pick(outs[self._number(outputs)], axis=0)
        if row.picks:
            best = row.at(saved(index))
            return [best[i] for i in outputs.positions]
        return [lax.dynamic_index_in_dim(out, index, 0, keepdims=False) for out in outs]

    def chosen(self, outputs: Outputs) -> int:
        return 1

    def accumulations(self, outputs: Outputs, size: int) -> list[Accumulation]:
        number = self._number(outputs)
        dtype, some = outputs.avals[number].dtype, outputs.mask is not None
        arg = Arg((), dtype, index_dtype(size), self.largest, some=some)
        return [Accumulation(outputs.positions[number], arg, mask=outputs.mask)]

    def partial(self, outputs: Outputs, row: Row, states: list[Any]) -> Any:
        """Return the winner's outputs and index."""
        ((_, (index,)),) = states
        outs = _again(row).at(index)
        return [([outs[i] for i in outputs.positions], index)]

    def merge_states(self, outputs: Outputs, states: Any) -> Any:
        ((outs, index),) = states
        by = lax.stop_gradient(outs[self._number(outputs)])
        arg = Arg((), by.dtype, index.dtype, self.largest)
        worst = scalar(worst_value(by.dtype, largest=self.largest), by.dtype)
        _, (best,) = arg.join((jnp.where(index == no_index(index.dtype), worst, by), index))
        at = jnp.argmax(index == best)
        return [([lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in outs], best)]

    def finish_state(self, outputs: Outputs, state: Any, size: int) -> Any:
        ((outs, index),) = state
        if outputs.mask is None:
            return outs
        number = self._number(outputs)
        worst = worst_value(outs[number].dtype, largest=self.largest)
        return [if_found(index, x, worst if i == number else 0) for i, x in enumerate(outs)]

    def differentiable(self, outputs: Outputs, row: Row) -> list[Finding]:
        steps = self.accumulations(outputs, row.size)
        return [alone(step, is_constant=True) for step in steps]
