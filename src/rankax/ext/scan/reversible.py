# SPDX-License-Identifier: MIT
"""The derivatives of a while loop in both modes, made of two primitives.

* ``rankax_while_tangent`` maps tangents of the first carry, and of the arrays that the body reads,
  to tangents of the last carry. It is linear in them, so reverse mode needs its transpose only.
* ``rankax_while_reverse`` is that transpose. It goes back from the last step to the first, and
  needs the carry before each (`_run_reverse`).

A bare `jax.custom_vjp` would refuse `jax.jvp`. `jax.jvp` and `jax.vmap` turn each primitive into
one of the two again, with other programs. Only the transpose of the second is missing, which would
be reverse mode of the reverse pass.

Mapped by `jax.vmap`, items may differ in their number of steps. Those axes, the lanes, come first
in the number of steps and in each carry.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import ad

from rankax.core.base.arrays import has_tangent
from rankax.core.trace.derivatives import keep_rules, new_primitive, of_some, uses_axis, vmapped
from rankax.core.trace.programs import evaluate


def program_of(fun: Callable[..., Any], *args: Any) -> Any:
    """Trace a function of pytrees to a program whose rules JAX does not forget."""
    return keep_rules(jax.make_jaxpr(fun)(*args))


def _run(program: Any, *groups: Sequence[Any]) -> list[Any]:
    return evaluate(program.jaxpr, program.consts, *itertools.chain(*groups))


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    rest = iter(values)
    return [list(itertools.islice(rest, count)) for count in counts]


def _some(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return list(itertools.compress(values, mask))


# Which values depend on others. An equation counts as one: all outputs depend on all inputs.


def _fixpoint(
    program: Any, before: Sequence[bool], carry: Sequence[bool], *, by_tangents: bool = False
) -> list[bool]:
    """Return which parts of a carry depend, after any number of steps, on what is live."""
    known = set(_some(program.jaxpr.invars, [*before, *carry]))

    def is_known(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in known

    for eqn in program.jaxpr.eqns:
        if any(map(is_known, eqn.invars)):
            known.update(v for v in eqn.outvars if has_tangent(v.aval) or not by_tangents)
    wider = [on or is_known(v) for on, v in zip(carry, program.jaxpr.outvars, strict=True)]
    if wider == list(carry):
        return wider
    return _fixpoint(program, before, wider, by_tangents=by_tangents)


# Derivatives of programs. A group of arguments, such as a carry, is followed by its tangents.


def _pushed(program: Any, groups: Any, live: Sequence[Sequence[bool]]) -> Any:
    """Return the program of the values and tangents of the last group, after one step.

    ``groups`` has pairs of values and of tangents of those that are live.
    """

    def push(groups: Any) -> list[Any]:
        values = [x for values, _ in groups for x in values]
        positions = [i for i, on in enumerate(itertools.chain(*live)) if on]
        fun = of_some(lambda *args: _run(program, args), values, positions)
        tangents = [t for _, tangents in groups for t in tangents]
        out, pushed = jax.jvp(fun, [values[i] for i in positions], tangents)
        return [*out, *_some(pushed, live[-1])]

    return program_of(push, groups)


def _pulled(body: Any, live: Sequence[Sequence[bool]], *groups: list[Any]) -> Any:
    """Return the program that takes cotangents back by one step, and adds those of constants.

    Its arguments are whether each lane makes this step, the constants, the carry before it, and
    both cotangents.
    """

    def pull(oks: list[Any], consts: list[Any], carry: list[Any], cotangents: list[Any]) -> Any:
        (ok,), values = oks, [*consts, *carry]
        total, of_carry = _split(cotangents, [sum(live[0]), sum(live[1])])
        positions = [i for i, on in enumerate(itertools.chain(*live)) if on]
        step = of_some(lambda *args: _some(_run(body, args), live[1]), values, positions)
        of_step = jax.vjp(step, *(values[i] for i in positions))[1]
        pulled = of_step(choose(ok, of_carry, [jnp.zeros_like(x) for x in of_carry]))
        of_consts, new = _split(pulled, [sum(live[0]), sum(live[1])])
        added = [a + b for a, b in zip(total, of_consts, strict=True)]
        # Lanes may share a constant, and then its cotangent.
        return [*(added if ok.ndim else choose(ok, added, total)), *choose(ok, new, of_carry)]

    return program_of(pull, *groups)


# The loop of tangents.


def pushed_through(steps: Any, body: Any, groups: Any, **options: Any) -> list[Any]:
    """Return the tangents of the last carry of a loop.

    Parameters
    ----------
    steps : array
        How many there are.
    body : program
        Takes constants and the carry, and returns the next carry.
    groups : pair
        The constants and the first carry, each with a list of their tangents, or of zeros.
    options
        ``max_stored``, and ``site``, the call as errors name it.
    """
    (consts, of_consts), (init, of_init) = groups
    of_body, live = ([not is_zero(t) for t in tangents] for tangents in (of_consts, of_init))
    live = _fixpoint(body, of_body, live, by_tangents=True)
    some = zip(_some(init, live), _some(of_init, live), strict=True)
    of_init = [jnp.zeros_like(x) if is_zero(t) else t for x, t in some]
    if not any(live):
        return _with_zeros((), live, init)
    groups = [steps], consts, init, _some(of_consts, of_body), of_init
    pushed = _bind(_tangent, groups, forward=body, live=(tuple(of_body), tuple(live)), **options)
    return _with_zeros(pushed, live, init)


def _bind(primitive: Any, groups: Sequence[Sequence[Any]], **params: Any) -> list[Any]:
    return primitive.bind(*itertools.chain(*groups), counts=tuple(map(len, groups)), **params)


def is_zero(tangent: Any) -> bool:
    return isinstance(tangent, (ad.Zero, SymbolicZero))


def _with_zeros(tangents: Sequence[Any], live: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """Return tangents of all values, of which these are live."""
    given, types = iter(tangents), [jax.typeof(x).to_tangent_aval() for x in values]
    return [next(given) if on else ad.Zero(aval) for on, aval in zip(live, types, strict=True)]


def _run_tangent(*args: Any, forward: Any, live: Any, counts: Any, **_: Any) -> list[Any]:
    (steps,), consts, init, of_consts, of_init = _split(args, counts)
    program = _pushed(forward, [(consts, of_consts), (init, of_init)], live)
    step = functools.partial(_run, program, [*consts, *of_consts])
    most = jnp.max(steps, initial=0)
    return advance(step, [*init, *of_init], np.int32(0), most, steps)[len(init) :]


def _differentiate_tangent(
    primals: Any, tangents: Any, *, forward: Any, live: Any, counts: Any, **options: Any
) -> tuple[list[Any], list[Any]]:
    out = _tangent.bind(*primals, forward=forward, live=live, counts=counts, **options)
    (_, *groups), (_, *directions) = _split(primals, counts), _split(tangents, counts)
    pairs, turned = (list(zip(x[:2], x[2:], strict=True)) for x in (groups, directions))
    joint = [([*x, *dx], [*t, *dt]) for (x, dx), (t, dt) in zip(pairs, turned, strict=True)]
    pushed = pushed_through(primals[0], _pushed(forward, pairs, live), joint, **options)
    return out, pushed[counts[2] :]


def _transpose_tangent(
    cotangents: Sequence[Any], *args: Any, forward: Any, live: Any, counts: Any, **options: Any
) -> list[Any]:
    (steps,), consts, init, *tangents = _split(args, counts)
    total = [jnp.zeros_like(x) for x in _some(consts, live[0])]
    groups = [steps], consts, init, [*total, *map(ad.instantiate_zeros, cotangents)]
    backward = _pulled(forward, live, [steps > 0], *groups[1:])
    out = _bind(_reverse, groups, forward=forward, backward=backward, **options)
    pairs = zip(out, itertools.chain(*tangents), strict=True)
    pulled = [x if ad.is_undefined_primal(tangent) else None for x, tangent in pairs]
    return [None] * (len(args) - len(pulled)) + pulled


# The schedule of a reverse pass: which carries it stores, and which it computes again.

_REPEATS = np.unique(np.geomspace(1, 2**16, 128).astype(int))


def _reach(stored: int) -> Any:
    """Return how many steps ``s`` carries reverse, each step evaluated at most ``r`` times more."""
    most = 2**31 - 1
    table = np.full((stored + 1, len(_REPEATS)), most, np.int32)
    for s, row in enumerate(table):
        counts = (math.comb(s + int(r), s) for r in _REPEATS)
        few = [*itertools.takewhile(lambda count: count < most, counts)]
        row[: len(few)] = few
    return table


def choose(ok: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Return ``new`` in the lanes that are ok, and ``old`` in the others."""
    return [
        jnp.where(lax.expand_dims(ok, range(ok.ndim, a.ndim)), a, b)
        for a, b in zip(new, old, strict=True)
    ]


