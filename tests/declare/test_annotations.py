# SPDX-License-Identifier: MIT
"""Ranks read from annotations: arrays, the containers that hold them, and what is no array."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
    Union,
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import (
    Array,
    ArrayLike,
    Float,
    Int,
    Key,
    Num,
    PRNGKeyArray,
    PyTree,
    Scalar,
    ScalarLike,
    Shaped,
)
from typing_extensions import TypeAliasType

from helpers import assert_same
from rankax import CoreDimensionError, auto_vmap

Vector = Float[Array, "3"]
Meters = NewType("Meters", Float[Array, ""])
Bounded = TypeVar("Bounded", bound=Float[Array, "n"])
Either = TypeVar("Either", Float[Array, "n"], Int[Array, "m"])
T = TypeVar("T")


class Pose(NamedTuple):
    rotation: Float[Array, "3 3"]
    translation: Float[Array, "3"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Body:
    pose: Pose
    mass: Float[Array, ""]
    name: str = dataclasses.field(default="body", metadata={"static": True})
    note: Any = None


class Spring(eqx.Module):
    stiffness: Float[Array, ""]
    rest: Float[Array, "3"]
    weights: Array
    label: str = eqx.field(static=True, default="spring")
    activation: Callable[[Float[Array, "n"]], Float[Array, "n"]] = eqx.field(
        static=True, default=jnp.tanh
    )
    shape: ClassVar[Float[Array, "9 9"]]

    @auto_vmap
    def force(self, x: Float[Array, "3"]) -> Float[Array, "3"]:
        return -self.stiffness * (x - self.rest)


class Tree(NamedTuple):
    children: "list[Tree]"
    at: Vector


class Params(TypedDict):
    k: Float[Array, "n"]
    x0: NotRequired[Float[Array, ""]]
    other: int


def ranks(hint: Any, value: Any) -> dict[str, int]:
    """Ranks by path of the leaves of ``value`` under one annotation."""

    def kernel(x, always):
        return x

    kernel.__annotations__ = {"x": hint, "always": Float[Array, ""]}
    plan = auto_vmap(kernel).plan(x=value, always=1.0)
    return {leaf.path: leaf.rank for leaf in plan.leaves if leaf.path != "always"}


matrix = jnp.ones((3, 3))
key = jax.random.key(0)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (Float[Array, "*batch n 3"], matrix, 2),
        (Float[Array, "*batch"], matrix, 0),
        (Float[Array, "#n _"], matrix, 2),
        (Float[np.ndarray, "n"], np.ones((2, 3)), 1),
        (Num[Array | np.ndarray, "n"], matrix, 1),
        (Float[Float[Array, "3"], "n"], matrix, 2),
        (Scalar, matrix, 0),
        (ScalarLike, 1.0, 0),
        (Float[ArrayLike, ""], 1.0, 0),
        (Float[ArrayLike, "n"], matrix, 1),
        (Key[Array, "n"], jax.random.split(key, 4), 1),
        (PRNGKeyArray | None, key, 0),
        (Optional[Float[Array, "3"]], matrix, 1),  # noqa: UP045
        (Union[Float[Array, "n"], Int[Array, "m"]], matrix, 1),  # noqa: UP007
        (Float[Array, "n"] | str, matrix, 1),
        (Annotated[Float[Array, "n"], "in metres"], matrix, 1),
        (Final[Float[Array, "n"]], matrix, 1),
        (Meters, matrix, 0),
        (Bounded, matrix, 1),
        (Either, matrix, 1),
    ],
)
def test_array_types(hint, value, expected):
    assert ranks(hint, value) == {"x": expected}


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (PyTree[Float[Array, "?n"], "T"], {"a": (matrix, None)}, {"x['a'][0]": 1}),
        (tuple[Float[Array, "n"], str], (matrix, "a"), {"x[0]": 1}),
        (tuple[Vector, ...], (matrix, matrix), {"x[0]": 1, "x[1]": 1}),
        (list[Vector], [matrix, matrix], {"x[0]": 1, "x[1]": 1}),
        (Sequence[Pose], [Pose(matrix, matrix)], {"x[0].rotation": 2, "x[0].translation": 1}),
        (Mapping[str, list[Vector]], {"a": [matrix]}, {"x['a'][0]": 1}),
        (dict[str, tuple[Vector, int]], {"a": (matrix, 1)}, {"x['a'][0]": 1}),
        (Pose | None, Pose(matrix, None), {"x.rotation": 2}),
        (Pose | None, None, {}),
        (Optional["Pose"], Pose(matrix, None), {"x.rotation": 2}),
        (Tree, Tree([Tree([], matrix)], matrix), {"x.children[0].at": 1, "x.at": 1}),
        (Body, Body(Pose(None, matrix), matrix), {"x.pose.translation": 1, "x.mass": 0}),
        (Spring, Spring(matrix, matrix, matrix), {"x.stiffness": 0, "x.rest": 1}),
        (Params, {"k": matrix, "x0": matrix, "other": 1}, {"x['k']": 1, "x['x0']": 0}),
        (Params, {"k": matrix, "other": "any"}, {"x['k']": 1}),
    ],
)
def test_containers_are_read_by_their_parts(hint, value, expected):
    assert ranks(hint, value) == expected


Endless = TypeAliasType("Endless", list["Endless"])
Chain = tuple[Vector, Optional["Chain"]]


class Half(NamedTuple):
    at: Vector
    what: "Nowhere"


class Pair(NamedTuple, Generic[T]):
    first: Vector
    second: T


class Box(Generic[T]):
    """Says nothing of what it holds."""


Vecs = TypeAliasType("Vecs", tuple[Vector, T], type_params=(T,))


NOT_FIRST = "have a variadic that is not the first word; batch axes lead, so write it first"
UNION = "so the number of batch axes cannot be known; give the parameter one rank explicitly"


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (Float[Array, "n *rest"], f"the dimensions 'n *rest' {NOT_FIRST}"),
        (Float[Array, "n ... 3"], f"the dimensions 'n ... 3' {NOT_FIRST}"),
        (Float[Array, "n"] | Float[Array, "n m"], f"it is a union of rank 1 and rank 2, {UNION}"),
        (Float[Array, "n"] | float, f"it is a union of rank 0 and rank 1, {UNION}"),
        (Float[Array, "n"] | Array, f"it is a union of rank 1 and no rank, {UNION}"),
        (Pose | tuple[Vector, Vector], "it is a union of containers, so the ranks cannot be known"),
        (PyTree[Pose], "PyTree[Pose] does not say at which depth the leaves are; give the "),
        (Endless, "it contains itself, so it does not say at which depth the arrays are; give "),
        (Chain, "it contains itself, so it does not say at which depth the arrays are; give the "),
        (
            "jnp.nowhere",
            "'jnp.nowhere' cannot be resolved (module 'jax.numpy' has no attribute 'nowhere'); "
            "only names of its module are found, so give the parameter its rank explicitly, as in "
            "auto_vmap(x=1) (x=None leaves it untouched)",
        ),
        (Half, "Half cannot be resolved (name 'Nowhere' is not defined)"),
        (list[Half], "Half cannot be resolved (name 'Nowhere' is not defined)"),
        (Box["Nowhere"], "test_annotations.Box[ForwardRef('Nowhere')] cannot be resolved (name "),
        (Pair[Float[Array, "n n"]], "the arguments of the generic Pair are not read; give the "),
        (Vecs[Float[Array, "n n"]], "the arguments of the generic Vecs are not read; give the "),
    ],
)
def test_annotations_without_one_rank_are_errors_at_decoration(hint, message):
    kernel = lambda_annotated(hint)
    expected = f"auto_vmap(kernel): the annotation of x: {message}"
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(expected)}"):
        auto_vmap(kernel)
    # An explicit rank is the way out: the annotation is not read then.
    assert auto_vmap(x=1)(kernel).plan(jnp.ones((2, 3))).batch_shape == (2,)


def test_a_lone_variadic_in_a_class_is_an_error():
    """Seen with unxt's ``Quantity``: a norm of shape (5, 3) came out per component."""

    class Quantity(NamedTuple):
        value: Shaped[Array, "*#shape"]

    class Named(NamedTuple):
        quantity: Quantity
        at: Float[Array, "*shape 3"]

    def norm(q: Quantity):
        return jnp.sqrt(jnp.sum(q.value**2))

    text = r"the annotation of q: {}Quantity\.value: '\*#shape' alone could be the batch axes of a "
    with pytest.raises(ValueError, match=text.format("")):
        auto_vmap(norm)
    with pytest.raises(ValueError, match=text.format(r"Named\.quantity: ").replace(" q:", " x:")):
        auto_vmap(lambda_annotated(list[Named]))
    value = jnp.arange(15.0).reshape(5, 3)
    got = auto_vmap(q=1)(norm)(Quantity(value))
    assert_same(got, jnp.stack([norm(Quantity(item)) for item in value]))


