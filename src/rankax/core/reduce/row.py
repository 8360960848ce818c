# SPDX-License-Identifier: MIT
"""Fold a row: the items along the reduced axes, for one item of the kept axes.

A nest of loops evaluates a row. At most one level of the nest is cut into tiles: the levels inside
it fit a tile whole and are mapped; those around it are evaluated item by item. Each loop returns
its states with the slots joined, and the loop around it merges them.

The last tile overlaps the one before it if no tile divides the level. Items that were counted
before add nothing (`Accumulation.step`), unless that makes no difference (`may_repeat`). A smaller
tile for what is left would be a second copy of the kernel, and double the time to compile; only a
derivative needs one (`rankax.core.loop.loop.with_short_last`).

A state holds one value for each slot of a tile: item ``j`` of every tile goes into slot ``j``,
elementwise, and the slots are joined once, after the loop. A sum across the slots in every step
would cost more than the kernel itself: on two CPU cores, a sum of Gaussians over 10,000 x 10,000
points took 0.6 to 1 s that way, and takes 0.1 s with one accumulator for each slot. Outputs of
more than 16 numbers are joined in every step, because their slots would not fit the cache
(`Accumulation.is_wide`), and so are those for which a rule of a compiler asks it.

A loop of more than `MOST_PLAIN` steps would round as often: 100,000 steps of 0.1 in float32 are
half a percent off. So it holds what rounding took beside the sums, in a quarter of the slots, into
which each state is folded before it is added (`Accumulator.add`). That takes a third as long as a
tile of a cheap kernel. So the loop takes its steps in groups, each from a new start, and adds what
a group holds. It adds each step if there are no groups (`group_of`), or if it is differentiated,
because gradients through nested scans took 1.5 to 2.5 times as long.

The slots are the last axis of each array of a state; the other axes are the core axes of an output.
(In `Ordered`, they are axis 0.) The states of several runs of items are slots, too: `join_runs`
merges them (`ext/runs.py`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import counted, index_dtype, scalar, zeros_of
from rankax.core.loop.loop import (
    Sink,
    Tile,
    TileSlots,
    ends_of,
    flattened,
    group_of,
    run_loop,
    saved,
    sinks_of,
    steps_of,
)
from rankax.core.loop.shared import MOST_PLAIN, add_exactly
from rankax.core.loop.spec import items_at, vmap_level
from rankax.core.plan.schedule import Chunks, Level, at_most, is_known
from rankax.core.protocols import Rules

State = Any  # a pytree of arrays, each with slots

_MOST_PER_SLOT = 16  # numbers; larger slots would not fit the cache together
_TILE_PER_SLOT = 4  # items of a tile in each slot of a long loop, if `_LEAST_SLOTS` are left
_LEAST_SLOTS = 16  # of float32, one vector


class Accumulator(Protocol):
    """The fold of one output, or of all outputs of one reduction (`Ordered`)."""

    #: The shape of the output, if each slot has such a state.
    core: tuple[int, ...]

    #: Whether an item may be added twice.
    may_repeat = False

    #: Whether the rounding errors of many merges add up, as those of a sum do.
    drifts = False

    def start(self, slots: int) -> State:
        """Return the state of no items."""

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        """Add one tile; ``index`` holds the flat index of its item in each slot.

        ``counts``: which items count; `nothing`, if there is such a thing, is already in place of
        the others.
        """
        return self.merge(state, self.lift(tile, counts))

    def nothing(self) -> Any:
        """Return the outputs of an item that adds nothing; None if `step` needs ``counts``."""

    def lift(self, tile: Any, counts: Any = None) -> State:
        """Return the state of one tile alone; needed if it `drifts`, or for the default `step`."""

    def merge(self, first: State, second: State) -> State:
        """Merge two states slot by slot; the items of the first come before the others."""

    def join(self, state: State) -> State:
        """Merge the slots of a state into one. Only the slots of `Ordered` must be in order."""

    # What a long loop holds if states drift: by default, a sum and what rounding took from it.

    def begin(self, slots: int) -> Any:
        """Return what is held before the first step."""
        return self.start(slots), self.start(slots)

    def add(self, held: Any, state: State) -> Any:
        """Add a state, slot by slot."""
        total, lost = held
        return add_exactly(total, lost, state)

    def total(self, held: Any) -> State:
        """Return the state that is held."""
        return jax.tree.map(lax.add, *held)

    def found(self, row: Any, step: "Accumulation", state: State) -> State:
        """Complete the joined state of a `Row`, if `step` has put off some of the work."""
        return state

    def join_runs(self, states: State) -> State:
        """Merge the states of runs, which are on axis 0 of each array, into one."""
        return self.join(jax.tree.map(in_a_row, states))

    def renumber(self, state: State, place: Callable[[jax.Array], jax.Array]) -> State:
        """Replace each index in a state by its ``place``."""
        return state


# What a loop over a reduced level does with the outputs of its items.


@dataclasses.dataclass(frozen=True)
class Accumulation(Sink):
    """An accumulator, and the output of an item that it takes, or several as a tuple."""

    outputs: int | tuple[int, ...]
    accumulator: Accumulator
    mask: int | None = None  # the output that says whether the item counts
    is_long: bool = False  # whether it holds what rounding takes
    joins: bool = False  # whether a rule wants the slots of each tile joined at once

    has_slots = True

    def over(self, steps: int) -> Self:
        """Return the same for a loop of so many steps."""
        is_long = self.accumulator.drifts and not at_most(steps, MOST_PLAIN)
        return dataclasses.replace(self, is_long=True) if is_long else self

    @property
    def in_groups(self) -> bool:
        """Whether to take steps in groups pays."""
        return self.is_long

    @property
    def is_wide(self) -> bool:
        """Whether the slots of each tile are joined at once, as where their states are large."""
        return self.joins or math.prod(self.accumulator.core) > _MOST_PER_SLOT

    def taken(self, outs: Callable[[int], Any], counts: jax.Array | None) -> Any:
        """Return the outputs that it takes of an item or a tile, or `nothing` in their place."""
        tile = jax.tree.map(outs, self.outputs)
        nothing = self.accumulator.nothing()
        return tile if counts is None or nothing is None else choose(counts, tile, nothing)

    def start(self, slots: int) -> Any:
        slots = 1 if self.is_wide else slots
        if self.is_long:
            return self.accumulator.begin(slots // _tile_per_slot(slots))
        return self.accumulator.start(slots)

    def step(self, held: Any, tile: Tile) -> tuple[Any, None]:
        accumulator, (items, counts) = self.accumulator, self.items(tile)
        if self.is_long:
            return self._add(held, accumulator.lift(items, counts)), None
        if not self.is_wide:
            return accumulator.step(held, items, tile.index, counts), None
        if accumulator.drifts:
            fresh = accumulator.lift(items, counts)
        else:
            fresh = accumulator.step(accumulator.start(tile.slots.count), items, tile.index, counts)
        return accumulator.merge(held, accumulator.join(fresh)), None

    def items(self, tile: Tile) -> tuple[Any, jax.Array | None]:
        """Return what it takes of a tile, and which of its items count; None: all."""
        counts = None if self.accumulator.may_repeat and tile.repeats else tile.new
        if self.mask is not None:
            mask = tile.in_slots(self.mask)
            counts = mask if counts is None else mask & counts
        return self.taken(tile.in_slots, counts), counts

    def _add(self, held: Any, state: State) -> Any:
        """Add a state, whose slots are folded into those of a long loop."""
        return self.accumulator.add(held, self._folded(state))

    def _folded(self, state: State) -> State:
        if self.is_wide:
            return self.accumulator.join(state)

        slots = jax.tree.leaves(state)[0].shape[-1]
        each = slots // _tile_per_slot(slots)
        # By slices: a sum along an axis is slower, and so is its transpose.
        parts = [
            jax.tree.map(lambda x, at=at: lax.slice_in_dim(x, at, at + each, axis=-1), state)
            for at in range(0, slots, each)
        ]
        while len(parts) > 1:
            parts = list(map(self.accumulator.merge, parts[::2], parts[1::2]))
        return parts[0]

    @property
    def of_group(self) -> Sink:
        return dataclasses.replace(self, is_long=False)

    def fresh(self, held: Any, slots: int) -> Any:
        return self.of_group.start(slots) if self.is_long else held

    def with_group(self, held: Any, of_group: Any, rows: Any) -> Any:
        return self._add(held, of_group) if self.is_long else of_group

    def end(self, held: Any, rows: Any) -> State:
        return self.accumulator.join(self.accumulator.total(held) if self.is_long else held)


def _tile_per_slot(slots: int) -> int:
    """Return how many items of a tile each slot of a long loop takes."""
    is_many = slots % _TILE_PER_SLOT == 0 and slots >= _TILE_PER_SLOT * _LEAST_SLOTS
    return _TILE_PER_SLOT if is_many else 1


@dataclasses.dataclass(frozen=True)
class Merged(Sink):
    """Merges the states of inner loops, each over ``each`` items."""

    position: int
    accumulator: Accumulator
    each: int
    is_long: bool = False

    has_slots = True

    def start(self, slots: int) -> Any:
        return self.accumulator.begin(1) if self.is_long else self.accumulator.start(1)

    def step(self, held: Any, tile: Tile) -> tuple[Any, None]:
        dtype = tile.slots.dtype
        as_array = np.asarray if is_known(self.each) else jnp.asarray
        offset = tile.at.astype(dtype) * as_array(self.each).astype(dtype)
        placed = self.accumulator.renumber(
            tile.outs[self.position], lambda index: index + offset.astype(index.dtype)
        )
        add = self.accumulator.add if self.is_long else self.accumulator.merge
        return add(held, placed), None

    def end(self, held: Any, rows: Any) -> State:
        return self.accumulator.total(held) if self.is_long else held


def in_a_row(rows: jax.Array) -> jax.Array:
    """Move axis 0 into the slots."""
    return lax.collapse(jnp.moveaxis(rows, 0, -2), rows.ndim - 2)


def fill(value: Any, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return `jax.numpy.full`, by an explicit transfer."""
    return lax.broadcast(scalar(value, dtype), shape)


