# SPDX-License-Identifier: MIT
"""A program of one item, cut into the states of a machine.

A state is straight-line code and the choice of the next state. The program is cut where lanes part:
at each `while` whose length depends on the item, and at all that is around it::

    before
    y = while_loop(cond, body, x)
    after

becomes the states ``before`` (which asks ``cond`` at its end), ``body`` (likewise) and ``after``. A
loop inside ``body`` cuts it into further states, a scan becomes a loop that counts, and a branch a
choice among states. A branch without such a loop is cut only if it costs more than the choice.
There is no stack: calls are replaced by what they call, and JAX has no recursion. This is the
machine of Radul, Patton, Maclaurin, Hoffman and Saurous ("Automatically batching control-intensive
programs for modern accelerators", 2019) without its stack, and what Dance, Glaser, Orbanz and Adams
("Efficiently vectorized MCMC on modern accelerators", 2025) write by hand for samplers.

What is the same in all lanes, because it depends only on arrays that the kernel closes over, is
computed once, before all states (`Machine.once`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType

from rankax.core.loop.loop import carried_with, varying_axes
from rankax.core.trace import programs
from rankax.ext.equations import CALLS, STEPS_OF_WHILE, WITH_RULE, cost, has_rule, split_loop

# Their programs are always taken apart, and those with derivative rules where they are cut.
_CALLS = {*CALLS, "rankax_call"}

_REVERSED = {"while": "from stored carries", "scan": "from all its carries", "cond": ""}
_PARTS = {*_CALLS, *WITH_RULE, *_REVERSED}  # what may hold a loop that is cut

# Primitives by which the loops of Equinox make all items of a batch end together.
# The condition asks whether any goes on, and the number of a step must be the same for all.
_IN_TEST, _ELSEWHERE = {"unvmap_any", "nonbatchable"}, {"nonbatchable"}

_EXPENSIVE = 4096  # numbers that a branch computes, from which on it is cut: benchmarks/lockstep.py


@dataclasses.dataclass(frozen=True, order=True)
class Slot:
    """The place of a value: one for each lane, or one for all."""

    number: int
    aval: Any = dataclasses.field(compare=False)
    is_lane: bool = dataclasses.field(compare=False)


Env = dict[Slot, Any]


class Op(NamedTuple):
    """A step of straight-line code, from values of slots and literals to values of slots."""

    run: Callable[..., Sequence[Any]]
    ins: Sequence[Any]
    outs: Sequence[Slot]
    eqn: Any = None  # the equation that it runs, if it runs one


@dataclasses.dataclass(eq=False)
class State:
    """Straight-line code, and the states that may follow: ``targets[test]``."""

    ops: list[Op] = dataclasses.field(default_factory=list)
    #: ``buffer[row] = value`` at its end, of each buffer, row and value
    writes: list[tuple[Slot, Slot, Slot]] = dataclasses.field(default_factory=list)
    test: Any = None  # a slot or a literal; None if there is one target
    targets: tuple[int, ...] = ()
    is_branch: bool = False  # whether it starts one side of a branch

    def add(self, run: Callable[..., Sequence[Any]], ins: Sequence[Any], outs: Any) -> None:
        self.ops.append(Op(run, ins, outs))

    # Of a state that is complete.

    @functools.cached_property
    def is_exposed(self) -> bool:
        """Whether garbage of lanes that do not wait in it is unsafe."""
        return any(harmed(op.eqn) for op in self.ops if op.eqn is not None)

    @functools.cached_property
    def cost(self) -> int:
        """About how many numbers it computes for a lane."""
        return sum(cost([op.eqn]) for op in self.ops if op.eqn is not None)

    @functools.cached_property
    def reads(self) -> list[Slot]:
        """The slots of lanes whose values come from earlier states."""
        written: set[Slot] = set()
        reads: list[Slot] = []
        uses = [(op.ins, op.outs) for op in self.ops]
        uses += [(write[1:], ()) for write in self.writes]
        for ins, outs in [*uses, ((self.test,), ())]:
            reads += [x for x in ins if differs(x) and x not in written]
            written.update(outs)
        return list(dict.fromkeys(reads))

    @functools.cached_property
    def changed(self) -> set[Slot]:
        """The slots that it gives new values, apart from rows of buffers."""
        return {slot for op in self.ops for slot in op.outs}


class Machine(NamedTuple):
    """The states of a program. The first takes its inputs, the last has its outputs."""

    consts: list[Slot]
    inputs: list[Slot]
    once: list[Op]
    states: list[State]
    outputs: list[Any]
    ends: tuple[str, ...]  # where lanes part, in words

    @property
    def has_loop(self) -> bool:
        """Whether a lane may come to a state again."""
        pairs = enumerate(state.targets for state in self.states)
        return any(target <= number for number, targets in pairs for target in targets)

    def stored(self) -> list[Slot]:
        """Return the slots whose values a lane keeps from one state to another."""
        reads = [slot for state in self.states for slot in state.reads]
        reads += [x for x in self.outputs if differs(x) and x not in self.states[-1].changed]
        reads += [buffer for state in self.states for buffer, _, _ in state.writes]
        return sorted({*reads} - {*self.inputs})


def _run_equation(eqn: JaxprEqn, jaxpr: Jaxpr, free: Sequence[Any], *xs: Any) -> Sequence[Any]:
    """Evaluate an equation of a program from the values of its variables.

    Inside a `jax.shard_map`, JAX requires that the inputs of an equation vary alike. What a lane
    keeps varies, as lanes on each device have other items; in the program, a count that begins at 0
    does not, nor does the 1 that is added to it.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        xs = carried_with(xs, xs)
        axes = frozenset[Any]().union(*map(varying_axes, xs))
        if eqn.primitive.name == "pvary" and xs:  # of what may vary already
            more = tuple({*eqn.params["axes"]} - axes)
            return [lax.pcast(x, more, to="varying") if more else x for x in xs]
        if axes and not any(programs.subprograms(eqn)):
            values = dict(zip(free, xs, strict=True))
            ins = [jnp.asarray(v.val) if isinstance(v, Literal) else values[v] for v in eqn.invars]
            outs = eqn.primitive.bind(*carried_with(ins, ins), **eqn.params)
            return outs if eqn.primitive.multiple_results else [outs]
    return programs.evaluator(eqn, jaxpr, free)(*xs)


