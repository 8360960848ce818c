# SPDX-License-Identifier: MIT
"""``ranks=``: ranks by parameter name, also of parameters that share theirs with an option."""

import pickle
import re
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, PRNGKeyArray

from helpers import assert_same
from rankax import SplitKey, auto_vmap

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


def test_the_decorator_form_pickles_and_keeps_its_signature():
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


def test_items_of_args_and_kwargs():
    def total(*args, **kwargs):
        return sum(map(jnp.sum, args)) + jnp.sum(kwargs["bucket"]) + jnp.sum(kwargs["chunksize"])

    mapped = auto_vmap(ranks={"args": 1, "kwargs": 0, "chunksize": 1}, chunk_size=3)(total)
    got = mapped(x, bucket=bucket, chunksize=x)
    assert_same(got, jax.vmap(lambda x, b: total(x, bucket=b, chunksize=x))(x, bucket))


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
            "ranks={'x': 1} is the option of auto_vmap, but the kernel has a parameter 'ranks' too",
        ),
    ],
)
def test_mistakes(decorate, message):
    with pytest.raises((TypeError, ValueError), match=f"^auto_vmap.*: {re.escape(message)}"):
        decorate()


def test_options_that_parameters_are_named_like():
    def both(x, devices=0, jit=0):
        return x

    message = (
        "auto_vmap(both): devices=0 is the option of auto_vmap, but the kernel has a parameter"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        auto_vmap(x=1, devices=0, jit=1)(both)
    with pytest.raises(TypeError, match="got 'no'"):
        auto_vmap(ranks={"chunk_size": 0}, chunk_size="no")(lambda chunk_size: chunk_size)
