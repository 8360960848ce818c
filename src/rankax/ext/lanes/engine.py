# SPDX-License-Identifier: MIT
"""The engine: lanes run a machine, and take the next item when theirs has ended.

A lane has an item, the state that it waits in, and the values of its slots. The engine goes round
all states and runs each for the lanes that wait in it; the others are masked. Three things make
this cheap:

* A state that follows itself, which is the body of a loop, runs again and again until a tenth of
  the lanes have left it. It carries only what the loop changes.
* Other states run once a tenth of the lanes wait in them. Those between two loops run in one go,
  from the end of one item to the start of the next, so a lane reaches its next loop in one round.
* Small values are stored with the lanes on the last axis, where XLA:CPU vectorises.

On a GPU, the host waits for the condition of each loop whose length the compiler does not know, and
such a wait takes as long as several kernels. There, a state that follows itself runs a fixed number
of times, the engine makes several rounds before it asks whether any lane goes on, and outputs are
folded once for all these rounds. Lanes that have ended are masked, so a round too many changes
nothing. A state that is exposed, or so large that its work outlasts the wait, still asks.

A round always runs some state: of ten states, one has a tenth of the lanes. With more states, the
share is smaller.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.base.arrays import counted, scalar, zeros_of
from rankax.core.loop.loop import carried_with
from rankax.ext.lanes.machine import Env, Machine, Slot, State, differs, run_ops, value_of
from rankax.ext.progress import Progress

# Measured by benchmarks/lockstep.py.
_SHARE = 10  # one lane in ten
_STEPS = 2  # of a loop, between two counts of the lanes that have left it
_SMALL = 16  # numbers of a value that is stored with the lanes last

#: How many rounds are made before the host waits for a condition: on a CPU, and elsewhere. With
#: `_TRIPS`, it waits once in 128 steps, and on average 64 masked ones are made after the last.
ROUNDS = {True: 1, False: 8}
_TRIPS = 8  # of a loop between two rounds, if its length is fixed: each of `_STEPS` steps
_LARGE = 2**24  # numbers in all lanes, for which an H100 needs as long as for a wait: 20 us

_REPORTS = 50


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the outputs of items go: each is written where its item belongs."""

    count: int
    axes: Sequence[int | None]  # of the items; None if an output is the same for all
    avals: Sequence[Any]  # of one item

    def start(self) -> Any:
        """Return what is held before the first item."""
        sizes = [() if axis is None else (self.count,) for axis in self.axes]
        pairs = zip(sizes, self.avals, strict=True)
        return [zeros_of(aval, (*size, *aval.shape)) for size, aval in pairs]

    def put(self, held: Any, outs: list[Any], items: jax.Array, on: jax.Array) -> Any:
        """Take the outputs of all lanes, on axis 0; only those that are ``on`` have ended."""
        at, one = written(on, items, self.count), jnp.argmax(on)
        return [
            jnp.where(on[one], new[one], old)
            if axis is None
            else old.at[at].set(new, mode="drop", unique_indices=True)
            for axis, new, old in zip(self.axes, outs, held, strict=True)
        ]

    def settle(self, held: Any) -> Any:
        """Fold what can be folded, so that further items may begin."""
        return held

    def limit(self, held: Any) -> Any:  # noqa: ARG002
        """Return the first item that must not begin yet."""
        return self.count

    def end(self, held: Any) -> list[Any]:
        """Return the result."""
        return [jnp.moveaxis(x, 0, a) if a else x for x, a in zip(held, self.axes, strict=True)]


