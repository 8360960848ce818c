# SPDX-License-Identifier: MIT
"""Reductions that treat each output by itself."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rankax.core.protocol import Accumulation, Accumulator, MisfitError, Outputs, Reduction, Row


def dtype_of(fun: Callable[..., Any], aval: Any) -> Any:
    """Return the dtype that a function of `jax.numpy` gives to the reduction of an array."""
    like = jax.ShapeDtypeStruct((1,), aval.dtype)
    return jax.eval_shape(functools.partial(fun, axis=0), like).dtype


class EachLeaf(Reduction):
    """One result for each leaf, independent of the others."""

    #: The equivalent function of `jax.numpy`.
    function: Callable[..., Any]

    def check(self, outputs: Outputs, count: int) -> None:
        for name, aval in zip(outputs.names, outputs.avals, strict=True):
            if reason := self.misfit(aval):
                raise MisfitError(f"{name} has dtype {aval.dtype}, and {reason}")

    def misfit(self, aval: Any) -> str:
        """Return why numbers of this type cannot be reduced, if so."""
        return ""

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        """Return the accumulator of one leaf, for a row of ``size`` items."""
        raise NotImplementedError

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        """Return the result of one leaf."""

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        return [type(self).function(out, axis=0) for out in outs]

    def accumulations(self, outputs: Outputs, size: int) -> Sequence[Accumulation]:
        return [
            Accumulation(position, self.accumulator(aval, size), outputs.mask)
            for position, aval in zip(outputs.positions, outputs.avals, strict=True)
        ]

    def finish_state(self, outputs: Outputs, state: Any, size: int) -> Any:
        pairs = zip(state, outputs.avals, strict=True)
        return [self.result(own, aval, size) for own, aval in pairs]

    def differentiable(self, outputs: Outputs, row: Row) -> Any:
        pairs = zip(outputs.avals, outputs.positions, strict=True)
        states = [self.differentiable_leaf(aval, row, position) for aval, position in pairs]
        return self.partial(outputs, row, states)

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Any:
        """Return the state of one leaf in terms that have the right derivative."""
        step = Accumulation(position, self.accumulator(aval, row.size))
        (state,) = row.fold_constants([step])
        return state
