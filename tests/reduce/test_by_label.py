# SPDX-License-Identifier: MIT
"""`ByLabel` and `Histogram`, against NumPy on what they never store."""

import functools
import re
import warnings

import dask.array
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, enable_x64, equations, primitives, slow, temporary_bytes, weekly
from rankax import Mask, Ragged, SplitKey, auto_vmap, chunked_reduce, sliced_scan
from rankax.reductions import ByLabel, Histogram, Mean, Moments, MomentsResult, Several
from rankax.stream import run

OF = ["sum", "mean", "count", "max", "min", "logsumexp", Moments()]
DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]


def by_loop(of, labels, values, length):
    """Each label and its value in turn; the axes of the labels are the first of the values."""
    groups = [[] for _ in range(length)]
    for at in np.ndindex(labels.shape):
        if 0 <= int(labels[at]) < length:
            groups[int(labels[at])].append(values[at])
    if of == "count":
        return np.array([len(group) for group in groups])
    shape = values.shape[labels.ndim :]
    groups = [np.array(group, values.dtype).reshape(-1, *shape) for group in groups]
    if isinstance(of, Moments):
        return MomentsResult(
            np.array([len(group) for group in groups]),
            *(np.stack([fun(group, axis=0) for group in groups]) for fun in (np.mean, np.var)),
        )
    kind = values.dtype
    worst = (-np.inf, np.inf) if kind.kind == "f" else (0, 1)
    if kind.kind in "iu":
        worst = np.iinfo(kind).min, np.iinfo(kind).max
    functions = {
        "sum": functools.partial(np.sum, axis=0),
        "mean": functools.partial(np.mean, axis=0),
        "max": functools.partial(np.max, axis=0, initial=worst[0]),
        "min": functools.partial(np.min, axis=0, initial=worst[1]),
        "logsumexp": lambda group: np.log(np.exp(group).sum(axis=0)),
    }
    with np.errstate(divide="ignore"):
        return np.stack([functions[of](group) for group in groups])


def random_case(seed):
    rng = np.random.default_rng(seed)
    of = OF[seed % len(OF)]
    dtype = DTYPES[seed // len(OF) % len(DTYPES)]
    items, length = int(rng.choice([1, 2, 7, 30, 61])), int(rng.choice([1, 2, 5, 13, 300]))
    core = [(), (), (3,), (2, 2)][rng.integers(4)]
    rest = [(), (), (3,), (2, 5)][rng.integers(4)]
    low, high = [(0, length), (-2, length + 3), (length, length + 9), (0, 1)][rng.integers(4)]
    limits = np.iinfo(dtype if dtype != "bool" else "uint8")
    high = min(high, int(limits.max))
    labels = rng.integers(max(min(low, high - 1), int(limits.min)), high, (items, *core))
    kinds = ["float32", "float32", "int32"]
    kinds += ["complex64"] * (of not in ("max", "min")) + ["bool", "uint8"]
    kind = kinds[rng.integers(3 if of == "logsumexp" else len(kinds))]
    kind = "float32" if isinstance(of, Moments) else kind
    values = rng.normal(size=(items, *core, *rest)) * 3
    values = values + 1j * rng.normal(size=values.shape) if kind == "complex64" else values
    size = int(rng.choice([1, 4, items])) if rng.integers(4) else None
    return (
        of,
        labels.astype(dtype),
        np.abs(values).astype(kind) if kind == "uint8" else values.astype(kind),
        length,
        size,
    )


PLAIN = {name: getattr(jnp, name) for name in ("sum", "mean", "max", "min")}
PLAIN |= {"logsumexp": jax.nn.logsumexp}


def expected_dtype(of, values):
    like = jnp.zeros((2,), values.dtype)
    return jnp.int32 if of == "count" else PLAIN[of](like).dtype


def check_case(seed):
    of, labels, values, length, size = random_case(seed)
    with jax.enable_x64(labels.dtype.itemsize == 8):
        call = chunked_reduce(lambda *item: item, ByLabel(0, length, of), chunk_size=size)
        found = call(labels, values) if of == "count" else call(labels, values)[1]
        if of != "count" and not isinstance(of, Moments):
            assert found.dtype == expected_dtype(of, values)
    is_float = values.dtype.kind in "fc" or of == "logsumexp"
    exact = values.astype(np.result_type(values, float)) if is_float else values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = by_loop(of, labels, exact, length)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=str((seed, of, size)))


@pytest.mark.parametrize("start", [0, *map(weekly, range(20, 200, 20))])
def test_random_cases(start):
    for seed in range(start, start + 20):
        check_case(seed)


