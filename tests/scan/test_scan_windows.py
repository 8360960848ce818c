# SPDX-License-Identifier: MIT
"""``save_at`` and ``reduce`` of `sliced_scan` against `jax.lax.scan`, then indices and windows."""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, refusal, slow, temporary_bytes, weekly
from rankax import reductions, sliced_scan
from scan_cases import (
    TRANSFORMATIONS,
    XS,
    assert_same_weak_types,
    body,
    drift,
    inputs,
    loss_and_gradient_of_scan,
    outputs_and_loss,
    sum_of_squares,
    traced,
)

# Each takes all outputs, and which of them are in the window.


def last(ys, where):
    return ys[-1 - jnp.argmax(where[::-1])]


def argmin(ys, where):
    return jnp.argmin(jnp.where(where, ys, jnp.inf)) - jnp.argmax(where)


def moments(ys, where):
    return reductions.MomentsResult(where.sum(), ys.mean(where=where), ys.var(where=where))


def bottom_1(ys, where):
    return reductions.TopKResult(ys.min(where=where, initial=9)[None], argmin(ys, where)[None])


def smoothed(ys, where):
    """Weigh each step half as much as the next; unlike a sum, this depends on the order."""
    total = jnp.float32(0)
    for y, in_window in zip(ys, where, strict=True):
        total = jnp.where(in_window, total / 2 + y, total)
    return total


SMOOTHED = reductions.Fold(
    (0.0, 1.0),
    lambda y: (y, jnp.float32(0.5)),
    lambda first, second: (first[0] * second[1] + second[0], first[1] * second[1]),
    lambda state: state[0],
)

REDUCTIONS = {
    "mean": ("mean", lambda ys, where: ys.mean(where=where)),
    "max": ("max", lambda ys, where: ys.max(where=where, initial=-9)),
    "moments": (reductions.Moments(), moments),
    "fold": (SMOOTHED, smoothed),
    "bottom 1": (reductions.BottomK(1), bottom_1),
    "last": ("last", last),
    "sum": ("sum", lambda ys, where: ys.sum(where=where)),
    "prod": ("prod", lambda ys, where: ys.prod(where=where)),
    "argmin": ("argmin", argmin),
    "logsumexp": ("logsumexp", lambda ys, where: jax.nn.logsumexp(ys, where=where)),
}


def windows(kept, total, *, reverse=False):
    """Return for each step kept which steps its window has, in the order of execution."""
    ends = np.asarray(kept) % total
    ends = total - 1 - ends if reverse else ends
    starts = [max([1 + end for end in ends if end < each], default=0) for each in ends]
    steps = np.arange(total)
    return (np.array(starts)[:, None] <= steps) & (steps <= ends[:, None])


def scan_then_reduce(f, init, xs, *, windows, fun, reverse=False):
    """Return the program in the docstring, leaf by leaf."""
    carry, ys = lax.scan(f, init, xs, reverse=reverse)
    ys = jax.tree.map(lambda y: y[::-1], ys) if reverse else ys
    return carry, jax.tree.map(lambda y: jax.vmap(fun, (None, 0))(y, windows), ys)


@pytest.mark.parametrize(
    ("length", "kept", "options"),
    [
        pytest.param(13, [0, 3, 4, 12], {"checkpoint": True}, id="in order"),
        pytest.param(13, [5, 1, 1, -1], {"reverse": True, "unroll": 2}, id="in any order, twice"),
        pytest.param(13, [9, 6, 3], {}, id="a range", marks=pytest.mark.slow),
        pytest.param(7, [], {"checkpoint": True}, id="none", marks=pytest.mark.slow),
    ],
)
def test_any_save_at_is_scan_then_index(length, kept, options):
    init, xs = inputs(length)

    def sliced(init, xs):
        return sliced_scan(body, init, xs, save_at=kept, **options)

    weights = np.arange(1.0, 1 + len(kept), dtype=np.float32)
    at_all = np.zeros(length, np.float32)
    np.add.at(at_all, np.asarray(kept, int), weights)
    plain = loss_and_gradient_of_scan(length, "reverse" in options)
    (loss, (carry, ys)), gradient = plain((init, xs), at_all)
    want = carry, jax.tree.map(lambda y: np.asarray(y)[np.asarray(kept, int)], ys)
    got, of_got = outputs_and_loss(sliced)((init, xs), weights)
    assert_same(got, want)
    assert_same_weak_types(got, (carry, ys))
    assert_same(of_got, ((loss, want), gradient))


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


