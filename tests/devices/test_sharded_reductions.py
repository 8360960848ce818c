# SPDX-License-Identifier: MIT
"""Reductions over arrays that several devices share: values, gradients, and what is sent."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import weekly
from rankax import chunked_reduce
from rankax import reductions as rd
from sharding import (
    LENGTHS,
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
    on_several,
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
]


BY_SUM = ("sum", "mean", "any", "all", "gram")


WITHOUT_DERIVATIVE = ("any", "all", "argmax", "argmin")


def check_reductions(cases, own, one, args, mesh, *, exchanged=0):
    """Compare values and gradients with those of one device, and count what is sent.

    ``own`` and ``one`` map a function over all devices and over one. Of the cotangents
    ``exchanged`` are sent, besides those of the argument that all items share.
    """
    got, most = [], 0
    for reduction, fun in cases:
        forward = compiled(own(fun, reduction), *args)
        found = sent(forward)
        # What no sum makes is sent to all devices, in one piece for each dtype.
        pieces = 1 if reduction in (*BY_SUM, "max", "min", "prod", "logsumexp", FOLD) else 2
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


def check_sharded(mesh, cases):
    def mapped(fun, reduction, **options):
        return chunked_reduce(fun, reduction, 7, (0, None), **options)

    own = functools.partial(mapped, **given(mesh))
    check_reductions(cases, own, mapped, (put(mesh, X, "d"), put(mesh, W)), mesh)


@on("Auto", "Explicit")
def test_reductions_send_once(mesh):
    for usual in USUAL:
        check_sharded(mesh, [usual])


@on("Auto", weekly("Explicit"))
def test_other_reductions_send_once(mesh):
    check_sharded(mesh, OTHERS)


def reduce_sharded(mesh, reduction, size, values, fun=lambda x: x * 1):
    return chunked_reduce(fun, reduction, size)(put(mesh, np.asarray(values), "d"))


@on("Auto")
def test_nan_survives_the_merge(mesh):
    nan = np.nan
    for values in (
        [3, 1, 1, 2, 4, 5, 1, nan],
        [nan, 1, 1, 2, 4, 5, 1, 3],
        [3, 1, nan, 2, 4, nan, 1, 0],
    ):
        values = np.asarray(values, "f")
        at = np.flatnonzero(np.isnan(values))[0]
        for name in ("argmax", "argmin"):
            assert int(reduce_sharded(mesh, name, 1, values)) == at, (name, values)
        for reduction in ("max", "min"):
            for size in (1, None):
                assert np.isnan(reduce_sharded(mesh, reduction, size, values)), (reduction, values)
        best = reduce_sharded(
            mesh, rd.Best("x"), 1, np.stack([values, values], 1), lambda x: {"x": x[0], "y": x}
        )
        assert np.isnan(best["y"]).all()


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


@on("Auto", weekly("Explicit"))
def test_some_items_count(mesh):
    """None of the first device does, and the derivatives of what is left out are nan."""
    x = np.where((np.arange(N) % 3 == 0) | (np.arange(N) < N // 4), 0, X[:, 0] ** 2).astype("f")

    def root(x, w):
        return {"v": jnp.sqrt(w[0, 0] ** 2 * x), "ok": x > 0}

    names = ("sum", "mean", "min", "argmin", "logsumexp", rd.Moments(), rd.BottomK(3), FOLD)
    reduce = {"v": rd.Several(*names), "ok": "sum"}
    own = chunked_reduce(root, reduce, 7, (0, None), where="ok", **given(mesh))
    of_one = chunked_reduce(root, reduce, 7, (0, None), where="ok")
    sharded = put(mesh, x, "d"), put(mesh, W)
    want = jax.tree.map(np.asarray, jax.jit(value_and_gradients(of_one))(x, W))
    assert not any(np.isnan(leaf).any() for leaf in want[1])
    got = jax.jit(value_and_gradients(own))(*sharded)
    same(got[0], want[0])
    same(got[1], want[1], rtol=1e-3)
    total = chunked_reduce(root, "sum", 7, (0, None), where="ok", **given(mesh))
    assert sent(compiled(total, *sharded)) == {"all-reduce": 1}


@pytest.mark.weekly
@on("Auto")
def test_some_items_of_any_length_count(mesh):
    """More than one device has an item, or only one; the derivative of what is left out is nan."""

    def root(x, w):
        return {"v": jnp.sqrt(w * x), "ok": x > 0}

    names = ("sum", rd.Moments(), "argmin", rd.BottomK(2), FOLD)
    reduce = {"v": rd.Several(*names), "ok": None}
    for length in (2, 9):
        x = np.arange(length, dtype="f")[::-1] - length // 2 * (np.arange(length) % 2)
        make = functools.partial(chunked_reduce, root, reduce, 2, (0, None), where="ok")
        own, one = on_several(make, devices=3)
        want = jax.jit(value_and_gradients(one))(x, 2.0)
        assert not any(np.isnan(leaf).any() for leaf in want[1])
        same(own(x, 2.0), want[0])
        same(jax.jit(jax.grad(loss_of(own), (0, 1)))(x, 2.0), want[1], rtol=1e-3)


@on("Auto")
def test_narrow_floats_are_merged_wide(mesh):
    values = jnp.where(jnp.arange(256) % 3 > 1, 1000.0, 1004.0).astype(jnp.bfloat16)
    of_one = chunked_reduce(lambda x: x, rd.Moments(), 16)(values)
    same(reduce_sharded(mesh, rd.Moments(), 16, values), of_one)
    cancel = np.repeat(np.float16([6e4, -6e4, 6e4, -6e4]), 4)
    for name in ("sum", "mean"):
        assert float(reduce_sharded(mesh, name, 1, cancel)) == 0, name


def check_any_length(mesh, cases, size=7, lengths=LENGTHS):
    for length in lengths:

        def mapped(fun, reduction, **options):
            return chunked_reduce(fun, reduction, size, (0, None), **options)

        own = functools.partial(mapped, devices="all")
        # Each device gets the cotangents of x if they do not divide.
        exchanged = int(length % mesh.size > 0)
        args = data(length, 3), W
        want = check_reductions(cases, own, mapped, args, mesh, exchanged=exchanged)
        if len(cases) == 1 and exchanged:  # without `jax.jit`
            ((reduction, fun),) = cases
            same(own(fun, reduction)(*args), want[0])


@on("Auto")
def test_usual_reductions_of_any_length(mesh):
    for usual in USUAL:
        check_any_length(mesh, [usual])
    check_any_length(mesh, USUAL[:1], None, lengths=[ODD])


@pytest.mark.weekly
@on("Auto")
def test_other_reductions_of_any_length(mesh):
    check_any_length(mesh, OTHERS, lengths=[ODD])  # of `N`, in `other_reductions_send_once`
