# SPDX-License-Identifier: MIT
"""Reductions in which every item counts: sums and their kin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._reduce.protocol import EachLeaf, MisfitError, Part, Places, dtype_of, is_float, wide
from rankax._reduce.row import Row, Task
from rankax._reduce.states import Accumulator, Elementwise, LogSumExpOf, MomentsOf, Ordered

__all__ = ["All", "AnyOf", "LogSumExp", "Mean", "Moments", "MomentsResult", "Prod", "Sum"]


def _sum(row: Row, aval: Any, dtype: Any) -> Any:
    """Sum the only output of a row."""
    task = Task((0,), Elementwise(aval.shape, dtype, 0, lax.add, jnp.sum), aval.shape)
    return row.fold([task])[0][..., 0]


class _Gathered(EachLeaf):
    """What takes all parts of a row at once, for it, or its derivative, is no sum over them."""

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        return super().of_parts(part, places.gathered(*values), places)


class _Accumulated(EachLeaf):
    """One number for each number of an item, by one function of two numbers."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis

    def dtype(self, aval: Any) -> Any:
        """Return that of the function of `jax.numpy`."""
        return dtype_of(type(self).function, aval)

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        dtype = wide(self.dtype(aval))
        return Elementwise(aval.shape, dtype, self.identity, self.combine, self.reduce)

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        return state[..., 0].astype(self.dtype(aval))


@dataclasses.dataclass(frozen=True)
class Sum(_Accumulated):
    """`jax.numpy.sum`."""

    name = "sum"
    function = reduce = staticmethod(jnp.sum)
    identity, combine = 0, staticmethod(lax.add)
    is_linear = True


@dataclasses.dataclass(frozen=True)
class Mean(Sum):
    """`jax.numpy.mean`."""

    name = "mean"
    function = staticmethod(jnp.mean)

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        return super().result(state / row.size, aval, row, position)


@dataclasses.dataclass(frozen=True)
class Prod(_Gathered, _Accumulated):
    """`jax.numpy.prod`. A derivative stores one number for each tile of a row."""

    name = "prod"
    function = reduce = staticmethod(jnp.prod)
    identity, combine = 1, staticmethod(lax.mul)

    def of_leaf(self, aval: Any, row: Row, position: int) -> Any:
        if not is_float(aval.dtype):
            return super().of_leaf(aval, row, position)
        dtype = self.dtype(aval)
        row = row.then(lambda outs: [outs[position].astype(wide(dtype))])
        one = np.ones(aval.shape, wide(dtype))
        (state,) = row.fold([Task((0,), Ordered(one, lax.mul), aval.shape)], linear=False)
        return state[0].astype(dtype)


@dataclasses.dataclass(frozen=True)
class AnyOf(_Accumulated):
    """`jax.numpy.any`."""

    name = "any"
    function = reduce = staticmethod(jnp.any)
    identity, combine = False, staticmethod(lax.bitwise_or)


@dataclasses.dataclass(frozen=True)
class All(_Accumulated):
    """`jax.numpy.all`."""

    name = "all"
    function = reduce = staticmethod(jnp.all)
    identity, combine = True, staticmethod(lax.bitwise_and)


class _Continuous(EachLeaf):
    def check(self, part: Part, count: int) -> None:
        for name, aval in zip(part.names, part.avals, strict=True):
            if not is_float(aval.dtype):
                raise MisfitError(
                    f"{name} has dtype {aval.dtype}, and {self.name} is one of floats; return "
                    "it as a float"
                )


@dataclasses.dataclass(frozen=True)
class LogSumExp(_Gathered, _Continuous):
    """`jax.nn.logsumexp`, in one pass; a derivative takes a second one."""

    name = "logsumexp"
    function = staticmethod(jax.nn.logsumexp)

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        return LogSumExpOf(aval.shape, wide(aval.dtype))

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        largest, total = (x[..., 0] for x in state)
        return (jnp.log(total) + largest.astype(total.dtype)).astype(aval.dtype)

    def of_leaf(self, aval: Any, row: Row, position: int) -> Any:
        dtype = wide(aval.dtype)
        stopped = row.stopped().then(lambda outs: [jnp.real(outs[position].astype(dtype))])
        real = jnp.finfo(dtype).dtype
        largest = Elementwise(aval.shape, real, -jnp.inf, lax.max, jnp.max)
        (state,) = stopped.found([Task((0,), largest, aval.shape)])
        top = jnp.where(jnp.isfinite(state[..., 0]), state[..., 0], 0).astype(dtype)
        scaled = row.then(lambda outs: [jnp.exp(outs[position].astype(dtype) - top)])
        return (jnp.log(_sum(scaled, aval, dtype)) + top).astype(aval.dtype)


class MomentsResult(NamedTuple):
    """Count, mean and variance of the items."""

    count: Any
    mean: Any
    variance: Any


@dataclasses.dataclass(frozen=True)
class Moments(_Continuous):
    """The count, `jax.numpy.mean` and `jax.numpy.var` of the items, in one pass.

    No large numbers are subtracted from each other. A derivative takes two passes.
    """

    name = "moments"
    numbers_items = True

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        return [
            MomentsResult(self._count(row), jnp.mean(out, axis=0), jnp.var(out, axis=0))
            for out in outs
        ]

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        return [self._merged(value, places) for value in values]

    def _merged(self, parts: MomentsResult, places: Places) -> MomentsResult:
        means = parts.mean.astype(wide(parts.mean.dtype))
        variances = parts.variance.astype(wide(parts.variance.dtype))
        means, variances = places.gathered(means, variances)
        mean = jnp.mean(means, axis=0)
        off = means - mean
        variance = jnp.mean(variances + jnp.real(off * jnp.conj(off)), axis=0)
        dtype = parts.count.dtype if places.size < 2**31 else jnp.int64
        return MomentsResult(
            jnp.asarray(places.size, dtype),
            mean.astype(parts.mean.dtype),
            variance.astype(parts.variance.dtype),
        )

    def _count(self, row: Row) -> jax.Array:
        return jnp.asarray(row.size, row.index_dtype)

    def accumulator(self, aval: Any, row: Row) -> Accumulator:
        return MomentsOf(aval.shape, wide(aval.dtype))

    def result(self, state: Any, aval: Any, row: Row, position: int) -> Any:
        _, mean, squares = state
        return self._result(mean[..., 0], squares[..., 0] / row.size, aval, row)

    def _result(self, mean: Any, variance: Any, aval: Any, row: Row) -> MomentsResult:
        dtype = dtype_of(jnp.var, aval)
        return MomentsResult(self._count(row), mean.astype(aval.dtype), variance.astype(dtype))

    def of_leaf(self, aval: Any, row: Row, position: int) -> Any:
        dtype = wide(aval.dtype)
        values = row.then(lambda outs: [outs[position].astype(dtype)])
        mean = _sum(values, aval, dtype) / row.size

        def square(outs: list[jax.Array]) -> list[jax.Array]:
            off = outs[0] - mean
            return [jnp.real(off * jnp.conj(off))]

        variance = _sum(values.then(square), aval, jnp.finfo(dtype).dtype) / row.size
        return self._result(mean, variance, aval, row)
