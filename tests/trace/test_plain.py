# SPDX-License-Identifier: MIT
"""``rankax.options(plain=True)``: programs for packages that read them equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rankax
from helpers import assert_same, equations, name_of, refusal, slow
from rankax import Ragged, auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Moments, TopK

X = jnp.asarray(np.linspace(0.1, 1.0, 21, dtype=np.float32).reshape(7, 3))


def kernel(v):
    return jnp.sum(jnp.sin(v) * v)


def pairs(x, chunk_size=None):
    def near(a, b):
        return jnp.exp(-jnp.sum((a - b) ** 2))

    mapped = auto_vmap(1, 1, reduce="sum", chunk_size=chunk_size)(near)
    return mapped(x[:, None], x)


def until_small(v):
    return lax.while_loop(lambda y: y > 0.1, lambda y: y / 2, jnp.sum(v))


REDUCTIONS = ["sum", "mean", "max", "prod", "logsumexp", "gram", TopK(2), Moments()]
CALLS = {
    "map": chunked_vmap(kernel, 3),
    "even": chunked_vmap(kernel, 1),
    "pairs": lambda x: pairs(x, 8),
    "long": chunked_reduce(kernel, "sum", 1),
    "lanes": auto_vmap(1, chunk_size=2, lockstep=False)(until_small),
    "ragged": lambda x: auto_vmap("n 3", chunk_size=2)(lambda x: jnp.max(x))(Ragged(x, [1, 2, 4])),
    "math": auto_vmap(1, chunk_size=2, cpu_math=True)(kernel),
    **{str(entry): chunked_reduce(kernel, entry, 2) for entry in REDUCTIONS},
}
AT_EACH_RUN = ("map", "pairs", "long", "max", "lanes")


@pytest.mark.parametrize("name", [x if x in AT_EACH_RUN else slow(x) for x in CALLS])
def test_programs_have_no_primitive_of_this_library(name):
    call, x = CALLS[name], jnp.tile(X, (5, 1)) if name == "long" else X

    def loss(x):
        leaves = [y for y in jax.tree.leaves(call(x)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(y**2) for y in leaves)

    want = call(x), None if name == "lanes" else jax.grad(loss)(x)
    with rankax.options(plain=True):
        # New functions, because JAX keeps the program of one that it has traced.
        names = {name_of(eqn) for eqn in equations(jax.make_jaxpr(lambda x: call(x))(x).jaxpr)}
        got = call(x), None if name == "lanes" else jax.grad(lambda x: loss(x))(x)
    assert not [name for name in names if "rankax" in name or name.startswith("checkpoint")]
    assert_same(got, want, rtol=1e-4)


def test_scopes_of_plain_programs():
    def names():
        jaxpr = jax.make_jaxpr(lambda x: chunked_vmap(kernel, 3)(x))(X).jaxpr
        return {name_of(eqn) for eqn in equations(jaxpr)}

    with rankax.options(plain=True):
        with rankax.options(plain=False):
            assert "rankax_call" in names()
        assert "rankax_call" not in names()
        many = jnp.zeros((3000, 1)), jnp.zeros(3000)
        assert auto_vmap(0, 0, reduce="sum")(jnp.multiply).plan(*many).steps == 1
        assert auto_vmap(0, 0, reduce="sum", chunk_size=9)(jnp.multiply).plan(*many).steps > 1
    assert "rankax_call" in names()
    text = refusal(TypeError, rankax.options, plain=1)
    assert text == "rankax.options: plain must be True or False, got 1"


# Packages that read programs.


def test_folx_finds_the_laplacian_of_a_potential_over_pairs():
    folx = pytest.importorskip("folx")
    x = X.reshape(-1)

    def potential(x):
        return pairs(x.reshape(-1, 3))

    promotion = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with promotion[0], promotion[1], rankax.options(plain=True):
        found = folx.forward_laplacian(lambda x: potential(x))(x)
    want = jnp.trace(jax.hessian(potential)(x))
    np.testing.assert_allclose(found.laplacian, want, rtol=1e-4)


def test_asdex_finds_which_numbers_depend_on_which():
    # Version 0.5 imports a name that JAX 0.12 no longer has.
    asdex = pytest.importorskip("asdex", exc_type=ImportError)

    def products(x, chunk_size=6):
        mapped = auto_vmap(0, 0, chunk_size=chunk_size)(lambda a, b: jnp.sin(a) * b)
        return jnp.ravel(mapped(x[:3, None], x[:4]))

    with rankax.options(plain=True):
        found = asdex.jacobian_sparsity(lambda x: products(x), jnp.ones(6))
        total = asdex.jacobian_sparsity(lambda x: chunked_reduce(jnp.sin, "sum", 2)(x), jnp.ones(6))
    want = np.asarray(jax.jacobian(products)(jnp.linspace(0.1, 1, 6))) != 0
    np.testing.assert_array_equal(np.asarray(found.todense()) != 0, want)
    assert np.asarray(total.todense()).all()
