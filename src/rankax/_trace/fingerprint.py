# SPDX-License-Identifier: MIT
"""Whether two traced programs do the same when they are evaluated.

JAX has no equality of programs, and their text leaves things out. Here two programs have equal
`fingerprint` only where they are the same equation by equation: the same primitives, the same
variables in the same places (counted in order of appearance), equal shapes, dtypes, parameters and
contexts, and the same bits of every number. What cannot be compared with certainty has none at all:

* programs with effects, and functions among the parameters, such as a callback: what they do may
  change while they stay the same object;
* arrays inside a loop or a branch, which `opened` leaves there, and arrays among the parameters;
* objects that are not JAX's own, for their ``==`` may overlook a difference, as that of 1 and True.

Rules for derivatives are left out, for an evaluation does not use them, and are made anew by each
trace. `without_rules` is the program that can be kept: it holds no function of the caller.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Hashable
from typing import Any

import jax
import jax.extend
import numpy as np

from rankax._trace.derivatives import RULES, call_of

__all__ = ["Unknown", "fingerprint", "opened", "without_rules"]

Jaxpr = jax.extend.core.Jaxpr
ClosedJaxpr = jax.extend.core.ClosedJaxpr
Literal = jax.extend.core.Literal


class Unknown(Exception):  # noqa: N818  (it says no, which is no error)
    """Raised for a program that cannot be compared."""


def fingerprint(closed: Any) -> Hashable:
    """Return what is equal for programs that do the same with equal constants and inputs."""
    if closed.effects:
        raise Unknown
    found = _of_program(closed.jaxpr)
    try:
        hash(found)
    except TypeError:
        raise Unknown from None
    return found


def _of_program(jaxpr: Any) -> Hashable:
    numbers: dict[Any, int] = {}

    def defined(variable: Any) -> Hashable:
        numbers[variable] = len(numbers)
        return variable.aval

    def used(atom: Any) -> Hashable:
        return _of_literal(atom) if isinstance(atom, Literal) else numbers[atom]

    inputs = tuple(defined(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    body: list[Hashable] = []
    for eqn in jaxpr.eqns:
        params = _of_params(eqn)
        arguments = tuple(map(used, eqn.invars))
        results = tuple(map(defined, eqn.outvars))
        body.append((eqn.primitive, arguments, results, params, eqn.ctx))
    outputs = tuple(map(used, jaxpr.outvars))
    return len(jaxpr.constvars), inputs, tuple(body), outputs


def _of_literal(literal: Any) -> Hashable:
    if isinstance(literal.val, jax.Array):  # reading it might wait for a device
        raise Unknown
    # By bits, for NaN differs from itself, and -0.0 does not from 0.0.
    value = np.asarray(literal.val)
    return Literal, literal.aval, value.dtype, value.tobytes()


def _of_params(eqn: Any) -> Hashable:
    if eqn.primitive.name in RULES:
        return _of_value(eqn.params["call_jaxpr"])
    left_out = _DERIVATIVES_ONLY.get(eqn.primitive.name)
    return tuple((name, _of_value(value)) for name, value in eqn.params.items() if name != left_out)


# Parameters that say how a derivative is found; the last one is of our own call.
_DERIVATIVES_ONLY = {
    **dict.fromkeys(("checkpoint", "remat", "remat2"), "policy"),
    "rankax_call": "other",
}

_PLAIN = (type(None), bool, int, str, bytes, np.dtype, enum.Enum, type)


def _of_value(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value  # True is not 1
    if isinstance(value, (float, complex)):
        number = complex(value)
        return type(value), struct.pack("dd", number.real, number.imag)
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if isinstance(value, ClosedJaxpr):
        if value.consts:
            raise Unknown
        return _of_program(value.jaxpr)
    if isinstance(value, Jaxpr):
        return _of_program(value)
    if _is_known(value):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_of_value, value))
    if isinstance(value, dict):
        return dict, tuple((_of_value(k), _of_value(v)) for k, v in value.items())
    raise Unknown


def _is_known(value: Any) -> bool:
    """Whether this is an object of JAX's, whose ``==`` says all about it."""
    kind = type(value)
    if isinstance(value, _MESHES) or kind.__name__ == "PRNGImpl":  # functions of JAX, by name
        return True
    if callable(value) or isinstance(value, (jax.Array, np.ndarray, tuple, list, dict)):
        return False
    return kind.__module__.partition(".")[0] in ("jax", "jaxlib")


_MESHES = (jax.sharding.Mesh, jax.sharding.AbstractMesh)  # callable, as decorators


# Arrays inside a program become its constants.


def opened(closed: Any) -> Any:
    """Return a program in which calls of `jax.jit` hold no arrays, for they are its own constants.

    Unchanged, to the object, where they hold none. Arrays inside a loop or a branch stay.
    """
    found: dict[Any, Any] = {}  # the value of each variable; a call may be made twice
    eqns = [_opened_call(eqn, found) for eqn in closed.jaxpr.eqns]
    if not found:
        return closed
    jaxpr = closed.jaxpr.replace(constvars=[*closed.jaxpr.constvars, *found], eqns=eqns)
    return ClosedJaxpr(jaxpr, [*closed.consts, *found.values()])


def _opened_call(eqn: Any, found: dict[Any, Any]) -> Any:
    if eqn.primitive.name not in ("jit", "pjit") or not _is_plain(eqn.params):
        return eqn
    inner = opened(eqn.params["jaxpr"])
    if not inner.consts:
        return eqn
    constvars = list(inner.jaxpr.constvars)
    found.update(zip(constvars, inner.consts, strict=True))
    return call_of(eqn, inner.jaxpr, [*constvars, *eqn.invars])


def _is_plain(params: dict[str, Any]) -> bool:
    """Whether a call of `jax.jit` says nothing of devices."""
    placed = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    asked = [x for name in placed for x in params.get(name, ())]
    return all(x is None or type(x).__name__ == "UnspecifiedValue" for x in asked)


def without_rules(jaxpr: Any) -> Any:
    """Return a program without constants, and without rules for derivatives at any depth."""
    # Newer versions of JAX keep the constants in the jaxpr, but not with variables given anew.
    eqns = [_without_rule(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(constvars=list(jaxpr.constvars), eqns=eqns)


def _without_rule(eqn: Any) -> Any:
    if eqn.primitive.name in RULES:
        return call_of(eqn, without_rules(eqn.params["call_jaxpr"].jaxpr), eqn.invars)
    params = {name: _param_without_rules(value) for name, value in eqn.params.items()}
    if left_out := _DERIVATIVES_ONLY.get(eqn.primitive.name):
        params[left_out] = None
    return eqn.replace(params=params)


def _param_without_rules(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(without_rules(value.jaxpr), value.consts)
    if isinstance(value, Jaxpr):
        return without_rules(value)
    if isinstance(value, tuple) and any(isinstance(x, (ClosedJaxpr, Jaxpr)) for x in value):
        return tuple(map(_param_without_rules, value))
    return value
