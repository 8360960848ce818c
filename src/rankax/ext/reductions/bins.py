# SPDX-License-Identifier: MIT
"""The states of sums by label, and of extremes and moments: one for each label.

A state of bins is that of an accumulator, with an axis of bins in front of each array, so that the
numbers of a bin lie together: XLA would copy all bins at each scatter along another axis. Bins are
merged as the accumulator merges, one by one. So only a step differs: a tile is scattered into the
bins of its labels, by one or a few scatters that touch no other bin. A label that is no bin's is
dropped by the scatter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax.core.base.arrays import scalar
from rankax.core.reduce.extrema import Arg, no_index
from rankax.core.reduce.row import Accumulator, Elementwise, State
from rankax.ext.reductions.accumulators import LogSumExpOf, MomentsOf, finite

# Numbers of a state; a tile has about 1000 items. Up to so many, it holds what rounding took.
_MOST_EXACT = 2048
# Up to so many, a tile is scattered by itself and then added, which rounds less often.
_MOST_EACH = 256
_HOW: dict[Any, str] = {lax.add: "add", lax.max: "max", lax.min: "min"}


@dataclasses.dataclass(frozen=True)
class InBins(Accumulator):
    """An accumulator in each of ``length`` bins. Its state has one slot, and the bins in front.

    It takes the labels of an item, and a value for each of them. Labels have any shape; the shape
    of the values begins with it.
    """

    own: Any  # of a bin: an accumulator of one of the classes in `_SCATTERS`
    length: int
    labels: int = 1  # how many an item has

    core = ()

    @property
    def may_repeat(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.may_repeat

    @property
    def drifts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Each addition of a tile that holds what rounding took reads all bins.
        return self.own.drifts and self.size <= _MOST_EXACT

    @property
    def size(self) -> int:
        """How many numbers all bins have."""
        return self.length * math.prod(self.own.core)

    def start(self, slots: int) -> State:
        return self._in_each(self.own.start(1))

    def begin(self, slots: int) -> Any:
        return self._in_each(self.own.begin(1))

    def _in_each(self, state: State) -> State:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.length, *x.shape)), state)

    def nothing(self) -> None:
        return None

    def step(self, state: State, tile: Any, index: Any, counts: Any = None) -> State:
        # By itself, a tile of exponentials takes fewer scatters.
        is_simpler = isinstance(self.own, LogSumExpOf) and self.length <= tile[0].size
        if is_simpler or (self.drifts and self.size <= _MOST_EACH):
            # Without a barrier, XLA would scatter the tile into the state, and round as often.
            return self.merge(state, lax.optimization_barrier(self.lift(tile, counts)))
        return self._scattered(state, tile, index, counts)

    def lift(self, tile: Any, counts: Any = None) -> State:
        return self._scattered(self.start(1), tile, None, counts)

    def _scattered(self, state: State, tile: Any, index: Any, counts: Any) -> State:
        labels, *values = tile
        if counts is not None:
            counts = lax.expand_dims(counts, range(labels.ndim - 1))
            labels = jnp.where(counts, labels, self.length)
        rank = labels.ndim
        # Labels and items become one axis, the first.
        flat = [lax.collapse(jnp.moveaxis(x, -1, rank - 1), 0, rank) for x in values]
        at = lax.collapse(labels, 0)
        scatter = functools.partial(_SCATTERS[type(self.own)], self.own, at)
        more = {"index": index, "labels": self.labels}
        if not self.own.core:
            return self._as_slots(lambda state: scatter(state, *flat, **more), state)
        # Values get a slot, too: to drop that of the bins, XLA would copy them.
        return scatter(state, *(lax.expand_dims(x, (x.ndim,)) for x in flat), **more)

    def of_items(self, numbers: jax.Array, labels: jax.Array, counts: Any = None) -> jax.Array:
        """Return the number of the bin of each label, and 0 for others, as cotangents go back."""
        found = gather(numbers, labels)
        is_in = (labels >= 0) & (labels < self.length)
        is_in = is_in if counts is None else is_in & counts
        is_in = lax.expand_dims(is_in, range(labels.ndim, found.ndim))
        return jnp.where(is_in, found, jnp.zeros_like(found))

    def merge(self, first: State, second: State) -> State:
        return self._bin_by_bin(self.own.merge, first, second)

    def join(self, state: State) -> State:
        return jax.vmap(self.own.join)(state)

    def add(self, held: Any, state: State) -> Any:
        return self._bin_by_bin(self.own.add, held, state)

    def total(self, held: Any) -> State:
        return self._bin_by_bin(self.own.total, held)

    def _bin_by_bin(self, fun: Callable[..., State], *states: State) -> State:
        """Apply to all bins a function of states that works slot by slot."""
        return jax.vmap(fun)(*states) if self.own.core else self._as_slots(fun, *states)

    def _as_slots(self, fun: Callable[..., State], *states: State) -> State:
        """Apply a function to bins of numbers, which are then its slots.

        Along slots of length 1, XLA:CPU computes no vectors, and it runs a step of a loop in order,
        without a scheduler, if that has at most eight parts: the tile is added to what rounding
        took, not to zeros of its own. Gradients of a million values in 1,000 bins take 0.75 times
        as long.
        """
        found = fun(*jax.tree.map(lambda x: lax.squeeze(x, (1,)), states))
        return jax.tree.map(lambda x: lax.expand_dims(x, (1,)), found)

    def renumber(self, state: State, place: Callable[[jax.Array], jax.Array]) -> State:
        def of_label(number: jax.Array) -> jax.Array:
            labels = number.dtype.type(self.labels)
            return place(number // labels) * labels + number % labels

        return self.own.renumber(state, of_label)


def _scatter(x: jax.Array, at: jax.Array, values: Any, how: str = "add") -> jax.Array:
    """Return ``x`` with values scattered along its first axis; those outside of it are dropped."""
    scatter = getattr(x.at[at], how)
    return scatter(values, mode="drop", wrap_negative_indices=False)


def constant(x: Any) -> Callable[[jax.Array], jax.Array]:
    """Return what looks up rows of an array that has no derivative, for the items of a loop.

    The loop sees integers. Of floats that its steps share, it adds up the cotangents, for which a
    reverse pass keeps a copy for each row.
    """
    if jnp.iscomplexobj(x):
        return lambda at: gather(x, at)
    whole = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    is_known = isinstance(x, np.ndarray)
    bits = jnp.asarray(x.view(whole)) if is_known else lax.bitcast_convert_type(x, whole)
    return lambda at: lax.bitcast_convert_type(gather(bits, at), x.dtype)


def gather(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return the values of bins along the first axis; those outside of it are arbitrary."""
    return x.at[at].get(mode="clip", wrap_negative_indices=False)


