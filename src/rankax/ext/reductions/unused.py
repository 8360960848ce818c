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
share. Where these would be too large, items are evaluated one after another. A function of many
items chooses for each of them without that: an item that sends nothing is evaluated as one that
does, so that 0 times its derivative is 0 (``axes``).
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


def unless_unused(fun: Fun, axes: int = 0) -> Fun:
    """Return a function of arrays whose derivatives send nothing back if nothing is asked.

    ``axes``: all arguments and results have so many axes of items in front, along which each item
    chooses for itself. What the function closes over is shared by the items.
    """

    def called(*args: Any) -> list[Any]:
        closed = jax.make_jaxpr(fun)(*args)
        if closed.effects or has_refs(closed.jaxpr.invars, closed.effects):
            return fun(*args)
        # Without the constants, which are arguments of the primitive.
        jaxpr = closed.jaxpr.replace(constvars=list(closed.jaxpr.constvars))
        count = len(closed.consts)

        def program(*args: Any) -> list[Any]:
            shared = [lax.squeeze(x, range(axes)) for x in args[:count]]
            return evaluate(jaxpr, shared, *args[count:])

        shared = [lax.expand_dims(x, range(axes)) for x in closed.consts]
        return _choose.bind(*shared, *args, fun=program, groups=(), depth=0, axes=axes)

    return called


def _slices(args: Sequence[Any], groups: Sequence[int]) -> list[slice]:
    """Return where each group is among the arguments, which end with them."""
    ends = list(itertools.accumulate(groups, initial=len(args) - sum(groups)))
    return list(map(slice, ends, ends[1:]))


# Arguments have ``depth`` axes of `jax.vmap` in front, then ``axes`` of items, each of length 1 if
# the items share an argument. So has what is sent back to it.


def _run(*args: Any, fun: Fun, groups: tuple[int, ...], depth: int, axes: int) -> list[Any]:
    if not groups:
        return fun(*args)
    front = depth + axes
    slices = _slices(args, groups)
    used = [
        functools.reduce(jnp.logical_or, (jnp.any(x != 0, range(front, x.ndim)) for x in args[own]))
        for own in slices
    ]
    is_used = functools.reduce(jnp.logical_and, used)

    def chosen(x: Any, other: Any) -> Any:
        own = [axis for axis in range(depth, front) if x.shape[axis] == 1]
        is_own = jnp.any(is_used, own, keepdims=True)
        return jnp.where(lax.expand_dims(is_own, range(front, x.ndim)), x, other)

    if axes:
        some = _of_used
        for _ in range(depth):
            some = jax.vmap(some)
        asks = slices[0].start  # how many arguments say nothing of that
        known = [chosen(x, some(is_used, x)) for x in args[:asks]]
        args = (*known, *(chosen(x, jnp.zeros_like(x)) for x in args[asks:]))
    return [chosen(x, jnp.zeros_like(x)) for x in fun(*args)]


def _of_used(is_used: jax.Array, x: jax.Array) -> jax.Array:
    """Return an argument of an item that is used, or of the first if none is."""
    places = jnp.unravel_index(jnp.argmax(is_used), is_used.shape)
    for axis, place in enumerate(places):
        at = jnp.minimum(place, x.shape[axis] - 1)
        x = lax.dynamic_slice_in_dim(x, at, 1, axis)
    return x


def _types(*avals: Any, fun: Fun, **_: Any) -> tuple[list[Any], Any]:
    return jax.make_jaxpr(fun)(*avals).out_avals, set()


def _differentiated(
    args: Sequence[Any], tangents: Sequence[Any], *, fun: Fun, groups: tuple[int, ...], **front: int
) -> tuple[list[Any], list[Any]]:
    outs = _choose.bind(*args, fun=fun, groups=groups, **front)
    floats = [i for i, out in enumerate(outs) if has_tangent(out)]
    live = [i for i, x in enumerate(args) if has_tangent(x) and not _is_zero(tangents[i])]
    terms: list[list[Any]] = []
    slices = _slices(args, groups)
    for own in slices:
        if any(own.start <= i < own.stop for i in live):
            some = list(args)
            some[own] = map(ad.instantiate_zeros, tangents[own])
            terms.append(_choose.bind(*some, fun=fun, groups=groups, **front))
    others = [i for i in live if not any(own.start <= i < own.stop for own in slices)]

    def pushed(*given: Any) -> list[Any]:
        args, own = given[: -len(others)], given[-len(others) :]
        found = jax.jvp(of_some(fun, args, others), [args[i] for i in others], list(own))[1]
        return [found[i] for i in floats]

    if others:
        some, more = [*args, *(tangents[i] for i in others)], (*groups, len(others))
        terms.append(_choose.bind(*some, fun=pushed, groups=more, **front))
    found: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    for i, *own in zip(floats, *terms, strict=True) if terms else ():
        found[i] = functools.reduce(jnp.add, own)
    return outs, found


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero)


def _transposed(
    cotangents: Sequence[Any], *args: Any, fun: Fun, groups: tuple[int, ...], **front: int
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
    outs = _choose.bind(*some, fun=pulled, groups=more, **front)
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
    axes: int,
) -> tuple[list[Any], list[int | None]]:
    front = {"groups": groups, "axes": axes}
    choose = functools.partial(_choose.bind, fun=fun, depth=depth, **front)
    if all(dim is None for dim in dims):
        outs = choose(*args)
        return outs, [None] * len(outs)
    mapped = {i: jnp.moveaxis(args[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}
    shared = {i: x for i, x in enumerate(args) if i not in mapped and (axes or has_tangent(x))}
    if sum(x.size for x in shared.values()) * axis.size > _MOST_NUMBERS:
        of_item = of_some(choose, args, list(mapped))
        outs = lax.map(lambda items: of_item(*items), list(mapped.values()))
        return outs, [0] * len(outs)
    for i, x in shared.items():
        mapped[i] = jnp.broadcast_to(x, (axis.size, *x.shape))
    in_axes = [0 if i in mapped else None for i in range(len(args))]
    args = [mapped.get(i, x) for i, x in enumerate(args)]
    outs = _choose.bind(*args, fun=vmapped(axis, fun, in_axes, 0), depth=depth + 1, **front)
    return outs, [0] * len(outs)


_choose = new_primitive(
    "rankax_unless_unused", _run, _differentiated, _transposed, _under_vmap, _types
)
