# SPDX-License-Identifier: MIT
"""Reductions over arrays that several devices share: values, gradients, and what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import weekly
from rankax import chunked_reduce
from rankax import reductions as rd
from sharding import (
    ODD,
    N,
    W,
    X,
    compiled,
    data,
    given,
    kernel,
    loss_of,
    naming,
    on,
    put,
    same,
    scalar,
    sent,
    value_and_gradients,
)

FOLD = rd.Fold(
    (jnp.float32(1), jnp.float32(0)),
    lambda y: (1 + y / 9, y),
    lambda first, second: (first[0] * second[0], first[1] + second[1]),
)

BY_LABEL = rd.ByLabel(0, 5)
LARGEST_BY_LABEL = rd.ByLabel(0, 5, "max")


def labelled(x, w):
    value = scalar(x, w)
    return jnp.floor(value).astype(jnp.int32) % 6, value


USUAL = [("sum", scalar), ("max", scalar), (rd.BottomK(3), scalar)]
OTHERS = [
    *((name, scalar) for name in ("mean", "min", "logsumexp", rd.Moments(), FOLD)),
    ("prod", lambda x, w: 1 + scalar(x, w) / 9),
    (rd.TopK(100), scalar),  # more than one device has
    (rd.Best("v"), lambda x, w: kernel(x, w, 1.0)),
    ("any", lambda x, w: scalar(x, w) > 4),
    ("all", lambda x, w: scalar(x, w) < 4),
    ("argmax", scalar),
    ("argmin", scalar),
    ("gram", lambda x, w: jnp.tanh(w @ x)),
    (rd.Gram(center=True), lambda x, w: jnp.tanh(w @ x)),
    (BY_LABEL, labelled),
    (LARGEST_BY_LABEL, labelled),
]
BY_SUM = ("sum", "mean", "any", "all", "gram", BY_LABEL)
WITHOUT_DERIVATIVE = ("any", "all", "argmax", "argmin")


def check_reductions(cases, own, one, args, *, exchanged=0):
    """Compare values and gradients with those of one device, and count what is sent.

    ``own`` and ``one`` map a function over all devices and over one. Of the cotangents
    ``exchanged`` are sent, besides those of the argument that all items share.
    """
    got, most = [], 0
    for reduction, fun in cases:
        forward = compiled(own(fun, reduction), *args)
        found = sent(forward)
        # What no sum makes is sent to all devices, in one piece for each dtype.
        one_piece = (*BY_SUM, "max", "min", "prod", "logsumexp", FOLD, LARGEST_BY_LABEL)
        pieces = 1 if reduction in one_piece else 2
        assert 1 <= sum(found.values()) <= pieces, (reduction, found)
        if reduction in BY_SUM:
            assert found == {"all-reduce": 1}, (reduction, found)
        got.append(forward(*args))
        if reduction not in WITHOUT_DERIVATIVE:
            most += sum(found.values()) + 1 + exchanged

    def gradients(mapped, *args):
        differentiable = (case for case in cases if case[0] not in WITHOUT_DERIVATIVE)
        return [
            jax.grad(loss_of(mapped(fun, reduction)), (0, 1))(*args)
            for reduction, fun in differentiable
        ]

    @jax.jit
    def of_one(*args):
        return [one(fun, reduction)(*args) for reduction, fun in cases], gradients(one, *args)

    plain = jax.tree.map(np.asarray, args)
    want, slopes = jax.tree.map(np.asarray, of_one(*plain))
    for (reduction, _), a, b in zip(cases, got, want, strict=True):
        with naming(reduction):
            same(a, b)
    backward = compiled(functools.partial(gradients, own), *args)
    assert sum(sent(backward).values()) <= most, (sent(backward), most)
    for a, b in zip(backward(*args), slopes, strict=True):
        scale = max(float(abs(leaf).max()) for leaf in b)
        same(a, b, rtol=1e-3, atol=1e-4 * scale)
    return want


def mapped(fun, reduction, size=7, **options):
    return chunked_reduce(fun, reduction, size, (0, None), **options)


@pytest.mark.parametrize("cases", [USUAL, OTHERS], ids=["usual", "others"])
@on("Auto", weekly("Explicit"))
def test_reductions_send_once(mesh, cases):
    own = functools.partial(mapped, **given(mesh))
    check_reductions(cases, own, mapped, (put(mesh, X, "d"), put(mesh, W)))


def reduce_sharded(mesh, reduction, size, values, fun=lambda x: x * 1):
    return chunked_reduce(fun, reduction, size)(put(mesh, np.asarray(values), "d"))


@on("Auto")
def test_nan_survives_the_merge(mesh):
    nan = np.nan
    extremes, best = rd.Several("argmax", "argmin", "max", "min"), rd.Best("x")
    for values in (
        [3, 1, 1, 2, 4, 5, 1, nan],
        [nan, 1, 1, 2, 4, 5, 1, 3],
        [3, 1, nan, 2, 4, nan, 1, 0],
    ):
        at = np.flatnonzero(np.isnan(values))[0]
        for size in (1, None):
            found = reduce_sharded(mesh, extremes, size, np.asarray(values, "f"))
            np.testing.assert_array_equal([*map(float, found)], [at, at, nan, nan])
            named = reduce_sharded(mesh, best, size, np.asarray(values, "f"), lambda x: {"x": x})
            assert np.isnan(named["x"])


@on("Auto")
def test_a_part_may_be_masked(mesh):
    inf = np.inf
    for values in (
        [0, 1, -inf, -inf, 2, 3, 1, 0],
        [-inf] * 7 + [2],
        [1e4, 1e4, -inf, -inf, -1e4, 0, 1, 2],
    ):
        args = np.ones(8, "f"), np.asarray(values, "f")
        own = jax.value_and_grad(chunked_reduce(lambda z, mask: 2 * z + mask, "logsumexp", 1))
        want = jax.value_and_grad(lambda z, mask: jax.nn.logsumexp(2 * z + mask))(*args)
        same(own(*(put(mesh, x, "d") for x in args)), want)


def root(x, w):
    return {"v": jnp.sqrt(jnp.sum(w**2) * x), "ok": x > 0}


@on("Auto", weekly("Explicit"))
def test_some_items_count(mesh):
    """None of the first device does; the derivatives of what is left out are nan."""
    x = np.where((np.arange(N) % 3 == 0) | (np.arange(N) < N // 4), 0, X[:, 0] ** 2).astype("f")
    one = functools.partial(chunked_reduce, root, chunk_size=7, in_axes=(0, None), where="ok")
    own = functools.partial(one, **given(mesh))
    names = ("sum", "mean", "min", "argmin", "logsumexp", rd.Moments(), rd.BottomK(3), FOLD)
    reduce = {"v": rd.Several(*names), "ok": "sum"}
    want, slopes = jax.jit(value_and_gradients(one(reduce)))(x, W)
    assert not any(np.isnan(leaf).any() for leaf in slopes)
    args = put(mesh, x, "d"), put(mesh, W)
    found, gradients = jax.jit(value_and_gradients(own(reduce)))(*args)
    same(found, want)
    same(gradients, slopes, rtol=1e-3)
    assert sent(compiled(own("sum"), *args)) == {"all-reduce": 1}


@on("Auto")
def test_narrow_floats_are_merged_wide(mesh):
    values = jnp.where(jnp.arange(256) % 3 > 1, 1000.0, 1004.0).astype(jnp.bfloat16)
    of_one = chunked_reduce(lambda x: x, rd.Moments(), 16)(values)
    same(reduce_sharded(mesh, rd.Moments(), 16, values), of_one)
    cancel = np.repeat(np.float16([6e4, -6e4, 6e4, -6e4]), 4)
    for name in ("sum", "mean"):
        assert float(reduce_sharded(mesh, name, 1, cancel)) == 0, name


@pytest.mark.parametrize(
    ("cases", "size", "length"),
    [(USUAL[:1], 7, N), (USUAL, 7, ODD), (USUAL[:1], None, ODD), weekly(OTHERS, 7, ODD)],
    ids=["even", "uneven", "whole", "others"],
)
@on("Auto")
def test_reductions_of_any_length(mesh, cases, size, length):
    own, one = (functools.partial(mapped, size=size, devices=used) for used in ("all", None))
    # Each device gets the cotangents of x if they do not divide.
    exchanged = int(length % mesh.size > 0)
    args = data(length, 3), W
    want = check_reductions(cases, own, one, args, exchanged=exchanged)
    for (reduction, fun), plain in zip(cases[:1], want, strict=False):  # without `jax.jit`
        same(own(fun, reduction)(*args), plain)
