# SPDX-License-Identifier: MIT
"""`sliced_scan` against `jax.lax.scan` followed by the slice."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, is_checkpoint, primitives, refusal
from rankax import sliced_scan
from rankax.ext.scan.sliced import find_chunks
from scan_cases import XS, drift, here


def scan_then_slice(f, init, xs, **window):
    carry, ys = lax.scan(f, init, xs)
    bounds = (window.get(bound) for bound in ("start", "stop", "step"))
    return carry, ys[slice(*bounds)]


def test_layout_keeps_just_the_steps_of_the_slice():
    starts, stops, steps = (None, -9, 0, 3), (None, -2, 5, 99), (None, 1, 2, 5, -1, -3)
    for length, *bounds in itertools.product((0, 1, 7, 13, 20), starts, stops, steps):
        for reverse in (False, True):
            window = slice(*bounds)
            executed = range(length)[::-1] if reverse else range(length)
            lead, before, stride, end = find_chunks(length, executed[window])
            in_chunks = [at % stride == before for at in range(end - lead)]
            walked = [False] * lead + in_chunks + [False] * (length - end)
            wanted = set(range(length)[window])
            assert walked == [i in wanted for i in executed], (length, window, reverse)
            assert len(range(lead, end, stride)) == len(wanted)  # each chunk has its own


def test_init_takes_the_dtype_of_the_carry():
    traces = []

    def add(carry, x):
        traces.append(x)
        return carry + x, carry

    got = sliced_scan(add, 0, XS, step=3)  # a weakly typed integer, so it is traced again
    assert len(traces) == 2
    assert_same(got, scan_then_slice(add, 0, XS, step=3))
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


@pytest.mark.parametrize("checkpoint", [False, True])
def test_checkpoint_is_in_the_program_only_on_request(checkpoint):
    def total(init, xs):
        return sliced_scan(drift, init, xs, start=1, step=4, checkpoint=checkpoint)[0]

    assert any(map(is_checkpoint, primitives(jax.grad(total), 0.3, XS))) == checkpoint


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


# Bad input.


def keeps(carry, x):
    return carry, x


STATE = {"p": jnp.ones(2), "q": jnp.ones(3), "r": jnp.ones(())}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 0}, ValueError, "step must not be 0"),
        ({"start": 1.0}, TypeError, "start must be an int or None, got float"),
        ({"xs": None, "length": -1}, ValueError, "length must be a non-negative int, got -1"),
        ({"xs": {"a": None}}, ValueError, "give length, or xs with at least one array to scan"),
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
        ({"init": {"name": "abc"}}, TypeError, "init['name'] must be an array or a scalar, got"),
        ({"xs": [np.array(["abc"])]}, TypeError, "xs[0] must be an array or a scalar, got <U3[1]"),
        ({"unroll": -1}, ValueError, "unroll must be a bool or a non-negative int, got -1"),
        ({"unroll": 1.5}, TypeError, "unroll must be a bool or a non-negative int, got float"),
        ({"checkpoint": "yes"}, TypeError, "checkpoint must be True or False, got 'yes'"),
        ({"save_at": [1, -2, 10]}, ValueError, "save_at[2] is 10, but there are only 10 steps"),
        ({"save_at": [1, -11]}, ValueError, "save_at[1] is -11, but there are only 10 steps"),
        ({"save_at": [1, 2.0]}, TypeError, "save_at[1] must be an int, got float"),
        ({"save_at": 3}, TypeError, "save_at must be a sequence of ints, got int"),
        ({"save_at": np.ones((2, 2), int)}, TypeError, "save_at must be a sequence of ints, got "),
        (
            {"save_at": [1], "start": 0},
            TypeError,
            "save_at excludes start, stop and step, got start",
        ),
        ({"reduce": "mena"}, ValueError, "no reduction is called 'mena'; did you mean 'mean'?"),
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


def narrows(carry, x):
    return {"p": carry["p"].astype(jnp.int32), "q": carry["q"][:1], "r": carry["r"]}, x


CARRY = "must return a carry with the"


@pytest.mark.parametrize(
    ("f", "init", "message"),
    [
        (lambda carry, x: carry + x, jnp.ones(3), "must return a pair (carry, y), got float32[3]"),
        (lambda carry, x: (carry, x, x), 0.0, "must return a pair (carry, y), got tuple of 3"),
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
            lambda s, x: ({"p": s["p"], "z": s["q"]}, x),
            STATE,
            f"{CARRY} structure of init; it lacks init['q'] and",
        ),
        (
            lambda s, x: ({"p": [*s["p"]]}, x),
            {"p": (1.0, 2.0)},
            f"{CARRY} structure of init; its containers differ\n",
        ),
    ],
)
def test_a_bad_body_is_named(f, init, message):
    text = refusal(TypeError, lambda: sliced_scan(functools.partial(f), init, XS))
    assert text.startswith(f"sliced_scan({f.__name__}): the scan body {here(f)} {message}")


def test_an_output_that_is_no_array_is_named():
    text = "sliced_scan(<lambda>): y['name'][0] must be an array or a scalar, got str"
    words = lambda carry, x: (carry, {"name": ["abc", x]})  # noqa: E731
    assert refusal(TypeError, sliced_scan, words, 0.0, XS) == text


def test_bad_shapes_are_found_before_tracing():
    def never(carry, x):
        raise AssertionError("traced")

    for wrong in ({"xs": [XS, XS[1:]]}, {"xs": XS, "length": 3}, {"xs": XS, "step": 0}, {}):
        with pytest.raises(ValueError, match=r"^sliced_scan\(never\): "):
            sliced_scan(never, 0.0, **wrong)


def test_tangents_that_are_python_numbers():
    def push(scan):
        def ends(rate):
            step = lambda carry, x: (carry * rate + x, carry * x)  # noqa: E731
            return scan(step, 1.0, XS, start=2, stop=9, step=3)

        return jax.jvp(ends, (0.5,), (2.0,))

    assert_same(push(sliced_scan), push(scan_then_slice))
