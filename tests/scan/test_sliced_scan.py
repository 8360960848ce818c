# SPDX-License-Identifier: MIT
"""`sliced_scan` against `jax.lax.scan` followed by the slice."""

import functools
import itertools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, is_checkpoint, primitives, refusal, slow, weekly
from rankax import sliced_scan
from rankax.ext.scan.sliced import find_kept_steps
from scan_cases import (
    TRANSFORMATIONS,
    XS,
    assert_same_weak_types,
    body,
    drift,
    gradient_of_closed_over,
    here,
    inputs,
    loss_and_gradient_of_scan,
    outputs_and_loss,
    sum_of_squares,
    traced,
    traced_hessian,
    transformed_scan,
)


def scan_then_slice(f, init, xs=None, length=None, reverse=False, *, window):
    carry, ys = lax.scan(f, init, xs, length, reverse)
    return carry, jax.tree.map(lambda y: y[window], ys)


@pytest.mark.parametrize(
    ("length", "window", "options"),
    [
        pytest.param(
            20, slice(1, None, 4), {"checkpoint": True, "unroll": 3}, id="blocks that tile"
        ),
        pytest.param(20, slice(-2, 3, -3), {}, id="from the end"),
        pytest.param(
            13,
            slice(None, None, 5),
            {"checkpoint": True, "reverse": True},
            id="no room for the last block",
            marks=pytest.mark.slow,
        ),
        pytest.param(7, slice(1, None, 2), {}, id="one in front", marks=pytest.mark.slow),
        pytest.param(0, slice(2), {"unroll": True}, id="no steps", marks=pytest.mark.slow),
    ],
)
def test_any_slice_is_scan_then_slice(length, window, options):
    init, xs = inputs(length)
    bounds = {"start": window.start, "stop": window.stop, "step": window.step}

    def sliced(init, xs):
        return sliced_scan(body, init, xs, length, **bounds, **options)

    weights = np.arange(1.0, 1 + len(range(length)[window]), dtype=np.float32)
    at_all = np.zeros(length, np.float32)
    at_all[window] = weights
    plain = loss_and_gradient_of_scan(length, "reverse" in options)
    (loss, (carry, ys)), gradient = plain((init, xs), at_all)
    want = carry, jax.tree.map(lambda y: np.asarray(y)[window], ys)
    got, of_got = outputs_and_loss(sliced)((init, xs), weights)
    assert_same(got, want)
    assert_same_weak_types(got, (carry, ys))
    assert_same(of_got, ((loss, want), gradient))


def test_layout_keeps_just_the_steps_of_the_slice():
    starts, stops, steps = (None, -9, 0, 3), (None, -2, 5, 99), (None, 1, 2, 5, -1, -3)
    for length, *bounds in itertools.product((0, 1, 7, 13, 20), starts, stops, steps):
        for reverse in (False, True):
            window = slice(*bounds)
            kept = find_kept_steps(length, range(length)[window], reverse=reverse)
            block = [False] * kept.before + [True]
            walked = [False] * kept.lead + (
                block + [False] * (kept.stride - len(block))
            ) * kept.blocks
            walked += block * kept.partial
            walked += [False] * (length - len(walked))
            executed = range(length)[::-1] if reverse else range(length)
            wanted = set(range(length)[window])
            assert walked == [i in wanted for i in executed], (length, window, reverse)
            assert (kept.blocks == length) == (len(wanted) == length)


def random_walk(scan):
    """Compile a walk with keys in all that a scan takes and returns, with a derivative of it."""

    def walk(carry, x):
        position, key = carry
        key, draw = jax.random.split(key)
        kick = jax.random.normal(draw) * jax.random.uniform(x["key"])
        return (position + x["scale"] * kick, key), (x["key"], draw, position)

    def end(scale):
        keys = jax.random.split(jax.random.key(1), 9)
        init = (jnp.array(0.5), jax.random.key(2))
        carry, ys = scan(walk, init, {"key": keys, "scale": scale})
        return carry[0], (carry, ys)

    slope, (carry, ys) = jax.jit(jax.grad(end, has_aux=True))(jnp.linspace(0.1, 0.9, 9))
    return carry, ys, slope


