# SPDX-License-Identifier: MIT
"""Keep what a reverse pass reads again and again, where XLA:CPU would recompute it.

A chunk is differentiated by evaluating its items again. XLA:CPU fuses their values into the loops
of the reverse pass that read them (`kept_values.py`). The cotangent of an array of which the item
takes several slices, as in a stencil, is read once for each slice; each time, all that it depends
on is recomputed. Gradients of stencils take several times as long.

So the values that are worth keeping are found in the program of an item and its reverse pass. The
latter is made by JAX, which allows no barriers in it. But the item can have them: on the values
that the cotangents in question are computed from. Only the program that is differentiated gets
them. The reverse pass takes several times as long to trace as the item, so it is made where a call
is differentiated, and only if an array of the item is sliced twice (`slices_again`).

Of the stencils that the threshold was not chosen on, three are 1.2 to 3.9 times as fast and two
lose, a smoothed entropy a quarter of its speed.

Test: ``tests/xla_cpu/test_kept_residuals.py``.
"""

import collections
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from rankax.core.base.arrays import has_tangent
from rankax.core.trace.programs import evaluate, evaluate_by, with_shape
from rankax.ext.xla_cpu.kept_values import values_read_again, with_barriers

_SLICES = ("dynamic_slice", "gather", "slice", "split")
_WORTH = 24.0  # operations for each number, from which on a cotangent is worth keeping


def keep_residuals(jaxpr: Any) -> Any:
    """Return a program with barriers on what its reverse pass reads again; itself if none is."""
    if not slices_again(jaxpr):
        return jaxpr
    flat = jax.make_jaxpr(lambda *xs: _inlined(jaxpr, xs))(*_types(jaxpr))
    try:
        both = _with_reverse_pass(flat.jaxpr)
    except Exception:  # no reverse pass, or a rule of the caller that will raise it again
        return jaxpr
    if flat.consts or both.consts:
        return jaxpr
    residuals = _residuals(flat.jaxpr, both.jaxpr)
    if not residuals:
        return jaxpr
    count = len(jaxpr.constvars)
    invars, eqns = flat.jaxpr.invars, with_barriers(flat.jaxpr.eqns, residuals)
    return flat.jaxpr.replace(constvars=invars[:count], invars=invars[count:], eqns=eqns)


def slices_again(jaxpr: Any) -> bool:
    """Whether an item takes an array and more from another one, and whether it computes any array.

    Numbers alone do not count: the gradient of an inverse of 3 x 3 numbers becomes slower.
    """
    slices: dict[Any, list[int]] = collections.defaultdict(list)  # the sizes of what is taken
    computes = _collect_slices(jaxpr, {}, slices)
    takes = any(len(sizes) > 1 and max(sizes) > 1 for sizes in slices.values())
    return computes and takes and not jaxpr.effects


def _collect_slices(jaxpr: Any, outside: dict[Any, Any], slices: dict[Any, list[int]]) -> bool:
    """Collect the slices of each array, also in calls; return whether an array is computed.

    ``outside``: what the caller calls the inputs.
    """
    computes = False
    for eqn in jaxpr.eqns:
        own = [v if isinstance(v, Literal) else outside.get(v, v) for v in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"].jaxpr
            inputs = dict(zip(inner.invars, own, strict=True))
            computes |= _collect_slices(inner, inputs, slices)
            continue
        if eqn.primitive.name in _SLICES and not isinstance(own[0], Literal):
            slices[own[0]] += [v.aval.size for v in eqn.outvars]
        computes |= any(v.aval.size > 1 for v in eqn.outvars if has_tangent(v.aval))
    return computes


def _inlined(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate a program without calls of `jax.jit`, whose values would have no name outside."""
    return evaluate_by(lambda fun, _, __, inputs: fun(*inputs), jaxpr, values)


def _types(jaxpr: Any) -> list[Any]:
    return [with_shape(v.aval, v.aval.shape) for v in (*jaxpr.constvars, *jaxpr.invars)]


def _with_reverse_pass(jaxpr: Any) -> Any:
    """Return the program of an item and its reverse pass, from its inputs and cotangents."""
    types = _types(jaxpr)
    wrt = [i for i, v in enumerate(jaxpr.invars) if has_tangent(v.aval)]
    outputs = [i for i, v in enumerate(jaxpr.outvars) if has_tangent(v.aval)]
    cotangents = [with_shape(jaxpr.outvars[i].aval, jaxpr.outvars[i].aval.shape) for i in outputs]

    def pulled(values: list[Any], cotangents: list[Any]) -> Any:
        def fun(own: list[Any]) -> list[Any]:
            given = dict(zip(wrt, own, strict=True))
            outs = evaluate(jaxpr, (), *(given.get(i, x) for i, x in enumerate(values)))
            return [outs[i] for i in outputs]

        return jax.vjp(fun, [values[i] for i in wrt])[1](cotangents)

    traced = jax.make_jaxpr(pulled)(types, cotangents)
    return jax.make_jaxpr(lambda *xs: _inlined(traced.jaxpr, [*traced.consts, *xs]))(
        *types, *cotangents
    )


def _residuals(item: Any, both: Any) -> list[Any]:
    """Return the values of an item from which its reverse pass computes what it reads again."""
    values = {name: v for v, name in _names(item).items()}
    names, made_by = _names(both), {v: eqn for eqn in both.eqns for v in eqn.outvars}
    barriers = [eqn for eqn in item.eqns if eqn.primitive.name == "optimization_barrier"]
    stored = {v for eqn in barriers for v in (*eqn.invars, *eqn.outvars)}
    found: dict[Any, None] = {}
    left, seen = values_read_again(both, _WORTH), set[Any]()
    while left:
        v = left.pop()
        if v in seen or v not in made_by:
            continue
        seen.add(v)
        if (own := values.get(names[v])) is None:
            left += [x for x in made_by[v].invars if not isinstance(x, Literal)]
        elif own not in stored and has_tangent(own.aval) and own.aval.size > 1:
            found[own] = None
    return list(found)


def _names(jaxpr: Any) -> dict[Any, Hashable]:
    """Return a name for each value: equal for those that are computed in the same way."""
    names: dict[Any, Hashable] = {v: i for i, v in enumerate(jaxpr.invars)}

    def of(variables: Iterable[Any]) -> Hashable:
        return tuple(str(v) if isinstance(v, Literal) else names[v] for v in variables)

    for eqn in jaxpr.eqns:
        how = eqn.primitive.name, str(eqn.params), of(eqn.invars)
        names.update({v: hash((how, i)) for i, v in enumerate(eqn.outvars)})
    return names
