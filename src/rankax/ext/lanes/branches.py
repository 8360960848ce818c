# SPDX-License-Identifier: MIT
"""Loops in branches, and in other loops, where items that part are evaluated in lockstep.

Then all items of a tile evaluate both branches of a `jax.lax.cond`, and the body of a `while` loop
goes on for those that have ended. What they compute is dropped, but a loop inside need not end for
them: its condition may never become false for values that this code was not meant for. So each such
loop also asks whether its item is there at all (`gated_loops`).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from rankax.core.trace.programs import as_arrays, evaluate_by, subprograms, with_variables
from rankax.ext.equations import split_loop
from rankax.ext.scan.while_loop import has_plain_loop


def gated_loops(jaxpr: Jaxpr) -> Any:
    """Return a program whose inner loops take no step for an item that does not reach them."""
    if not _has_inner_loop(jaxpr):
        return jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    bare = jaxpr.replace(constvars=list(jaxpr.constvars))  # JAX 0.12 keeps constants in the jaxpr
    closed = jax.make_jaxpr(lambda *args: _run(bare, args, None))(*(v.aval for v in variables))
    known = {
        v: Literal(x, jax.typeof(x))
        for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)
    }

    def atoms(old: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else known.get(v, v) for v in old]

    new, count = closed.jaxpr, len(jaxpr.constvars)
    eqns = [eqn.replace(invars=atoms(eqn.invars)) for eqn in new.eqns]
    given, outs = [*new.invars], atoms(new.outvars)
    return with_variables(new, given[count:], outs, constvars=given[:count], eqns=eqns)


def _has_inner_loop(jaxpr: Jaxpr, inside: bool = False) -> bool:
    """Whether a loop is in a branch, or in another loop."""
    for eqn in jaxpr.eqns:
        if not has_plain_loop([eqn]):
            continue
        name = eqn.primitive.name
        parts = inside or name in ("cond", "while")
        if (inside and name == "while") or any(_has_inner_loop(x, parts) for x in subprograms(eqn)):
            return True
    return False


def _run(jaxpr: Jaxpr, values: Sequence[Any], is_here: Any) -> list[Any]:
    """Evaluate a program; ``is_here``: whether the item reaches it, or None if all do."""

    def inside(closed: ClosedJaxpr, values: Sequence[Any], also: Any) -> list[Any]:
        here = also if is_here is None else is_here if also is None else is_here & also
        outs = _run(closed.jaxpr, [*closed.consts, *values], here)
        return as_arrays(outs, closed.out_avals)

    def step(plain: Any, eqn: Any, free: Sequence[Any], known: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name not in ("cond", "scan", "while") or not has_plain_loop([eqn]):
            return plain(*known)
        by_var = dict(zip(free, known, strict=True))
        given = [v.val if isinstance(v, Literal) else by_var[v] for v in eqn.invars]
        args = as_arrays(given, [v.aval for v in eqn.invars])
        if name == "cond":
            index = args[0].astype("int32")
            branches = [
                lambda *own, i=i, closed=closed: inside(closed, own, index == index.dtype.type(i))
                for i, closed in enumerate(params["branches"])
            ]
            return lax.switch(index, branches, *args[1:])
        if name == "scan":
            consts, init, xs = split_loop(eqn, args)

            def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = inside(params["jaxpr"], [*consts, *carry, *xs], None)
                return outs[: len(init)], outs[len(init) :]

            settings = {each: params[each] for each in ("length", "reverse", "unroll")}
            carry, ys = lax.scan(body, init, xs, **settings)
            return [*carry, *ys]
        of_cond, of_body, init = split_loop(eqn, args)

        def goes_on(carry: Any) -> Any:
            return inside(params["cond_jaxpr"], [*of_cond, *carry], None)[0]

        def here_too(carry: Any) -> Any:
            return goes_on(carry) if is_here is None else is_here & goes_on(carry)

        def again(carry: Any) -> Any:
            nested = has_plain_loop(params["body_jaxpr"].jaxpr.eqns)
            here = goes_on(carry) if nested else None
            return inside(params["body_jaxpr"], [*of_body, *carry], here)

        return lax.while_loop(here_too, again, init)

    return evaluate_by(step, jaxpr, values)