@pytest.mark.parametrize(
    ("window", "checkpoint"), [(slice(1, None, 4), True), slow(slice(-1, None, -2), False)]
)
def test_random_keys_in_xs_carry_and_ys(window, checkpoint):
    bounds = {"start": window.start, "stop": window.stop, "step": window.step}
    carry, ys, slope = random_walk(lax.scan)
    want = carry, jax.tree.map(lambda y: y[window], ys), slope
    got = random_walk(functools.partial(sliced_scan, checkpoint=checkpoint, **bounds))
    assert_same(got, want)


def test_random_keys_without_jit():
    def walk(key, x):
        key, draw = jax.random.split(key)
        return key, (x, jax.random.normal(draw))

    key, keys = jax.random.key(2), jax.random.split(jax.random.key(1), 9)
    want = scan_then_slice(walk, key, keys, window=slice(1, None, 4))
    assert_same(sliced_scan(walk, key, keys, start=1, step=4), want)


def test_init_takes_the_dtype_of_the_carry():
    def add(carry, x):
        return carry + x, carry

    xs = jnp.linspace(0.0, 1.0, 7)
    got = sliced_scan(add, 0, xs, step=3)  # a weakly typed integer
    assert_same(got, scan_then_slice(add, 0, xs, window=slice(None, None, 3)))
    assert got[0].dtype == jnp.float32


# Programs.


@pytest.mark.parametrize(
    "options",
    [{}, {"start": -10}, {"step": 1, "stop": 99, "reverse": True}, {"start": 0, "stop": 10}],
    ids=str,
)
def test_nothing_skipped_is_the_program_of_scan(options):
    scale = jnp.arange(3.0)

    def closing_over(carry, x):
        return jnp.sin(carry) * scale + x, (carry, 1.0)

    def sliced(init, xs):
        return sliced_scan(closing_over, init, xs, unroll=2, **options)

    def plain(init, xs):
        return lax.scan(closing_over, init, xs, reverse="reverse" in options, unroll=2)

    got, want = (str(jax.make_jaxpr(scan)(jnp.zeros(3), XS)) for scan in (sliced, plain))
    assert got == want


@pytest.mark.parametrize(
    ("length", "transform", "checkpoint"),
    [(13, traced, True), (0, lambda f: f, False), slow(12, traced_hessian, False)],
)
def test_body_is_traced_once(length, transform, checkpoint):
    traces = []

    def counted(carry, x):
        traces.append(x)
        return drift(carry, x)

    def total(init):
        carry, ys = sliced_scan(
            counted, init, jnp.ones(length), start=1, step=4, checkpoint=checkpoint
        )
        return carry + sum(jnp.sum(y) for y in ys)

    transform(total)(jnp.array(0.3))
    assert len(traces) == 1


def test_body_is_traced_twice_for_a_weak_init():
    traces = []

    def counted(carry, x):
        traces.append(x)
        return carry + x, carry

    sliced_scan(counted, 0, XS, step=3)
    assert len(traces) == 2


def test_checkpoint_is_in_the_program_only_on_request():
    def count(checkpoint):
        def total(init, xs):
            return sliced_scan(drift, init, xs, start=1, step=4, checkpoint=checkpoint)[0]

        found = primitives(jax.grad(total), 0.3, XS)
        return sum(number for name, number in found.items() if is_checkpoint(name))

    assert count(checkpoint=False) == 0
    assert count(checkpoint=True) > 0


@pytest.mark.optimized
def test_compiler_drops_what_only_serves_skipped_ys():
    def costly(carry, x):
        carry = carry * 0.5 + x
        return carry, jnp.linalg.det(jnp.cos(jnp.outer(carry, carry)))

    def flops(fun):
        analysis = jax.jit(fun).lower(jnp.ones(8), jnp.ones((64, 8))).compile().cost_analysis()
        return analysis.get("transcendentals", 0)

    # The compiler counts the body of each loop once. So: none of it if all are skipped, and one of
    # it, not two, if a loop over skipped steps is nested in the one that keeps.
    assert flops(lambda init, xs: sliced_scan(costly, init, xs, stop=0)) == 0
    every = flops(lambda init, xs: sliced_scan(costly, init, xs))
    assert every >= 64
    assert flops(lambda init, xs: sliced_scan(costly, init, xs, step=16)) == every


