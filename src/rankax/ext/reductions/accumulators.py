# SPDX-License-Identifier: MIT
"""The states of sums of several numbers: of exponentials, moments and outer products."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.base.arrays import scalar
from rankax.core.loop.shared import add_exactly
from rankax.core.reduce.row import Accumulator, InSlots, State, choose, fill

_MOST_EXACT = 128  # rows of a sum of outer products that holds what rounding took


class LogSumExpOf(InSlots):
    """The largest real part so far, and the sum of the exponentials relative to it."""

    drifts = True

    def start(self, slots: int) -> State:
        # The smallest number instead of -inf, because -inf - -inf is NaN.
        real = jnp.finfo(self.dtype)
        return self.full(real.min, real.dtype, slots), self.full(0, self.dtype, slots)

    def nothing(self) -> jax.Array:
        return scalar(-jnp.inf, self.dtype)

    def lift(self, tile: Any, counts: Any = None) -> State:
        x = tile.astype(self.dtype)
        scaled = jnp.ones_like(x)  # the exponential of an item relative to its real part
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            turned = jnp.exp(lax.complex(jnp.zeros_like(x.real), x.imag))
            scaled = jnp.where(x.real == -jnp.inf, jnp.zeros_like(x), turned)
        return x.real, scaled

    def merge(self, first: State, second: State) -> State:
        (m, a), (n, b) = first, second
        ratio = self.ratio(m, n)
        return jnp.maximum(m, n), jnp.where(n > m, a * ratio + b, a + b * ratio)

    def ratio(self, m: Any, n: Any) -> Any:
        """Return the smaller of two exponentials relative to the larger one."""
        # One exponential serves both sums, because that of the larger is 1.
        return jnp.exp(-jnp.abs(_difference(n, m))).astype(self.dtype)

    def begin(self, slots: int) -> Any:
        return *self.start(slots), self.full(0, self.dtype, slots)

    def add(self, held: Any, state: State) -> Any:
        (m, a, lost), (n, b) = held, state
        ratio, is_larger = self.ratio(m, n), n > m
        a, lost = (jnp.where(is_larger, x * ratio, x) for x in (a, lost))
        return jnp.maximum(m, n), *add_exactly(a, lost, jnp.where(is_larger, b, b * ratio))

    def total(self, held: Any) -> State:
        largest, total, lost = held
        return largest, total + lost

    def join(self, state: State) -> State:
        largest, total = state
        top = jnp.max(largest, axis=-1, keepdims=True)
        scaled = total * jnp.exp(_difference(largest, top)).astype(self.dtype)
        return top, jnp.sum(scaled, axis=-1, keepdims=True)


def _difference(x: Any, y: Any) -> Any:
    """Return ``x - y``, and 0 for two equal infinities."""
    return jnp.where(x == y, jnp.zeros_like(x), x - y)


class MomentsOf(InSlots):
    """Count, mean, and the sum of squared distances from it.

    They merge by the formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise
    algorithm for computing sample variances", 1979). Welford's step is a special case. No large
    numbers are subtracted from each other. An infinite mean stays infinite, and a state of no items
    changes nothing.
    """

    drifts = True

    def start(self, slots: int) -> State:
        real = jnp.finfo(self.dtype).dtype
        count = fill(0, real, (slots,))
        return count, self.full(0, self.dtype, slots), self.full(0, real, slots)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        count, mean, squares = state
        x = tile.astype(self.dtype)
        count = count + 1
        off = x - finite(mean)
        mean = mean + off / self.like_items(count, mean)
        new = count, mean, squares + jnp.real(off * jnp.conj(x - mean))
        return new if counts is None else choose(counts, new, state)

    def lift(self, tile: Any, counts: Any = None) -> State:
        x = tile.astype(self.dtype)
        number = jnp.ones(x.shape[-1], jnp.finfo(self.dtype).dtype)
        if counts is not None:
            number, x = jnp.where(counts, number, 0), jnp.where(counts, x, jnp.zeros_like(x))
        return number, x, jnp.zeros_like(x.real)

    def add(self, held: Any, state: State) -> Any:
        ((n, mean, squares), lost), (m, other, more) = held, state
        count = n + m
        share = m / jnp.maximum(count, 1)
        off = (other - finite(mean)) - lost[1]
        adds = m, off * self.like_items(share, mean), more + self._squares(n * share, off)
        pairs = list(map(add_exactly, (n, mean, squares), lost, adds))
        return tuple(total for total, _ in pairs), tuple(taken for _, taken in pairs)

    def merge(self, first: State, second: State) -> State:
        (n, mean, squares), (m, other, more) = first, second
        count = n + m
        share = m / jnp.maximum(count, 1)
        off = other - finite(mean)
        mean = mean + off * self.like_items(share, mean)
        return count, mean, squares + more + self._squares(n * share, off)

    def join(self, state: State) -> State:
        count, mean, squares = state
        total = jnp.sum(count, axis=-1, keepdims=True)
        # Relative to one slot, so that no large numbers are added up.
        first = finite(mean[..., :1])
        off = mean - first
        share = self.like_items(count / jnp.maximum(total, 1), mean)
        center = jnp.sum(jnp.where(share == 0, jnp.zeros_like(off), off * share), -1, keepdims=True)
        spread = squares + self._squares(count, off - center)
        return total, first + center, jnp.sum(spread, axis=-1, keepdims=True)

    def _squares(self, weight: Any, off: Any) -> Any:
        """Return weighted squares; those of weight 0 count as 0 even where they are infinite."""
        square = jnp.real(off * jnp.conj(off))
        weight = self.like_items(weight, square)
        return jnp.where(weight == 0, jnp.zeros_like(square), square * weight)

    def like_items(self, numbers: Any, items: Any) -> Any:
        """Give numbers, one for each slot, the rank and the dtype of the items."""
        rank = len(self.core)
        return lax.expand_dims(numbers, range(rank)).astype(items.dtype)


def finite(x: Any) -> Any:
    """Return 0 in place of an infinite number, from which a distance would be NaN."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


