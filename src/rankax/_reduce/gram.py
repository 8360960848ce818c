# SPDX-License-Identifier: MIT
"""The Gram matrix of the items, each of them a flat vector."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from rankax._base.arrays import scalar
from rankax._base.trees import check_leaves
from rankax._reduce.protocol import MisfitError, Outputs, Reduction, wide
from rankax._reduce.row import Row
from rankax._reduce.states import Accumulation, Accumulator, State, fill


@dataclasses.dataclass(frozen=True)
class _ProductOf(Accumulator):
    """The product of two matrices, whose lanes are items. Its state has one lane."""

    length: int
    dtype: Any

    def start(self, lanes: int) -> State:
        return fill(0, self.dtype, (self.length, self.length, 1))

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        first, second = (x.astype(self.dtype) for x in tile)
        return state + lax.expand_dims(first @ second.T, (2,))

    def nothing(self) -> Any:
        return (scalar(0, self.dtype),) * 2

    def merge(self, first: State, second: State) -> State:
        return first + second

    def join(self, state: State) -> State:
        return jnp.sum(state, axis=-1, keepdims=True)


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
    """

    weights: Any = None

    name = "gram"
    is_sum = True

    def __post_init__(self) -> None:
        check_leaves("Gram", self.weights, "weights")

    def __hash__(self) -> int:  # arrays have none
        return hash((self.where, id(self.weights)))

    def lifted(self, out: Any) -> tuple[Any, Any]:
        vector, _ = ravel_pytree(out)
        return jnp.conj(vector), vector

    def check(self, outputs: Outputs, count: int) -> None:
        if self.weights is not None:
            raise MisfitError("its weights are those of the rows of a Jacobian; scale the output")

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        return [outs[0].T @ outs[1]]

    def accumulations(self, outputs: Outputs, size: int) -> list[Accumulation]:
        aval = outputs.avals[1]
        product = _ProductOf(aval.size, wide(aval.dtype))
        return [Accumulation(outputs.positions, product, mask=outputs.mask)]

    def finish_state(self, outputs: Outputs, state: Any, size: int) -> Any:
        return [state[0][..., 0].astype(outputs.avals[1].dtype)]

    def assemble(self, outputs: Outputs, values: Any) -> Any:
        return values[0]

    def differentiable(self, outputs: Outputs, row: Row) -> Any:
        # Not as it is: that would store the items.
        return row.fold(self.accumulations(outputs, row.size), linear=False)


class WeightedGram(Gram):
    """The same of pairs of an item and its weight."""

    def lifted(self, out: Any) -> tuple[Any, Any]:
        first, vector = super().lifted(out[0])
        return first * out[1].astype(first.dtype), vector