@pytest.mark.parametrize(
    ("names", "kept", "options"),
    [
        pytest.param(
            ("moments", "fold", "bottom 1", "last"),
            [7, 2, -1],
            {"save_at": [7, 2, -1], "reverse": True, "checkpoint": True},
            id="in reverse",
        ),
        pytest.param(
            ("max", "argmin", "logsumexp", "prod"),
            range(3, 12, 4),
            {"start": 3, "step": 4},
            id="a slice",
            marks=pytest.mark.slow,
        ),
    ],
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

    def each(ys, where):
        return {name: REDUCTIONS[name][1](ys, where) for name in names}

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


def test_the_best_step_of_each_window():
    def step(carry, x):
        return carry + x, {"cost": jnp.sin(9 * x), "at": carry}

    _, best = sliced_scan(step, 0.0, XS, save_at=[4, 9], reduce=reductions.Best("cost"))
    ys = jax.device_get(lax.scan(step, 0.0, XS)[1])
    at = np.array([np.argmin(ys["cost"][:5]), 5 + np.argmin(ys["cost"][5:])])
    assert_same(best, jax.tree.map(lambda y: y[at], ys))


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


def test_last_is_the_output_of_the_kept_step():
    want = sliced_scan(drift, 0.3, XS, save_at=[1, 2, 7])
    assert_same(sliced_scan(drift, 0.3, XS, save_at=[1, 2, 7], reduce="last"), want)
    assert_same(sliced_scan(drift, 0.3, XS, save_at=[1, 2, 7], reduce=("last", None)), want)


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


KEPT = {"save_at": (7, 0, 2), "checkpoint": True}
WINDOWS = {"save_at": (7, 0, 2), "checkpoint": True, "reduce": "mean"}


@functools.cache
def weighted_scan(name):
    """Compile a transformation of the plain scan, once for all weights of its outputs."""

    def of(init, xs, weights):
        def scan(f, init, xs):
            carry, ys = lax.scan(f, init, xs)
            return carry, jax.tree.map(lambda y: weights @ y, ys)

        return TRANSFORMATIONS[name](sum_of_squares(scan))(init, xs)

    return jax.jit(of)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grad of checkpoint", KEPT),
        ("jvp in xs", KEPT),
        slow("hessian", WINDOWS),
        slow("vmap of grad", WINDOWS),
        weekly("grad of grad", KEPT),
        weekly("jacrev of jacfwd", WINDOWS),
        weekly("linearize", KEPT),
        weekly("vmap of xs", WINDOWS),
    ],
    ids=str,
)
def test_transformations(name, options):
    in_window = windows(options["save_at"], 10)
    mean = in_window / in_window.sum(1, keepdims=True)
    weights = mean if "reduce" in options else np.eye(10)[list(options["save_at"])]
    want = weighted_scan(name)(jnp.float32(0.3), XS, weights.astype("float32"))
    sliced = functools.partial(sliced_scan, **options)
    with jax.checking_leaks():
        got = jax.jit(TRANSFORMATIONS[name](sum_of_squares(sliced)))(jnp.float32(0.3), XS)
    assert_same(got, want, rtol=1e-4)


@pytest.mark.parametrize("options", [KEPT, WINDOWS], ids=["kept", "mean"])
def test_body_is_traced_once(options):
    traces = []

    def counted(carry, x):
        traces.append(x)
        return drift(carry, x)

    def total(init):
        carry, ys = sliced_scan(counted, init, XS, **options)
        return carry + sum(jnp.sum(y) for y in ys)

    traced(jax.grad(total))(jnp.array(0.3))
    assert len(traces) == 1


def test_debugging_runs_the_body_on_values():
    seen = []

    def printing(carry, x):
        seen.append(float(x))
        return carry + x, carry

    want = sliced_scan(lambda c, x: (c + x, c), jnp.float32(1.0), XS, **WINDOWS)
    with jax.disable_jit():
        got = sliced_scan(printing, jnp.float32(1.0), XS, **WINDOWS)
    assert seen == XS.tolist()
    assert_same(got, want)


