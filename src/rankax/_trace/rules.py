# SPDX-License-Identifier: MIT
"""Derivative rules as programs: they can be compared, and no longer depend on the caller.

A rule (`jax.custom_jvp`, `jax.custom_vjp`) is a function, which JAX calls when it needs it. What it
computes may change while it stays the same object. `traced_rules` calls it at once, and so all
rules in what it computes, until it meets one again: a rule usually calls its own function. Two
programs with equal keys then have equal derivatives of every order, and the program to keep uses
the traced rules in place of the caller's.

A rule has no key if it closes over arrays, asks which inputs are differentiated (symbolic zeros),
or cannot be traced. Nor has one inside a loop of ours in the kernel, whose derivative is a function
that holds the rule. Test: ``test_eager.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rankax._trace.derivatives import RULES, has_tangent, kept_equation, of_some
from rankax._trace.fingerprint import Unknown, derivative_key, fingerprint, without_rules
from rankax._trace.programs import evaluate, with_subprograms

__all__ = ["traced_rules"]

Fun = Callable[..., Any]


def traced_rules(jaxpr: Any, around: Mapping[Hashable, Fun] | None = None) -> tuple[Hashable, Any]:
    """Return a key of all derivatives, and the program with its rules traced.

    ``around`` has the functions whose rules led to this program, by their keys.
    """
    keys: list[Hashable] = []  # in the order of the equations

    def inner(jaxpr: Any) -> Any:
        key, program = traced_rules(jaxpr, around)
        keys.append(key)
        return program

    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in RULES:
            key, fun = _traced_rule(eqn, jaxpr, around or {})
            keys.append(key)
            inputs = kept_equation(eqn, jaxpr).invars
            (call,) = jax.make_jaxpr(fun)(*(v.aval for v in inputs)).eqns
            eqns.append(eqn.replace(invars=inputs, params=call.params))
            continue
        traced = with_subprograms(eqn, inner)
        if (key := derivative_key(eqn)) is not None:
            keys.append(key)
            if traced is not eqn and "other" in eqn.params:  # which holds the rules inside
                raise Unknown
        eqns.append(traced)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return tuple(keys), jaxpr
    return tuple(keys), jaxpr.replace(eqns=eqns)


def _traced_rule(eqn: Any, jaxpr: Any, around: Mapping[Hashable, Fun]) -> tuple[Hashable, Fun]:
    """Return a key of what a rule computes, and a function with that rule, of the kept equation."""
    if eqn.params.get("symbolic_zeros"):  # the rule depends on what is differentiated
        raise Unknown
    call = kept_equation(eqn, jaxpr).params["program"]
    trace = _traced_jvp if eqn.primitive.name == "custom_jvp_call" else _traced_vjp
    try:
        closed, with_rule = trace(call)
    except Exception:  # whatever a rule raises; nobody may need it
        raise Unknown from None
    if any(program.consts for program in closed):
        raise Unknown
    key: Hashable = tuple(map(fingerprint, closed))
    if key in around:
        return key, around[key]
    programs: list[Any] = []  # filled in before they are called
    fun = with_rule(functools.partial(evaluate, without_rules(call.jaxpr), ()), programs)
    traced = [traced_rules(program.jaxpr, {**around, key: fun}) for program in closed]
    programs += [program for _, program in traced]
    return (key, *(inner for inner, _ in traced)), fun


# Each returns the programs of a rule, and a function that gives another function this rule.


def _traced_jvp(call: Any) -> tuple[list[Any], Fun]:
    avals, out_avals = call.in_avals, call.out_avals
    live = [i for i, aval in enumerate(avals) if has_tangent(aval)]

    def pushed(primals: list[Any], tangents: list[Any]) -> Any:
        of_live = of_some(functools.partial(evaluate, call.jaxpr, ()), primals, live)
        out, pushed = jax.jvp(of_live, [primals[i] for i in live], tangents)
        return out, _differentiable(pushed, out_avals)

    def with_rule(plain: Fun, programs: list[Any]) -> Fun:
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            outs = evaluate(programs[0], (), *primals, *(tangents[i] for i in live))
            count = len(out_avals)
            return outs[:count], _with_float0(outs[count:], out_avals)

        fun = jax.custom_jvp(plain)
        fun.defjvp(rule)
        return fun

    return [jax.make_jaxpr(pushed)(avals, [avals[i] for i in live])], with_rule


def _traced_vjp(call: Any) -> tuple[list[Any], Fun]:
    avals, out_avals = call.in_avals, call.out_avals
    live = [i for i, aval in enumerate(avals) if has_tangent(aval)]
    trees: list[Any] = []

    def forward(*primals: Any) -> Any:
        of_live = of_some(functools.partial(evaluate, call.jaxpr, ()), primals, live)
        out, pull = jax.vjp(of_live, *(primals[i] for i in live))
        residuals, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return out, residuals

    def backward(residuals: list[Any], cotangents: list[Any]) -> Any:
        return trees[-1].unflatten(residuals)(_with_float0(cotangents, out_avals))

    def with_rule(plain: Fun, programs: list[Any]) -> Fun:
        def first(*primals: Any) -> Any:
            outs = evaluate(programs[0], (), *primals)
            return outs[: len(out_avals)], outs[len(out_avals) :]

        def second(residuals: list[Any], cotangents: list[Any]) -> Any:
            live_cotangents = _differentiable(cotangents, out_avals)
            pulled = evaluate(programs[1], (), *residuals, *live_cotangents)
            return tuple(_with_float0(pulled, avals))

        fun = jax.custom_vjp(plain)
        fun.defvjp(first, second)
        return fun

    fwd = jax.make_jaxpr(forward)(*avals)
    residuals = fwd.out_avals[len(out_avals) :]
    bwd = jax.make_jaxpr(backward)(residuals, _differentiable(out_avals, out_avals))
    return [fwd, bwd], with_rule


def _differentiable(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    return [value for value, aval in zip(values, avals, strict=True) if has_tangent(aval)]


def _with_float0(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Fill in the tangents of numbers that have none."""
    rest = iter(values)
    return [
        next(rest) if has_tangent(aval) else np.zeros(aval.shape, jax.dtypes.float0)
        for aval in avals
    ]
