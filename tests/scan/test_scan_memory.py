# SPDX-License-Identifier: MIT
"""What the compiled scans need besides their arguments and results. Nothing is run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import slow, subprograms, temporary_bytes
from rankax import checkpoint_chunked_scan, sliced_scan
from rankax.reductions import Moments

pytestmark = pytest.mark.optimized

MB = 1e6
STATE = jax.ShapeDtypeStruct((512,), jnp.float32)  # 2 kB; 20,000 of them are 41 MB
EVEN, PRIME = 20_000, 20_011


def body(state, force):
    """A step whose derivative needs a residual, and whose ``y`` does too."""
    state = state + 0.01 * (jnp.tanh(state) if force is None else jnp.sin(state) * force)
    return state, state**3


def without_ys(state, force):
    return body(state, force)[0], None


def forces(length):
    return jax.ShapeDtypeStruct((length, 512), jnp.float32)


def loss(scan, f=body):
    def of(state, xs=None):
        carry, ys = scan(f, state, xs)
        return jnp.sum(carry) + sum(jnp.sum(y) for y in jax.tree.leaves(ys) if y.dtype == "float32")

    return of


STEPS, ENDS = {"step": 100}, {"start": 777, "stop": -777, "step": 100}
AT = {"save_at": np.arange(200) ** 2 // 2}  # each farther from the last one
MOMENTS = {**AT, "reduce": Moments()}


@pytest.mark.parametrize(
    ("window", "length"),
    [
        (ENDS, PRIME),
        (MOMENTS, EVEN),
        slow({"start": 50, "step": 100}, EVEN),
        slow(AT, EVEN),
        slow({"step": -100, "reverse": True}, PRIME),
    ],
    ids=["a slice", "windows", "even", "kept steps", "in reverse"],
)
def test_skipped_ys_are_not_stored_and_xs_not_copied(window, length):
    """With checkpoints, a gradient stores the carries of kept steps only."""
    sliced = functools.partial(sliced_scan, length=length, **window)
    forward = functools.partial(sliced, body)
    assert temporary_bytes(forward, STATE) < 0.5 * MB
    assert temporary_bytes(forward, STATE, forces(length)) < 0.5 * MB
    gradient = jax.grad(loss(functools.partial(sliced, checkpoint=True)))
    assert temporary_bytes(gradient, STATE) < 8 * MB


def test_checkpoint_copies_xs_once_at_most():
    sliced = functools.partial(sliced_scan, checkpoint=True, **STEPS)
    gradient = jax.grad(loss(sliced), (0, 1))
    assert temporary_bytes(gradient, STATE, forces(EVEN)) < 3 * MB
    assert temporary_bytes(gradient, STATE, forces(PRIME)) < (41 + 3) * MB


def test_reverse_pass_stores_nothing_that_only_serves_skipped_ys():
    def costly(state, _):
        state = 0.5 * state  # linear: its derivative needs no residual
        return state, jnp.sin(state) * jnp.cos(state)

    def gradient(scan):
        return jax.grad(loss(scan, costly))

    plain = functools.partial(lax.scan, length=EVEN)
    sliced = functools.partial(sliced_scan, length=EVEN, step=100)
    assert temporary_bytes(gradient(plain), STATE) > 40 * MB
    assert temporary_bytes(gradient(sliced), STATE) < 2 * MB


@pytest.mark.parametrize("chunk_size", [slow(125), (2000, 140, 12)], ids=str)
def test_chunks_bound_the_reverse_pass(chunk_size):
    chunked = functools.partial(checkpoint_chunked_scan, length=PRIME, chunk_size=chunk_size)
    assert temporary_bytes(jax.grad(loss(chunked, without_ys)), STATE) < 2 * MB


def test_chunks_copy_no_xs_forward_and_none_that_they_divide():
    chunked = functools.partial(checkpoint_chunked_scan, chunk_size=140)
    assert temporary_bytes(loss(chunked, without_ys), STATE, forces(PRIME)) < 1 * MB
    gradient = jax.grad(loss(chunked, without_ys), (0, 1))
    assert temporary_bytes(gradient, STATE, forces(EVEN)) < 2 * MB
    assert temporary_bytes(gradient, STATE, forces(PRIME)) < (41 + 2) * MB


def largest_inside_loops(jaxpr, inside=False):
    """Elements of the largest array computed in the body of a scan; anywhere, if ``inside``."""
    sizes = [0]
    for equation in jaxpr.eqns:
        if inside:
            sizes += [variable.aval.size for variable in equation.outvars]
        below = inside or equation.primitive.name == "scan"
        sizes += [largest_inside_loops(program, below) for program in subprograms(equation)]
    return max(sizes)


@pytest.mark.parametrize(
    ("scan", "options", "order"),
    [
        (sliced_scan, {"step": 10}, 1),
        (checkpoint_chunked_scan, {"chunk_size": (50, 10)}, 1),
        (checkpoint_chunked_scan, {"chunk_size": 10}, 2),
        slow(sliced_scan, {"step": 10, "checkpoint": True}, 2),
        slow(sliced_scan, {"start": 55, "stop": -55}, 1),
    ],
)
def test_no_step_of_a_gradient_touches_all_of_xs(scan, options, order):
    """Reading ``xs`` by index would: each step would add a cotangent as large as ``xs``."""
    gradient = jax.grad(loss(functools.partial(scan, **options)), 1)
    if order == 2:
        first = gradient
        gradient = jax.grad(lambda state, xs: jnp.sum(first(state, xs) ** 2), 1)
    jaxpr = jax.make_jaxpr(gradient)(STATE, forces(1009)).jaxpr
    assert largest_inside_loops(jaxpr) <= 100 * 512


@pytest.mark.parametrize("window", [{"step": 100}, {"start": 99, "step": 100}, {"start": -1}])
def test_no_scan_of_the_program_collects_skipped_ys(window):
    """Whatever the compiler does later; so that it holds without `jax.jit` too."""
    sliced = functools.partial(sliced_scan, body, length=2000, **window)
    kept = len(range(2000)[slice(window.get("start"), None, window.get("step"))])
    jaxpr = jax.make_jaxpr(sliced)(STATE).jaxpr
    assert largest_inside_loops(jaxpr, inside=True) == kept * 512
