# SPDX-License-Identifier: MIT
"""``jax_numpy_rank_promotion``: of batch axes, as in `jax.numpy.vectorize`, and inside a kernel.

All other tests run under "raise", so that no operation of this library promotes ranks.
"""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, refusal
from rankax import BatchShapeError, Ragged, SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax.call import kernels

X, Y = jnp.ones((4, 1, 3)), jnp.ones((5, 3))
MODES = ["raise", "warn"]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Check batch axes, which the session does not (`conftest.py`)."""
    of_call = inspect.unwrap(kernels._numbers_of_axes)
    monkeypatch.setattr(kernels, "_numbers_of_axes", of_call)


@auto_vmap(1, 1)
def dot(a, b):
    return a @ b


TEXT = (
    "dot(): a (4, 1, 3) has 2 batch axes and b (5, 3) has 1, but jax_numpy_rank_promotion='{}' "
    "asks for axes of length 1 in front to be written; pass jnp.expand_dims(b, 0), or name the "
    "batch axes"
)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"jit": True}, {"reduce": "sum"}])
def test_batch_axes_that_are_added_in_front(options):
    kernel = dot.with_options(**options)
    with jax.numpy_rank_promotion("allow"):
        want = kernel(X, Y)  # known when it is refused
    assert refusal(BatchShapeError, kernel, X, Y) == TEXT.format("raise")
    assert refusal(BatchShapeError, kernel.plan, X, Y) == TEXT.format("raise")
    with pytest.raises(BatchShapeError), jax.numpy_rank_promotion("raise"):
        jax.make_jaxpr(kernel)(X, Y)
    with (
        jax.numpy_rank_promotion("warn"),
        pytest.warns(UserWarning, match="asks for axes") as found,
    ):
        assert_same(kernel(X, Y), want)
    assert str(found[0].message) == TEXT.format("warn")
    assert found[0].filename == __file__
    with jax.numpy_rank_promotion("raise"):
        assert_same(kernel(X, Y[None]), want)


def test_streams_check_as_calls_do(tmp_path):
    stream = pytest.importorskip("rankax.stream")
    text = refusal(BatchShapeError, stream.run, dot, np.asarray(X), Y, out=tmp_path / "a.zarr")
    assert text == TEXT.format("raise")


def test_lowering_checks_as_calls_do():
    text = refusal(BatchShapeError, dot.with_options(jit=True).lower, X, Y)
    assert text == TEXT.format("raise")


# What no mode refuses: nothing is added in front, or it is written.
ALLOWED = {
    "one item": lambda: dot(jnp.ones((6, 7, 3)), jnp.ones(3)),
    "lengths of 1": lambda: dot(X, Y[None]),
    "names": lambda: auto_vmap(a="i | 3", b="j | 3")(lambda a, b: a @ b)(Y, Y),
    "names beside others": lambda: auto_vmap(a="i | 3", b="3")(lambda a, b: a @ b)(Y, Y),
    "a key": lambda: auto_vmap(1, SplitKey)(lambda v, k: v[0])(X, jax.random.key(0)),
    "batch_shape": lambda: auto_vmap(1, batch_shape=(2, 5))(jnp.sum)(Y),
    "no rank": lambda: auto_vmap(1, None)(lambda v, w: v @ w)(Y, jnp.ones((3, 2))),
    "ragged": lambda: auto_vmap("n", 0)(lambda v, s: s * jnp.sum(v))(
        Ragged(jnp.ones(6), [1, 2, 3]), jnp.ones((2, 1))
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED)
def test_batch_axes_that_no_mode_refuses(call, mode):
    with jax.numpy_rank_promotion(mode), warnings.catch_warnings(action="error"):
        got = call()
    with jax.numpy_rank_promotion("allow"):
        assert_same(got, call())


def test_named_arrays_are_matched_by_their_names():
    xr = pytest.importorskip("xarray")
    import rankax.xarray

    x = xr.DataArray(np.ones((4, 5, 3), "float32"), dims=("t", "i", "n"))
    kernel = auto_vmap(a="n", b="n")(lambda a, b: a @ b)
    with jax.numpy_rank_promotion("raise"):
        assert rankax.xarray.apply(kernel, x, x[0]).shape == (4, 5)


FRONT_ENDS = {
    "map": auto_vmap(1),
    "chunks": auto_vmap(1, chunk_size=2),
    "jit": auto_vmap(1, jit=True),
    "lanes": auto_vmap(1, lockstep=False),
    "chunked_vmap": lambda f: chunked_vmap(f, 2),
    "chunked_reduce": lambda f: chunked_reduce(f, "sum", 2),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_kernel_that_promotes_is_told_as_by_vmap(name):
    # JAX warns once for each shape.
    rows = jnp.ones((2 + [*FRONT_ENDS].index(name), 3))

    def promotes(v):
        return jnp.sum(v + rows)

    call = FRONT_ENDS[name](promotes)
    with jax.numpy_rank_promotion("warn"), pytest.warns(UserWarning, match="rank promotion"):
        want = call(Y)  # known when it is refused
    with jax.numpy_rank_promotion("raise"):
        for refused in (jax.vmap(promotes), call, jax.grad(lambda x: jnp.sum(call(x)))):
            with pytest.raises(ValueError, match="could not be broadcast together"):
                refused(Y)
    with jax.numpy_rank_promotion("allow"):
        assert_same(call(Y), want)
