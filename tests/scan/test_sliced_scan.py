# SPDX-License-Identifier: MIT
"""`sliced_scan` against `jax.lax.scan` followed by the slice."""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

from helpers import assert_same, is_checkpoint, primitives, slow
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


bounds = st.none() | st.integers(-24, 24)
steps = st.none() | st.integers(-8, 8).filter(bool)


@given(
    length=st.sampled_from([0, 1, 7, 13, 20]),
    start=bounds,
    stop=bounds,
    step=steps,
    reverse=st.booleans(),
    unroll=st.booleans() | st.integers(0, 5),
    with_xs=st.booleans(),
    checkpoint=st.booleans(),
)
@example(7, 1, None, 2, False, 1, True, False)  # one step skipped in front
@example(7, None, None, 7, True, 1, True, True)
@example(20, 1, None, 4, True, 3, True, True)  # blocks that tile, the kept step inside
@example(13, None, None, 5, False, 1, True, True)  # no room for the last block
@example(13, None, None, 5, True, 1, True, False)
def test_any_slice_is_scan_then_slice(
    length, start, stop, step, reverse, unroll, with_xs, checkpoint
):
    init, xs = inputs(length, with_xs)

    def sliced(init, xs):
        return sliced_scan(
            body, init, xs, length, reverse, unroll,
            start=start, stop=stop, step=step, checkpoint=checkpoint,
        )  # fmt: skip

    window = slice(start, stop, step)
    weights = np.arange(1.0, 1 + len(range(length)[window]), dtype=np.float32)
    at_all = np.zeros(length, np.float32)
    at_all[window] = weights
    reference = loss_and_gradient_of_scan(length, reverse)
    (loss, (carry, ys)), gradient = reference((init, xs), at_all)
    want = carry, jax.tree.map(lambda y: np.asarray(y)[window], ys)
    got, of_got = outputs_and_loss(sliced)((init, xs), weights)
    assert_same(got, want)
    assert_same_weak_types(got, (carry, ys))
    assert_same(of_got, ((loss, want), gradient))


@given(st.integers(0, 60), bounds, bounds, steps, st.booleans())
def test_layout_keeps_just_the_steps_of_the_slice(length, start, stop, step, reverse):
    window = slice(start, stop, step)
    kept = find_kept_steps(length, range(length)[window], reverse=reverse)
    block = [False] * kept.before + [True]
    walked = [False] * kept.lead + (block + [False] * (kept.stride - len(block))) * kept.blocks
    walked += block * kept.partial
    walked += [False] * (length - len(walked))
    executed = range(length)[::-1] if reverse else range(length)
    wanted = set(range(length)[window])
    assert walked == [i in wanted for i in executed]
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


