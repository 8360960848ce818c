# SPDX-License-Identifier: MIT
"""Meshes that tests run on, data, and comparisons with one device, of tests on several."""

import contextlib
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import assert_same


def on(*kinds, enter=True):
    """Run a test with a ``mesh`` of each kind of axes, ``"Auto"``, or ``weekly("Explicit")``.

    A mesh with explicit axes is entered, as JAX wants, or the test does it.
    """
    cases = []
    for kind in kinds:
        (name,), marks = getattr(kind, "values", (kind,)), getattr(kind, "marks", ())
        cases.append(pytest.param((name, enter), id=name, marks=marks))
    return pytest.mark.parametrize("mesh", cases, indirect=True)


N = 480
ODD = N + 3  # which eight devices do not divide


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, W, B = data(N, 3), data(5, 3, seed=1), data(N, seed=2)


def kernel(x, w, b):
    return {"v": jnp.tanh(w @ x).sum() * b, "x": x + b}


def scalar(x, w):
    return jnp.tanh(w @ x).sum()


def mesh_of(kind, *shape):
    return jax.make_mesh(shape, ("d", "e")[: len(shape)], axis_types=(kind,) * len(shape))


from_0_10_1 = pytest.mark.skipif(
    jax.__version__ == "0.10.0", reason="JAX 0.10.0 cannot compile this, see docs/limits.md"
)


def put(mesh, x, *entries):
    return jax.device_put(x, NamedSharding(mesh, P(*entries)))


SENDS = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def sent(compiled):
    """Count what a compiled program sends, which it must do outside of its loops."""
    loops, entry = compiled.as_text().split("\nENTRY ")
    assert not re.findall(SENDS, loops), re.findall(SENDS, loops)
    return dict(Counter(re.findall(SENDS, entry)))


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile()


same = functools.partial(assert_same, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def naming(label):
    """Say which of several failed."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(label) from error


def loss_of(f):
    def loss(*args):
        floats = [x for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x * x) for x in floats)

    return loss


def value_and_gradients(f):
    return lambda *args: (f(*args), jax.grad(loss_of(f), (0, 1))(*args))


def given(mesh):
    """Return the option that a call inside `jax.jit` needs."""
    return {} if AxisType.Explicit in mesh.axis_types else {"devices": P("d")}


def check_drawn(out, summed, want):
    same(out, want)
    same(summed[1], want[1])
    axis = 0 if summed[0].ndim else None  # which has been summed, or all
    same(summed[0], np.sum(want[0], axis), atol=1e-3)


def collatz(n, w):
    def body(state):
        n, count, total = state
        following = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return following, count + 1, total + w[0] * jnp.sin(n * w[1])

    start = n, 0, jnp.float32(0)
    return jax.lax.while_loop(lambda state: state[0] > 1, body, start)[1:]