def advance(step: Any, carry: list[Any], begin: Any, end: Any, stops: Any) -> list[Any]:
    """Evaluate steps; a lane stands still from its own stop on."""

    def advance(i: Any, carry: list[Any]) -> list[Any]:
        new = step(carry)
        return choose(i < stops, new, carry) if stops.ndim else new

    return lax.fori_loop(begin, end, advance, carry)


# The reverse pass. `forward` is a step; `backward` takes the cotangents back by one.


def _run_reverse(
    *args: Any, forward: Any, backward: Any, counts: Any, max_stored: int, **_: Any
) -> list[Any]:
    """Take cotangents back through a loop, with ``max_stored`` carries and that of a step stored.

    Some carries are on a stack, placed by the binomial rule of Griewank and Walther (*Algorithm
    799: revolve*, 2000): ``s`` of them reverse ``comb(s + r, s)`` steps if each step is evaluated
    at most ``r`` times more. Each number of steps is exact; the rule only decides how far apart
    they are.

    All lanes follow one schedule, that of the lane with the most steps, with scalar indices; a lane
    that has ended stands still. (`jax.vmap` of a reverse pass would select all stored carries at
    each step.) A lane that stands still is evaluated at its last step, with a cotangent of zero. At
    its last carry, the body may have no finite derivative, and ``0 * inf`` would spoil what all
    lanes share. A lane without steps is evaluated at the first carry of another lane.
    """
    (steps,), consts, init, cotangents = _split(args, counts)
    step = functools.partial(_run, forward, consts)
    reach, repeats = jnp.asarray(_reach(max_stored)), jnp.asarray(_REPEATS, jnp.float32)
    if steps.size > 1:
        longest = jnp.argmax(steps)
        flat = [x.reshape(steps.size, *x.shape[steps.ndim :]) for x in init]
        others = [lax.expand_dims(x[longest], range(steps.ndim)) for x in flat]
        init = choose(steps > 0, init, others)

    def at(slots: list[Any], i: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in slots]

    def store(end: Any, stack: Any) -> Any:
        """Store a carry nearer to the end."""
        top, starts, slots = stack
        begin, free = starts[top], max_stored - top
        left = end - begin
        r = repeats[jnp.sum(reach[free] < left, dtype=jnp.int32)]
        share = left.astype(jnp.float32) * (r / (r + free.astype(jnp.float32)))
        ahead = jnp.clip(share.astype(jnp.int32), 1, left - 1)
        ahead = begin + jnp.where(free > 1, ahead, left - 1)
        carry = advance(step, at(slots, top), begin, ahead, steps - 1)
        top += 1
        put = lax.dynamic_update_index_in_dim
        slots = [put(x, new, top, 0) for x, new in zip(slots, carry, strict=True)]
        return top, starts.at[top].set(ahead), slots

    def step_back(state: Any) -> Any:
        """Go back by a step, with the carry before it on top of the stack."""
        end, stack, cotangents = state
        top, starts, slots = lax.while_loop(
            lambda stack: end - stack[1][stack[0]] > 1, functools.partial(store, end), stack
        )
        ok = end <= steps if steps.ndim else jnp.array(True)
        cotangents = _run(backward, [ok], consts, at(slots, top), cotangents)
        return end - 1, (top - 1, starts, slots), cotangents

    slots = [jnp.broadcast_to(x, (max_stored + 1, *x.shape)) for x in init]
    stack = jnp.int32(0), jnp.zeros(max_stored + 1, jnp.int32), slots
    start = jnp.max(steps, initial=0), stack, cotangents
    return lax.while_loop(lambda state: state[0] > 0, step_back, start)[2]