def gradient_by_loop(of, labels, values, slopes):
    """The gradient of the products of results and slopes, added up, from one bin after another."""
    found, flat = np.zeros_like(values), labels.astype(int)
    for label in range(len(jax.tree.leaves(slopes)[0])):
        at = flat == label
        x, count = values[at], max(at.sum(), 1)
        if isinstance(of, Moments):
            off = x - x.mean(axis=0, keepdims=True)
            found[at] = (slopes.mean[label] + 2 * off * slopes.variance[label]) / count
        elif of in ("max", "min"):
            best = getattr(np, f"arg{of}")(x, axis=0, keepdims=True) if len(x) else 0
            is_best = np.arange(len(x)).reshape(-1, *(1 for _ in x.shape[1:])) == best
            found[at] = slopes[label] * is_best
        else:
            share = {"sum": 1, "mean": 1 / count}.get(of)
            if of == "logsumexp":
                share = np.exp(x) / np.exp(x).sum(axis=0, keepdims=True)
            found[at] = slopes[label] * share
    return found


def check_gradient(seed):
    of, labels, values, length, size = random_case(seed)
    kind = values.dtype if values.dtype.kind in "fc" else np.dtype("float32")
    values, rng = values.astype(kind), np.random.default_rng(seed)
    with jax.enable_x64(labels.dtype.itemsize == 8):
        call = chunked_reduce(lambda *item: item, ByLabel(0, length, of), chunk_size=size)
        like = jax.eval_shape(call, labels, values)[1]
        slopes = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(kind), like)

        def loss(values):
            pairs = zip(*map(jax.tree.leaves, (call(labels, values)[1], slopes)), strict=True)
            return sum(jnp.sum(jnp.real(c * x.astype(kind))) for x, c in pairs)

        found = jax.jit(jax.grad(loss))(values)
    assert found.dtype == kind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        exact = values.astype(np.result_type(kind, float))
        expected = gradient_by_loop(of, labels, exact, slopes)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4, err_msg=str((seed, of, size)))


@pytest.mark.parametrize("start", [0, *map(weekly, range(7, 200, 7))])
def test_gradients_of_random_cases(start):
    for seed in range(start, start + 7):
        if OF[seed % len(OF)] != "count":
            check_gradient(seed)


@pytest.mark.parametrize("size", [2, None])
def test_labels_of_no_bin_send_nothing_back(size):
    labels, x = jnp.array([0, 0, 1, -1, 9, 9]), jnp.linspace(1.0, 2.0, 6)

    def spread(x):
        call = chunked_reduce(lambda *item: item, ByLabel(0, 4, Moments()), chunk_size=size)
        return jnp.sum(call(labels, x)[1].variance)  # NaN: two bins have no item

    np.testing.assert_allclose(jax.grad(spread)(x), [-0.1, 0.1, 0, 0, 0, 0], atol=1e-6)


# Derivatives, against those of `jax.ops` on what is stored.

X = jnp.asarray(np.random.default_rng(1).normal(size=(23, 3)), jnp.float32)
LABELS = jnp.asarray(np.random.default_rng(2).integers(-1, 6, 23), jnp.int32)
PLACES = [np.flatnonzero(np.asarray(LABELS) == label) for label in range(6)]
LENGTH = 7  # of which 0 to 5 have items


def kernel(label, x):
    return {"bin": label, "value": jnp.sin(x) * x[0], "norm": jnp.sum(x**2)}


def segments(of, labels, x):
    """The bins 0 to 5 of the values that `kernel` returns for each item."""
    out = jax.vmap(kernel)(labels, x)

    def reduced(value):
        groups = [value[at] for at in PLACES]
        if isinstance(of, Moments):
            return MomentsResult(
                jnp.array(list(map(len, PLACES))),
                *(jnp.stack([fun(group, 0) for group in groups]) for fun in (jnp.mean, jnp.var)),
            )
        return jnp.stack([PLAIN[of](group, axis=0) for group in groups])

    return {"bin": None, "norm": reduced(out["norm"]), "value": reduced(out["value"])}


def filled(found):
    return jax.tree.map(lambda x: x[: LENGTH - 1], found)


def loss_of(fun):
    def loss(*args):
        leaves = [x for x in jax.tree.leaves(fun(*args)) if x.dtype == jnp.float32]
        return sum(jnp.sum(jnp.sin(x + jnp.arange(x.size).reshape(x.shape) / 9)) for x in leaves)

    return loss


@pytest.mark.parametrize(
    "of", ["sum", slow("mean"), slow("max"), weekly("min"), "logsumexp", slow(Moments())], ids=str
)
@pytest.mark.parametrize("size", [4, weekly(1), slow(None)])
def test_derivatives_of_first_and_second_order(of, size):
    call = chunked_reduce(kernel, ByLabel("bin", LENGTH, of), chunk_size=size)

    def derivatives(fun):
        loss = functools.partial(loss_of(fun), LABELS)
        tangent = jnp.cos(X)
        along = jax.jvp(functools.partial(fun, LABELS), (X,), (tangent,))
        back = jax.grad(loss)
        return fun(LABELS, X), along[1], back(X), jax.jvp(back, (X,), (tangent,))[1]

    def found(labels, x):
        return filled(call(labels, x))

    got = jax.jit(lambda: derivatives(found))()
    want = jax.jit(lambda: derivatives(functools.partial(segments, of)))()
    assert_same(got, want, rtol=2e-4, atol=2e-5)


