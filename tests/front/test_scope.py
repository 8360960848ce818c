# SPDX-License-Identifier: MIT
"""A scope decides every option that a function is not given."""

import jax
import jax.numpy as jnp
import pytest

from rankax import chunked_jacfwd, chunked_reduce, chunked_vmap, options

X = jnp.arange(10.0)


def doubled(x):
    return jax.lax.while_loop(lambda y: y < 100, lambda y: 2 * y + 1, x)


FUNCTIONS = {
    "chunked_vmap": lambda fun, **given: chunked_vmap(fun, 3, **given),
    "chunked_reduce": lambda fun, **given: chunked_reduce(fun, "sum", 3, **given),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_progress_is_shown_unless_it_is_given(name):
    seen = []
    mapped, silent = FUNCTIONS[name](jnp.sin), FUNCTIONS[name](jnp.sin, progress=False)
    with options(progress=lambda done, total: seen.append((done, total))):
        jax.block_until_ready(silent(X))
        jax.effects_barrier()
        assert seen == []
        jax.block_until_ready(mapped(X))
        jax.effects_barrier()
    assert seen[-1] == (10, 10)


def test_progress_of_a_jacobian():
    seen = []
    jacobian = chunked_jacfwd(jnp.sin, chunk_size=3)
    with options(progress=lambda done, total: seen.append((done, total))):
        jax.block_until_ready(jacobian(X))
        jax.effects_barrier()
    assert seen[-1] == (10, 10)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_items_end_by_themselves_unless_it_is_given(name):
    def program(**given):
        return str(jax.make_jaxpr(FUNCTIONS[name](doubled, **given))(X))

    in_lanes, in_lockstep = program(lockstep=False), program()
    assert in_lanes != in_lockstep
    with options(lockstep=False):
        assert program() == in_lanes
        assert program(lockstep=True) == in_lockstep


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_reverse_pass_stores_unless_it_is_given(name):
    def program(**given):
        mapped = FUNCTIONS[name](jnp.sin, **given)
        return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(mapped(x))))(X))

    stored, again = program(checkpoint=False), program()
    assert stored != again
    with options(checkpoint=False):
        assert program() == stored
        assert program(checkpoint=True) == again