# Transformations.


PLAIN = functools.partial(scan_then_slice, window=slice(1, None, 4))


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("grad of checkpoint", True),
        ("jvp in xs", True),
        slow("hessian", True),
        slow("vmap of grad", True),
        slow("linearize", False),
        weekly("grad of grad", False),
        weekly("jacrev of jacfwd", True),
        weekly("vmap of xs", False),
    ],
)
def test_transformations(name, checkpoint):
    transform = TRANSFORMATIONS[name]
    sliced = functools.partial(sliced_scan, start=1, step=4, checkpoint=checkpoint)
    with jax.checking_leaks():
        got = jax.jit(transform(sum_of_squares(sliced)))(jnp.float32(0.3), XS)
    assert_same(got, transformed_scan(name, PLAIN), rtol=1e-4)


def test_values_closed_over_get_gradients():
    sliced = functools.partial(sliced_scan, start=1, step=4, checkpoint=True)
    assert_same(gradient_of_closed_over(sliced), gradient_of_closed_over(PLAIN))


def test_debugging_runs_the_body_on_values():
    seen = []

    def printing(carry, x):
        seen.append((float(carry), float(x)))
        return carry + x, carry

    with jax.disable_jit():
        got = sliced_scan(printing, jnp.float32(1.0), XS[:3], step=2)
    assert seen == [(1.0, float(XS[0])), (1.0, float(XS[1])), (float(1 + XS[1]), float(XS[2]))]
    assert_same(got, (jnp.float32(1.0) + XS[1] + XS[2], jnp.array([1.0, 1.0 + XS[1]])))


def test_callbacks_happen_at_every_step():
    seen = []

    def note(x):
        seen.append(float(x))
        return np.float32(x)

    def noting(carry, x):
        x = jax.experimental.io_callback(note, jax.ShapeDtypeStruct((), "float32"), x, ordered=True)
        return carry + x, carry

    jax.block_until_ready(sliced_scan(noting, jnp.float32(0.0), XS, start=1, step=4))
    assert seen == XS.tolist()


def test_double_precision():
    with jax.enable_x64(True):
        xs = jnp.linspace(0.0, 1.0, 9)
        got = sliced_scan(drift, 0.3, xs, start=1, step=4)
        want = scan_then_slice(drift, 0.3, xs, window=slice(1, None, 4))
        assert got[0].dtype == jnp.float64
        assert_same(got, want, rtol=1e-12)


# Bad input.


def keeps(carry, x):
    return carry, x


def narrows(carry, x):
    return {"p": carry["p"].astype(jnp.int32), "q": carry["q"][:1], "r": carry["r"]}, x


def renames(carry, x):
    return {"p": carry["p"], "z": carry["q"]}, x


def relists(carry, x):
    return {"p": [*carry["p"]]}, x


def carry_only(carry, x):
    return carry + x


def three(carry, x):
    return carry, x, x


def words(carry, x):
    return carry, {"name": ["abc", x]}


