# SPDX-License-Identifier: MIT
"""Reductions of the items that count: those for which one output of the kernel, the mask, is true.

What is left out adds nothing and sends nothing back, even where its value or derivative is NaN:

* Forward, it is replaced by the identity of the reduction, or the accumulator passes over it.
* In the derivative, a cotangent of 0 is not enough, because 0 times an infinite derivative is NaN.
  So a first pass over the row, which computes only the mask, finds an item that counts, and the
  inputs of this item take the place of those of each item that is left out. They are constants
  there: the transpose of the choice drops the cotangent. If no item counts, the cotangents of what
  all items share are dropped, too (`MaskedRow`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rankax._base.trees import leaves_with_names
from rankax._base.words import listed
from rankax._reduce.extrema import Arg
from rankax._reduce.protocol import Outputs, counting
from rankax._reduce.row import Row, Steps, index_dtype, too_many
from rankax._reduce.states import Accumulation
from rankax._trace.derivatives import has_tangent


def checked_where(value: Any, where: str) -> str | int | None:
    """Return the name of a mask; refuse anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise TypeError(
            f"{where}: where must be the key, field or index of an output, got "
            f"{type(value).__name__} {value!r}"
        )
    return value


def find_mask(out: Any, where: str | int) -> tuple[str, Any]:
    """Return the output of an item that ``where`` names, with its name."""
    leaves = dict(leaves_with_names(out, "output"))
    wanted = (f"output.{where}", f"output[{where!r}]", f"output{where}")
    name = next((name for name in wanted if name in leaves), None)
    if name is None:
        names = [other for other in leaves if other != "output"]
        raise ValueError(
            f"where={where!r}: there is no such output; there is {listed(names) or 'one array'}"
        )
    aval = jax.typeof(leaves[name])
    if aval.shape or aval.dtype != jnp.bool_:
        raise ValueError(
            f"where={where!r}: {name} must be one boolean, which says whether the item counts, but "
            f"it has shape {aval.shape} and dtype {aval.dtype}"
        )
    return name, leaves[name]


def without(tree: Any, path: str, name: str) -> Any:
    """Return the outputs at ``path`` with None in place of the one called ``name`` among them."""
    names = [each for each, _ in leaves_with_names(tree, path)]
    if name == path or name not in names:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    leaves[names.index(name)] = None
    return structure.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class MaskedRow(Row):
    """A row whose items that are left out can be differentiated as if they counted."""

    counts: Callable[..., jax.Array] = dataclasses.field(kw_only=True)  # of one item
    number: Any = dataclasses.field(kw_only=True)  # of the items that count

    @classmethod
    def of(
        cls,
        row_of: Callable[[Sequence[Any], Sequence[Any]], Row],
        consts: Sequence[Any],
        leaves: Sequence[Any],
        outputs: Outputs,
    ) -> MaskedRow:
        """Return the row for some outputs, given what makes one from constants and leaves."""
        mask: Any = outputs.mask
        row = row_of([lax.stop_gradient(x) for x in consts], leaves)

        def counts(*leaves: Any) -> jax.Array:
            return row.item(*map(lax.stop_gradient, leaves))[mask]

        arg = Arg((), jnp.bool_, index_dtype(row.size), largest=True)
        if words := too_many(row.size):
            raise ValueError(f"a reduction with where or bucket has no derivative: {words}")
        steps = Accumulation(mask, arg), counting(outputs)
        (_, (index,)), (number,) = row.fold_constants(steps)

        def if_any(x: Any) -> Any:
            if not has_tangent(jax.typeof(x)):
                return x
            return jnp.where(number > 0, x, lax.stop_gradient(x))

        by_leaf = [[level.in_axes[i] for level in row.levels] for i in range(len(leaves))]
        is_mapped = [any(axis is not None for axis in axes) for axes in by_leaf]
        pairs = zip(leaves, is_mapped, strict=True)
        safe = row_of(list(map(if_any, consts)), [x if own else if_any(x) for x, own in pairs])
        others = [lax.stop_gradient(x) for x in safe.leaves_at(index)]
        is_mapped += [True] * (len(others) - len(is_mapped))  # the numbers of items

        def item(*leaves: Any) -> list[jax.Array]:
            is_own = counts(*leaves)
            triples = zip(leaves, others, is_mapped, strict=True)
            return safe.item(*(lax.select(is_own, x, y) if own else x for x, y, own in triples))

        some = item, safe.leaves, safe.levels, safe.count_of_outputs, safe.is_expensive, safe.back
        return cls(*some, counts=counts, number=number)

    @property
    def count(self) -> Any:
        return self.number

    def fold(self, steps: Steps, *, linear: bool = True) -> list[Any]:
        accumulations = [step for step in steps if isinstance(step, Accumulation)]

        def item(*leaves: Any) -> list[jax.Array]:
            # The loop itself would store the mask of each item for the derivative.
            outs, counts = self.item(*leaves), self.counts(*leaves)
            for step in accumulations:
                taken = step.taken(outs.__getitem__, counts)
                for position, out in zip(*map(jax.tree.leaves, (step.outputs, taken)), strict=True):
                    outs[position] = out
            # In place of the mask of the item that may have been evaluated instead.
            return [*outs, counts]

        own = self.count_of_outputs
        row = Row(item, self.leaves, self.levels, own + 1, self.is_expensive, self.back)
        masks = [None if x.accumulator.nothing() is not None else own for x in accumulations]
        pairs = zip(accumulations, masks, strict=True)
        return row.fold([dataclasses.replace(x, mask=mask) for x, mask in pairs], linear=linear)