# The same by every path of a call.


def of_pairs(x, y, w):
    """The distance of all pairs in units of a half, and their weights."""
    distance = np.abs(x[:, None] - y)
    return np.floor(2 * distance).astype(int), w * distance, distance > 0.3


@auto_vmap(x=0, y=0, w=0, reduce=ByLabel("bin", 5), chunk_size=7)
def pairs(x, y, w):
    distance = jnp.abs(x - y)
    return {
        "bin": jnp.floor(2 * distance).astype(int),
        "value": w * distance,
        "apart": distance > 0.3,
    }


P, Q, W = (jnp.asarray(np.random.default_rng(i).uniform(0, 3, 23), jnp.float32) for i in range(3))
BINS, VALUES, APART = of_pairs(*map(np.asarray, (P, Q, W)))


@pytest.mark.parametrize("of", ["sum", "max", slow("logsumexp")])
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 7},
        {"chunk_size": None},
        slow({"chunk_size": 1}),
        {"chunk_size": 100, "reduce_axis": 0},
        {"memory_limit": "1 MB", "jit": True},
        slow({"lockstep": False, "chunk_size": 40}),
        slow({"xla_cpu": False}),
        slow({"hoist": False, "chunk_size": 50}),
    ],
    ids=str,
)
def test_pairs(of, options):
    kernel = pairs.with_options(reduce=ByLabel("bin", 5, of, where="apart"), **options)
    bins = np.where(APART, BINS, -1)
    if "reduce_axis" in options:
        columns = zip(bins.T, VALUES.T, strict=True)
        expected = np.stack([by_loop(of, *column, 5) for column in columns])
    else:
        expected = by_loop(of, bins, VALUES, 5)
    np.testing.assert_allclose(kernel(P[:, None], Q, W)["value"], expected, rtol=1e-5)


# Labels that are an argument.

ROWS = jnp.asarray(np.random.default_rng(3).integers(-1, 4, 23), jnp.int16)


@pytest.mark.parametrize("of", ["sum", slow("max"), weekly(Moments())], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"chunk_size": 50}, slow({}), slow({"bucket": True, "jit": True, "where": "ok"})],
    ids=str,
)
def test_an_argument_has_the_labels(of, options):
    def values(x, y, ok):
        return {"a": jnp.sin(x * y), "b": jnp.stack([x, y])}

    def returned(x, y, ok, row):
        return {"row": row, "of": values(x, y, ok)}

    def loss(kernel, x, y):
        found = kernel(x[:, None], y, W > 0.5, ROWS[:, None])
        found = found if "row" not in found else found["of"]
        leaves = [leaf[:4] for leaf in jax.tree.leaves(found)]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves if leaf.dtype == jnp.float32), found

    ranks = {"x": 0, "y": 0, "ok": 0, "row": 0}
    kernels = [
        auto_vmap(**ranks, reduce=ByLabel("row", 5, of), **options)(fun)
        for fun in (lambda x, y, ok, row: values(x, y, ok), returned)
    ]
    slopes = [jax.value_and_grad(loss, (1, 2), has_aux=True)(kernel, P, Q) for kernel in kernels]
    assert_same(*slopes)
    if of == "sum":
        counts = APART.shape[1] if "where" not in options else int(np.sum(W > 0.5))
        rows = [np.sum(np.asarray(P)[i == ROWS]) * counts for i in range(5)]
        np.testing.assert_allclose(slopes[0][0][1]["b"][:, 0], rows, rtol=1e-5)


def test_blocks_ragged_items_and_numbers_of_an_argument():
    call = auto_vmap(label=0, x=1, reduce=ByLabel("label", 7), chunk_size=4)(lambda label, x: x)
    labels, x = np.asarray(LABELS), np.asarray(X)
    blocks = dask.array.from_array(labels, chunks=7), dask.array.from_array(x, chunks=(7, 3))
    expected = by_loop("sum", labels, x, 7)
    np.testing.assert_allclose(call(*blocks).compute(), expected, rtol=1e-5)

    @auto_vmap(x="n", to=0, mask=Mask("n"), reduce=ByLabel("to", 2), chunk_size=2)
    def kernel(x, to, mask):
        return jnp.sum(x**2, where=mask)

    found = kernel(Ragged(X[:, 0], np.array([3, 0, 5, 15])), jnp.array([1, 0, 7, 1]))
    np.testing.assert_allclose(found, [0, np.sum(np.delete(x[:, 0], range(3, 8)) ** 2)], rtol=1e-5)
    numbers = chunked_reduce(lambda r, x: x, Histogram([-1, 0, 2], "sum", by="r"), 4)(x[:, 1], x)
    expected = [x[(x[:, 1] >= a) & (x[:, 1] < b)].sum(0) for a, b in ((-1, 0), (0, 2))]
    np.testing.assert_allclose(numbers, expected, rtol=1e-4)


