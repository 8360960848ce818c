# SPDX-License-Identifier: MIT
"""Store what is used again: values that XLA:CPU would recompute, and inputs that it reads badly.

XLA:CPU fuses a value with the elementwise operations before it into one loop, which begins at the
last stored values. If two loops read a value, both compute it. In a chain of layers, each with a
norm of the layer before, every norm starts again at the first layer, so the time to run and to
compile grows with the square of the number of layers. Large arrays escape, because a library sums
them (`library.py`), and its operands are stored.

From JAX 0.12 on, `jax.lax.optimization_barrier` stores a value. (Earlier versions remove it before
they fuse.) `keep_values` adds one to each value that several loops read, if it costs more to
recompute than to store. Derivatives have barriers in the same places. Programs with effects are
left alone.

With JAX 0.12, a loop that evaluates one of the functions `_OPAQUE` computes the offset of its tile
for each number, so its reads are not vectorised. `keep_inputs` copies the tile before: maps of such
functions are up to twice as fast, and sums over pairs up to three times.

A loop over tiles reads its vectors again for every row of results. `by_component` stores small
ones with the items on the last axis, so that each component of a tile is read in order: sums and
minima over pairs are 1.2 to 1.45 times as fast. This is a copy, so it is bounded by half a
megabyte. Derivatives are up to three times as fast without it, because sums over the items of a
tile would copy the vectors there.

Tests: ``tests/xla_cpu/test_kept_values.py``, whose last tests fail when XLA:CPU needs neither of
the first two, and ``test_components.py``.
"""

import collections
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from rankax.core.base.arrays import has_tangent
from rankax.core.plan.schedule import Level
from rankax.core.trace.derivatives import RULES
from rankax.core.trace.programs import subprograms, with_subprograms
from rankax.ext.equations import CALLS, FUNCTIONS, LIBRARIES, Operation, operations

_FUNCTION = 8.0  # operations
_SIZES = range(4096)  # of values; larger ones are stored for the library that sums them
_WORTH = 16.0  # operations for each number, from which on it is kept
_CHEAP = 1.0  # operations, which all readers repeat rather than that one loop becomes two

# Functions that XLA:CPU of JAX 0.12 does not know to be free of side effects; division by a square
# root is one of them. How many numbers a program may read for each that these compute.
_OPAQUE = {"erf", "expm1", "log1p", "rsqrt", "tanh"}
_READS = 8

