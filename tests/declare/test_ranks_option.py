# SPDX-License-Identifier: MIT
"""Ranks by name: ``ranks=``, and those of single items of ``*args`` and ``**kwargs``."""

import pickle
import re
from typing import Annotated, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, PRNGKeyArray

from helpers import assert_same, refusal
from rankax import SplitKey, auto_vmap
from rankax._options import NAMES, Options

x, bucket = (jnp.asarray(x) for x in (np.arange(12.0).reshape(4, 3), np.arange(4.0)))


def kernel(x, bucket, *, where=1.0):
    return jnp.sum(x) * bucket + where


want = jax.vmap(kernel)(x, bucket)


@pytest.mark.parametrize(
    "declared",
    [
        {"ranks": {"x": 1, "bucket": 0, "where": 0}},
        {"ranks": {"bucket": 0, "where": 0}, "x": 1, "jit": True},
        {"ranks": {"x": "n", "bucket": "", "where": 0}, "chunk_size": 3},
    ],
    ids=str,
)
def test_parameters_may_have_the_names_of_options(declared):
    mapped = auto_vmap(**declared)(kernel)
    assert_same(mapped(x, bucket), want)
    each = mapped(x, bucket, where=jnp.arange(2.0).reshape(2, 1))
    assert_same(each, jnp.stack([want - 1, want]))


def test_an_option_and_a_parameter_of_one_name_differ():
    named = auto_vmap(1, ranks={"ranks": 0})(lambda x, ranks: x * ranks)
    assert_same(named(x, bucket), x * bucket[:, None])
    mapped = auto_vmap(1, ranks={"bucket": 0}, jit=True, bucket=(6,))(kernel)
    assert_same(mapped(x, bucket), want)
    assert mapped.plan(x, bucket).batch_shape == (6,)


def test_annotations_of_the_decorator_form_pickle():
    copy = pickle.loads(pickle.dumps(scaled))
    assert_same(copy(x, bucket), x * bucket[:, None])
    assert scaled.signature == "(x_0),()->(3)"
    assert scaled.with_options(chunk_size=2).plan(x, bucket).in_flight == 2


@auto_vmap(ranks={"x": 1, "devices": 0}, chunk_size=3)
def scaled(x, devices) -> Float[Array, "3"]:
    return x * devices


def test_trees_keys_and_none():
    def noisy(jit, key, where):
        return jit["a"] + jnp.sum(jit["b"]) + jax.random.normal(key) * len(where)

    tree = {"a": bucket, "b": x}
    ranks = {"jit": {"a": 0, "b": 1}, "key": SplitKey, "where": None}
    key = jax.random.key(0)
    got = auto_vmap(ranks=ranks, chunk_size=3)(noisy)(tree, key, "abc")
    keys = jax.random.split(key, 4)
    assert_same(got, jax.vmap(lambda tree, key: noisy(tree, key, "abc"))(tree, keys))


def test_a_rank_overrides_the_annotation():
    def annotated(bucket: Float[Array, "n"], key: Annotated[PRNGKeyArray, SplitKey]):
        return bucket

    mapped = auto_vmap(ranks={"bucket": 0})(annotated)
    assert_same(mapped(bucket, jax.random.key(0)), bucket)


# Items of ``*args`` and ``**kwargs``.


def apply(variables, *args, factor=1.0, **kwargs):
    total = sum(jnp.sum(arg) for arg in args) + sum(jnp.sum(arg) for arg in kwargs.values())
    return jnp.sum(variables) * total * factor


def ranks(kernel, *args, **kwargs) -> dict[str, int]:
    return {leaf.path: leaf.rank for leaf in kernel.plan(*args, **kwargs).leaves}


cube = jnp.ones((2, 2, 2))


@pytest.mark.parametrize("options", [{}, {"jit": True}, {"chunk_size": 2}], ids=str)
def test_ranks_hold_for_single_items_of_args_and_kwargs(options):
    x, y, whole = jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0), jnp.ones(9)
    got = auto_vmap(None, 1, 0, z=0, **options)(apply)(whole, x, y, whole, z=y, other=whole)
    want = jax.vmap(lambda a, b: apply(whole, a, b, whole, z=b, other=whole))(x, y)
    assert_same(got, want)


def test_one_rank_on_args_still_holds_for_each():
    assert ranks(auto_vmap(None, 1)(apply), cube, cube, cube) == {"args[0]": 1, "args[1]": 1}