def _differentiate_reverse(
    primals: Any, tangents: Any, *, forward: Any, backward: Any, counts: Any, **options: Any
) -> tuple[list[Any], list[Any]]:
    out = _reverse.bind(*primals, forward=forward, backward=backward, counts=counts, **options)
    values, directions = _split(primals, counts), _split(tangents, counts)
    live = [[not is_zero(t) for t in group] for group in directions]
    live[2] = _fixpoint(forward, live[1], live[2], by_tangents=True)
    live[3] = _fixpoint(backward, [False, *live[1], *live[2]], live[3], by_tangents=True)
    groups = [
        (x, [ad.instantiate_zeros(t) for t in _some(group, on)])
        for x, group, on in zip(values, directions, live, strict=True)
    ]
    of_ok = [([values[0][0] > 0], [])]
    pushed = _bind(
        _reverse,
        [[*x, *dx] for x, dx in groups],
        forward=_pushed(forward, groups[1:3], live[1:3]),
        backward=_pushed(backward, of_ok + groups[1:], live),
        **options,
    )
    return out, _with_zeros(pushed[counts[3] :], live[3], out)


def _transpose_reverse(*_: Any, site: str, **__: Any) -> Any:
    raise ValueError(
        f"{site}: its reverse pass has no reverse mode; for second derivatives, use forward mode "
        "of the gradient, such as jax.jvp or jax.jacfwd of jax.grad, or jax.hessian"
    )


