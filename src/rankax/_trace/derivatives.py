# SPDX-License-Identifier: MIT
"""Calls whose derivative is ours to say, in every order and inside every loop.

JAX's own means, `jax.custom_jvp`, has two limits that make numbers wrong or programs fail:

* To linearise a `jax.lax.scan`, JAX before 0.12 evaluates the half of its body that does not depend
  on the tangents once more in part, looking for what is the same at each step. There it puts the
  body of a `jax.custom_jvp` function in place of the call. The rule is gone, and
  ``jax.jvp(jax.grad(f))`` is the derivative of that body. `keep_rules` prevents it. Test:
  ``tests/test_custom_rules.py``. It may go with JAX 0.11, the last that forgets.
* Where `jax.vmap` maps such a call, its rule is first differentiated and then mapped (all
  versions). A `jax.custom_vjp` function inside cannot be mapped then, and JAX raises "can't apply
  forward-mode autodiff (jvp) to a custom_vjp function". `call_with_derivative_of` maps first. Test:
  ``test_custom_rules.py::test_grad_of_vmap_of_a_custom_vjp``.

Both use one primitive, for JAX does not look into a primitive that it does not know. It leaves no
trace in the compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import core
from jax.interpreters import ad, batching, mlir

__all__ = ["RULES", "call_of", "call_with_derivative_of", "keep_rules"]

Jaxpr = jax.extend.core.Jaxpr
ClosedJaxpr = jax.extend.core.ClosedJaxpr

_FORGETS = jax.__version_info__ < (0, 12)
RULES = ("custom_jvp_call", "custom_vjp_call")


def call_with_derivative_of(other: Callable[..., Any], fun: Callable[..., Any], *args: Any) -> Any:
    """Return ``fun(*args)``, whose derivatives are those of ``other``.

    Equivalent to ``jax.custom_jvp(fun)(*args)`` with the rule ``jax.jvp(other, ...)``.

    Both take and return the same pytrees of arrays, and close over no array. ``other`` is called
    only where the result is differentiated. An argument that does not move is a constant there.
    """
    leaves, treedef = jax.tree.flatten(args)
    out_trees: list[Any] = []

    def flat(fun: Callable[..., Any]) -> Callable[..., list[Any]]:
        def flat_fun(*leaves: Any) -> list[Any]:
            out, out_tree = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
            out_trees.append(out_tree)
            return out

        return flat_fun

    program = jax.make_jaxpr(flat(fun))(*leaves)
    return out_trees[0].unflatten(_call.bind(*leaves, program=program, other=flat(other)))


def keep_rules(closed: Any) -> Any:
    """Return a program equal to ``closed`` (a ``ClosedJaxpr``) whose rules JAX does not forget.

    Unchanged, to the object, where there is none.
    """
    return _kept(closed) if _FORGETS else closed


def call_of(eqn: Any, jaxpr: Any, inputs: Sequence[Any]) -> Any:
    """Return an equation like ``eqn`` that calls a program, whose constants come first."""
    unnamed = {
        "arg_names": ("",) * len(inputs),
        "result_paths": ("",) * len(jaxpr.outvars),
    }
    jaxpr = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info._replace(**unnamed),
    )
    params = {"program": ClosedJaxpr(jaxpr, ()), "other": None}
    return eqn.replace(primitive=_call, invars=list(inputs), params=params)


# From equations with rules to calls of ours.


def _kept(program: Any) -> Any:
    """Replace calls with rules in a ``Jaxpr`` or ``ClosedJaxpr``, and in all that it calls."""
    if isinstance(program, ClosedJaxpr):
        jaxpr = _kept(program.jaxpr)
        return program if jaxpr is program.jaxpr else ClosedJaxpr(jaxpr, program.consts)
    eqns = [_kept_equation(eqn, program) for eqn in program.eqns]
    if all(new is old for new, old in zip(eqns, program.eqns, strict=True)):
        return program
    return program.replace(eqns=eqns)


def _kept_equation(eqn: Any, program: Any) -> Any:
    if eqn.primitive.name in RULES:
        return _kept_call(eqn, program)
    params = {name: _kept_param(value) for name, value in eqn.params.items()}
    changed = any(params[name] is not value for name, value in eqn.params.items())
    return eqn.replace(params=params) if changed else eqn


def _kept_param(value: Any) -> Any:
    """Keep the rules in the branches, bodies and callees of an equation."""
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return _kept(value)
    if isinstance(value, tuple) and any(isinstance(x, (Jaxpr, ClosedJaxpr)) for x in value):
        kept = tuple(_kept_param(x) for x in value)
        return value if all(a is b for a, b in zip(kept, value, strict=True)) else kept
    return value


def _kept_call(eqn: Any, program: Any) -> Any:
    """Put a call of ours around one equation of ``program`` that has a rule."""
    inputs = list({v: None for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)})
    unnamed = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(eqn.outvars)}
    jaxpr = program.replace(
        constvars=[],
        invars=inputs,
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=program.debug_info._replace(**unnamed),
    )
    params = {"program": ClosedJaxpr(jaxpr, ()), "other": None}
    return eqn.replace(primitive=_call, invars=inputs, params=params)


# The call: `program` is what runs; its derivatives are those of `other`, or else its own, in which
# the rules of what it calls are kept.

_call = jax.extend.core.Primitive("rankax_call")
_call.multiple_results = True


def _run(*args: Any, program: Any, other: Any = None) -> list[Any]:
    del other
    return core.eval_jaxpr(program.jaxpr, program.consts, *args)


@_call.def_impl
def _(*args: Any, program: Any, other: Any) -> list[Any]:
    # One compiled program: step by step each number in it would be sent to the device on its own,
    # which `jax.transfer_guard` may forbid.
    return jax.jit(functools.partial(_run, program=program, other=other))(*args)


@_call.def_effectful_abstract_eval
def _(*_: Any, program: Any, other: Any) -> tuple[list[Any], Any]:
    del other
    return program.out_avals, program.effects


mlir.register_lowering(_call, mlir.lower_fun(_run, multiple_results=True))


def _batched(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, program: Any, other: Any
) -> tuple[list[Any], list[int | None]]:
    """Map the program, and what it is differentiated as, before anyone differentiates them."""
    uses_axis = any(getattr(effect, "name", None) == axis.name for effect in program.effects)
    if not uses_axis and all(dim is None for dim in dims):
        out = _call.bind(*args, program=program, other=other)
        return out, [None] * len(out)

    def mapped(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(
            fun,
            in_axes=tuple(dims),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )

    closed = jax.make_jaxpr(mapped(functools.partial(_run, program=program)))(*args)
    if other is None:
        out = _run(*args, program=keep_rules(closed))
    else:
        out = _call.bind(*args, program=closed, other=mapped(other))
    return out, [0] * len(out)


batching.fancy_primitive_batchers[_call] = _batched


def _differentiated(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: Any, other: Any
) -> tuple[list[Any], list[Any]]:
    live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    directions = [tangents[i] for i in live]
    if other is None:
        out, pushed = _linearised(program, primals, live, directions)
    else:
        moving = [primals[i] for i in live]
        out, pushed = jax.jvp(_of_some(other, primals, live), moving, directions)
    return out, [
        tangent if _moves(aval) else ad.Zero(aval.to_tangent_aval())
        for aval, tangent in zip(program.out_avals, pushed, strict=True)
    ]


ad.primitive_jvps[_call] = _differentiated


def _linearised(
    program: Any, primals: Sequence[Any], live: Sequence[int], directions: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Split the derivative: what its rules do to the primals is kept, the rest is linear."""
    linear: list[Any] = []

    def nonlinear(*primals: Any) -> Any:
        of_live = _of_some(functools.partial(_run, program=program), primals, live)
        out, push = jax.linearize(of_live, *(primals[i] for i in live))

        def push_inexact(*tangents: Any) -> list[Any]:
            pairs = zip(program.out_avals, push(*tangents), strict=True)
            return [tangent for aval, tangent in pairs if _moves(aval)]

        pushed = jax.make_jaxpr(push_inexact)(*directions)
        linear.append(pushed.jaxpr)
        return out, pushed.consts

    found = _run(*primals, program=keep_rules(jax.make_jaxpr(nonlinear)(*primals)))
    count = len(program.out_avals)
    pushed = iter(core.eval_jaxpr(linear[0], found[count:], *directions))
    return found[:count], [next(pushed) if _moves(aval) else None for aval in program.out_avals]


def _moves(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _of_some(
    fun: Callable[..., Any], args: Sequence[Any], positions: Sequence[int]
) -> Callable[..., Any]:
    """Return ``fun`` as a function of the arguments at ``positions``; the others are fixed."""

    def of_some(*some: Any) -> Any:
        merged = list(args)
        for i, x in zip(positions, some, strict=True):
            merged[i] = x
        return fun(*merged)

    return of_some


def _transposed(cotangents: Sequence[Any], *args: Any, program: Any, other: Any) -> list[Any]:
    """Transpose a call that is linear in its unknown arguments, for `jax.linear_transpose`."""
    fun = other or functools.partial(_run, program=program)
    unknown = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    transpose = jax.linear_transpose(_of_some(fun, args, unknown), *(args[i].aval for i in unknown))
    found = iter(transpose([ad.instantiate_zeros(ct) for ct in cotangents]))
    return [next(found) if ad.is_undefined_primal(x) else None for x in args]


ad.primitive_transposes[_call] = _transposed
