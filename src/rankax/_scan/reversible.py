# SPDX-License-Identifier: MIT
"""The derivatives of a while loop in both modes, made of two primitives.

* ``rankax_while_tangent`` maps tangents of the first carry, and of the arrays that the body reads,
  to tangents of the last carry. It is linear in them, so reverse mode needs its transpose only.
* ``rankax_while_reverse`` is that transpose. It goes back from the last step to the first, and
  needs the carry before each (`reverse_pass`).

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
from jax.interpreters import ad

from rankax._base.arrays import has_tangent
from rankax._trace.derivatives import keep_rules, mapped, new_primitive, of_some, uses_axis
from rankax._trace.programs import Literal, evaluate


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


def _reached(program: Any, live: Sequence[bool], *, by_tangents: bool = False) -> list[bool]:
    known = set(_some(program.jaxpr.invars, live))

    def is_known(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in known

    for eqn in program.jaxpr.eqns:
        if any(map(is_known, eqn.invars)):
            known.update(v for v in eqn.outvars if has_tangent(v.aval) or not by_tangents)
    return [is_known(v) for v in program.jaxpr.outvars]


def _fixpoint(
    program: Any, before: Sequence[bool], carry: Sequence[bool], **kind: bool
) -> list[bool]:
    """Return which parts of a carry depend, after any number of steps, on what is live."""
    reached = _reached(program, [*before, *carry], **kind)
    wider = [a or b for a, b in zip(carry, reached, strict=True)]
    return wider if wider == list(carry) else _fixpoint(program, before, wider, **kind)


# Derivatives of programs. A group of arguments, such as a carry, is followed by its tangents.


def _pushed(program: Any, groups: Any, live: Sequence[Sequence[bool]]) -> Any:
    """Return the program of the values and tangents of the last group, after one step.

    ``groups`` has pairs of values and of tangents of those that are live.
    """

    def push(groups: Any) -> list[Any]:
        values = [x for values, _ in groups for x in values]
        positions = [i for i, on in enumerate(itertools.chain(*live)) if on]
        fun = of_some(functools.partial(evaluate, program.jaxpr, program.consts), values, positions)
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
    args = steps, *consts, *init, *_some(of_consts, of_body), *of_init
    params = {"body": body, "live": (tuple(of_body), tuple(live)), **options}
    return _with_zeros(_tangent.bind(*args, **params) if any(live) else (), live, init)


def is_zero(tangent: Any) -> bool:
    return isinstance(tangent, (ad.Zero, SymbolicZero))


def _with_zeros(tangents: Sequence[Any], live: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """Return tangents of all values, of which these are live."""
    given, types = iter(tangents), [jax.typeof(x).to_tangent_aval() for x in values]
    return [next(given) if on else ad.Zero(aval) for on, aval in zip(live, types, strict=True)]


def _split_tangent(args: Sequence[Any], live: Any) -> tuple[Any, Any]:
    """Return the number of steps; pairs of values and tangents, of the constants and the carry."""
    counts = 1, *map(len, live), *map(sum, live)
    (steps,), consts, init, of_consts, of_init = _split(args, counts)
    return steps, [(consts, of_consts), (init, of_init)]


def _run_tangent(*args: Any, body: Any, live: Any, **_: Any) -> list[Any]:
    steps, groups = _split_tangent(args, live)
    program = _pushed(body, groups, live)
    consts, init = ([*values, *tangents] for values, tangents in groups)
    most = jnp.max(steps, initial=0)
    out = advance(functools.partial(_run, program, consts), init, np.int32(0), most, steps)
    return out[len(live[1]) :]


def _differentiate_tangent(
    primals: Sequence[Any], tangents: Sequence[Any], *, body: Any, live: Any, **options: Any
) -> tuple[list[Any], list[Any]]:
    out = _tangent.bind(*primals, body=body, live=live, **options)
    steps, groups = _split_tangent(primals, live)
    directions = _split_tangent(tangents, live)[1]
    joint = [([*x, *dx], [*t, *dt]) for (x, dx), (t, dt) in zip(groups, directions, strict=True)]
    pushed = pushed_through(steps, _pushed(body, groups, live), joint, **options)
    return out, pushed[len(live[1]) :]


def _transpose_tangent(
    cotangents: Sequence[Any], *args: Any, body: Any, live: Any, **options: Any
) -> list[Any]:
    steps, ((consts, of_consts), (init, of_init)) = _split_tangent(args, live)
    total = [jnp.zeros_like(x) for x in _some(consts, live[0])]
    groups = [steps], consts, init, [*total, *map(ad.instantiate_zeros, cotangents)]
    out = _reverse.bind(
        *itertools.chain(*groups),
        forward=body,
        backward=_pulled(body, live, [steps > 0], *groups[1:]),
        counts=tuple(map(len, groups)),
        **options,
    )
    pairs = zip(out, (*of_consts, *of_init), strict=True)
    pulled = [x if ad.is_undefined_primal(tangent) else None for x, tangent in pairs]
    return [None] * (len(args) - len(pulled)) + pulled


# The schedule of a reverse pass: which carries it stores, and which it computes again.

_REPEATS = np.unique(np.geomspace(1, 2**16, 128).astype(int))


@functools.cache
def _reach(stored: int) -> Any:
    """Return how many steps ``s`` carries reverse, each step evaluated at most ``r`` times more."""
    table = np.full((stored + 1, len(_REPEATS)), 2**31 - 1, np.int32)
    for s, row in enumerate(table):
        counts = (math.comb(s + int(r), s) for r in _REPEATS)
        few = [*itertools.takewhile(lambda count: count < 2**31, counts)]
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


def reverse_pass(
    step: Callable[[list[Any]], list[Any]],
    back: Callable[[Any, list[Any], list[Any]], list[Any]],
    steps: Any,
    init: list[Any],
    cotangents: list[Any],
    max_stored: int,
) -> list[Any]:
    """Take cotangents back through a loop.

    Some carries are on a stack, placed by the binomial rule of Griewank and Walther (*Algorithm
    799: revolve*, 2000): ``s`` of them reverse ``comb(s + r, s)`` steps if each step is evaluated
    at most ``r`` times more. Each number of steps is exact; the rule only decides how far apart
    they are.

    All lanes follow one schedule, that of the lane with the most steps, with scalar indices; a lane
    that has ended stands still. (`jax.vmap` of a reverse pass would select all stored carries at
    each step.) A lane that stands still is evaluated at its last step, with a cotangent of zero. At
    its last carry, the body may have no finite derivative, and ``0 * inf`` would spoil what all
    lanes share. A lane without steps is evaluated at the first carry of another lane.

    Parameters
    ----------
    step : callable
        From a carry to the next one.
    back : callable
        Takes whether each lane makes this step, the carry before it, and the cotangents after it.
    steps : array of int32
        How many steps each lane makes.
    init : list of arrays
        The first carry.
    cotangents : list of arrays
        Those of the last carry, and others that ``back`` adds to.
    max_stored : int
        How many carries are stored, besides the one before the current step.
    """
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
        return end - 1, (top - 1, starts, slots), back(ok, at(slots, top), cotangents)

    slots = [jnp.broadcast_to(x, (max_stored + 1, *x.shape)) for x in init]
    stack = jnp.int32(0), jnp.zeros(max_stored + 1, jnp.int32), slots
    start = jnp.max(steps, initial=0), stack, cotangents
    return lax.while_loop(lambda state: state[0] > 0, step_back, start)[2]


# The reverse pass. `forward` is a step; `backward` takes the cotangents back by one.


def _run_reverse(
    *args: Any, forward: Any, backward: Any, counts: Any, max_stored: int, **_: Any
) -> list[Any]:
    (steps,), consts, init, cotangents = _split(args, counts)

    def step(carry: list[Any]) -> list[Any]:
        return _run(forward, consts, carry)

    def back(ok: Any, carry: list[Any], cotangents: list[Any]) -> list[Any]:
        return _run(backward, [ok], consts, carry, cotangents)

    return reverse_pass(step, back, steps, init, cotangents, max_stored)


def _differentiate_reverse(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    forward: Any,
    backward: Any,
    counts: Any,
    **options: Any,
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
    joint = [[*x, *dx] for x, dx in groups]
    pushed = _reverse.bind(
        *itertools.chain(*joint),
        forward=_pushed(forward, groups[1:3], live[1:3]),
        backward=_pushed(backward, of_ok + groups[1:], live),
        counts=tuple(map(len, joint)),
        **options,
    )
    return out, _with_zeros(pushed[counts[3] :], live[3], out)


def _transpose_reverse(cotangents: Any, *args: Any, site: str, **params: Any) -> Any:
    del cotangents, args, params
    raise ValueError(
        f"{site}: its reverse pass has no reverse mode; for second derivatives, use forward mode "
        "of the gradient, such as jax.jvp or jax.jacfwd of jax.grad, or jax.hessian"
    )


# Under `jax.vmap`, the programs are mapped. A carry has the mapped axis where at least one of its
# values after some steps depends on it: in front if the number of steps does, else after the lanes.


def _mapped(axis: Any, program: Any, groups: Any, dims: Any, out_dims: Any) -> Any:
    flat = [*itertools.chain(*dims)]
    if all(dim is None for dim in flat) and not uses_axis(axis, program):
        return program
    run = functools.partial(evaluate, program.jaxpr, program.consts)
    return program_of(mapped(axis, run, flat, out_dims), *itertools.chain(*groups))


def _dims(mask: Sequence[bool], at: int) -> list[int | None]:
    return [at if on else None for on in mask]


def _moved(
    axis: Any, values: Sequence[Any], dims: Sequence[int | None], out_dims: Sequence[int | None]
) -> list[Any]:
    """Return values whose mapped axis is at ``out_dims``; those without one are repeated."""
    return mapped(axis, lambda *xs: list(xs), dims, list(out_dims))(*values)


def _batch_tangent(axis: Any, args: Any, dims: Any, *, body: Any, live: Any, **options: Any) -> Any:
    steps, groups = _split_tangent(args, live)
    steps_dim, of_groups = _split_tangent(dims, live)
    on = [[dim is not None for dim in values] for values, _ in of_groups]
    for flags, (_, tangents), mask in zip(on, of_groups, live, strict=True):
        for i, dim in zip(itertools.compress(itertools.count(), mask), tangents, strict=True):
            flags[i] |= dim is not None
    stops = steps_dim is not None
    on[1] = [stops or uses_axis(axis, body) or x for x in _fixpoint(body, *on)]
    to = [_dims(on[0], 0), _dims(on[1], 0 if stops else jnp.ndim(steps))]
    moved = [
        (_moved(axis, x, d, at), _moved(axis, dx, dd, _some(at, mask)))
        for (x, dx), (d, dd), at, mask in zip(groups, of_groups, to, live, strict=True)
    ]
    (consts, of_consts), (init, of_init) = moved
    body = _mapped(axis, body, [consts, init], to, to[1])
    (steps,) = _moved(axis, [steps], [steps_dim], _dims([stops], 0))
    args = steps, *consts, *init, *of_consts, *of_init
    return _tangent.bind(*args, body=body, live=live, **options), _some(to[1], live[1])


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
    groups = [_moved(axis, *group) for group in zip(groups, of_groups, to, strict=True)]
    out = _reverse.bind(
        *itertools.chain(*groups),
        forward=_mapped(axis, forward, groups[1:3], to[1:3], to[2]),
        backward=_mapped(axis, backward, [[groups[0][0] > 0], *groups[1:]], to, to[3]),
        counts=counts,
        **options,
    )
    return out, to[3]


# The primitives.


def _primitive(name: str, run: Any, count: Any, **rules: Any) -> Any:
    """Return a primitive with ``count(**params)`` outputs, of the types of its last arguments."""

    def types(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
        programs = [params[key] for key in ("body", "forward", "backward") if key in params]
        effects = frozenset().union(*(program.effects for program in programs))
        return [*avals[len(avals) - count(**params) :]], effects

    return new_primitive(name, run, types, **rules)


_tangent = _primitive(
    "rankax_while_tangent",
    _run_tangent,
    lambda live, **_: sum(live[1]),
    differentiate=_differentiate_tangent,
    transpose=_transpose_tangent,
    batch=_batch_tangent,
)
_reverse = _primitive(
    "rankax_while_reverse",
    _run_reverse,
    lambda counts, **_: counts[3],
    differentiate=_differentiate_reverse,
    transpose=_transpose_reverse,
    batch=_batch_reverse,
)
