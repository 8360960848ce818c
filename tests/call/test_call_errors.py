# SPDX-License-Identifier: MIT
"""Errors of a call: their text, before the kernel is traced, in the caller's words."""

import dataclasses
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


def never(*args, **kwargs):
    raise AssertionError("the kernel was traced in spite of a wrong call")


def error_of(kernel, *args, **kwargs) -> ValueError:
    """The error of a call, which JAX neither raised nor worded, whatever options and tracing."""
    texts = set()
    for call in (kernel, kernel.plan, lambda *a, **k: jax.eval_shape(kernel, *a, **k)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared by the test
            call(*args, **kwargs)
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


def check(kernel, error: type[ValueError], text: str, *args, **kwargs) -> None:
    """Compare the first line and the advice; and the table between them, if ``text`` has one."""
    caught = error_of(kernel, *args, **kwargs)
    assert type(caught) is error
    want, got = (t.strip("\n").split("\n\n") for t in (text, text_of(caught, kernel)))
    assert len(got) == 3
    assert (got if len(want) == 3 else [got[0], got[2]]) == want


def ones(*shape):
    return np.ones(shape, np.float32)


# Ranks.


@auto_vmap("n 3", "n", "")
def energy(x, m, g):
    never()


def test_too_few_axes_where_one_is_missing():
    text = """
an argument has fewer axes than its rank

x has 1 axis, but its rank "n 3" needs 2; did you mean x[None]?
"""
    check(energy, RankError, text, ones(3), ones(1), 1.0)


@pytest.mark.parametrize(
    ("x", "m", "sentence"),
    [
        # With x[None], n would be 1 here and 5 there; with the last axis, 3 would be 4.
        (ones(3), ones(5), 'x has 1 axis, but its rank "n 3" needs 2.'),
        (ones(4), ones(1), 'x has 1 axis, but its rank "n 3" needs 2.'),
        (ones(), ones(1), 'x has 0 axes, but its rank "n 3" needs 2.'),
        (ones(1, 3), 2.0, 'm has 0 axes, but its rank "n" needs 1.'),
    ],
)
def test_no_suggestion_where_it_would_not_help(x, m, sentence):
    assert str(error_of(energy, x, m, 1.0)).endswith(f"\n\n{sentence}")


def test_too_few_axes_of_int_ranks_in_a_tree_args_and_kwargs():
    @auto_vmap({"a": 2, "b": (1, None)}, xs=1, named=2)
    def kernel(tree, *xs, **named):
        never()

    text = """
an argument has fewer axes than its rank

tree['a'] has 1 axis, but its rank 2 needs 2; did you mean tree['a'][None]?
xs[1] has 0 axes, but its rank 1 needs 1.
named['k'] has 0 axes, but its rank 2 needs 2.
"""
    tree = {"a": ones(3), "b": (ones(4, 3), ones(2))}
    check(kernel, RankError, text, tree, ones(3), ones(), k=ones())


def test_too_few_axes_of_annotated_fields():
    @auto_vmap
    def kernel(body: Body, *poses: Pose):
        never()

    text = """
an argument has fewer axes than its rank

body.pose.rotation has 1 axis, but its rank "3 3" needs 2.
poses[0].translation has 0 axes, but its rank "3" needs 1.
"""
    body = Body(Pose(ones(3), ones(4, 3)), ones())
    check(kernel, RankError, text, body, Pose(ones(4, 3, 3), ones()))


# Core dimensions.


def test_core_dimensions_that_disagree():
    text = """
the core dimensions disagree

Dimension n is 5 (x) and 6 (m).
A dimension declared as 3 is 2 (x).
"""
    check(energy, CoreDimensionError, text, ones(4, 5, 2), ones(6), ones(4))


def test_core_dimensions_in_a_tree_args_and_kwargs():
    @auto_vmap({"a": "n", "b": "n+1"}, xs="n", named="n=4")
    def kernel(tree, *xs, **named):
        never()

    text = """
the core dimensions disagree

Dimension n is 3 (tree['a']) and 5 (xs[0]).
A dimension declared as n+1 = 4 is 3 (tree['b']).
A dimension declared as n=4 is 2 (named['k']).
"""
    check(kernel, CoreDimensionError, text, {"a": ones(3), "b": ones(7, 3)}, ones(5), k=ones(2))


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


# Batch axes.


def test_batch_axes_that_do_not_broadcast():
    text = """
the batch axes do not broadcast together

Batch axis -1 is 4 (x) and 6 (m).
"""
    check(energy, BatchShapeError, text, ones(4, 5, 3), ones(6, 5), ones(7, 1))


def test_two_batches_that_may_be_meant_for_every_pair():
    sentences = (
        "Batch axis -1 is 4 (x) and 6 (m).\nTo combine every x with every m, pass x[:, None]."
    )
    assert str(error_of(energy, ones(4, 5, 3), ones(6, 5), 1.0)).endswith(f"\n\n{sentences}")
    assert energy.plan(ones(4, 5, 3)[:, None], ones(6, 5), 1.0).batch_shape == (4, 6)


def test_batch_axes_in_a_tree_args_and_kwargs():
    @auto_vmap
    def kernel(body: Body, *xs: Float[Array, "3"], **named: Float[Array, ""]):
        never()

    text = """
the batch axes do not broadcast together

Batch axis -2 is 2 (body.pose.rotation) and 3 (xs[0]).
Batch axis -1 is 4 (body.pose.rotation), 5 (body.mass) and 6 (named['k']).
"""
    body = Body(Pose(ones(2, 4, 3, 3), ones(3)), ones(5))
    check(kernel, BatchShapeError, text, body, ones(3, 1, 3), k=ones(6))


def test_length_zero_does_not_broadcast_with_two():
    error = error_of(energy, ones(0, 5, 3), ones(2, 5), 1.0)
    assert type(error) is BatchShapeError
    assert "Batch axis -1 is 0 (x) and 2 (m).\n" in str(error)


# Several kinds at once.


def test_all_clashes_at_once():
    @auto_vmap("n 3", "n", "", 2)
    def kernel(x, m, g, i):
        never()

    text = """
an argument has fewer axes than its rank, the core dimensions disagree and the batch axes do not broadcast together

    argument  shape      rank   batch axes
  > x         (4, 5, 2)  "n 3"  (4,)
  > m         (6,)       "n"    ()
  > g         (3,)       ""     (3,)
  > i         ()         2      too few axes

i has 0 axes, but its rank 2 needs 2.
Dimension n is 5 (x) and 6 (m).
A dimension declared as 3 is 2 (x).
Batch axis -1 is 4 (x) and 3 (g).
"""  # noqa: E501
    check(kernel, RankError, text, ones(4, 5, 2), ones(6), ones(3), 1.0)


# Very many leaves.


@auto_vmap(xs=1)
def many(*xs):
    never()


def test_of_forty_leaves_some_rows_of_each_side_are_shown():
    text = """
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
"""
    check(many, BatchShapeError, text, *[ones(5, 3)] * 30, ones(4, 3), *[ones(3)] * 9)


def test_of_forty_leaves_with_too_few_axes_some_are_named():
    text = """
an argument has fewer axes than its rank

    argument  shape  rank  batch axes
    xs[0]     (3,)   1     ()
  > xs[1]     ()     1     too few axes
  > xs[2]     ()     1     too few axes
  > xs[3]     ()     1     too few axes
  > xs[4]     ()     1     too few axes
    ... 34 more that clash
  > xs[39]    ()     1     too few axes

xs[1] has 0 axes, but its rank 1 needs 1.
xs[2] has 0 axes, but its rank 1 needs 1.
xs[3] has 0 axes, but its rank 1 needs 1.
xs[4] has 0 axes, but its rank 1 needs 1.
And 35 leaves more with too few axes.
"""
    check(many, RankError, text, ones(3), *[ones()] * 39)


def test_sixteen_rows_are_shown_whole():
    text = str(error_of(many, *[ones(5, 3)] * 15, ones(4, 3)))
    assert "more" in text.splitlines()[-1]  # the sentence names some
    assert sum(line.startswith("  > xs[") for line in text.splitlines()) == 16


# Structure.


def misfit(kernel, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared by the test
        kernel(*args, **kwargs)
    assert "in_axes" not in str(caught.value)
    return text_of(caught.value, kernel)


def test_structures_that_do_not_fit_the_ranks():
    @auto_vmap({"a": 1, "b": 0}, xs=(0, 1), named=[1])
    def kernel(tree=None, *xs, **named):
        never()

    assert misfit(kernel, {"a": 1.0}) == (
        "the rank of tree has an entry for tree['b'], which is absent"
    )
    assert misfit(kernel, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0}) == (
        "the rank of tree has no entry for tree['c'] and tree['d'] (None would leave it as it is)"
    )
    assert misfit(kernel, (1.0, 2.0)) == (
        "the rank of tree is a dict of 2 entries, but tree is tuple"
    )
    assert misfit(kernel, None, (1.0,)) == (
        "the rank of xs[0] has an entry for xs[0][1], which is absent"
    )
    assert misfit(kernel, None, k=ones(3)) == (
        "the rank of named['k'] is a list of 1 entry, but named['k'] is an array of shape (3,)"
    )


def test_a_value_that_is_not_of_the_annotated_class():
    @auto_vmap
    def kernel(body: Body):
        never()

    assert misfit(kernel, ones(3)) == "body is annotated as Body, but it is an array of shape (3,)"
    assert misfit(kernel, Body((ones(3, 3), ones(3)), 1.0)) == (
        "body.pose is annotated as Pose, but it is tuple"
    )


def test_what_is_no_array_is_named():
    @auto_vmap({"a": 0}, xs=1)
    def kernel(tree, *xs):
        never()

    message = (
        "kernel(): tree['a'] has a rank, so it must be an array or a number, but it is str "
        "('text'); a parameter that takes other objects has rank None"
    )
    with pytest.raises(TypeError) as caught:
        kernel({"a": "text"})
    assert str(caught.value) == message


def test_arguments_that_do_not_bind_name_the_kernel():
    with pytest.raises(TypeError) as caught:
        energy(ones(1, 3), ones(1))
    assert str(caught.value) == "energy() missing a required argument: 'g'"


@pytest.mark.parametrize(
    "options", [{"jit": True}, {"chunk_size": 2}, {"chunk_size": 2, "jit": True}]
)
def test_errors_are_the_same_whatever_the_options(options):
    def energy(x, m, g):
        never()

    args = (ones(4, 5, 2), ones(6), ones(3))
    texts = set()
    for kernel in (auto_vmap("n 3", "n", "")(energy), auto_vmap("n 3", "n", "", **options)(energy)):
        with pytest.raises(CoreDimensionError) as caught:
            kernel(*args)
        texts.add(text_of(caught.value, kernel))
    assert len(texts) == 1


def test_a_name_that_users_can_import():
    for error in (RankError, BatchShapeError, CoreDimensionError):
        assert error.__module__ == "rankax"
        assert issubclass(error, ValueError)


@pytest.mark.parametrize("options", [{}, {"jit": True}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("annotation", [PRNGKeyArray, Key[Array, ""], PRNGKeyArray | None], ids=str)
def test_a_raw_key_is_refused_where_a_typed_one_is_annotated(annotation, options):
    @auto_vmap(**options)
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
    want = jax.vmap(lambda key: jax.random.normal(key))(keys)
    assert_same(draw(jax.random.wrap_key_data(jax.random.key_data(keys)), scale), want)
    assert_same(draw(jax.random.wrap_key_data(raw), 1.0), jax.random.normal(raw))
    assert draw.plan(jax.eval_shape(lambda: keys), 1.0).batch_shape == (3,)


def test_a_number_that_may_be_a_vector():
    kernel = auto_vmap(s=0, v=0, m=2)(lambda s, v, m: never(s, v, m))
    table = """
the batch axes do not broadcast together

Batch axis -2 is 5 (v) and 4 (m).
"""
    hint = "If one item of v is a vector, its rank is 1, not 0."
    v, m = jnp.ones((5, 3)), jnp.ones((4, 1, 3, 3))
    check(kernel, BatchShapeError, table + hint, 2.0, v, m)
    assert str(error_of(kernel, 2.0, v[0], m[:, 0])).endswith(hint)
    assert hint not in str(error_of(kernel, 2.0, v[:, 0], m[:, 0]))
