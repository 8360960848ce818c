# SPDX-License-Identifier: MIT
"""Single equations of a program: what they call, how they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from rankax._trace.programs import ClosedJaxpr, lengths_of_scan, name_and_params, subprograms
from rankax._trace.work import STEPS_OF_WHILE, cost

RULES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_linear_solve"}


def has_rule(eqn: Any) -> bool:
    """Whether an equation calls a function with its own derivative rule."""
    name, params = name_and_params(eqn)
    return name in RULES or params.get("other") is not None


def called(eqn: Any, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the program that an equation calls, and its inputs among those of the equation."""
    if eqn.primitive.name == "custom_linear_solve":
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        first = lengths.matvec + lengths.vecmat
        return solve, [*values[first : first + lengths.solve], *values[sum(lengths) :]]
    held = [value for value in eqn.params.values() if isinstance(value, ClosedJaxpr)]
    closed = held[0] if held else ClosedJaxpr(next(subprograms(eqn)), ())
    return closed, list(values)


def split_loop(eqn: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
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


def is_minor(eqn: Any, around: int | None) -> bool:
    """Whether a step of a loop costs less than the rest of a step of the `while` around it.

    Such a loop stays whole, and all lanes go through it together: to cut it, and so the loop
    around, costs more. diffrax saves outputs by such a loop in each step of its solver.
    """
    if around is None:
        return False
    of_step = cost(eqn.params["body_jaxpr"].jaxpr)
    return of_step < around - STEPS_OF_WHILE * of_step


def harmed(eqn: Any) -> bool:
    """Whether arbitrary inputs may do harm: an error that is raised, or a loop without end."""
    name = eqn.primitive.name
    return (
        name.endswith("callback")
        or name in ("while", "call_hi_primitive")  # JAX 0.12 hides a program in the second
        or any(harmed(inner) for program in subprograms(eqn) for inner in program.eqns)
    )


def take_rows(place: Any, *rows: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(x, place, keepdims=False) for x in rows]