# What adds values to the states of their bins, both on the first axis, for each class of
# accumulators. ``at``: the bins of the values. ``index``: those of the items, each of which has so
# many ``labels``; None if no bin has any item yet.


def _elementwise(own: Elementwise, at: jax.Array, state: State, *values: Any, **_: Any) -> State:
    """Scatter into a sum, a maximum or a minimum; without values, count the labels."""
    value = values[0].astype(state.dtype) if values else scalar(1, state.dtype)
    return _scatter(state, at, value, _HOW[own.combine])


def _exponentials(
    own: LogSumExpOf, at: jax.Array, state: State, value: Any, *, index: Any, **_: Any
) -> State:
    largest, total = state
    x, scaled = own.lift(value)
    before, largest = gather(largest, at), _scatter(largest, at, x, "max")
    top = gather(largest, at)
    if index is not None:  # items of the same bin write the same number
        total = _scatter(total, at, gather(total, at) * own.ratio(before, top), "set")
    return largest, _scatter(total, at, scaled * own.ratio(x, top))


def _moments(own: MomentsOf, at: jax.Array, state: State, value: Any, **_: Any) -> State:
    """Scatter by the formula of Welford for many items."""
    count, mean, squares = state
    x = value.astype(own.dtype)
    # A bin without items begins at one of them, whichever, so that no large numbers cancel.
    is_first = _like_items(gather(count, at), x) == 0
    mean = _scatter(mean, at, jnp.where(is_first, x, gather(mean, at)), "set")
    count = _scatter(count, at, scalar(1, count.dtype))
    off = x - finite(gather(mean, at))
    # At least 1, or else the derivative of an item of no bin would be 0/0.
    number = jnp.maximum(_like_items(gather(count, at), x), 1)
    mean = _scatter(mean, at, off / number)
    left = x - gather(mean, at)
    return count, mean, _scatter(squares, at, jnp.real(off * jnp.conj(left)))


def _like_items(numbers: Any, items: Any) -> Any:
    """Give numbers, one for each item, the rank and the dtype of the items."""
    return lax.expand_dims(numbers, range(1, items.ndim - 1)).astype(items.dtype)


def _best(own: Arg, at: jax.Array, state: State, x: Any, *, index: Any, labels: int) -> State:
    """Scatter the best value, and the index of its label among all labels, in their order."""
    best, found = state
    none = scalar(no_index(found.dtype), found.dtype)
    before, best = gather(best, at), _scatter(best, at, x, "max" if own.largest else "min")
    after = gather(best, at)
    found = _scatter(found, at, jnp.where(own.wins(after, before), none, gather(found, at)), "set")
    first = index * index.dtype.type(labels)
    each = lax.broadcasted_iota(index.dtype, (labels, index.size), 0)
    number = lax.collapse(lax.expand_dims(first, (0,)) + each, 0)
    number = lax.expand_dims(number, range(1, found.ndim)).astype(found.dtype)
    is_best = ~own.wins(after, x)
    return best, _scatter(found, at, jnp.where(is_best, number, none), "min")


_SCATTERS: dict[type, Callable[..., State]] = {
    Elementwise: _elementwise,
    LogSumExpOf: _exponentials,
    MomentsOf: _moments,
    Arg: _best,
}
