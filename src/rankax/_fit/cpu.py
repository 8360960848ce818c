# SPDX-License-Identifier: MIT
"""The tile that a CPU evaluates fastest, chosen from the program of one item.

A tile holds the items that are evaluated at once. ``chunk_size`` is only an upper bound. For maps
there is one reason so far to stay below it: a library that XLA:CPU calls in JAX 0.10 to 0.12, but
not in 0.9 (``__ynn_fusion`` in a compiled program). It computes sums, maxima and minima of floats
with an operand of 4096 numbers or more, and dot products of two vectors. It takes some nanoseconds
for each result. That is nothing if a result comes from 32 numbers or more, and up to six times the
work if it comes from three. `best_tile` weighs the short reductions against the long ones and
against the cost of small tiles. If the short ones prevail, it returns a tile that keeps their
operands below 4096 numbers.

The tiles of a reduction also have a limit of their own, `_reduce.row.most_lanes`.

The tile must be known before the levels of a plan are cut. So a chunked kernel is traced first, and
the same program is then mapped: a call still traces it once. `plan` traces it, too. A batch that
fits one chunk has no tiles; it stays plain `jax.vmap`.

Test: ``test_upstream.py::test_short_sums_of_many_numbers_go_to_a_library``. When no supported JAX
calls the library, this module and all that calls it may go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._trace.programs import Literal, subprograms

__all__ = ["NO_LIBRARY", "best_tile", "tiles_matter"]

NO_LIBRARY = "xla_cpu_experimental_ynn_fusion_type"  # the option of XLA; "" calls none

_LIBRARY_FROM = 4096  # numbers of an operand; found by compiling, the same in JAX 0.10 and 0.12
_LONG = 16  # numbers per result from which on the library is no slower

# Nanoseconds on x86, rounded. They only have to tell a gain of a factor from a loss.
_PER_SHORT_RESULT = 6.0  # for the library, and for storing its operands
_PER_LONG_NUMBER = 1.0  # that the library saves where a reduction is long
_PER_OPERATION = 20.0  # of a tile, whatever its size
_PER_CALL = 600.0  # of a tile, for a product of matrices
_PER_STEP = 1500.0  # of a tile, for each step of a loop inside the item
_PER_PRODUCT = 1.0  # of a tile, for each number of a matrix that all items share

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")
_LOOPS = ("scan", "while")


def tiles_matter(compiler_options: Mapping[str, Any] | None = None) -> bool:
    """Whether a tile smaller than the chunk may be faster here, with these options of `jax.jit`."""
    return (
        jax.default_backend() == "cpu"
        and jax.__version_info__ >= (0, 10)
        and not getattr(jax.config, "jax_debug_key_reuse", False)  # tiles may overlap
        and NO_LIBRARY not in (compiler_options or {})
    )


def best_tile(program: Any) -> int | None:
    """Return how many items a tile should have at most, from the ``ClosedJaxpr`` of one item.

    None: as many as a chunk may have.
    """
    cost = _Cost()
    _add(cost, program.jaxpr, set(program.jaxpr.invars), 1)
    if not 0 < cost.largest < _LIBRARY_FROM:
        return None
    tile = (_LIBRARY_FROM - 1) // cost.largest
    gain = _PER_SHORT_RESULT * cost.short_results
    loss = _PER_LONG_NUMBER * cost.long_numbers + cost.per_tile / tile
    return tile if gain > loss else None


@dataclasses.dataclass
class _Cost:
    """What an item does, in numbers and nanoseconds."""

    largest: int = 0  # operand of a short reduction
    short_results: int = 0
    long_numbers: int = 0
    per_tile: float = 0.0


def _add(cost: _Cost, jaxpr: Any, moving: set[Any], times: int) -> None:
    """Count what depends on the item; ``moving`` holds the variables that do."""
    for eqn in jaxpr.eqns:
        flags = [not isinstance(v, Literal) and v in moving for v in eqn.invars]
        if not any(flags):
            continue
        moving.update(eqn.outvars)
        steps = times
        if eqn.primitive.name in _LOOPS:
            steps *= eqn.params.get("length", 1)  # unknown for a `while`
            cost.per_tile += _PER_STEP * steps
        inner = list(subprograms(eqn))
        for program in inner:
            inputs = _inputs_that_move(eqn, program, flags)
            _add(cost, program, inputs, steps)
        if not inner:
            _add_operation(cost, eqn, flags, times)


def _add_operation(cost: _Cost, eqn: Any, flags: Sequence[bool], times: int) -> None:
    cost.per_tile += _PER_OPERATION * times
    name = eqn.primitive.name
    if name not in (*_REDUCTIONS, "dot_general"):
        return
    out = eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return
    if name in _REDUCTIONS:
        _add_reduction(cost, eqn.invars[0].aval.size, out.size, times)
    else:
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        numbers = out.size * math.prod(left[axis] for axis in contracted)
        if not all(flags):
            cost.per_tile += _PER_PRODUCT * numbers * times
        elif out.ndim == len(batch):
            _add_reduction(cost, numbers, out.size, times)
        else:
            cost.per_tile += _PER_CALL * times


def _add_reduction(cost: _Cost, numbers: int, results: int, times: int) -> None:
    if numbers >= _LONG * results:
        cost.long_numbers += numbers * times
    elif numbers > results:
        cost.short_results += results * times
        cost.largest = max(cost.largest, numbers)


def _inputs_that_move(eqn: Any, program: Any, flags: Sequence[bool]) -> set[Any]:
    """Return the inputs of a called program that depend on the item; all if it is not clear."""
    if len(program.invars) != len(flags):
        return set(program.invars)
    flags = list(flags)
    if eqn.primitive.name == "scan":  # what is carried may depend on it after one step
        # In order: constants, carry, rows; inside, a row has one axis fewer. The parameters that
        # count them have other names in JAX 0.12.
        carried = _alike(eqn.outvars, program.outvars)
        consts = _alike(eqn.invars, program.invars) - carried
        flags[consts : consts + carried] = [True] * carried
    return {v for v, moves in zip(program.invars, flags, strict=True) if moves}


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Return how many values have as many axes outside a loop as inside."""
    pairs = zip(outside, inside, strict=True)
    return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)
