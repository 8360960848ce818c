# SPDX-License-Identifier: MIT
"""Errors of a call: their text, before the kernel is traced, in the caller's words."""

import dataclasses
import functools
import traceback
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Key, PRNGKeyArray

import rankax
from helpers import assert_same
from rankax import BatchShapeError, CoreDimensionError, RankError, auto_vmap


class Pose(NamedTuple):
    rotation: Float[Array, "3 3"]
    translation: Float[Array, "3"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Body:
    pose: Pose
    mass: Float[Array, ""]


def never():
    raise AssertionError("the kernel was traced in spite of a wrong call")


def error_of(call) -> ValueError:
    """The error of a call, which JAX neither raised nor worded, whatever options and tracing."""
    kernel, args, kwargs = call.func, call.args, call.keywords
    texts = set()
    chunked = kernel.with_options(chunk_size=2, jit=True)
    for fun in (kernel, kernel.plan, chunked, functools.partial(jax.eval_shape, kernel)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared by the test
            fun(*args, **kwargs)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert Path(rankax.__file__).parent in Path(frames[-1].filename).parents
        texts.add((type(caught.value), str(caught.value)))
    assert len(texts) == 1
    assert "in_axes" not in str(caught.value)
    return caught.value


def text_of(error: ValueError, kernel) -> str:
    """The text without the place of the kernel, which is checked here."""
    code = kernel.__wrapped__.__code__
    place = f"{kernel.__name__}() at {code.co_filename}:{code.co_firstlineno}: "
    assert str(error).startswith(place)
    return str(error)[len(place) :]


def ones(*shape):
    return np.ones(shape, np.float32)


energy = auto_vmap("n 3", "n", "")(lambda x, m, g: never())
pull = auto_vmap("n 3", "n", "", 2)(lambda x, m, g, i: never())
of_trees = auto_vmap({"a": 2, "b": (1, None)}, xs=1, named=2)(lambda tree, *xs, **named: never())
of_named_sizes = auto_vmap({"a": "n", "b": "n+1"}, xs="n", named="n=4")(
    lambda tree, *xs, **named: never()
)
many = auto_vmap(xs=1)(lambda *xs: never())


@auto_vmap
def of_classes(body: Body, *poses: Pose, **named: Float[Array, ""]):
    never()


def called(kernel, *args, **kwargs):
    return functools.partial(kernel, *args, **kwargs)


BODY = Body(Pose(ones(2, 4, 3, 3), ones(3)), ones(5))
FLAT_BODY = Body(Pose(ones(3), ones(4, 3)), ones())
TREE = {"a": ones(3), "b": (ones(4, 3), ones(2))}

KINDS = {
    RankError: "an argument has fewer axes than its rank",
    CoreDimensionError: "the core dimensions disagree",
    BatchShapeError: "the batch axes do not broadcast together",
}
CASES = {
    # With x[None], n would be 1 here and 5 there.
    "an axis more would not help": (
        called(energy, ones(3), ones(5), 1.0),
        RankError,
        'x has 1 axis, but its rank "n 3" needs 2.',
    ),
    "trees, *args and **kwargs": (
        called(of_trees, TREE, ones(3), ones(), k=ones()),
        RankError,
        "tree['a'] has 1 axis, but its rank 2 needs 2; did you mean tree['a'][None]?\n"
        "xs[1] has 0 axes, but its rank 1 needs 1.\n"
        "named['k'] has 0 axes, but its rank 2 needs 2.",
    ),
    "annotated fields": (
        called(of_classes, FLAT_BODY, Pose(ones(4, 3, 3), ones())),
        RankError,
        'body.pose.rotation has 1 axis, but its rank "3 3" needs 2.\n'
        'poses[0].translation has 0 axes, but its rank "3" needs 1.',
    ),
    "forty leaves, of which some are named": (
        called(many, ones(3), *[ones()] * 39),
        RankError,
        "".join(f"xs[{i}] has 0 axes, but its rank 1 needs 1.\n" for i in range(1, 5))
        + "And 35 leaves more with too few axes.",
    ),
    "core dimensions of trees, *args and **kwargs": (
        called(of_named_sizes, {"a": ones(3), "b": ones(7, 3)}, ones(5), k=ones(2)),
        CoreDimensionError,
        "Dimension n is 3 (tree['a']) and 5 (xs[0]).\n"
        "A dimension declared as n+1 = 4 is 3 (tree['b']).\n"
        "A dimension declared as n=4 is 2 (named['k']).",
    ),
    "no pairs": (
        called(energy, ones(4, 5, 3), ones(6, 5), ones(7, 1)),
        BatchShapeError,
        "Batch axis -1 is 4 (x) and 6 (m).",
    ),
    "length zero does not stretch": (
        called(energy, ones(0, 5, 3), ones(6, 2, 5), ones(6, 1)),
        BatchShapeError,
        "Batch axis -1 is 0 (x) and 2 (m).",
    ),
    "every pair": (
        called(energy, ones(4, 5, 3), ones(6, 5), 1.0),
        BatchShapeError,
        "Batch axis -1 is 4 (x) and 6 (m).\nTo combine every x with every m, pass x[:, None].",
    ),
    "batch axes of trees, *args and **kwargs": (
        called(of_classes, BODY, Pose(ones(3, 1, 3, 3), ones(3)), k=ones(6)),
        BatchShapeError,
        "Batch axis -2 is 2 (body.pose.rotation) and 3 (poses[0].rotation).\n"
        "Batch axis -1 is 4 (body.pose.rotation), 5 (body.mass) and 6 (named['k']).",
    ),
}


@pytest.mark.parametrize(("call", "error", "sentences"), CASES.values(), ids=CASES)
def test_clashes(call, error, sentences):
    caught = error_of(call)
    assert type(caught) is error
    first, _table, advice = text_of(caught, call.func).split("\n\n")
    assert (first, advice) == (KINDS[error], sentences)


TABLES = {
    "all at once": (
        called(pull, ones(4, 5, 2), ones(6), ones(3), 1.0),
        """
an argument has fewer axes than its rank, the core dimensions disagree and \
the batch axes do not broadcast together

    argument  shape      rank   batch axes
  > x         (4, 5, 2)  "n 3"  (4,)
  > m         (6,)       "n"    ()
  > g         (3,)       ""     (3,)
  > i         ()         2      too few axes

i has 0 axes, but its rank 2 needs 2.
Dimension n is 5 (x) and 6 (m).
A dimension declared as 3 is 2 (x).
Batch axis -1 is 4 (x) and 3 (g).
""",
    ),
    "forty leaves": (
        called(many, *[ones(5, 3)] * 30, ones(4, 3), *[ones(3)] * 9),
        """
the batch axes do not broadcast together

    argument  shape   rank  batch axes
  > xs[0]     (5, 3)  1     (5,)
  > xs[1]     (5, 3)  1     (5,)
  > xs[2]     (5, 3)  1     (5,)
  > xs[3]     (5, 3)  1     (5,)
    ... 26 more that clash
  > xs[30]    (4, 3)  1     (4,)
    ... 8 more
    xs[39]    (3,)    1     ()

Batch axis -1 is 5 (xs[0], xs[1], xs[2], xs[3] and 26 more) and 4 (xs[30]).
""",
    ),
}


@pytest.mark.parametrize(("call", "text"), TABLES.values(), ids=TABLES)
def test_tables(call, text):
    assert text_of(error_of(call), call.func) == text.strip("\n")


def test_sixteen_rows_are_shown_whole():
    text = str(error_of(called(many, *[ones(5, 3)] * 15, ones(4, 3))))
    assert "more" in text.splitlines()[-1]  # the sentence names some
    assert sum(line.startswith("  > xs[") for line in text.splitlines()) == 16


def test_outputs():
    @auto_vmap("(n),()->(n),()")
    def kernel(v, s):
        return jnp.concatenate([v, v]), v

    text = """
the kernel does not return what it declares, for one item

    output     shape  rank
  > output[0]  (6,)   "n"
  > output[1]  (3,)   ""

output[1] has 1 axis, but its rank "" declares 0.
Dimension n is 6 (output[0]) and 3 (the arguments).
"""
    for v, s in [(ones(4, 3), ones()), (ones(3), ones())]:
        with pytest.raises(CoreDimensionError) as caught:
            kernel(v, s)
        assert text_of(caught.value, kernel) == text.strip("\n")


# Annotations.


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (ones(3), "body is annotated as Body, but it is an array of shape (3,)"),
        (Body((ones(3, 3), ones(3)), 1.0), "body.pose is annotated as Pose, but it is tuple"),
    ],
    ids=["an array", "a tuple"],
)
def test_what_is_not_of_the_annotated_class(body, text):
    assert text_of(error_of(called(of_classes, body)), of_classes) == text


@pytest.mark.parametrize("annotation", [PRNGKeyArray, Key[Array, ""], PRNGKeyArray | None], ids=str)
def test_a_raw_key_is_refused_where_a_typed_one_is_annotated(annotation):
    @auto_vmap
    def draw(key: annotation, scale: Float[Array, ""]):
        return jax.random.normal(key) * scale

    raw = jax.random.PRNGKey(0)
    keys = jax.random.split(jax.random.key(0), 3)
    scale = jnp.ones(3)
    for came, shape in ((raw, "(2,)"), (jax.random.key_data(keys), "(3, 2)")):
        with pytest.raises(TypeError) as caught:
            draw(came, scale)
        assert str(caught.value) == (
            "draw(): key is annotated as a PRNG key, but it is an array of dtype uint32 and shape "
            f"{shape}; make keys with jax.random.key, not jax.random.PRNGKey, or pass "
            "jax.random.wrap_key_data(key)"
        )
    # What it advises.
    assert_same(draw(jax.random.wrap_key_data(raw), 1.0), jax.random.normal(raw))
    assert draw.plan(jax.eval_shape(lambda: keys), 1.0).batch_shape == (3,)
