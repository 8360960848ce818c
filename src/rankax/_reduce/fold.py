# SPDX-License-Identifier: MIT
"""A user-defined reduction: any monoid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from rankax._base.checks import check_callable
from rankax._base.trees import check_leaves, leaves_with_names
from rankax._reduce.protocol import MisfitError, Outputs, Reduction
from rankax._reduce.row import Row
from rankax._reduce.states import Accumulation, Ordered, merge_neighbours


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

    name = "Fold"
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

    def lifted(self, out: Any) -> Any:
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
        combine = self._combine(outputs)
        state = tuple(jax.device_put(x[None]) for x in self._start(outputs))
        if row.size:
            state = combine(state, merge_neighbours(combine, tuple(outs), row.size))
        return self.finish_state(outputs, state, row.size)

    def _start(self, outputs: Outputs) -> tuple[np.ndarray, ...]:
        leaves = zip(jax.tree.leaves(self.identity), outputs.avals, strict=True)
        return tuple(np.asarray(leaf, aval.dtype) for leaf, aval in leaves)

    def _combine(self, outputs: Outputs) -> Callable[[Any, Any], Any]:
        """Return ``merge`` for tuples of leaves that have the lanes on axis 0."""
        unflatten = outputs.structure.unflatten

        def merge(first: Any, second: Any) -> Any:
            return tuple(jax.tree.leaves(self.merge(unflatten(first), unflatten(second))))

        return jax.vmap(merge)

    def accumulations(self, outputs: Outputs, size: int) -> list[Accumulation]:
        ordered = Ordered(self._start(outputs), self._combine(outputs))
        return [Accumulation(outputs.positions, ordered, mask=outputs.mask)]

    def partial(self, outputs: Outputs, row: Row, states: list[Any]) -> Any:
        return jax.tree.leaves(states)

    def merge_states(self, outputs: Outputs, states: list[jax.Array]) -> Any:
        lanes = tuple(lax.collapse(x, 0, 2) for x in states)
        return merge_neighbours(self._combine(outputs), lanes, lanes[0].shape[0])

    def finish_state(self, outputs: Outputs, state: Sequence[Any], size: int) -> Any:
        whole = outputs.structure.unflatten([x[0] for x in state])
        return whole if self.finish is None else self.finish(whole)

    def assemble(self, outputs: Outputs, values: Any) -> Any:
        return values

    def differentiable(self, outputs: Outputs, row: Row) -> Any:
        steps = self.accumulations(outputs, row.size)
        return self.partial(outputs, row, row.fold(steps, linear=False))