def test_a_variadic_that_leads_another_field_is_the_batch():
    class Cloud(NamedTuple):
        mass: Float[Array, "*batch"]
        at: Float[Array, "*batch 3"]
        parts: tuple[Float[Array, "*#batch"], Float[Array, "..."]]

    value = Cloud(matrix, matrix, (matrix, matrix))
    assert ranks(Cloud, value) == {"x.mass": 0, "x.at": 1, "x.parts[0]": 0}


def test_static_fields_are_not_read():
    class Table(eqx.Module):
        at: Vector
        fixed: Float[Array, "n"] | float = eqx.field(static=True, default=1.0)

    assert ranks(Table, Table(matrix)) == {"x.at": 1}


# Variadic parameters.


def test_unpacked_tuple():
    @auto_vmap
    def kernel(*xs: *tuple[Float[Array, "n"], Float[Array, ""]]):
        return jnp.sum(xs[0]) * xs[1]

    assert kernel(jnp.ones((4, 3)), jnp.arange(4.0)).tolist() == [0.0, 3.0, 6.0, 9.0]


# Classes.


def test_a_subclass_is_read_by_its_own_fields():
    class Charged(Spring):
        charge: Float[Array, ""] = 1.0

    charged = Charged(matrix, matrix, matrix, charge=matrix)
    assert ranks(Spring, charged) == {"x.stiffness": 0, "x.rest": 1, "x.charge": 0}