def test_callbacks_and_reports_happen_at_every_step():
    seen, reports = [], []

    def note(x):
        seen.append(float(x))
        return np.float32(x)

    def noting(carry, x):
        x = jax.experimental.io_callback(note, jax.ShapeDtypeStruct((), "float32"), x, ordered=True)
        return carry + x, carry

    jax.block_until_ready(sliced_scan(noting, jnp.float32(0.0), XS, **WINDOWS))
    assert seen == XS.tolist()
    sliced_scan(drift, 0.3, XS, progress=lambda *pair: reports.append(pair), **WINDOWS)
    jax.effects_barrier()
    assert reports[-1] == (10, 10)


# Memory.

STATE = jax.ShapeDtypeStruct((512,), jnp.float32)


def move(state, force):
    state = state + 0.01 * (jnp.tanh(state) if force is None else jnp.sin(state) * force)
    return state, state**3


def growing(length):
    """Return 40 steps, each farther from the last one."""
    return np.unique(np.geomspace(1, length, 60).astype(int) - 1)[-40:]


CASES = {
    "save_at": lambda n: {"save_at": growing(n)},
    "mean": lambda n: {"start": n // 40 - 1, "step": n // 40, "reduce": "mean"},
    "moments": lambda n: {"save_at": growing(n), "reduce": reductions.Moments()},
}


@pytest.mark.optimized
@pytest.mark.parametrize("case", [weekly("mean"), slow("save_at"), "moments"])
def test_memory_is_flat_in_the_length(case):
    def needed(length, *xs):
        sliced = functools.partial(sliced_scan, move, length=length, **CASES[case](length))
        return temporary_bytes(sliced, STATE, *xs)

    xs = jax.ShapeDtypeStruct((20_000, 512), jnp.float32)
    assert max(needed(20_000), needed(20_000, xs)) <= needed(2000) + 16_384 <= 200_000


@pytest.mark.optimized
@pytest.mark.parametrize("case", [weekly("mean"), weekly("save_at"), "moments"])
def test_checkpoint_bounds_the_reverse_pass(case):
    def gradient(length):
        sliced = functools.partial(
            sliced_scan, move, length=length, checkpoint=True, **CASES[case](length)
        )
        return jax.grad(
            lambda state: sum(
                jnp.sum(y) for y in jax.tree.leaves(sliced(state)[1]) if y.dtype == jnp.float32
            )
        )

    # 40 carries, and a fortieth of what all 20,000 steps need: up to 9 arrays of 41 MB.
    assert temporary_bytes(gradient(20_000), STATE) < 10e6


def test_the_program_does_not_grow_with_the_outputs():
    def equations(kept):
        program = jax.make_jaxpr(lambda x: sliced_scan(drift, 0.3, x, save_at=kept))
        return len(str(program(jnp.ones(1000))).splitlines())

    assert equations(growing(1000)) == equations(growing(1000)[-5:])


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"save_at": [1, -2, 10]}, ValueError, "save_at[2] is 10, but there are only 10 steps"),
        ({"save_at": [1, -11]}, ValueError, "save_at[1] is -11, but there are only 10 steps"),
        ({"save_at": [1, 2.0]}, TypeError, "save_at[1] must be an int, got float"),
        ({"save_at": 3}, TypeError, "save_at must be a sequence of ints, got int"),
        (
            {"save_at": np.ones((2, 2), int)},
            TypeError,
            "save_at must be a sequence of ints, got ndarray",
        ),
        (
            {"save_at": [1], "start": 0, "step": 2},
            TypeError,
            "save_at excludes start, stop and step, got start and step",
        ),
        ({"reduce": "mena"}, ValueError, "no reduction is called 'mena'; did you mean 'mean'?"),
    ],
)
def test_bad_input_is_named(options, error, message):
    assert (
        refusal(error, sliced_scan, drift, 0.3, XS, **options) == f"sliced_scan(drift): {message}"
    )


def test_traced_indices_are_named():
    sliced = jax.jit(lambda at: sliced_scan(drift, 0.3, XS, save_at=at))
    text = "sliced_scan(drift): save_at[0] must be an int, got a traced array"
    assert refusal(TypeError, sliced, jnp.arange(3)) == text


def test_a_window_that_is_too_small_is_named():
    too_many = reductions.BottomK(2)
    text = refusal(ValueError, lambda: sliced_scan(drift, 0.3, XS, step=4, reduce=too_many))
    assert text.startswith("drift() at ")
    assert text.endswith(": BottomK(2) needs at least 2 items; the reduced axes have 1")