def choose(slots: jax.Array, new: State, old: State) -> State:
    """Return ``new`` in some slots, and ``old``, which may have no slots, in the others."""

    # Differentiated, `jnp.where` stores which of two it chose for each number of an item; a
    # checkpoint stores that once for each item.
    def each(slots: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        is_new = lax.expand_dims(slots, range(new.ndim - slots.ndim))
        old = lax.expand_dims(old, range(old.ndim, new.ndim))
        return jnp.where(is_new, new.astype(old.dtype), old)

    once = jax.checkpoint(each, prevent_cse=False)
    return jax.tree.map(lambda *own: once(slots, *own), new, old)


# The accumulators.

_IDEMPOTENT = (lax.max, lax.min, lax.bitwise_or, lax.bitwise_and)


@dataclasses.dataclass(frozen=True)
class InSlots(Accumulator):
    """An accumulator that has a state of the shape of its output in each slot."""

    core: tuple[int, ...]
    dtype: Any  # of the computation

    def full(self, value: Any, dtype: Any, slots: int) -> jax.Array:
        """Return an array of one number."""
        return fill(value, dtype, (*self.core, slots))


@dataclasses.dataclass(frozen=True)
class Elementwise(InSlots):
    """One associative and commutative function of two arrays, such as `jax.numpy.maximum`."""

    identity: Any
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]  # the same along an axis, such as `jax.numpy.max`

    @property
    def may_repeat(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.combine in _IDEMPOTENT

    @property
    def drifts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.combine is lax.add and jnp.issubdtype(self.dtype, jnp.inexact)

    def start(self, slots: int) -> State:
        return self.full(self.identity, self.dtype, slots)

    def lift(self, tile: Any, counts: Any = None) -> State:
        return tile.astype(self.dtype)

    def nothing(self) -> jax.Array:
        return scalar(self.identity, self.dtype)

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        return self.reduce(state, axis=-1, keepdims=True).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Ordered(Accumulator):
    """Any monoid, whose items are merged in order.

    Its states have one slot, on axis 0 of each leaf: the items of a tile are merged in pairs of
    neighbours until one is left.
    """

    identity: Any  # a pytree of NumPy arrays
    combine: Callable[[Any, Any], Any]  # of states with slots on axis 0

    core = ()

    def start(self, slots: int) -> State:
        return jax.tree.map(lambda x: jax.device_put(x[None]), self.identity)

    def nothing(self) -> Any:
        return jax.tree.map(jax.device_put, self.identity)

    def step(self, state: State, tile: Any, index: jax.Array, counts: Any = None) -> State:
        slots_first = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tile)
        return self.merge(state, self.join(slots_first))

    def merge(self, first: State, second: State) -> State:
        return self.combine(first, second)

    def join(self, state: State) -> State:
        count = jax.tree.leaves(state)[0].shape[0]
        while count > 1:
            even = count // 2 * 2
            pairs = [_slice(state, start, even, 2) for start in range(2)]
            merged, rest = self.combine(*pairs), _slice(state, even, count)
            state = jax.tree.map(lambda a, b: lax.concatenate([a, b], 0), merged, rest)
            count -= count // 2
        return state

    def join_runs(self, states: State) -> State:
        return self.join(jax.tree.map(lambda x: lax.collapse(x, 0, 2), states))


