# SPDX-License-Identifier: MIT
"""``kernel.check`` of ragged items: with their own rows, and filled up in other ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compilations, refusal
from rankax import Mask, Ragged, SplitKey, auto_vmap

X = Ragged(np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32), [6, 0, 6, 1])


def test_what_agrees():
    kernel = auto_vmap(x="n 3", s=0, key=SplitKey, mask=Mask("n"))(
        lambda x, s, key, mask: jnp.sum(x.sum(-1), where=mask) * s + jax.random.normal(key)
    )
    grid = jnp.arange(8.0).reshape(2, 4)
    report = kernel.check(X, grid, jax.random.key(0), items=3, gradient=True)
    paths = [path for path, *_ in report.differences]
    assert paths == ["output", "gradient of x", "gradient of s"]
    assert report.padding == ()
    rows = auto_vmap("(n,3)->(n)", chunk_size=2)(lambda x: jnp.sin(x).sum(-1))
    assert rows.check(X, items=3, gradient=True).padding == ()


@pytest.mark.slow
def test_one_program_for_each_length():
    """An operation outside of a program is one more to compile: there were 111, and then 15."""
    kernel = auto_vmap(x="n 13", mask=Mask("n"))(
        lambda x, mask: jnp.sum(jnp.cos(x).sum(-1), where=mask)
    )
    lengths = [6, 2, 6, 2, 4, 4, 6]
    x = Ragged(np.random.default_rng(0).normal(size=(30, 13)).astype(np.float32), lengths)
    _, first = compilations(lambda: kernel.check(x, gradient=True))
    _, again = compilations(lambda: kernel.check(x, gradient=True))
    assert first < 40
    # Of three lengths, the item with its gradient, and its value; the value of items that are
    # filled up; and the random sum of the call, and its derivative.
    assert again == 3 + 3 + 1 + 3


@pytest.mark.slow
def test_rows_of_a_narrow_float():
    kernel = auto_vmap(x="n 3", mask=Mask("n"))(lambda x, mask: jnp.sum(x.sum(-1), where=mask))
    x = Ragged(X.values.astype(np.float16), X.lengths)
    assert kernel.check(x, gradient=True).padding == ()


def test_padding_that_leaks():
    kernel = auto_vmap(x="n 3", y="n", mask=Mask("n"))(
        lambda x, y, mask: x.sum() + jnp.sum(y, where=mask)
    )
    y = Ragged(np.ones(13, np.float32), X.lengths)
    leak = "the items depend on the rows that fill x up"
    error = refusal(ValueError, lambda: kernel.check(X, y, items=3))
    assert error.startswith("<lambda>.check: ")
    assert leak in error
    assert "fill y up" not in error
    # Of these no item needs padding in this call.
    kernel, x = auto_vmap(x="n 3")(lambda x: x.sum()), Ragged(X.values[:4], [2, 2])
    assert refusal(ValueError, lambda: kernel.check(x, items=2)) == (
        "<lambda>.check: the items differ if they are filled up with copies of their last rows; "
        f"{leak}; leave these rows out, by a parameter of rank Mask"
    )
    # Copies change no maximum.
    report = auto_vmap(x="n 3")(lambda x: x.max()).check(X, items=3)
    assert report.padding == (leak,)
    assert f"  {leak}" in str(report)


# Items that are not finite.

V = np.arange(12, dtype=np.float32) + 1
V[[3, 7]] = 0, np.inf
LENGTHS = [3, 0, 3, 3, 3]  # rows 3 and 7 are of the items 2 and 3


def test_values_that_are_not_finite():
    kernel = auto_vmap(x="n", s=0, mask=Mask("n"), chunk_size=2)(
        lambda x, s, mask: jnp.sum(jnp.where(mask, jnp.log(x), 0)) * s
    )
    found = kernel.nonfinite(Ragged(V, LENGTHS), np.ones((2, 5), np.float32), most=3)
    assert (found.count, found.batch_shape) == (4, (2, 5))
    assert found.indices.tolist() == [[0, 2], [0, 3], [1, 2]]
    assert found.arguments[0]["x"].tolist() == [0, 5, 6]
    assert str(found).splitlines()[1] == "  [0, 2]: x = [0, 5, 6], s = 1"


@pytest.mark.slow
def test_gradients_that_are_not_finite():
    kernel = auto_vmap(x="n", mask=Mask("n"), jit=True, reduce="sum")(
        lambda x, mask: jnp.sum(jnp.sqrt(jnp.minimum(x, 9)), where=mask)
    )
    found = kernel.nonfinite(Ragged(V, LENGTHS), gradient=True)
    # To item 1, which has no rows, nothing flows back.
    assert (found.what, found.indices.tolist()) == ("gradient", [[2]])
    gradient = jax.grad(lambda x: kernel(Ragged(x, LENGTHS)).sum())(V)
    assert np.flatnonzero(~np.isfinite(gradient)).tolist() == [3]


def test_rows_that_fill_an_item_up_do_not_count():
    rows = auto_vmap("(n)->(n)", mask=Mask("n"))(lambda x, mask: jnp.where(mask, x, jnp.nan))
    assert rows.nonfinite(Ragged(V, LENGTHS)).indices.tolist() == [[3]]
    assert rows.nonfinite(Ragged(V[:0], [])).count == 0
    of_many = auto_vmap(x="n", s=0)(lambda x, s: x[0] / s)
    found = of_many.nonfinite(Ragged(V[:3], [3]), np.float32([1, 0, 2]))
    assert found.indices.tolist() == [[1]]
