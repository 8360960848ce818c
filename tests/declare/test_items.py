# SPDX-License-Identifier: MIT
"""Ranks of single items of ``*args`` and ``**kwargs``."""

import pickle
import re
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from helpers import assert_same
from rankax import auto_vmap


def apply(variables, *args, factor=1.0, **kwargs):
    total = sum(jnp.sum(arg) for arg in args) + sum(jnp.sum(arg) for arg in kwargs.values())
    return jnp.sum(variables) * total * factor


def ranks(kernel, *args, **kwargs) -> dict[str, int]:
    return {leaf.path: leaf.rank for leaf in kernel.plan(*args, **kwargs).leaves}


cube = jnp.ones((2, 2, 2))


@pytest.mark.parametrize("options", [{}, {"jit": True}, {"chunk_size": 2}], ids=str)
def test_several_ranks_on_args_hold_one_by_one(options):
    weights, x, y, whole = jnp.ones(7), jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0), jnp.ones(9)
    got = auto_vmap(None, 1, 0, **options)(apply)(weights, x, y, whole, other=whole)
    want = jax.vmap(lambda a, b: apply(weights, a, b, whole, other=whole))(x, y)
    assert_same(got, want)


@pytest.mark.parametrize("options", [{}, {"jit": True}, {"chunk_size": 2}], ids=str)
def test_a_rank_by_name_holds_for_that_item_of_kwargs(options):
    weights, x, y, whole = jnp.ones(7), jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0), jnp.ones(9)
    got = auto_vmap(None, x=1, y=0, **options)(apply)(weights, whole, y=y, x=x, other=whole)
    want = jax.vmap(lambda a, b: apply(weights, whole, y=b, x=a, other=whole))(x, y)
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

    def kernel(x, **settings: Unpack[Settings]):
        return x

    assert ranks(auto_vmap(a=0)(kernel), 1.0, a=cube, b=cube) == {"settings['a']": 0}


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


def test_a_kernel_with_ranks_of_items_can_be_pickled():
    copy = pickle.loads(pickle.dumps(pickled))
    assert ranks(copy, 1.0, cube, cube) == {"args[0]": 1, "args[1]": 0}


pickled = auto_vmap(None, 1, 0)(apply)
pickled.__qualname__ = "pickled"


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (
            lambda: auto_vmap(0, 1, 2)(lambda x, **kwargs: x),
            "too many ranks; 3 ranks for 1 positional parameter (x)",
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
def test_ranks_that_belong_to_no_item(decorate, message):
    with pytest.raises(TypeError, match=f"^{re.escape(f'auto_vmap(<lambda>): {message}')}"):
        decorate()
