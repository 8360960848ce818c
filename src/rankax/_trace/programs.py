# SPDX-License-Identifier: MIT
"""Traced programs: evaluating one, and the only traversal of the programs inside one.

A primitive keeps the programs that it calls among its parameters: `jax.jit` holds one,
`jax.lax.cond` a tuple of branches, `jax.lax.custom_linear_solve` a NamedTuple. `subprograms` yields
them; `with_subprograms` replaces them. Each container is rebuilt with its own type, because JAX
reads the fields of a NamedTuple by name.

With `jax_remat3` (JAX 0.12), an equation with a checkpoint calls a high-level primitive, an object
that is itself a parameter and has the parameters that count here. `name_and_params` looks into it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import core, lax

from rankax._base.arrays import is_staged, scalar

# They have one operand of floats, and move its numbers.
_MOVES = {
    *("broadcast_in_dim", "copy", "dynamic_slice", "gather", "neg", "reshape", "rev", "slice"),
    *("split", "squeeze", "transpose"),
}

ClosedJaxpr = jax.extend.core.ClosedJaxpr  # from JAX 0.12 on, the same class as `Jaxpr`
Jaxpr = jax.extend.core.Jaxpr
Literal = jax.extend.core.Literal


def evaluate(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluate a program. Every output is an array.

    `jax.core.eval_jaxpr` returns a constant output as the number in the program, which has a dtype
    but no shape.
    """
    outs = core.eval_jaxpr(jaxpr, consts, *args)
    return as_arrays(outs, [v.aval for v in jaxpr.outvars])


def evaluator(eqn: Any, jaxpr: Any, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return an equation as a function."""
    return functools.partial(evaluate, only(eqn, jaxpr, inputs), ())


def only(eqn: Any, jaxpr: Any, inputs: Sequence[Any]) -> Any:
    """Return the program of one equation of ``jaxpr``."""
    return with_variables(jaxpr, inputs, eqn.outvars, eqns=[eqn], effects=eqn.effects)


def with_variables(jaxpr: Any, invars: Sequence[Any], outvars: Any, **changes: Any) -> Any:
    """Return a program without constants, which has these variables and ``changes``."""
    unnamed = {"arg_names": ("",) * len(invars), "result_paths": ("",) * len(outvars)}
    debug_info = jaxpr.debug_info._replace(**unnamed)
    whole = {"constvars": [], "invars": list(invars), "outvars": outvars, **changes}
    return jaxpr.replace(debug_info=debug_info, **whole)


def evaluate_wide(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a program whose arguments may be wider floats than its inputs.

    What only moves or converts numbers takes them as they are, and all else rounds them before. So
    where inputs are converted to wider floats, the transpose rounds nothing.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        free = [var for var in eqn.invars if not isinstance(var, Literal)]
        inputs = [known[var] for var in free]
        if eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            outs = evaluate_wide(inner.jaxpr, inner.consts, list(map(read, eqn.invars)))
        elif free and eqn.primitive.name == "convert_element_type":
            outs = [lax.convert_element_type(inputs[0], eqn.params["new_dtype"])]
        else:
            if eqn.primitive.name not in _MOVES:
                inputs = [_narrowed(*pair) for pair in zip(inputs, free, strict=True)]
            outs = evaluator(eqn, jaxpr, free)(*inputs)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [_narrowed(read(var), var) for var in jaxpr.outvars]


def _narrowed(x: Any, var: Any) -> Any:
    is_wider = hasattr(x, "dtype") and x.dtype != var.aval.dtype
    return lax.convert_element_type(x, var.aval.dtype) if is_wider else x


def as_arrays(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return numbers as arrays of these types, and arrays as they are."""
    return [
        value if isinstance(value, jax.Array) else _as_array(value, aval)
        for value, aval in zip(values, avals, strict=True)
    ]


def _as_array(value: Any, aval: Any) -> jax.Array:
    # In a program, `jnp.asarray` keeps a weak type; outside, it is an implicit transfer.
    return jnp.asarray(value) if is_staged() else scalar(value, aval.dtype)


def name_and_params(eqn: Any) -> tuple[str, dict[str, Any]]:
    """Return what an equation calls, and its parameters."""
    prim = eqn.params.get("_prim")
    if type(prim).__name__ in _HIGH_LEVEL:
        return type(prim).__name__, prim.params
    return eqn.primitive.name, eqn.params


_HIGH_LEVEL = ("RematTraced", "CheckpointName", "HighLevelCall")  # all else is opaque


def with_params(eqn: Any, **changes: Any) -> Any:
    """Return ``eqn`` with other values for some of its parameters."""
    if (params := name_and_params(eqn)[1]) is not eqn.params:
        changes = {"_prim": type(eqn.params["_prim"])(**{**params, **changes})}
    return eqn.replace(params={**eqn.params, **changes})


def subprograms(eqn: Any) -> Iterator[Any]:
    """Yield the jaxpr of each program that an equation calls; of a branch, all of them."""
    for value in name_and_params(eqn)[1].values():
        # Most parameters hold nothing; to flatten them would take most of the time.
        for leaf in jax.tree.leaves(value, is_leaf=_is_leaf) if is_container(value) else [value]:
            if isinstance(leaf, (Jaxpr, ClosedJaxpr)):
                yield leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf


def with_subprograms(eqn: Any, fun: Callable[[Any], Any]) -> Any:
    """Return ``eqn`` with ``fun(jaxpr)`` in place of each program that it calls.

    The same object if ``fun`` returns every jaxpr unchanged.
    """
    changes = {}
    for name, value in name_and_params(eqn)[1].items():
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_leaf)
        # A program among other things may be one of two copies: a primitive of Equinox keeps a
        # function in one parameter, and the structure it was made with in another.
        if not all(isinstance(leaf, (Jaxpr, ClosedJaxpr)) for leaf in leaves):
            continue
        new = [
            mapped_program(fun, leaf) if isinstance(leaf, ClosedJaxpr) else fun(leaf)
            for leaf in leaves
        ]
        if any(a is not b for a, b in zip(new, leaves, strict=True)):
            changes[name] = treedef.unflatten(new)
    return with_params(eqn, **changes) if changes else eqn


def lengths_of_scan(eqn: Any) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many are carried; rows follow.

    A row has one axis fewer inside. The parameters that count them differ between versions of JAX.
    """
    body = eqn.params["jaxpr"].jaxpr

    def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)

    carried = alike(eqn.outvars, body.outvars)
    return alike(eqn.invars, body.invars) - carried, carried


def mapped_program(fun: Callable[[Any], Any], closed: Any) -> Any:
    """Return ``closed`` with ``fun(jaxpr)`` in place of its jaxpr, and the same constants."""
    jaxpr = fun(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def is_container(value: Any) -> bool:
    """Whether ``value`` is a tuple, list, dict or NamedTuple, and not a class with other rules."""
    return type(value) in (tuple, list, dict) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )


def _is_leaf(value: Any) -> bool:
    return not is_container(value)
