# SPDX-License-Identifier: MIT
"""A bound call, and the path of every call: plan, trace, fit, run.

A front end binds its arguments into one form, a `Bound`: `bind.py` does so for `auto_vmap`, and
`_front/chunked.py` for `chunked_vmap` and `chunked_reduce`. Nothing else in which they differ is
known here.

A map without a loop nests maps around the kernel itself, so its program is the one that nesting by
hand gives, unless an extension asks for the program of an item (`untraced`). Otherwise the kernel
is traced once in each call, for one item, and all later steps (the memory limit, the tile, the
loops, the devices) work on the program of that item. What ``plan`` prints is found by the same
steps (`ext/explain`); an eager call that is known skips those after the trace.

Words used throughout:

* chunk: the items of a map that one step of a loop takes, at most ``chunk_size``
* tile: the items of a reduction that one step evaluates at once; in a plan, also the items that a
  step of a map does (`Level.tile`)
* slot: the place of an item in a tile; a running state has one value for each slot
* row: the items along the reduced axes, for one item of the kept axes; in a loop, also one entry
  of the ``xs`` or ``ys`` of a scan
* run: items of a row that are folded into one state, such as one device's part or one dask block
* part: the contiguous items of a batch axis that one of several devices evaluates
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from rankax.core.base.arrays import gated_if_small, inside_call, on_mesh, shape_of
from rankax.core.base.messages import traced_as
from rankax.core.base.trees import check_outputs
from rankax.core.call.nest import Nest, nest_of, nest_without_loops
from rankax.core.hooks import (
    CHOOSERS,
    TRACED,
    WARNINGS,
    Form,
    Layout,
    Observer,
    Placement,
    form_of,
    observed,
    place_of,
)
from rankax.core.loop.eager_programs import Mode, Program, call_of_kernel, kept_program, mode_of
from rankax.core.loop.spec import PLACE, index_without_fill, item_key
from rankax.core.options import Options
from rankax.core.plan.schedule import NO_ARRAY, WHOLE_CHUNKS, Plan, Tiles
from rankax.core.reduce.protocol import Marked
from rankax.core.reduce.run import Reductions, trace_reduced
from rankax.core.trace.programs import ItemProgram, evaluate, trace_item, with_shape


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
        The name of the mapped axis; a collective over it is refused in chunks.
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
    def plan(self, options: Options, tiles: Tiles | None = WHOLE_CHUNKS) -> Plan:
        """Plan the call from shapes alone, with at most ``options.chunk_size`` items in flight."""

    def plan_whole(self, options: Options) -> Plan:
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
    def call(self, leaves: Sequence[Any], plan: Plan) -> Any:
        """Call the kernel with other leaves."""

    def evaluate(self, leaves: Sequence[Any], plan: Plan) -> Any:
        """Evaluate the kernel with other leaves, such as the leaves of one item."""
        if self.form is None:
            return self.call(leaves, plan)
        return self.form.evaluate(self, leaves, plan)

    def in_one_piece(self, plan: Plan) -> Any:
        """Evaluate a map that has no loop."""
        on_item = self.on_item(plan)
        if not plan.levels:
            return on_item()
        nest = nest_without_loops(plan)
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

    def on_item(self, plan: Plan) -> Callable[..., Any]:
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
                shape, key = plan.batch_shape, leaves[split.position]
                number = index_without_fill(number, shape, axes, self.lengths)
                leaves[split.position] = item_key(key, number)
            if not marks:
                return self.evaluate(leaves, plan)
            counts = functools.reduce(operator.and_, marks)
            if plan.reduced:
                return Marked(self.evaluate(leaves, plan), counts)
            return _gated_item(self.fun, lambda: self.evaluate(leaves, plan), counts)

        return on_item

    def trace(self, plan: Plan, reductions: Reductions | None = None) -> ItemProgram:
        """Trace the kernel for one item; loops evaluate this program."""
        return self.trace_on(self.on_item(plan), self.types_of_item(plan), plan, reductions)

    def types_of_item(self, plan: Plan) -> list[Any]:
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
        plan: Plan,
        reductions: Reductions | None,
    ) -> ItemProgram:
        """Trace a function of arrays of these types, which is the kernel for one item."""
        if reductions is None:
            inputs: Any = lambda *items: (items, {})  # noqa: E731
            return trace_item(fun, inputs, avals, self.out_axes, self.axis_name)
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
    chunk_size = None if tiles is None else options.most
    tiles = tiles or WHOLE_CHUNKS
    if options.reduce is None:
        return chunk_size, tiles
    form = form_of(options)
    if form is not None and form.takes_chunks:
        return chunk_size, tiles
    most = options.rules.most_reduced
    return chunk_size, Tiles(min(tiles.forward or most, most)) if most else tiles


# The path.


class Traced(NamedTuple):
    """A bound call whose kernel is traced."""

    bound: Bound
    options: Options
    place: Placement
    whole: Plan  # the plan of the whole batch, without chunks
    item: ItemProgram
    layout: Layout


class Fitted(NamedTuple):
    """How a call runs; extensions change it (`core/hooks.py`, `CHOOSERS`)."""

    planner: Callable[[Options], Plan]  # plans one part
    options: Options
    found: dict[str, Any]  # what the plan shows
    tiles: Tiles = WHOLE_CHUNKS
    is_walked: bool = False  # otherwise it may be evaluated without its traced program

    @property
    def plan(self) -> Plan:
        """The plan of one part."""
        return self.planner(self.options)


def run(bound: Bound, options: Options, place: Placement | None = None) -> Any:
    """Evaluate a bound call; pass its place if it is known already."""
    options = options.at(bound.leaves)
    with on_mesh(bound.leaves), inside_call(options.target):
        place = place_of(bound, options) if place is None else place
        bound = bound.prepared(options, place)
        if (plan := untraced(bound, options, place)) is not None:
            return bound.in_one_piece(plan)
        with observed(options, bound.name) as observer:
            return _run(traced(bound, options, place), observer)


def _run(call: Traced, observer: Observer | None) -> Any:
    bound, options, whole = call.bound, call.options, call.whole
    item, leaves = call.layout.placed(call.item, [bound.leaves[i] for i in whole.mapped])
    mode = mode_of([*leaves, *item.read, *item.closed.consts], on_mesh=bool(call.layout))
    make = functools.partial(_program, call, observer, is_now=mode is Mode.EAGER)
    reductions = options.reduce
    # A user-defined function may change between calls and stay the same object.
    is_ordered = reductions is not None and reductions.are_ordered
    of_call = whole, call.place.key, options, options.rules, observer
    key = None if is_ordered else (*of_call, tuple(bound.lengths), bound.cut)
    with call_of_kernel(item.site), call.place.around(bound.site):
        try:
            evaluate = kept_program(make, item, leaves, key, mode, options.compiled)
            out = evaluate() if evaluate else []
        except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
            raise item.reuses_key() from error
    if evaluate is None:
        return bound.in_one_piece(whole)
    if reductions is None:
        return item.out_tree.unflatten(out)
    return reductions.assembled(item.outputs, out)


def _program(call: Traced, observer: Observer | None, *, is_now: bool) -> Program | None:
    """Return the whole call as a function of its item and its leaves."""
    call = call._replace(item=call.item.whole)
    bound, whole, layout = call.bound, call.whole, call.layout
    fitted = fit(call)
    if not fitted.is_walked:
        return None
    plan, options = fitted.plan, fitted.options
    for warn in WARNINGS.of(options):
        warn(call, plan)
    if observer is not None:
        is_shown = layout or plan.steps > 1
        observer = observer.of_parts(layout.count) if is_shown else None

    def nest(plan: Plan, observer: Observer | None = None) -> Nest:
        plan = dataclasses.replace(plan, splits=whole.splits)  # numbered within the whole batch
        return nest_of(plan, whole.mapped, options, observer, differentiable=not is_now)

    *others, shape = layout.shapes()
    nests = {other: nest(bound.part(whole, other).plan(options)) for other in others}
    nests[shape] = nest(plan, observer)
    # JAX keeps it, so it holds no arrays: neither the call nor its item.
    return functools.partial(layout.walk, nests)


def untraced(bound: Bound, options: Options, place: Placement) -> Plan | None:
    """Return the plan of a call that is evaluated without tracing its kernel first."""
    if options.reduce is not None:
        return None
    plan = bound.plan(options)
    is_asked = any(hook(bound, options, plan) for hook in TRACED.of(options))
    if plan.is_empty:
        return None if is_asked else bound.plan_whole(options)
    is_traced = is_asked or place or plan.has_loop or bound.is_kept
    return None if is_traced else plan


def traced(bound: Bound, options: Options, place: Placement) -> Traced:
    """Trace the kernel of a call for one item."""
    whole = bound.plan_whole(options)
    with place.inside():
        item = bound.trace(whole, options.reduce)
        item = item.whole if place else item
    return Traced(bound, options, place, whole, item, place.layout(whole, item))


def fit(call: Traced) -> Fitted:
    """Choose how a call runs: tiles, and what extensions choose."""
    bound, options, item, layout = call.bound, call.options, call.item, call.layout
    if call.whole.is_empty:
        return Fitted(lambda _: call.whole, options, {}, is_walked=True)
    part = bound.part(call.whole, layout.shapes()[-1]) if layout else bound
    updated = options.reduce.numbers_of_tile(item.outputs) if options.reduce else 0
    is_whole = bound.form is not None and bound.form.takes_chunks
    tiles = WHOLE_CHUNKS if is_whole else options.rules.tiles(item.closed.jaxpr, updated)
    fitted = Fitted(lambda options: part.plan(options, tiles), options, {}, tiles)
    for choose in CHOOSERS.of(options):
        fitted = choose(call, part, fitted) or fitted
    is_walked = fitted.is_walked or layout or options.reduce or bound.is_kept
    return fitted._replace(is_walked=bool(is_walked or fitted.plan.has_loop))
