# SPDX-License-Identifier: MIT
"""The tiles that a CPU evaluates fastest, chosen from the program of one item.

A tile holds the items that are evaluated at once. ``chunk_size`` is only an upper bound. Large
tiles are good: each costs the same few hundred nanoseconds, whatever its size, and more if the item
sorts, convolves or factorises. For maps there are two reasons to stay below the bound:

* The cache. What a tile computes should fit, in a derivative above all, which stores it, and in an
  item with a loop, each step of which passes over the whole tile.
* A library that XLA:CPU calls in JAX 0.10 to 0.12, but not in 0.9 (``__ynn_fusion`` in a compiled
  program). It computes sums, maxima and minima of floats with an operand of 4096 numbers or more,
  and dot products of two vectors. The operand must be stored first, and is not fused with what
  computes it. On the other hand, the library sums long rows faster than a loop does, if what
  computes them reads in order (`rankax._trace.work.Order`).

A call that evaluates all items at once, and that this library compiles, may leave sums to loops of
XLA by an option of the compiler (`jit_at_once`). Of 82 random kernels for which
`pays_to_sum_in_loops`, none took longer than 1.03 times as long, and the mean took 0.33 (JAX 0.10)
or 0.40 (0.12). In chunks, tiles are small enough already.

`best_tiles` adds up these costs for each size of a tile and takes the least. Their ratios, `COSTS`,
are fitted to the times of 56 kernels, and checked on 27 others: see ``benchmarks/fit_tiles.py``,
which fits them again for another version of JAX.

Before JAX 0.11.1, XLA:CPU compiles a loop as one function if a step touches less than 1024 bytes
(``xla_cpu_small_call`` in a compiled program), which makes tiles of 8 or 16 items of some kernels 2
to 6 times as fast. These tiles are not chosen here, because what XLA fuses decides, which the
program of an item does not tell: of kernels with 52 bytes an item, tiles of 16, 4 or 2 are the
largest that are compiled so, and twice as many items are up to 16 times as slow. `kernel.tune`
tries them.

The tiles of a reduction also have a limit of their own, `_reduce.row.most_lanes`.

The tile must be known before the levels of a plan are cut. So a chunked kernel is traced first, and
the same program is then mapped: a call still traces it once. `plan` traces it, too. A batch that
fits one chunk has no tiles; it stays plain `jax.vmap`.

Test: ``test_upstream.py::test_short_sums_of_many_numbers_go_to_a_library``. When no supported JAX
calls the library, `Work.sums` and their costs may go.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rankax._base.messages import caller_level
from rankax._plan.batch import BatchPlan
from rankax._plan.levels import Tiles
from rankax._trace.kept_values import computes_again, keep_values
from rankax._trace.work import FUNCTIONS, SUMS, Work, operations, work_of

LIBRARY_OPTION = "xla_cpu_experimental_ynn_fusion_type"  # of XLA: what the library computes
PRODUCTS_ONLY = {LIBRARY_OPTION: "LIBRARY_FUSION_TYPE_DOT"}
_SHORT = 8  # numbers for each result, up to which a loop is faster than the library

_LARGEST = 4096  # items; a larger tile is no faster
_LIBRARY_FROM = 4096  # numbers of an operand; found by compiling, the same in JAX 0.10 and 0.12
# In JAX 0.11.1, the time of a map in small chunks is quadratic in their number (jax issue 40101).
_SLOW_IN_SMALL_CHUNKS = jax.__version_info__[:3] == (0, 11, 1)
_NOT_SMALL = 256  # items; measured
_PRODUCTS_PER_BYTE = 8  # from which on a product of matrices takes longer than to store its result


class Costs(NamedTuple):
    """What a call costs, where the unit is what each tile costs whatever its size."""

    library: float = 30.0  # of a tile, for each sort, transform or factorisation
    convolution: float = 30.0  # of a tile
    product: float = 1e-4  # of a tile, for each number of a matrix that all items share
    number: float = 1e-3  # that the library sums
    row: float = 2e-3  # for each number of a long row that a loop sums
    byte: float = 4e-5  # that the item computes, if those of the tile do not fit the cache
    forward: float = 1.0  # of the L2 cache, for a tile of a call
    loop: float = 1 / 2  # at most, if the item has a loop, each step of which passes over the tile
    derivative: float = 1 / 4  # of the L2 cache, for a tile of a derivative


COSTS = Costs()


def tiles_matter(compiler_options: Mapping[str, Any] | None = None) -> bool:
    """Whether a tile smaller than the chunk may be faster here, with these options of `jax.jit`."""
    return (
        jax.default_backend() == "cpu"
        and jax.__version_info__ >= (0, 10)
        and not getattr(jax.config, "jax_debug_key_reuse", False)  # tiles may overlap
        and LIBRARY_OPTION not in (compiler_options or {})
    )


def jit_at_once(
    fun: Callable[..., Any],
    args: Sequence[Any],
    items: int | None,
    compiler_options: Sequence[tuple[str, Any]] | None = None,
) -> Any:
    """Return ``jax.jit(fun)``, in which XLA:CPU sums in loops of its own where this is faster.

    Parameters
    ----------
    fun : callable
    args : sequence
        Those of a call; ``fun`` is traced for them, and JAX keeps the trace.
    items : int, optional
        How many the call evaluates, all at once. None: it runs in another way, or is transformed,
        which JAX refuses for a function with compiler options.
    compiler_options : sequence of pairs, optional
        Those of `jax.jit`.
    """
    given = dict(compiler_options or ())
    jitted = jax.jit(fun, compiler_options=given or None)
    config: Any = jax.config
    if (
        items is None
        or not tiles_matter(given)
        or jax.__version_info__ >= (0, 13)  # which may not know the option
        or LIBRARY_OPTION in os.environ.get("XLA_FLAGS", "")
        or config.jax_disable_jit
    ):
        return jitted
    jaxpr = jitted.trace(*args).jaxpr.jaxpr
    # Tracers that the function closes over are inputs, too.
    is_closed = len(jaxpr.invars) == len(jax.tree.leaves(args))
    if not is_closed or not pays_to_sum_in_loops(jaxpr, items):
        return jitted
    return jax.jit(fun, compiler_options=given | PRODUCTS_ONLY)


def pays_to_sum_in_loops(jaxpr: Any, items: int) -> bool:
    """Whether the program of a batch is faster if the library computes products only.

    Loops are faster for short sums, and slower for long rows. They evaluate functions such as
    `sin` number by number, and compute again what the library stores. Products with a matrix that
    all items share gain nothing. In which order an operand is read does not count here: the program
    is that of a batch, whose axis is in front.
    """
    short = long = 0
    for name, eqn, times, *_ in operations(jaxpr):
        if name in FUNCTIONS:
            return False
        if name not in (*SUMS, "dot_general"):
            continue
        operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if name == "dot_general":
            _, (batch, _) = eqn.params["dimension_numbers"]
            if not batch:
                return False
            if len(batch) < out.ndim:  # of matrices, one for each item
                continue
        is_float = jnp.issubdtype(out.dtype, jnp.floating)
        if is_float and operand.size >= _LIBRARY_FROM and operand.size > out.size:
            if operand.size <= _SHORT * out.size:
                short += operand.size * times
            elif name == "dot_general" or operand.ndim - 1 in eqn.params["axes"]:
                long += operand.size * times
    return short > long and not jaxpr.effects and not computes_again(jaxpr, items)


def best_tiles(program: Any, updated: int = 0) -> Tiles:
    """Return how many items a tile should have, from the ``ClosedJaxpr`` of one item.

    ``updated``: the numbers that each tile reads and writes besides, such as a sum of matrices.
    """
    work = work_of(keep_values(program.jaxpr))
    work.products += updated  # they cost what those of a matrix do that all items share
    return Tiles(_best_tile(work, COSTS.forward), _best_tile(work, COSTS.derivative))


def warn_of_small_chunks(plan: BatchPlan) -> None:
    """Warn of a map whose time grows with the square of its steps, in one version of JAX."""
    is_map = not plan.reduced and plan.lanes is None and jax.default_backend() == "cpu"
    if _SLOW_IN_SMALL_CHUNKS and is_map and plan.in_flight < _NOT_SMALL < plan.steps:
        warnings.warn(
            f"{plan.kernel}: JAX 0.11.1 is slow in many small chunks (here {plan.steps} of "
            f"{plan.in_flight}); use a chunk_size of {_NOT_SMALL} or more, or another JAX",
            stacklevel=caller_level(),
        )


def pays_to_store(program: Any) -> bool:
    """Whether to store what an item computes takes less time than to compute it again."""
    if jax.default_backend() != "cpu":
        return True
    # Elementwise operations run faster in the cache than their results are read from memory.
    work = work_of(program.jaxpr)
    return work.libraries > 0 or work.products > _PRODUCTS_PER_BYTE * work.bytes


@functools.cache
def _cache_bytes() -> int:
    """Return the size of the L2 cache of a core; a megabyte if the machine does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii")
        return int(text.strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 2**20


def _best_tile(work: Work, share: float) -> int | None:
    """Return the best number of items; None: as many as a chunk may have."""
    cache = _cache_bytes() * (min(share, COSTS.loop) if work.loops else share)
    sizes = {2**n for n in range(_LARGEST.bit_length())}
    sizes |= {max(1, (_LIBRARY_FROM - 1) // numbers) for numbers, _, _ in work.sums}
    if _SLOW_IN_SMALL_CHUNKS:
        sizes = {tile for tile in sizes if tile >= _NOT_SMALL}
    best = min(sizes, key=lambda tile: (cost_in_tile(work, tile, COSTS, cache), -tile))
    return None if best == _LARGEST else best


def cost_in_tile(work: Work, tile: int, costs: Costs, cache: float) -> float:
    """Return what an item costs in a tile of this size."""
    # A value that a barrier stores has a loop of its own.
    once = 1 + work.kept + costs.library * work.libraries + costs.convolution * work.convolutions
    cost = (once + costs.product * work.products) / tile
    for numbers, is_long, times in work.sums:
        if numbers * tile >= _LIBRARY_FROM:
            cost += costs.number * numbers * times
        elif is_long:
            cost += costs.row * numbers * times
    return cost + costs.byte * work.bytes * (work.bytes * tile >= cache)
