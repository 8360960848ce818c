# SPDX-License-Identifier: MIT
"""Reductions of the items that count, against `jax.numpy` on these items alone."""

import functools
import re
from typing import NamedTuple

import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import REMAT3, equations, primitives, refusal, slow, temporary_bytes, weekly
from helpers import assert_same as assert_equal
from rankax import Mask, Ragged, auto_vmap, chunked_reduce, reductions, sliced_scan
from rankax.reductions import Best, BottomK, Fold, Moments, MomentsResult, Several, TopK, TopKResult

assert_same = functools.partial(assert_equal, rtol=1e-4, atol=1e-5)

DRAW = np.random.default_rng(3).normal
Y, W = (DRAW(size=size).astype("float32") for size in ((24, 3), 24))
# The last row is nan throughout, in the derivative too. The first has a 0/0 where points meet.
X = np.concatenate([Y[[3]], Y[:1] + 1, np.full_like(Y[:1], np.nan)])
Y[7] = Y[3]
COUNTS = np.any(X[:, None] != Y, axis=-1)
X, Y, W = map(jnp.asarray, (X, Y, W))
ARGS = X[:, None], Y, W
COUNTS[-1] = False


def pair(x, y, w):
    """Infinite, with a derivative that is nan, for equal points."""
    distance = jnp.sqrt(jnp.sum((x - y) ** 2))
    return {"e": w * jnp.exp(-distance) / distance, "ok": distance > 0}


FOLD = Fold(  # x -> a x + b, one after another
    (1.0, 0.0),
    lift=lambda e: (1 + 0.1 * jnp.sin(e), e),
    merge=lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]),
)
# What each reduction gives where nothing counts; and those that have no name.
NOTHING = {
    "sum": 0.0,
    "mean": np.nan,
    "prod": 1.0,
    "max": -np.inf,
    "min": np.inf,
    "argmax": -1,
    "argmin": -1,
    "any": False,
    "all": True,
    "logsumexp": -np.inf,
    "gram": np.zeros((1, 1)),
    "moments": MomentsResult(0, np.nan, np.nan),
    "fold": (1.0, 0.0),
    "top": TopKResult(np.full(2, np.inf), np.full(2, -1)),
}
OBJECTS = {"moments": Moments(), "fold": FOLD, "top": BottomK(2), "last": TopK(3)}


def several(names, where=None):
    return Several(**{name: OBJECTS.get(name, name) for name in names}, where=where)


def reduced(e, name):
    """Reduce an array by `jax.numpy`."""
    if name == "moments":
        return MomentsResult(jnp.asarray(len(e)), e.mean(), e.var())
    if name == "gram":
        return jnp.reshape(e @ e, (1, 1))
    if name == "fold":
        return jax.lax.scan(lambda p, e: (FOLD.merge(p, FOLD.lift(e)), None), FOLD.identity, e)[0]
    if name == "top":
        return TopKResult(jnp.sort(e)[:2], jnp.argsort(e)[:2])
    return jax.nn.logsumexp(e) if name == "logsumexp" else getattr(jnp, name)(e)


def of_some(e, where, names):
    """Reduce the outputs of the items that count, which are at ``where``."""
    if not where.size:
        return {name: NOTHING[name] for name in names}
    return placed({name: reduced(e, name) for name in names}, jnp.asarray(where))


def placed(outs, where):
    """Return results whose indices are those among all items."""
    at = {name: where[outs[name]] for name in outs.keys() & {"argmin", "argmax"}}
    for name in outs.keys() & {"top", "last"}:
        at[name] = outs[name]._replace(indices=where[outs[name].indices])
    return outs | at


def stacked(rows):
    """Stack trees of arrays; their dtypes are those of the first."""

    return jax.tree.map(lambda *xs: jnp.stack(xs).astype(xs[0].dtype), *rows)


def expected(x, y, w, names):
    def of_row(x, where):
        e = jax.vmap(pair, (None, 0, 0))(x, y[where], w[where])["e"]
        return of_some(e, where, names)

    return stacked(map(of_row, x[:, 0], map(np.flatnonzero, COUNTS)))


