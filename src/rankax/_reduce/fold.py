# SPDX-License-Identifier: MIT
"""A reduction of the user's own: any monoid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax._base.checks import check_callable
from rankax._base.trees import leaves_with_names
from rankax._reduce.protocol import MisfitError, Part, Places, Reduction
from rankax._reduce.row import Row, Task
from rankax._reduce.states import Ordered, merge_neighbours

__all__ = ["Fold"]


class Fold(Reduction):
    """Any monoid: ``finish(merge(merge(identity, lift(item_0)), lift(item_1)) ...)``.

    Parameters
    ----------
    identity : pytree of arrays or numbers
        The state of no item: ``merge(identity, s)`` is ``s``.
    lift : callable
        Takes the output of one item, returns a state, of the structure, shapes and dtypes of
        ``identity``.
    merge : callable
        Takes the states of two adjacent runs of items, the earlier first, returns that of both. It
        must be associative, and need not be commutative.
    finish : callable, optional
        Takes the last state, returns the result. By default the state itself.

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
    ) -> None:
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

    def check(self, part: Part, count: int) -> None:
        del count
        self._check_constants()
        state = part.structure.unflatten(part.avals)
        merged = jax.eval_shape(self.merge, state, state)
        for which, tree in (("identity", self.identity), ("what merge returns", merged)):
            structure = jax.tree.structure(tree)
            if structure != part.structure:
                raise MisfitError(
                    f"lift returns a state of structure {part.structure}, but {which} has "
                    f"{structure}"
                )
            for (name, leaf), aval in zip(leaves_with_names(tree, ""), part.avals, strict=True):
                weak = which == "identity" and isinstance(leaf, (bool, int, float, complex))
                dtype = aval.dtype if weak else jnp.result_type(leaf)
                if jnp.shape(leaf) != aval.shape or dtype != aval.dtype:
                    raise MisfitError(
                        f"lift returns a state of shape {aval.shape} and dtype {aval.dtype}"
                        f"{name and f' at {name}'}, but {which} has shape {jnp.shape(leaf)} and "
                        f"dtype {dtype} there"
                    )

    def _check_constants(self) -> None:
        """Refuse traced arrays where no derivative would find them."""
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

    def _start(self, part: Part) -> Any:
        leaves = jax.tree.leaves(self.identity)
        return part.structure.unflatten(
            [np.asarray(x, aval.dtype) for x, aval in zip(leaves, part.avals, strict=True)]
        )

    def _combine(self, part: Part) -> Callable[[Any, Any], Any]:
        """Return ``merge`` for lists of leaves that have the lanes on axis 0."""

        def merge(first: Any, second: Any) -> Any:
            merged = self.merge(part.structure.unflatten(first), part.structure.unflatten(second))
            return jax.tree.leaves(merged)

        return jax.vmap(merge)

    def tasks(self, part: Part, row: Row) -> list[Task]:
        start = jax.tree.leaves(self._start(part))
        one = len(part.avals) == 1
        combine = self._combine(part)

        def of_one(first: Any, second: Any) -> Any:
            return combine([first], [second])[0]

        accumulator = Ordered(start[0] if one else start, of_one if one else combine)
        return [Task(part.positions, accumulator, ())]

    def from_states(self, part: Part, row: Row | None, states: list[Any]) -> Any:
        leaves = jax.tree.leaves(jax.tree.map(lambda x: x[0], states[0]))
        state = part.structure.unflatten(leaves)
        return state if self.finish is None else self.finish(state)

    def assembled(self, part: Part, values: Any) -> Any:
        return values

    def differentiable(self, part: Part, row: Row) -> Any:
        return self.from_states(part, row, row.fold(self.tasks(part, row), linear=False))

    def plain(self, part: Part, row: Row, outs: list[jax.Array]) -> Any:
        combine = self._combine(part)
        state = [jax.device_put(x[None]) for x in jax.tree.leaves(self._start(part))]
        if row.size:
            state = combine(state, merge_neighbours(combine, outs, row.size))
        return self.from_states(part, row, [state])

    def of_part(self, count: int) -> Reduction:
        return Fold(self.identity, self.lift, self.merge)

    def of_parts(self, part: Part, values: Any, places: Places) -> Any:
        states = places.gathered(*jax.tree.leaves(values))
        states = merge_neighbours(self._combine(part), states, places.count)
        return self.from_states(part, None, [states])
