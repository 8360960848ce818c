# SPDX-License-Identifier: MIT
"""A call whose arguments are bound: its leaves, its plan, and its kernel as a function of one item.

A front end binds its arguments into a `Call`: `kernels.py` does so for `auto_vmap`, and `axes.py`
for `chunked_vmap`, `chunked_reduce` and Jacobians. Nothing else in which they differ is known to
what evaluates a call (`rankax.pipeline`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from rankax._options import Options
from rankax.core.base.arrays import gated_if_small, shape_of
from rankax.core.base.messages import traced_as
from rankax.core.base.trees import check_no_sparse, check_outputs
from rankax.core.loop.spec import PLACE, index_without_fill, item_key
from rankax.core.plan.schedule import NO_ARRAY, WHOLE_CHUNKS, Plan, Tiles
from rankax.core.protocols import ITEM, Form
from rankax.core.reduce.run import Reductions, trace_reduced
from rankax.core.trace.programs import (
    CollectiveError,
    ItemProgram,
    evaluate,
    trace_item,
    with_shape,
)
from rankax.core.walk import Nest, nest_of


# Not frozen: one is made in each call, and a frozen one takes two microseconds more to make.
@dataclasses.dataclass(eq=False)
class Call(abc.ABC):
    """A call whose arguments are checked.

    Attributes
    ----------
    fun : callable
        The kernel; errors show its name and source line.
    name : str
        The kernel's name.
    site : str
        The call as errors name it: ``energy()``, ``chunked_vmap(energy)``.
    leaves : list
        Arrays, numbers, other objects; `jax.ShapeDtypeStruct` if only a plan is needed.
    paths : sequence of str
        The name of each leaf, in the caller's words.
    lengths : mapping of int to uint32
        How many items along each padded batch axis (`ext/bucket.py`) are not copies.
    form : Form
        How the kernel is called to evaluate one item (`core/protocols.py`).
    is_one_program : bool
        Whether an eager call is one kept program, also without a loop.
    cut : tuple of int or None
        The batch shape, if this is a part of a call or is padded.
    out_axes : int, None, or a pytree prefix of those
        Where outputs have the mapped axis, if the call has a single level.
    axis_name : hashable or None
        The name of the mapped axis, if the call has a single level; a collective over it is refused
        in chunks.
    """

    fun: Callable[..., Any]
    name: str
    site: str
    leaves: list[Any]
    paths: Sequence[str]
    _: dataclasses.KW_ONLY
    lengths: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    form: Form = ITEM
    is_one_program: bool = False
    cut: tuple[int, ...] | None = None
    out_axes: Any = 0
    axis_name: Hashable | None = None

    @abc.abstractmethod
    def plan(self, options: Options, tiles: Tiles | None = WHOLE_CHUNKS) -> Plan:
        """Plan the call from shapes alone, with at most ``options.chunk_size`` items in flight."""

    def plan_whole(self, options: Options) -> Plan:
        """Plan the call without chunks, whatever the options say."""
        return self.plan(options, None)

    @property
    @abc.abstractmethod
    def ranked(self) -> list[int]:
        """The leaves that have an axis for the items if the kernel takes a batch itself."""

    @abc.abstractmethod
    def call(self, leaves: Sequence[Any], plan: Plan) -> Any:
        """Call the kernel with other leaves."""

    def evaluate(self, leaves: Sequence[Any], plan: Plan) -> Any:
        """Evaluate the kernel with other leaves, such as the leaves of one item."""
        out = self.form.evaluate(self, leaves, plan)
        if plan.levels and not isinstance(out, jax.Array):
            check_no_sparse(self.fun, out)
        return out

    def in_one_piece(self, plan: Plan) -> Any:
        """Evaluate a map that has no loop."""
        on_item = self.on_item(plan)
        if not plan.levels:
            return on_item()
        nest = nest_of(plan, plan.mapped) if plan.splits else Nest(plan, plan.mapped)
        trees: list[Any] = []

        # Only leaves pass through the maps: a pytree class may reject the arrays of a level.
        def flat(*items: Any) -> list[Any]:
            outs, tree = jax.tree.flatten(on_item(*items))
            trees.append(tree)
            return outs

        outs = nest.map_at_once(flat, [self.leaves[i] for i in plan.mapped])
        return jax.tree.unflatten(trees[-1], outs)

    def part(self, plan: Plan, shape: tuple[int, ...]) -> Self:
        """Return the call for a part of this batch shape, to be planned: its leaves are shapes."""
        leaves = list(self.leaves)
        for i, axes in zip(plan.mapped, plan.batch_axes, strict=True):
            sizes = list(leaves[i].shape)
            for axis, size in zip(axes, shape, strict=True):
                if axis is not None:
                    sizes[axis] = size
            leaves[i] = shape_of(leaves[i], tuple(sizes))
        # A stretched axis of length 1 is none, or it would be one of the batch in a part of 1 item.
        for i, core in plan.reshaped:
            if i not in plan.mapped:
                leaves[i] = shape_of(leaves[i], core)
        return dataclasses.replace(self, leaves=leaves, cut=shape)

    def reshaped(self, plan: Plan) -> list[Any]:
        """Return the leaves, of which those that are not mapped have the shape for one item."""
        leaves = list(self.leaves)
        for position, shape in plan.reshaped:
            if position not in plan.mapped:
                leaves[position] = jnp.reshape(leaves[position], shape)
        return leaves

    def on_item(self, plan: Plan, reductions: Reductions | None = None) -> Callable[..., Any]:
        """Return the kernel as a function of one item of each mapped leaf, then split numbers."""
        whole = self.reshaped(plan)
        positions = [*plan.mapped, *(split.position for split in plan.splits)]
        names = ["batch_shape" if i == NO_ARRAY else self.paths[i] for i in positions]

        @traced_as(self.fun, names)
        def on_item(*items: Any) -> Any:
            leaves = list(whole)  # a copy, so that no item outlives its trace
            numbers = items[len(plan.mapped) :]
            for position, item in zip(plan.mapped, items, strict=False):
                leaves[position] = item
            marks: list[Any] = []
            counts: Any = True
            for split, number in zip(plan.splits, numbers, strict=True):
                axes = [axis for axis, stride in enumerate(split.strides) if stride]
                if split.position == NO_ARRAY:
                    marks.append(number < self.lengths[axes[0]])
                    continue
                shape, key = plan.batch_shape, leaves[split.position]
                number = index_without_fill(number, shape, axes, self.lengths)
                leaves[split.position] = item_key(key, number)
            if marks:
                counts = functools.reduce(operator.and_, marks)
            if reductions is not None:
                return reductions.marked(self.evaluate(leaves, plan), self.paths, leaves, counts)
            if not marks:
                return self.evaluate(leaves, plan)
            return _gated_item(self.fun, lambda: self.evaluate(leaves, plan), counts)

        return on_item

    def has_collective(self, plan: Plan) -> bool:
        """Whether the kernel needs all items of an axis with a name at once."""
        if self.axis_name is None:
            return False
        try:
            self.trace(plan)
        except CollectiveError:
            return True
        return False

    def trace(self, plan: Plan, reductions: Reductions | None = None) -> ItemProgram:
        """Trace the kernel for one item; loops evaluate this program."""
        fun = self.on_item(plan, reductions)
        avals = [
            with_shape(jax.typeof(self.leaves[i]), core)
            for i, core in zip(plan.mapped, plan.cores, strict=True)
        ]
        avals += [with_shape(PLACE, ()) for _ in plan.splits]
        if reductions is None:
            inputs: Any = lambda *items: (items, {})  # noqa: E731
            axis = None if self.axis_name is None else (self.axis_name, plan.batch_shape[0])
            return trace_item(fun, inputs, avals, self.out_axes, axis)
        total = math.prod(plan.batch_shape[axis] for axis in plan.reduced)
        total = total if reductions.of_run is None else reductions.of_run
        return trace_reduced(fun, avals, reductions, total)


def _gated_item(fun: Callable[..., Any], item: Callable[[], Any], counts: jax.Array) -> Any:
    """Evaluate an item of a kernel that sends nothing back unless it counts."""
    trees: list[Any] = []

    # Only leaves: a pytree class may reject the types of arrays.
    def flat() -> list[Any]:
        out = item()
        check_outputs(fun, out)
        leaves, tree = jax.tree.flatten(out)
        trees.append(tree)
        return leaves

    closed = jax.make_jaxpr(flat)()
    consts = [gated_if_small(counts, x) for x in closed.consts]
    return trees[-1].unflatten(evaluate(closed.jaxpr, consts))


def sizes_of(options: Options, tiles: Tiles | None) -> tuple[int | None, Tiles]:
    """Return the chunk size and the tiles of a plan; a reduction has a limit of its own."""
    chunk_size, tiles = None if tiles is None else options.most, tiles or WHOLE_CHUNKS
    if options.reduce is None or options.batched:
        return chunk_size, tiles
    most = tiles.reduced or options.rules.most_reduced
    return chunk_size, tiles._replace(forward=min(tiles.forward or most, most)) if most else tiles
