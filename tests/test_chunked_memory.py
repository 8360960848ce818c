# SPDX-License-Identifier: MIT
"""What the compiled programs need besides their arguments and results.

Nothing runs: programs are compiled for shapes, and XLA says what it would allocate.
"""

import jax
import jax.numpy as jnp
import pytest

from helpers import temporary_bytes
from rankax import chunked_vmap

CHUNK = 1000
EVEN, UNEVEN, LONG = 200_000, 200_003, 400_003
MB = 10**6


def distances(points):
    """Sum of the distances of all pairs: 8 x 8 x 3 intermediate numbers, 768 bytes a step."""
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


def clouds(length):
    return jax.ShapeDtypeStruct((length, 8, 3), jnp.float32)


def input_bytes(length):
    return length * 8 * 3 * 4


def loss(f):
    return lambda *args: jnp.sum(f(*args))


def push(f):
    return lambda x, t: jax.jvp(f, (x,), (t,))


@pytest.mark.parametrize("length", [EVEN, UNEVEN, LONG])
def test_forward_is_flat(length):
    f = chunked_vmap(distances, CHUNK)
    assert temporary_bytes(f, clouds(length)) < 2 * MB


@pytest.mark.parametrize("length", [EVEN, 2 * EVEN])
def test_derivatives_are_flat_where_the_chunk_divides(length):
    f = chunked_vmap(distances, CHUNK)
    x = clouds(length)
    assert temporary_bytes(jax.grad(loss(f)), x) < 2 * MB
    assert temporary_bytes(push(f), x, x) < 4 * MB


@pytest.mark.parametrize("length", [UNEVEN, LONG])
def test_derivatives_copy_the_input_once_where_it_does_not(length):
    f = chunked_vmap(distances, CHUNK)
    x = clouds(length)
    assert temporary_bytes(jax.grad(loss(f)), x) <= 1.2 * input_bytes(length)
    assert temporary_bytes(push(f), x, x) <= 1.2 * input_bytes(length)


def test_without_checkpoint_the_gradient_grows():
    """The figures above are not small because XLA would need little anyway."""
    stored = chunked_vmap(distances, CHUNK, checkpoint=False)
    assert temporary_bytes(jax.grad(loss(stored)), clouds(EVEN)) > 100 * MB


def test_intermediates_that_no_compiler_fuses_away():
    def factors(p):
        return jnp.sum(jnp.linalg.cholesky(p @ p.T + 0.1 * jnp.eye(8)))

    x = clouds(EVEN)
    assert temporary_bytes(jax.vmap(factors), x) > EVEN * 8 * 8 * 4
    assert temporary_bytes(chunked_vmap(factors, CHUNK), x) < 2 * MB
    assert temporary_bytes(jax.grad(loss(chunked_vmap(factors, CHUNK))), x) < 4 * MB


@pytest.mark.parametrize("length", [EVEN, UNEVEN])
def test_gradient_of_closed_over_values_copies_no_input(length):
    def f(w, x):
        return jnp.sum(chunked_vmap(lambda p: distances(p * w), CHUNK)(x))

    w = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    assert temporary_bytes(jax.grad(f), w, clouds(length)) < 2 * MB


@pytest.mark.parametrize("length", [EVEN, UNEVEN])
def test_inputs_that_nobody_differentiates_are_not_copied(length):
    def f(scale, x, kind):
        def one(s, p, k):
            return distances(p) * s * k.astype(s.dtype)

        return jnp.sum(chunked_vmap(one, CHUNK)(scale, x, kind))

    scale = jax.ShapeDtypeStruct((length,), jnp.float32)
    kind = jax.ShapeDtypeStruct((length,), jnp.int32)
    # One copy of `scale` is 0.8 MB; one of `x` would be 19 MB.
    assert temporary_bytes(jax.grad(f), scale, clouds(length), kind) < 3.5 * MB


@pytest.mark.parametrize("length", [EVEN, UNEVEN])
@pytest.mark.parametrize("axis", [1, 2])
def test_forward_is_flat_along_any_axis(length, axis):
    shape = [8, 3]
    shape.insert(axis, length)
    x = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    f = chunked_vmap(lambda p: (distances(p), p * 2), CHUNK, in_axes=axis, out_axes=(0, axis))
    assert temporary_bytes(f, x) < 2 * MB


@pytest.mark.parametrize("length", [EVEN, UNEVEN])
def test_kernels_that_want_another_layout_copy_no_input(length):
    """LAPACK is given columns; XLA must not turn the whole input around before the loop."""

    def solve(p):
        factor = jnp.linalg.cholesky(p @ p.T + jnp.eye(8))
        return jnp.sum(jax.lax.linalg.triangular_solve(factor, p, left_side=True, lower=True))

    assert temporary_bytes(chunked_vmap(solve, CHUNK), clouds(length)) < 2 * MB


@pytest.mark.parametrize("length", [EVEN, UNEVEN])
def test_forward_over_reverse_is_as_small(length):
    f = chunked_vmap(distances, CHUNK)

    def hessian_times_vector(x, v):
        return jax.jvp(jax.grad(loss(f)), (x,), (v,))[1]

    x = clouds(length)
    bound = 4 * MB if length == EVEN else 2.2 * input_bytes(length)
    assert temporary_bytes(hessian_times_vector, x, x) <= bound


def test_inside_scan_the_bound_holds():
    f = chunked_vmap(distances, CHUNK)

    def steps(x):
        def step(total, scale):
            return total + jnp.sum(f(x) * scale), None

        return jax.lax.scan(step, jnp.zeros(()), jnp.arange(3.0))[0]

    assert temporary_bytes(steps, clouds(UNEVEN)) < 2 * MB + UNEVEN * 4
