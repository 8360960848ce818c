# SPDX-License-Identifier: MIT
"""Sums of many items, and the cotangents of what they share, are as accurate as `jax.numpy.sum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import REMAT3, assert_same, equations, temporary_bytes, weekly
from rankax import auto_vmap, chunked_reduce, sliced_scan
from rankax.reductions import Gram, Moments

DRAW = np.random.default_rng(4)
MANY = 200_001
TENTH = float(np.float32(0.1))
ULP = float(np.finfo(np.float32).eps)
CHUNKS = [1, 2, 64, 1000, None]

VALUES = {
    "equal": np.full(MANY, 0.1, np.float32),  # every rounding errs to the same side
    "drawn": np.asarray(DRAW.uniform(size=MANY), np.float32),
    "of both signs": np.asarray(DRAW.normal(1, 2, size=MANY), np.float32),
}


def wide(values):
    return values.astype(np.float64)


def log_sum_exp(x):
    return np.log(np.exp(x).sum())


SUMS = {
    "sum": np.sum,
    "mean": np.mean,
    "logsumexp": log_sum_exp,
}


def error(found, right):
    """Return the largest relative error, in units in the last place."""
    return np.max(np.abs(np.asarray(found, np.float64) / right - 1)) / ULP


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_sums_do_not_drift(values, chunk_size):
    for name, right in SUMS.items():
        found = chunked_reduce(lambda x: x, name, chunk_size)(values)
        assert error(found, right(wide(values))) < 4, name


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_moments_and_outer_products_do_not_drift(chunk_size):
    pairs = np.asarray(DRAW.uniform(size=(MANY, 2)), np.float32)
    found = chunked_reduce(lambda x: x, Moments(), chunk_size)(pairs)
    assert found.count == MANY
    assert error(found.mean, wide(pairs).mean(0)) < 4
    assert error(found.variance, wide(pairs).var(0)) < 8
    if chunk_size is not None:  # all at once it is one product of matrices, as XLA adds it
        found = chunked_reduce(lambda x: x, Gram(), chunk_size)(pairs)
        assert error(found, wide(pairs).T @ wide(pairs)) < 4


@pytest.mark.parametrize("chunk_size", [1, 2, 50, None])
def test_rows_of_pairs_and_masks_do_not_drift(chunk_size):
    """Two reduced axes are two loops, one in the other."""
    a, b = VALUES["drawn"][:1003], VALUES["drawn"][-207:]
    kernel = auto_vmap(a=0, b=0, reduce="sum", chunk_size=chunk_size)(lambda a, b: a * b)
    assert error(kernel(a[:, None], b), wide(a).sum() * wide(b).sum()) < 4

    some = VALUES["drawn"][:50_000]
    masked = auto_vmap(x=0, reduce="mean", where="ok", chunk_size=chunk_size)
    found = masked(lambda x: {"value": x, "ok": x > 0.5})(some)
    assert error(found["value"], wide(some)[some > 0.5].mean()) < 4


@pytest.mark.parametrize("chunk_size", [1, 10, 1000, None])
@pytest.mark.parametrize("reduce", [None, "sum", "mean"])
def test_cotangents_of_what_items_share_do_not_drift(reduce, chunk_size):
    kernel = auto_vmap(w=0, x=0, reduce=reduce, chunk_size=chunk_size)(lambda w, x: w * x)
    size = MANY if reduce == "mean" else 1
    for values in (VALUES["equal"], VALUES["drawn"]):
        gradient = jax.grad(lambda w, values=values: kernel(w, values).sum())
        assert error(gradient(np.float32(1)), wide(values).sum() / size) < 8


@pytest.mark.parametrize("chunk_size", [1, 70, 210, None])
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_cotangents_of_long_arrays_do_not_drift(reduce, chunk_size):
    """Each step adds to all numbers of a constant, and computes little for each of them."""
    settings = {"reduce": reduce, "reduce_axis": reduce and -1, "chunk_size": chunk_size}
    kernel = auto_vmap(x=1, y=1, **settings)(lambda x, y: jnp.sum(x * y))
    for rows in (700, 2003):
        x, y = np.full((rows, 1, 3), 0.1, np.float32), np.ones((70, 3), np.float32)
        gradient = jax.jit(jax.grad(lambda y, x=x: jnp.sum(kernel(x, y))))(y)
        assert error(gradient, np.full((70, 3), rows * TENTH)) < 8


@pytest.mark.optimized
@pytest.mark.parametrize("reduce_axis", [None, -1])
def test_a_constant_without_a_derivative_is_not_stored(reduce_axis):
    distance = lambda x, y: jnp.sqrt(jnp.sum((x - y) ** 2) + 1)  # noqa: E731
    kernel = auto_vmap(x=1, y=1, reduce="sum", reduce_axis=reduce_axis)(distance)

    def loss(x, y):
        return jnp.sum(kernel(x[:, None], y) ** 2)

    for wanted in (0, 1):
        few, many = (
            temporary_bytes(jax.grad(loss, wanted), *2 * [jax.ShapeDtypeStruct((n, 3), "float32")])
            for n in (1000, 2000)
        )
        assert many < few + 1000 * 200


def test_nothing_is_added_to_numbers_that_no_item_looked_up():
    kernel = auto_vmap(table=1, i=0, chunk_size=2)(lambda table, i: table[i])
    gradient = jax.grad(lambda table: jnp.sum(kernel(table, jnp.arange(100))))
    assert "rankax_add" not in str(jax.make_jaxpr(gradient)(jnp.ones(1000)))
    assert_same(gradient(jnp.ones(1000)), jnp.repeat(jnp.array([1.0, 0.0]), jnp.array([100, 900])))


def test_nothing_is_added_to_columns_that_no_row_chose():
    """A step computes all pairs of some rows, and goes back to one column of each."""
    near = auto_vmap(x=1, y=1, reduce="min", reduce_axis=-1, chunk_size=4000)
    kernel = near(lambda x, y: jnp.sum((x - y) ** 2))
    x, y = (jnp.asarray(DRAW.normal(size=(n, 3)), jnp.float32) for n in (200, 1000))
    gradient = jax.grad(lambda y: jnp.sum(kernel(x[:, None], y)))
    assert "rankax_add" not in str(jax.make_jaxpr(gradient)(y))
    want = jax.grad(lambda y: jnp.sum(jnp.min(jnp.sum((x[:, None] - y[None]) ** 2, -1), -1)))(y)
    assert_same(gradient(y), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [21, 40, weekly(41), weekly(1003)])
def test_the_last_group_of_steps_may_be_shorter(count):
    x = jnp.asarray(DRAW.normal(size=(3, 2 * count)), jnp.float32)
    reduce = {"sum": "sum", "all": None, "best": "argmax", "moments": Moments()}

    def rows(x, chunk_size):
        kernel = auto_vmap(x=0, reduce=reduce, reduce_axis=-1, chunk_size=chunk_size)
        return kernel(lambda x: dict.fromkeys(reduce, jnp.sin(x)))(x)

    def loss(x, chunk_size):
        found = rows(x, chunk_size)
        return jnp.sum(found["sum"] ** 2) + jnp.sum(found["all"] * found["moments"].mean[:, None])

    for items in (x, x[:, 1:]):  # with the second, the last chunk overlaps
        right = rows(items, None)
        for found in (rows(items, 2), jax.jit(jax.vmap(lambda x: rows(x, 2)))(items)):
            assert_same(found, right, rtol=1e-4, atol=1e-5)
        derivatives = (jax.value_and_grad(loss)(items, chunk_size) for chunk_size in (2, None))
        assert_same(*derivatives, rtol=1e-4, atol=1e-4)


DERIVATIVES = {
    "gradient": jax.grad,
    "forward over reverse": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "jvp of gradient": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,)),
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](w),
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])),
    "jit of vmap of Hessian": lambda f: lambda w: jax.jit(jax.vmap(jax.hessian(f)))(w[None]),
}


@pytest.mark.parametrize("numbers", [2, 70])  # of more than 64, a few steps add plainly
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_go_through_what_a_loop_lends(derivative, checkpoint, numbers):
    x, w = jnp.linspace(0, 1, 100), jnp.linspace(0.3, 2, numbers) / numbers

    def loss(mapped):
        def item(w):
            return lambda x: jnp.sin(w @ x ** jnp.arange(1.0, 1 + numbers))

        return derivative(lambda w: jnp.sum(mapped(item(w))(x)))(w)

    for chunk_size in (3, 5):
        found = loss(auto_vmap(0, chunk_size=chunk_size, checkpoint=checkpoint))
        assert_same(found, loss(jax.vmap), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(REMAT3, reason="JAX does not transpose its next checkpoint")
@pytest.mark.parametrize("chunk_size", [1, 7, None])
def test_a_sum_is_linear(chunk_size):
    kernel = auto_vmap(x=0, reduce="sum", chunk_size=chunk_size)(lambda x: 3 * x)
    x = jnp.ones(100)
    (transposed,) = jax.linear_transpose(kernel, x)(2.0)
    np.testing.assert_array_equal(transposed, np.full(100, 6.0))


@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_infinite_and_missing_numbers_stay_what_they_are(chunk_size):
    def found(reduce, *numbers):
        x = jnp.ones(5000).at[jnp.arange(len(numbers)) * 7].set(jnp.array(numbers))
        return float(chunked_reduce(lambda x: x, reduce, chunk_size)(x))

    largest = float(np.finfo(np.float32).max)
    for reduce in ("sum", "mean", "logsumexp"):
        assert found(reduce, np.inf) == np.inf
        assert np.isnan(found(reduce, np.nan))
    assert found("sum", -np.inf, -np.inf) == -np.inf
    assert np.isnan(found("sum", np.inf, -np.inf))
    assert found("sum", largest, largest) == np.inf
    assert found("logsumexp", -np.inf) == pytest.approx(np.log(4999) + 1)


def test_windows_of_a_scan_do_not_drift():
    def step(carry, x):
        return carry + 1.0, x

    values = VALUES["equal"]
    for reduce, right in (("sum", np.sum), ("mean", np.mean), ("logsumexp", log_sum_exp)):
        _, found = sliced_scan(step, 0.0, values, save_at=[99_999, MANY - 1], reduce=reduce)
        halves = np.split(wide(values), [100_000])
        assert error(found, np.array([right(half) for half in halves])) < 4, reduce


@pytest.mark.parametrize("argument", [0, 1])
def test_what_rows_share_is_not_stored_for_each(argument):
    matrix = np.ones((1000, 3), np.float32)
    shared = auto_vmap(1, 1, reduce="sum")(lambda x, y: jnp.sum(jnp.tanh(matrix @ jnp.sin(x * y))))
    slope = jax.grad(lambda x, y: shared(x[:, None], y), argument)
    program = jax.make_jaxpr(slope)(*[jax.ShapeDtypeStruct((1000, 3), jnp.float32)] * 2)
    largest = max(v.aval.size for eqn in equations(program.jaxpr) for v in eqn.outvars)
    assert largest < 1000 * 1000  # else 1000 copies of the points, or of the matrix


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2, 1000, None])
def test_as_many_as_people_have(chunk_size):
    total = chunked_reduce(lambda x: x, "sum", chunk_size)(jnp.full(100_000_000, 0.1))
    assert error(total, 1e8 * TENTH) < 4
    pairs = auto_vmap(0, 0, reduce="sum", chunk_size=chunk_size)(lambda a, b: a * b)
    found = pairs(jnp.full((46_500, 1), 0.1), jnp.ones(46_500))
    assert error(found, 46_500**2 * TENTH) < 4