def _slice(tree: Any, start: int, stop: int, step: int = 1) -> Any:
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, step), tree)


Steps = Sequence[Accumulation]


class Request(NamedTuple):
    """What a derivative asks of the loop that all reductions of a row share (`found_together`)."""

    steps: Steps
    funs: tuple[Callable[[list[jax.Array]], jax.Array], ...] = ()  # what ``steps`` take, if any
    kept: tuple[int, ...] = ()  # the outputs that are returned whole after the states
    is_constant: bool = False  # whether the states are constants, found before all others
    is_linear: bool = True  # as ``linear`` of `Row.fold`


# What finds one entry of a state: it makes requests, is sent their states, and returns the entry.
Finding = Generator[Request, list[Any], Any]


def alone(step: Accumulation, is_linear: bool = False, *, is_constant: bool = False) -> Finding:
    """Find the state of one accumulation."""
    (state,) = yield Request([step], is_constant=is_constant, is_linear=is_linear)
    return state


_STEPS_PER_TILE_AGAIN = 8  # a row has at least so many steps for each tile that is evaluated again


# The row.


@dataclasses.dataclass(frozen=True)
class Row:
    """The items of one row, not yet evaluated."""

    item: Callable[..., list[jax.Array]]  # from one item of each leaf to its outputs
    leaves: tuple[Any, ...]
    levels: tuple[Level, ...]
    jaxpr: Jaxpr  # the program of an item
    rules: Rules
    count_of_outputs: int
    back: bool = False  # whether it is differentiated
    picks: bool = False  # whether a reduction of all items at once evaluates the chosen ones again
    is_run: bool = False  # whether its state is merged with those of other runs
    # Set only if items that are left out are differentiated as a stand-in: which ones count, and
    # how many do.
    counts: Callable[..., jax.Array] | None = None
    number: Any = None

    @property
    def size(self) -> int:
        """The number of items."""
        return math.prod(level.chunks.length for level in self.levels)

    @property
    def count(self) -> Any:
        """The number of items that count: all, but see `run.py`."""
        return self.size if self.counts is None else self.number

    def at(self, index: Any) -> list[jax.Array]:
        """Evaluate the item with this flat index; return zeros if the row is empty."""
        if not self.size:
            avals: list[Any] = [v.aval for v in self.jaxpr.outvars]
            return [zeros_of(aval, aval.shape) for aval in avals]
        return self.item(*items_at(self.leaves, index, self.levels))

    def pick(self, index: jax.Array, output: int) -> jax.Array:
        """Return one output, each number of it from the item at the same position of ``index``.

        An item is evaluated for each number.
        """
        if not index.shape:
            return self.at(index)[output]

        def one(at: Any, number: Any) -> jax.Array:
            return lax.dynamic_index_in_dim(jnp.ravel(self.at(at)[output]), number, keepdims=False)

        numbers = counted(index.size, jnp.int32)
        return jnp.reshape(jax.vmap(one)(jnp.ravel(index), numbers), index.shape)

    def whole(self) -> list[jax.Array]:
        """Evaluate all items at once: outputs with the row on axis 0.

        A single item is not mapped, so a branch stays a branch and effects may be ordered, as in a
        loop over chunks of one item.
        """
        if self.size == 1:
            outs = self.at(scalar(0, index_dtype(1)))
            return [lax.expand_dims(out, (0,)) for out in outs]
        item = self.item
        for level in reversed(self.levels):
            item = vmap_level(item, level)
        count = len(self.levels)
        return [jnp.reshape(x, (self.size, *x.shape[count:])) for x in item(*self.leaves)]

    def split(self, array: jax.Array) -> jax.Array:
        """Cut axis 0, the row, into the axes of its levels."""
        shape = [level.chunks.length for level in self.levels]
        return lax.reshape(array, (*shape, *array.shape[1:]))

    def fold_constants(self, steps: Steps) -> list[Any]:
        """Return the states as constants, for results that have no derivative.

        The reverse pass keeps them instead of folding the row again.
        """
        item = self.item

        def constant(*leaves: Any) -> list[jax.Array]:
            return [lax.stop_gradient(out) for out in item(*map(lax.stop_gradient, leaves))]

        changes: dict[str, Any] = {"differentiable": False}
        if getattr(jax.config, "jax_remat3", False):
            # A checkpoint makes tangents of zeros there, and a maximum of slots makes NaN of those.
            # Elsewhere, two loops with a checkpoint share a copy of the inputs.
            changes["checkpoint"] = False
        levels = tuple(dataclasses.replace(level, **changes) for level in self.levels)
        row = dataclasses.replace(self, item=constant, levels=levels, back=False)
        return saved(row.fold(steps))

    def fold(self, steps: Steps, kept: Sequence[int] = (), *, linear: bool = True) -> list[Any]:
        """Return the state of each step after all items, with its slots joined.

        ``kept``: the outputs that are returned whole after the states. ``linear``: a derivative
        needs no state. Otherwise one is stored for each tile.
        """
        if self.counts is not None:
            row, steps = _that_count(self, self.counts, steps)
            return row.fold(steps, kept, linear=linear)
        if not self.size or not any(level.is_loop or level.walker for level in self.levels):
            return self._at_once(steps, kept)
        if (walker := self.levels[0].walker) is not None:
            return walker.fold(self, steps, kept, linear=linear)
        at = max(i for i, level in enumerate(self.levels) if level.is_loop)
        around, below = self.levels[:at], self.levels[at + 1 :]
        level = dataclasses.replace(self.levels[at], linear=linear)
        fun = self._tiles(steps, kept, level, below)
        each = math.prod(level.chunks.length for level in self.levels[at:])
        for level in reversed(around):
            fun = self._item_by_item(fun, steps, len(kept), level, each)
            each *= level.chunks.length
        return fun(*self.leaves)

    def found_together(self, findings: Sequence[Finding]) -> list[Any]:
        """Return what each finding returns; one loop serves all constants, and one all others.

        A derivative of two loops adds two cotangents of all inputs, and so stores them.
        """
        asked: dict[int, Request] = {}
        found: dict[int, Any] = {}

        def advance(i: int, states: Any) -> None:
            try:
                asked[i] = findings[i].send(states)
            except StopIteration as end:
                found[i] = end.value

        for i in range(len(findings)):
            advance(i, None)
        while asked:
            constant = {i: each for i, each in asked.items() if each.is_constant}
            now = constant or dict(asked)
            for i, states in zip(now, self._fold_requests(list(now.values())), strict=True):
                del asked[i]
                advance(i, states)
        return [found[i] for i in range(len(findings))]

    def _fold_requests(self, requests: Sequence[Request]) -> list[list[Any]]:
        """Fold what requests ask for, all of them for constants or none, in one loop."""
        raw = [
            [each.kept, *(step.outputs for step in each.steps)]
            for each in requests
            if not each.funs
        ]
        used = sorted(set(jax.tree.leaves(raw)))
        funs = [fun for each in requests for fun in each.funs]
        item, end = self.item, len(used)

        def then(*leaves: Any) -> list[jax.Array]:
            outs = item(*leaves)
            return [*(outs[i] for i in used), *(fun(outs) for fun in funs)]

        place = {own: at for at, own in enumerate(used)}
        steps: list[Accumulation] = []
        for each in requests:
            at = range(end, end + len(each.funs)) if each.funs else place
            end += len(each.funs)
            for step in each.steps:
                outputs = jax.tree.map(at.__getitem__, step.outputs)
                steps.append(dataclasses.replace(step, outputs=outputs))
        kept = [place[i] for each in requests for i in each.kept]
        row = dataclasses.replace(self, item=then, count_of_outputs=end)
        if requests[0].is_constant:
            states = row.fold_constants(steps)
        else:
            linear = all(each.is_linear for each in requests)
            states = row.fold(steps, kept, linear=linear)
        own, whole = iter(states[: len(steps)]), iter(states[len(steps) :])
        return [
            [*itertools.islice(own, len(each.steps)), *itertools.islice(whole, len(each.kept))]
            for each in requests
        ]

    def _at_once(self, steps: Steps, kept: Sequence[int]) -> list[Any]:
        """Return the states of a row that is one tile, or empty."""
        outs, dtype = self.whole(), index_dtype(self.size)
        last = [jnp.moveaxis(out, 0, -1) for out in outs]
        tile = Tile(last, scalar(0, dtype), None, TileSlots(self.size, (), dtype))
        held = [step.start(max(self.size, 1)) for step in steps]
        if self.size:
            held, _ = steps_of(steps, held, tile)
        return [*ends_of(steps, held, held), *(self.split(outs[i]) for i in kept)]

    def _tiles(
        self, steps: Steps, kept: Sequence[int], level: Level, below: Sequence[Level]
    ) -> Callable[..., list[Any]]:
        """Return the loop over the tiles of one level; the levels ``below`` are mapped."""
        again = not (level.numbered or at_most(level.chunks.steps, _STEPS_PER_TILE_AGAIN - 1))
        steps = [step.over(level.chunks.steps) for step in steps]
        inputs = zip(self.jaxpr.invars, *(each.in_axes for each in self.levels), strict=False)
        moving = {v for v, *mapped in inputs if any(axis is not None for axis in mapped)}
        own = [self.rules.folded(step, self.jaxpr, moving, again=again) for step in steps]
        in_groups = any(step.in_groups for step in own) and not level.differentiable
        scattered = in_groups and group_of(level.chunks.steps) > 0
        folds = sinks_of(own, kept, back=self.back, scattered=scattered)
        chunks = (self.back and level.derivative) or level.chunks
        # A sum that joins the slots of each tile leaves it to a library, which leaves no item out.
        is_joined = not (kept or chunks.even or level.observer) and all(x.joins for x in own)
        parts = [level]
        if is_joined:
            parts = [dataclasses.replace(level, chunks=x, derivative=None) for x in chunks.apart]

        def loop(*leaves: Any) -> list[Any]:
            # Outputs that are folded have the items of the levels on their last axes, in order.
            def axes(place: int) -> list[int]:
                return [0 if i in kept else -place for i in range(self.count_of_outputs)]

            item = self.item
            for place, inner in enumerate(reversed(below), start=1):
                item = vmap_level(item, inner, axes(place))
            place, sizes = len(below) + 1, tuple(inner.chunks.length for inner in below)
            settings: dict[str, Any] = {"below": sizes, "index_dtype": index_dtype(self.size)}
            if is_joined and parts[-1].chunks.is_far:
                flat = [
                    flattened(jnp.asarray(leaf), axis, back=self.back)
                    for leaf, axis in zip(leaves, level.in_axes, strict=True)
                    if axis is not None
                ]
                # Otherwise, XLA:CPU copies a cotangent where it gets its shape back.
                settings["flat"] = lax.optimization_barrier(flat)

            def folded(part: Level) -> list[Any]:
                group = group_of(part.chunks.steps) if in_groups else 0
                changes: dict[str, Any] = {"back": self.back, "group": group, **settings}
                return run_loop(item, leaves, part, axes(place), folds, **changes)

            states = folded(parts[0])
            for part in parts[1:]:
                pairs = zip(own, states, folded(part), strict=True)
                states = [step.accumulator.merge(*pair) for step, *pair in pairs]
            row = dataclasses.replace(self, leaves=tuple(leaves), levels=(level, *below))
            pairs = zip(own, states, strict=False)
            found = [step.accumulator.found(row, step, state) for step, state in pairs]
            return [*found, *states[len(own) :]]

        return loop

    def _item_by_item(
        self, fun: Callable[..., list[Any]], steps: Steps, kept: int, level: Level, each: int
    ) -> Callable[..., list[Any]]:
        """Return the loop over one level whose items are loops themselves."""
        length = level.chunks.length
        one_by_one = dataclasses.replace(level, chunks=Chunks(length, 1, length), checkpoint=False)
        steps = [step.over(length) for step in steps]
        own = [Merged(i, step.accumulator, each, step.is_long) for i, step in enumerate(steps)]
        axes = [*[None] * len(own), *[0] * kept]
        folds = sinks_of(own, range(len(own), len(axes)), back=self.back)
        return lambda *leaves: run_loop(
            fun, leaves, one_by_one, axes, folds, back=self.back, index_dtype=index_dtype(self.size)
        )


def _that_count(row: Row, counts: Callable[..., jax.Array], steps: Steps) -> tuple[Row, Steps]:
    """Return a row without `Row.counts`, and steps to which an item left out adds nothing."""

    def item(*leaves: Any) -> list[jax.Array]:
        # The loop itself would store the mask of each item for the derivative.
        outs, is_counted = row.item(*leaves), counts(*leaves)
        for step in steps:
            taken = step.taken(outs.__getitem__, is_counted)
            for position, out in zip(*map(jax.tree.leaves, (step.outputs, taken)), strict=True):
                outs[position] = out
        # Not the mask among the outputs: an item left out was evaluated on another one's inputs.
        return [*outs, is_counted]

    own = row.count_of_outputs
    changed = dataclasses.replace(row, item=item, count_of_outputs=own + 1, counts=None)
    masks = [own if step.accumulator.nothing() is None else None for step in steps]
    pairs = zip(steps, masks, strict=True)
    return changed, [dataclasses.replace(step, mask=mask) for step, mask in pairs]
