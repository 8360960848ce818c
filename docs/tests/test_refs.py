# SPDX-License-Identifier: MIT
"""A `jax.Ref` in place of an array to map or to scan over is refused by name."""

import jax
import jax.numpy as jnp
import pytest

from rankax import auto_vmap, checkpoint_chunked_scan, chunked_reduce, chunked_vmap, sliced_scan


def sine(x):
    return jnp.sin(x)


def add(carry, x):
    return carry + x, carry


def checkpointed(init, xs):
    return checkpoint_chunked_scan(add, init, xs, chunk_size=2)


X = jnp.arange(4.0)
CALLS = {
    "sine(): x": auto_vmap(0)(sine),
    "sine(): x ": auto_vmap(0, chunk_size=2, jit=True)(sine),
    "chunked_vmap(sine): x": chunked_vmap(sine, 2),
    "chunked_vmap(sine): x ": chunked_vmap(sine, None),
    "chunked_vmap(sine): x  ": chunked_vmap(sine, None, memory_limit="1 MB"),
    "chunked_reduce(sine): x": chunked_reduce(sine, "sum", 2),
    "sliced_scan(add): xs": lambda ref: sliced_scan(add, 0.0, ref, step=2),
    "sliced_scan(add): init": lambda ref: sliced_scan(add, ref, X),
    "sliced_scan(add): xs['rate']": lambda ref: sliced_scan(add, 0.0, {"rate": ref}),
    "checkpoint_chunked_scan(add): xs": lambda ref: checkpointed(0.0, ref),
    "checkpoint_chunked_scan(add): init": lambda ref: checkpointed(ref, X),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_ref_is_refused(name, jit):
    def call(x):
        return CALLS[name](jax.new_ref(x))

    with pytest.raises(TypeError) as caught:
        (jax.jit(call) if jit else call)(X)
    name = name.strip()
    path = name.split(": ")[1]
    assert str(caught.value) == (
        f"{name} is a jax.Ref, not an array; read it before the call: {path}[...]"
    )


def test_a_ref_that_the_body_returns_is_refused():
    @jax.jit
    def call(x):
        ref = jax.new_ref(x)
        return sliced_scan(lambda carry, x: (carry + x, ref), 0.0, x)

    with pytest.raises(TypeError, match=r"y is a jax\.Ref, not an array"):
        call(X)


def test_a_ref_without_a_mapped_axis_can_be_read():
    @jax.jit
    def call(x):
        ref = jax.new_ref(2 * x)
        return chunked_vmap(lambda ref, x: x * ref[1], 2, (None, 0))(ref, x)

    assert call(X).tolist() == [0.0, 2.0, 4.0, 6.0]
