# SPDX-License-Identifier: MIT
"""Reductions to which every item contributes: sums and the like, and any monoid."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.flatten_util import ravel_pytree

from rankax.core.base.arrays import has_tangent, scalar, wide
from rankax.core.base.messages import check_bool, check_callable
from rankax.core.base.trees import check_leaves, leaves_with_names
from rankax.core.reduce.protocol import EachLeaf, MisfitError, Outputs, Reduction, count_dtype
from rankax.core.reduce.row import (
    Accumulation,
    Elementwise,
    Finding,
    Ordered,
    Request,
    Row,
)
from rankax.core.trace.derivatives import with_derivative
from rankax.ext.equations import FUNCTIONS, LIBRARIES, operations
from rankax.ext.reductions.accumulators import CenteredOuter, LogSumExpOf, MomentsOf, Outer

# What takes as long as an exponential, or as two at least.
_DEAR = dict.fromkeys(FUNCTIONS, 1) | dict.fromkeys(
    [*LIBRARIES, "conv_general_dilated", "dot_general", "pure_callback", "scan", "while"], 2
)


def dtype_of(fun: Callable[..., Any], aval: Any) -> Any:
    """Return the dtype that a function of `jax.numpy` gives to the reduction of an array."""
    like = jax.ShapeDtypeStruct((1,), aval.dtype)
    return jax.eval_shape(functools.partial(fun, axis=0), like).dtype


def _sum_of(position: int, aval: Any, dtype: Any) -> Accumulation:
    """Return what sums an output; its state has one slot."""
    return Accumulation(position, Elementwise(aval.shape, dtype, 0, lax.add, jnp.sum))


class _Accumulated(EachLeaf):
    """Reduce each number of an item by a function of two numbers."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis

    def dtype(self, aval: Any) -> Any:
        """Return the dtype of the result, which is that of `jax.numpy`."""
        return dtype_of(type(self).function, aval)

    def accumulator(self, aval: Any, size: int) -> Elementwise:
        dtype = wide(self.dtype(aval))
        return Elementwise(aval.shape, dtype, self.identity, self.combine, self.reduce)

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        return state[..., 0].astype(self.dtype(aval))


@dataclasses.dataclass(frozen=True)
class Sum(_Accumulated):
    """`jax.numpy.sum`."""

    function = reduce = staticmethod(jnp.sum)
    identity, combine = 0, staticmethod(lax.add)
    is_linear = is_sum = True


@dataclasses.dataclass(frozen=True)
class Mean(Sum):
    """`jax.numpy.mean`."""

    function = staticmethod(jnp.mean)
    divides = True

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        return super().result(state / _number(size, state.dtype), aval, size)


@dataclasses.dataclass(frozen=True)
class Prod(_Accumulated):
    """`jax.numpy.prod`. A derivative stores one number for each tile of a row."""

    function = reduce = staticmethod(jnp.prod)
    identity, combine = 1, staticmethod(lax.mul)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Finding:
        dtype = wide(self.dtype(aval))
        ordered = Accumulation(0, Ordered(np.ones(aval.shape, dtype), lax.mul))
        (state,) = yield Request(
            [ordered], (lambda outs: outs[position].astype(dtype),), is_linear=False
        )
        return jnp.moveaxis(state, 0, -1)


def _of_truths(fun: Callable[..., Any]) -> Any:
    # `jax.numpy.any` and `all` look at the real part of a complex number only.
    return staticmethod(lambda out, axis: fun(out.astype(jnp.bool_), axis))


@dataclasses.dataclass(frozen=True)
class AnyOf(_Accumulated):
    """`jax.numpy.any`, but a complex number is true unless it is 0, as in `numpy.any`."""

    name = "any"  # pyright: ignore
    function, reduce = _of_truths(jnp.any), staticmethod(jnp.any)
    identity, combine = False, staticmethod(lax.bitwise_or)
    folds_constants = is_sum = True


@dataclasses.dataclass(frozen=True)
class All(_Accumulated):
    """`jax.numpy.all`, but a complex number is true unless it is 0, as in `numpy.all`."""

    function, reduce = _of_truths(jnp.all), staticmethod(jnp.all)
    identity, combine = True, staticmethod(lax.bitwise_and)
    folds_constants = is_sum = True


