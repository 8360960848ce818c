# SPDX-License-Identifier: MIT
"""Keep derivative rules correct, at every order and inside loops: a kernel's rules and our own.

`jax.custom_jvp` has two faults, which give wrong numbers or make programs fail:

* When JAX before 0.12 linearizes a `jax.lax.scan`, it looks for values that are the same in every
  step, and evaluates part of the body again with the body of each `jax.custom_jvp` function in
  place of the call. The rule is lost, and ``jax.jvp(jax.grad(f))`` is the derivative of that body.
  `keep_rules` prevents it. The programs of loops over chunks and of the
  body of a scan pass through it first. Test: ``tests/loop/test_custom_rules.py``. It may go with
  JAX 0.11, the last version with this fault.
* When `jax.vmap` maps such a call, its rule is differentiated first and mapped second (all
  versions). A `jax.custom_vjp` function inside can then no longer be mapped, and JAX raises "can't
  apply forward-mode autodiff (jvp) to a custom_vjp function". `call_with_derivative_of` maps first.
  Test: ``test_custom_rules.py::test_grad_of_vmap_of_a_custom_vjp``.

Both use one primitive, because JAX does not look inside a primitive that it does not know. The
compiled program shows no trace of it. Rules cannot be compared, so a differentiated eager call of a
kernel with rules reuses no compiled loop (`fingerprint.derivatives_key`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from rankax._trace.programs import (
    ClosedJaxpr,
    Literal,
    as_arrays,
    evaluate,
    mapped_program,
    with_subprograms,
)

_FORGETS = jax.__version_info__ < (0, 12)
RULES = ("custom_jvp_call", "custom_vjp_call")


def call_with_derivative_of(
    other: Callable[..., Any], fun: Callable[..., Any], *args: Any, key: Hashable = None
) -> Any:
    """Return ``fun(*args)``, whose derivatives are those of ``other``.

    Equivalent to ``jax.custom_jvp(fun)(*args)`` with the rule ``jax.jvp(other, ...)``.

    Both take and return the same pytrees of arrays, and close over no array. ``other`` is called
    only if the result is differentiated; an argument without a tangent is a constant there.

    With a ``key``, programs are compared (`_trace/fingerprint.py`): if the program of ``fun`` and
    the key are equal, so is the program of ``other``.
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
    outs = _bind(leaves, program, _Other(flat(other), key))
    # Differentiated by JAX 0.10, the call hands out a constant output as a number.
    return out_trees[0].unflatten(as_arrays(outs, program.out_avals))


def keep_rules(closed: Any) -> Any:
    """Return a program equal to ``closed`` (a ``ClosedJaxpr``) whose rules JAX does not forget.

    The same object if it has no rules.
    """
    return mapped_program(_with_kept_rules, closed) if _FORGETS else closed


def _with_kept_rules(jaxpr: Any) -> Any:
    """Put a call of our primitive around each equation with a rule, at any depth."""
    eqns = [
        _kept_equation(eqn, jaxpr)
        if eqn.primitive.name in RULES
        else with_subprograms(eqn, _with_kept_rules)
        for eqn in jaxpr.eqns
    ]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _kept_equation(eqn: Any, jaxpr: Any) -> Any:
    inputs = list({v: None for v in eqn.invars if not isinstance(v, Literal)})
    alone = {"invars": inputs, "outvars": eqn.outvars, "eqns": [eqn], "effects": eqn.effects}
    return call_of(eqn, inputs, jaxpr, **alone)


def call_of(eqn: Any, inputs: Sequence[Any], jaxpr: Any, **changes: Any) -> Any:
    """Return an equation like ``eqn`` in which our primitive calls ``jaxpr`` with ``changes``.

    The constants of ``jaxpr`` become its first inputs.
    """
    whole = {"invars": [*jaxpr.constvars, *jaxpr.invars], "outvars": jaxpr.outvars, **changes}
    unnamed = {
        "arg_names": ("",) * len(whole["invars"]),
        "result_paths": ("",) * len(whole["outvars"]),
    }
    debug_info = jaxpr.debug_info._replace(**unnamed)
    program = jaxpr.replace(constvars=[], debug_info=debug_info, **whole)
    params = {"program": ClosedJaxpr(program, ()), "other": None}
    return eqn.replace(primitive=_call, invars=list(inputs), params=params)


