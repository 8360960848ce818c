# SPDX-License-Identifier: MIT
"""What features know of the equations of a program: what they call, what they cost.

`operations` has each equation, also those of loops, branches and called functions, with how
often one evaluation of the program runs it, and which of its inputs depend on the item.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from rankax.core.trace.derivatives import RULES
from rankax.core.trace.programs import name_and_params, subprograms

STEPS_OF_WHILE = 16  # assumed
_LOOPS = ("scan", "while")
FUNCTIONS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh"),
    *("cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc"),
    *("exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic"),
    *("pow", "sin", "sinh", "tan", "tanh"),
}

SUMS = ("reduce_sum", "reduce_max", "reduce_min")
LAPACK = {
    *("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu"),
    *("ormqr", "qr", "schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
}
LIBRARIES = {*LAPACK, "fft", "lu_pivots_to_permutation", "sort", "top_k"}
CALLS = {"checkpoint", "closed_call", "jit", "pjit", "remat", "remat2"}
WITH_RULE = {*RULES, "custom_linear_solve"}  # with a derivative rule of its own


class Operation(NamedTuple):
    """One equation of a program, or of a program inside it."""

    name: str
    eqn: Any  # JAX's own type does not know the shapes of its variables
    times: int  # how often one evaluation runs it
    varying: tuple[bool, ...]  # which of its inputs depend on the item
    is_loop: bool
    calls: bool  # another program, whose operations come next


def operations(jaxpr: Jaxpr, moving: set[Any] | None = None, times: int = 1) -> list[Operation]:
    """Return all operations of the program of an item; of a branch, those of all programs.

    ``moving``: the inputs that depend on the item; by default all.
    """
    moving, found = set(jaxpr.invars) if moving is None else moving, list[Operation]()
    for eqn in jaxpr.eqns:
        name, params = name_and_params(eqn)
        varying = tuple([not isinstance(v, Literal) and v in moving for v in eqn.invars])
        programs = list(subprograms(eqn))
        is_loop = name in _LOOPS
        found.append(Operation(name, eqn, times, varying, is_loop, bool(programs)))
        if any(varying):
            moving.update(eqn.outvars)
        steps = times * params.get("length", STEPS_OF_WHILE) if is_loop else times
        for program in programs:
            found += operations(program, _inputs_that_vary(eqn, program, varying), steps)
    return found


def _inputs_that_vary(eqn: JaxprEqn, program: Any, varying: Sequence[bool]) -> set[Any]:
    """Return the inputs of a called program that depend on the item; all if it is not clear."""
    if not any(varying):
        return set()
    if len(program.invars) != len(varying):
        return set(program.invars)
    flags = list(varying)
    if eqn.primitive.name == "scan":  # what is carried may depend on it after one step
        consts, carried = lengths_of_scan(eqn)
        flags[consts : consts + carried] = [True] * carried
    return {v for v, varies in zip(program.invars, flags, strict=True) if varies}


def of_item(jaxpr: Jaxpr) -> list[Operation]:
    """Return the operations that depend on the item."""
    return [each for each in operations(jaxpr) if any(each.varying) and each.eqn.outvars]


def bytes_of_item(jaxpr: Jaxpr) -> int:
    """Return the bytes of all inputs of an item, and of all values that it computes."""
    found = [each.eqn.outvars for each in of_item(jaxpr) if each.is_loop or not each.calls]
    return sum(map(bytes_of, itertools.chain(jaxpr.invars, jaxpr.outvars, *found)))


def bytes_of(variable: Any) -> int:
    """Return the bytes of a value in a program."""
    aval = variable.aval
    return aval.size * getattr(aval.dtype, "itemsize", 1) if hasattr(aval, "size") else 0


def numbers_of(eqn: Any) -> int:
    """Return about how many numbers an equation computes."""
    return max(map(_size, (*eqn.invars, *eqn.outvars)), default=0)


def cost(eqns: Sequence[JaxprEqn], of: Callable[[Any], int] = numbers_of) -> int:
    """Return the sum of what equations cost; ``of``: one that calls no program."""
    total = 0
    for eqn in eqns:
        name, params = name_and_params(eqn)
        if inside := [cost(program.eqns, of) for program in subprograms(eqn)]:
            steps = params.get("length", STEPS_OF_WHILE) if name in _LOOPS else 1
            total += steps * sum(inside)
        else:
            total += of(eqn)
    return total


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def lengths_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many are carried; rows follow.

    A row has one axis fewer inside. The parameters that count them differ between versions of JAX.
    """
    body = eqn.params["jaxpr"].jaxpr

    def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)

    carried = alike(eqn.outvars, body.outvars)
    return alike(eqn.invars, body.invars) - carried, carried


def split_loop(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split the inputs of a loop.

    For a `while`: the constants of its condition, those of its body, the carry. For a `scan`: its
    constants, the carry, the rows.
    """
    if eqn.primitive.name == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    else:
        first, second = lengths_of_scan(eqn)
    end = first + second
    return list(values[:first]), list(values[first:end]), list(values[end:])


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a function with its own derivative rule."""
    name, params = name_and_params(eqn)
    return name in WITH_RULE or params.get("other") is not None
