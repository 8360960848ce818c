# SPDX-License-Identifier: MIT
"""``save_at`` and ``reduce`` of `sliced_scan` against `jax.lax.scan`, then indices and windows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, refusal, slow
from rankax import reductions, sliced_scan
from scan_cases import XS, drift


def smoothed(ys):
    """Weigh each step half as much as the next; unlike a sum, this depends on the order."""
    return ys @ jnp.asarray(0.5 ** np.arange(len(ys))[::-1], ys.dtype)


SMOOTHED = reductions.Fold(
    (0.0, 1.0),
    lambda y: (y, jnp.float32(0.5)),
    lambda first, second: (first[0] * second[1] + second[0], first[1] * second[1]),
    lambda state: state[0],
)

# Each, and what it makes of the outputs in a window.
REDUCTIONS = {
    "mean": ("mean", jnp.mean),
    "max": ("max", jnp.max),
    "fold": (SMOOTHED, smoothed),
    "last": ("last", lambda ys: ys[-1]),
    "prod": ("prod", jnp.prod),
    "argmin": ("argmin", jnp.argmin),
    "logsumexp": ("logsumexp", jax.nn.logsumexp),
}


def windows(kept, total, *, reverse=False):
    """Return for each step kept the slice of its window, in the order of execution."""
    ends = np.asarray(kept) % total
    ends = total - 1 - ends if reverse else ends
    starts = [max([1 + end for end in ends if end < each], default=0) for each in ends]
    return [slice(start, end + 1) for start, end in zip(starts, ends, strict=True)]


def scan_then_reduce(f, init, xs, *, windows, fun, reverse=False):
    """Return the program in the docstring."""
    carry, ys = lax.scan(f, init, xs, reverse=reverse)
    ys = ys[::-1] if reverse else ys
    return carry, jax.tree.map(lambda *each: jnp.stack(each), *(fun(ys[w]) for w in windows))


def walk(carry, x):
    carry = jnp.sin(2 * carry) + x
    return carry, carry * x + jnp.float32(0.1)


NOISE = jnp.asarray(np.cos(3 * np.arange(12.0)) / 2)


def outputs_and_gradient(scan):
    def loss(init, xs, weights):
        carry, ys = scan(init, xs)
        floats = [y for y in jax.tree.leaves(ys) if jnp.issubdtype(y.dtype, jnp.floating)]
        sums = [jnp.vdot(weights, y) for y in floats]
        return carry + sum(number * each for number, each in enumerate(sums, 1)), (carry, ys)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


IN_REVERSE = {"save_at": [7, 2, -1], "reverse": True, "checkpoint": True}


@pytest.mark.parametrize(
    ("names", "kept", "options"),
    [
        (("fold", "last", "mean"), [7, 2, -1], IN_REVERSE),
        slow(("max", "argmin", "logsumexp", "prod"), range(3, 12, 4), {"start": 3, "step": 4}),
    ],
    ids=["in reverse", "a slice"],
)
def test_any_window_is_scan_then_reduce(names, kept, options):
    reverse = "reverse" in options

    def step(carry, x):
        carry, y = walk(carry, x)
        return carry, dict.fromkeys(names, y)

    def sliced(init, xs):
        reduce = {name: REDUCTIONS[name][0] for name in names}
        return sliced_scan(step, init, xs, reduce=reduce, **options)

    def plain(init, xs):
        chosen = windows(kept, 12, reverse=reverse)
        return scan_then_reduce(walk, init, xs, windows=chosen, fun=each, reverse=reverse)

    def each(ys):
        return {name: REDUCTIONS[name][1](ys) for name in names}

    args = jnp.float32(0.3), NOISE, np.cos(np.arange(3, dtype=np.float32))
    got, want = (outputs_and_gradient(scan)(*args) for scan in (sliced, plain))
    assert_same(got, want, rtol=1e-4)


def test_a_step_that_is_computed_twice_is_found():
    """XLA:CPU fuses it into a value and a comparison, with different rounding."""

    def step(carry, x):
        carry = jnp.sin(2 * carry) + x
        y = carry * x + jnp.float32(0.1)
        return carry, (y, y)

    pair = ("argmin", reductions.BottomK(1))
    _, (at, top) = sliced_scan(step, jnp.float32(0.3), NOISE, step=1, reduce=pair)
    assert_same((at, top.indices), (jnp.zeros(12, int), jnp.zeros((12, 1), int)))


def test_equal_items_in_a_window_have_these_derivatives():
    def each(reduce):
        return jax.grad(
            lambda xs: sliced_scan(lambda c, x: (c, x), 0.0, xs, save_at=[3], reduce=reduce)[1][0]
        )

    found = jax.jit(lambda xs: (each("logsumexp")(xs), each("max")(xs)))(jnp.ones(4))
    assert_same(found, (np.full(4, 0.25, "f"), np.array([1, 0, 0, 0], "f")))


def test_a_reduction_for_each_output():
    def step(carry, x):
        carry = carry + x
        return carry, {"total": carry, "x": (x, x > 0.5), "key": jax.random.key(0)}

    keep = {"total": "mean", "x": ("max", "any"), "key": None}
    _, ys = sliced_scan(step, 0.0, XS, save_at=[4, 9], reduce=keep)
    totals = jnp.cumsum(XS)
    assert_same(ys["total"], jnp.stack([totals[:5].mean(), totals[5:].mean()]))
    assert_same(ys["x"], (XS[jnp.array([4, 9])], jnp.array([False, True])))
    assert ys["key"].shape == (2,)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("int8")])
def test_narrow_outputs(dtype):
    def step(carry, x):
        return carry + x, (10 * (carry + x)).astype(dtype)

    got = sliced_scan(step, 0.0, XS, save_at=[0, 3, 9], reduce="mean")
    mean, at = REDUCTIONS["mean"][1], [0, 3, 9]
    plain = functools.partial(scan_then_reduce, windows=windows(at, 10), fun=mean)
    assert_same(got, jax.jit(plain, static_argnums=0)(step, 0.0, XS), rtol=1e-2)
    sampled = sliced_scan(step, 0.0, XS, save_at=at)[1]
    assert_same(sampled, np.asarray(lax.scan(step, 0.0, XS)[1])[at])


# Programs.


def test_the_program_does_not_grow_with_the_outputs():
    def equations(kept):
        program = jax.make_jaxpr(lambda x: sliced_scan(drift, 0.3, x, save_at=kept))
        return len(str(program(jnp.ones(1000))).splitlines())

    at = np.arange(1, 41) ** 2 // 2  # each farther from the last one
    assert equations(at) == equations(at[-5:])


# Bad input.


def test_traced_indices_are_named():
    sliced = jax.jit(lambda at: sliced_scan(drift, 0.3, XS, save_at=at))
    text = "sliced_scan(drift): save_at[0] must be an int, got a traced array"
    assert refusal(TypeError, sliced, jnp.arange(3)) == text


def test_a_window_that_is_too_small_is_named():
    too_many = reductions.BottomK(2)
    text = refusal(ValueError, lambda: sliced_scan(drift, 0.3, XS, step=4, reduce=too_many))
    assert text.startswith("drift() at ")
    assert text.endswith(": BottomK(2) needs at least 2 items; the reduced axes have 1")