# Under `jax.vmap`, the programs are mapped. A carry has the mapped axis where at least one of its
# values after some steps depends on it: in front if the number of steps does, else after the lanes.


def _vmapped_program(axis: Any, program: Any, groups: Any, dims: Any, out_dims: Any) -> Any:
    flat = [*itertools.chain(*dims)]
    if all(dim is None for dim in flat) and not uses_axis(axis, program):
        return program
    run = vmapped(axis, lambda *args: _run(program, args), flat, out_dims)
    return program_of(run, *itertools.chain(*groups))


def _dims(mask: Sequence[bool], at: int) -> list[int | None]:
    return [at if on else None for on in mask]


def _moved(axis: Any, groups: Any, dims: Any, to: Any) -> list[list[Any]]:
    """Return groups of values whose mapped axis is at ``to``; those without one are repeated."""
    triples = zip(groups, dims, to, strict=True)
    return [vmapped(axis, lambda *xs: list(xs), at, [*out])(*values) for values, at, out in triples]


def _batch_tangent(
    axis: Any, args: Any, dims: Any, *, forward: Any, live: Any, counts: Any, **options: Any
) -> Any:
    groups, of_groups = _split(args, counts), _split(dims, counts)
    (stops,), *on = ([dim is not None for dim in d] for d in of_groups)
    for flags, of_tangents, mask in zip(on[:2], map(iter, on[2:]), live, strict=True):
        # A value that has a tangent is mapped if this is.
        flags[:] = [(own and next(of_tangents)) or x for x, own in zip(flags, mask, strict=True)]
    every = stops or uses_axis(axis, forward)
    of_carry = [every or x for x in _fixpoint(forward, on[0], on[1])]
    to = [_dims([stops], 0), _dims(on[0], 0), _dims(of_carry, 0 if stops else groups[0][0].ndim)]
    to += map(_some, to[1:], live)
    groups = _moved(axis, groups, of_groups, to)
    forward = _vmapped_program(axis, forward, groups[1:3], to[1:3], to[2])
    return _bind(_tangent, groups, forward=forward, live=live, **options), to[4]


def _batch_reverse(
    axis: Any, args: Any, dims: Any, *, forward: Any, backward: Any, counts: Any, **options: Any
) -> Any:
    groups, of_groups = _split(args, counts), _split(dims, counts)
    (stops,), consts_on, on, of_carry = ([dim is not None for dim in d] for d in of_groups)
    every = stops or uses_axis(axis, forward, backward)
    on = [every or x for x in _fixpoint(forward, consts_on, on)]
    of_carry = [every or x for x in _fixpoint(backward, [stops, *consts_on, *on], of_carry)]
    at = 0 if stops else jnp.ndim(groups[0][0])
    to = [_dims([stops], 0), of_groups[1], _dims(on, at), _dims(of_carry, at)]
    # What lanes share, such as a number, has a cotangent without them.
    triples = zip(groups[3], of_groups[3], to[3], strict=True)
    to[3] = [end and min(end, jnp.ndim(x) - (dim is not None)) for x, dim, end in triples]
    groups = _moved(axis, groups, of_groups, to)
    forward = _vmapped_program(axis, forward, groups[1:3], to[1:3], to[2])
    backward = _vmapped_program(axis, backward, [[groups[0][0] > 0], *groups[1:]], to, to[3])
    return _bind(_reverse, groups, forward=forward, backward=backward, **options), to[3]


# The primitives.


def _types(*avals: Any, counts: Any, **params: Any) -> tuple[list[Any], Any]:
    """Return the types of the last group of arguments, and the effects of the programs."""
    programs = [value for value in params.values() if isinstance(value, ClosedJaxpr)]
    effects = frozenset().union(*(program.effects for program in programs))
    return list(avals[len(avals) - counts[-1] :]), effects


_tangent = new_primitive(
    "rankax_while_tangent",
    _run_tangent,
    _differentiate_tangent,
    _transpose_tangent,
    _batch_tangent,
    _types,
)
_reverse = new_primitive(
    "rankax_while_reverse",
    _run_reverse,
    _differentiate_reverse,
    _transpose_reverse,
    _batch_reverse,
    _types,
)