@dataclasses.dataclass(frozen=True)
class LogSumExp(EachLeaf):
    """`jax.nn.logsumexp`, in one pass. A derivative takes a second one."""

    function = staticmethod(jax.nn.logsumexp)

    def accumulator(self, aval: Any, size: int) -> LogSumExpOf:
        return LogSumExpOf(aval.shape, wide(dtype_of(jax.nn.logsumexp, aval)))

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        largest, total = (x[..., 0] for x in state)
        found = jnp.log(total) + largest.astype(total.dtype)
        return found.astype(dtype_of(jax.nn.logsumexp, aval))

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Finding:
        dtype = wide(aval.dtype)
        real = jnp.finfo(dtype).dtype
        most = math.log(jnp.finfo(dtype).max)

        def wide_part(outs: list[jax.Array]) -> jax.Array:
            return jnp.real(outs[position].astype(dtype))

        def scaled(outs: list[jax.Array]) -> jax.Array:
            power = outs[position].astype(dtype) - top
            if row.counts is not None:  # what stands in for an item may be much larger than others
                power = jnp.where(jnp.real(power) > most, jnp.zeros_like(power), power)
            return jnp.exp(power)

        # Both at once take an exponential more of each item, and save one evaluation of it.
        both = Accumulation(position, LogSumExpOf(aval.shape, dtype))
        one = Accumulation(0, Elementwise(aval.shape, real, -jnp.inf, lax.max, jnp.max))
        is_dear = sum(_DEAR.get(each.name, 0) for each in operations(row.jaxpr)) > 1
        request = Request([both]) if is_dear else Request([one], (wide_part,))
        (found,) = yield request._replace(is_constant=True)
        largest = found[0] if is_dear else found
        top = jnp.where(jnp.isfinite(largest[..., 0]), largest[..., 0], 0).astype(dtype)
        (total,) = yield Request([_sum_of(0, aval, dtype)], (scaled,))
        if is_dear:
            known = found[1] * jnp.exp(largest - top.real[..., None]).astype(dtype)
            total = with_derivative(known, total)  # so the compiler drops the second sum itself
        return largest, total


class MomentsResult(NamedTuple):
    """Count, mean and variance of the items."""

    count: Any
    mean: Any
    variance: Any


@dataclasses.dataclass(frozen=True)
class Moments(EachLeaf):
    """The count, `jax.numpy.mean` and `jax.numpy.var` of the items, in one pass; of floats only.

    No large numbers are subtracted from each other. A derivative takes a second pass.
    """

    divides = True

    def misfit(self, aval: Any) -> str:
        return "" if has_tangent(aval) else f"{self.name} needs floats; return it as a float"

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        count = _count(row.size)
        return [MomentsResult(count, jnp.mean(out, axis=0), jnp.var(out, axis=0)) for out in outs]

    def accumulator(self, aval: Any, size: int) -> MomentsOf:
        return MomentsOf(aval.shape, wide(aval.dtype))

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        _, mean, squares = (x[..., 0] for x in state)
        is_empty = size == scalar(0, size.dtype) if isinstance(size, jax.Array) else size == 0
        mean = jnp.where(is_empty, jnp.full_like(mean, jnp.nan), mean)
        variance = (squares / _number(size, squares.dtype)).astype(dtype_of(jnp.var, aval))
        return MomentsResult(_count(size), mean.astype(aval.dtype), variance)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Finding:
        dtype = wide(aval.dtype)

        def square(off: jax.Array) -> jax.Array:
            return jnp.real(off * jnp.conj(off))

        step = _sum_of(1, aval, jnp.finfo(dtype).dtype)
        (*state, squares), off, share = yield from _around_mean(aval, row, position, square, step)
        return *state, squares - square(off) * share


def _around_mean(
    aval: Any, row: Row, position: int, square: Callable[[jax.Array], jax.Array], step: Accumulation
) -> Finding:
    """Find the count, the mean and a sum of squares of the distances from a constant near it.

    Distances from any constant give mean and variance, with all derivatives, in one pass; from the
    mean, no large numbers are subtracted from each other. ``step`` adds up their ``square``. Also
    returns the sum of the distances, and one divided by the count.
    """
    dtype = wide(aval.dtype)
    real, number = jnp.finfo(dtype).dtype, row.count
    number = scalar(number, real) if isinstance(number, int) else jnp.asarray(number, real)
    # The mean of no items is 0 in a state, as at the start of a loop.
    share = 1 / jnp.maximum(number, 1)

    def value(outs: list[jax.Array]) -> jax.Array:
        return outs[position].astype(dtype)

    def off_center(outs: list[jax.Array]) -> jax.Array:
        return value(outs) - center

    def squared(outs: list[jax.Array]) -> jax.Array:
        return square(off_center(outs))

    (total,) = yield Request([_sum_of(0, aval, dtype)], (value,), is_constant=True)
    center = total[..., 0] * share.astype(dtype)
    center = jnp.where(jnp.isfinite(center), center, jnp.zeros_like(center))
    steps, funs = [_sum_of(0, aval, dtype), step], (off_center, squared)
    off, squares = yield Request(steps, funs, is_linear=isinstance(step.outputs, int))
    mean = lax.expand_dims(center, (center.ndim,)) + off * share.astype(dtype)
    return (lax.expand_dims(number, (0,)), mean, squares), off, share


