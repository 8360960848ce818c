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


def test_names_of_the_functions_around_are_not_found():
    Vec = Float[Array, "3"]

    class Local(NamedTuple):
        at: Vec

    def of_name(x: Vec): ...

    def of_class(x: Pose | None, pose: Local): ...

    with pytest.raises(TypeError, match=r"the annotation of x: 'Vec' cannot .*auto_vmap\(x=1\)"):
        auto_vmap(of_name)
    of_class.__annotations__["pose"] = Local
    with pytest.raises(TypeError, match=r"of pose: Local cannot be resolved \(name 'Vec' is not"):
        auto_vmap(of_class)
    plan = auto_vmap(pose={"at": 1})(of_class).plan(POSE, Local(jnp.ones((4, 3))))
    assert [leaf.rank for leaf in plan.leaves] == [2, 1, 1]


def test_names_that_cannot_be_found_in_what_is_returned():
    Vec = Float[Array, "3"]

    def kernel(x: Float[Array, "3"]) -> Vec: ...

    assert read(kernel, jnp.ones((4, 3))) == {"x": 1}


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
