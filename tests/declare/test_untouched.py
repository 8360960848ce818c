# SPDX-License-Identifier: MIT
"""Arrays without a rank: plans and errors show them, and bare annotations warn of them."""

import re
import typing
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, ArrayLike, Float, PyTree
from typing_extensions import TypeAliasType

from rankax import RankError, auto_vmap
from rankax.plans import BatchPlan

T = TypeVar("T")


class Pose(NamedTuple):
    """A class of another library: its author knows nothing of ranks."""

    rotation: Array
    name: str = "pose"


class Config:
    def __init__(self, value):
        self.value = value


poses, points = Pose(jnp.asarray(np.ones((5, 1, 3, 3)))), jnp.asarray(np.ones((4, 3)))


def moved(pose: Pose, p: Float[Array, "3"], scale: float = 1.0):
    return pose.rotation @ p * jnp.sum(scale)


WARNING = (
    "moved(): the annotation of pose declares no rank, so it goes whole to every item of the "
    "batch, with its arrays pose.rotation (5, 1, 3, 3); give auto_vmap a rank for it, or "
    "pose=None if that is meant"
)


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.category is UserWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


# Plans and errors.


def test_a_plan_shows_the_arrays_without_a_rank():
    kernel = auto_vmap(x={"a": 1, "b": None})(lambda x, w, *rest, **options: x["a"])
    x = {"a": points, "b": jnp.ones((2, 2))}
    options = {"table": np.ones(7), "size": 3, "name": "x", "scale": jnp.ones(())}
    plan = kernel.plan(x, [jax.ShapeDtypeStruct((6, 2), int)], 1.0, jnp.ones(1), **options)
    words = "x['b'] (2, 2), w[0] (6, 2), rest[1] (1,), options['table'] (7,)"
    assert [f"{path} {shape}" for path, shape in plan.untouched] == re.split(r"(?<=\)), ", words)
    assert str(plan).endswith(f"\n  untouched: {words}")


def test_a_plan_of_many_arrays_without_a_rank_shows_some():
    kernel = auto_vmap(None, 0)(lambda model, x: x)
    plan = kernel.plan([jnp.ones(3)] * 9, 1.0)
    assert len(plan.untouched) == 9
    some = "model[0] (3,), model[1] (3,), model[2] (3,), model[3] (3,) and 5 more"
    assert str(plan).endswith(f"\n  untouched: {some}")


def test_a_plan_where_every_array_has_a_rank_shows_none():
    kernel = auto_vmap(0, None)(lambda x, other: x)
    for other in (None, 3, "text", jnp.ones(()), {1: 2, "a": jnp.ones(3)}, Config(jnp.ones(3))):
        plan = kernel.plan(1.0, other)
        assert plan.untouched == ()
        assert "untouched" not in str(plan)
    assert BatchPlan("f", (), (), ()).untouched == ()


def test_an_error_shows_the_arrays_without_a_rank():
    kernel = auto_vmap(None, 1)(moved)
    with pytest.raises(RankError) as error:
        kernel(poses, jnp.ones(()), np.ones(2))
    assert str(error.value).partition("\n")[2] == (
        "\n"
        "    argument  shape  rank  batch axes\n"
        "  > p         ()     1     too few axes\n"
        "    untouched: pose.rotation (5, 1, 3, 3), scale (2,)\n"
        "\n"
        "p has 0 axes, but its rank 1 needs 1."
    )


# The warning.


@pytest.mark.parametrize("options", [{}, {"jit": True}], ids=str)
def test_a_bare_annotation_that_could_not_give_a_rank_warns_once(options):
    kernel = auto_vmap(**options)(moved)
    other = auto_vmap(**options)(moved)
    assert warned(lambda: kernel(poses, points)) == [WARNING]
    assert warned(lambda: kernel(poses, points[:2])) == []
    assert warned(lambda: other.plan(poses, points)) == [WARNING]
    (scale,) = warned(lambda: kernel(poses, points, np.ones(1)))
    assert scale.startswith("moved(): the annotation of scale declares no rank, so it goes whole")


def test_it_warns_again_where_warnings_are_errors():
    kernel = auto_vmap(moved)
    for _ in range(2):
        with pytest.raises(UserWarning, match=f"^{re.escape(WARNING)}$"):
            kernel(poses, points)


def test_none_or_a_rank_beside_annotations():
    for ranks in ({"pose": None}, {"pose": {"rotation": 2, "name": None}}, {"p": 1}):
        assert warned(lambda: auto_vmap(**ranks)(moved)(poses, points)) == []  # noqa: B023
    kernel = auto_vmap(pose=None)(moved)
    assert len(warned(lambda: kernel(poses, points, np.ones(1)))) == 1  # None was of pose alone


def test_what_holds_no_array_with_axes_does_not_warn():
    kernel = auto_vmap(lambda_annotated(Config))
    for value in (None, 2.0, "text", Config(points), {1: 2, "a": 3}, jnp.ones(()), [1, 2]):
        assert warned(lambda: kernel(value, points)) == []  # noqa: B023


def lambda_annotated(hint):
    def kernel(x, p):
        return p

    kernel.__annotations__ = {"x": hint, "p": Float[Array, "3"]}
    return kernel


@pytest.mark.parametrize(
    "hint",
    [
        ArrayLike,
        Float[Array, "..."],
        Float[Array, "..."] | np.ndarray,
        dict[str, tuple[Array, ...]],
        Any,
        object,
        T,
        PyTree,
        PyTree[Array],
        TypeAliasType("Arrays", list[Array]),
        Callable,
        Callable[[float], float],
        dict[str, Any],
    ],
    ids=str,
)
def test_annotations_that_mean_no_rank_do_not_warn(hint):
    kernel = auto_vmap(lambda_annotated(hint))
    assert warned(lambda: kernel(points, points)) == []
    assert kernel.plan(points, points).untouched == (("x", (4, 3)),)


@pytest.mark.parametrize(
    "hint",
    [
        Pose | None,
        dict,
        typing.List,  # noqa: UP006
        "Pose",
        TypeAliasType("Poses", list[Pose]),
    ],
)
def test_annotations_that_say_nothing_of_arrays_warn(hint):
    kernel = auto_vmap(lambda_annotated(hint))
    assert len(warned(lambda: kernel({"a": points}, points))) == 1


def test_self_and_what_has_no_annotation_do_not_warn():
    class Lens(NamedTuple):
        power: Array

        @auto_vmap
        def bend(self, p: Float[Array, "3"], weights):
            return self.power @ p

    assert warned(lambda: Lens(jnp.ones((2, 3))).bend(points, points)) == []