def _count(size: int | jax.Array) -> jax.Array:
    return size if isinstance(size, jax.Array) else jnp.asarray(size, count_dtype(size))


def _number(size: int | jax.Array, dtype: Any) -> Any:
    return float(size) if isinstance(size, int) else jnp.asarray(size).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Gram(Reduction):
    """The sum of the outer products of the items with themselves, each item as a flat vector.

    Equivalent to ``x.conj().T @ x``, where row ``i`` of ``x`` is
    ``jax.flatten_util.ravel_pytree(output)[0]`` of item ``i``.

    Parameters
    ----------
    weights : array or pytree, optional
        How much each row of a Jacobian counts, in the structure of the outputs or flat. Only for
        `rankax.chunked_jacfwd`, `rankax.chunked_jacrev` and `rankax.chunked_hessian`.
    center : bool, default False
        Take the mean vector from each item first, ``x - x.mean(0)``; of floats only. Divided by the
        number of items, this is ``jnp.cov(x, rowvar=False, bias=True)``, conjugated. No large
        numbers are subtracted from each other. A derivative takes a second pass. Not for Jacobians.
    """

    weights: Any = None
    center: bool = False

    def __post_init__(self) -> None:
        check_leaves("Gram", self.weights, "weights")
        check_bool(self.center, "Gram", "center")
        if self.center and self.weights is not None:
            raise TypeError("Gram: weights are for Jacobians, which center=True is not for")

    def __hash__(self) -> int:  # arrays have none
        return hash((self.where, id(self.weights), self.center))

    @property
    def name(self) -> str:
        return "Gram(center=True)" if self.center else "gram"

    @property
    def is_sum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.center

    def lifted(self, out: Any, given: Any) -> tuple[Any, Any]:
        vector, _ = ravel_pytree(out)
        return jnp.conj(vector), vector

    def check(self, outputs: Outputs, count: int) -> None:
        if self.weights is not None:
            raise MisfitError("its weights are for the rows of a Jacobian; scale the output")
        if self.center and not has_tangent(outputs.avals[1]):
            raise MisfitError("center=True needs floats; return the output as a float")

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        first, second = outs
        if self.center:
            second = second.astype(wide(second.dtype))
            second = second - jnp.mean(second, axis=0, keepdims=True)
            first = jnp.conj(second)
        return [(first.T @ second).astype(outs[1].dtype)]  # strong, as every sum

    def accumulations(self, outputs: Outputs, size: int) -> list[Accumulation]:
        aval, product = outputs.avals[1], CenteredOuter if self.center else Outer
        accumulator = product(aval.size, wide(aval.dtype))
        return [Accumulation(outputs.positions, accumulator, mask=outputs.mask)]

    def differentiable(self, outputs: Outputs, row: Row) -> list[Finding]:
        if not self.center:
            return super().differentiable(outputs, row)
        return [self._found(outputs.avals[1], row, outputs.positions[1])]

    def _found(self, aval: Any, row: Row, position: int) -> Finding:
        product = Accumulation((1, 0), Outer(aval.size, wide(aval.dtype)))
        around = _around_mean(aval, row, position, jnp.conj, product)
        (*state, products), off, share = yield from around
        between = (jnp.conj(off) @ off.T) * share.astype(off.dtype)
        return *state, products - lax.expand_dims(between, (2,))

    def numbers_of_tile(self, outputs: Outputs) -> int:
        return outputs.avals[1].size ** 2

    def finish_state(self, outputs: Outputs, state: Any, size: int) -> Any:
        product = state[0][2] if self.center else state[0]
        return [product[..., 0].astype(outputs.avals[1].dtype)]

    def assemble(self, outputs: Outputs, values: Any) -> Any:
        return values[0]


