# SPDX-License-Identifier: MIT
"""Reported elsewhere: derivatives that are wrong, NaN, or an error once there is a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same
from plain import item_by_item, wave
from rankax import Mask, Ragged, auto_vmap
from rankax.reductions import Sum


def test_second_derivatives_of_batched_pair_sums():
    """getkeops/keops#103: Hamilton's equations for a batch of clouds, differentiated again."""

    def interaction(x, y, p, q):
        return jnp.exp(-jnp.sum((x - y) ** 2)) * (p @ q)

    pair_sum = auto_vmap(1, 1, 1, 1, reduce="sum", reduce_axis=(-2, -1), chunk_size=4)(interaction)

    def in_chunks(x, p):
        return pair_sum(x[:, :, None], x[:, None], p[:, :, None], p[:, None])

    def dense(x, p):
        pairs = jax.vmap(jax.vmap(interaction, (None, 0, None, 0)), (0, None, 0, None))
        return jnp.sum(jax.vmap(pairs)(x, x, p, p), axis=(1, 2))

    def energy_and_gradient(energy):
        def speed(x, p):
            dx, dp = jax.grad(lambda x, p: jnp.sum(energy(x, p)) / 2, (1, 0))(x, p)
            return jnp.sum(jnp.sin(dx) - dp * dx), energy(x, p)

        return jax.jit(jax.grad(speed, (0, 1), has_aux=True))(x, p)

    x, p = wave(2, 5, 3), jnp.cos(wave(2, 5, 3))
    got, want = map(energy_and_gradient, (in_chunks, dense))
    assert_same(got, want, rtol=1e-4, atol=1e-5)


def test_complex_gradients_broadcast():
    """getkeops/keops#266."""

    def product(x, y):
        return x * jnp.exp(y * jnp.conj(x))

    x = lax.complex(wave(4, 1), wave(4, 1) ** 2)
    y = lax.complex(wave(6), jnp.cos(wave(6)))
    kernel = auto_vmap(0, 0, reduce="sum", reduce_axis=0, chunk_size=3)(product)

    def gradient(columns):
        def loss(x, y):
            return jnp.sum(jnp.abs(columns(x, y)) ** 2)

        return jax.jit(jax.grad(loss, (0, 1)))(x, y)

    def by_hand(x, y):
        return jnp.sum(jax.vmap(jax.vmap(product, (None, 0)), (0, None))(x[:, 0], y), axis=0)

    assert_same(gradient(kernel), gradient(by_hand), rtol=1e-4)


def test_an_integer_argument_beside_a_gradient():
    """netket/netket#1435."""

    def amplitude(weight, spin):
        angle = jnp.vdot(weight, spin.astype(weight.dtype))
        return lax.complex(jnp.cos(angle), jnp.sin(angle))

    spins = jnp.asarray([[1, -1, 1], [1, 1, 1], [-1, 1, 1], [1, -1, -1], [-1, -1, 1]], jnp.int8)
    weight = wave(3)

    def gradient(mapped):
        _, pull = jax.vjp(mapped, weight, spins)
        return pull(lax.complex(wave(5), wave(5) - 2))

    want = gradient(jax.vmap(amplitude, in_axes=(None, 0)))
    assert want[1].dtype == jax.dtypes.float0
    assert_same(gradient(auto_vmap(1, 1, chunk_size=2)(amplitude)), want)


def test_a_branch_around_a_zero_norm():
    """jax-ml/jax#9159, jax-ml/jax#5658: NaN appeared in the mapped function only."""

    def direction(x):
        def divide(x):
            return x / jnp.sqrt(x @ x)

        return lax.cond(jnp.all(x == 0), jnp.zeros_like, divide, x)

    x = wave(5, 3).at[jnp.array([0, 3])].set(0.0)

    def slope(x):
        return jax.grad(lambda x: jnp.sum(direction(x) * jnp.arange(3.0)))(x)

    want = item_by_item(slope, [1], x)
    assert jnp.all(jnp.isfinite(want))
    assert_same(auto_vmap(1)(slope)(x), want)
    kernel = auto_vmap(1, jit=True, chunk_size=2)(direction)
    assert_same(jax.grad(lambda x: jnp.sum(kernel(x) @ jnp.arange(3.0)))(x), want)


def test_a_point_is_at_distance_zero_from_itself():
    """jax-ml/jax#18562, ott-jax/ott#411: the pairs that a `where` discards make the Hessian NaN."""

    def repulsion(x, y):
        r = jnp.sqrt(jnp.sum((x - y) ** 2))
        return {"energy": 1 / r, "apart": r > 0}

    def by_where(points):
        pairs = jax.vmap(jax.vmap(repulsion, (None, 0)), (0, None))(points, points)
        return jnp.sum(jnp.where(pairs["apart"], pairs["energy"], 0.0))

    def others_only(points):
        one_by_one = [(i, j) for i in range(len(points)) for j in range(len(points)) if i != j]
        return sum(repulsion(points[i], points[j])["energy"] for i, j in one_by_one)

    kernel = auto_vmap(1, 1, reduce="sum", where="apart", chunk_size=4)(repulsion)

    def energy(points):
        return kernel(points[:, None], points)["energy"]

    points = wave(3, 2)
    assert jnp.all(jnp.isnan(jax.jit(jax.grad(by_where))(points)))

    def to_second_order(energy):
        return jax.jit(lambda x: (*jax.value_and_grad(energy)(x), jax.hessian(energy)(x)))(points)

    assert_same(to_second_order(energy), to_second_order(others_only), rtol=1e-4, atol=1e-4)