def written(on: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """Return the places that are on; the others are out of bounds, no two of them the same."""
    return jnp.where(on, places, counted(on.shape[0], places.dtype) + size)


class _Lanes(NamedTuple):
    """What the engine carries."""

    at: jax.Array  # the state that each lane waits in
    item: jax.Array  # the item of each lane
    following: jax.Array  # the first item that no lane has taken
    slots: Env
    held: Any


@dataclasses.dataclass(eq=False)
class Engine:
    """Lanes that run a machine, whose one input is the number of an item."""

    machine: Machine
    consts: Sequence[Any]
    count: int
    lanes: int
    output: Output
    rounds: int
    reports: Progress | None = None

    def __post_init__(self) -> None:
        self.states = self.machine.states
        # It is never differentiated. (`jax.shard_map` would transpose its loops all the same.)
        constants = map(lax.stop_gradient, self.consts)
        self.known: Env = dict(zip(self.machine.consts, constants, strict=True))
        run_ops(self.machine.once, self.known)
        self.buffers = {buffer for state in self.states for buffer, *_ in state.writes}
        self.last = len(self.states) - 1
        self.free = len(self.states)  # the state of a lane without an item

    def run(self) -> Any:
        """Return what the output makes of all items."""
        (number,) = self.machine.inputs
        start = _Lanes(
            jnp.zeros(self.lanes, jnp.int32),
            counted(self.lanes, number.aval.dtype),
            scalar(self.lanes, number.aval.dtype),
            {slot: self._empty(slot) for slot in self.machine.stored()},
            self.output.start(),
        )
        if self.reports is not None:
            self.reports.step(scalar(0, number.aval.dtype))
        start = self._advance(carried_with(start, list(self.known.values())), 0)
        end = lax.while_loop(lambda lanes: jnp.any(lanes.at < self.free), self._rounds, start)
        outs = self.output.end(end.held)
        if self.reports is not None:
            self.reports.end(end.following, outs)
        return outs

    def _rounds(self, lanes: _Lanes) -> _Lanes:
        """Go round once, or as often as the host must not wait."""
        before = lanes
        if self.rounds == 1:
            lanes = self._round(lanes)
        else:
            lanes = lax.fori_loop(0, self.rounds, lambda _, lanes: self._round(lanes), lanes)
        if self.reports is not None:
            _report(self.reports, self.count, self._ended(before), self._ended(lanes))
        if self.rounds == 1:
            return lanes
        # All lanes may be free, because the items after them had to wait for this.
        lanes = lanes._replace(held=self.output.settle(lanes.held))
        return self._take(lanes, lanes.at == self.free)

    def _round(self, lanes: _Lanes) -> _Lanes:
        groups = self._groups()
        live = jnp.sum(lanes.at < self.free, dtype=jnp.int32)
        enough = jnp.maximum(1, live // max(_SHARE, len(groups)))
        for group in groups:
            runs = self._spin if group[0] in self.states[group[0]].targets else self._pass
            lanes = runs(lanes, group, enough)
        return lanes

    def _groups(self) -> list[list[int]]:
        """Return the states in the order of a round, in groups that run in one go."""
        groups: list[list[int]] = [[]]
        for number in (self.last, *range(self.last)):
            if number in self.states[number].targets:
                groups += [[number], []]
            elif self.states[number].is_branch:
                groups.append([number])
            else:
                groups[-1].append(number)
        return [group for group in groups if group]

    def _pass(self, lanes: _Lanes, group: Sequence[int], enough: Any) -> _Lanes:
        """Run a group of states once, if enough lanes wait in it."""

        def run(lanes: _Lanes) -> _Lanes:
            for number in group:
                step = functools.partial(self._advance, number=number)
                step = self._end if number == self.last else step
                if len(group) > 2 or self.states[number].is_exposed:
                    lanes = lax.cond(jnp.any(lanes.at == number), step, lambda x: x, lanes)
                else:
                    lanes = step(lanes)
            return lanes

        waiting = sum(jnp.sum(lanes.at == number, dtype=jnp.int32) for number in group)
        return lax.cond(waiting >= enough, run, lambda lanes: lanes, lanes)

    def _spin(self, lanes: _Lanes, group: Sequence[int], enough: Any) -> _Lanes:
        """Run a state that follows itself until enough lanes have left it."""
        (number,) = group
        state = self.states[number]
        changed = [slot for slot in lanes.slots if slot in state.changed]
        begun = lanes.at == number
        total = jnp.sum(begun, dtype=jnp.int32)
        (after,) = (target for target in state.targets if target != number)

        def goes_on(carry: Any) -> Any:
            left = jnp.sum(carry[0], dtype=jnp.int32)
            return (left > 0) & (total >= enough) & (total - left < enough)

        def steps(carry: Any) -> Any:
            on, values = carry
            for _ in range(_STEPS):
                env = {**lanes.slots, **values}
                # If none is on, one that was.
                some = jnp.where(jnp.any(on), on, begun)
                following, new, _ = self._evaluate(state, env, changed, some)
                values = self._selected(on, changed, new, values)
                on = on & (following == number)
            return on, values

        start = begun, {slot: lanes.slots[slot] for slot in changed}
        if self._asks(state):
            on, values = lax.while_loop(goes_on, steps, start)
        else:
            on, values = lax.fori_loop(0, _TRIPS, lambda _, carry: steps(carry), start)
        at = jnp.where(begun & ~on, jnp.int32(after), lanes.at)
        return lanes._replace(at=at, slots={**lanes.slots, **values})

    def _asks(self, state: State) -> bool:
        """Whether a loop runs for as long as enough lanes are in it, not a number of steps."""
        return self.rounds == 1 or state.is_exposed or self.lanes * state.cost >= _LARGE

    def _advance(self, lanes: _Lanes, number: int) -> _Lanes:
        """Run one state for the lanes that wait in it."""
        state, on = self.states[number], lanes.at == number
        changed = [slot for slot in lanes.slots if slot in state.changed]
        items = jnp.minimum(lanes.item, lanes.item.dtype.type(self.count - 1))
        env = {self.machine.inputs[0]: items, **lanes.slots}
        following, values, rows = self._evaluate(state, env, changed, on)
        slots = {**lanes.slots, **self._selected(on, changed, values, lanes.slots)}
        each = counted(self.lanes, jnp.int32)
        for (buffer, *_), (row, value) in zip(state.writes, rows, strict=True):
            row = jnp.where(on, row, buffer.aval.shape[0])  # out of bounds: not written
            at = slots[buffer].at[each, row]
            slots[buffer] = at.set(value, mode="drop", unique_indices=True)
        return lanes._replace(at=jnp.where(on, following, lanes.at), slots=slots)

    def _end(self, lanes: _Lanes) -> _Lanes:
        """Hand on the outputs of items that have ended; give their lanes the next items."""
        on, outputs = lanes.at == self.last, self.machine.outputs
        state = self.states[-1]
        _, outs, _ = self._evaluate(state, lanes.slots, outputs, on, lanes_first=True)
        held = self.output.put(lanes.held, outs, lanes.item, on)
        held = self.output.settle(held) if self.rounds == 1 else held
        return self._take(lanes._replace(held=held), on | (lanes.at == self.free))

    def _take(self, lanes: _Lanes, is_free: jax.Array) -> _Lanes:
        """Give free lanes the next items."""
        dtype = lanes.item.dtype
        items = lanes.following + jnp.cumsum(is_free, dtype=dtype) - dtype.type(1)
        taken = is_free & (items < self.output.limit(lanes.held))
        return lanes._replace(
            at=jnp.where(taken, 0, jnp.where(is_free, jnp.int32(self.free), lanes.at)),
            item=jnp.where(taken, items, lanes.item),
            following=lanes.following + jnp.sum(taken, dtype=dtype),
        )

    def _ended(self, lanes: _Lanes) -> jax.Array:
        """Return how many items have ended."""
        return lanes.following - jnp.sum(lanes.at < self.free, dtype=lanes.item.dtype)

    def _evaluate(
        self, state: State, slots: Env, wanted: Sequence[Any], on: Any, *, lanes_first: bool = False
    ) -> tuple[Any, list[Any], list[Any]]:
        """Run a state for all lanes; return the next states, wanted values, and rows to write.

        If it is exposed, lanes that are not on take the values of one that is.
        """
        needed = {*state.reads, *(x for x in wanted if differs(x))}
        given = [slot for slot in slots if slot in needed]
        if state.is_exposed:
            some = jnp.argmax(on)
            axes = [(slot, slots[slot], self._axis(slot)) for slot in given]
            same = [jnp.broadcast_to(jnp.take(x, some[None], a), x.shape) for _, x, a in axes]
            slots = self._selected(
                on, given, list(map(slots.get, given)), dict(zip(given, same, strict=True))
            )

        def one(*values: Any) -> Any:
            env = {**self.known, **dict(zip(given, values, strict=True))}
            run_ops(state.ops, env)
            rows = [(env[row], env[value]) for _, row, value in state.writes]
            return _following(state, env), [value_of(x, env) for x in wanted], rows

        in_axes = tuple(map(self._axis, given))
        axes = 0, [0 if lanes_first else self._axis(x) for x in wanted], 0
        run = jax.vmap(one, in_axes, axes, axis_size=self.lanes)
        return run(*(slots[slot] for slot in given))

    # How a value is stored.

    def _axis(self, slot: Slot) -> int:
        """Return where it has the lanes."""
        shape = slot.aval.shape
        return len(shape) if math.prod(shape) <= _SMALL and slot not in self.buffers else 0

    def _empty(self, slot: Slot) -> jax.Array:
        shape = list(slot.aval.shape)
        shape.insert(self._axis(slot), self.lanes)
        return zeros_of(slot.aval, tuple(shape))

    def _selected(self, on: jax.Array, slots: Iterable[Slot], new: list[Any], old: Env) -> Env:
        """Return new values for the lanes that are on, and old ones for the others."""
        chosen: Env = {}
        for slot, value in zip(slots, new, strict=True):
            mask = lax.broadcast_in_dim(on, value.shape, (self._axis(slot),))
            chosen[slot] = lax.select(mask, value, old[slot])
        return chosen


def _following(state: State, env: Env) -> Any:
    """Return the state after this one."""
    first, *others = state.targets or (0,)
    following: Any = jnp.int32(first)
    for choice, target in enumerate(others, 1):
        test = value_of(state.test, env)
        chosen = test if jnp.result_type(test) == jnp.bool_ else test == choice
        following = jnp.where(chosen, jnp.int32(target), following)
    return following


def _report(reports: Progress, count: int, before: jax.Array, after: jax.Array) -> None:
    """Report how many items have ended, if enough have since the last report."""
    each = before.dtype.type(max(1, count // _REPORTS))
    lax.cond(after // each > before // each, reports.step, lambda _: None, after)
