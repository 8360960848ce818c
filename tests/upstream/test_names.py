# SPDX-License-Identifier: MIT
"""What rankax knows by its name or its text, because JAX has no public class for it.

A test fails when JAX renames it. The docstring of each test says where to follow.
"""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from rankax.core.trace.programs import has_order, name_and_params
from rankax.ext.memory.limit import _REFUSALS

X = jnp.arange(3.0)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, ordered: jax.debug.callback(print, x, ordered=ordered),
        lambda x, ordered: jax.debug.print("{}", x, ordered=ordered),
        lambda x, ordered: jax.experimental.io_callback(print, None, x, ordered=ordered),
    ],
    ids=["debug.callback", "debug.print", "io_callback"],
)
def test_effects_in_order(call, ordered):
    """`has_order` of ``core/trace/programs.py``."""
    assert has_order(jax.make_jaxpr(functools.partial(call, ordered=ordered))(X)) == ordered


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="no such switch")
def test_high_level_primitives():
    """`_HIGH_LEVEL` of ``core/trace/programs.py``."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        kernel = jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "sine"))
        (outer,) = jax.make_jaxpr(kernel)(X).eqns
        name, params = name_and_params(outer)
        (inner,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "sine"))(X).eqns
    finally:
        jax.config.update("jax_remat3", before)
    assert (name, name_and_params(inner)[0]) == ("RematTraced", "CheckpointName")
    assert "policy" in params


def test_a_function_with_reverse_mode_only():
    """`_REFUSALS` of ``ext/memory/limit.py``; others: ``tests/fit/test_memory_limit.py``."""
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    with pytest.raises(TypeError) as error:
        jax.jvp(sine, (X,), (X,))
    assert any(refusal in str(error.value) for refusal in _REFUSALS)
