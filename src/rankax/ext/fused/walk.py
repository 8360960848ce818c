# SPDX-License-Identifier: MIT
"""How a fused reduction takes part in a call: in place of the loops over the levels of a nest.

All levels are mapped at once; those that are reduced are folded by `Fuser`. So reductions say what
they accumulate, and how they are differentiated, as for any loop (`rankax.core.reduce.protocol`).

What cannot be fused is walked by the loops of the plan: all of it, or only a derivative, such as
that of a product, which stores states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from rankax._options import Options
from rankax.core.loop.loop import carried_with, varying_axes
from rankax.core.plan.schedule import Level
from rankax.core.reduce.row import Accumulation, Elementwise, Row, Steps
from rankax.core.trace.derivatives import call_with_derivative_of
from rankax.core.trace.programs import (
    ItemProgram,
    evaluate_by,
    with_shape,
    with_variables,
)
from rankax.core.walk import Nest, nest_of
from rankax.ext.fused.fold import FusedFold, evaluated
from rankax.ext.fused.kernel import MOST_INDEX
from rankax.ext.fused.scalars import MOST_NUMBERS, Refused
from rankax.ext.reductions.bins import InBins


def walk_of(nest: Nest, options: Options) -> Nest:
    """Return what walks the nest of a reduction: one kernel, if that can be written."""
    return FusedNest(**vars(nest), is_asked=options.fused is True)


@dataclasses.dataclass(frozen=True)
class FusedNest(Nest):
    """A nest whose reduced levels are one kernel; its plan has the loops where that cannot be.

    Attributes
    ----------
    is_asked : bool
        Whether it is an error if that cannot be.
    """

    is_asked: bool = False

    def walk(self, item: ItemProgram, leaves: Sequence[Any]) -> list[Any]:
        if self.before is not None:
            return dataclasses.replace(self, before=None).walk(*self.before(item, leaves))
        if self.plan.is_empty:
            return super().walk(item, leaves)
        forward, back, loops = self.passes_of(item)

        def backward(*args: Any) -> list[Any]:
            try:
                return back(*args)
            except Refused:
                return loops(*args)

        args = list(item.closed.consts), list(map(jnp.asarray, leaves))
        key = self if self.reductions and not self.reductions.are_ordered else None
        try:
            if not self.differentiable:
                return forward(*args)
            return call_with_derivative_of(backward, forward, *args, key=key)
        except Refused as error:
            if self.is_asked:
                raise ValueError(
                    f"{item.site}: it cannot be one kernel, because of {error}; fused='auto' "
                    "evaluates such a call as without the option"
                ) from None
        return super().walk(item, leaves)

    def passes_of(self, item: ItemProgram) -> list[Any]:
        """Return the kernel, the one that is differentiated, and the loops.

        All take the constants of the item and the leaves. They hold no array.
        """
        jaxpr = item.closed.jaxpr.replace(constvars=list(item.closed.jaxpr.constvars))
        bare = dataclasses.replace(item, closed=None)

        def walked(nest_of: Any, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
            own = dataclasses.replace(bare, closed=ClosedJaxpr(jaxpr, list(consts)))
            return Nest.walk(nest_of(), own, leaves)

        kernels = [functools.partial(self.in_one_kernel, differentiable=x) for x in (False, True)]
        return [functools.partial(walked, nest_of) for nest_of in (*kernels, lambda: self)]

    def in_one_kernel(self, *, differentiable: bool) -> Nest:
        """Return the nest that is one kernel; to walk it raises `Refused` if it cannot be."""
        assert self.reductions is not None
        if self.takes_chunks:
            raise Refused("batched=True, with which the kernel itself takes many items")
        plan = self.plan.cut(None)
        kept = [n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced]
        arrays = [leaf.shape for leaf in plan.leaves if leaf.is_array]
        if max(map(math.prod, [kept, *arrays])) > MOST_INDEX:
            raise Refused("an array of 2**31 numbers or more")
        levels = [dataclasses.replace(x, walker=FUSER) if x.reduced else x for x in plan.levels]
        plan = dataclasses.replace(plan, levels=tuple(levels))
        settings: dict[str, Any] = {"passes": self.passes, "differentiable": differentiable}
        return nest_of(plan, self.inputs, reductions=self.reductions, **settings)


class Fuser:
    """What folds the rows of a reduction in one kernel (`core/protocols.py`, `Walker`)."""

    count = 1

    def walk(self, *args: Any, **settings: Any) -> list[Any]:
        """Never called: only levels that are reduced have this walker."""
        raise NotImplementedError

    def fold(self, row: Row, steps: Steps, kept: Sequence[int], **_: Any) -> list[Any]:
        """Fold a row; raise `Refused` if no kernel can."""
        if kept or not steps:
            raise Refused("an output that is kept whole, or none")
        if row.levels[0].numbered:
            raise Refused("an item that depends on its place, as split keys and buckets do")
        is_sum, is_constant = all(map(_is_sum, steps)), not row.levels[0].differentiable
        if not (is_sum or is_constant):
            raise Refused("the states that it needs")
        item, operands, on = _item_of(row, steps)
        if is_constant:
            operands = list(map(lax.stop_gradient, operands))
        sizes = tuple([level.size for level in row.levels])
        fold = FusedFold(item, sizes, (True,) * len(sizes), tuple(on), tuple(steps), is_sum)
        if fold.kernel.chooses and not is_constant:  # what cannot be written is refused here, too
            raise Refused("a number that goes back to one of an argument, which an item chooses")
        return jax.tree.structure(fold.states).unflatten(evaluated(fold, operands))


FUSER = Fuser()


def _is_sum(step: Accumulation) -> bool:
    # Of sums in bins, a derivative reads all.
    adds: Any = step.accumulator
    is_binned = isinstance(adds, InBins) and adds.size <= MOST_NUMBERS
    adds = adds.own if is_binned else adds
    is_sum = isinstance(adds, Elementwise) and adds.combine is lax.add
    return is_sum and (is_binned or step.mask is None)


def _item_of(row: Row, steps: Steps) -> tuple[ClosedJaxpr, list[Any], list[tuple[bool, ...]]]:
    """Return the program of an item without constants, its operands, and which axes they have.

    Its outputs are those of the row, with zeros for those that no step takes.
    """
    pairs = [_in_front(row.levels, i, leaf) for i, leaf in enumerate(row.leaves)]
    cores = [with_shape(jax.typeof(x), x.shape[sum(own) :]) for x, own in pairs]
    used = {i for step in steps for i in (*jax.tree.leaves(step.outputs), step.mask)}

    def taken(*items: Any) -> list[Any]:
        return [x if i in used else jnp.zeros_like(x) for i, x in enumerate(row.item(*items))]

    closed = jax.make_jaxpr(taken)(*cores)
    operands = [*closed.consts, *(x for x, _ in pairs)]
    on = [*[(False,) * len(row.levels)] * len(closed.consts), *(own for _, own in pairs)]
    jaxpr = closed.jaxpr
    bare = with_variables(jaxpr, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
    return _of_one_type(bare, operands), operands, on


def _of_one_type(jaxpr: Jaxpr, operands: Sequence[Any]) -> ClosedJaxpr:
    """Return a program whose inputs all vary along the same axes of a mesh, in `jax.shard_map`.

    A step that makes them so would be transposed to a sum over devices, in each item.
    """
    if len(set(map(varying_axes, operands))) < 2:
        return ClosedJaxpr(jaxpr, ())
    varying = carried_with(list(operands), operands)
    pairs: Any = zip(varying, jaxpr.invars, strict=True)
    avals = [with_shape(jax.typeof(x), v.aval.shape) for x, v in pairs]

    def step(fun: Any, eqn: Any, _: Any, values: list[Any]) -> list[Any]:
        return values if eqn.primitive.name in ("pvary", "pcast") else fun(*values)

    return jax.make_jaxpr(lambda *args: evaluate_by(step, jaxpr, args))(*avals)


def _in_front(levels: Sequence[Level], i: int, leaf: Any) -> tuple[Any, tuple[bool, ...]]:
    """Return leaf ``i`` with the axes of the levels in front, and which levels have one."""
    axes = list(range(jnp.ndim(leaf)))
    places = [None if (axis := level.in_axes[i]) is None else axes.pop(axis) for level in levels]
    order = [*(place for place in places if place is not None), *axes]
    return jnp.transpose(leaf, order), tuple([place is not None for place in places])


def notes(nest: Nest, item: ItemProgram) -> list[str]:
    """Say of a plan whether its call is one kernel, or why not."""
    if not isinstance(nest, FusedNest) or nest.plan.is_empty:
        return []
    shapes = {leaf.position: leaf.shape for leaf in nest.plan.leaves}
    pairs = zip(nest.inputs, item.closed.in_avals, strict=False)
    leaves = [jax.ShapeDtypeStruct(shapes[i], aval.dtype) for i, aval in pairs]
    args, (forward, back, _) = (list(item.closed.consts), leaves), nest.passes_of(item)
    if reason := _reason(forward, *args):
        return [f"not fused, {reason}"]
    reason = _reason(lambda *args: jax.vjp(back, *args)[0], *args)
    by_loops = reason and f"; its derivative goes by loops, {reason}"
    return [f"fused: one kernel, which stores nothing for an item{by_loops}"]


def _reason(fun: Any, *args: Any) -> str:
    try:
        jax.eval_shape(fun, *args)
    except Refused as error:
        return f"because of {error}"
    return ""
