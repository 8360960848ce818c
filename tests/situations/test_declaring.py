# SPDX-License-Identifier: MIT
"""Reported elsewhere: which arguments are mapped, and how that is written down."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same
from plain import item_by_item
from rankax import auto_vmap

X = jnp.asarray(np.linspace(0.3, 2.0, 6).reshape(2, 3))


def test_blanks_in_a_signature():
    """numpy/numpy#19597, dask/dask#7972."""
    matrices = jnp.asarray(np.arange(8.0).reshape(2, 2, 2))
    with pytest.raises(ValueError, match="not a valid gufunc signature"):
        jnp.vectorize(jnp.trace, signature="(n, n) -> ()")(matrices)
    got = auto_vmap("(n, n) -> ()")(jnp.trace)(matrices)
    assert_same(got, item_by_item(jnp.trace, [2], matrices))


def test_parameters_and_keys_of_any_name():
    """Python calls what is not used ``_``; errors of JAX name the leaves after their paths."""
    rows = {"b_2": X, "b ": X + 1, "b-": X + 2}
    assert_same(auto_vmap(1, 1, chunk_size=1)(lambda _, _1: _1)(X, -X), -X)
    assert_same(auto_vmap(_=1, chunk_size=1)(lambda _: _["b-"])(rows), X + 2)


def test_none_as_the_first_argument():
    """jax-ml/jax#38117, jax-ml/jax#17020."""

    def scaled(weight, x):
        return x if weight is None else weight * x

    with pytest.raises(ValueError, match="None is not a valid value"):
        jnp.vectorize(scaled)(None, X)
    kernel = auto_vmap(weight=0, x=0)(scaled)
    assert_same(kernel(None, X), X)
    assert_same(kernel(X, X[0]), item_by_item(scaled, [0, 0], X, X[0]))


def test_a_function_as_a_keyword_argument():
    """jax-ml/jax#19066, jax-ml/jax#183."""

    def applied(x, by):
        return by(x)

    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.vmap(applied)(X, by=jnp.sin)
    kernel = auto_vmap(x=0, jit=True, chunk_size=2)(applied)
    assert_same(kernel(X, by=jnp.sin), jnp.sin(X))
    assert_same(kernel(X, by=jnp.cos), jnp.cos(X))


def test_a_string_as_a_keyword_argument():
    """jax-ml/jax#5617."""

    def norm(v, kind="euclid"):
        return jnp.sqrt(v @ v) if kind == "euclid" else jnp.max(jnp.abs(v))

    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.vmap(norm)(X, kind="largest")
    kernel = auto_vmap(v=1, jit=True)(norm)
    assert_same(kernel(X, kind="largest"), jnp.max(X, axis=-1))
    assert_same(kernel(X), item_by_item(norm, [1], X))


def test_keyword_arguments_are_mapped_by_their_ranks():
    """jax-ml/jax#20914: `jax.vmap` maps axis 0 of each, and `in_axes` cannot say otherwise."""

    def scaled(matrix, vector):
        return matrix @ vector

    matrix, vectors = jnp.asarray(np.arange(9.0).reshape(3, 3)), X
    with pytest.raises(ValueError, match="in_axes"):
        jax.vmap(scaled, in_axes=(None, 0))(matrix, vector=vectors)
    got = auto_vmap(matrix=2, vector=1)(scaled)(vector=vectors, matrix=matrix)
    assert_same(got, item_by_item(scaled, [2, 1], matrix, vectors))


def test_a_keyword_argument_is_not_lost():
    """A keyword argument of `jnp.vectorize` is neither mapped nor used (see "Migrating")."""

    def shifted(x, by=0.0):
        return x + by

    assert_same(jnp.vectorize(shifted)(X[0], by=2.0), X[0])
    kernel = auto_vmap(x=0, by=0)(shifted)
    assert_same(kernel(X[0], by=2.0), X[0] + 2)
    assert_same(kernel(X[:, :1], by=X[0]), item_by_item(shifted, [0, 0], X[:, :1], X[0]))


def test_a_default_that_a_call_leaves_out():
    """numpy/numpy#16120: the number of arguments changes from call to call."""

    def scaled(x, by=3.0):
        return x * by

    with pytest.raises(ValueError, match="in_axes"):
        jax.vmap(scaled, in_axes=(0, 0))(X)
    kernel = auto_vmap(x=0, by=0, chunk_size=4)(scaled)
    assert_same(kernel(X, X), X * X)
    assert_same(kernel(X), X * 3)


def test_a_decorated_method():
    """numpy/numpy#24397."""

    class Line:
        def __init__(self, slope):
            self.slope = slope

        def height(self, x):
            return self.slope * x

        by_numpy = np.vectorize(height)
        by_vmap = jax.vmap(height)
        mapped = auto_vmap(x=0)(height)

    line = Line(jnp.float32(2.5))
    for name in ("by_numpy", "by_vmap"):
        with pytest.raises(TypeError):
            getattr(line, name)(X)
    assert_same(line.mapped(X), item_by_item(line.height, [0], X))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["mass", "charge"], meta_fields=["name"]
)
@dataclasses.dataclass
class Body:
    mass: jax.Array
    charge: jax.Array | None = None
    name: str = "body"


def test_a_class_with_a_field_that_may_be_none():
    """jax-ml/jax#26053, jax-ml/jax#19729."""

    def weight(body, gravity):
        heavier = body.mass if body.charge is None else body.mass + body.charge
        return Body(heavier * gravity, None, body.name)

    bodies = Body(X[0], name="moons")
    with pytest.raises(ValueError, match="in_axes"):  # static fields of the axes must agree
        jax.vmap(weight, in_axes=(Body(0), None))(bodies, 2.0)
    kernel = auto_vmap(body={"mass": 0, "charge": 0}, gravity=0, chunk_size=2)(weight)
    gravity = jnp.float32(2)
    assert_same(kernel(bodies, gravity), Body(X[0] * 2, None, "moons"))
    charged = Body(X[0], X, "ions")
    assert_same(kernel(charged, gravity), Body((X[0][None] + X) * 2, None, "ions"))


def test_a_kernel_inside_a_kernel():
    """A kernel still takes one item; what `jax.vmap` returns takes it for a batch."""

    @auto_vmap(x=1, y=1)
    def distance(x, y):
        return jnp.sqrt(jnp.sum((x - y) ** 2))

    x, y = X
    assert jax.vmap(distance.__wrapped__)(x, y).shape == (3,)
    assert_same(distance(x, y), jnp.linalg.norm(x - y))

    @auto_vmap(cloud=2, chunk_size=2, jit=True)
    def diameter(cloud):
        return jnp.max(distance(cloud[:, None], cloud))

    def plain(cloud):
        return jnp.max(item_by_item(distance.__wrapped__, [1, 1], cloud[:, None], cloud))

    clouds = jnp.sin(jnp.asarray(np.arange(60.0).reshape(5, 4, 3)))
    assert_same(diameter(clouds), item_by_item(plain, [2], clouds))


def test_a_mistake_is_reported_by_the_names_of_the_arguments():
    """jax-ml/jax#10193: which argument, and how long it is."""
    kernel = auto_vmap(position=1, weight=0)(lambda position, weight: position * weight)
    with pytest.raises(ValueError, match="batch axes do not broadcast") as error:
        kernel(position=X, weight=jnp.ones(4))
    assert "Batch axis -1 is 2 (position) and 4 (weight)." in str(error.value)
