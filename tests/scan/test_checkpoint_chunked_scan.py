# SPDX-License-Identifier: MIT
"""`checkpoint_chunked_scan` against `jax.lax.scan`, and where its checkpoints are."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from helpers import (
    assert_same,
    is_checkpoint,
    name_of,
    primitives,
    refusal,
    slow,
    subprograms,
    temporary_bytes,
)
from rankax import checkpoint_chunked_scan
from scan_cases import XS, drift

# Programs.


def chunk_lengths(fun, *args):
    """Lengths of the scans inside checkpoints, nested as they are: ``[(outer, [inner, ...])]``."""

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            below = [each for program in subprograms(equation) for each in inside(program)]
            name = name_of(equation)
            if is_checkpoint(name):
                yield "checkpoint", below
            elif name == "scan":
                yield equation.params["length"], below
            else:
                yield from below

    return list(inside(jax.make_jaxpr(fun)(*args).jaxpr))


@pytest.mark.parametrize(
    ("length", "chunk_size", "expected"),
    [
        (12, None, [("checkpoint", [(12, [])])]),
        (12, 99, [("checkpoint", [(12, [])])]),
        (12, 4, [(3, [("checkpoint", [(4, [])])])]),
        # 9 divides 99 and is within a fifth of the bound.
        (99, 10, [(11, [("checkpoint", [(9, [])])])]),
        # Nothing near 10 divides 101: ten chunks of 10 and one of 1.
        (101, 10, [(10, [("checkpoint", [(10, [])])]), ("checkpoint", [(1, [])])]),
        (24, (12, 4), [(2, [("checkpoint", [(3, [("checkpoint", [(4, [])])])])])]),
        (25, "sqrt", [(5, [("checkpoint", [(5, [])])])]),
        (1, "sqrt", [("checkpoint", [(1, [])])]),
        # An inner checkpoint around all of an outer one would only cost time.
        (24, (12, 12), [(2, [("checkpoint", [(12, [])])])]),
    ],
)
def test_checkpoints_lie_where_they_are_asked_for(length, chunk_size, expected):
    def chunked(init):
        return checkpoint_chunked_scan(
            lambda c, x: (jnp.sin(c), None), init, length=length, chunk_size=chunk_size
        )[0]

    assert chunk_lengths(chunked, 0.3) == expected
    gradient = primitives(jax.grad(chunked), 0.3)
    assert sum(number for name, number in gradient.items() if is_checkpoint(name)) > 0


def test_policy_reaches_every_checkpoint():
    def costly(carry, x):
        carry = checkpoint_name(jnp.sin(carry) + x, "kept")
        return carry, carry**2

    def cosines(policy):
        def total(init):
            carry, ys = checkpoint_chunked_scan(costly, init, XS, chunk_size=(6, 2), policy=policy)
            return carry + jnp.sum(ys)

        return primitives(jax.grad(total), 0.3)["sin"]

    policies = jax.checkpoint_policies
    saving = policies.everything_saveable, policies.save_only_these_names("kept")
    assert max(map(cosines, saving)) < cosines(None)


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be a positive int, got 0"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size must be a positive int, got float 2.0"),
        ({"chunk_size": ()}, ValueError, "chunk_size must hold at least one size, got ()"),
        ({"chunk_size": (4, 0)}, ValueError, "chunk_size[1] must be a positive int, got 0"),
        ({"policy": "dots"}, TypeError, "policy must be callable or None, got str"),
        ({"chunk_size": 3, "memory_limit": "1 MB"}, TypeError, "memory_limit chooses chunk_size, "),
    ],
)
def test_bad_options_are_named(options, error, message):
    text = refusal(error, checkpoint_chunked_scan, drift, 0.0, XS, **options)
    assert text.startswith(f"checkpoint_chunked_scan(drift): {message}")


def test_a_bad_body_is_named():
    text = refusal(TypeError, checkpoint_chunked_scan, lambda c, x: (c[:1], x), jnp.ones(3), XS)
    assert text.startswith("checkpoint_chunked_scan(<lambda>): the scan body ")
    assert "must return a carry with the shapes and dtypes of init; init differs\n" in text


# A limit of memory.


def swing(state, force):
    return state + 0.1 * jnp.sin(3 * jnp.tanh(state)) * (1 if force is None else force), state[0]


def limited_gradient(xs=None, scale=1.0, **options):
    def total(state, xs):
        def f(state, x):
            return swing(scale * state, x)

        carry, ys = checkpoint_chunked_scan(f, state, xs, 2000, **options)
        return jnp.sum(carry) + jnp.sum(ys)

    return jax.grad(total, 0 if xs is None else (0, 1))


def levels(**options):
    """The number of checkpoints that are nested in the program."""

    def depth(nested):
        return max((depth(below) + (name == "checkpoint") for name, below in nested), default=0)

    def forward(state):
        return checkpoint_chunked_scan(swing, state, length=2000, **options)

    return depth(chunk_lengths(forward, jnp.ones(64)))


@pytest.mark.optimized
@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), slow(1.1, 1)])
def test_a_limit_is_met_by_the_fewest_levels(share, expected):
    state = jax.ShapeDtypeStruct((64,), jnp.float32)
    limit = int(share * temporary_bytes(limited_gradient(chunk_size=18), state, None))
    assert levels(memory_limit=limit) == expected
    assert temporary_bytes(limited_gradient(memory_limit=limit), state, None) <= limit


@pytest.mark.parametrize("reverse", [False, slow(True)])
def test_a_limit_changes_no_gradient(reverse):
    state, xs = jnp.linspace(0.0, 1.0, 64), jnp.cos(jnp.arange(2000.0))
    want = jax.jit(limited_gradient(xs, chunk_size=2000, reverse=reverse))(state, xs)
    # The scale is traced, and so is an array that the body closes over.
    got = jax.jit(
        lambda scale: limited_gradient(xs, scale, memory_limit="60 kB", reverse=reverse)(state, xs)
    )(1.0)
    assert_same(got, want, rtol=1e-4)


def test_a_limit_traces_the_body_once():
    traces = []

    def counted(state, x):
        traces.append(x)
        return swing(state, x)

    scan = functools.partial(checkpoint_chunked_scan, counted, length=2000, memory_limit="100 kB")
    jax.eval_shape(lambda state: scan(state), jnp.ones(64))
    assert len(traces) == 1


def test_a_limit_that_cannot_be_met_says_what_is_needed():
    message = (
        r"^checkpoint_chunked_scan\(swing\): with up to 3 levels of checkpoints, the gradient "
        r"needs at least [\d.]+ kB beyond inputs and outputs, and memory_limit is 1 kB; raise it "
        r"to at least \d+ bytes$"
    )
    with pytest.raises(ValueError, match=message):
        checkpoint_chunked_scan(swing, jnp.ones(64), length=2000, memory_limit=1000)