class _Other:
    """A function that defines a derivative, and a key for everything else that it depends on."""

    def __init__(self, fun: Callable[..., Any], key: Hashable) -> None:
        self.fun, self.rankax_key = fun, key

    def __call__(self, *args: Any) -> Any:
        return self.fun(*args)


# The call evaluates `program`. Its derivatives are those of `other`, or without one those of
# `program`, in which every rule is kept.


def _bind(args: Sequence[Any], program: Any, other: Any) -> list[Any]:
    if other is None or not getattr(jax.config, "jax_remat3", False) or _FORGETS:
        return _call.bind(*args, program=program, other=other)
    return _high_level_call()(program, other)(*args)


_call = jax.extend.core.Primitive("rankax_call")
_call.multiple_results = True
# With `jax_remat3`, a program with a checkpoint is high-level; it is expanded before it is lowered.
_call.to_lojax = lambda *args, **params: _run(*args, **params)


def _run(*args: Any, program: Any, other: Any = None) -> list[Any]:
    del other
    return evaluate(program.jaxpr, program.consts, *args)


@_call.def_impl
def _(*args: Any, program: Any, other: Any) -> list[Any]:
    # As one compiled program: evaluated step by step, it would send each number in it to the device
    # separately, which `jax.transfer_guard` may forbid.
    return jax.jit(functools.partial(_run, program=program, other=other))(*args)


@_call.def_effectful_abstract_eval
def _(*_: Any, program: Any, other: Any) -> tuple[list[Any], Any]:
    del other
    return program.out_avals, program.effects


mlir.register_lowering(_call, mlir.lower_fun(_run, multiple_results=True))


def _batched(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, program: Any, other: Any
) -> tuple[list[Any], list[int | None]]:
    """Map the program, and the one that is differentiated, before either is differentiated."""
    uses_axis = any(getattr(effect, "name", None) == axis.name for effect in program.effects)
    if not uses_axis and all(dim is None for dim in dims):
        out = _bind(args, program, other)
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
        key = other.rankax_key and (other.rankax_key, *dims, axis.size, axis.name, axis.spmd_name)
        out = _bind(args, closed, _Other(mapped(other), key))
    return out, [0] * len(out)


batching.fancy_primitive_batchers[_call] = _batched


def _differentiated(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: Any, other: Any
) -> tuple[list[Any], list[Any]]:
    live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    directions = [tangents[i] for i in live]
    if other is None:
        out, pushed = _linearized(program, primals, live, directions)
    else:
        live_primals = [primals[i] for i in live]
        out, pushed = jax.jvp(of_some(other, primals, live), live_primals, directions)
    return out, [
        tangent if has_tangent(aval) else ad.Zero(aval.to_tangent_aval())
        for aval, tangent in zip(program.out_avals, pushed, strict=True)
    ]


ad.primitive_jvps[_call] = _differentiated


def _linearized(
    program: Any, primals: Sequence[Any], live: Sequence[int], directions: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Split the derivative into a program of the primals, with rules kept, and a linear one."""
    linear: list[Any] = []

    def nonlinear(*primals: Any) -> Any:
        of_live = of_some(functools.partial(_run, program=program), primals, live)
        out, push = jax.linearize(of_live, *(primals[i] for i in live))

        def push_inexact(*tangents: Any) -> list[Any]:
            pairs = zip(program.out_avals, push(*tangents), strict=True)
            return [tangent for aval, tangent in pairs if has_tangent(aval)]

        pushed = jax.make_jaxpr(push_inexact)(*directions)
        linear.append(pushed.jaxpr)
        return out, pushed.consts

    results = _run(*primals, program=keep_rules(jax.make_jaxpr(nonlinear)(*primals)))
    count = len(program.out_avals)
    pushed = iter(evaluate(linear[0], results[count:], *directions))
    return results[:count], [
        next(pushed) if has_tangent(aval) else None for aval in program.out_avals
    ]


def has_tangent(aval: Any) -> bool:
    """Whether numbers of this type have derivatives."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def of_some(
    fun: Callable[..., Any], args: Sequence[Any], positions: Sequence[int]
) -> Callable[..., Any]:
    """Return ``fun`` as a function of its arguments at ``positions``, with the others fixed."""

    def fixed(*some: Any) -> Any:
        merged = list(args)
        for i, x in zip(positions, some, strict=True):
            merged[i] = x
        return fun(*merged)

    return fixed