def test_an_output_comes_before_an_argument_of_its_name():
    found = chunked_reduce(lambda at, x: {"at": at % 2, "x": x}, ByLabel("at", 2), 4)(LABELS, X)
    np.testing.assert_allclose(found["x"], by_loop("sum", np.asarray(LABELS) % 2, X, 2), rtol=1e-5)


def test_several_reductions_of_one_pass():
    several = Several(
        total=ByLabel("bin", 5),
        count=ByLabel("bin", 5, "count", where="apart"),
        histogram=Histogram([0.5, 1.0, 4.0], by="value", where="apart"),
        mean=Mean(where="apart"),
    )
    found = pairs.with_options(reduce=several)(P[:, None], Q, W)
    np.testing.assert_allclose(found["total"]["value"], by_loop("sum", BINS, VALUES, 5), rtol=1e-5)
    np.testing.assert_array_equal(found["count"], np.bincount(BINS[APART], minlength=5)[:5])
    np.testing.assert_allclose(found["mean"]["value"], VALUES[APART].mean(), rtol=1e-5)


def item(label, x):
    return {"bin": label, "x": x, "y": x[0] ** 2}


EACH = Several(
    *(ByLabel("bin", LENGTH, of) for of in ("sum", "mean", "count", "max", "min", "logsumexp")),
    ByLabel("bin", LENGTH, Moments()),
    Histogram(6, range=(0, 6), by="bin", of="sum"),
)
EXPECTED = jax.jit(chunked_reduce(item, EACH, None))(LABELS, X)


def same(found, expected=EXPECTED):
    assert_same(jax.tree.map(jnp.asarray, found), expected, rtol=1e-5, atol=1e-6)


def test_blocks_and_streams(tmp_path):
    kernel = auto_vmap(label=0, x=1, reduce=EACH, chunk_size=4)(item)
    labels, x = np.asarray(LABELS), np.asarray(X)
    blocks = dask.array.from_array(labels, chunks=7), dask.array.from_array(x, chunks=(7, 3))
    same(dask.compute(kernel(*blocks))[0])
    same(
        jax.tree.map(
            np.asarray, run(kernel, labels, x, out=tmp_path / "a.zarr", memory_limit="1 MB")
        )
    )


def test_ragged_items():
    lengths = np.array([3, 0, 5, 1, 3, 11])

    @auto_vmap(x="n 3", mask=Mask("n"), reduce=ByLabel("bin", 6), chunk_size=2)
    def kernel(x, mask):
        return {"bin": jnp.sum(mask), "total": jnp.sum(jnp.sin(x), where=mask[:, None])}

    def total(x):
        return kernel(Ragged(x, lengths))["total"]

    items = np.split(np.sin(X), np.cumsum(lengths)[:-1])
    np.testing.assert_allclose(
        total(X), by_loop("sum", lengths, np.array([item.sum() for item in items]), 6), rtol=1e-5
    )
    weights = jnp.arange(6.0)
    slopes = np.repeat(np.where(lengths < 6, lengths, 0), lengths)[:, None] * np.cos(X)
    assert_same(jax.grad(lambda x: total(x) @ weights)(X), jnp.asarray(slopes, jnp.float32))


def test_random_numbers_are_those_of_their_items():
    @auto_vmap(key=SplitKey, x=0)
    def noisy(key, x):
        return {"x": x, "noise": jax.random.normal(key)}

    x = jnp.linspace(0.0, 1.0, 50)
    each = noisy(jax.random.key(0), x)
    reduce = Histogram(4, range=(0, 1), of="sum", by="x")
    found = noisy.with_options(reduce=reduce, chunk_size=8)(jax.random.key(0), x)
    expected = np.histogram(x, 4, range=(0, 1), weights=each["noise"])[0]
    np.testing.assert_allclose(found["noise"], expected, rtol=1e-5)


def test_windows_of_a_scan():
    def step(carry, x):
        return carry + x, {"bin": jnp.floor(carry).astype(int), "x": x}

    xs = jnp.linspace(0.1, 0.9, 10)
    _, ys = jax.lax.scan(step, 0.0, xs)
    for of in ("sum", "max", "mean", "count", "logsumexp", Moments()):
        _, found = sliced_scan(step, 0.0, xs, save_at=[3, 9], reduce=ByLabel("bin", 4, of))
        for i, window in enumerate((slice(4), slice(4, 10))):
            some = jax.tree.map(lambda y, window=window: y[window], ys)
            expected = chunked_reduce(lambda y: y, ByLabel("bin", 4, of), None)(some)
            assert_same(jax.tree.map(lambda y, i=i: y[i], found), expected)


