# SPDX-License-Identifier: MIT
"""The schedule of a reverse pass: which carries it stores, and which it computes again.

Some carries are on a stack, placed by the binomial rule of Griewank and Walther (*Algorithm 799:
revolve*, 2000): ``s`` of them reverse ``comb(s + r, s)`` steps if each step is evaluated at most
``r`` times more. Each number of steps is exact; the rule only decides how far apart they are.

Several loops, the lanes, may run at once; then their axes come first in the number of steps and in
each carry. All follow one schedule, that of the lane with the most steps, with scalar indices; a
lane that has ended stands still. (`jax.vmap` of a reverse pass would select all stored carries at
each step.)

A lane that stands still is evaluated at its last step, with a cotangent of zero. At its last carry,
the body may have no finite derivative, and ``0 * inf`` would spoil what all lanes share. A lane
without steps is evaluated at the first carry of another lane.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Step = Callable[[list[Any]], list[Any]]

_REPEATS = np.unique(np.geomspace(1, 2**16, 128).astype(int))


@functools.cache
def _reach(stored: int) -> Any:
    """Return how many steps ``s`` carries reverse, each step evaluated at most ``r`` times more."""
    table = np.full((stored + 1, len(_REPEATS)), 2**31 - 1, np.int32)
    for s, row in enumerate(table):
        counts = (math.comb(s + int(r), s) for r in _REPEATS)
        few = [*itertools.takewhile(lambda count: count < 2**31, counts)]
        row[: len(few)] = few
    return table


def choose(ok: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Return ``new`` in the lanes that are ok, and ``old`` in the others."""
    return [
        jnp.where(lax.expand_dims(ok, range(ok.ndim, a.ndim)), a, b)
        for a, b in zip(new, old, strict=True)
    ]


def advance(step: Step, carry: list[Any], begin: Any, end: Any, stops: Any) -> list[Any]:
    """Evaluate steps; a lane stands still from its own stop on."""

    def advance(i: Any, carry: list[Any]) -> list[Any]:
        new = step(carry)
        return choose(i < stops, new, carry) if stops.ndim else new

    return lax.fori_loop(begin, end, advance, carry)


def reverse_pass(
    step: Step,
    back: Callable[[Any, list[Any], list[Any]], list[Any]],
    steps: Any,
    init: list[Any],
    cotangents: list[Any],
    max_stored: int,
) -> list[Any]:
    """Take cotangents back through a loop.

    Parameters
    ----------
    step : callable
        From a carry to the next one.
    back : callable
        Takes whether each lane makes this step, the carry before it, and the cotangents after it.
    steps : array of int32
        How many steps each lane makes.
    init : list of arrays
        The first carry.
    cotangents : list of arrays
        Those of the last carry, and others that ``back`` adds to.
    max_stored : int
        How many carries are stored, besides the one before the current step.
    """
    reach, repeats = jnp.asarray(_reach(max_stored)), jnp.asarray(_REPEATS, jnp.float32)
    if steps.size > 1:
        longest = jnp.argmax(steps)
        flat = [x.reshape(steps.size, *x.shape[steps.ndim :]) for x in init]
        others = [lax.expand_dims(x[longest], range(steps.ndim)) for x in flat]
        init = choose(steps > 0, init, others)

    def at(slots: list[Any], i: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in slots]

    def store(end: Any, stack: Any) -> Any:
        """Store a carry nearer to the end."""
        top, starts, slots = stack
        begin, free = starts[top], max_stored - top
        left = end - begin
        r = repeats[jnp.sum(reach[free] < left, dtype=jnp.int32)]
        share = left.astype(jnp.float32) * (r / (r + free.astype(jnp.float32)))
        ahead = jnp.clip(share.astype(jnp.int32), 1, left - 1)
        ahead = begin + jnp.where(free > 1, ahead, left - 1)
        carry = advance(step, at(slots, top), begin, ahead, steps - 1)
        top += 1
        put = lax.dynamic_update_index_in_dim
        slots = [put(x, new, top, 0) for x, new in zip(slots, carry, strict=True)]
        return top, starts.at[top].set(ahead), slots

    def step_back(state: Any) -> Any:
        """Go back by a step, with the carry before it on top of the stack."""
        end, stack, cotangents = state
        top, starts, slots = lax.while_loop(
            lambda stack: end - stack[1][stack[0]] > 1, functools.partial(store, end), stack
        )
        ok = end <= steps if steps.ndim else jnp.array(True)
        return end - 1, (top - 1, starts, slots), back(ok, at(slots, top), cotangents)

    slots = [jnp.broadcast_to(x, (max_stored + 1, *x.shape)) for x in init]
    stack = jnp.int32(0), jnp.zeros(max_stored + 1, jnp.int32), slots
    start = jnp.max(steps, initial=0), stack, cotangents
    return lax.while_loop(lambda state: state[0] > 0, step_back, start)[2]