@dataclasses.dataclass(frozen=True)
class Outer(Accumulator):
    """The sum of outer products of two vectors of each item. Its state has one slot."""

    length: int
    dtype: Any

    core = ()

    @property
    def drifts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # A large state takes longer to read than a tile to multiply.
        return self.length <= _MOST_EXACT

    def start(self, slots: int) -> State:
        return fill(0, self.dtype, (self.length, self.length, 1))

    def lift(self, tile: Any, counts: Any = None) -> State:
        first, second = (x.astype(self.dtype) for x in tile)
        return lax.expand_dims(first @ second.T, (2,))

    def nothing(self) -> Any:
        return (scalar(0, self.dtype),) * 2

    def merge(self, first: State, second: State) -> State:
        return first + second

    def join(self, state: State) -> State:
        return jnp.sum(state, axis=-1, keepdims=True)


class CenteredOuter(Outer):
    """The count, the mean vector, and the sum of outer products of the distances from it.

    Its states merge as those of `MomentsOf`.
    """

    drifts = False  # pyright: ignore

    def start(self, slots: int) -> State:
        real = jnp.finfo(self.dtype).dtype
        mean = fill(0, self.dtype, (self.length, 1))
        return fill(0, real, (1,)), mean, super().start(slots)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        items, real = tile[1].astype(self.dtype), jnp.finfo(self.dtype).dtype
        if counts is None:
            return self._with(state, jnp.ones(items.shape[-1], real), items)
        return self._with(state, counts.astype(real), choose(counts, items, jnp.zeros_like(items)))

    def nothing(self) -> Any:
        return None

    def merge(self, first: State, second: State) -> State:
        number, mean, products = self._with(first, *second[:2])
        return number, mean, products + second[2]

    def join(self, state: State) -> State:
        if state[0].shape[0] == 1:
            return state
        number, mean, off = self._around_mean(*state[:2])
        return number, mean, super().join(state[2]) + self._products(state[0], off)

    def _with(self, state: State, numbers: Any, items: Any) -> State:
        """Add items, each of which is there so many times."""
        count, center, products = state
        number, mean, off = self._around_mean(numbers, items)
        share = number / jnp.maximum(count + number, 1)
        step = mean - center
        # The distance of the means is one more item, so that one product adds all to the state.
        numbers, off = jnp.concatenate([numbers, count * share]), jnp.concatenate([off, step], 1)
        center = center + step * lax.expand_dims(share, (0,)).astype(self.dtype)
        return count + number, center, products + self._products(numbers, off)

    def _around_mean(self, numbers: Any, items: Any) -> tuple[Any, Any, Any]:
        """Return the number of items alone, their mean, and their distances from it."""
        total = jnp.sum(numbers, keepdims=True)
        share = lax.expand_dims(numbers / jnp.maximum(total, 1), (0,)).astype(self.dtype)
        mean = items[:, :1]  # relative to which no large numbers are added up
        off = items - mean
        for _ in range(2):  # once more, for what rounding took from a mean far from the first item
            more = jnp.sum(off * share, axis=-1, keepdims=True)
            mean, off = mean + more, off - more
        return total, mean, off

    def _products(self, numbers: Any, off: Any) -> Any:
        weights = lax.expand_dims(numbers, (0,)).astype(self.dtype)
        return lax.expand_dims((jnp.conj(off) * weights) @ off.T, (2,))
