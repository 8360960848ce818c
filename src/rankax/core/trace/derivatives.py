# SPDX-License-Identifier: MIT
"""Give a loop the derivative of another loop, and keep derivative rules correct inside loops.

The loop that evaluates best is often not the one whose derivative needs least memory. Then a call
is ``call_with_derivative_of(other, fun, ...)``: JAX evaluates ``fun``, and differentiates
``other``. That is what `jax.custom_jvp` is for, but it has two faults, which give wrong numbers or
make programs fail:

* When JAX before 0.12 linearizes a `jax.lax.scan`, it looks for values that are the same in every
  step, and evaluates part of the body again with the body of each `jax.custom_jvp` function in
  place of the call. The rule is lost, and ``jax.jvp(jax.grad(f))`` is the derivative of that body.
  `keep_rules` prevents it. The programs of loops over chunks and of the body of a scan pass through
  it first. Test: ``tests/loop/test_custom_rules.py``. It may go with
  JAX 0.11, the last version with this fault.
* When `jax.vmap` maps such a call, its rule is differentiated first and mapped second (all
  versions). A `jax.custom_vjp` function inside can then no longer be mapped, and JAX raises "can't
  apply forward-mode autodiff (jvp) to a custom_vjp function". `call_with_derivative_of` maps first.
  Test: ``test_custom_rules.py::test_grad_of_vmap_of_a_custom_vjp``.

Both use one primitive, because JAX does not look inside a primitive that it does not know. The
compiled program shows no trace of it. What JAX must see inside, it sees all the same: `_Primitive`
shows the program to `checkify`, outputs without a tangent or a mapped axis are reported as such,
and a program with a `jax.Ref` is not hidden at all. Test: ``tests/trace/test_transformations.py``.

Rules cannot be compared, so a differentiated eager call of a kernel with rules reuses no compiled
loop (`derivatives_key` of `core/loop/eager_programs.py`).
"""

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters import ad, batching, mlir

from rankax.core.base.arrays import is_plain, is_ref
from rankax.core.trace import programs

_FORGETS = jax.__version_info__ < (0, 12)
RULES = ("custom_jvp_call", "custom_vjp_call")


def call_with_derivative_of(
    other: Callable[..., Any], fun: Callable[..., Any], *args: Any, key: Hashable = None
) -> Any:
    """Return ``fun(*args)`` with the derivatives of ``other``.

    Equivalent to ``jax.custom_jvp(fun)(*args)`` with the rule ``jax.jvp(other, ...)``, from which
    the values come, too, where the result is differentiated.

    Both take and return the same pytrees of arrays, and close over no array. ``other`` is called
    only if the result is differentiated; an argument without a tangent is a constant there.

    A program with a `jax.Ref` is ``other`` itself: JAX writes such programs anew before it compiles
    them, and has no rule for a primitive that it does not know.

    With a ``key``, programs are compared (`core/loop/eager_programs.py`): if the program of ``fun``
    and the key are equal, so is the program of ``other``.
    """
    if is_plain():
        return fun(*args)
    leaves, treedef = jax.tree.flatten(args)
    out_trees: list[Any] = []

    def flat(fun: Callable[..., Any], *leaves: Any) -> list[Any]:
        out, out_tree = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
        out_trees.append(out_tree)
        return out

    program = jax.make_jaxpr(functools.partial(flat, fun))(*leaves)
    if has_refs([*program.jaxpr.constvars, *program.jaxpr.invars], program.effects):
        return other(*args)
    outs = _bind(leaves, program, _Other(functools.partial(flat, other), key, len(leaves)))
    # Differentiated by JAX 0.10, the call hands out a constant output as a number.
    return out_trees[0].unflatten(programs.as_arrays(outs, program.out_avals))


@jax.custom_jvp
def with_derivative(value: Any, like: Any) -> Any:  # noqa: ARG001
    """Return an array with the derivative of another."""
    return value


