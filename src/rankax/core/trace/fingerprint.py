# SPDX-License-Identifier: MIT
"""Whether two traced programs compute the same values.

JAX defines no equality of programs, and the text of a program omits details: two functions with the
same name look the same. Here two programs have equal fingerprints only if they agree equation by
equation: the same primitives, the same variables in the same places (numbered in order of
appearance), equal shapes, dtypes, parameters and contexts, and the same bits of every number. A
program that cannot be compared with certainty has no fingerprint:

* a program with effects, or with a function among its parameters, such as a callback: what a
  function does may change while it stays the same object;
* a program with arrays inside a loop or a branch, or among its parameters. `opened` moves arrays
  out of calls of `jax.jit` only; to move them out of every primitive, each would have to be known;
* a program with parameters of classes outside JAX, whose ``==`` may ignore a difference, such as
  that between 1 and True.

Derivative rules are left out: evaluation does not use them, and each trace makes new ones.
`without_rules` is the program to keep, because it holds no function of the caller.

A program that is differentiated has equal derivatives only if `derivatives_key` is equal, too.
Rules are functions, so they cannot be compared. The rules of our loops can, because they follow
from the program and a key. `without_constants` is the program to keep then.
"""

import enum
import functools
import struct
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.extend.random
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from rankax.core.trace import programs
from rankax.core.trace.derivatives import RULES, call_of


class Unknown(Exception):  # noqa: N818  (an answer, not an error)
    """Raised for a program that cannot be compared."""


class UnknownRule(Unknown):
    """Raised because a derivative rule of the caller cannot be compared."""


def fingerprint(closed: ClosedJaxpr) -> Hashable:
    """Return a key: programs with equal keys map equal constants and inputs to equal outputs."""
    if closed.effects:
        raise Unknown
    key = _of_program(closed.jaxpr, _refused)
    try:
        hash(key)
    except TypeError:
        raise Unknown from None
    return key


def _refused(_: Any) -> Hashable:
    raise Unknown


_Other = Callable[[Any], Hashable]


