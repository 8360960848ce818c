# SPDX-License-Identifier: MIT
"""When the rules for XLA on a CPU hold, what they answer, and the rule for tiles.

The tile is how many items a CPU evaluates at once. ``chunk_size`` is only an upper bound.

A tile has as many items as have their values in half of the second-level cache of a core; in a
derivative, which also computes cotangents, in a quarter of it. It has not so many that a short sum
goes to a library that XLA:CPU calls for sums, maxima and minima of 4096 numbers or more, unless it
is one of sines or their like: the library needs its operand stored first, and is faster for long
rows only. It has at least 512 where each tile calls LAPACK, sorts or transforms, and 16 where it
convolves, because such a call costs about as much as it takes for so many small items; and 256
where it reads a matrix for all of them that does not fit the cache.

A reduction has at most 1024 items in a tile, which keeps its running states in the cache; 8192 if
the library is to evaluate sines of numbers or their like, which needs 4096. One that adds a matrix
in each tile (`Gram`) has at least as many as the matrix has rows, or the sum of matrices would take
longer than the products.

Where an array has a kept axis after a reduced one, as in a sum along axis 0, each step takes one
item of the reduced axis and all of the kept one, if these have their values in the cache and
``chunk_size`` allows: numbers are read in the order in which they lie, and the running states are
one vector.

A loop is different where each tile is a product of matrices. The library computes that and, if the
slots of the tile are joined at once, all that follows, down to their sum; otherwise the product is
stored, and a loop of XLA adds it to the slots. So `_joined` joins them. With JAX 0.12, sums of six
of eleven such kernels take 0.67 to 0.86 times as long, of two with a function that XLA evaluates
number by number 0.09 and 0.33, and of three that are cheap 1.2 times, as long as by `jax.vmap`.

The library has sines and cosines in vectors, which XLA:CPU calls from C for each number, and more
functions that a loop of XLA evaluates one by one, or nearly (`_ONE_BY_ONE`; exponentials, roots and
logarithms are none). So sums of what they make of numbers are joined, too, in tiles that are long
enough for the library: sums of such functions take 0.1 to 0.9 times as long, 0.4 in the median,
gradients 0.2 to 1.0 and 0.65; kernels of densities, spectra and angles 0.1 to 0.6 and 0.2 to 0.8.
The library makes no choice, such as to leave an item out. So what fills no tile is evaluated after
the loop.

The tile must be known before the levels of a plan are cut. So a chunked kernel is traced first, and
the same program is then mapped: a call still traces it once. `plan` traces it, too. A batch that
fits one chunk has no tiles; it stays plain `jax.vmap`.

Measured by ``benchmarks/tile_sizes.py``. Tests: ``tests/xla_cpu/test_tiles.py``;
``test_upstream.py::test_short_sums_of_many_numbers_go_to_a_library`` fails when XLA:CPU no longer
calls the library, and the second sentence may go.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from rankax.core.base.cache import switch
from rankax.core.plan.schedule import Level, Tiles
from rankax.core.protocols import NO_RULES, Rules
from rankax.core.reduce.extrema import Chosen
from rankax.core.reduce.row import Accumulation, Elementwise
from rankax.core.trace.derivatives import RULES
from rankax.core.trace.programs import subprograms
from rankax.ext.equations import (
    CALLS,
    LIBRARIES,
    SUMS,
    Operation,
    bytes_of,
    bytes_of_item,
    of_item,
    operations,
)
from rankax.ext.reductions.accumulators import LogSumExpOf
from rankax.ext.xla_cpu import extremes, kept_residuals, kept_values, library

# In JAX 0.11.1, the time of a map in small chunks is quadratic in their number (jax issue 40101).
_ARE_TILES_SLOW = jax.__version_info__[:3] == (0, 11, 1)

#: Whether the rules hold for kernels that do not say so themselves.
DEFAULT = switch("RANKAX_XLA_CPU", default=True)

# Tiles.

_MOST_REDUCED = 1024
_MOST_IN_LIBRARY = 2 * library.LIBRARY_FROM  # in a reduction that leaves functions to the library
# Functions that XLA evaluates number by number, or nearly, and the library many at once.
_ONE_BY_ONE = {
    *("acosh", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf_inv", "expm1", "lgamma"),
    *("log1p", "sin", "sinh", "tan"),
}
_LONG = 16  # numbers for each result, from which on the library is faster than a loop
# The least number of items, where each tile calls these.
_LEAST = {**dict.fromkeys(LIBRARIES, 512), "conv_general_dilated": 16}
_LEAST_OF_LARGE = 256  # items for which a matrix is read that does not fit the cache
_FORWARD, _DERIVATIVE = 1 / 2, 1 / 4  # of the cache
_MAY_JOIN = {"dot_general", *_ONE_BY_ONE}
_CALLS = {*CALLS, *RULES}
_PRODUCTS_PER_BYTE = 8  # from which on a product of matrices takes longer than to store its result


def best_tiles(jaxpr: Any, updated: int = 0) -> Tiles:
    """Return how many items a tile should have, from the program of one item.

    ``updated``: the numbers that each tile reads and writes besides, such as a sum of matrices.
    """
    found = list(of_item(jaxpr))
    # A tile has as many values as the state that it updates, or the update takes longer.
    size = bytes_of_item(jaxpr)
    names = {each.name for each in found}
    slow = set[int]() if names.isdisjoint(_ONE_BY_ONE) else _made_one_by_one(jaxpr)
    sums = [each for each in found if not slow or slow.isdisjoint(map(id, each.eqn.invars))]
    short = max(map(_numbers_of_short_sum, sums), default=0)
    most = (library.LIBRARY_FROM - 1) // short if short else None
    least = max((_LEAST.get(each.name, 1) for each in found), default=1)
    if any(_bytes_of_matrix(each) > _cache_bytes() for each in found):
        least = max(least, _LEAST_OF_LARGE)

    def tile(share: float) -> int:
        fits = int(_cache_bytes() * share / max(1, size))
        return max(least, min(fits, most or fits), math.isqrt(updated))

    # Before JAX 0.12, and for matrices, XLA would copy all arrays into another layout.
    is_flat = all(v.aval.ndim <= 1 for v in jaxpr.invars) and least == 1
    may_cross = is_flat and not updated and library.IS_TUNED
    across = _cache_bytes() // max(1, size) if may_cross else 0
    most_reduced = _MOST_IN_LIBRARY if slow and _makes_numbers_one_by_one(found) else None
    return Tiles(tile(_FORWARD), tile(_DERIVATIVE), across=across, reduced=most_reduced)


def _pays_to_store(jaxpr: Any) -> bool:
    """Whether to store what an item computes takes less time than to compute it again.

    Elementwise operations run faster in the cache than their results are read from memory.
    """
    found = list(of_item(jaxpr))
    if any(each.name in LIBRARIES for each in found):
        return True
    products = sum(_numbers_of_product(each) * each.times for each in found)
    return products > _PRODUCTS_PER_BYTE * bytes_of_item(jaxpr)


@functools.cache
def _cache_bytes() -> int:
    """Return the size of the L2 cache of a core; a megabyte if the machine does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii")
        return int(text.strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 2**20


def _numbers_of_short_sum(operation: Operation) -> int:
    """Return how many numbers of an item a sum takes that a loop adds faster; 0 if it is none."""
    eqn, name = operation.eqn, operation.name
    if operation.calls or name not in (*SUMS, "dot_general"):
        return 0
    operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating) or operand.size <= out.size:
        return 0
    if name == "dot_general":
        _, (batch, _) = eqn.params["dimension_numbers"]
        is_dot = all(operation.varying) and out.ndim == len(batch)  # of two vectors
        return operand.size if is_dot and operand.size < _LONG * out.size else 0
    axes = eqn.params["axes"]
    is_row = {*axes} == {*range(operand.ndim)[-len(axes) :]}
    return 0 if is_row and operand.size >= _LONG * out.size else operand.size