def test_items_that_end_by_themselves():
    @auto_vmap(x=0, reduce=Histogram(8, range=(0, 40), of="sum", by="steps"), lockstep=False)
    def halved(x):
        def halve(state):
            return state[0] / 2, state[1] + 1

        end, steps = jax.lax.while_loop(lambda state: state[0] > 0.01, halve, (x, 0))
        return {"steps": steps, "end": end}

    x = jnp.exp(jnp.linspace(-3.0, 9.0, 40))
    same(halved(x), halved.with_options(lockstep=True)(x))
    gradients = [
        jax.grad(lambda x, f=f: f(x)["end"][0])(x)
        for f in (halved, halved.with_options(chunk_size=None))
    ]
    same(*gradients)


@pytest.mark.parametrize("of", ["sum", slow("max"), "logsumexp", slow(Moments())], ids=str)
def test_what_where_leaves_out_sends_nothing_back(of):
    @auto_vmap(x=0, reduce=ByLabel("bin", 3, of), where="ok", chunk_size=4)
    def roots(x):
        return {"bin": (x > 1).astype(int), "root": jnp.sqrt(x), "ok": x > 0}

    x = jnp.array([0.0, 0.5, -1.0, 2.0, 0.0, 3.0])
    gradient = jax.grad(lambda x: jax.tree.leaves(roots(x))[-1][:2].sum())(x)
    some = jax.grad(lambda x: jax.tree.leaves(roots(x))[-1][:2].sum())(x[jnp.array([1, 3, 5])])
    np.testing.assert_allclose(gradient, jnp.zeros(6).at[jnp.array([1, 3, 5])].set(some), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ByLabel("bin"), TypeError, "ByLabel: length is missing; say how many labels"),
        (lambda: ByLabel("bin", 0), ValueError, "ByLabel: length must be a positive int, got 0"),
        (
            lambda: ByLabel("bin", 2.0),
            TypeError,
            "ByLabel: length must be a positive int, got float",
        ),
        (lambda: ByLabel(None, 2), TypeError, "ByLabel: of='sum' needs the output with the la"),
        (
            lambda: ByLabel(np.arange(3), 2),
            TypeError,
            "ByLabel: by must be the key, field or index of the output with the labels, or the "
            "name of an argument, got ndarray; pass the labels to the kernel, and name that",
        ),
        (lambda: ByLabel("bin", 2, "median"), TypeError, "ByLabel: of must be 'count', 'sum', "),
        (lambda: ByLabel("bin", 2, Moments), TypeError, "ByLabel: of must be 'count', 'sum', 'me"),
        (
            lambda: ByLabel("bin", 2, Moments(where="ok")),
            TypeError,
            "ByLabel: where belongs to ByLabel itself, not to of=moments where 'ok'",
        ),
        (lambda: Histogram(4), ValueError, "Histogram: range is missing; say where 4 equal bins"),
        (lambda: Histogram(4.0), TypeError, "Histogram: edges, if there is one, must be a positi"),
        (lambda: Histogram(4, range=(1, 0)), ValueError, "Histogram: range must be two increasing"),
        (lambda: Histogram(4, range=3), ValueError, "Histogram: range must be two increasing num"),
        (lambda: Histogram([0, 1], range=(0, 1)), ValueError, "Histogram: range is for an int of"),
        (lambda: Histogram([1, 0]), ValueError, "Histogram: edges must be an int, or two or more"),
        (lambda: Histogram([0]), ValueError, "Histogram: edges must be an int, or two or more in"),
        (lambda: Histogram([0, 1], "mean", density=True), ValueError, "Histogram: density is of "),
        (lambda: Histogram([0, 1], density=1), TypeError, "Histogram: density must be True or Fa"),
        (lambda: Histogram([0, 1], by=0.5), TypeError, "Histogram: by must be the key, field or "),
        (
            lambda: jax.jit(lambda x: Histogram(x).length)(jnp.arange(3.0)),
            TypeError,
            "Histogram: JAX is tracing edges, but they are part of the program; pass them to the",
        ),
    ],
)
def test_wrong_objects(make, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        make()


@pytest.mark.parametrize(
    ("reduce", "text"),
    [
        (ByLabel("bins", 3), "output has no output 'bins'; it has output['bin'], output['x'] and"),
        (ByLabel("bins", 3), "and there is no argument bins with a rank; name the output with the"),
        (ByLabel("bins", 3), "labels, or an argument with them, which the kernel need not use"),
        (ByLabel("value", 3), "the argument value has dtype float32, but labels are integers; con"),
        (
            ByLabel("x", 3),
            "output['x'] has dtype float32, but labels are integers; convert them, or take "
            "rankax.reductions.Histogram, which makes labels from numbers",
        ),
        ({"bin": ByLabel("bin", 3), "x": None, "y": None}, "output['bin'] has no output 'bin'"),
        (ByLabel(None, 3, "count"), "output has several outputs: output['bin'], output['x'] and "),
        (ByLabel("bin", 3), "of shape (2,), so the shape of output['x'] must begin with it, but"),
        (ByLabel("bin", 3, Moments()), "has dtype int32, and moments needs floats; return it as"),
        (ByLabel("bin", 3, "max"), "has dtype complex64, and complex numbers have no order"),
        (Histogram([0, 1], "sum", by="y"), "has dtype complex64, but a histogram is of real numb"),
    ],
)
def test_what_does_not_fit(reduce, text):
    def outputs(label, x, value):
        label = jnp.stack([label] * 2) if "shape" in text else label
        y = label if "Moments" in str(reduce) else jax.lax.complex(x[0], x[1])
        return {"bin": label, "x": x, "y": y}

    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        chunked_reduce(outputs, reduce, 4)(LABELS, X, X[:, 0])
    assert str(caught.value).startswith(f"outputs() at {__file__}:")


def test_labels_without_values():
    text = "output[0] has labels, and there is no value beside it; return both, or count the items"
    with pytest.raises(ValueError, match=re.escape(text)):
        chunked_reduce(lambda label: (label,), ByLabel(0, 3), 4)(LABELS)
    found = chunked_reduce(lambda label: label, ByLabel(length=3, of="count"), 4)(LABELS)
    np.testing.assert_array_equal(found, [np.sum(i == LABELS) for i in range(3)])


# What a call needs.


def weighted(x, y, v, w):
    return {"r": jnp.sqrt(jnp.sum((x - y) ** 2) + 0.1), "w": v * w}


@pytest.mark.optimized
@pytest.mark.parametrize("of", ["sum", slow("mean"), "max", "logsumexp", slow(Moments())], ids=str)
@pytest.mark.parametrize("bins", [64, slow(8000)])
def test_memory_is_that_of_bins_and_tiles(of, bins):
    reduce = Histogram(bins, range=(0, 1.8), of=of, by="r")
    kernel = auto_vmap(x=1, y=1, v=0, w=0, reduce=reduce)(weighted)

    def loss(x, y, v, w):
        found = jax.tree.leaves(kernel(x[:, None], y, v[:, None], w))
        return sum(jnp.sum(leaf**2) for leaf in found if leaf.dtype == jnp.float32)

    def needed(fun, points):
        shapes = (points, 3), (points, 3), (points,), (points,)
        return temporary_bytes(fun, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))

    for fun in (loss, jax.grad(loss, (0, 3))):
        one, four_times = (needed(fun, points) for points in (1000, 2000))
        # Copies of the points, and at most a few of all bins: the pairs are 4 and 16 MB.
        assert four_times < one + 1000 * 200, (one, four_times)
        assert one < 2**18 + 20 * 4 * bins