# Zeros stay symbolic, for a `jax.custom_vjp` of the kernel: it refuses a tangent, even of zeros.
@functools.partial(with_derivative.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    return with_derivative(*primals), tangents[1]  # which has a derivative, too


def without_derivative(tree: Any, words: str) -> Any:
    """Return arrays whose derivative is refused."""
    refused = jax.custom_jvp(lambda tree: tree)

    @refused.defjvp
    def _(*_: Any) -> Any:
        raise ValueError(words)

    return refused(tree)


def _keep_rules(closed: ClosedJaxpr) -> Any:
    """Return a program equal to ``closed`` whose rules JAX does not forget.

    The same object if it has no rules.
    """
    return closed if is_plain() else programs.mapped_program(_with_kept_rules, closed)


keep_rules = _keep_rules if _FORGETS else programs.unchanged


def _with_kept_rules(jaxpr: Jaxpr) -> Any:
    """Put a call of our primitive around each equation with a rule, at any depth."""

    def kept(eqn: JaxprEqn) -> Any:
        if eqn.primitive.name not in RULES or has_refs(eqn.invars, eqn.effects):
            return programs.with_subprograms(eqn, _with_kept_rules)
        inputs = list({v: None for v in eqn.invars if not isinstance(v, Literal)})
        return call_of(eqn, inputs, programs.only(eqn, jaxpr, inputs))

    return programs.with_equations(jaxpr, kept)


def has_refs(inputs: Sequence[Any], effects: Any) -> bool:
    """Whether a program with these inputs and effects takes a `jax.Ref`, or makes one."""
    return any(map(is_ref, inputs)) or makes_ref(effects)


def makes_ref(effects: Any) -> bool:
    """Whether a program with these effects makes a `jax.Ref`."""
    return any(isinstance(effect, _effect_of_new_ref()) for effect in effects)


def makes_constant_ref(jaxpr: Jaxpr) -> bool:
    """Whether a program makes a `jax.Ref` whose first value does not depend on its inputs."""
    known = {*jaxpr.constvars, *jaxpr.invars}
    for eqn in jaxpr.eqns:
        depends = any(not isinstance(v, Literal) and v in known for v in eqn.invars)
        if makes_ref(eqn.effects) and not (depends and any(map(is_ref, eqn.outvars))):
            return True  # or one inside a program that it calls
        known |= {*eqn.outvars} if depends else set()
    return False


def writes_ref(effects: Any) -> bool:
    """Whether a program with these effects writes a `jax.Ref` of its caller.

    No public class tells, so the names do. Test: ``tests/loop/test_refs.py``.
    """
    return any(type(effect).__name__ in ("WriteEffect", "AccumEffect") for effect in effects)


@functools.cache
def _effect_of_new_ref() -> type:
    """Return the class of the effect of a program that makes a `jax.Ref`; it has no public name."""
    (effect,) = jax.make_jaxpr(lambda x: jax.new_ref(x)[...])(np.float32(0)).effects
    return type(effect)


def call_of(eqn: JaxprEqn, inputs: Sequence[Any], jaxpr: Jaxpr) -> Any:
    """Return an equation like ``eqn`` in which our primitive calls ``jaxpr``.

    The constants of ``jaxpr`` become its first inputs.
    """
    program = programs.with_variables(jaxpr, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
    params = {"call_jaxpr": ClosedJaxpr(program, ()), "other": None}
    return eqn.replace(primitive=_call, invars=list(inputs), params=params)


class _Other:
    """A function that defines a derivative, and a key for everything else that it depends on."""

    def __init__(self, fun: Callable[..., Any], key: Hashable, inputs: int) -> None:
        self.fun, self.rankax_key, self.inputs = fun, key, inputs

    def __call__(self, *args: Any) -> Any:
        return self.fun(*args)


# The call evaluates `call_jaxpr`. Its derivatives come from `other`, or without one from
# `call_jaxpr`, in which every rule is kept.


def _bind(args: Sequence[Any], program: Any, other: Any) -> list[Any]:
    if other is None or not getattr(jax.config, "jax_remat3", False) or _FORGETS:
        return _call.bind(*args, call_jaxpr=program, other=other)
    return _high_level_call()(program, other)(*args)


class _Primitive(jax.extend.core.Primitive):
    """A primitive into which `jax.experimental.checkify` looks, as into a call of JAX.

    It looks into each primitive with a parameter ``call_jaxpr``: instead of that program, it hands
    over a function that takes and returns errors as well.
    """

    multiple_results = True

    def bind(self, *args: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        if not subfuns:
            return super().bind(*args, **params)
        return _checked(subfuns[0].call_wrapped, args, **params)


def _checked(fun: Any, args: Sequence[Any], other: Any = None, **_: Any) -> list[Any]:
    """Call a program with errors, whose other outputs keep their derivatives."""
    closed = jax.make_jaxpr(fun)(*args)
    if other is None:
        return _run(*args, call_jaxpr=keep_rules(closed))
    before = len(args) - other.inputs

    def differentiated(*args: Any) -> list[Any]:
        outs = other(*args[before:])
        checked = _run(*map(lax.stop_gradient, args), call_jaxpr=closed)
        return [*checked[: len(checked) - len(outs)], *outs]

    return _bind(args, closed, _Other(differentiated, None, len(args)))


def new_primitive(
    name: str, run: Any, differentiate: Any, transpose: Any, batch: Any, types: Any
) -> Any:
    """Return a primitive.

    Parameters
    ----------
    name : str
    run : callable
        Evaluates it, from arrays and parameters to a list.
    differentiate, transpose, batch : callable
        Its rules, as JAX wants them.
    types : callable
        Maps the types of the arrays, and the parameters, to result types and effects.
    """
    primitive: Any = _Primitive(name)
    # With `jax_remat3`, a program with a checkpoint is high-level, and expanded before it is
    # lowered.
    primitive.to_lojax = run
    # As one compiled program: evaluated step by step, it would send each number in it to the device
    # separately, which `jax.transfer_guard` may forbid.
    primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(run, **params))(*args))
    primitive.def_effectful_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    ad.primitive_jvps[primitive] = differentiate
    ad.primitive_transposes[primitive] = transpose
    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


def _run(*args: Any, call_jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    return programs.evaluate(call_jaxpr.jaxpr, call_jaxpr.consts, *args)


def _types(*_: Any, call_jaxpr: ClosedJaxpr, **__: Any) -> tuple[list[Any], Any]:
    return call_jaxpr.out_avals, call_jaxpr.effects


def uses_axis(axis: Any, *programs: Any) -> bool:
    """Whether a program has a collective over this axis of a `jax.vmap`."""
    effects = (effect for program in programs for effect in program.effects)
    return any(getattr(effect, "name", None) == axis.name for effect in effects)


def vmapped(axis: Any, fun: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Return a function mapped along this axis of a `jax.vmap`."""
    return jax.vmap(fun, tuple(in_axes), out_axes, axis.name, axis.size, axis.spmd_name)


def vmapped_program(
    axis: Any, fun: Callable[..., list[Any]], dims: Sequence[Any], trace: Callable[[Any], Any]
) -> tuple[ClosedJaxpr, list[int | None]]:
    """Return the program of a function mapped along this axis, and where its outputs have it."""
    out_dims: list[int | None] = []

    def run(*items: Any) -> list[Any]:
        outs = fun(*items)
        # An output that is the same for all stays that: a caller may have said so in `out_axes`.
        out_dims[:] = [None if getattr(out, "batch_dim", None) is None else 0 for out in outs]
        return outs

    closed = trace(vmapped(axis, run, dims, 0))
    if None in out_dims:
        closed = trace(vmapped(axis, run, dims, out_dims[:]))
    return closed, out_dims


def _under_vmap(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call_jaxpr: ClosedJaxpr, other: Any
) -> tuple[list[Any], list[int | None]]:
    """Map the program, and the one that is differentiated, before either is differentiated."""
    if all(dim is None for dim in dims) and not uses_axis(axis, call_jaxpr):
        out = _bind(args, call_jaxpr, other)
        return out, [None] * len(out)

    run = functools.partial(_run, call_jaxpr=call_jaxpr)
    closed, out_dims = vmapped_program(axis, run, dims, lambda fun: jax.make_jaxpr(fun)(*args))
    if other is None:
        return _run(*args, call_jaxpr=keep_rules(closed)), out_dims
    key = other.rankax_key and (other.rankax_key, *dims, axis.size, axis.name, axis.spmd_name)
    of_all = _Other(vmapped(axis, other, dims, out_dims), key, len(args))
    return _bind(args, closed, of_all), out_dims


def _differentiated(
    primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: ClosedJaxpr, other: Any
) -> tuple[list[Any], list[Any]]:
    fun = other or functools.partial(_run, call_jaxpr=call_jaxpr)
    live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    moves = [False] * len(call_jaxpr.out_avals)

    def push(*args: Any) -> list[Any]:
        primals, directions = list(args[: len(tangents)]), list(args[len(tangents) :])
        of_live = _noting(of_some(fun, primals, live), moves)
        out, pushed = jax.jvp(of_live, [primals[i] for i in live], directions)
        return out + [tangent for tangent, is_moved in zip(pushed, moves, strict=True) if is_moved]

    args = *primals, *(tangents[i] for i in live)
    if other is None:
        results = _run(*args, call_jaxpr=keep_rules(jax.make_jaxpr(push)(*args)))
    else:
        results = push(*args)
    pushed = iter(results[len(moves) :])
    return results[: len(moves)], [
        next(pushed) if is_moved else ad.Zero(aval.to_tangent_aval())
        for aval, is_moved in zip(call_jaxpr.out_avals, moves, strict=True)
    ]


def _noting(fun: Callable[..., Any], moves: list[bool]) -> Callable[..., list[Any]]:
    """Return ``fun``, which notes in ``moves`` which outputs have tangents when it is pushed.

    `jax.jvp` itself hands out arrays of zeros. A rule with ``symbolic_zeros`` would take them for
    tangents.
    """
    noted = jax.custom_jvp(lambda *outs: outs)

    def rule(outs: Any, tangents: Any) -> Any:
        zero = jax.custom_derivatives.SymbolicZero
        moves[:] = [not isinstance(tangent, zero) for tangent in tangents]
        return outs, tangents

    noted.defjvp(rule, symbolic_zeros=True)
    return lambda *args: list(noted(*fun(*args)))


def of_some(fun: Callable[..., Any], args: Sequence[Any], positions: Sequence[int]) -> Any:
    """Return ``fun`` as a function of its arguments at ``positions``, with the others fixed."""

    def fixed(*some: Any) -> Any:
        merged = list(args)
        for i, x in zip(positions, some, strict=True):
            merged[i] = x
        return fun(*merged)

    return fixed


def _transposed(
    cotangents: Sequence[Any], *args: Any, call_jaxpr: ClosedJaxpr, other: Any
) -> list[Any]:
    """Transpose a call that is linear in its unknown arguments, for `jax.linear_transpose`."""
    fun = other or functools.partial(_run, call_jaxpr=call_jaxpr)
    unknown = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    transpose = jax.linear_transpose(of_some(fun, args, unknown), *(args[i].aval for i in unknown))
    results = iter(transpose([ad.instantiate_zeros(ct) for ct in cotangents]))
    return [next(results) if ad.is_undefined_primal(x) else None for x in args]


_call = new_primitive("rankax_call", _run, _differentiated, _transposed, _under_vmap, _types)


def primitive_of_program(name: str, program_of: Any, batch: Any, types: Any) -> Any:
    """Return a primitive that evaluates the program of its parameters, and is differentiated so."""

    def of_program(fun: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **params: fun(*args, call_jaxpr=program_of(**params), other=None)

    run, differentiate, transpose = map(of_program, (_run, _differentiated, _transposed))
    return new_primitive(name, run, differentiate, transpose, batch, types)


# With `jax_remat3` (JAX 0.12), a checkpoint is undone by the `jvp` of a primitive that JAX then
# evaluates in part, so that everything is stored. Only the rules of a high-level primitive can
# linearize `other` as a whole. Test: ``test_chunked_memory.py`` with ``JAX_REMAT3=1``. Once it is
# the only checkpoint, this may replace the primitive above.


@functools.cache
def _high_level_call() -> Any:
    """Return the class of calls that have the derivatives of ``other``."""
    hijax: Any = importlib.import_module("jax.experimental.hijax")

    class HighLevelCall(hijax.HiPrim):
        call_jaxpr: ClosedJaxpr
        other: Any

        def __init__(self, call_jaxpr: ClosedJaxpr, other: Any) -> None:
            self.in_avals = tuple(call_jaxpr.in_avals)
            self.out_aval = list(call_jaxpr.out_avals)
            self.effects = frozenset(call_jaxpr.effects)
            self.params = {"call_jaxpr": call_jaxpr, "other": other}
            super().__init__()

        def expand(self, *args: Any) -> list[Any]:
            return _run(*args, call_jaxpr=self.call_jaxpr)

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            return _under_vmap(axis_data, args, dims, **self.params)

        def jvp(self, primals: Any, tangents: Any) -> Any:
            return _differentiated(primals, tangents, **self.params)

        lin, linearized = hijax.linearize_from_jvp

        # Residuals are a tree of arrays: what is static is in its structure, as the keys of a dict.
        def vjp_fwd(self, nonzero: Any, *primals: Any) -> Any:
            live = [i for i, is_live in enumerate(nonzero) if is_live]
            of_live = of_some(self.other, primals, live)
            out, pull = jax.vjp(of_live, *(primals[i] for i in live))
            return out, (pull, dict.fromkeys(live))

        def vjp_bwd(self, residuals: Any, cotangents: Any, *args: Any) -> None:
            pull, live = residuals
            dense = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
            for i, cotangent in zip(live, pull(dense), strict=True):
                args[i].accum(cotangent)

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
            pull = jax.linear_transpose(of_unknown, *(args[i].aval for i in unknown))
            self.vjp_bwd((pull, unknown), cotangents, *args)

    return HighLevelCall