def test_nan_in_a_row_that_is_masked():
    """pytorch/pytorch#64305: 0 times NaN is NaN, also in the gradient of the weights."""

    def loss(weights, x, target):
        return {"loss": (weights @ x - target) ** 2, "known": ~jnp.isnan(target)}

    x, weights = wave(7, 3), wave(3) + 1
    target = jnp.cos(wave(7)).at[jnp.array([1, 6])].set(jnp.nan)
    known = np.flatnonzero(~np.isnan(target))

    def by_zeros(weights):
        items = jax.vmap(loss, in_axes=(None, 0, 0))(weights, x, target)
        return jnp.mean(jnp.where(items["known"], items["loss"], 0.0))

    def known_only(weights):
        return jnp.mean((x[known] @ weights - target[known]) ** 2)

    kernel = auto_vmap(x=1, target=0, reduce="mean", where="known", chunk_size=2)(loss)

    def mean(weights):
        return kernel(weights, x, target)["loss"]

    assert jnp.any(jnp.isnan(jax.jit(jax.grad(by_zeros))(weights)))
    got = jax.jit(jax.value_and_grad(mean))(weights)
    assert_same(got, jax.jit(jax.value_and_grad(known_only))(weights))


def test_a_mean_over_tokens_with_a_short_last_chunk():
    """ml-explore/mlx-lm#1413, huggingface/transformers#34191: no mean of means."""

    def cross_entropy(weights, tokens, mask):
        losses = (tokens @ weights) ** 2
        return {"loss": jnp.sum(jnp.where(mask, losses, 0)), "count": jnp.sum(mask)}

    rows, lengths, weights = wave(23, 3), [5, 1, 2, 6, 3, 2, 4], wave(3)
    kernel = auto_vmap(tokens="n 3", mask=Mask("n"), chunk_size=3, reduce=Sum())(cross_entropy)

    def mean(weights, tokens):
        sums = kernel(weights, tokens)
        return sums["loss"] / sums["count"].astype(jnp.float32)

    def of_all_tokens(weights):
        return jnp.mean((rows @ weights) ** 2)

    got = jax.jit(jax.value_and_grad(mean))(weights, Ragged(rows, lengths))
    assert_same(got, jax.value_and_grad(of_all_tokens)(weights))


def solved(f, x):
    """Return a zero of a function that may close over tracers, as `jax.closure_convert` allows."""
    converted, consts = jax.closure_convert(f, x)
    return _solved(converted, x, consts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solved(f, x, consts):
    def newton(_, x):
        return x - f(x, *consts) / jax.grad(f)(x, *consts)

    return lax.fori_loop(0, 30, newton, x)


def _forward(f, x, consts):
    x = _solved(f, x, consts)
    return x, (x, consts)


def _backward(f, stored, cotangent):
    x, consts = stored
    slope, pull = jax.grad(f)(x, *consts), jax.vjp(lambda *consts: f(x, *consts), *consts)[1]
    return jnp.zeros_like(x), [*pull(-cotangent / slope)]


_solved.defvjp(_forward, _backward)

CONVERTED = [{"chunk_size": 3}, {"devices": 1}, {"lockstep": False}, {"reduce": "sum"}]


@pytest.mark.parametrize("options", CONVERTED, ids=str)
def test_a_rule_that_closes_over_tracers(options):
    """As in the documentation of `jax.closure_convert`."""
    c = jnp.linspace(0.5, 4.0, 8)
    kernel = auto_vmap(0, **options)(lambda c: solved(lambda x: x**2 - c, jnp.float32(1)))
    value, gradient = jax.value_and_grad(lambda c: jnp.sum(kernel(c)))(c)
    assert_same(value, jnp.sum(jnp.sqrt(c)), rtol=1e-5)
    assert_same(gradient, 0.5 / jnp.sqrt(c), rtol=1e-5)


def test_roots_in_chunks():
    """jax-ml/jax#3021, patrick-kidger/optimistix#104."""

    def root(a, b):
        def solve(f, start):
            def halve(bracket):
                low, high = bracket
                middle = (low + high) / 2
                positive = f(middle) > 0
                return jnp.where(positive, low, middle), jnp.where(positive, middle, high)

            def wide(bracket):
                return bracket[1] - bracket[0] > 1e-6

            return lax.while_loop(wide, halve, (start, start + 4))[0]

        return lax.custom_root(
            lambda y: a * y**3 + y - b, jnp.float32(0), solve, lambda g, y: y / g(jnp.float32(1))
        )

    a, b = jnp.linspace(0.5, 2.0, 3)[:, None], jnp.linspace(0.2, 9.0, 5)
    kernel = jax.jit(auto_vmap(0, 0, chunk_size=4, lockstep=False)(root))
    y = kernel(a, b)
    assert_same(y, item_by_item(root, [0, 0], a, b), rtol=1e-4)
    steepness = 3 * a * y**2 + 1
    got = jax.grad(lambda a, b: jnp.sum(kernel(a, b)), (0, 1))(a, b)
    want = jnp.sum(-(y**3) / steepness, axis=1, keepdims=True), jnp.sum(1 / steepness, axis=0)
    assert_same(got, want, rtol=1e-4)