@pytest.mark.optimized
def test_a_plan_shows_the_memory_of_four_times_the_pairs():
    reduce = Histogram(64, "sum", range=(0, 1.8), by="r")
    kernel = auto_vmap(x=1, y=1, v=0, w=0, reduce=reduce, memory_limit="2 MB")(weighted)

    def plan(n):
        shapes = (n, 1, 3), (n, 3), (n, 1), (n,)
        return kernel.plan(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

    few, many = plan(1000), plan(2000)
    assert many.memory.gradient < few.memory.gradient + 1000 * 64  # copies of the points
    assert f"gradient {many.memory.gradient / 1000:.1f} kB" in str(many)


def test_a_step_scatters_once():
    def count(of):
        call = chunked_reduce(item, ByLabel("bin", LENGTH, of), chunk_size=4)
        found = primitives(call, LABELS, X)
        return sum(number for name, number in found.items() if name.startswith("scatter"))

    assert count("count") == 1
    assert count("sum") == count("max") == 2  # values
    assert count("mean") == 3
    assert count("logsumexp") == 4  # the largest and the sum of each value


def test_bins_of_numbers_have_no_axis_of_length_1():
    call = chunked_reduce(item, ByLabel("bin", LENGTH), chunk_size=4)
    found = equations(jax.make_jaxpr(call)(LABELS, X).jaxpr)
    scattered = [eqn.outvars[0].aval for eqn in found if eqn.primitive.name == "scatter-add"]
    assert [aval.shape for aval in scattered] == [(LENGTH, 3, 1), (LENGTH,)]  # of x and y


@pytest.mark.optimized
def test_a_scatter_of_vectors_copies_no_bins():
    def item(label, x):
        return {"bin": label, "x": x}

    call = chunked_reduce(item, ByLabel("bin", 30_000), chunk_size=8)
    shapes = jax.ShapeDtypeStruct((800,), jnp.int32), jax.ShapeDtypeStruct((800, 3), jnp.float32)
    text = jax.jit(call).lower(*shapes).compile().as_text()
    assert "scatter" in text
    assert not re.search(r"= f32\[[\d,]*30000\S* (copy|transpose)\(", text)


def test_long_sums_do_not_drift():
    x = jnp.full(3 * 10**6, 0.1, jnp.float32)
    for length, rtol in ((2, 1e-5), (300, 2e-4)):
        call = chunked_reduce(lambda x: (1, x), ByLabel(0, length), chunk_size=1000)
        np.testing.assert_allclose(call(x)[1][:2], [0, 3e5], rtol=rtol)
    # A plain sum is 3 % off.
    assert jax.ops.segment_sum(x, jnp.ones(x.size, int), 2)[1] < 2.95e5


def test_the_plan_says_how_many_bins():
    plan = str(pairs.plan(P[:, None], Q, W))
    assert "reduced by ByLabel('bin', length=5), to ()" in plan
    histogram = Histogram([0, 1, 2], by="value", where="apart")
    plan = str(pairs.with_options(reduce=histogram).plan(P[:, None], Q, W))
    assert "reduced by Histogram(3 edges, by='value') where 'apart', to ()" in plan
    assert Histogram(3, "sum", range=(0, 1)).label == "Histogram(3, range=(0.0, 1.0), of='sum')"
    assert ByLabel(0, 3, Moments()).label == "ByLabel(0, length=3, of=Moments())"


@pytest.mark.parametrize("of", ["sum", slow("mean"), "logsumexp", slow(Moments())], ids=str)
def test_derivatives_of_complex_values(of):
    def kernel(label, x):
        return {"bin": label, "z": jax.lax.complex(jnp.sin(x[0]), x[1] * x[2])}

    def loss(size, x):
        call = chunked_reduce(kernel, ByLabel("bin", LENGTH, of), chunk_size=size)
        found = [filled(leaf) for leaf in jax.tree.leaves(call(LABELS, x))]
        return sum(
            jnp.sum(jnp.real(z) * jnp.cos(jnp.imag(z))) for z in found if z.dtype != jnp.int32
        )

    def plain(x):
        z = jax.vmap(kernel)(LABELS, x)["z"]
        groups = [z[at] for at in PLACES]
        if isinstance(of, Moments):
            found = [jnp.stack([fun(g) for g in groups]) for fun in (jnp.mean, jnp.var)]
        else:
            found = [jnp.stack([PLAIN[of](g) for g in groups])]
        return sum(jnp.sum(jnp.real(z) * jnp.cos(jnp.imag(z))) for z in found)

    expected = jax.value_and_grad(plain)(X)
    assert_same(jax.value_and_grad(functools.partial(loss, 4))(X), expected, rtol=1e-4, atol=1e-5)


# Histograms.


@pytest.mark.parametrize("density", [False, slow(True)])
@pytest.mark.parametrize("start", [0, slow(20)])
def test_histograms_are_those_of_numpy(start, density):
    for seed in range(start, start + 12):
        rng = np.random.default_rng(seed)
        # Few digits, so that many numbers are equal to an edge, or nearly so.
        x = np.round(rng.uniform(-1, 2, rng.integers(1, 50)), int(rng.integers(1, 4)))
        x = x.astype(["float32", "float16", "int32"][seed % 3])
        w = rng.normal(size=x.size).astype(np.float32) + 2
        low, high = [(0, 1), (-1, 2), (-0.3, 0.7)][rng.integers(3)]
        count = int(rng.integers(1, 40))
        edges = np.unique(np.round(rng.uniform(-1, 2, count + 2), 1))
        edges = edges if len(edges) > 1 else [0.0, 1.0]
        floats = x.astype(np.float32)
        for ours, bins, ends in (
            (Histogram(count, "sum", range=(low, high), by=0, density=density), count, (low, high)),
            (Histogram(edges, "sum", by=0, density=density), edges, None),
        ):
            with np.errstate(invalid="ignore"):
                expected, _ = np.histogram(floats, bins, ends, weights=w, density=density)
            found = chunked_reduce(lambda *item: item, ours, 7)(x, w)[1]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=str(seed))


