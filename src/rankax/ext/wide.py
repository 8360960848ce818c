# SPDX-License-Identifier: MIT
"""Programs of narrow floats, whose transposes round nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from rankax.core.trace.programs import evaluate_by

# They have one operand of floats, and move its numbers.
_MOVES = {
    *("broadcast_in_dim", "copy", "dynamic_slice", "gather", "neg", "reshape", "rev", "slice"),
    *("split", "squeeze", "transpose"),
}


def evaluate_wide(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a program whose arguments may be wider floats than its inputs.

    What only moves or converts numbers takes them as they are, and all else rounds them before. So
    where inputs are converted to wider floats, the transpose rounds nothing.
    """
    outs = evaluate_by(_wide_step, jaxpr, [*consts, *args])
    return list(map(_narrowed, outs, jaxpr.outvars))


def _wide_step(
    fun: Callable[..., Any], eqn: JaxprEqn, free: list[Any], inputs: list[Any]
) -> list[Any]:
    if free and eqn.primitive.name == "convert_element_type":
        return [lax.convert_element_type(inputs[0], eqn.params["new_dtype"])]
    if eqn.primitive.name not in _MOVES:
        inputs = list(map(_narrowed, inputs, free))
    return fun(*inputs)


def _narrowed(x: Any, var: Any) -> Any:
    is_wider = hasattr(x, "dtype") and x.dtype != var.aval.dtype
    return lax.convert_element_type(x, var.aval.dtype) if is_wider else x