def found(x, y, w, names, size):
    options = {"reduce": {"e": several(names), "ok": "any"}, "reduce_axis": -1, "where": "ok"}
    out = auto_vmap(x=1, y=1, w=0, chunk_size=size, **options)(pair)(x, y, w)
    assert out["ok"].shape == (3,)
    return out["e"]


def finite(tree):
    """A number that depends on all finite floats of a tree, on each otherwise."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(
        jnp.sum(jnp.where(jnp.isfinite(x), jnp.sin(x + 0.1 * number), 0.0))
        for number, x in enumerate(floats)
    )


def gradient_and_value(fun):
    """The gradient of a number that depends on everything that ``fun`` returns, and that."""

    def call(*args):
        outs = fun(*args)
        return finite(outs), outs

    def gradient(*args):
        return jax.grad(call, tuple(range(len(args))), has_aux=True)(*args)

    return jax.jit(gradient)


FOLDED = "prod", "logsumexp", "moments", "fold", "top"


@pytest.mark.parametrize(
    ("names", "size"),
    [
        pytest.param(FOLDED, 5, id="a remainder"),
        pytest.param(tuple(NOTHING), 50, id="two rows in flight", marks=pytest.mark.slow),
        pytest.param(tuple(NOTHING), None, id="at once", marks=pytest.mark.weekly),
    ],
)
def test_values_and_gradients(names, size):
    fun = functools.partial(found, names=names, size=size)
    gradient, values = gradient_and_value(fun)(*ARGS)
    want, of_want = gradient_and_value(functools.partial(expected, names=names))(*ARGS)
    assert_same(values, of_want)
    assert_same(jax.jit(fun)(*ARGS), values)  # without the first pass
    assert_same(gradient, want, rtol=1e-3)
    assert not any(np.isnan(x).any() for x in gradient)


@pytest.mark.parametrize(
    "name",
    [slow("sum"), slow("logsumexp"), *map(weekly, ("prod", "gram", "moments", "fold", "top"))],
)
def test_second_derivatives(name):
    def pushed(fun):
        gradient = jax.grad(lambda y, w: finite(fun(ARGS[0], y, w, (name,))), (0, 1))
        back = jax.grad(lambda y, w: sum(map(finite, gradient(y, w))), (0, 1))
        return jax.jvp(gradient, (Y, W), (jnp.cos(Y), jnp.sin(W)))[1], back(Y, W)

    got = jax.jit(lambda: pushed(functools.partial(found, size=8)))()
    want = jax.jit(lambda: pushed(expected))()
    assert_same(got, want, rtol=2e-3, atol=1e-3)


class Out(NamedTuple):
    value: jax.Array
    ok: jax.Array


DATA = jnp.array([3.0, np.nan, -1.0, 2.0, np.inf, -1.0, 0.5])
KEPT = jnp.array([True, False, True, True, False, True, True])


@pytest.mark.parametrize(
    ("kernel", "where", "total"),
    [
        (lambda x, ok: {"a": x, "ok": ok}, "ok", {"a": 3.5, "ok": None}),
        (lambda x, ok: (x, ok), 1, (3.5, None)),
        (Out, "ok", Out(3.5, None)),
        (lambda x, ok: {"a": x, "b": (ok, 2 * x)}, "['b'][0]", {"a": 3.5, "b": (None, 7.0)}),
    ],
)
def test_the_mask_is_an_output(kernel, where, total):
    want = jax.tree.map(jnp.float32, total)
    assert_same(chunked_reduce(kernel, "sum", 3, where=where)(DATA, KEPT), want)
    assert_same(chunked_reduce(kernel, reductions.Sum(where=where), None)(DATA, KEPT), want)


def test_the_mask_may_have_an_entry_of_its_own():
    def kernel(x, ok):
        return {"a": x, "ok": ok, "odd": (x > 0) & ok}

    reduce = {"a": reductions.Mean(where="odd"), "ok": "sum", "odd": None}

    by_option = chunked_reduce(kernel, reduce, 2, where="ok")(DATA, KEPT)
    without = chunked_reduce(kernel, reduce, 2)(DATA, KEPT)
    assert_same(by_option["a"], jnp.mean(jnp.array([3.0, 2.0, 0.5])))
    assert_same(by_option["ok"], jnp.int32(5))
    np.testing.assert_array_equal(by_option["odd"], KEPT & (DATA > 0))
    assert without["ok"] == 5


@pytest.mark.parametrize(
    ("dtype", "size"), [("bool", 3), ("complex64", 3), slow("int8", None), slow("float16", 3)]
)
def test_dtypes_and_the_worst_of_each(dtype, size):
    """What counts may equal the identity: it is found all the same."""
    if dtype in ("int8", "bool"):
        worst = [0, 1] if dtype == "bool" else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    else:
        worst = [-np.inf, np.inf] if dtype != "complex64" else [1 + 1j, 2]
    names = ["sum", "mean", "prod", "any", "all"]
    names += ["max", "min", "argmax", "argmin", "top", "last"] if dtype != "complex64" else []
    names += ["logsumexp", "moments"] if dtype in ("float16", "complex64") else []
    reduce = several(names)

    @jax.jit
    def masked(values, counts):
        return chunked_reduce(Out, Out(reduce, "any"), size, where="ok")(values, counts).value

    plain = jax.jit(chunked_reduce(lambda x: x, reduce, None))
    for bad in worst:
        values = np.asarray([worst[0], bad, worst[1], bad, bad, worst[1], bad]).astype(dtype)
        counts = np.array([False, True, False, True, True, False, True])
        want = placed(plain(values[counts]), jnp.asarray(np.flatnonzero(counts)))
        assert_same(masked(values, counts), want)


def test_nan_that_counts():
    values = np.float32([np.inf, np.inf, np.nan, 1.0, np.nan])
    counts = np.array([False, True, True, False, True])
    reduce = Several("min", "argmin", BottomK(4))
    masked = jax.jit(chunked_reduce(Out, Out(reduce, None), 3, where="ok"))
    least, at, top = masked(values, counts).value
    assert np.isnan(least)
    assert at == 2
    np.testing.assert_array_equal(top.indices, [1, 2, 4, -1])
    np.testing.assert_array_equal(top.values, [np.inf, np.nan, np.nan, np.inf])


@pytest.mark.parametrize(("size", "largest"), [(5, True), slow(None, False)])
def test_best(size, largest):
    def kernel(x, y, w):
        out = pair(x, y, w)
        return {"e": out["e"], "y": y, "number": jnp.int32(7), "ok": out["ok"]}

    best = Best("e", largest=largest, where="ok")
    fun = auto_vmap(x=1, y=1, w=0, reduce=best, reduce_axis=-1, chunk_size=size)(kernel)

    @jax.jit
    def found(y, w):
        got, pull = jax.vjp(lambda y, w: fun(X[:, None], y, w), y, w)
        ones = jax.tree.map(jnp.ones_like, {name: got[name] for name in ("e", "y")})
        zeros = {"number": np.zeros(3, jax.dtypes.float0), "ok": None}
        return got, pull({**ones, **zeros})

    got, cotangents = found(Y, W)
    name = "argmax" if largest else "argmin"
    at = np.asarray(jax.jit(lambda *args: expected(*args, (name,))[name])(*ARGS))

    def of_winners(y, w):
        e = jax.vmap(pair)(X[:-1], y[at[:-1]], w[at[:-1]])["e"]
        return e.sum() + y[at[:-1]].sum(), e

    want, e = jax.jit(jax.grad(of_winners, (0, 1), has_aux=True))(Y, W)
    assert at.tolist()[-1] == -1  # nothing counts there
    assert_same(got["e"], np.append(e, np.float32(-np.inf if largest else np.inf)))
    assert_same(got["y"], np.where(at[:, None] < 0, 0, np.asarray(Y)[at]))
    assert_same(got["number"], np.where(at < 0, 0, np.int32(7)))
    assert got["ok"] is None
    assert_same(cotangents, want, rtol=1e-3)


@pytest.mark.parametrize("size", [2, 100])  # small arrays get nothing from any such item
@pytest.mark.parametrize(
    "options", [{"chunk_size": 4}, slow({"chunk_size": 2, "checkpoint": False})]
)
def test_what_items_share_gets_nothing_from_what_is_left_out(options, size):
    """The second row has nothing that counts, and its derivatives are infinite or nan."""
    x = np.float32([[0, 1, -1, 4, 9], [0, -1, 0, -4, 0]])

    def total(scale, bias, x):
        reduce = Several("sum", "min"), "any"
        root = auto_vmap(x=0, bias=1, reduce=reduce, where=1, reduce_axis=-1, **options)(
            lambda x, bias: (jnp.sqrt(scale[0] * x) * bias[0], x > 0)
        )
        (total, least), _ = root(x, bias)
        return total.sum() + least[0]

    @jax.jit
    def derivatives(*args):
        tangents = jax.tree.map(jnp.ones_like, args)
        return jax.value_and_grad(total, (0, 1, 2))(*args), jax.jvp(total, args, tangents)[1]

    bias = np.resize(np.float32([2, 5]), size)
    (value, gradient), tangent = derivatives(np.full(size, 4, np.float32), bias, x)
    assert_same(value, np.float32(28))
    of_scale, of_bias = np.zeros((2, size), np.float32)
    of_scale[0], of_bias[0] = 3.5, 14
    want = of_scale, of_bias, np.float32([[0, 4, 0, 1, 2 / 3], [0] * 5])
    assert_same(gradient, want)
    assert_same(tangent, sum(map(np.sum, want)))


def test_several_levels_and_vmap_around():
    """All three axes are reduced: loops in a loop, whose states are merged."""
    x = np.sin(np.arange(3 * 4 * 5, dtype="float32")).reshape(3, 4, 5)
    reduce = Out(several(("argmin", "moments", "top")), "any")
    kernel = auto_vmap(a=0, b=0, c=0, where="ok", reduce=reduce, chunk_size=2)(
        lambda a, b, c: Out(a * b / c, (c > 0) & (a > -0.5))
    )
    a, b, c = x[:, :1, :1], x[0, :, :1], x[1, 1]
    many, some = jnp.stack([c, -np.abs(c)]), np.ravel((c > 0) & (a + 0 * b > -0.5))
    found = jax.jit(jax.vmap(kernel, (None, None, 0)))(a, b, many).value
    found, none = (jax.tree.map(lambda x, i=i: np.asarray(x)[i], found) for i in (0, 1))
    value, where = np.ravel(a * b / c)[some], np.flatnonzero(some).astype("int32")
    first = np.argsort(value, stable=True)
    np.testing.assert_array_equal(found["argmin"], where[first[0]])
    assert_same(found["moments"], MomentsResult(np.int32(len(value)), value.mean(), value.var()))
    assert_same(found["top"], TopKResult(value[first[:2]], where[first[:2]]))
    assert (none["argmin"], none["moments"].count) == (-1, 0)


def test_steps_that_count_in_a_window():
    """What is left out is nan; in the last window, everything is."""
    data = np.array([1.0, -2.0, 4.0, 9.0, -1.0, 16.0, 2.0, -3.0], "f")
    x = jnp.asarray(data)
    windows = [slice(4), slice(4, 7), slice(7, 8)]
    names = ("argmin", "moments")
    reduce = {"e": several(names, where="ok"), "ok": "any"}

    def step(carry, x):
        carry = jnp.where(x > 0, jnp.sin(carry + x), carry)
        return carry, {"e": jnp.where(x > 0, carry * x, jnp.nan), "ok": x > 0}

    def by_window(x):
        ends = [window.stop - 1 for window in windows]
        return sliced_scan(step, 1.0, x, save_at=ends, reduce=reduce)[1]["e"]

    def plain(x):
        e = jax.lax.scan(step, 1.0, x)[1]["e"]
        rows = []
        for window in windows:
            at = np.flatnonzero(data[window] > 0)
            rows.append(of_some(e[window][at], at, names))
        return stacked(rows)

    (gradient,), values = gradient_and_value(by_window)(x)
    assert_same(((gradient,), values), gradient_and_value(plain)(x))
    assert_same(by_window(x), values)  # without the first pass
    assert not np.isnan(gradient).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_step_that_counts_in_a_window(sign):
    x = sign * jnp.array([3.0, 0.0, 2.0, 0.0, 0.0])
    reduce = Best("x", largest=sign < 0, where="ok")

    def step(i, x):
        return i + 1, {"x": x, "i": i, "ok": x != 0}

    best = sliced_scan(step, 0, x, save_at=[3, 4], reduce=reduce)[1]
    np.testing.assert_array_equal(best["x"], [2 * sign, sign * np.inf])
    np.testing.assert_array_equal(best["i"], [2, 0])


# Programs.


@pytest.mark.optimized
@pytest.mark.parametrize(
    "reduce", ["sum", slow("logsumexp"), weekly(Several("min", "argmin")), weekly(Moments())]
)
def test_a_mask_takes_no_memory(reduce):
    """At most 5 % and some numbers for each row and item; a mask of all pairs would be 30 MB."""

    def temporaries(rows, items, *, gradient, **options):
        fun = auto_vmap(x=1, y=1, w=0, reduce=reduce, reduce_axis=-1, chunk_size=2**12, **options)(
            pair if options else lambda x, y, w: pair(x, y, w)["e"]
        )
        fun = jax.grad(lambda *args, f=fun: finite(f(*args)), (0, 1, 2)) if gradient else fun
        shapes = (rows, 1, 3), (items, 3), (items,)
        return temporary_bytes(fun, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))

    rows, items = 1007, 30_007
    for gradient in (False, True):
        plain = temporaries(rows, items, gradient=gradient)
        assert plain < 1_500_000
        masked = temporaries(rows, items, gradient=gradient, where="ok")
        most = 2 if REMAT3 else 1.05  # the next checkpoint holds more arrays of a chunk
        assert masked < most * plain + 100 * rows + 10 * items


def test_only_a_derivative_looks_for_an_item_that_counts():
    """It does so once for all reductions with the same mask, and the sums take one loop."""
    fun = chunked_reduce(lambda x: (jnp.sqrt(x), x, x > 0), "sum", 4, where=2)
    x = jnp.arange(10.0)
    assert primitives(lambda x: fun(x)[0], x)["scan"] == 1
    assert primitives(jax.grad(lambda x: fun(x)[0]), x)["scan"] == 3  # first, forward, reverse
    each = chunked_reduce(lambda x: (jnp.sqrt(x), x, x > 0), ("sum", "mean", None), 4, where=2)
    assert primitives(jax.grad(lambda x: each(x)[0] + each(x)[1]), x)["scan"] == 8


# An argument that says which items count.

PAIRS = {"x": "i | 3", "y": "j | 3", "w": "j |"}
ROWS, COLUMNS = (DRAW(size=(n, 3)).astype("f4") for n in (4, 6))
COLUMNS[1] = ROWS[2]  # an infinite pair
APART = np.any(ROWS[:, None] != COLUMNS, -1) & (np.arange(24).reshape(4, 6) % 5 > 0)
MASKS = {
    "each pair": ("i j |", APART),
    "a row": ("i |", np.array([True, False, False, True])),
    "a column": ("j |", np.array([False, False, True, True, False, True])),
    "no row": ("i |", np.zeros(4, bool)),
    "all or none": ("", False),
}


def energy(x, y, w, ok):
    return pair(x, y, w)["e"]


def as_output(x, y, w, given):
    return {"e": energy(x, y, w, given), "ok": given}


@pytest.mark.parametrize("over", ["j", weekly("i"), weekly("i j")])
@pytest.mark.parametrize(
    "name", ["sum", weekly("mean"), weekly("moments"), *map(slow, ("min", "logsumexp", "top"))]
)
@pytest.mark.parametrize("mask", MASKS)
def test_an_argument_leaves_items_out_as_an_output_does(mask, name, over):
    rank, ok = MASKS[mask]
    options = {"reduce": OBJECTS.get(name, name), "over": over, "where": "ok", "chunk_size": 4}
    given = auto_vmap(**PAIRS, ok=rank, **options)(energy)
    options["reduce"] = {"e": options["reduce"], "ok": "any"}
    output = auto_vmap(**PAIRS, given=rank, **options)(as_output)

    def by_argument(x, y, w):
        return given(x, y, w, ok)

    def by_output(x, y, w):
        return output(x, y, w, ok)["e"]

    args = ROWS, COLUMNS, np.arange(1.0, 7.0, dtype="f4")
    assert_same(by_argument(*args), by_output(*args))
    slopes = [
        jax.grad(lambda *args, f=f: finite(f(*args)), (0, 1, 2)) for f in (by_argument, by_output)
    ]
    got, want = (slope(*args) for slope in slopes)
    assert_same(got, want)
    assert all(bool(jnp.isfinite(x).all()) for x in got)
    if mask.startswith(("no", "all")):
        assert not any(bool(x.any()) for x in got)


def test_an_argument_takes_no_pass_of_its_own():
    x = jnp.arange(10.0)
    given = chunked_reduce(lambda x, ok: jnp.sqrt(x), "sum", 4, where="ok")
    slope = jax.grad(lambda x: given(x, x > 0))
    assert primitives(slope, x)["scan"] == 2  # forward and reverse
    assert_same(slope(x), jax.grad(lambda x: jnp.sqrt(x[1:]).sum())(x))
    kernel = auto_vmap(x=0, ok=0, reduce="sum", where="ok", chunk_size=4, jit=True)
    kernel = kernel(lambda x, ok: jnp.sqrt(x))
    assert_same(jax.grad(kernel)(x, x > 0), slope(x))
    one = jnp.arange(10) == 3
    twice = jax.grad(lambda x: jax.grad(kernel)(x, one)[3])(x)
    assert_same(twice, jnp.where(one, jnp.float32(-(3**-1.5) / 4), 0.0))


def test_arguments_in_trees_ragged_calls_and_reductions():
    e = np.arange(6.0, dtype="f4")
    tree = auto_vmap({"e": 0, "ok": 0}, reduce="sum", where="item['ok']")(
        lambda item: 1 / item["e"]
    )
    assert_same(tree({"e": e, "ok": e > 0}), jnp.sum(1 / e[1:]))
    own = Several(reductions.Sum(where="a"), reductions.Max(where="b"))
    both = auto_vmap(e=0, a=0, b=0, reduce=own, chunk_size=4)(lambda e, a, b: 1 / e)
    assert_same(both(e, e > 0, e > 2), (jnp.sum(1 / e[1:]), jnp.float32(1 / 3)))
    rows = Ragged.from_list([e[:2], e[2:5], e[:1], e[5:]])
    count = auto_vmap(x="i | n", ok="i |", mask=Mask("n"), reduce="sum", where="ok", jit=True)
    count = count(lambda x, ok, mask: jnp.sum(jnp.where(mask, x, 0.0)))
    assert_same(count(rows, np.array([True, False, True, True])), jnp.float32(6))
    assert count.nonfinite(rows, np.ones(4, bool)).count == 0
    inverse = auto_vmap(x=0, ok=0, reduce="sum", where="ok")(lambda x, ok: 1 / x)
    assert inverse.nonfinite(e, e > 0).count == 0
    assert inverse.nonfinite(e, e >= 0).count == 1
    blocks = inverse(da.from_array(e, 4), e > 0)
    np.testing.assert_allclose(blocks.compute(), np.sum(1 / e[1:]), rtol=1e-6)


@pytest.mark.parametrize(
    ("where", "ok", "text"),
    [
        (
            "ok",
            1.0,
            "where='ok': ok must be one boolean, which says whether the item counts, but it",
        ),
        ("mask", True, "there is one array, and no argument mask with a rank"),
        ("table", True, "there is one array, and no argument table with a rank"),
        ("x", True, "where='x': x must be one boolean, which says whether the item counts, but it"),
    ],
)
def test_arguments_that_are_no_masks(where, ok, text):
    kernel = auto_vmap(x=0, ok=0, table=None, reduce="sum", where=where)(lambda x, ok, table: x)
    assert text in refusal(ValueError, kernel, jnp.ones(3), ok, jnp.ones(3, bool))


def test_a_name_of_an_argument_and_an_output_is_refused():
    kernel = auto_vmap(x=0, ok=0, reduce="sum", where="ok")(lambda x, ok: {"x": x, "ok": ~ok})
    text = "where='ok': output['ok'] and the argument ok have this name; rename one"
    assert text in refusal(ValueError, kernel, jnp.ones(3), jnp.ones(3, bool))
    same = auto_vmap(x=0, ok=0, reduce="sum", where="ok")(lambda x, ok: {"x": x, "ok": ok})
    assert same(jnp.ones(3), jnp.arange(3) > 0)["x"] == 2  # the output is the argument


def test_the_plan_says_what_a_mask_costs():
    def far(x, y):
        distance = jnp.sqrt(jnp.sum((x - y) ** 2))
        return {"e": jnp.cos(distance), "ok": distance > 1}

    kernel = auto_vmap(x="i | 3", y="j | 3", reduce="sum", where="ok")(far)
    (note,) = [n for n in kernel.plan(ROWS, COLUMNS).notes if "where" in n]
    assert re.fullmatch(
        r"derivatives evaluate where='ok' twice more, \d\d % of an item; an .*", note
    )
    given = auto_vmap(**PAIRS, ok="i j |", reduce="sum", where="ok")(energy)
    assert not any("where" in n for n in given.plan(ROWS, COLUMNS, np.ones(6, "f4"), APART).notes)


# Words.


def test_the_plan_says_what_counts():
    kernel = auto_vmap(x=0, reduce={"a": Several("min", "argmin"), "ok": "sum"}, where="ok")
    plan = kernel(lambda x: {"a": x, "ok": x > 0}).plan(jnp.ones(3))
    assert str(plan).endswith(
        "reduced by min where 'ok', argmin where 'ok' and sum where 'ok', to ()"
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"reduce": "sum", "where": "o"}, ValueError, "where='o': there is no such output;"),
        (
            {"reduce": reductions.Sum(where=1)},
            ValueError,
            "where=1: there is no such output; there is output",
        ),
        ({"reduce": "sum", "where": "a"}, ValueError, "but it has shape () and dtype float32"),
        ({"reduce": "sum", "where": "v"}, ValueError, "but it has shape (2,) and dtype bool"),
        ({"reduce": "sum", "where": 1.5}, TypeError, "index of an output, got float 1.5"),
        (
            {"reduce": reductions.Min(where=True)},
            TypeError,
            "field or index of an output, got bool True",
        ),
        (
            {"reduce": {"a": BottomK(4), "ok": None, "v": None}, "where": "ok"},
            ValueError,
            "BottomK(4) where 'ok' needs at least 4 items; the reduced axes have 3",
        ),
        ({"where": "ok"}, TypeError, "where='ok' has no effect without reduce=, such as "),
        (
            {"reduce": {"a": ("min", "argmin"), "ok": None, "v": None}},
            ValueError,
            "reductions.Several",
        ),
        ({"reduce": Several("min", "argmn")}, ValueError, "'argmn'; did you mean 'argmin'?"),
    ],
)
def test_errors(options, error, text):
    def kernel(x):
        return {"a": x, "ok": x > 0, "v": jnp.stack([x > 0, x > 1])}

    with pytest.raises(error, match=re.escape(text)):
        auto_vmap(x=0, **options)(kernel)(jnp.ones(3))


@pytest.mark.parametrize(
    "make", [lambda: Several(), lambda: Several("min", at="argmin"), lambda: Several("min", None)]
)
def test_wrong_several(make):
    assert refusal(TypeError, make).startswith("Several takes names and objects of rankax.reduct")


def test_a_tuple_of_outputs_takes_a_tuple_of_reductions():
    x = jnp.arange(3.0)
    assert chunked_reduce(lambda x: (x, -x), ("min", "argmin"), 2)(x) == (0, 2)
    several = chunked_reduce(lambda x: x, Several(least="min", at="argmin"), 2)(x)
    assert several == {"least": 0, "at": 0}


def test_options_at_the_call():
    kernel = auto_vmap(x=0, reduce="sum", jit=True)(lambda x: Out(jnp.sqrt(x), x > 0))
    some = kernel.with_options(where="ok", chunk_size=1)
    x = jnp.array([-1.0, 4.0])
    assert some(x) == some.with_options(reduce="max")(x) == Out(2.0, None)
    assert np.isnan(some.with_options(where=None)(x).value)
    assert some.with_options(where=None) is kernel.with_options(chunk_size=1, where=None)


def test_an_argument_is_searched_once_for_all_rows():
    """What all items share, the points of lists of neighbours, is not selected in each row."""
    points, lists = jnp.ones((50, 3)), jnp.zeros((50, 4), int)
    ranks = {"x": "i | 3", "j": "i k |", "real": "i k |", "reduce": "sum", "over": "k"}

    def near(x, j, real, points):
        return 1 / jnp.sum((x - points[j]) ** 2)

    kernel = auto_vmap(**ranks, where="real", chunk_size=8)(near)
    real = jnp.arange(50)[:, None] % 5 > jnp.arange(4)[None]

    def total(points):
        return kernel(points, lists, real, points).sum()

    every = equations(jax.make_jaxpr(jax.value_and_grad(total))(points).jaxpr)
    loops = [e.params["jaxpr"].jaxpr for e in every if str(e.primitive) == "scan"]
    inside = [e for loop in loops for e in equations(loop) if str(e.primitive) == "select_n"]
    assert not any(v.aval.shape[-2:] == (50, 3) for e in inside for v in e.outvars)
    empty = kernel(points[:0], lists[:0], real[:0], points)
    assert empty.shape == (0,)
    slope = jax.grad(lambda x: kernel(x, lists[:0], real[:0], points).sum())(points[:0])
    assert slope.shape == (0, 3)


def test_columns_that_are_left_out_are_replaced_before_the_loops():
    """Each pair chose the inputs of both sides: 4 times the time of a choice of the value."""
    x, y, ok = jnp.ones((30, 3)), jnp.ones((50, 3)), jnp.arange(50) % 3 > 0
    kernel = auto_vmap(
        x="i | 3", y="j | 3", ok="j |", reduce="sum", over="j", where="ok", chunk_size=50
    )
    pairs = kernel(lambda x, y, ok: jnp.exp(-jnp.sum((x - y) ** 2)))

    def chosen(*args):
        program = jax.make_jaxpr(jax.grad(lambda *own: pairs(*own).sum(), (0, 1)))(*args)
        loops = [
            e.params["jaxpr"].jaxpr for e in equations(program.jaxpr) if e.primitive.name == "scan"
        ]
        every = [e for loop in loops for e in equations(loop) if e.primitive.name == "select_n"]
        return sum(e.outvars[0].aval.shape == (50, 3) for e in every)

    of_columns = chosen(x, y, ok)
    of_pairs = jnp.broadcast_to(ok, (30, 50))
    by_pair = auto_vmap(
        x="i | 3", y="j | 3", ok="i j |", reduce="sum", over="j", where="ok", chunk_size=50
    )
    pairs = by_pair(lambda x, y, ok: jnp.exp(-jnp.sum((x - y) ** 2)))
    assert 2 * of_columns <= chosen(x, y, of_pairs)  # of one side only


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
def test_infinite_slopes_beside_columns_that_are_left_out(chunk_size):
    x, y = jnp.array([0.0, 1.0, 4.0]), jnp.array([0.0, -5.0, 3.0, jnp.nan, 0.5])
    ok, w = jnp.array([True, False, True, False, True]), jnp.float32(2)
    kernel = auto_vmap(x="i |", y="j |", ok="j |", reduce="sum", over="j", where="ok")
    kernel = kernel(lambda x, y, ok: jnp.sqrt(x + y) * jnp.log(w + y)).with_options(
        chunk_size=chunk_size
    )

    def plain(x, y):
        own = y[np.array(ok)]
        return (jnp.sqrt(x[:, None] + own[None]) * jnp.log(w + own)[None]).sum(1)

    assert_same(kernel(x, y, ok), plain(x, y))
    for call in (jax.grad, jax.jacfwd):
        got = call(lambda x, y: kernel(x, y, ok)[:2].sum(), (0, 1))(x, y)
        assert_same(got, call(lambda x, y: plain(x, y)[:2].sum(), (0, 1))(x, y))


@pytest.mark.parametrize("dear", [True, False])
def test_logsumexp_without_what_stands_in_for_an_item(dear):
    """The item that stands in for the others is larger than all of the second row and the third."""
    mask = jnp.asarray([[1, 1], [1, 0], [0, 0]]) > 0

    def loss(w, x):
        def kernel(x, y, mask):
            out = 60 * x * y * jnp.mean(w)
            return out + jnp.exp(-jnp.exp(out / 60)) if dear else out

        call = auto_vmap(0, 0, 0, reduce="logsumexp", reduce_axis=-1, where="mask", chunk_size=1)
        out = call(kernel)(x[:, None], jnp.asarray([2.0, 1.0]), mask)
        return jnp.sum(jnp.where(jnp.isfinite(out), out, 0))

    x = jnp.asarray([3.0, 0.1, 2.0])
    for gradient in jax.grad(loss, (0, 1))(jnp.ones(200), x):
        assert jnp.all(jnp.isfinite(gradient))