def _bytes_of_matrix(operation: Operation) -> int:
    """Return the bytes of an operand of a product that all items share."""
    if operation.name != "dot_general" or not any(operation.varying):
        return 0
    pairs = zip(operation.eqn.invars, operation.varying, strict=True)
    return sum(bytes_of(v) for v, varies in pairs if not varies)


def _numbers_of_product(operation: Operation) -> int:
    """Return how many numbers a product with a matrix takes that all items share."""
    if operation.name != "dot_general" or operation.calls or all(operation.varying):
        return 0
    eqn = operation.eqn
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)


# What the library computes in the tiles of a reduction.


def _joined(step: Accumulation, jaxpr: Jaxpr, moving: set[Any]) -> Accumulation:
    """Return a sum that joins the slots of each tile, if the library then computes more.

    A tile is a product of matrices, one of which the row shares, or all items do; or it has
    functions that XLA evaluates one by one.
    """
    is_sum = isinstance(step.accumulator, Elementwise | LogSumExpOf) and step.accumulator.drifts
    if not is_sum or _names(jaxpr).isdisjoint(_MAY_JOIN):
        return step
    found = operations(jaxpr, moving)
    products = [each for each in found if each.name == "dot_general" and sum(each.varying) == 1]
    pays = products or _makes_numbers_one_by_one(found)
    return dataclasses.replace(step, joins=True) if pays else step


