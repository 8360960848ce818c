# SPDX-License-Identifier: MIT
"""Sums over pairs in one kernel, with their derivatives, against the walk by loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import at_each_run
from pair_kernels import KERNELS
from rankax import auto_vmap
from rankax.ext.fused import fold

pytest.importorskip("warp", reason="needs NVIDIA Warp: pip install 'rankax[warp]'")

DRAW = np.random.default_rng(5).normal
X = DRAW(size=(7, 1, 3)).astype(np.float32)
Y, W = DRAW(size=(90, 3)).astype(np.float32), DRAW(size=90).astype(np.float32)
QUICK = ("gravity", "lennard_jones", "stokeslet", "logistic_loss", "by_reverse_rule", "of_a_jit")


@pytest.fixture(autouse=True)
def _in_kernels_only(monkeypatch):
    """Let no derivative be evaluated without a kernel."""
    monkeypatch.delattr(fold, "_by_rows")


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


@functools.cache
def kernels(name):
    plain = auto_vmap(x=1, y=1, w=0, reduce="sum", reduce_axis=1)(KERNELS[name])
    return plain.with_options(fused=True), plain


def loss(kernel):
    return lambda *args: jnp.sum(jnp.sin(kernel(*args) / 10))


def gradient(kernel):
    return jax.grad(loss(kernel), (0, 1, 2))


def curvature(kernel):
    """Return the gradient of a gradient."""
    return jax.grad(lambda *args: sum(jnp.sum(x**2) for x in gradient(kernel)(*args)), (0, 1, 2))


OF = {"values": lambda kernel: kernel, "gradient": gradient, "curvature": curvature}
CASES = {f"{name}, {of}": (name, OF[of]) for name in KERNELS for of in OF}
del CASES["by_reverse_rule, curvature"]  # the rule has no forward mode
QUICK = "gravity, curvature", *(f"{name}, gradient" for name in QUICK)


@pytest.mark.parametrize("case", at_each_run(QUICK, CASES))
def test_equals_the_loops(case):
    name, of = case
    fused, plain = kernels(name)
    assert_close(jax.jit(of(fused))(X, Y, W), jax.jit(of(plain))(X, Y, W))


def test_there_are_forty_kernels():
    assert len(KERNELS) >= 40
