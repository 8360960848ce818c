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
  computes it. On the other hand, the library sums long rows faster than a loop does.

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
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rankax._base.messages import caller_level
from rankax._plan.batch import BatchPlan
from rankax._plan.levels import Tiles
from rankax._trace.kept_values import keep_values
from rankax._trace.work import Work, work_of

LIBRARY_OPTION = "xla_cpu_experimental_ynn_fusion_type"  # of XLA: what the library computes

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


def best_tiles(program: Any) -> Tiles:
    """Return how many items a tile should have, from the ``ClosedJaxpr`` of one item."""
    work = work_of(keep_values(program.jaxpr))
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
