# SPDX-License-Identifier: MIT
"""A bound call: the arguments of a front end, in one form for all later steps.

`auto_vmap` binds in `bind.py`, `chunked_vmap` and `chunked_reduce` in `_front/chunked.py`. Binding
is the only step in which the front ends differ.
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

from rankax.core.base.arrays import shape_of
from rankax.core.base.messages import traced_as
from rankax.core.call.nest import nest_of
from rankax.core.hooks import Form, Placement, form_of
from rankax.core.loop.spec import PLACE, index_without_fill, item_key
from rankax.core.options import Options
from rankax.core.plan.nesting import NO_ARRAY, Nesting
from rankax.core.plan.schedule import WHOLE_CHUNKS, Tiles
from rankax.core.reduce.protocol import Marked
from rankax.core.reduce.run import Reductions, trace_reduced
from rankax.core.trace.programs import ItemProgram, trace_item, with_shape


# Not frozen: one is made in each call, and a frozen one takes two microseconds more to make.
@dataclasses.dataclass(eq=False)
class Bound(abc.ABC):
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
    form : Form or None
        How the kernel is called, if it does not take one item (`core/hooks.py`).
    is_kept : bool
        Whether an eager call is one kept program, also without a loop.
    cut : tuple of int or None
        The batch shape, if this is a part of a call or is padded.
    out_axes : int, None, or a pytree prefix of those
        Where outputs have the mapped axis, if the call has a single level.
    axis_name : hashable or None
        The name by which collectives in the kernel may refer to the mapped axis.
    """

    fun: Callable[..., Any]
    name: str
    site: str
    leaves: list[Any]
    paths: Sequence[str]
    lengths: Mapping[int, Any] = dataclasses.field(default_factory=dict, kw_only=True)
    form: Form | None = dataclasses.field(default=None, kw_only=True)
    is_kept: bool = dataclasses.field(default=False, kw_only=True)
    cut: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    out_axes: Any = dataclasses.field(default=0, kw_only=True)
    axis_name: Hashable | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def plan(self, options: Options, tiles: Tiles | None = WHOLE_CHUNKS) -> Nesting:
        """Plan the call from shapes alone, with at most ``options.chunk_size`` items in flight."""

    def plan_whole(self, options: Options) -> Nesting:
        """Plan the call without chunks, whatever the options say."""
        return self.plan(options, None)

    @property
    def in_front(self) -> list[str]:
        """The sentences that the form adds to an error of the kernel."""
        return [] if self.form is None else [*self.form.in_front]

    def prepared(self, options: Options, place: Placement) -> Self:
        """Return the call before it is planned."""
        return self if self.form is None else self.form.prepared(self, options, place)

    @property
    @abc.abstractmethod
    def ranked(self) -> list[int]:
        """The leaves that have an axis for the items if the kernel takes a batch itself."""

    @abc.abstractmethod
    def call(self, leaves: Sequence[Any], plan: Nesting) -> Any:
        """Call the kernel with other leaves."""

    def evaluate(self, leaves: Sequence[Any], plan: Nesting) -> Any:
        """Evaluate the kernel with other leaves, such as the leaves of one item."""
        if self.form is None:
            return self.call(leaves, plan)
        return self.form.evaluate(self, leaves, plan)

    def in_one_piece(self, plan: Nesting) -> Any:
        """Evaluate a map that has no loop."""
        on_item = self.on_item(plan)
        if not plan.plan.levels:
            return on_item()
        nest = nest_of(plan, plan.mapped, Options())
        trees: list[Any] = []

        # Only leaves pass through the maps: a pytree class may reject the arrays of a level.
        def flat(*items: Any) -> list[Any]:
            outs, tree = jax.tree.flatten(on_item(*items))
            trees.append(tree)
            return outs

        outs = nest.map_at_once(flat, [self.leaves[i] for i in plan.mapped])
        return jax.tree.unflatten(trees[-1], outs)

    def part(self, plan: Nesting, shape: tuple[int, ...]) -> Self:
        """Return the call for a part of this batch shape; its mapped leaves are shapes only."""
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

    def reshaped(self, plan: Nesting) -> list[Any]:
        """Return the leaves, of which those that are not mapped have the shape for one item."""
        leaves = list(self.leaves)
        for position, shape in plan.reshaped:
            if position not in plan.mapped:
                leaves[position] = jnp.reshape(leaves[position], shape)
        return leaves

    def on_item(self, plan: Nesting) -> Callable[..., Any]:
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
            for split, number in zip(plan.splits, numbers, strict=True):
                axes = [axis for axis, stride in enumerate(split.strides) if stride]
                if split.position == NO_ARRAY:
                    marks.append(number < self.lengths[axes[0]])
                    continue
                shape, key = plan.plan.batch_shape, leaves[split.position]
                number = index_without_fill(number, shape, axes, self.lengths)
                leaves[split.position] = item_key(key, number)
            out = self.evaluate(leaves, plan)
            return Marked(out, functools.reduce(operator.and_, marks)) if marks else out

        return on_item

    def trace(self, plan: Nesting, reductions: Reductions | None = None) -> ItemProgram:
        """Trace the kernel for one item; loops evaluate this program."""
        return self.trace_on(self.on_item(plan), self.types_of_item(plan), plan, reductions)

    def types_of_item(self, plan: Nesting) -> list[Any]:
        """Return the types of the mapped leaves of one item, then of the split numbers."""
        avals = [
            with_shape(jax.typeof(self.leaves[i]), core)
            for i, core in zip(plan.mapped, plan.cores, strict=True)
        ]
        return [*avals, *(with_shape(PLACE, ()) for _ in plan.splits)]

    def trace_on(
        self,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        plan: Nesting,
        reductions: Reductions | None,
    ) -> ItemProgram:
        """Trace a function of arrays of these types, which is the kernel for one item."""
        if reductions is None:
            inputs: Any = lambda *items: (items, {})  # noqa: E731
            return trace_item(fun, inputs, avals, self.out_axes, self.axis_name)
        total = math.prod(plan.plan.batch_shape[axis] for axis in plan.plan.reduced)
        total = total if reductions.of_run is None else reductions.of_run
        return trace_reduced(fun, avals, reductions, total)


def sizes_of(options: Options, tiles: Tiles | None) -> tuple[int | None, Tiles]:
    """Return the chunk size and the tiles of a plan; a reduction has a limit of its own."""
    chunk_size = None if tiles is None else options.most
    tiles = tiles or WHOLE_CHUNKS
    form = form_of(options)
    if options.reduce is None or (form is not None and form.takes_chunks):
        return chunk_size, tiles
    most = options.rules.most_reduced
    return chunk_size, Tiles(min(tiles.forward or most, most)) if most else tiles
