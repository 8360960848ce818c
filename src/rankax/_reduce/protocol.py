# SPDX-License-Identifier: MIT
"""What a reduction is: how it folds the items of a row, and how it is differentiated.

A reduction is given the outputs of one item, or a part of them, and works on a `Row`:

* `plain` reduces what is there at once, as `jax.numpy` does;
* `tasks` and `from_states` fold it tile by tile;
* `differentiable` says the same in terms that have the right derivative in bounded memory.

All three return one value for each leaf; `assembled` puts them together, once, behind all maps.

Where an axis of the row lies on several devices, each part of it is reduced on its own by what
`of_part` returns, and `of_parts` makes the result of all of what came out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rankax._devices.parts import Parts, gathered
from rankax._reduce.row import Row, Task
from rankax._reduce.states import Accumulator

__all__ = [
    "EachLeaf",
    "MisfitError",
    "Part",
    "Places",
    "Reduction",
    "dtype_of",
    "is_float",
    "wide",
]


class Part(NamedTuple):
    """The outputs of one item that one reduction is given."""

    path: str
    names: tuple[str, ...]  # of its leaves
    structure: Any
    avals: tuple[Any, ...]  # of its leaves
    first: int  # the position of its first leaf among all outputs

    @property
    def positions(self) -> tuple[int, ...]:
        """Where its leaves are among all outputs."""
        return tuple(range(self.first, self.first + len(self.avals)))


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the items of the parts of a row are in the whole, of which one axis was cut."""

    parts: Parts
    before: int  # items along the axes of the row in front of that one, taken as one axis
    each: int  # items of one part along it
    after: int  # items along those behind

    @property
    def count(self) -> int:
        """How many parts there are."""
        return self.parts.count

    def gathered(self, *arrays: jax.Array) -> list[jax.Array]:
        """Return arrays, with the parts on axis 0, that each device has whole."""
        return gathered(arrays, self.parts)

    @property
    def size(self) -> int:
        """How many items all parts have together."""
        return self.count * self.before * self.each * self.after

    def in_whole(self, index: jax.Array) -> jax.Array:
        """Return the flat indices into the whole of those into the parts, which are on axis 0."""
        if self.size >= 2**31:
            index = index.astype(jnp.int64)
        number = index.dtype.type
        inner = number(self.each * self.after)
        part = lax.broadcasted_iota(index.dtype, index.shape, 0)
        outer = index // inner * number(self.count) + part
        return outer * inner + index % inner


class MisfitError(Exception):
    """A reduction that cannot be applied to an output; who catches it knows the kernel."""


class Reduction:
    """What can be given as ``reduce``: an object of one of the classes of `rankax.reductions`."""

    name: str = ""

    def lifted(self, out: Any) -> Any:
        """Return what is folded of one item, from what the kernel returned."""
        return out

    def check(self, part: Part, count: int) -> None:
        """Refuse outputs, or a number of items, that it cannot reduce."""

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        """Reduce axis 0 of the part's leaves."""
        raise NotImplementedError

    def tasks(self, part: Part, row: Row) -> list[Task]:
        """Say what is folded."""
        raise NotImplementedError

    def from_states(self, part: Part, row: Row, states: list[Any]) -> Any:
        """Return the result from the states of its tasks."""
        raise NotImplementedError

    def assembled(self, part: Part, values: Any) -> Any:
        """Put the result together."""
        return part.structure.unflatten(values)

    #: Whether its result has numbers of items, or their count.
    numbers_items = False

    # In blocks, see `partial.py`. What a block hands on are by default the states of its tasks.

    def block_state(self, part: Part, row: Row, states: list[Any]) -> Any:
        """Return what a block hands on, of which ``row`` has the items."""
        return states

    def placed_state(
        self, part: Part, whole: Row, state: Any, in_whole: Callable[[jax.Array], jax.Array]
    ) -> Any:
        """Make the indices in the state of a block those of the whole."""
        return [
            a.placed(s, in_whole)
            for a, s in zip(self._accumulators(part, whole), state, strict=True)
        ]

    def merged_states(self, part: Part, whole: Row, first: Any, second: Any) -> Any:
        """Merge the states of two sets of items; only where order matters is one before another."""
        found = zip(self._accumulators(part, whole), first, second, strict=True)
        return [accumulator.merge_apart(a, b) for accumulator, a, b in found]

    def from_block_state(self, part: Part, whole: Row, state: Any) -> Any:
        """Return the result from the state of all blocks."""
        return self.from_states(part, whole, state)

    def _accumulators(self, part: Part, whole: Row) -> list[Accumulator]:
        found = [task.accumulator for task in self.tasks(part, whole)]
        return [accumulator for accumulator in found if accumulator is not None]

    def of_part(self, count: int) -> Reduction:
        """Return what reduces one of several parts of a row, which has ``count`` items."""
        del count
        return self

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        """Return the result from what `of_part` made of the parts, which lie along axis 0."""
        raise NotImplementedError

    #: Whether the parts of a row have to be runs of items, for they are taken in their order.
    is_ordered = False

    #: Whether folding it tile by tile can be differentiated as it stands.
    is_linear = False

    def differentiable(self, part: Part, row: Row) -> Any:
        """Return the result in terms that have the right derivative."""
        return self.from_states(part, row, row.fold(self.tasks(part, row)))


def wide(dtype: Any) -> Any:
    """Return the dtype in which floats of less than 32 bits are computed."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def dtype_of(fun: Callable[..., Any], aval: Any) -> Any:
    like = jax.ShapeDtypeStruct((1,), aval.dtype)
    return jax.eval_shape(functools.partial(fun, axis=0), like).dtype


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


class EachLeaf(Reduction):
    """One result for each leaf, independent of the others."""

    #: The function of `jax.numpy` that it is.
    function: Callable[..., Any]

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        raise NotImplementedError

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        raise NotImplementedError

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        return [type(self).function(out, axis=0) for out in outs]

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        return [type(self).function(value, axis=0) for value in values]

    def tasks(self, part: Part, row: Row) -> list[Task]:
        return [
            Task((position,), self.accumulator(aval, row), aval.shape)
            for position, aval in zip(part.positions, part.avals, strict=True)
        ]

    def from_states(self, part: Part, row: Row, states: list[Any]) -> Any:
        found = zip(states, part.avals, part.positions, strict=True)
        return [self.result(state, aval, row, i) for state, aval, i in found]

    def differentiable(self, part: Part, row: Row) -> Any:
        found = zip(part.avals, part.positions, strict=True)
        return [self.of_leaf(aval, row, i) for aval, i in found]

    def of_leaf(self, aval: Any, row: Row, position: int) -> Any:
        """Return the differentiable result of one leaf."""
        task = Task((position,), self.accumulator(aval, row), aval.shape)
        (state,) = row.fold([task]) if self.is_linear else row.stopped().found([task])
        return self.result(state, aval, row, position)