class WeightedGram(Gram):
    """`Gram` of pairs of an item and its weight."""

    name = "gram"  # pyright: ignore

    def lifted(self, out: Any, given: Any) -> tuple[Any, Any]:
        first, vector = super().lifted(out[0], given)
        return first * out[1].astype(first.dtype), vector


class Fold(Reduction):
    """Any monoid: ``finish(merge(merge(identity, lift(item_0)), lift(item_1)) ...)``.

    Parameters
    ----------
    identity : pytree of arrays or numbers
        The state of no items: ``merge(identity, s)`` is ``s``.
    lift : callable
        Takes the output of one item and returns a state with the structure, shapes and dtypes of
        ``identity``.
    merge : callable
        Takes the states of two adjacent runs of items, the earlier one first, and returns the state
        of both. It must be associative, but need not be commutative.
    finish : callable, optional
        Takes the last state and returns the result. By default, the state itself.
    where : str or int, optional
        As in `rankax.auto_vmap`.

    Notes
    -----
    A derivative stores one state for each tile of a row.
    """

    name = "Fold"  # pyright: ignore
    is_ordered = True

    def __init__(
        self,
        identity: Any,
        lift: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any] | None = None,
        *,
        where: str | int | None = None,
    ) -> None:
        super().__init__(where=where)
        check_leaves("Fold", identity, "identity")
        check_callable(lift, "Fold", "lift")
        check_callable(merge, "Fold", "merge")
        if finish is not None:
            check_callable(finish, "Fold", "finish")
        self.identity = identity
        self.lift = lift
        self.merge = merge
        self.finish = finish

    def lifted(self, out: Any, given: Any) -> Any:
        return self.lift(out)

    def check(self, outputs: Outputs, count: int) -> None:
        self._check_constants()
        state = outputs.structure.unflatten(outputs.avals)
        merged = jax.eval_shape(self.merge, state, state)
        for which, tree in (("identity", self.identity), ("what merge returns", merged)):
            structure = jax.tree.structure(tree)
            if structure != outputs.structure:
                raise MisfitError(
                    f"lift returns a state of structure {outputs.structure}, but {which} has "
                    f"{structure}"
                )
            for (name, leaf), aval in zip(leaves_with_names(tree, ""), outputs.avals, strict=True):
                weak = which == "identity" and isinstance(leaf, (bool, int, float, complex))
                dtype = aval.dtype if weak else jnp.result_type(leaf)
                if jnp.shape(leaf) != aval.shape or dtype != aval.dtype:
                    raise MisfitError(
                        f"lift returns a state of shape {aval.shape} and dtype {aval.dtype}"
                        f"{name and f' at {name}'}, but {which} has shape {jnp.shape(leaf)} and "
                        f"dtype {dtype} there"
                    )

    def _check_constants(self) -> None:
        """Refuse traced arrays that a derivative would miss."""
        held = [
            cell.cell_contents
            for fun in (self.merge, self.finish)
            for cell in getattr(fun, "__closure__", None) or ()
        ]
        if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves([self.identity, held])):
            raise MisfitError(
                "its identity, merge or finish holds an array that JAX is tracing; let lift put "
                "it into the state"
            )

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        ordered = self._ordered(outputs)
        state = ordered.start(1)
        if row.size:
            state = ordered.merge(state, ordered.join(tuple(outs)))
        return self.finish_state(outputs, [state], row.size)

    def _ordered(self, outputs: Outputs) -> Ordered:
        """Return the accumulator of tuples of leaves."""
        leaves = zip(jax.tree.leaves(self.identity), outputs.avals, strict=True)
        identity = tuple(np.asarray(leaf, aval.dtype) for leaf, aval in leaves)
        unflatten = outputs.structure.unflatten

        def merge(first: Any, second: Any) -> Any:
            return tuple(jax.tree.leaves(self.merge(unflatten(first), unflatten(second))))

        return Ordered(identity, jax.vmap(merge))

    def accumulations(self, outputs: Outputs, size: int) -> list[Accumulation]:
        return [Accumulation(outputs.positions, self._ordered(outputs), outputs.mask)]

    def finish_state(self, outputs: Outputs, state: Sequence[Any], size: int) -> Any:
        whole = outputs.structure.unflatten([x[0] for x in state[0]])
        return whole if self.finish is None else self.finish(whole)

    def assemble(self, outputs: Outputs, values: Any) -> Any:
        return values