def differs(x: Any) -> bool:
    """Whether each lane has a value of its own here."""
    return isinstance(x, Slot) and x.is_lane


def value_of(x: Any, env: Env) -> Any:
    """Return the value of a slot or a literal."""
    return env[x] if isinstance(x, Slot) else x.val


def run_ops(ops: Sequence[Op], env: Env) -> None:
    """Run straight-line code; ``env`` has the values that it takes, and gets those it computes."""
    for op in ops:
        outs = op.run(*[value_of(x, env) for x in op.ins])
        env.update(zip(op.outs, outs, strict=True))


def cut_program(closed: ClosedJaxpr, *, with_steps: bool = False) -> Machine:
    """Cut a program at the loops whose length depends on its inputs.

    ``with_steps``: its last output is the number of steps of all these loops together.
    """
    cutter = _Cutter({}, None)
    consts = cutter.slots(closed.jaxpr.constvars, is_lane=False)
    inputs = cutter.slots(closed.jaxpr.invars)
    if with_steps:
        cutter.steps.append(cutter.slot(jax.ShapeDtypeStruct((), jnp.int32)))
        cutter.here.add(lambda: [jnp.int32(0)], [], cutter.steps)
    outputs = cutter.program(closed.jaxpr, consts, inputs)
    if not cutter.ends:
        cutter.states[0].targets = (cutter.begin(),)
    outputs += cutter.steps
    return Machine(consts, inputs, cutter.once, cutter.states, outputs, tuple(cutter.ends))


def _end(eqn: JaxprEqn, *, has_rule: bool) -> str:
    """Say where lanes part, and how a loop is reversed."""
    by = "by its own derivative rule" if has_rule else _REVERSED[eqn.primitive.name]
    end = f"{eqn.primitive.name} at {source_info_util.summarize(eqn.source_info)}"
    return f"{end}, reversed {by}" if by else end