def lambda_annotated(hint):
    def kernel(x):
        return x

    kernel.__annotations__ = {"x": hint}
    return kernel


def test_annotated_methods_partials_and_objects():
    class Scale(eqx.Module):
        factor: float

        def __call__(self, x: Vector) -> Float[Array, ""]:
            return self.factor * jnp.sum(x)

    spring, scale = Spring(jnp.array(2.0), jnp.ones(3), jnp.ones(7)), Scale(2.0)
    x = jnp.arange(12.0).reshape(4, 3)
    assert_same(spring.force(x), -2.0 * (x - 1.0))
    partial = functools.partial(Scale.__call__, scale)
    for mapped in (auto_vmap(scale), auto_vmap()(scale), auto_vmap(partial)):
        assert_same(mapped(x), 2.0 * jnp.sum(x, 1))


def test_an_unregistered_dataclass_is_an_error():
    @dataclasses.dataclass
    class Plain:
        x: Vector

    kernel = auto_vmap(lambda_annotated(Plain))
    message = (
        "x is Plain, which JAX does not know as a pytree; register it with "
        "jax.tree_util.register_dataclass"
    )
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        kernel(Plain(matrix))


def test_generic_classes():
    pair = Pair(matrix, "text")
    assert ranks(Pair, pair) == ranks(Pair[str], pair) == {"x.first": 1}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is Python 3.12's")
def test_type_statements():
    namespace: dict[str, Any] = dict(globals())
    source = """
type Vec = Float[Array, "3"]
type Nest = Vec | list[Nest]

class Box[N](NamedTuple):
    at: Vec
    what: N

@auto_vmap
def kernel[T: Vec](a: Vec, b: tuple[T, Vec | None], c: Box[str]):
    return a

def nested(a: Nest): ...
"""
    exec(source, namespace)
    box = namespace["Box"](matrix, "text")
    plan = namespace["kernel"].plan(matrix, (matrix, matrix), box)
    assert [leaf.rank for leaf in plan.leaves] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="the annotation of a: it contains itself"):
        auto_vmap(namespace["nested"])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is Python 3.12's")
def test_a_type_statement_that_cannot_be_evaluated():
    namespace: dict[str, Any] = dict(globals())
    exec("type Lost = jnp.nowhere\ndef kernel(x: Lost, y: Vector): return y", namespace)
    message = (
        "auto_vmap(kernel): the annotation of x: module 'jax.numpy' has no attribute 'nowhere'; "
        "only names of its module are found, so give the parameter its rank explicitly"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        auto_vmap(namespace["kernel"])
    plan = auto_vmap(x=None)(namespace["kernel"]).plan(object(), matrix)
    assert [(leaf.path, leaf.rank) for leaf in plan.leaves] == [("y", 1)]


def test_type_aliases_of_typing_extensions():
    assert ranks(TypeAliasType("vec", Float[Array, "3"]), matrix) == {"x": 1}


# Return annotations.


def test_a_return_annotation_is_checked_while_tracing():
    @auto_vmap
    def kernel(x: Float[Array, "n"]) -> tuple[Float[Array, "n+1"], Float[Array, ""]]:
        return jnp.concatenate([x, x]), jnp.sum(x)

    x = jnp.arange(4.0)[:, None]
    assert_same(kernel(x), (jnp.repeat(x, 2, axis=1), x[:, 0]))
    for shape in ((4, 3), (3,)):  # without batch axes, too
        with pytest.raises(CoreDimensionError, match=r"declared as n\+1 = 4 is 6 \(output\[0\]\)"):
            jax.eval_shape(kernel, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("hint", [Float[Array, "n *m"], PyTree[Pose], Float[Array, "n"] | float])
def test_a_return_annotation_without_one_rank_is_not_checked(hint):
    kernel = lambda_annotated(Vector)
    kernel.__annotations__["return"] = hint
    assert_same(auto_vmap(kernel)(matrix), matrix)


def test_a_returned_named_variadic_means_one_scalar():
    @auto_vmap
    def kernel(x: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
        return x if x.size > 3 else jnp.sum(x)

    assert_same(kernel(matrix), matrix.sum(1))
    message = 'output has 1 axis, but its rank "" declares 0.'
    with pytest.raises(CoreDimensionError, match=re.escape(message)):
        kernel(jnp.ones((2, 4)))
