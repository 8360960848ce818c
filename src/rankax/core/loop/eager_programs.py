# SPDX-License-Identifier: MIT
"""Eager calls reuse compiled programs, which are looked up by what their kernel computes.

Outside `jax.jit`, a kernel is traced at each call: only a new trace sees that a number, an array or
a function that the kernel uses has changed. Tracing is cheap, but JAX compiles a new loop for every
new trace, because its caches identify programs by object. A key made of the kernel and its shapes
would be stale as soon as a global changes. So the program of a whole call is looked up
(`kept_program`) by the `fingerprint` of the traced program of one item, and by the key of the call:
its plan without chunks, its options, its parts and so on (`_walked` of `rankax.pipeline`). Arrays
that the kernel closes over are inputs of that program: they may change, and are not kept alive.

The scans of `ext/scan` keep their programs here, too. ``jit=True`` (`ext/jit.py`) and blocks
(`ext/blocks/programs.py`) keep theirs in their own ways.

Under tracers of `jax.grad`, `jax.jvp` or `jax.vmap`, a kept program is called as well: JAX looks up
the derivatives of a compiled function by its identity. The kernel must then use no derivative rules
of its own, because rules are functions, which cannot be compared.

Each kept program is a function of its own for `jax.jit`, which compares everything else on which
the compilation depends: shapes, devices, contexts, the configuration of JAX.

A call inside another program is a part of that program. An eager call whose program cannot be
compared is compiled each time; where rules are what cannot be compared, a warning says so when the
same derivative is compiled again.

JAX defines no equality of programs, and the text of a program omits details: two functions with the
same name look the same. Here two programs have equal fingerprints only if they agree equation by
equation: the same primitives, the same variables in the same places (numbered in order of
appearance), equal shapes, dtypes, parameters and contexts, and the same bits of every number. A
program that cannot be compared with certainty has no fingerprint:

* a program with effects, or with a function among its parameters, such as a callback: what a
  function does may change while it stays the same object;
* a program with arrays inside a loop or a branch, or among its parameters. `opened` moves arrays
  out of calls of `jax.jit` only; to move them out of every primitive, each would have to be known;
* a program with parameters of other classes than `_KNOWN` and `_RECORDS`: their ``==`` may ignore a
  difference, such as the one between 1 and True.

Derivative rules are left out: evaluation does not use them, and each trace makes new ones.
`without_rules` is the program to keep, because it holds no function of the caller.

A program that is differentiated has equal derivatives only if `derivatives_key` is equal, too.
Rules are functions, so they cannot be compared. The rules of our loops can, because they follow
from the program and a key. `without_constants` is the program to keep then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import struct
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType

from rankax.core.base.arrays import is_plain, is_ref, is_staged
from rankax.core.base.cache import Kept, switch
from rankax.core.base.messages import caller_level
from rankax.core.trace import programs
from rankax.core.trace.derivatives import RULES, call_of
from rankax.core.trace.programs import ItemProgram


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

    inputs = tuple([defined(v) for v in (*jaxpr.constvars, *jaxpr.invars)])
    body: list[Hashable] = []
    for eqn in jaxpr.eqns:
        params = _of_params(eqn, other)
        arguments = tuple(map(used, eqn.invars))
        results = tuple(map(defined, eqn.outvars))
        body.append((eqn.primitive, arguments, results, params, eqn.ctx))
    outputs = tuple(map(used, jaxpr.outvars))
    return len(jaxpr.constvars), inputs, tuple(body), outputs


def _of_inner(jaxpr: Jaxpr, other: _Other) -> Hashable:
    """Return the key of a program inside another, of which JAX often has one object for all."""
    if other is not _refused:
        return _of_program(jaxpr, other)
    if (key := _of_jaxprs.get(jaxpr)) is None:
        key = _of_jaxprs[jaxpr] = _of_program(jaxpr, other)
    return key


_of_jaxprs: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()


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
    return kind, *[(k, key_of_value(x, other)) for k, x in params.items() if k != left_out]


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
    if type(value) is tuple and not [x for x in value if not isinstance(x, PLAIN)]:
        return tuple, tuple([(type(x), x) for x in value])  # as below, in one step
    if isinstance(value, (float, complex)):
        number = complex(value)
        return type(value), struct.pack("dd", number.real, number.imag)
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if isinstance(value, ClosedJaxpr):
        return _of_inner(value.jaxpr, other), *map(other, value.consts)
    if isinstance(value, Jaxpr):
        return _of_program(value, other)
    if isinstance(value, (*_KNOWN, _unspecified())):  # whose ``==`` compares all of it
        return type(value), value
    if programs.is_container(value):
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple([key_of_value(item, other) for item in items])
    return (type(value), key_of_value(vars(value), other)) if _is_record(value) else other(value)


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
    eqns = [
        _opened_call(eqn, lifted) if eqn.primitive.name in ("jit", "pjit") else eqn
        for eqn in closed.jaxpr.eqns
    ]
    if not lifted:
        return closed
    jaxpr = closed.jaxpr.replace(constvars=[*closed.jaxpr.constvars, *lifted], eqns=eqns)
    return ClosedJaxpr(jaxpr, [*closed.consts, *lifted.values()])


def _opened_call(eqn: JaxprEqn, lifted: dict[Any, Any]) -> Any:
    if _is_placed(eqn.params):
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
    kinds = {type(x) for name in names for x in params.get(name, ())}
    return not kinds <= {type(None), _unspecified()}


@functools.cache
def _unspecified() -> type:
    """Return the class of a sharding that `jax.jit` leaves open; it has no public name."""
    with jax.disable_jit(False):  # which the caller may have set
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


class Mode(enum.Enum):
    """How a call is evaluated."""

    EAGER = "now"
    TRANSFORMED = "now, under tracers of `jax.grad`, `jvp` or `vmap` only"
    STAGED = "later, as part of a program that is being traced; or uncached"


# A program as a function of the program of one item and of arrays.
Program = Callable[[ItemProgram, list[Any]], Any]

_MOST_KEPT = 128  # compiled loops, of one or two megabytes each


def mode_of(arrays: Sequence[Any], *, on_mesh: bool = False) -> Mode:
    """Return how a call with these arrays is evaluated; ``on_mesh``: its parts have a mesh."""
    # On a mesh with explicit axes, arrays made inside `jax.jit` have types that arrays from outside
    # lack.
    # JAX cannot differentiate a call of `jax.jit` that keeps a `jax.Ref` for its reverse pass.
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if is_plain() or is_staged() or (is_explicit and not on_mesh) or any(map(is_ref, arrays)):
        return Mode.STAGED
    tracers = [x for x in arrays if isinstance(x, core.Tracer)]
    if not tracers:
        return Mode.EAGER
    of_jax = all(type(x).__module__.partition(".")[0] == "jax" for x in tracers)
    return Mode.TRANSFORMED if of_jax else Mode.STAGED


def kept_program(
    make: Callable[[], Program],
    item: ItemProgram,
    leaves: Sequence[Any],
    key: Hashable,
    mode: Mode,
    compiled: Callable[[Any, Sequence[Any]], Any],
) -> Callable[[], Any]:
    """Return what evaluates ``make()(item, leaves)``, compiled and kept unless the call is staged.

    What ``make`` returns holds no object of the caller, and follows from the item, the key and the
    mode. With a key of None, the program is compiled but not kept. ``compiled`` is
    `Options.compiled`. Inside `checking`, an eager call that finds a program also compiles a new
    one, and compares the results.
    """
    if mode is Mode.STAGED:
        return functools.partial(make(), item, list(leaves))
    closed = opened(item.closed)
    # The transfer guard of JAX permits to put NumPy arrays on the device explicitly.
    consts = [x if isinstance(x, jax.Array) else jax.device_put(x) for x in closed.consts]
    args = consts, list(leaves)
    try:
        whole = _key_of(closed, (item.site, item.out_axes, key), leaves, mode)
    except Unknown:
        run = _compiled(make(), item, programs.unchanged, args, compiled)
    else:
        bare = without_rules if mode is Mode.EAGER else without_constants

        def new() -> Any:
            return _compiled(make(), item, bare, args, compiled)

        made: list[Any] = []
        run = _kept.get_or_make(whole, lambda: made.append(new()) or made[0])
        if not made and mode is Mode.EAGER and _checks.get():
            return lambda: _checked(run(*args), new()(*args), item)
    return functools.partial(run, *args)


_CHECKS = switch("RANKAX_CHECK", default=False)
_checks: ContextVar[bool] = ContextVar("rankax_checks", default=_CHECKS)


@contextlib.contextmanager
def checking(value: bool) -> Generator[None]:
    """Enter a scope in which calls that reuse a program compare it with a new one, or do not."""
    token = _checks.set(value)
    try:
        yield
    finally:
        _checks.reset(token)


def _checked(kept: Any, new: Any, item: ItemProgram) -> Any:
    """Return results of a kept program if a new one has the same, bit for bit."""
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(new), strict=True)
    for place, (x, y) in enumerate(pairs):
        if _bits(x) != _bits(y):
            names = item.out_names
            name = names[place] if place < len(names) else f"output {place}"
            raise RuntimeError(
                f"{item.site}: the compiled program of an earlier call was taken for that of this "
                f"one, but its {name}, {jax.typeof(x)}, differs from that of a new program, "
                f"{jax.typeof(y)}; please report it with the kernel. rankax.clear_caches() forgets "
                "the earlier program"
            )
    return kept


def _bits(x: Any) -> tuple[Any, ...]:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    return x.shape, x.dtype, np.asarray(x).tobytes()


def _key_of(
    closed: ClosedJaxpr, of_call: tuple[Any, ...], leaves: Sequence[Any], mode: Mode
) -> _Key:
    """Return the key of a program that can be compared."""
    if of_call[-1] is None:
        raise Unknown
    key = fingerprint(closed), *of_call
    rules = None
    if mode is Mode.TRANSFORMED:
        try:
            rules = derivatives_key(closed.jaxpr)
        except UnknownRule:
            _warn_if_compiled_again(_Key(key), [*leaves, *closed.consts])
            raise
    return _Key((*key, mode, rules))


def _compiled(
    program: Program,
    item: ItemProgram,
    bare: Callable[[Any], Any],
    args: Sequence[Any],
    compiled: Any,
) -> Any:
    closed = opened(item.closed)
    jaxpr, more = bare(closed.jaxpr), closed.consts[len(args[0]) :]
    # Without the constants, and the tree, which may hold user-defined classes.
    item = dataclasses.replace(item, closed=None, out_tree=None)

    def run(consts: list[Any], leaves: list[Any]) -> Any:
        closed = ClosedJaxpr(jaxpr, [*consts, *more])
        return program(dataclasses.replace(item, closed=closed), leaves)

    return compiled(run, args)


class _Key:
    """A key whose hash is computed once."""

    def __init__(self, value: Hashable) -> None:
        self._value = value
        try:
            self._hash = hash(value)
        except TypeError:  # such as an option with an object that cannot be hashed
            raise Unknown from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value


_kernel = ContextVar("rankax_kernel", default="a kernel")


@contextlib.contextmanager
def call_of_kernel(site: str) -> Generator[None]:
    """Enter a call of the kernel at ``site``, whose loops belong to functions of this library."""
    token = _kernel.set(site)
    try:
        yield
    finally:
        _kernel.reset(token)


def kernel_of_call() -> str:
    """Return the kernel that is called, and its source line."""
    return _kernel.get()


def warn_once(kind: str, text: str) -> None:
    """Warn of the kernel that is called, once for each kind of warning."""
    site = kernel_of_call()
    if not next(_warnings.get_or_make((kind, site), itertools.count)):
        warnings.warn(f"{site}: {text}", stacklevel=caller_level())


def _warn_if_compiled_again(key: _Key, arrays: Sequence[Any]) -> None:
    """Warn when the derivative of a program of this key is compiled again."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir or config.jax_disable_jit:
        return  # JAX finds it in a file, or compiles nothing
    kinds = tuple([(jax.typeof(x), *_transforms(x)) for x in arrays])
    if next(_compilations.get_or_make((key, kinds), itertools.count)):
        warn_once(
            "compiled again",
            "outside jax.jit, its derivative (or vmap) in chunks is compiled at every call, "
            "because it uses a jax.custom_jvp or jax.custom_vjp function or a checkpoint policy, "
            "which may have changed; call it inside jax.jit, or give auto_vmap jit=True",
        )


def _transforms(x: Any) -> Iterator[type]:
    """Yield the kinds of the tracers around an array, so that derivatives of two orders differ."""
    while isinstance(x, core.Tracer):
        yield type(x)
        x = getattr(x, "primal", getattr(x, "val", None))


_kept: Kept[Any] = Kept(_MOST_KEPT, "programs of eager calls")
_compilations: Kept[Iterator[int]] = Kept(_MOST_KEPT, "derivatives compiled once")
_warnings: Kept[Iterator[int]] = Kept(_MOST_KEPT, "warnings given")