def _names(jaxpr: Jaxpr) -> set[str]:
    """Return the names of the operations of an item, and of the functions that it calls."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in _CALLS]
    return names.union(*[_names(program) for eqn in calls for program in subprograms(eqn)])


def _makes_numbers_one_by_one(found: Sequence[Operation]) -> bool:
    """Whether an item computes numbers only, some of them one by one, and chooses none.

    The library does not choose, and XLA does not hand it what it reads of a vector.
    """
    values = [v.aval for each in found for v in (*each.eqn.invars, *each.eqn.outvars)]
    slow = [each.eqn.outvars[0].aval.dtype for each in found if each.name in _ONE_BY_ONE]
    is_plain = not any(getattr(aval, "shape", ()) for aval in values)
    return jnp.float32 in slow and is_plain and all(each.name != "select_n" for each in found)


def _made_one_by_one(jaxpr: Jaxpr) -> set[int]:
    """Return the values of an item that depend on functions that XLA evaluates one by one."""
    found: set[int] = set()
    for eqn in jaxpr.eqns if library.IS_TUNED else ():
        if eqn.primitive.name in _ONE_BY_ONE or not found.isdisjoint(map(id, eqn.invars)):
            found.update(map(id, eqn.outvars))
    return found


# The rules, and when they hold.


class XlaCpu(Rules):
    """The rules. Before JAX 0.12, only those for tiles and extremes hold."""

    most_reduced = _MOST_REDUCED
    by_number = library.IS_TUNED

    def tiles(self, jaxpr: Jaxpr, updated: int) -> Tiles:
        return best_tiles(jaxpr, updated)

    def pays_to_store(self, jaxpr: Jaxpr) -> bool:
        return _pays_to_store(jaxpr)

    def evaluated(self, jaxpr: Jaxpr, mapped: Sequence[int]) -> Any:
        if not library.IS_TUNED:
            return jaxpr
        return kept_values.keep_inputs(kept_values.keep_values(jaxpr), mapped)

    def differentiated(self, jaxpr: Jaxpr, mapped: Sequence[int]) -> Any:
        own = self.evaluated(jaxpr, mapped)
        return kept_residuals.keep_residuals(own) if self.differs_back(jaxpr) else own

    def differs_back(self, jaxpr: Jaxpr) -> bool:
        return library.IS_TUNED and kept_residuals.slices_again(jaxpr)

    def stored(
        self, leaves: Sequence[Any], levels: tuple[Level, ...]
    ) -> tuple[list[Any], tuple[Level, ...]]:
        of = kept_values.by_component if library.IS_TUNED else super().stored
        return of(leaves, levels)

    def folded(self, step: Any, jaxpr: Jaxpr, moving: set[Any], *, again: bool) -> Any:
        if isinstance(step.accumulator, Chosen):
            return extremes.in_tiles(step, jaxpr, again=again)
        return _joined(step, jaxpr, moving) if library.IS_TUNED else step

    def compiled(self, fun: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        of = library.jit if library.IS_TUNED else super().compiled
        return of(fun, args, options)


_XLA_CPU = XlaCpu()


def rules_of(options: Any) -> Rules:
    """Return the rules of a call with these `Options`."""
    # Tiles may overlap, so that a key is used twice.
    checks_keys = getattr(jax.config, "jax_debug_key_reuse", False)
    holds = options.xla_cpu and options.on_cpu and not (checks_keys or _ARE_TILES_SLOW)
    return _XLA_CPU if holds else NO_RULES
