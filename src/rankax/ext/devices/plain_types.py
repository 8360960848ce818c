# SPDX-License-Identifier: MIT
"""Derivatives of what one device evaluates, without the mesh in the types of arrays.

Equinox compares the types of the arrays that a closure-converted function gets with those for which
it was converted, and so do the solvers of Lineax, Optimistix and Diffrax. Inside `jax.shard_map`,
types name the mesh, and JAX transposes a program there in another context than that in which it was
linearized. So each derivative of such a program is traced for arrays without a mesh, and JAX sees
one primitive. A derivative evaluates the program anew, as with `jax.checkpoint`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import ad

from rankax.core.base.arrays import has_tangent
from rankax.core.trace.derivatives import RULES, new_primitive, of_some, vmapped_program
from rankax.core.trace.programs import evaluate
from rankax.ext.devices.mesh import no_mesh
from rankax.ext.equations import operations


def compares_types(jaxpr: Jaxpr) -> bool:
    """Whether a program has a linear solve of Lineax, or a derivative rule of Equinox."""
    return any(
        each.name == "linear_solve"
        or (each.name in RULES and "equinox" in str(each.eqn.params["call_jaxpr"].jaxpr.debug_info))
        for each in operations(jaxpr)
    )


def with_plain_types(fun: Callable[..., Any], *args: Any) -> Any:
    """Return ``fun(*args)``, traced and differentiated for arrays without a mesh."""
    leaves, treedef = jax.tree.flatten(args)
    out_trees: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        out, out_tree = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
        out_trees.append(out_tree)
        return out

    outs = _plain.bind(*leaves, program=_traced(flat, leaves))
    return out_trees[0].unflatten(outs)


def _traced(fun: Callable[..., list[Any]], args: Sequence[Any]) -> ClosedJaxpr:
    avals = [jax.typeof(x) for x in args]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
    with no_mesh():
        return jax.make_jaxpr(fun)(*like)


def _run(*args: Any, program: ClosedJaxpr) -> list[Any]:
    return evaluate(program.jaxpr, program.consts, *args)


def _differentiated(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: ClosedJaxpr
) -> tuple[list[Any], list[Any]]:
    live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    moving = [i for i, aval in enumerate(program.out_avals) if has_tangent(aval)]
    fun = functools.partial(_run, program=program)

    def push(*args: Any) -> list[Any]:
        primals, directions = args[: len(tangents)], args[len(tangents) :]
        some = of_some(fun, primals, live)
        pushed = jax.jvp(some, [primals[i] for i in live], list(directions))[1]
        return [pushed[i] for i in moving]

    args = [*primals, *(tangents[i] for i in live)]
    pushed = dict(zip(moving, _plain.bind(*args, program=_traced(push, args)), strict=True))
    zeros = [ad.Zero(aval.to_tangent_aval()) for aval in program.out_avals]
    outs = _plain.bind(*primals, program=program)
    return outs, [pushed.get(i, zero) for i, zero in enumerate(zeros)]


def _transposed(cotangents: Sequence[Any], *args: Any, program: ClosedJaxpr) -> list[Any]:
    unknown = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(args)) if i not in unknown]
    fun = functools.partial(_run, program=program)

    def pull(*values: Any) -> list[Any]:
        fixed = dict(zip(known, values, strict=False))
        of_unknown = of_some(fun, [fixed.get(i) for i in range(len(args))], unknown)
        avals = [program.in_avals[i] for i in unknown]
        return list(jax.linear_transpose(of_unknown, *avals)(list(values[len(known) :])))

    dense = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    values = [*(args[i] for i in known), *dense]
    results = iter(_plain.bind(*values, program=_traced(pull, values)))
    return [next(results) if i in unknown else None for i in range(len(args))]


def _under_vmap(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, program: ClosedJaxpr
) -> tuple[list[Any], list[int | None]]:
    run = functools.partial(_run, program=program)
    closed, out_dims = vmapped_program(axis, run, dims, lambda fun: _traced(fun, args))
    return _plain.bind(*args, program=closed), out_dims


def _types(*_: Any, program: ClosedJaxpr) -> tuple[list[Any], Any]:
    return program.out_avals, program.effects


_plain = new_primitive("rankax_plain", _run, _differentiated, _transposed, _under_vmap, _types)
