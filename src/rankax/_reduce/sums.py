# SPDX-License-Identifier: MIT
"""Reductions to which every item contributes: sums and the like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.arrays import has_tangent, scalar
from rankax._reduce.protocol import (
    EachLeaf,
    MisfitError,
    Outputs,
    count_dtype,
    counting,
    dtype_of,
    wide,
)
from rankax._reduce.row import Row
from rankax._reduce.states import (
    Accumulation,
    Accumulator,
    Elementwise,
    LogSumExpOf,
    MomentsOf,
    Ordered,
    fill,
)


def _sum(row: Row, aval: Any, dtype: Any) -> Any:
    """Sum the only output of a row; as a state, which has one lane."""
    accumulator = Elementwise(aval.shape, dtype, 0, lax.add, jnp.sum)
    return row.fold([Accumulation(0, accumulator, aval.shape)])[0]


class _Average(EachLeaf):
    """A reduction that divides by the number of items; with a mask, that is its last state."""

    def accumulations(self, outputs: Outputs, size: int) -> Sequence[Accumulation]:
        count = [] if outputs.mask is None else [counting(outputs)]
        return [*super().accumulations(outputs, size), *count]

    def differentiable(self, outputs: Outputs, row: Row) -> Any:
        count = [] if outputs.mask is None else [lax.expand_dims(row.count, (0,))]
        return [*super().differentiable(outputs, row), *count]

    def finish_state(self, outputs: Outputs, state: Any, size: Any) -> Any:
        if outputs.mask is not None:
            *state, (size,) = state
        return super().finish_state(outputs, state, size)


class _Accumulated(EachLeaf):
    """Reduce each number of an item by a function of two numbers."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis

    def dtype(self, aval: Any) -> Any:
        """Return the dtype of the result, which is that of `jax.numpy`."""
        return dtype_of(type(self).function, aval)

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        dtype = wide(self.dtype(aval))
        return Elementwise(aval.shape, dtype, self.identity, self.combine, self.reduce)

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        return state[..., 0].astype(self.dtype(aval))


@dataclasses.dataclass(frozen=True)
class Sum(_Accumulated):
    """`jax.numpy.sum`."""

    name = "sum"
    function = reduce = staticmethod(jnp.sum)
    identity, combine = 0, staticmethod(lax.add)
    is_linear = is_sum = True


@dataclasses.dataclass(frozen=True)
class Mean(_Average, Sum):
    """`jax.numpy.mean`."""

    name = "mean"
    function = staticmethod(jnp.mean)

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        return super().result(state / _number(size, state.dtype), aval, size)


@dataclasses.dataclass(frozen=True)
class Prod(_Accumulated):
    """`jax.numpy.prod`. A derivative stores one number for each tile of a row."""

    name = "prod"
    function = reduce = staticmethod(jnp.prod)
    identity, combine = 1, staticmethod(lax.mul)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Any:
        if not has_tangent(aval):
            return super().differentiable_leaf(aval, row, position)
        dtype = wide(self.dtype(aval))
        row = row.then(lambda outs: outs[position].astype(dtype))
        ordered = Ordered(np.ones(aval.shape, dtype), lax.mul)
        (state,) = row.fold([Accumulation(0, ordered, aval.shape)], linear=False)
        return jnp.moveaxis(state, 0, -1)


@dataclasses.dataclass(frozen=True)
class AnyOf(_Accumulated):
    """`jax.numpy.any`."""

    name = "any"
    function = reduce = staticmethod(jnp.any)
    identity, combine = False, staticmethod(lax.bitwise_or)
    is_sum = True


@dataclasses.dataclass(frozen=True)
class All(_Accumulated):
    """`jax.numpy.all`."""

    name = "all"
    function = reduce = staticmethod(jnp.all)
    identity, combine = True, staticmethod(lax.bitwise_and)
    is_sum = True


class _Continuous(EachLeaf):
    def check(self, outputs: Outputs, count: int) -> None:
        for name, aval in zip(outputs.names, outputs.avals, strict=True):
            if not has_tangent(aval):
                raise MisfitError(
                    f"{name} has dtype {aval.dtype}, and {self.name} needs floats; return it as "
                    "a float"
                )


@dataclasses.dataclass(frozen=True)
class LogSumExp(_Continuous):
    """`jax.nn.logsumexp`, in one pass. A derivative takes a second one."""

    name = "logsumexp"
    function = staticmethod(jax.nn.logsumexp)

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        return LogSumExpOf(aval.shape, wide(aval.dtype))

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        largest, total = (x[..., 0] for x in state)
        return (jnp.log(total) + largest.astype(total.dtype)).astype(aval.dtype)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Any:
        dtype = wide(aval.dtype)
        real = jnp.finfo(dtype).dtype
        parts = row.then(lambda outs: jnp.real(outs[position].astype(dtype)))
        largest = Elementwise(aval.shape, real, -jnp.inf, lax.max, jnp.max)
        (state,) = parts.fold_constants([Accumulation(0, largest, aval.shape)])
        top = jnp.where(jnp.isfinite(state[..., 0]), state[..., 0], 0).astype(dtype)
        scaled = row.then(lambda outs: jnp.exp(outs[position].astype(dtype) - top))
        return state, _sum(scaled, aval, dtype)


class MomentsResult(NamedTuple):
    """Count, mean and variance of the items."""

    count: Any
    mean: Any
    variance: Any


@dataclasses.dataclass(frozen=True)
class Moments(_Average, _Continuous):
    """The count, `jax.numpy.mean` and `jax.numpy.var` of the items, in one pass.

    No large numbers are subtracted from each other. A derivative takes two passes.
    """

    name = "moments"
    numbers_items = True

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        count = _count(row.size)
        return [MomentsResult(count, jnp.mean(out, axis=0), jnp.var(out, axis=0)) for out in outs]

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        return MomentsOf(aval.shape, wide(aval.dtype))

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        _, mean, squares = (x[..., 0] for x in state)
        if isinstance(size, int):
            mean = mean if size else jnp.full_like(mean, jnp.nan)
        elif self.where is not None:
            mean = jnp.where(size == scalar(0, size.dtype), jnp.full_like(mean, jnp.nan), mean)
        variance = (squares / _number(size, squares.dtype)).astype(dtype_of(jnp.var, aval))
        return MomentsResult(_count(size), mean.astype(aval.dtype), variance)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Any:
        dtype = wide(aval.dtype)
        real = jnp.finfo(dtype).dtype
        values = row.then(lambda outs: outs[position].astype(dtype))
        count, number = row.count, fill(row.size, real, (1,))
        if self.where is not None:
            # The mean of no items is 0 in a state, as at the start of a loop.
            number = lax.expand_dims(count.astype(real), (0,))
            count = jnp.maximum(count, 1)
        mean = _sum(values, aval, dtype)[..., 0] / _number(count, dtype)

        def square(outs: list[jax.Array]) -> jax.Array:
            off = outs[0] - mean
            return jnp.real(off * jnp.conj(off))

        squares = _sum(values.then(square), aval, real)
        return number, lax.expand_dims(mean, (mean.ndim,)), squares


def _count(size: int | jax.Array) -> jax.Array:
    return jnp.asarray(size, count_dtype(size)) if isinstance(size, int) else size


def _number(size: int | jax.Array, dtype: Any) -> Any:
    return float(size) if isinstance(size, int) else size.astype(dtype)
