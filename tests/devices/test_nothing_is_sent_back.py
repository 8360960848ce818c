# SPDX-License-Identifier: MIT
"""What counts for nothing sends nothing back: items that two devices have, winners that lose.

A cotangent of 0 is not nothing: 0 times an infinite derivative is NaN, and a rule of
`jax.custom_vjp` may make anything of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from helpers import weekly
from rankax import auto_vmap, chunked_reduce
from rankax import reductions as rd
from rankax.ext.reductions import unused
from sharding import compiled, data, mesh_of, naming, on, same, sent

inf = np.inf


@jax.custom_vjp
def decayed(x):
    """Return ``x``, and send something back where nothing is asked."""
    return x * 1


decayed.defvjp(lambda x: (x * 1, x), lambda x, ct: (ct + 0.5 * x + 1,))


def item(x, s):
    return jnp.sqrt(x) + jnp.sqrt(s) * (x + 1) + decayed(x)


def loss(f):
    """Return the sum of what a function returns that has a derivative, each number by itself."""
    floats = functools.partial(jnp.issubdtype, arg2=jnp.floating)

    def summed(*args):
        outs = [x for x in jax.tree.leaves(f(*args)) if floats(x.dtype)]
        return sum(jnp.sum(x * (1 + jnp.arange(x.size).reshape(x.shape))) for x in outs)

    return summed


def check_gradients(own, plain, *args, **tolerance):
    """Compare gradients, of which some are infinite."""
    argnums = tuple(range(len(args)))
    want = jax.jit(jax.grad(loss(plain), argnums))(*args)
    found = jax.jit(jax.grad(loss(own), argnums))(*args)
    assert not any(np.isnan(leaf).any() for leaf in want)
    same(found, want, **tolerance)


X = np.float32([0, 1, 0, 4, 5, 0, 2, 0])
ZERO = np.float32(0)


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduce": "sum"}, {"reduce": "mean"}, {"lockstep": False}, weekly({"chunk_size": 1})],
    ids=["map", "sum", "mean", "lanes", "one"],
)
@on("Auto")
def test_items_that_two_devices_have(mesh, options, length):
    """Given and closed over; three devices divide neither length."""
    mean = length if options.get("reduce") == "mean" else 1

    def own(x, s):
        f = auto_vmap(0, 0, devices=3, **options)
        return f(item)(x, s), auto_vmap(0, devices=3, **options)(lambda x: item(x, s))(x)

    def plain(x, s):
        outs = [jax.vmap(item, (0, None))(x, s) / mean for _ in range(2)]
        return [jnp.sum(out) if "reduce" in options else out for out in outs]

    check_gradients(own, plain, X[:length], ZERO)


@on("Auto")
def test_two_axes_that_devices_do_not_divide(mesh):
    every = jax.vmap(jax.vmap(item, (0, None)), (0, None))
    x = np.resize(X, (7, 5))
    with jax.set_mesh(mesh_of(jax.sharding.AxisType.Auto, 2, 4)):
        for axes in (), (0,), (1,), (0, 1):
            reduce = {"reduce": "sum", "reduce_axis": axes} if axes else {}
            own = auto_vmap(0, 0, devices=P("d", "e"), chunk_size=1, **reduce)(item)
            with naming(axes):
                check_gradients(own, lambda *args, axes=axes: jnp.sum(every(*args), axes), x, ZERO)


@pytest.mark.parametrize("size", [1, 2, None])
@on("Auto")
def test_products_of_infinities(mesh, size):
    x = np.float32([3, 1, inf, 2, inf, -1, -inf])
    grad = jax.grad(chunked_reduce(lambda x: x, "prod", size, devices=3))
    np.testing.assert_array_equal(grad(x), np.float32([inf, inf, inf, inf, inf, -inf, -inf]))


def worse(x, b, s):
    """Have an infinite derivative where the item is the best one of a device, not of all."""
    return {"v": b - jnp.sqrt(x) + s * x, "w": jnp.sqrt(x + 1) * s + b, "z": jnp.int32(b)}


def chosen(score, reduction, *args):
    """Evaluate the winners alone; of ``args``, what all items share comes last."""
    *mapped, shared = args
    outs = jax.vmap(score, (*[0] * len(mapped), None))(*map(jax.lax.stop_gradient, args))

    def at(index, name):
        return score(*(x[index] for x in mapped), shared)[name]

    if isinstance(reduction, rd.Best):
        return [at(jnp.argmax(outs["v"]), name) for name in "vw"]
    if isinstance(reduction, rd.TopK):
        best = {name: jax.lax.top_k(outs[name], 2)[1] for name in "vw"}
        return [jnp.stack([at(index, name) for index in best[name]]) for name in "vw"]
    return [at(jnp.argmax(outs[name]), name) for name in "vw"]


CHOOSE = ["max", rd.TopK(2), rd.Best("v", largest=True)]
BEST = np.float32([1, 0, 0, 10, 0, 1, 20, 1])


@pytest.mark.parametrize("devices", [weekly(2), 3, 8])
@pytest.mark.parametrize("reduction", CHOOSE, ids=str)
@on("Auto")
def test_winners_that_lose(mesh, reduction, devices):
    """One of each device; the derivative of some is infinite."""
    own = chunked_reduce(worse, reduction, 2, (0, 0, None), devices=devices)
    check_gradients(own, functools.partial(chosen, worse, reduction), X, BEST, np.float32(1))


@pytest.mark.parametrize("most", [unused._MOST_NUMBERS, 0], ids=["mapped", "one by one"])
@pytest.mark.parametrize("reduction", CHOOSE, ids=str)
@on("Auto")
def test_rows_whose_winners_lose(mesh, monkeypatch, reduction, most):
    """Other devices win in other rows; what all share has an infinite derivative."""
    monkeypatch.setattr(unused, "_MOST_NUMBERS", most)

    def score(row, x, s):
        v = jnp.sqrt(s) * (5 + row) + row * x
        return {"v": v - jnp.sqrt(x), "w": x * row}

    rows = np.float32([1, -1, 2, -2, 3])
    options = {"reduce": reduction, "reduce_axis": 1, "chunk_size": 6, "devices": 4}
    own = auto_vmap(row=0, x=0, s=0, **options)(score)

    def plain(rows, x, s):
        of_rows = [chosen(functools.partial(score, row), reduction, x, s) for row in rows]
        return jax.tree.map(lambda *outs: jnp.stack(outs), *of_rows)

    args = rows, X + np.float32(X == 0) * np.arange(8, dtype="f"), ZERO
    check_gradients(lambda rows, x, s: own(rows[:, None], x, s), plain, *args)


@pytest.mark.parametrize("reduction", ["max", rd.TopK(1)], ids=str)
@on("Auto")
def test_rules_of_winners_that_lose(mesh, reduction):
    own = chunked_reduce(lambda x, s: decayed(x) * decayed(s), reduction, 2, (0, None), devices=4)

    def plain(x, s):
        return decayed(x[6]) * decayed(s)

    check_gradients(own, plain, np.float32([0, 1, 2, 3, 4, 5, 7, 6]), np.float32(2))


@pytest.mark.parametrize("reduction", [CHOOSE[1], *map(weekly, CHOOSE[::2])], ids=str)
@on("Auto")
def test_second_derivatives_of_winners(mesh, reduction):
    """Of "v" where the gradient is 0, of "w" elsewhere."""

    def score(x, y, w):
        v = jnp.tanh(w @ x) @ jnp.sin(w @ y)
        return {"v": v, "w": jnp.sin(v) * x[0]}

    options = {"reduce": reduction, "reduce_axis": 0, "chunk_size": 4}
    args = data(6, 1, 2), data(3, 2, seed=1), data(2, 2, seed=2)
    one, own = (auto_vmap(x=1, y=1, w=2, devices=d, **options)(score) for d in (None, 5))
    target, along = jax.tree.leaves(one(*args)["v"])[0], tuple(map(jnp.cos, args))

    def second(f, *args):
        def cost(*args):
            v, w = (jax.tree.leaves(f(*args)[name])[0] for name in "vw")
            return jnp.sum((v - target) ** 2) + jnp.sum(w**2)

        slope = jax.grad(cost, (0, 1, 2))
        forward = lambda *args: jax.jvp(cost, args, along)[1]  # noqa: E731
        back = lambda *args: sum(map(jnp.vdot, slope(*args), along))  # noqa: E731
        twice = [jax.grad(f, (0, 1, 2))(*args) for f in (forward, back)]
        return jax.jvp(slope, args, along), *twice

    found, want = (jax.jit(functools.partial(second, f))(*args) for f in (own, one))
    same(found, want, rtol=1e-3, atol=1e-3)


@on("Auto")
def test_winners_send_what_they_did(mesh):
    """The states once, and the cotangents of what all share."""
    for reduction in CHOOSE:
        own = chunked_reduce(worse, reduction, 2, (0, 0, None), devices="all")
        found = sent(compiled(jax.grad(loss(own), (0, 1, 2)), X, BEST, np.float32(1)))
        with naming(reduction):
            assert found == {"all-reduce": 1, "all-gather": found["all-gather"]}
            assert found["all-gather"] <= 2


@pytest.mark.parametrize("devices", [2, 3])
def test_where_of_arguments_with_one_item_in_a_part(devices):
    """An argument that no level of a part maps is a constant there, for items that do not count."""
    x, y = jnp.array([[1.0], [2.0]]), jnp.ones((2, 2))
    i = jnp.array([False, True])
    kernel = auto_vmap(
        x=0, y=0, i=0, reduce="sum", where="ok", chunk_size=1, devices=devices, jit=True
    )(lambda x, y, i: {"v": decayed(x) * y, "ok": i})
    found = jax.grad(lambda x: kernel(x, y, i)["v"])(x)
    np.testing.assert_allclose(found, 1 + 0.5 * x + 1, rtol=1e-6)  # of one item each


@pytest.mark.parametrize("reduce", [None, "sum"])
def test_half_precision_in_buckets_on_devices(reduce):
    """What items share has 32 bits on a device, and items that have numbers take it as it was."""
    w, x = jnp.bfloat16(3), jnp.arange(1.0, 7.0)
    options = {"chunk_size": 2, "devices": 3, "bucket": True, "jit": True, "reduce": reduce}
    options = {k: v for k, v in options.items() if v is not None}
    kernel = auto_vmap(None, 0, **options)(lambda w, x: lax.mul(w, w).astype(x.dtype) * x)
    expected = 9 * x if reduce is None else jnp.sum(9 * x)
    np.testing.assert_allclose(kernel(w, x), expected, rtol=1e-6)
    found = jax.grad(lambda w: jnp.sum(kernel(w, x)))(w)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found, 6 * 21)