_BODIES = ("cond", "scan", "while")
_CALLS = {*CALLS, *RULES}
_SLOW = {*FUNCTIONS, "div", "rsqrt", "sqrt"}
_REDUCTIONS = {
    *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"),
    *("reduce_prod", "reduce_sum"),
}
_INDEXED = {
    *_REDUCTIONS,
    *("concatenate", "dynamic_slice", "gather", "pad", "rev", "slice", "transpose"),
}
_SAME = {
    *("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "stop_gradient"),
}
FREE = {*_INDEXED, *_SAME}
_STORED = {
    *LIBRARIES,
    *("conv_general_dilated", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
    *("dot_general", "dynamic_update_slice", "optimization_barrier"),
}


Reads = dict[int, float]  # by loop: how often it computes each number of a value
_loops = itertools.count()


def keep_values(jaxpr: Any) -> Any:
    """Return a program with a barrier on each value that is better kept; itself if none is."""
    return jaxpr if jaxpr.effects else _kept_in_body(jaxpr, _SIZES)


def keep_inputs(jaxpr: Any, inputs: Sequence[int]) -> Any:
    """Return a program with a barrier on these inputs, if it pays to copy them; else itself."""
    if jaxpr.effects:
        return jaxpr
    own = [jaxpr.invars[i] for i in inputs]
    own = [v for v in own if has_tangent(v.aval) and v.aval.size in _SIZES]
    found = list(operations(jaxpr))
    opaque = _OPAQUE | ({"sqrt"} if any(map(_divides, found)) else set())
    times = sum(each.times * _size(each.eqn.outvars[0]) for each in found if each.name in opaque)
    if not 0 < sum(map(_size, own)) <= _READS * times:
        return jaxpr
    barriers = {v: _barrier(v, jaxpr.eqns[0]) for v in own}
    invars = [barriers[v].invars[0] if v in barriers else v for v in jaxpr.invars]
    return jaxpr.replace(invars=invars, eqns=[*barriers.values(), *jaxpr.eqns])


def _divides(operation: Operation) -> bool:
    """Whether an operation divides by a value, which may be a square root."""
    return operation.name == "div" and not isinstance(operation.eqn.invars[1], Literal)


def computes_again(jaxpr: Any, least: int) -> bool:
    """Whether a program would recompute values of ``least`` numbers, if no library stored any."""
    return _kept_in_body(jaxpr, range(least, sys.maxsize)) is not jaxpr


def _kept_in_body(jaxpr: Any, sizes: range) -> Any:
    of_outs = [_one_loop() for _ in jaxpr.outvars]
    return _kept(jaxpr, of_outs, [0.0] * len(jaxpr.invars), sizes)[0]


def _kept(
    jaxpr: Any, of_outs: Sequence[Reads], work_of_inputs: Sequence[float], sizes: range
) -> tuple[Any, list[float]]:
    """Return a program with barriers, and the work to compute each output again."""
    readers, of_equations, users = _readers(jaxpr, of_outs)
    work = collections.defaultdict(float, zip(jaxpr.invars, work_of_inputs, strict=True))
    eqns, kept, sums = [], [], []
    for eqn, of_inputs in zip(jaxpr.eqns, of_equations, strict=True):
        name, reads = eqn.primitive.name, [readers[v] for v in eqn.outvars]
        # One loop computes a value once, so each of its readers has a part of the work.
        inputs = [
            0.0
            if isinstance(v, Literal)
            else work[v] / max((users[v, loop] for loop in own), default=1)
            for v, own in zip(eqn.invars, of_inputs, strict=True)
        ]
        costs = [0.0] * len(eqn.outvars)
        if _called(eqn) is not None:
            # Derivative rules do not see what is inside, so results are kept outside.
            reads = _merged(reads) if name in RULES else reads
            eqn, costs = _kept_in_call(eqn, reads, inputs, sizes)
        elif name in _BODIES:
            eqn = with_subprograms(eqn, functools.partial(_kept_in_body, sizes=sizes))
        elif _is_fused(eqn):
            # XLA computes a sum before the loop that broadcasts what is made of it.
            is_spread = len(reads[0]) == 1 and sum(reads[0].values()) > 1
            pairs = zip(eqn.invars, inputs, strict=True)
            costs = [_work(eqn, [0.0 if is_spread and v in sums else w for v, w in pairs])]
            is_sum = name in _REDUCTIONS or (name in _SAME and eqn.invars[0] in sums)
            sums += eqn.outvars if is_sum else []
        eqns.append(eqn)
        for v, loops, cost in zip(eqn.outvars, reads, costs, strict=True):
            again = sum(loops.values()) - 1
            # XLA stores a sum that is used again, and a function whose result is broadcast.
            is_stored = name in _REDUCTIONS or (name in _SLOW and len(loops) == 1)
            if cost > _CHEAP and again * cost >= _WORTH and name not in _SAME and not is_stored:
                is_stored = has_tangent(v.aval) and v.aval.size in sizes
                kept += [v] if is_stored else []
            work[v] = 0.0 if again > 0 and is_stored else cost
    if kept or any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = jaxpr.replace(eqns=with_barriers(eqns, kept))
    return jaxpr, [0.0 if isinstance(v, Literal) else work[v] for v in jaxpr.outvars]


def _kept_in_call(
    eqn: Any, of_outs: Sequence[Reads], work_of_inputs: Sequence[float], sizes: range
) -> tuple[Any, list[float]]:
    work: list[float] = []

    def kept(jaxpr: Any) -> Any:
        jaxpr, work[:] = _kept(jaxpr, of_outs, work_of_inputs, sizes)
        return jaxpr

    return with_subprograms(eqn, kept), work


def with_barriers(eqns: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Return equations with a barrier after those that compute these values."""
    found: list[Any] = []
    for eqn in eqns:
        barriers = {v: _barrier(v, eqn) for v in eqn.outvars if v in kept}
        outvars = [barriers[v].invars[0] if v in barriers else v for v in eqn.outvars]
        found.append(eqn.replace(outvars=outvars) if barriers else eqn)
        found += barriers.values()
    return found


def _barrier(v: Any, like: Any) -> Any:
    """Return an equation in the context of another that reads a new variable and has this result.

    To trace one takes a millisecond.
    """
    inputs = [jax.extend.core.Var(v.aval)]
    return like.replace(primitive=_barrier_primitive(), invars=inputs, outvars=[v], params={})


@functools.cache
def _barrier_primitive() -> Any:
    return jax.make_jaxpr(lax.optimization_barrier)(0.0).eqns[0].primitive


# Who reads a value.


def _readers(
    jaxpr: Any, of_outs: Sequence[Reads]
) -> tuple[Mapping[Any, Reads], list[list[Reads]], collections.Counter[Any]]:
    """Return which loops compute the values of a program, if what several of them read is stored.

    And those that compute the inputs of each equation, and how often each loop reads a value.
    """
    found = collections.defaultdict[Any, Reads](dict)
    of_equations: list[list[Reads]] = []
    users = collections.Counter[Any]()
    for v, loops in zip(jaxpr.outvars, of_outs, strict=True):
        if not isinstance(v, Literal):
            found[v].update(loops)
    for eqn in reversed(jaxpr.eqns):
        reads = [found[v] for v in eqn.outvars]
        of_inputs = _reads_of_inputs(eqn, reads if eqn.primitive.name in _SAME else _merged(reads))
        of_equations.insert(0, of_inputs)
        for v, loops in zip(eqn.invars, of_inputs, strict=True):
            if not isinstance(v, Literal):
                found[v].update(loops)
                users.update((v, loop) for loop in loops)
    return found, of_equations, users


def _merged(reads: Sequence[Reads]) -> list[Reads]:
    """Return who reads what values are computed from: one loop, if several read a value."""
    return [loops if sum(loops.values()) <= 1 else _one_loop() for loops in reads]


def _reads_of_inputs(eqn: Any, outs: Sequence[Reads]) -> list[Reads]:
    if (program := _called(eqn)) is not None:
        reads, *_ = _readers(program, outs)
        return [reads[v] for v in program.invars]
    if not _is_fused(eqn):
        return [_one_loop() for _ in eqn.invars]
    name, (out,), (loops,) = eqn.primitive.name, eqn.outvars, outs

    def of(v: Any) -> Reads:
        if name not in _INDEXED and _size(v) == _size(out):
            return loops
        # A slice counts as a read of the whole, because its derivative fills a whole array.
        each = 1.0 if name in ("concatenate", "pad") else max(1.0, _size(out) / _size(v))
        return _one_loop(sum(loops.values()) * each)

    return list(map(of, eqn.invars))


def _one_loop(often: float = 1.0) -> Reads:
    return {next(_loops): often}


def _called(eqn: Any) -> Any:
    """Return the program that an equation calls, if XLA puts it in the place of the call."""
    if eqn.primitive.name not in _CALLS:
        return None
    programs = list(subprograms(eqn))
    is_whole = len(programs) == 1 and len(programs[0].invars) == len(eqn.invars)
    return programs[0] if is_whole else None


def _is_fused(eqn: Any) -> bool:
    """Whether XLA may compute the result in the loop that reads it."""
    if eqn.primitive.name in _STORED or len(eqn.outvars) != 1:
        return False
    out = eqn.outvars[0].aval.shape
    shapes = {v.aval.shape for v in eqn.invars if getattr(v.aval, "shape", ())}
    return eqn.primitive.name in FREE or all(_spreads(shape, out) for shape in shapes)


def _spreads(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    pairs = zip(shape, out, strict=False)
    return len(shape) == len(out) and all(size in (1, other) for size, other in pairs)


def _work(eqn: Any, inputs: Sequence[float]) -> float:
    """Return how many operations a number of the result takes, with those before it."""
    name, (out,) = eqn.primitive.name, eqn.outvars
    pairs = [(work, _size(v) / _size(out)) for work, v in zip(inputs, eqn.invars, strict=True)]
    if name in _REDUCTIONS:
        return sum((work + 1) * part for work, part in pairs)
    own = _FUNCTION if name in _SLOW else float(name not in FREE)
    return own + sum(work * min(1.0, part) for work, part in pairs)


def _size(v: Any) -> int:
    return max(1, math.prod(getattr(v.aval, "shape", ())))


_MOST_COMPONENTS = 16  # of an item
_MOST_BYTES = 2**19


def by_component(
    leaves: Sequence[Any], levels: Sequence[Level]
) -> tuple[list[Any], tuple[Level, ...]]:
    """Store small vectors by component if a loop reads them again; return where the items are."""
    stored, changed = list(leaves), list(levels)
    if any(level.walker for level in levels):
        return stored, tuple(changed)  # items are read one by one
    for i, leaf in enumerate(leaves):
        number, *others = [n for n, level in enumerate(levels) if level.in_axes[i] is not None]
        level, around = changed[number], levels[:number]
        axis, is_loop = level.in_axes[i], level.reduced and level.is_loop and not others
        # Kept levels are outside of those that are reduced.
        is_again = is_loop and bool(around)
        if axis is not None and is_again and _is_small_vector(leaf, axis):
            stored[i] = jnp.moveaxis(leaf, axis, -1)
            in_axes = (*level.in_axes[:i], jnp.ndim(leaf) - 1, *level.in_axes[i + 1 :])
            changed[number] = dataclasses.replace(level, in_axes=in_axes)
    return stored, tuple(changed)


def _is_small_vector(leaf: Any, axis: int) -> bool:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.number):
        return False
    components = leaf.size // leaf.shape[axis]
    return 1 < components <= _MOST_COMPONENTS and leaf.nbytes <= _MOST_BYTES
