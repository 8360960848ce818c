# SPDX-License-Identifier: MIT
"""A reduced level is walked by the loop of a map: one copy of the kernel, for any length.

The last tile overlaps the one before it where no tile divides the level.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow, temporary_bytes
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Fold, Gram

SIZES = np.array([3, 2], np.float32)
PRODUCT = Fold(jnp.ones(2), lambda x: x, lambda a, b: a * b)


def distances(points):
    return jnp.sqrt(jnp.sum((points[:, None] - points[None]) ** 2, -1) + 1e-3)


def norm(x, w):
    """A function whose derivative is infinite at 0, but not that with respect to ``w``."""
    return jnp.sqrt(x) * 0.5 + w * x


def reduced(reduce, chunk_size):
    return chunked_reduce(norm, reduce, chunk_size, in_axes=(0, None))


@pytest.mark.parametrize(
    ("reduce", "length"), [("sum", 12), ("logsumexp", 13), (Gram(), 13)], ids=str
)
def test_the_program_has_one_copy_of_the_kernel(reduce, length):
    def kernel(x):
        return jnp.tanh(x)

    lowered = jax.jit(chunked_reduce(kernel, reduce, 4)).lower(jnp.ones((length, 2)))
    assert lowered.as_text().count("stablehlo.tanh") == 1


@pytest.mark.parametrize(
    ("reduce", "length"),
    [("prod", 13), slow("sum", 12), slow("logsumexp", 13), slow(PRODUCT, 13), slow(Gram(), 13)],
    ids=str,
)
def test_repeated_items_send_nothing_back(reduce, length):
    """Of 13 items in chunks of 5, items 8 and 9 are evaluated twice."""
    x = np.linspace(0.5, 2, 2 * length, dtype=np.float32).reshape(length, 2)
    x[8] = 0
    x, w = jnp.asarray(x), jnp.asarray(SIZES)

    def gradient(chunk_size):
        fun = reduced(reduce, chunk_size)

        def loss(x, w):
            return sum(
                jnp.sum(out * 0.7) for out in jax.tree.leaves(fun(x, w)) if out.dtype == x.dtype
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)

    (value, (of_x, of_w)), (want, (of_x_plain, of_w_plain)) = gradient(5), gradient(None)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(of_x, of_x_plain, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_w, of_w_plain, rtol=1e-4, atol=1e-5)


def test_an_infinite_derivative_stays_in_its_item():
    x = jnp.asarray(np.linspace(1, 2, 13, dtype=np.float32)).at[9].set(0)
    of_x, of_w = jax.grad(chunked_reduce(norm, "sum", 5, in_axes=(0, None)), (0, 1))(x, 1.0)
    assert np.isinf(of_x[9])
    assert np.isfinite(np.delete(of_x, 9)).all()
    np.testing.assert_allclose(of_w, jnp.sum(x), rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [7, slow(64)])
def test_pairs_that_no_tile_divides(chunk_size):
    x, y = (
        jnp.asarray(np.sin(np.arange(3 * n) * 0.7).reshape(n, 3), jnp.float32) for n in (11, 13)
    )

    def kernel(p, q):
        return jnp.exp(-jnp.sum((p - q) ** 2)), p * q

    def loss(fun):
        def value(x, y):
            total, kept = fun(x[:, None], y)
            return jnp.sum(total**2) + jnp.sum(jnp.sin(kept))

        return jax.jit(jax.value_and_grad(value, (0, 1)))(x, y)

    def plain(x, y):
        totals, kept = jax.vmap(jax.vmap(kernel, (None, 0)), (0, None))(x[:, 0], y)
        return jnp.sum(totals, 1), kept

    chunked = auto_vmap(1, 1, chunk_size=chunk_size, reduce=("sum", None), reduce_axis=-1)(kernel)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
        loss(chunked),
        loss(plain),
    )


@pytest.mark.parametrize("reduce", ["max", slow("sum"), slow("logsumexp")])
def test_kept_outputs_without_a_derivative_are_of_every_item(reduce):
    """The pass that is differentiated evaluates the last item in place of repeated ones."""
    x = jnp.asarray(np.sin(np.arange(26) * 0.7).reshape(13, 2), jnp.float32)

    def kernel(x):
        return x * x, x[0] > x[1], jnp.argsort(x), jnp.sum(x)

    fun = chunked_reduce(kernel, (reduce, None, None, None), 5)

    def loss(x):
        best, *kept = fun(x)
        return jnp.sum(best) + jnp.sum(kept[2]), kept

    kept = jax.jit(jax.grad(loss, has_aux=True))(x)[1]
    for out, want in zip(kept, jax.vmap(kernel)(x)[1:], strict=True):
        np.testing.assert_array_equal(out, want)
        assert out.dtype == want.dtype


@pytest.mark.optimized
@pytest.mark.parametrize("length", [8003, slow(8000)])
def test_an_output_kept_beside_a_sum_takes_the_memory_of_the_map(length):
    x, ct = jnp.ones((length, 8, 3)), jnp.ones((length, 8, 8))
    mapped = chunked_vmap(distances, 100)
    both = chunked_reduce(lambda p: (distances(p), jnp.sum(p)), (None, "sum"), 100)

    def pulled(fun):
        return lambda x, ct: jax.vjp(fun, x)[1](ct)[0]

    def kept(x):
        return both(x)[0]

    # In the last chunk, repeated items are replaced; XLA of JAX 0.10.0 keeps more of it.
    chunk = x[:100].nbytes * (1 if jax.__version_info__ >= (0, 12) else 3)
    assert temporary_bytes(kept, x) <= temporary_bytes(mapped, x) + 1000
    assert temporary_bytes(pulled(kept), x, ct) <= temporary_bytes(pulled(mapped), x, ct) + chunk