def _transposed(cotangents: Sequence[Any], *args: Any, program: Any, other: Any) -> list[Any]:
    """Transpose a call that is linear in its unknown arguments, for `jax.linear_transpose`."""
    fun = other or functools.partial(_run, program=program)
    unknown = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    transpose = jax.linear_transpose(of_some(fun, args, unknown), *(args[i].aval for i in unknown))
    results = iter(transpose([ad.instantiate_zeros(ct) for ct in cotangents]))
    return [next(results) if ad.is_undefined_primal(x) else None for x in args]


ad.primitive_transposes[_call] = _transposed


# With `jax_remat3` (JAX 0.12), a checkpoint is undone by the `jvp` of a primitive that JAX then
# evaluates in part, so that everything is stored. Only the rules of a high-level primitive can
# linearize `other` as a whole. Test: ``test_chunked_memory.py`` with ``JAX_REMAT3=1``. Once it is
# the only checkpoint, this may replace the primitive above.


@functools.cache
def _high_level_call() -> Any:
    """Return the class of calls whose derivatives are those of ``other``."""
    hijax: Any = importlib.import_module("jax.experimental.hijax")

    class HighLevelCall(hijax.HiPrim):
        program: Any
        other: Any

        def __init__(self, program: Any, other: Any) -> None:
            self.in_avals = tuple(program.in_avals)
            self.out_aval = list(program.out_avals)
            self.effects = frozenset(program.effects)
            self.params = {"program": program, "other": other}
            super().__init__()

        def expand(self, *args: Any) -> list[Any]:
            return _run(*args, program=self.program)

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            return _batched(axis_data, args, dims, **self.params)

        def jvp(self, primals: Any, tangents: Any) -> Any:
            out, pushed = _differentiated(primals, tangents, **self.params)
            return out, [ad.instantiate_zeros(tangent) for tangent in pushed]

        # Residuals are a tree of arrays: what is static is in its structure, as the keys of a dict.

        def lin(self, nonzero: Any, *primals: Any) -> Any:
            live = [i for i, is_live in enumerate(nonzero) if is_live]
            of_live = of_some(self.other, primals, live)
            out, push = jax.linearize(of_live, *(primals[i] for i in live))
            return out, (push, dict.fromkeys(live)), [has_tangent(aval) for aval in self.out_aval]

        def linearized(self, residuals: Any, *tangents: Any) -> list[Any]:
            push, live = residuals
            pushed = push(*(ad.instantiate_zeros(tangents[i]) for i in live))
            return [
                tangent if has_tangent(aval) else ad.Zero(aval.to_tangent_aval())
                for aval, tangent in zip(self.out_aval, pushed, strict=True)
            ]

        def vjp_fwd(self, nonzero: Any, *primals: Any) -> Any:
            live = [i for i, is_live in enumerate(nonzero) if is_live]
            of_live = of_some(self.other, primals, live)
            out, pull = jax.vjp(of_live, *(primals[i] for i in live))
            return out, (pull, dict.fromkeys(live))

        def vjp_bwd_retval(self, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
            pull, live = residuals
            pulled = dict(
                zip(live, pull([ad.instantiate_zeros(ct) for ct in cotangents]), strict=True)
            )
            return tuple(
                pulled.get(i, ad.Zero(aval.to_tangent_aval()))
                for i, aval in enumerate(self.in_avals)
            )

        def remat(self, trace: Any, *args: Any) -> Any:
            # As a checkpoint of `other`, with the policy of the one around it: what is named in
            # `other` is kept. By default, all of it would be computed again.
            program = jax.make_jaxpr(jax.checkpoint(self.other, policy=trace.policy))(*args)
            (eqn,), consts = program.eqns, program.consts
            out, residuals, recompute = eqn.params["_prim"].remat(trace, *consts, *args)
            return out, residuals, lambda res, *args: recompute(res, *consts, *args)

        def transpose(self, cotangents: Any, *args: Any) -> None:
            unknown = [i for i, x in enumerate(args) if isinstance(x, hijax.GradAccum)]
            of_unknown = of_some(self.other, args, unknown)
            transpose = jax.linear_transpose(of_unknown, *(args[i].aval for i in unknown))
            dense = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
            for i, cotangent in zip(unknown, transpose(dense), strict=True):
                args[i].accum(cotangent)

    return HighLevelCall
