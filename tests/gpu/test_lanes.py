# SPDX-License-Identifier: MIT
"""Lanes compiled for an H100: its loops, what they launch, and which conditions the host reads.

A loop of unknown length costs a wait of the host for each condition, which takes as long as several
launches. A conditional costs none: it is part of a CUDA graph.
"""

import jax
import jax.numpy as jnp

import cases
import h100
from lockstep import oscillator
from rankax import auto_vmap

ITEMS = 100_000


def end(x):
    return oscillator(x)[0]


def lanes(kernel):
    return auto_vmap(0, lockstep=False)(kernel)


def gradient(mapped):
    return jax.grad(lambda x: jnp.sum(mapped(x) ** 2))


def compiled(fun, items=ITEMS):
    return cases.compiled(fun, h100.shaped(items))


def lengths(loops, depth=0):
    """Return how deep each loop is, and its steps (None: the host asks)."""
    found = []
    for loop in loops:
        found += [(depth, loop.steps), *lengths(loop.loops, depth + 1)]
    return found


def test_loops_of_a_gradient():
    """Of nine loops, two are gone: those over tiles forward, and over the steps of a tile."""
    assert lengths(compiled(gradient(lanes(end))).loops) == [
        # Lanes compute the values, and count the steps, by which the items are sorted.
        *[(0, None), (1, 8), (2, 8)],
        # Backward, over tiles of items, as many as there are lanes.
        (0, 2),
        # The steps of a tile again: their number and the last carry were not stored, because these
        # would be as long as the batch. The length differs from tile to tile.
        (1, None),
        # The steps of a tile, from the last to the first.
        (1, None),
        # The carries that are stored on the way to a step: in most steps none, for it is there.
        (2, None),
        # The steps from one stored carry to the next. A fixed number of them would be too many:
        # most of these carries are next to each other.
        (3, None),
    ]


def test_memory_is_that_of_the_lanes():
    """It is the same for ten times as many items."""

    def temporaries(items):
        return compiled(lanes(end), items).temporaries

    assert temporaries(10 * ITEMS) <= temporaries(ITEMS) + 4096 < 6e6  # was 0.3e6 for 4096 lanes