class _Cutter:
    """A program that becomes a machine: code is added to the last state."""

    def __init__(self, flows: dict[Any, Any], around: int | None) -> None:
        self.flows = flows
        self.around = around  # the cost of a step of the `while` around, if there is one
        self.steps: list[Slot] = []  # what counts the steps of loops, if they are counted
        self.has_rule = False  # whether it adds a function with its own derivative rule
        self.once: list[Op] = []
        self.states = [State()]
        self.ends: list[str] = []
        self.together = _ELSEWHERE
        self.depth = 0  # of loops and branches that were cut
        self.numbers = itertools.count()

    @property
    def here(self) -> State:
        return self.states[-1]

    def begin(self) -> int:
        self.states.append(State())
        return len(self.states) - 1

    def slots(self, variables: Sequence[Any], *, is_lane: bool = True) -> list[Slot]:
        return [self.slot(v.aval, is_lane=is_lane) for v in variables]

    def slot(self, aval: Any, *, is_lane: bool = True) -> Slot:
        return Slot(next(self.numbers), aval, is_lane)

    def program(self, jaxpr: Jaxpr, consts: Sequence[Any], ins: Sequence[Any]) -> list[Any]:
        """Add a program; return its outputs."""
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *ins], strict=True))

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            values, name = [read(v) for v in eqn.invars], eqn.primitive.name
            if name not in _PARTS or (name not in _CALLS and not self._is_cut(eqn, values)):
                outs = self._equation(eqn, jaxpr, values)
            elif name not in _REVERSED:
                outside, self.has_rule = self.has_rule, self.has_rule or has_rule(eqn)
                outs = self._call(*called(eqn, values))
                self.has_rule = outside
            else:
                self.ends.append(_end(eqn, has_rule=self.has_rule))
                self.depth += 1
                cut = {"while": self._while, "scan": self._scan, "cond": self._branch}[name]
                outs = cut(eqn, values)
                self.depth -= 1
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _call(self, closed: ClosedJaxpr, ins: Sequence[Any]) -> list[Any]:
        return self.program(closed.jaxpr, [Literal(x, jax.typeof(x)) for x in closed.consts], ins)

    def _equation(self, eqn: JaxprEqn, jaxpr: Jaxpr, values: list[Any]) -> list[Slot]:
        """Add one equation as it is."""
        pairs = zip(eqn.invars, values, strict=True)
        given = {v: x for v, x in pairs if not isinstance(v, Literal)}
        # Inside a loop, XLA makes constants where they are used.
        is_lane = any(map(differs, values)) or bool(eqn.effects or (self.depth and not given))
        outs = self.slots(eqn.outvars, is_lane=is_lane)
        run = functools.partial(_run_equation, eqn, jaxpr, list(given))
        if eqn.primitive.name in self.together:  # as if there were one item
            run = lambda *xs: [eqn.primitive.impl(*xs, **eqn.params)]  # noqa: E731
        ops = self.states[-1].ops if is_lane else self.once
        ops.append(Op(run, list(given.values()), outs, eqn))
        return outs

    # Where lanes part.

    def _is_cut(self, eqn: JaxprEqn, values: Sequence[Any]) -> bool:
        """Whether lanes part in an equation."""
        name, flags = eqn.primitive.name, [differs(x) for x in values]
        if name == "cond":
            branches = eqn.params["branches"]
            costs = (cost(branch.jaxpr.eqns) for branch in branches)
            is_expensive = flags[0] and max(costs) >= _EXPENSIVE
            return is_expensive or any(self._flow(b, flags[1:], self.around)[1] for b in branches)
        if name == "while":
            if is_minor(eqn, self.around):
                return False
            of_cond, of_body, carry = split_loop(eqn, flags)
            carry, is_cut = self._settled(eqn.params["body_jaxpr"], of_body, carry, [])
            (ends,), in_cond = self._flow(eqn.params["cond_jaxpr"], of_cond + carry, None)
            return ends or is_cut or in_cond
        if name == "scan":
            is_cut = self._settled(eqn.params["jaxpr"], *split_loop(eqn, flags))[1]
            return is_cut and eqn.params["length"] > 0
        return self._flow(*called(eqn, flags), self.around)[1]

    def _settled(
        self, body: Any, consts: list[bool], carry: list[bool], rows: list[bool]
    ) -> tuple[list[bool], bool]:
        """Return which parts of a carry differ in some step, and whether the body is cut."""
        while True:
            outs, is_cut = self._flow(body, consts + carry + rows, None)
            grown = [a or b for a, b in zip(carry, outs, strict=False)]
            if grown == carry:
                return carry, is_cut
            carry = grown

    def _flow(
        self, closed: ClosedJaxpr, flags: Sequence[bool], around: int | None
    ) -> tuple[list[bool], bool]:
        """Return which outputs of a program differ if these inputs do, and whether it is cut."""
        key = id(closed.jaxpr), around, *flags
        if key not in self.flows:
            trial = _Cutter(self.flows, around)
            pairs = zip(closed.jaxpr.invars, flags, strict=True)
            ins = [trial.slot(v.aval, is_lane=flag) for v, flag in pairs]
            outs = trial._call(closed, ins)
            self.flows[key] = [differs(x) for x in outs], bool(trial.ends)
        return self.flows[key]

    # What is cut.

    def _move(self, values: Sequence[Any], slots: Sequence[Slot]) -> None:
        """Give slots the values of others, all at once."""
        pairs = [(x, slot) for x, slot in zip(values, slots, strict=True) if x is not slot]
        self.here.add(lambda *values: values, [x for x, _ in pairs], [slot for _, slot in pairs])

    def _while(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        of_cond, of_body, start = split_loop(eqn, values)
        carry = self.slots(eqn.outvars)

        def body() -> None:
            outside, self.around = self.around, cost(eqn.params["body_jaxpr"].jaxpr.eqns)
            self._move(self._call(eqn.params["body_jaxpr"], [*of_body, *carry]), carry)
            self.around = outside

        def test() -> Any:
            self.together = _IN_TEST
            (on,) = self._call(eqn.params["cond_jaxpr"], [*of_cond, *carry])
            self.together = _ELSEWHERE
            return on

        self._move(start, carry)
        self._loop(body, test, test())
        return carry

    def _scan(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        consts, start, rows = split_loop(eqn, values)
        length, is_reversed = eqn.params["length"], eqn.params["reverse"]
        outs, body_ins = self.slots(eqn.outvars), eqn.params["jaxpr"].jaxpr.invars
        carry, buffers = outs[: len(start)], outs[len(start) :]
        dtypes = jnp.int32, jnp.int32, jnp.bool_
        step, place, on = (self.slot(jax.ShapeDtypeStruct((), dtype)) for dtype in dtypes)

        def body() -> None:
            self.here.add(lambda i: [length - 1 - i if is_reversed else i], [step], [place])
            items = self.slots(body_ins[len(consts) + len(carry) :])
            read = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
            self.here.add(lambda i, *rows: [read(x, i) for x in rows], [place, *rows], items)
            new = self._call(eqn.params["jaxpr"], [*consts, *carry, *items])
            # Rows are written after the carry, which may be among them, has moved on.
            ys = self.slots(new[len(carry) :])
            self._move(new, [*carry, *ys])
            self.here.writes += [(buffer, place, y) for buffer, y in zip(buffers, ys, strict=True)]

        def test() -> Slot:
            self.here.add(lambda i: [i + 1, i + 1 < length], [step], [step, on])
            return on

        self._move(start, carry)
        self.here.add(lambda: [jnp.int32(0)], [], [step])
        self._loop(body, test, None)
        return outs

    def _loop(self, body: Callable[[], None], test: Callable[[], Any], begins: Any) -> None:
        """Add a loop, and begin the state after it; ``begins`` says whether there is a step."""
        entry = self.here
        entry.test = begins
        first = self.begin()
        self.here.add(lambda *steps: [n + 1 for n in steps], self.steps, self.steps)
        body()
        on, last = test(), self.here
        last.test = on
        after = self.begin()
        last.targets = after, first
        entry.targets = (first,) if begins is None else last.targets

    def _branch(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        entry, outs = self.here, self.slots(eqn.outvars)
        entry.test, *operands = values
        ends: list[State] = []
        for branch in eqn.params["branches"]:
            entry.targets += (self.begin(),)
            self.here.is_branch = True
            self._move(self._call(branch, operands), outs)
            ends.append(self.here)
        after = self.begin()
        for end in ends:
            end.targets = (after,)
        return outs


# Single equations of a program: what they call, how they run.


def called(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the program that an equation calls, and its inputs among those of the equation."""
    if eqn.primitive.name == "custom_linear_solve":
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        first = lengths.matvec + lengths.vecmat
        return solve, [*values[first : first + lengths.solve], *values[sum(lengths) :]]
    held = [value for value in eqn.params.values() if isinstance(value, programs.ClosedJaxpr)]
    closed = held[0] if held else programs.ClosedJaxpr(next(programs.subprograms(eqn)), ())
    return closed, list(values)


def is_minor(eqn: JaxprEqn, around: int | None) -> bool:
    """Whether a step of a loop costs less than the rest of a step of the `while` around it.

    Such a loop stays whole, and all lanes go through it together: to cut it, and so the loop
    around, costs more. diffrax saves outputs by such a loop in each step of its solver.
    """
    if around is None:
        return False
    of_step = cost(eqn.params["body_jaxpr"].jaxpr.eqns)
    return of_step < around - STEPS_OF_WHILE * of_step


def harmed(eqn: JaxprEqn) -> bool:
    """Whether garbage inputs are unsafe: an error that is raised, or a loop without end."""
    name = eqn.primitive.name
    return (
        name.endswith("callback")
        or name in ("while", "call_hi_primitive")  # JAX 0.12 hides a program in the second
        or any(harmed(inner) for program in programs.subprograms(eqn) for inner in program.eqns)
    )