@functools.cache
def random_walk_of_scan():
    return random_walk(lax.scan)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(
    "window",
    [slice(1, None, 4), slice(-1, None, -2), slow(slice(0)), slow(slice(2, 3))],
    ids=["every fourth", "from the end", "none", "one"],
)
@pytest.mark.quick("every fourth-True", "from the end-False")
def test_random_keys_in_xs_carry_and_ys(window, checkpoint):
    bounds = {"start": window.start, "stop": window.stop, "step": window.step}
    carry, ys, slope = random_walk_of_scan()
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
    "bounds", [{}, {"start": -10}, {"step": 1, "stop": 99}, {"start": 0, "stop": 10}]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_nothing_skipped_is_the_program_of_scan(bounds, reverse):
    scale = jnp.arange(3.0)

    def closing_over(carry, x):
        return jnp.sin(carry) * scale + x, (carry, 1.0)

    def sliced(init, xs):
        return sliced_scan(closing_over, init, xs, reverse=reverse, unroll=2, **bounds)

    def plain(init, xs):
        return lax.scan(closing_over, init, xs, reverse=reverse, unroll=2)

    got, want = (str(jax.make_jaxpr(scan)(jnp.zeros(3), XS)) for scan in (sliced, plain))
    assert got == want


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, traced, slow(traced_hessian)])
@pytest.mark.parametrize("length", [0, slow(1), slow(12), 13])
@pytest.mark.quick("13-traced-True", "0-<lambda>-False")
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


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("checkpoint", [slow(False), True])
@pytest.mark.quick("True-grad", "True-jvp in xs", "True-grad of checkpoint")
@pytest.mark.merge(
    *("True-hessian", "False-grad of grad", "True-jacrev of jacfwd", "False-jvp"),
    *("False-linearize", "True-vmap of init", "False-vmap of xs", "True-vmap of grad"),
    "True-grad of jit",
)
def test_transformations(name, checkpoint):
    transform = TRANSFORMATIONS[name]
    sliced = functools.partial(sliced_scan, start=1, step=4, checkpoint=checkpoint)
    with jax.checking_leaks():
        got = jax.jit(transform(sum_of_squares(sliced)))(jnp.float32(0.3), XS)
    assert_same(got, transformed_scan(name, PLAIN), rtol=1e-4)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_values_closed_over_get_gradients(checkpoint):
    sliced = functools.partial(sliced_scan, start=1, step=4, checkpoint=checkpoint)
    plain = functools.partial(scan_then_slice, window=slice(1, None, 4))
    assert_same(gradient_of_closed_over(sliced), gradient_of_closed_over(plain))


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
    ("call", "error", "message"),
    [
        (
            lambda: sliced_scan(keeps, 0.0, XS, step=0),
            ValueError,
            "sliced_scan(keeps): step must not be 0",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, XS, start=1.0),
            TypeError,
            "sliced_scan(keeps): start must be an int or None, got float",
        ),
        (
            lambda: jax.jit(lambda n: sliced_scan(keeps, 0.0, XS, stop=n))(3),
            TypeError,
            "sliced_scan(keeps): stop must be an int or None, got a traced array",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, {"a": XS, "b": (XS,)}, length=3),
            ValueError,
            "sliced_scan(keeps): length is 3, but the leading axis of xs is 10; leave length out\n"
            "\n"
            "    leaf        shape  length\n"
            "  > xs['a']     (10,)  10\n"
            "  > xs['b'][0]  (10,)  10",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, None, -1),
            ValueError,
            "sliced_scan(keeps): length must be a non-negative int, got -1",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, None, 3.0),
            TypeError,
            "sliced_scan(keeps): length must be a non-negative int, got float",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, None, True),
            TypeError,
            "sliced_scan(keeps): length must be a non-negative int, got True",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, {"a": None}),
            ValueError,
            "sliced_scan(keeps): give length, or xs with at least one array to scan over",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, {"a": XS, "b": (XS, XS[:3])}),
            ValueError,
            "sliced_scan(keeps): the looped axes must have one length, got 10 and 3\n"
            "\n"
            "    leaf        shape  axis  length\n"
            "    xs['a']     (10,)  0     10\n"
            "    xs['b'][0]  (10,)  0     10\n"
            "  > xs['b'][1]  (3,)   0     3",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, {"a": XS, "b": 2.0}),
            ValueError,
            "sliced_scan(keeps): xs['b'] lacks the axis to loop over\n"
            "\n"
            "    leaf     shape  axis\n"
            "    xs['a']  (10,)  0\n"
            "  > xs['b']  ()     0",
        ),
        (
            lambda: sliced_scan(keeps, {"name": "abc"}, XS),
            TypeError,
            "sliced_scan(keeps): init['name'] must be an array or a scalar, got str",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, [np.array(["abc"])]),
            TypeError,
            "sliced_scan(keeps): xs[0] must be an array or a scalar, got <U3[1]",
        ),
        (
            lambda: sliced_scan(3, 0.0, XS),
            TypeError,
            "sliced_scan: f must be callable, got int",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, XS, unroll=-1),
            ValueError,
            "sliced_scan(keeps): unroll must be a bool or a non-negative int, got -1",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, XS, unroll=1.5),
            TypeError,
            "sliced_scan(keeps): unroll must be a bool or a non-negative int, got float",
        ),
        (
            lambda: sliced_scan(keeps, 0.0, XS, checkpoint="yes"),
            TypeError,
            "sliced_scan(keeps): checkpoint must be True or False, got 'yes'",
        ),
        (
            lambda: sliced_scan(carry_only, jnp.ones(3), XS),
            TypeError,
            f"sliced_scan(carry_only): the scan body {here(carry_only)} must return a pair "
            "(carry, y), got float32[3]",
        ),
        (
            lambda: sliced_scan(functools.partial(three), 0.0, XS),
            TypeError,
            f"sliced_scan(three): the scan body {here(three)} must return a pair "
            "(carry, y), got tuple of 3",
        ),
        (
            lambda: sliced_scan(words, 0.0, XS),
            TypeError,
            "sliced_scan(words): y['name'][0] must be an array or a scalar, got str",
        ),
        (
            lambda: sliced_scan(narrows, STATE, XS),
            TypeError,
            f"sliced_scan(narrows): the scan body {here(narrows)} must return a carry with the "
            "shapes and dtypes of init; init['p'] and init['q'] differ\n"
            "\n"
            "    leaf       carry in    carry out\n"
            "  > init['p']  float32[2]  int32[2]\n"
            "  > init['q']  float32[3]  float32[1]\n"
            "    init['r']  float32[]   float32[]",
        ),
        (
            lambda: sliced_scan(renames, STATE, XS),
            TypeError,
            f"sliced_scan(renames): the scan body {here(renames)} must return a carry with the "
            "structure of init; it lacks init['q'] and init['r'] and it adds init['z']\n"
            "\n"
            "    carry     structure\n"
            "    init      PyTreeDef({'p': *, 'q': *, 'r': *})\n"
            "  > returned  PyTreeDef({'p': *, 'z': *})",
        ),
        (
            lambda: sliced_scan(relists, {"p": (1.0, 2.0)}, XS),
            TypeError,
            f"sliced_scan(relists): the scan body {here(relists)} must return a carry with the "
            "structure of init; its containers differ\n"
            "\n"
            "    carry     structure\n"
            "    init      PyTreeDef({'p': (*, *)})\n"
            "  > returned  PyTreeDef({'p': [*, *]})",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


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