def test_numbers_beside_the_edges_of_equal_bins():
    edges = np.linspace(-0.3, 0.7, 50).astype(np.float32)
    beside = [np.nextafter(edges, edges.dtype.type(end)) for end in (-np.inf, np.inf)]
    x = np.concatenate([edges, *beside])
    found = chunked_reduce(lambda x: x, Histogram(49, range=(-0.3, 0.7)), 20)(x)
    np.testing.assert_array_equal(found, np.histogram(x, 49, (-0.3, 0.7))[0])


def test_nan_and_the_ends_of_a_histogram():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.1, 0.0, 0.5, 1.0, 1.0000001])
    for histogram in (Histogram(2, range=(0, 1)), Histogram([0, 0.5, 1])):
        found = chunked_reduce(lambda x: x, histogram, 3)(x)
        np.testing.assert_array_equal(found, [1, 2])
        assert found.dtype == jnp.int32
    assert Histogram((0, 0.5, 1)) == Histogram(np.array([0, 0.5, 1]))
    assert hash(Histogram(2, range=[0, 1])) == hash(Histogram(2, range=(0.0, 1.0)))


def test_every_number_of_an_output_is_counted():
    found = chunked_reduce(jnp.sin, Histogram(7, range=(-1, 1)), 4)(X)
    np.testing.assert_array_equal(found, np.histogram(np.sin(X), 7, (-1, 1))[0])


