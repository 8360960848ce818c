# SPDX-License-Identifier: MIT
"""A reduced level is walked by the loop of a map: one copy of the kernel, for any length.

The last tile overlaps the one before it where no tile divides the level.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, primitives, slow, temporary_bytes, weekly
from rankax import chunked_reduce, chunked_vmap
from rankax.reductions import Best, Fold, Gram, Moments, TopK


def distances(points):
    return jnp.sqrt(jnp.sum((points[:, None] - points[None]) ** 2, -1) + 1e-3)


@pytest.mark.parametrize(
    ("reduce", "length"), [("sum", 12), ("logsumexp", 13), (Gram(), 13)], ids=str
)
def test_the_program_has_one_copy_of_the_kernel(reduce, length):
    lowered = jax.jit(chunked_reduce(lambda x: jnp.tanh(x), reduce, 4)).lower(jnp.ones((length, 2)))
    assert lowered.as_text().count("stablehlo.tanh") == 1


@pytest.mark.parametrize("reduce", ["max", slow("sum")])
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
    assert_same(kept, [*jax.jit(jax.vmap(kernel))(x)[1:]])


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


PAIRED = {
    **{name: name for name in ("sum", "mean", "prod", "logsumexp", "max", "argmin", "any")},
    "top": TopK(2),
    "best": Best("y"),
    "gram": Gram(),
    "moments": Moments(),
    "fold": Fold(np.float32(0), lambda x: x, lambda a, b: a + b + a * b),
}
IN_EACH_RUN = (("sum", "logsumexp"), ("prod", "moments"), ("max", "fold"))
PAIRS = [
    pair if pair in IN_EACH_RUN else weekly(*pair)
    for pair in itertools.combinations_with_replacement(PAIRED, 2)
]


@pytest.mark.optimized
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_reductions_take_the_memory_of_a_tile(one, other):
    def both(x):
        y = jnp.tanh(x).sum()
        return tuple({"y": y} if name == "best" else y for name in (one, other))

    fun = chunked_reduce(both, (PAIRED[one], PAIRED[other]), 200)

    def loss(x):
        outs = jax.tree.leaves(fun(x))
        return sum(x.sum() for x in outs if x.dtype == jnp.float32) + 0 * x.sum()

    few, many = (jnp.ones((n, 4)) for n in (10_000, 20_000))
    assert temporary_bytes(jax.grad(loss), many) <= temporary_bytes(jax.grad(loss), few) + 5000


def test_one_loop_for_constants_and_one_for_the_rest():
    reduce = {"a": "sum", "b": "prod", "c": "logsumexp", "d": Moments(), "e": "max"}

    def loss(x):
        outs = jax.tree.leaves(fun(jnp.sin(x)))
        return sum(out for out in outs if out.dtype == jnp.float32)

    fun = chunked_reduce(lambda x: dict.fromkeys(reduce, jnp.tanh(x)), reduce, 5)
    x = jnp.linspace(0.3, 2, 13)
    scans = primitives(jax.grad(loss), x)["scan"]
    assert scans == 3  # constants; the rest, and its transpose

    def by_hand(x):
        y = jnp.tanh(jnp.sin(x))
        every = y.prod(), jax.nn.logsumexp(y), y.mean(), y.var(), y.max()
        return y.sum() + sum(every)

    np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(by_hand)(x), rtol=1e-4)


def test_a_gradient_of_logsumexp_evaluates_an_item_twice():
    """For the result, on which the weights of items depend, and in the reverse pass."""
    evaluated = []

    @jax.custom_jvp
    def observed(x):
        return jax.pure_callback(evaluated_one, x, x, vmap_method="sequential")

    def evaluated_one(x):
        evaluated.append(x)
        return np.asarray(x)

    observed.defjvps(lambda tangent, *_: tangent)
    fun = chunked_reduce(lambda x: observed(jnp.sin(x)), "logsumexp", 5)
    gradient = jax.jit(jax.grad(fun))
    x = jnp.linspace(0.1, 1.0, 20)
    jax.block_until_ready(gradient(x))
    evaluated.clear()
    want = jax.jit(jax.grad(lambda x: jax.nn.logsumexp(jnp.sin(x))))(x)
    assert_same(gradient(x), want, rtol=1e-5)
    assert len(evaluated) == 2 * 20
