# SPDX-License-Identifier: MIT
"""Lanes compiled for an H100: its loops, what they launch, and which conditions the host reads.

A loop of unknown length costs a wait of the host for each condition, which takes as long as several
launches. A conditional costs none: it is part of a CUDA graph.
"""

import jax
import jax.numpy as jnp
import pytest

import cases
import h100
from cases import halved
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


@pytest.mark.parametrize(("kernel", "step"), [(halved, 2), (end, 11)], ids=["halved", "oscillator"])
def test_the_host_waits_once_in_eight_rounds(kernel, step):
    """Before, it waited in each round, and inside it once more in two steps of the loop.

    With 65,536 lanes, XLA sums in two kernels, so a round is a few more kernels than with 4096.
    """
    (outer,) = compiled(lanes(kernel)).loops
    (rounds,) = outer.loops
    (steps,) = rounds.loops
    assert (outer.steps, rounds.steps, steps.steps) == (None, 8, 8)
    assert outer.kernels + outer.copies <= 12
    assert rounds.kernels + rounds.copies <= 22
    assert steps.kernels + steps.copies <= step  # in two steps of the kernel's loop


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