def test_the_reductions_of_numpy_have_other_names():
    text = "no reduction is called 'histogram'; use rankax.reductions.Histogram(edges)"
    with pytest.raises(ValueError, match=re.escape(text)):
        chunked_reduce(jnp.sin, "histogram", 4)


# What nobody thinks of.


@pytest.mark.parametrize("size", [50, None])
def test_moments_of_large_numbers(size):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400).astype(np.int32)
    x = (1e4 * (labels + 1) + rng.normal(size=400)).astype(np.float32)
    found = chunked_reduce(lambda *item: item, ByLabel(0, 3, Moments()), chunk_size=size)(labels, x)
    groups = [x[labels == i].astype(float) for i in range(3)]
    np.testing.assert_allclose(found[1].mean, [np.mean(group) for group in groups], rtol=1e-6)
    np.testing.assert_allclose(found[1].variance, [np.var(group) for group in groups], rtol=1e-2)


def test_labels_of_64_bits_are_not_cut():
    with enable_x64():
        labels = jnp.array([2**32, -(2**40), 1, 2**31, -1, 2])
        call = chunked_reduce(lambda label: label, ByLabel(length=3, of="count"), 2)
        assert labels.dtype == jnp.int64
        np.testing.assert_array_equal(call(labels), [0, 1, 1])
        np.testing.assert_array_equal(call(labels.astype(jnp.uint64)), [0, 1, 1])


@pytest.mark.parametrize("size", [2, None])
def test_an_empty_batch_has_empty_bins(size):
    call = chunked_reduce(item, EACH, size)
    found = call(LABELS[:0], X[:0])
    for of, got in zip(["sum", "mean", "count", "max", "min", "logsumexp"], found, strict=False):
        got = got if of == "count" else got["y"]
        none = {"mean": np.nan, "max": -np.inf, "min": np.inf, "logsumexp": -np.inf}.get(of, 0)
        np.testing.assert_array_equal(got, np.full(LENGTH, none))
    assert jax.grad(lambda x: call(LABELS[:0], x)[3]["y"].sum())(X[:0]).shape == (0, 3)


def test_weak_types_do_not_depend_on_the_chunks():
    def weak(label, x):
        return {"bin": label, "x": jnp.where(x[0] > 0, 1.0, 2.0), "y": jnp.where(x[0] > 0, 1, 2)}

    reduce = Several(*(ByLabel("bin", LENGTH, of) for of in OF[:-1]))
    trees = [jax.eval_shape(chunked_reduce(weak, reduce, size), LABELS, X) for size in (4, 1, None)]
    types = [[(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)] for tree in trees]
    assert types[0] == types[1] == types[2]
    assert not any(is_weak for _, is_weak in types[0])


@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
def test_half_precision_is_added_in_float32(dtype):
    x = jnp.full(3000, 0.1, dtype)

    def call(x):
        return chunked_reduce(lambda x: (0, x), ByLabel(0, 1), chunk_size=100)(x)[1]

    assert call(x).dtype == x.dtype
    np.testing.assert_allclose(call(x).astype(float), 3000 * float(x[0]), rtol=1e-2)
    slopes = jax.grad(lambda x: 2 * call(x)[0])(x)
    np.testing.assert_array_equal(slopes, np.full(3000, 2))


def test_a_bin_without_items_sends_nothing_back():
    def roots(label, x):
        return {"bin": label, "root": jnp.sqrt(x)}

    def largest(x):
        call = chunked_reduce(roots, ByLabel("bin", 3, "max"), chunk_size=2)
        return jnp.where(jnp.isfinite(root := call(jnp.array([0, 1, 1]), x)["root"]), root, 0).sum()

    # The derivative of the root of 0 is infinite, and no bin has this item as its largest.
    np.testing.assert_allclose(jax.grad(largest)(jnp.array([1.0, 4.0, 0.0])), [0.5, 0.25, 0])


def test_nan_stays_in_its_bin():
    x = X.at[3, 0].set(jnp.nan)
    found = chunked_reduce(kernel, EACH_LEAF, 4)(LABELS, x)
    is_own = np.arange(LENGTH) == int(LABELS[3])
    for tree in found:
        leaves = [leaf for leaf in jax.tree.leaves(filled(tree)) if leaf.dtype == jnp.float32]
        for leaf in leaves:
            bad = np.isnan(leaf).any(axis=tuple(range(1, leaf.ndim)))
            np.testing.assert_array_equal(bad, is_own[: LENGTH - 1])


EACH_LEAF = Several(*(ByLabel("bin", LENGTH, of) for of in OF if of != "count"))


def test_equal_objects_share_a_program():
    assert ByLabel("bin", 3) == ByLabel("bin", 3)
    assert ByLabel("bin", 3) != ByLabel("bin", 4)
    assert len({ByLabel("bin", 3, Moments()), ByLabel("bin", 3, Moments())}) == 1