STATE = {"p": jnp.ones(2), "q": jnp.ones(3), "r": jnp.ones(())}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 0}, ValueError, "step must not be 0"),
        ({"start": 1.0}, TypeError, "start must be an int or None, got float"),
        ({"xs": None, "length": -1}, ValueError, "length must be a non-negative int, got -1"),
        ({"xs": None, "length": True}, TypeError, "length must be a non-negative int, got True"),
        (
            {"xs": {"a": None}},
            ValueError,
            "give length, or xs with at least one array to scan over",
        ),
        (
            {"xs": {"a": XS, "b": (XS,)}, "length": 3},
            ValueError,
            "length is 3, but the leading axis of xs is 10; leave length out\n"
            "\n"
            "    leaf        shape  length\n"
            "  > xs['a']     (10,)  10\n"
            "  > xs['b'][0]  (10,)  10",
        ),
        (
            {"xs": {"a": XS, "b": (XS, XS[:3])}},
            ValueError,
            "the looped axes must have one length, got 10 and 3\n",
        ),
        ({"xs": {"a": XS, "b": 2.0}}, ValueError, "xs['b'] lacks the axis to loop over\n"),
        (
            {"init": {"name": "abc"}},
            TypeError,
            "init['name'] must be an array or a scalar, got str",
        ),
        ({"xs": [np.array(["abc"])]}, TypeError, "xs[0] must be an array or a scalar, got <U3[1]"),
        ({"unroll": -1}, ValueError, "unroll must be a bool or a non-negative int, got -1"),
        ({"unroll": 1.5}, TypeError, "unroll must be a bool or a non-negative int, got float"),
        ({"checkpoint": "yes"}, TypeError, "checkpoint must be True or False, got 'yes'"),
    ],
)
def test_bad_input_is_named(options, error, message):
    text = refusal(error, lambda: sliced_scan(keeps, **{"init": 0.0, "xs": XS, **options}))
    assert text.startswith(f"sliced_scan(keeps): {message}")


def test_what_is_traced_or_no_function_is_named():
    stopped = jax.jit(lambda n: sliced_scan(keeps, 0.0, XS, stop=n))
    text = "sliced_scan(keeps): stop must be an int or None, got a traced array"
    assert refusal(TypeError, stopped, 3) == text
    assert refusal(TypeError, sliced_scan, 3, 0.0, XS) == "sliced_scan: f must be callable, got int"


CARRY = "must return a carry with the"


@pytest.mark.parametrize(
    ("f", "init", "message"),
    [
        (carry_only, jnp.ones(3), "must return a pair (carry, y), got float32[3]"),
        (three, 0.0, "must return a pair (carry, y), got tuple of 3"),
        (
            narrows,
            STATE,
            f"{CARRY} shapes and dtypes of init; init['p'] and init['q'] differ\n"
            "\n"
            "    leaf       carry in    carry out\n"
            "  > init['p']  float32[2]  int32[2]\n"
            "  > init['q']  float32[3]  float32[1]\n"
            "    init['r']  float32[]   float32[]",
        ),
        (
            renames,
            STATE,
            f"{CARRY} structure of init; it lacks init['q'] and init['r'] and it adds init['z']\n",
        ),
        (relists, {"p": (1.0, 2.0)}, f"{CARRY} structure of init; its containers differ\n"),
    ],
)
def test_a_bad_body_is_named(f, init, message):
    text = refusal(TypeError, lambda: sliced_scan(functools.partial(f), init, XS))
    assert text.startswith(f"sliced_scan({f.__name__}): the scan body {here(f)} {message}")


def test_an_output_that_is_no_array_is_named():
    text = "sliced_scan(words): y['name'][0] must be an array or a scalar, got str"
    assert refusal(TypeError, sliced_scan, words, 0.0, XS) == text


def test_bad_shapes_are_found_before_tracing():
    def never(carry, x):
        raise AssertionError("traced")

    for wrong in ({"xs": [XS, XS[1:]]}, {"xs": XS, "length": 3}, {"xs": XS, "step": 0}, {}):
        with pytest.raises(ValueError, match=r"^sliced_scan\(never\): "):
            sliced_scan(never, 0.0, **wrong)


def test_errors_of_the_body_pass_through():
    def wrong(carry, x):
        raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError, match=r"^by the user"):
        sliced_scan(wrong, 0.0, XS)


def test_tangents_that_are_python_numbers():
    xs = jnp.linspace(0.1, 1.0, 13)

    def push(scan):
        def ends(rate):
            return scan(lambda carry, x: (carry * rate + x, carry * x), 1.0, xs)

        return jax.jvp(ends, (0.5,), (2.0,))

    def kept(carry, ys):
        return carry, ys[2:12:3]

    want = [kept(*part) for part in push(jax.lax.scan)]
    got = list(push(functools.partial(sliced_scan, start=2, stop=12, step=3)))
    assert_same(got, want)
