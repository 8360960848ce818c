# SPDX-License-Identifier: MIT
"""What JAX lacks with its coming switches on; two tests of ours that it breaks are skipped there.

Each test fails when JAX has mended it: then delete it, and the `skipif` that it names.
"""

import jax
import jax.numpy as jnp
import pytest

from helpers import primitives

X = jnp.arange(3.0)


@pytest.fixture
def _remat3():
    """Switch on what ``JAX_REMAT3=1`` does."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("no such switch")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.usefixtures("_remat3")
def test_a_new_checkpoint_is_not_transposed():
    """`test_custom_rules.py`: ``test_linear_transpose``."""
    double = jax.checkpoint(lambda x: 2 * x)
    with pytest.raises(NotImplementedError, match="must implement `transpose`"):
        jax.linear_transpose(double, X)(X)


@pytest.mark.usefixtures("_remat3")
def test_a_new_checkpoint_makes_tangents_of_zeros():
    """`test_chunked_vmap.py`: ``test_inputs_that_do_not_move_have_no_tangents``."""

    def pushed(wrap):
        kernel = wrap(lambda scale, x: jnp.sin(scale * x))
        return primitives(lambda s: jax.jvp(lambda s: kernel(s, X), (s,), (s,)), 2.0)

    assert pushed(lambda kernel: kernel)["mul"] == 3
    assert pushed(jax.checkpoint)["mul"] == 4  # one of them by the zeros
