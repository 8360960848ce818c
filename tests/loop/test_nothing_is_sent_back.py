# SPDX-License-Identifier: MIT
"""What is evaluated twice, or does not count, sends nothing back.

A cotangent of 0 is not nothing: 0 times an infinite derivative is NaN, and a rule of
`jax.custom_vjp` may make anything of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, slow, weekly
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import BottomK, Moments, Several, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*is compiled at every call")


@jax.custom_vjp
def regular(x):
    return x


regular.defvjp(lambda x: (x, x), lambda r, cotangent: (cotangent + 0.1 * r,))


@jax.custom_vjp
def normalized(x):
    return x


normalized.defvjp(
    lambda x: (x, None), lambda _, cotangent: (cotangent / jnp.linalg.norm(cotangent),)
)

ZEROS, ONES, COUNT = jnp.zeros(7), jnp.ones(7), jnp.arange(1.0, 8)
# A kernel of an item and of a number that all share, the items, and the number.
KERNELS = {
    "sqrt": (lambda x, s: jnp.sqrt(x) + s, ZEROS, 1.0),
    "log": (lambda x, s: jnp.log(x) * s, ZEROS, 1.0),
    "power": (lambda x, s: x**0.3 + s, ZEROS.at[5].set(1.0), 1.0),
    "norm": (lambda x, s: jnp.linalg.norm(jnp.stack([x, x])) * s, ZEROS.at[0].set(1.0), 1.0),
    "sqrt of what is shared": (lambda x, s: jnp.sqrt(s) * x, COUNT, 0.0),
    "a rule that adds": (lambda x, s: regular(x) + s, ONES, 1.0),
    "a rule that divides": (lambda x, s: normalized(x) * s, ONES, 1.0),
    "a rule of both": (lambda x, s: regular(x * s), ONES, 1.0),
}
OPTIONS = {
    "chunks": {},
    "no checkpoint": {"checkpoint": False},
    "lanes": {"lockstep": False},
    "jit": {"jit": True},
}
kernels = pytest.mark.parametrize("name", KERNELS)


@kernels
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_size", [2, slow(3), weekly(4), weekly(5)])
def test_items_of_two_chunks(chunk_size, options, name):
    kernel, x, s = KERNELS[name]
    plain = jax.grad(lambda x, s: jax.vmap(kernel, (0, None))(x, s).sum(), (0, 1))
    mapped = auto_vmap(0, 0, chunk_size=chunk_size, **options)(kernel)
    assert_same(jax.grad(lambda x, s: mapped(x, s).sum(), (0, 1))(x, s), plain(x, s))


@kernels
@pytest.mark.parametrize("reduce", ["sum", slow("mean"), "logsumexp", slow(Several("sum", "mean"))])
def test_items_of_two_tiles(reduce, name):
    kernel, x, s = KERNELS[name]

    def gradient(chunk_size):
        def loss(x, s):
            found = auto_vmap(0, 0, reduce=reduce, chunk_size=chunk_size)(kernel)(x, s)
            return sum(map(jnp.sum, jax.tree.leaves(found)))

        return jax.grad(loss, (0, 1))(x, s)

    plain = gradient(None)
    for chunk_size in (2, 3):
        assert_same(gradient(chunk_size), plain)


def test_a_rule_sees_the_cotangents_of_each_item_once():
    seen = []

    @jax.custom_vjp
    def noted(x):
        return x

    def backward(_, cotangent):
        jax.debug.callback(lambda ct: seen.append(float(ct)), cotangent)
        return (cotangent,)

    noted.defvjp(lambda x: (x, None), backward)
    jax.grad(lambda x: (chunked_vmap(noted, 4)(x) * COUNT).sum())(ONES)
    jax.effects_barrier()
    assert sorted(seen) == list(range(1, 8))


def chosen_alone(reduce, kernel, x, s, ok):
    """Return the gradient of a reduction of the items that count."""

    def loss(x, s):
        found = auto_vmap(0, 0, reduce=reduce, chunk_size=1)(kernel)(x, s)
        return jnp.sum(found.values if hasattr(found, "values") else found)

    of_x, of_s = jax.grad(loss, (0, 1))(x[ok], s)
    return jnp.zeros_like(x).at[np.flatnonzero(ok)].set(of_x), of_s


@kernels
@pytest.mark.parametrize("chunk_size", [2, weekly(7), slow(None)])
@pytest.mark.parametrize(
    "reduce", ["sum", slow("mean"), "logsumexp", "max", TopK(2), weekly(BottomK(1))]
)
def test_items_left_out(reduce, chunk_size, name):
    kernel, x, s = KERNELS[name]
    ok = np.array([1, 1, 0, 1, 0, 0, 1], bool)
    masked = auto_vmap(0, 0, 0, reduce=reduce, where="ok", chunk_size=chunk_size)
    masked = masked(lambda x, s, ok: {"value": kernel(x, s), "ok": ok})

    def loss(x, s):
        found = masked(x, s, ok)["value"]
        return jnp.sum(found.values if hasattr(found, "values") else found)

    assert_same(jax.grad(loss, (0, 1))(x, s), chosen_alone(reduce, kernel, x, s, ok))


@kernels
@pytest.mark.parametrize("reduce", [None, "sum", slow("mean"), "logsumexp"])
def test_copies_that_fill_a_bucket_up(reduce, name):
    kernel, x, s = KERNELS[name]

    def gradient(**options):
        mapped = auto_vmap(0, 0, reduce=reduce, jit=True, **options)(kernel)
        return jax.grad(lambda x, s: mapped(x, s).sum(), (0, 1))(x, s)

    assert_same(gradient(bucket=True), gradient())


def test_moments_and_products_of_uneven_chunks():
    x = jnp.array([3.0, 1.0, 2.0, 5.0, 4.0, -1.0, 0.5])
    for reduce in (Moments(), "prod"):

        def loss(x, chunk_size, reduce=reduce):
            found = chunked_reduce(jnp.sin, reduce, chunk_size)(x)
            return found.variance if isinstance(reduce, Moments) else found

        for chunk_size in (2, 3):
            assert_same(jax.grad(loss)(x, chunk_size), jax.grad(loss)(x, None))
            assert_same(jax.hessian(loss)(x, chunk_size), jax.hessian(loss)(x, None), atol=1e-5)


def test_a_short_chunk_keeps_keys_and_integers():
    """Outputs without a derivative of the last chunk are not overwritten by what it leaves out."""
    keys = jax.random.split(jax.random.key(0), 7)

    def item(key, x):
        return key, jnp.int32(x), x * jax.random.normal(key)

    def both(mapped):
        def loss(x):
            key, number, value = mapped(keys, x)
            return value.sum(), (jax.random.key_data(key), number)

        return jax.grad(loss, has_aux=True)(COUNT)

    assert_same(both(chunked_vmap(item, 2)), both(jax.vmap(item)))