def test_items_may_be_fewer_or_more_than_ranks():
    kernel = auto_vmap(0, 2, None, 1, factor=0, a=1)(apply)
    assert ranks(kernel, cube) == {"variables": 0, "factor": 0}
    assert ranks(kernel, 1.0, cube, cube) == {"variables": 0, "args[0]": 2, "factor": 0}
    plan = kernel.plan(1.0, cube, cube, cube, cube, b=cube)
    assert [leaf.path for leaf in plan.leaves] == ["variables", "args[0]", "args[2]", "factor"]
    assert [path for path, _ in plan.untouched] == ["args[1]", "args[3]", "kwargs['b']"]


def test_a_rank_on_kwargs_holds_for_items_without_their_own():
    kernel = auto_vmap(kwargs=2, a=1, b=None)(apply)
    assert ranks(kernel, 1.0, a=cube, b=cube, c=cube) == {"kwargs['a']": 1, "kwargs['c']": 2}
    # One with nearly the name of an option.
    kernel = auto_vmap(ranks={"args": 1, "chunksize": 2})(apply)
    assert ranks(kernel, 1.0, cube, chunksize=cube) == {"args[0]": 1, "kwargs['chunksize']": 2}


def test_items_without_a_rank_have_that_of_the_annotation():
    def kernel(*xs: Float[Array, "n"], **named: Float[Array, "n n"]):
        return 0

    mapped = auto_vmap(0, 2, a=1)(kernel)
    expected = {"xs[0]": 0, "xs[1]": 2, "xs[2]": 1, "named['a']": 1, "named['b']": 2}
    assert ranks(mapped, cube, cube, cube, a=cube, b=cube) == expected


def test_items_override_an_unpacked_annotation_as_a_whole():
    class Settings(TypedDict, total=False):
        a: Float[Array, "n"]
        b: Float[Array, "n"]

    def kernel(x: Float[Array, ""], **settings: Unpack[Settings]):
        return x

    assert ranks(auto_vmap(kernel), 1.0, b=cube) == {"x": 0, "settings['b']": 1}
    assert ranks(auto_vmap(a=0, x=None)(kernel), 1.0, a=cube, b=cube) == {"settings['a']": 0}


def test_items_take_trees_and_dimension_strings():
    kernel = auto_vmap(None, {"k": 1}, "n", m="n+1")(apply)
    assert ranks(kernel, 1.0, {"k": cube}, jnp.ones(3), m=jnp.ones((2, 4))) == {
        "args[0]['k']": 1,
        "args[1]": 1,
        "kwargs['m']": 1,
    }
    message = "auto_vmap(apply): args: the dimension 'k+1' could never be checked: "
    with pytest.raises(ValueError, match=re.escape(message)):
        auto_vmap(None, "n", "k+1")(apply)


def test_a_gufunc_signature_may_have_more_inputs_than_parameters():
    kernel = auto_vmap("(k),(n),()->()")(apply)
    assert ranks(kernel, cube, cube, cube, cube) == {"variables": 1, "args[0]": 1, "args[1]": 0}


# Mistakes.

TWICE = "has two ranks, 0 by {} and 1 in ranks"


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: auto_vmap(0, ranks={"x": 1})(kernel), "parameter 'x' " + TWICE.format("position")),
        (lambda: auto_vmap(x=0, ranks={"x": 1})(kernel), "parameter 'x' " + TWICE.format("name")),
        (
            lambda: auto_vmap("(n),()->()", ranks={"where": 0})(kernel),
            "a gufunc signature declares every rank; drop the named ones",
        ),
        (
            lambda: auto_vmap(ranks={"chunk_size": 1})(kernel),
            "the kernel has no parameter 'chunk_size'; did you mean the option 'chunk_size'?",
        ),
        (
            lambda: auto_vmap(rank={"x": 1})(kernel),
            "the kernel has no parameter 'rank'; did you mean the option 'ranks'?",
        ),
        (
            lambda: auto_vmap(ranks={0: 1})(kernel),
            "ranks must map names of parameters to ranks, as in ranks={'x': 0}, got dict {0: 1}",
        ),
        (
            lambda: auto_vmap(ranks={"x": 1})(lambda ranks, x: x),
            "ranks={'x': 1} are ranks by name, but the kernel has a parameter 'ranks' too; give it",
        ),
        (
            lambda: auto_vmap(0, 1, 2)(lambda x, **kwargs: x),
            "too many ranks; 3 ranks for 1 positional parameter (x)",
        ),
        (
            lambda: auto_vmap(0, chunksize=3)(lambda x, **kwargs: x),
            "'chunksize' would be the rank of an item of **kwargs; did you mean the option",
        ),
        (
            lambda: auto_vmap(0, y=1)(lambda x, *args: x),
            "the kernel has no parameter 'y'; it has x, args",
        ),
        (
            lambda: auto_vmap(0, 1, 2, args=3)(lambda x, *args: x),
            "parameter 'args' has two ranks, (1, 2) by position and 3 by name",
        ),
        (
            lambda: auto_vmap("(),(),()->()")(lambda x, y: x),
            "'(),(),()->()' has 3 inputs, which does not fit the parameters (x, y)",
        ),
    ],
)
def test_mistakes(decorate, message):
    with pytest.raises((TypeError, ValueError), match=f"^auto_vmap.*: {re.escape(message)}"):
        decorate()


