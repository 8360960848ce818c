# SPDX-License-Identifier: MIT
"""What tests of scans share, some in other folders."""

import jax
import jax.numpy as jnp
import numpy as np


def drift(carry, x):
    carry = jnp.sin(carry) + x
    return carry, (carry * x, x)


XS = jnp.asarray(np.linspace(0.0, 1.0, 10))


def assert_same_weak_types(got, want):
    def weak(leaf):
        return getattr(jax.typeof(leaf), "weak_type", False)

    assert jax.tree.map(weak, got) == jax.tree.map(weak, want)


def here(f):
    code = f.__code__
    return f"{f.__name__}() at {code.co_filename}:{code.co_firstlineno}"
