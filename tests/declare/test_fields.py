# SPDX-License-Identifier: MIT
"""Classes by their fields: named where JAX only counts, and ranks by field or by example."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from helpers import assert_same
from rankax import BatchShapeError, auto_vmap, chunked_vmap, ranks_like


def counted(cls, *fields):
    """Register a class of which JAX sees positions, not names, as jax_dataclasses does."""
    jax.tree_util.register_pytree_node(
        cls,
        lambda node: ([getattr(node, name) for name in fields], None),
        lambda _, children: cls(*children),
    )


@dataclasses.dataclass
class Flat:
    rotation: Float[Array, "3 3"]
    translation: Float[Array, "3"]
    count: int = dataclasses.field(default=3, metadata={"static": True})


@dataclasses.dataclass
class Arm:
    base: Flat
    links: list[Flat]
    length: Float[Array, ""]


class Slotted:
    __slots__ = ("first", "second", "unused")

    def __init__(self, first, second):
        self.first, self.second = first, second


class Strict:
    """Its constructor, which JAX calls too, takes arrays only."""

    def __init__(self, x, y):
        assert all(hasattr(value, "shape") for value in (x, y))
        self.x, self.y = x, y


counted(Flat, "rotation", "translation")
counted(Arm, "base", "links", "length")
counted(Slotted, "first", "second")
counted(Strict, "x", "y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converting:
    """Its fields have names, and hold arrays whatever was passed."""

    x: Any
    y: Any

    def __post_init__(self):
        self.x, self.y = jnp.asarray(self.x), jnp.asarray(self.y)


class Packed(NamedTuple):
    made: Any
    z: Any


@dataclasses.dataclass
class Made:
    """Its first child is made when it is flattened, and so is no attribute."""

    x: Float[Array, "3"]
    y: Float[Array, ""]


jax.tree_util.register_pytree_node(
    Made, lambda m: (((m.x, m.y), m.x), None), lambda _, children: Made(*children[0])
)

R, t = jnp.asarray(np.eye(3)), jnp.asarray(np.arange(3.0))


def by_type(value: Any) -> str:
    """Name a case of a test; the default would hold an address, which no two processes share."""
    return type(value).__name__


def paths(rank: Any, value: Any) -> dict[str, int]:
    plan = auto_vmap(x=rank)(lambda x: x).plan(value)
    return {leaf.path: leaf.rank for leaf in plan.leaves}


# Names in place of positions.

ARM = ["x.base.translation", "x.links[0].translation", "x.length"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Flat(R, t), ["x.rotation", "x.translation"]),
        (Flat(3, 3), ["x.rotation", "x.translation"]),
        (Flat(None, t), ["x.translation"]),
        (Slotted(R, t), ["x.first", "x.second"]),
        (Strict(R, t), ["x.x", "x.y"]),
        (Strict(t, t), ["x[<flat index 0>]", "x[<flat index 1>]"]),
        (
            Packed(Made(R, t), t),
            ["x.made[<flat index 0>][0]", "x.made[<flat index 0>][1]", "x.made.x", "x.z"],
        ),
        (Arm(Flat(None, t), [Flat(None, t)], 1.0), ARM),
    ],
    ids=by_type,
)
def test_leaves_that_jax_only_counts_are_named_by_attributes(value, expected):
    assert list(paths(0, value)) == expected


def test_an_error_names_the_attributes():
    kernel = auto_vmap(pose=1, x=1)(lambda pose, x: x)
    with pytest.raises(BatchShapeError, match=r"Batch axis -1 is 3 \(pose.rotation\) and 2 \(x\)"):
        kernel(Flat(R, t), jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"x\.first is a list of numbers"):
        paths(1, Slotted([1.0, 2.0], t))
    with pytest.raises(ValueError, match=r"pose\.rotation"):
        chunked_vmap(lambda pose: pose, 2)(Flat(jnp.ones((4, 3, 3)), jnp.ones((5, 3))))
    # Which are not read by field, as those of `jax.vmap`.
    with pytest.raises(ValueError, match="the in_axes of pose is a dict of 2 entries, but pose is"):
        chunked_vmap(lambda pose: pose, 2, ({"rotation": 0, "translation": 0},))(Pose(R, t))


# Annotations of such classes.


def test_an_annotated_class_of_classes_that_jax_only_counts():
    @auto_vmap
    def kernel(arm: Arm):
        assert arm.base.count == 3
        return arm.length * sum(arm.base.rotation @ link.translation for link in arm.links)

    arm = Arm(Flat(2 * R, t), [Flat(R, jnp.ones((4, 1, 3))), Flat(R, t)], jnp.arange(5.0))
    want = jnp.outer(jnp.arange(5.0), 2 * (1 + t))
    assert_same(kernel(arm), jnp.stack([want] * 4))


def test_a_class_whose_children_are_no_attributes_is_an_error():
    def kernel(x: Made):
        return x.x * x.y

    message = (
        "x is Made, which JAX knows as a pytree without field names, and its child 0 is not one "
        "of its attributes; give the parameter a rank explicitly, such as rankax.ranks_like(item) "
        "of an example of one item"
    )
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        auto_vmap(kernel)(Made(t, 1.0))
    one = Made(t, jnp.ones(()))
    got = auto_vmap(ranks_like(one))(kernel)(Made(t, jnp.arange(4.0)))
    assert_same(got, jnp.outer(jnp.arange(4.0), t))


# Ranks by field.


class Pose(NamedTuple):
    rotation: Any
    translation: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Body:
    pose: Any
    mass: Any
    name: str = dataclasses.field(default="sun", metadata={"static": True})


@pytest.mark.parametrize("cls", [Pose, Flat])
def test_a_dict_of_ranks_is_read_by_the_fields_of_a_class(cls):
    def moved(pose, x):
        return pose.rotation @ x + pose.translation

    kernel = auto_vmap({"rotation": 2, "translation": "n"}, x="n")(moved)
    translations = jnp.arange(18.0).reshape(6, 3)
    want = jnp.stack([moved(cls(R, item), t) for item in translations])
    assert_same(kernel(cls(R, translations), t), want)


def test_dicts_nest_and_a_real_dict_is_read_by_its_keys():
    rank = {"pose": {"rotation": None, "translation": 1}, "mass": 0}
    value = Body(Pose("untouched", jnp.ones((4, 3))), 1.0)
    assert paths(rank, value) == {"x.pose.translation": 1, "x.mass": 0}
    as_dict = {"pose": {"rotation": None, "translation": t}, "mass": 1.0}
    assert paths(rank, as_dict) == {"x['pose']['translation']": 1, "x['mass']": 0}


@pytest.mark.parametrize(
    ("rank", "value", "message"),
    [
        (
            {"rotation": 2, "translatoin": 1},
            Pose(R, t),
            "the rank of x has an entry for 'translatoin', which is not a field of Pose that holds "
            "arrays; did you mean 'translation'?; the rank of x has no entry for x.translation",
        ),
        (
            {"pose": {"rotation": 2, "translation": 1, "k": 3}, "mass": 0},
            Body(Pose(R, t), 1.0),
            "the rank of x.pose has an entry for 'k', which is not a field of Pose",
        ),
        (
            {"pose": 0, "mass": 0, "name": None},
            Body(t, 1.0),
            "the rank of x has an entry for 'name', which is not a field of Body",
        ),
        ({"rotation": 2}, (R, t), "the rank of x is a dict of 1 entry, but x is tuple"),
    ],
)
def test_fields_that_do_not_fit(rank, value, message):
    with pytest.raises(ValueError, match=f": {re.escape(message)}"):
        paths(rank, value)


# Ranks by example.


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (t, 1),
        (1.0, 0),
        (np.float32(1), 0),
        (jax.ShapeDtypeStruct((2, 3), jnp.float32), 2),
        (jax.random.key(0), 0),
        (None, None),
        (len, None),
        ({"a": [t, (R, "text", None)]}, {"a": [1, (2, None, None)]}),
        (Pose(R, t), Pose(2, 1)),
        (Flat(R, t), Flat(2, 1)),
        (Body(Pose(R, t), 1.0), Body(Pose(2, 1), 0)),
        (Strict(R, t), {"x": 2, "y": 1}),
        (Converting(R, t), {"x": 2, "y": 1}),
        ([Strict(t, R)], [{"x": 1, "y": 2}]),
    ],
    ids=by_type,
)
def test_ranks_of_an_example(item, expected):
    got = ranks_like(item)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize("item", [Flat(R, t), Converting(R, t)], ids=by_type)
def test_an_example_declares_what_batches_of_it_need(item):
    def kernel(x):
        return sum(leaf.sum() for leaf in jax.tree.leaves(x))

    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), item)
    assert_same(auto_vmap(ranks_like(item))(kernel)(batch), jax.vmap(kernel)(batch))


def test_a_class_of_which_no_rank_tree_can_be_made():
    class Closed:
        pass

    def refuse(_, children):
        raise TypeError("takes two arrays")

    jax.tree_util.register_pytree_node(Closed, lambda _: ((t + 1, t), None), refuse)
    message = (
        "ranks_like: item['a'] is Closed, which accepts no ints in place of its arrays and has no "
        "field names; give one rank for all of it, or None"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ranks_like({"a": Closed()})