def test_options_that_parameters_are_named_like():
    def both(x, devices=0, jit=0):
        return x * devices

    assert_same(auto_vmap(1, 0, None, chunk_size=2)(both)(x, bucket, "any"), x * bucket[:, None])

    by_name = auto_vmap(x=1, devices=0, jit=None)(both)
    assert_same(by_name(x, bucket, "any"), x * bucket[:, None])
    assert by_name.with_options(chunk_size=2).plan(x, bucket, "any").in_flight == 2
    message = (
        "auto_vmap(both): jit: a rank is an int >= 0, None, a dimension string, SplitKey, or a "
        "tree of those; as an option, pass it to with_options; got True"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        auto_vmap(x=1, jit=True)(both)
    with pytest.raises(TypeError, match="got 'no'"):
        auto_vmap(ranks={"chunk_size": 0}, chunk_size="no")(lambda chunk_size: chunk_size)


def wrapped(*args, **kwargs):
    return sum(jnp.sum(arg) for arg in (*args, *kwargs.values()))


MISSED = {
    "by position": ((cube,), {}, "args[0] (2, 2, 2)"),
    "beside another rank": ((cube,), {"y": cube}, "args[0] (2, 2, 2)"),
    "by another name": ((), {"z": cube}, "kwargs['z'] (2, 2, 2)"),
}


@pytest.mark.parametrize(("args", "kwargs", "came"), MISSED.values(), ids=MISSED)
def test_a_rank_by_name_that_meets_no_argument(args, kwargs, came):
    kernel = auto_vmap(x=1, y=2)(wrapped)
    absent = "x" if "y" in kwargs else "x and y"
    assert refusal(TypeError, kernel, *args, **kwargs) == (
        f"wrapped(): the rank of {absent} meets no argument of that name; the call passes {came}, "
        f"without a rank. Pass {absent} by name, or give ranks as the call passes arguments"
    )


def test_a_rank_by_name_may_be_left_out():
    kernel = auto_vmap(x=1, y=2)(wrapped)
    assert_same(kernel(x=cube), jnp.sum(cube, -1))
    assert_same(kernel(3.0, x=cube), jnp.sum(cube, -1) + 3)
    assert_same(kernel(1.0), jnp.asarray(1.0))


def kernel_of(name, value):
    """Return a function with a parameter of this name, of rank ``value``."""
    scope = {}
    exec(f"def named(x, {name}):\n    return x * {name}", scope)
    return scope["named"], {name: value}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, ""])
def test_a_parameter_wins_over_an_option(name, value):
    fun, rank = kernel_of(name, value)
    by_name = auto_vmap(x=1, **rank)(fun)
    assert_same(by_name(x, bucket), x * bucket[:, None])
    assert by_name.spec.explicit == {}
    assert_same(auto_vmap(ranks={"x": 1, **rank})(fun)(x, bucket), x * bucket[:, None])
    chunked = by_name.with_options(chunk_size=2)
    assert_same(chunked(x, **{name: bucket}), x * bucket[:, None])
    # With a rank from elsewhere, the keyword is the option.
    given = {"chunk_size": 2} if name != "chunk_size" else {}
    default = {name: getattr(Options(), name)} | given
    elsewhere = auto_vmap(1, 0, **default)(fun)
    assert_same(elsewhere(x, bucket), x * bucket[:, None])
    assert elsewhere.spec.explicit.keys() == default.keys()


def test_a_parameter_wins_over_an_option_also_if_it_is_annotated():
    def annotated(x: Float[Array, "3"], reduce: Float[Array, "3"]):
        return x * reduce

    outer = auto_vmap(reduce=0)(annotated)
    assert outer(x[0], bucket).shape == (4, 3)
    assert outer.with_options(reduce="sum")(x[0], bucket).shape == (3,)
