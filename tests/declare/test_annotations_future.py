# SPDX-License-Identifier: MIT
"""String annotations: the same as the others, wherever their names are defined."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Array, Float, PRNGKeyArray, jaxtyped

from rankax import auto_vmap

if TYPE_CHECKING:
    from somewhere import Config  # pyright: ignore[reportMissingImports]


class Pose(NamedTuple):
    rotation: Float[Array, "3 3"]
    translation: Float[Array, "3"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Body:
    pose: Pose
    mass: Float[Array, ""]
    units: ClassVar[str] = "SI"
    next: Body | None = None


def read(kernel, *args):
    return {leaf.path: leaf.rank for leaf in auto_vmap(kernel).plan(*args).leaves}


POSE = Pose(jnp.ones((3, 3)), jnp.ones(3))


def test_module_level_names():
    def kernel(body: Body, key: PRNGKeyArray | None): ...

    body = Body(POSE, jnp.ones(4), next=Body(None, jnp.ones(())))
    assert read(kernel, body, jax.random.key(0)) == {
        "body.pose.rotation": 2,
        "body.pose.translation": 1,
        "body.mass": 0,
        "body.next.mass": 0,
        "key": 0,
    }


def test_names_of_the_functions_around_the_decorator():
    Vec = Float[Array, "3"]

    class Local(NamedTuple):
        at: Vec
        inner: Inner

    class Inner(NamedTuple):
        size: Float[Array, ""]

    @auto_vmap
    def kernel(x: Local, y: Vec) -> Vec:
        return x.at + y * x.inner.size

    got = kernel(Local(jnp.ones((4, 3)), Inner(jnp.arange(4.0))), jnp.ones(3))
    np.testing.assert_array_equal(got, 1 + np.repeat(np.arange(4.0)[:, None], 3, axis=1))


def test_names_of_a_class_body():
    class Lens:
        Vec = Float[Array, "3"]

        @auto_vmap
        def bend(self, x: Vec) -> Vec:
            return 2 * x

    x = np.arange(12.0, dtype="f").reshape(4, 3)
    np.testing.assert_array_equal(Lens().bend(x), 2 * x)


def test_names_that_the_body_uses_are_found_later_too():
    def make():
        Vec = Float[Array, "3"]

        def kernel(x: Vec):
            return x, Vec

        return kernel

    assert read(make(), jnp.ones((4, 3))) == {"x": 1}


def test_jaxtyped_below_and_above():
    @jaxtyped(typechecker=beartype)
    @auto_vmap
    @jaxtyped(typechecker=beartype)
    def kernel(x: Float[Array, "*batch n 3"], m: Float[Array, "*batch n"]):
        return m @ x

    x, m = jnp.arange(60.0).reshape(4, 5, 3), jnp.arange(20.0).reshape(4, 5)
    np.testing.assert_array_equal(kernel(x, m), np.einsum("anc,an->ac", x, m))


def test_names_for_type_checkers_only():
    def kernel(x: Float[Array, "n"], config: Config) -> Config:
        return x

    with pytest.raises(TypeError, match="the annotation of config: 'Config' cannot be resolved"):
        auto_vmap(kernel)
    plan = auto_vmap(config=None)(kernel).plan(jnp.ones((4, 2)), "anything")
    assert [(leaf.path, leaf.rank) for leaf in plan.leaves] == [("x", 1)]
    # Ranks for all that has any: the annotation is no longer needed.
    x = np.arange(8.0, dtype="f").reshape(4, 2)
    np.testing.assert_array_equal(auto_vmap(1)(kernel)(x, "anything"), x)
