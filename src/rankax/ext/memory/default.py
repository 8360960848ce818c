# SPDX-License-Identifier: MIT
"""How many items a reduction evaluates at once where nothing bounds them.

Without a bound, the gradient of a sum over all pairs of 100,000 points stores 80 GB.

* On a CPU: a tile, as in a call with a large ``chunk_size``; all items where their values fit the
  second-level cache.
* On a GPU: as many items as have what XLA:GPU stores of them in 256 MiB. It stores few values,
  because it fuses arithmetic and even exponentials into the sum that follows. A gradient stores one
  value, which more than one sum reads: the result of a function, or of what is not fused, such as a
  product of matrices or a loop.
  Each step launches a few kernels, of 2 to 3 microseconds each, so chunks have millions of items,
  and whole rows of the reduced axes, up to twice that size. Measured with ``benchmarks/gpu.py``: on
  an H100, seven reductions are 1.2 to 1.7 times as fast as with 32 MiB, which fit its second-level
  cache, and gradients 1 to 1.5 times. On an H200, eight reductions then take 0.9 to 1.2 times as
  long as with `jax.vmap`, gradients of sums likewise, and those of `min` and `BottomK` 0.3 and 0.7
  times.

Tests: ``tests/reduce/test_default_chunk.py``, and ``tests/gpu`` for what the compiler stores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankax.core.plan.schedule import Plan, even_chunk_size
from rankax.ext.equations import FUNCTIONS, LIBRARIES, bytes_of, bytes_of_item, operations

_CPU_BYTES = 2**19  # of values that a reduction may have at once; half of a common cache
_CPU_ITEMS = 512  # the most in a tile without rules: larger ones are slow before JAX 0.12
_GPU_BYTES = 2**28
_MANY_STEPS, _FEW_NUMBERS = 20_000, 2**20

_STORED = {
    *FUNCTIONS,
    *LIBRARIES,
    *("rsqrt", "sqrt", "dot_general", "conv_general_dilated"),
    *("scatter", "scatter-add", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
}


def default_on_cpu(jaxpr: Any, sizes: Sequence[int], tile: int | None) -> int | None:
    """Return how many items a CPU evaluates at once; None: all.

    Parameters
    ----------
    jaxpr : Jaxpr
        The program of an item.
    sizes : sequence of int
        Of the levels, outermost first.
    tile : int or None
        As the rules for the compiler say, if there are any.
    """
    within = _CPU_BYTES // max(1, bytes_of_item(jaxpr))
    if math.prod(sizes) <= within:
        return None
    return max(1, tile or min(within, _CPU_ITEMS))


def default_on_gpu(jaxpr: Any, sizes: Sequence[int], row: int) -> int | None:
    """Return how many items a GPU evaluates at once; None: all.

    ``row``: how many of them are reduced to one.
    """
    stored = stored_bytes(jaxpr)
    if row * stored > 2 * _GPU_BYTES:  # each item of a part of a row has a running state
        stored = max(stored, sum(map(bytes_of, jaxpr.outvars)))
    most = max(1, _GPU_BYTES // stored)
    if most < row <= 2 * most:
        most = row
    return None if math.prod(sizes) <= most else even_chunk_size(sizes, most)


def small_steps(jaxpr: Any, plan: Plan) -> str:
    """Say which chunk size a GPU needs where a call makes many small steps; nothing if it does not.

    A step of 2**20 numbers takes an H100 about as long as the launch of its kernels.
    """
    each = max(stored_bytes(jaxpr), sum(map(bytes_of, jaxpr.outvars))) // 4
    is_small = plan.steps > _MANY_STEPS and plan.in_flight * each < _FEW_NUMBERS
    if any(level.walker for level in plan.levels) or not is_small:
        return ""
    sizes = [level.size for level in plan.levels]
    better = min(math.prod(sizes), even_chunk_size(sizes, max(1, _GPU_BYTES // (4 * each))))
    if better <= plan.in_flight:
        return ""
    return (
        f"{plan.steps} steps of {plan.in_flight} on a GPU, where each launches a few kernels; "
        f"chunk_size={better} makes {math.prod(sizes) // better}"
    )


def stored_bytes(jaxpr: Any) -> int:
    """Return the bytes of the largest value of an item that XLA:GPU stores, forward or back."""
    stored = [
        bytes_of(variable) * each.times
        for each in operations(jaxpr)
        if any(each.varying) and (each.name in _STORED or each.is_loop or each.times > 1)
        for variable in each.eqn.outvars
    ]
    return max([4, *stored])
