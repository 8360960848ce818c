# SPDX-License-Identifier: MIT
"""Derivatives of what may go unused: a cotangent of 0 sends nothing back.

Each run evaluates the winner among its own items, and only one of these wins the whole row. The
others get a cotangent of 0. That is not nothing: 0 times an infinite derivative is NaN, and a rule
of `jax.custom_vjp` may make anything of it. Which run has the winner is known only after all states
have been merged, maybe on other devices. So the derivative of an evaluation looks at its cotangent.

This takes a primitive, whose function is linear in some groups of its last arguments: in none as it
is called, in tangents where it is differentiated, in cotangents where that is transposed. If all of
a group is 0, so is the result, by a choice that drops what comes back. The choice has no derivative
of its own. That of a product has a term for each factor, and each term chooses by itself, so a
Hessian is right where the gradient is 0.

`jax.vmap` gives each item a choice of its own, and so a cotangent of its own for what all items
share. Where these would be too large, items are evaluated one after another.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from rankax.core.base.arrays import has_tangent
from rankax.core.trace.derivatives import has_refs, new_primitive, of_some, vmapped
from rankax.core.trace.programs import evaluate

Fun = Callable[..., list[Any]]

_MOST_NUMBERS = 2**24  # of all cotangents of what items share, under `jax.vmap`


def unless_unused(fun: Fun) -> Fun:
    """Return a function of arrays whose derivatives send nothing back if nothing is asked."""

    def called(*args: Any) -> list[Any]:
        closed = jax.make_jaxpr(fun)(*args)
        if closed.effects or has_refs(closed.jaxpr.invars, closed.effects):
            return fun(*args)
        # Without the constants, which are arguments of the primitive.
        jaxpr = closed.jaxpr.replace(constvars=list(closed.jaxpr.constvars))
        count = len(closed.consts)

        def program(*args: Any) -> list[Any]:
            return evaluate(jaxpr, args[:count], *args[count:])

        return _choose.bind(*closed.consts, *args, fun=program, groups=(), depth=0)

    return called


def _slices(args: Sequence[Any], groups: Sequence[int]) -> list[slice]:
    """Return where each group is among the arguments, which end with them."""
    ends = list(itertools.accumulate(groups, initial=len(args) - sum(groups)))
    return list(map(slice, ends, ends[1:]))


def _run(*args: Any, fun: Fun, groups: tuple[int, ...], depth: int) -> list[Any]:
    outs = fun(*args)
    if not groups:
        return outs
    used = [
        functools.reduce(jnp.logical_or, (jnp.any(x != 0, range(depth, x.ndim)) for x in args[own]))
        for own in _slices(args, groups)
    ]
    is_used = functools.reduce(jnp.logical_and, used)
    return [
        jnp.where(lax.expand_dims(is_used, range(depth, x.ndim)), x, jnp.zeros_like(x))
        for x in outs
    ]


def _types(*avals: Any, fun: Fun, **_: Any) -> tuple[list[Any], Any]:
    return jax.make_jaxpr(fun)(*avals).out_avals, set()


def _differentiated(
    args: Sequence[Any], tangents: Sequence[Any], *, fun: Fun, groups: tuple[int, ...], depth: int
) -> tuple[list[Any], list[Any]]:
    outs = _choose.bind(*args, fun=fun, groups=groups, depth=depth)
    floats = [i for i, out in enumerate(outs) if has_tangent(out)]
    live = [i for i, x in enumerate(args) if has_tangent(x) and not _is_zero(tangents[i])]
    terms: list[list[Any]] = []
    slices = _slices(args, groups)
    for own in slices:
        if any(own.start <= i < own.stop for i in live):
            some = list(args)
            some[own] = map(ad.instantiate_zeros, tangents[own])
            terms.append(_choose.bind(*some, fun=fun, groups=groups, depth=depth))
    others = [i for i in live if not any(own.start <= i < own.stop for own in slices)]

    def pushed(*given: Any) -> list[Any]:
        args, own = given[: -len(others)], given[-len(others) :]
        found = jax.jvp(of_some(fun, args, others), [args[i] for i in others], list(own))[1]
        return [found[i] for i in floats]

    if others:
        some, more = [*args, *(tangents[i] for i in others)], (*groups, len(others))
        terms.append(_choose.bind(*some, fun=pushed, groups=more, depth=depth))
    found: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    for i, *own in zip(floats, *terms, strict=True) if terms else ():
        found[i] = functools.reduce(jnp.add, own)
    return outs, found


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero)


def _transposed(
    cotangents: Sequence[Any], *args: Any, fun: Fun, groups: tuple[int, ...], depth: int
) -> list[Any]:
    unknown = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    asked = [i for i, cotangent in enumerate(cotangents) if not _is_zero(cotangent)]
    slices = _slices(args, groups)
    (at,) = (at for at, own in enumerate(slices) if own.start <= unknown[0] < own.stop)
    # What is known of this group, tangents that are 0, comes before all groups.
    others = [i for j, own in enumerate(slices) if j != at for i in range(own.start, own.stop)]
    known = [*(i for i in range(len(args)) if i not in (*others, *unknown)), *others]
    avals = [args[i].aval for i in unknown]

    def pulled(*given: Any) -> list[Any]:
        def of_unknown(*some: Any) -> list[Any]:
            every = dict(zip([*known, *unknown], [*given[: len(known)], *some], strict=True))
            outs = fun(*(every[i] for i in range(len(args))))
            return [outs[i] for i in asked]

        return list(jax.linear_transpose(of_unknown, *avals)(list(given[len(known) :])))

    some = [*(args[i] for i in known), *(cotangents[i] for i in asked)]
    more = (*groups[:at], *groups[at + 1 :], len(asked))
    outs = _choose.bind(*some, fun=pulled, groups=more, depth=depth)
    found = dict(zip(unknown, outs, strict=True))
    return [found.get(i) for i in range(len(args))]


def _under_vmap(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    fun: Fun,
    groups: tuple[int, ...],
    depth: int,
) -> tuple[list[Any], list[int | None]]:
    choose = functools.partial(_choose.bind, fun=fun, groups=groups, depth=depth)
    if all(dim is None for dim in dims):
        outs = choose(*args)
        return outs, [None] * len(outs)
    mapped = {i: jnp.moveaxis(args[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}
    shared = {i: x for i, x in enumerate(args) if i not in mapped and has_tangent(x)}
    if sum(x.size for x in shared.values()) * axis.size > _MOST_NUMBERS:
        of_item = of_some(choose, args, list(mapped))
        outs = lax.map(lambda items: of_item(*items), list(mapped.values()))
        return outs, [0] * len(outs)
    for i, x in shared.items():
        mapped[i] = jnp.broadcast_to(x, (axis.size, *x.shape))
    in_axes = [0 if i in mapped else None for i in range(len(args))]
    args = [mapped.get(i, x) for i, x in enumerate(args)]
    outs = _choose.bind(*args, fun=vmapped(axis, fun, in_axes, 0), groups=groups, depth=depth + 1)
    return outs, [0] * len(outs)


_choose = new_primitive(
    "rankax_unless_unused", _run, _differentiated, _transposed, _under_vmap, _types
)
