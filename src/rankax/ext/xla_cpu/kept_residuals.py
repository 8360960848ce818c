# SPDX-License-Identifier: MIT
"""Store what a reverse pass reads once for each slice, where XLA:CPU would recompute it.

The cotangent of an array of which an item takes several slices, as in a stencil, is a sum with a
term for each slice. XLA:CPU fuses all that the terms depend on into the loop of this sum
(`kept_values.py`), and so computes it once for each slice. A barrier stores a value, and its
transpose stores the cotangent. So a program that is differentiated has one on each value that
depends on several slices of an array, where an operation reads it that is not linear: what is left
between there and the slices is cheap.

Of 27 kernels, 15 gradients take 0.11 to 0.82 times as long with it, 0.62 in the median, 11 as long,
and one 1.14 times as long.

Test: ``tests/xla_cpu/test_kept_residuals.py``.
"""

import collections
from typing import Any

import jax
from jax.extend.core import Literal

from rankax.core.base.arrays import has_tangent
from rankax.core.trace.programs import evaluate_by, with_shape
from rankax.ext.equations import operations
from rankax.ext.xla_cpu.kept_values import FREE, with_barriers

_SLICES = ("dynamic_slice", "gather", "slice", "split")
_LINEAR = {*FREE, "add", "add_any", "neg", "optimization_barrier", "select_n", "sub"}


def keep_residuals(jaxpr: Any) -> Any:
    """Return a program with barriers on what its reverse pass reads again; itself if none is."""

    def inlined(*values: Any) -> list[Any]:
        # Values inside calls of `jax.jit` would have no name outside.
        return evaluate_by(lambda fun, _, __, inputs: fun(*inputs), jaxpr, values)

    own = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    closed = jax.make_jaxpr(inlined)(*[with_shape(aval, aval.shape) for aval in own])
    flat, count, kept = closed.jaxpr, len(jaxpr.constvars), _read_again(closed.jaxpr)
    if closed.consts or not kept:
        return jaxpr
    consts, inputs = flat.invars[:count], flat.invars[count:]
    return flat.replace(constvars=consts, invars=inputs, eqns=with_barriers(flat.eqns, kept))


def slices_again(jaxpr: Any) -> bool:
    """Whether an item takes several arrays from one array.

    Numbers do not count: the gradient of an inverse of 3 x 3 numbers becomes slower.
    """
    slices = [each.eqn for each in operations(jaxpr) if each.name in _SLICES]
    arrays = [eqn.invars[0] for eqn in slices for v in eqn.outvars if v.aval.size > 1]
    return len({*map(id, arrays)}) < len(arrays) and not jaxpr.effects


def _read_again(jaxpr: Any) -> list[Any]:
    """Return the values that depend on several slices of an array, and are not read linearly."""
    read = {v for eqn in jaxpr.eqns if not _is_linear(eqn) for v in _variables(eqn)}
    slices = collections.defaultdict[Any, frozenset[Any]](frozenset)  # by value: array and slice
    kept: list[Any] = []
    for eqn in jaxpr.eqns:
        own = _variables(eqn)
        found = frozenset[Any]().union(*(slices[v] for v in own))
        for v in eqn.outvars:
            if eqn.primitive.name in _SLICES:
                found = frozenset({(own[0], v)})
            is_array = has_tangent(v.aval) and v.aval.size > 1
            is_stored = eqn.primitive.name == "optimization_barrier" or not is_array
            if not is_stored and v in read and len(found) > len({array for array, _ in found}):
                kept.append(v)
                is_stored = True
            slices[v] = frozenset() if is_stored else found
    return kept


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _is_linear(eqn: Any) -> bool:
    name, first = eqn.primitive.name, 1 if eqn.primitive.name == "div" else 0
    is_scaled = name in ("div", "mul") and any(isinstance(v, Literal) for v in eqn.invars[first:])
    return name in _LINEAR or is_scaled
