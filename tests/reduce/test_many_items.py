# SPDX-License-Identifier: MIT
"""More items than 32 bits can number: counted otherwise, or refused in words. Only shapes."""

import jax
import jax.numpy as jnp
import pytest

from helpers import enable_x64, refusal
from rankax import auto_vmap, chunked_vmap
from rankax.reductions import Best, BottomK, Moments, TopK

PAIRS = jax.ShapeDtypeStruct((50_000, 1), jnp.float32), jax.ShapeDtypeStruct((50_000,), jnp.float32)
LONG = jax.ShapeDtypeStruct((2**31 + 1000,), jnp.int8)
SETTING = 'call jax.config.update("jax_enable_x64", True) first'


def distance(x, y):
    return jnp.abs(x - y)


def with_mask(x, y):
    return {"value": distance(x, y), "ok": x > 0}


def double(x):
    return x.astype(jnp.float32) * 2


def refused(fun, *args):
    return refusal(ValueError, jax.eval_shape, fun, *args).partition("\n")[0]


def dtypes(fun, *args):
    return [str(out.dtype) for out in jax.tree.leaves(jax.eval_shape(fun, *args))]


@pytest.mark.parametrize(
    ("reduce", "chunk_size"), [("argmin", None), (BottomK(2), None), (Best("value"), 1000)], ids=str
)
def test_indices_need_64_bits(reduce, chunk_size):
    kernel = with_mask if isinstance(reduce, Best) else distance
    mapped = auto_vmap(0, 0, reduce=reduce, chunk_size=chunk_size)(kernel)
    name = reduce if isinstance(reduce, str) else reduce.name
    line = kernel.__code__.co_firstlineno
    message = (
        f"{kernel.__name__}() at {__file__}:{line}: it cannot be reduced by {name}: the indices of "
        f"2500000000 items need 64 bits; {SETTING}, or reduce one axis at a time"
    )
    assert refused(mapped, *PAIRS) == message
    assert refusal(ValueError, mapped.plan, *PAIRS).startswith(message)


@pytest.mark.parametrize("reduce", ["argmin", TopK(2)], ids=str)
def test_indices_of_64_bits(reduce):
    with enable_x64():
        found = dtypes(auto_vmap(0, 0, reduce=reduce, chunk_size=1000)(distance), *PAIRS)
    assert found[-1] == "int64"


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_derivative_that_needs_an_index_is_refused(reduce):
    mapped = auto_vmap(0, 0, reduce=reduce, chunk_size=1000)(distance)
    assert dtypes(mapped, *PAIRS) == ["float32"]
    message = (
        f"{reduce} cannot be differentiated: the indices of 2500000000 items need 64 bits; "
        f"{SETTING}, or reduce one axis at a time"
    )
    assert refused(jax.grad(mapped), *PAIRS) == message


@pytest.mark.parametrize("chunk_size", [None, 1000])
@pytest.mark.parametrize("where", [None, "ok"])
def test_counts_that_do_not_fit_are_floats(where, chunk_size):
    reduce = {"value": Moments(), "ok": "mean"}
    mapped = auto_vmap(0, 0, reduce=reduce, where=where, chunk_size=chunk_size)(with_mask)
    assert dtypes(mapped, *PAIRS) == ["float32"] * 4

    def loss(x, y):
        out = mapped(x, y)["value"]
        return out.mean + out.variance

    if where is None:
        assert dtypes(jax.grad(loss), *PAIRS) == ["float32"]
        return
    message = (  # it begins with an item that counts
        "a reduction with where or bucket has no derivative: the indices of 2500000000 "
        f"items need 64 bits; {SETTING}, or reduce one axis at a time"
    )
    assert refused(jax.grad(loss), *PAIRS) == message


@pytest.mark.parametrize("reduce", [None, "sum"])
def test_a_long_axis_in_chunks_is_refused(reduce):
    mapped = auto_vmap(0, reduce=reduce, chunk_size=7)(double)
    line = double.__code__.co_firstlineno
    message = (
        f"double() at {__file__}:{line}: a loop over an axis of 2147484648 items counts them in 64 "
        f"bits; {SETTING}"
    )
    assert refused(mapped, LONG) == message


def test_a_long_axis_with_64_bits():
    with enable_x64():
        assert jax.eval_shape(chunked_vmap(double, 7), LONG).shape == LONG.shape
        assert dtypes(auto_vmap(0, reduce="mean", chunk_size=7)(double), LONG) == ["float32"]


def test_a_long_axis_in_chunks_that_begin_below_the_limit():
    assert jax.eval_shape(chunked_vmap(jnp.negative, 2**20), LONG).shape == LONG.shape