def _of_program(jaxpr: Jaxpr, other: _Other) -> Hashable:
    numbers: dict[Any, int] = {}

    def defined(variable: Any) -> Hashable:
        numbers[variable] = len(numbers)
        return variable.aval

    def used(atom: Any) -> Hashable:
        return _of_literal(atom, other) if isinstance(atom, Literal) else numbers[atom]

    inputs = tuple(defined(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    body: list[Hashable] = []
    for eqn in jaxpr.eqns:
        params = _of_params(eqn, other)
        arguments = tuple(map(used, eqn.invars))
        results = tuple(map(defined, eqn.outvars))
        body.append((eqn.primitive, arguments, results, params, eqn.ctx))
    outputs = tuple(map(used, jaxpr.outvars))
    return len(jaxpr.constvars), inputs, tuple(body), outputs


def _of_literal(literal: Any, other: _Other) -> Hashable:
    if isinstance(literal.val, jax.Array):  # reading it might wait for a device
        return other(literal.val)
    # Compared by bits, because NaN differs from itself and -0.0 equals 0.0.
    value = np.asarray(literal.val)
    return Literal, literal.aval, value.dtype, value.tobytes()


def _of_params(eqn: JaxprEqn, other: _Other) -> Hashable:
    kind, params = programs.name_and_params(eqn)
    if kind in RULES:
        return key_of_value(params["call_jaxpr"], other)
    left_out = "callback" if kind == "debug_callback" else _DERIVATIVES_ONLY.get(kind)
    kept = (
        (name, key_of_value(value, other)) for name, value in params.items() if name != left_out
    )
    return kind, *kept


_OWN_CALLS = ("rankax_call", "HighLevelCall")

# Parameters that define a derivative only.
_DERIVATIVES_ONLY = {
    **dict.fromkeys(("checkpoint", "remat", "remat2", "RematTraced"), "policy"),
    **dict.fromkeys(_OWN_CALLS, "other"),
}

PLAIN = (type(None), bool, int, str, bytes, np.dtype, enum.Enum, type)


def key_of_value(value: Any, other: _Other) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value  # True is not 1
    if isinstance(value, (float, complex)):
        number = complex(value)
        return type(value), struct.pack("dd", number.real, number.imag)
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if isinstance(value, ClosedJaxpr):
        return _of_program(value.jaxpr, other), *map(other, value.consts)
    if isinstance(value, Jaxpr):
        return _of_program(value, other)
    if _is_known(value):
        return type(value), value
    if _is_record(value):
        return type(value), key_of_value(vars(value), other)
    if not programs.is_container(value):
        return other(value)
    items = value.items() if isinstance(value, dict) else value
    return type(value), tuple(key_of_value(item, other) for item in items)


def _is_known(value: Any) -> bool:
    """Whether this is an object whose ``==`` compares all of it."""
    return isinstance(value, (*_KNOWN, _unspecified()))


# What occurs among the parameters of the operations of `tests/ops`; all else cannot be compared.
_KNOWN = (
    *(jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding),
    *(jax.tree_util.PyTreeDef, core.ShapedArray, jax.ShapeDtypeStruct),
    type(jax.extend.random.threefry_prng_impl),  # functions of JAX
)
# Classes of JAX for trees of values, without public names; their values are compared one by one.
_RECORDS = ("FTPyTree", "FTTuple", "FTSingleton", "FTFiltered", "Either")


def _is_record(value: Any) -> bool:
    kind = type(value)
    is_of_jax = kind.__module__.partition(".")[0] == "jax"
    return is_of_jax and kind.__name__ in _RECORDS


def derivatives_key(jaxpr: Jaxpr) -> Hashable:
    """Return a key: equal programs with equal keys have equal derivatives."""
    keys: list[Hashable] = []  # in the order of the equations
    for eqn in jaxpr.eqns:
        name, params = programs.name_and_params(eqn)
        if name in RULES:
            raise UnknownRule
        if (other := params.get(_DERIVATIVES_ONLY.get(name, ""))) is not None:
            if (key := getattr(other, "rankax_key", None)) is None:
                raise Unknown if name in _OWN_CALLS else UnknownRule
            keys.append(key)
        keys += map(derivatives_key, programs.subprograms(eqn))
    return tuple(keys)


def opened(closed: ClosedJaxpr) -> Any:
    """Return a program in which calls of `jax.jit` hold no arrays: they become its own constants.

    The same object if such calls hold none. Arrays inside a loop or a branch stay there.
    """
    lifted: dict[Any, Any] = {}  # the array of each variable; one program may be called twice
    eqns = [_opened_call(eqn, lifted) for eqn in closed.jaxpr.eqns]
    if not lifted:
        return closed
    jaxpr = closed.jaxpr.replace(constvars=[*closed.jaxpr.constvars, *lifted], eqns=eqns)
    return ClosedJaxpr(jaxpr, [*closed.consts, *lifted.values()])


def _opened_call(eqn: JaxprEqn, lifted: dict[Any, Any]) -> Any:
    if eqn.primitive.name not in ("jit", "pjit") or _is_placed(eqn.params):
        return eqn
    inner = opened(eqn.params["jaxpr"])
    if not inner.consts:
        return eqn
    constvars = list(inner.jaxpr.constvars)
    lifted.update(zip(constvars, inner.consts, strict=True))
    return call_of(eqn, [*constvars, *eqn.invars], inner.jaxpr)


def _is_placed(params: dict[str, Any]) -> bool:
    """Whether a call of `jax.jit` asks for devices or layouts."""
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    values = [x for name in names for x in params.get(name, ())]
    return not all(x is None or isinstance(x, _unspecified()) for x in values)


@functools.cache
def _unspecified() -> type:
    """Return the class of a sharding that `jax.jit` leaves open; it has no public name."""
    (call,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(np.float32(0)).eqns
    return type(call.params["in_shardings"][0])


def without_constants(jaxpr: Jaxpr) -> Any:
    """Return a program without constants at any depth."""
    # From JAX 0.12 on, a jaxpr holds its constants; replacing its variables drops them.
    eqns = [programs.with_subprograms(eqn, without_constants) for eqn in jaxpr.eqns]
    return jaxpr.replace(constvars=list(jaxpr.constvars), eqns=eqns)


def without_rules(jaxpr: Jaxpr) -> Any:
    """Return a program without constants, and without derivative rules at any depth."""
    eqns = [_without_rule(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(constvars=list(jaxpr.constvars), eqns=eqns)


def _without_rule(eqn: JaxprEqn) -> Any:
    if eqn.primitive.name in RULES:
        return call_of(eqn, eqn.invars, without_rules(eqn.params["call_jaxpr"].jaxpr))
    eqn = programs.with_subprograms(eqn, without_rules)
    left_out = _DERIVATIVES_ONLY.get(programs.name_and_params(eqn)[0])
    return programs.with_params(eqn, **{left_out: None}) if left_out else eqn
