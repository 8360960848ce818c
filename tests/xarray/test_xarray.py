# SPDX-License-Identifier: MIT
"""``rankax.xarray.apply`` beside the same kernel called with bare arrays, axes in order."""

import re
from typing import NamedTuple

import dask
import dask.array as da
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from jaxtyping import Array, Float

import rankax.xarray
from helpers import refusal
from rankax import auto_vmap
from rankax.reductions import BottomK

RNG = np.random.default_rng(0)
LEVELS = [1000.0, 800.0, 500.0, 200.0]
P = xr.DataArray(np.array(LEVELS, "float32"), dims="level", coords={"level": LEVELS})
T = xr.DataArray(
    RNG.uniform(200, 300, size=(3, 4, 5)).astype("float32"),
    dims=("time", "level", "x"),
    coords={"time": [1, 2, 3], "level": LEVELS},
    name="t",
    attrs={"units": "K"},
)
W = xr.DataArray(RNG.uniform(size=5).astype("float32"), dims="x", name="w")


@auto_vmap(p="level", t="level", w="")
def mean(p, t, w):
    return jnp.trapezoid(t, p) / (p[-1] - p[0]) * w


@auto_vmap
def profile(p: Float[Array, "level"], t: Float[Array, "level"]) -> Float[Array, "level"]:
    return t * (1000 / p) ** 0.286


def bare(x, *dims):
    return x.transpose(*dims).values


WANTED = np.asarray(mean(P.values, bare(T, "time", "x", "level"), W.values))


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.mark.parametrize(
    ("t", "options"),
    [(T.transpose("level", "x", "time"), {"jit": True, "bucket": True}), (T.chunk(x=2), {})],
    ids=["numpy, in a bucket", "dask"],
)
def test_dimensions_are_found_in_any_order(t, options):
    got = rankax.xarray.apply(mean.with_options(**options), P, t, W)
    assert isinstance(got.data, da.Array if t.chunks else np.ndarray)
    assert got.dtype == np.float32
    np.testing.assert_allclose(bare(got, "time", "x"), WANTED, rtol=1e-5)
    assert list(got.coords) == ["time"]
    assert "level" not in got.dims


def test_names_coordinates_and_attributes_follow_xarrays_rules():
    def by_hand(p, t):
        return xr.apply_ufunc(
            lambda p, t: t * (1000 / p) ** 0.286,
            *(p, t),
            input_core_dims=[["level"], ["level"]],
            output_core_dims=[["level"]],
        )

    for keep in (True, False, "default"):
        with xr.set_options(keep_attrs=keep):
            got = rankax.xarray.apply(profile, P, T)
            want = by_hand(P, T)
        xr.testing.assert_allclose(got, want, rtol=1e-5)
        assert (got.name, got.attrs, got.dims) == (want.name, want.attrs, want.dims)


class Pair(NamedTuple):
    total: Array
    parts: dict


@pytest.mark.parametrize("t", [T, T.chunk(time=2)])
def test_a_tree_of_outputs_becomes_a_dataset_or_a_tuple(t):
    @auto_vmap(p="level", t="level")
    def both(p, t):
        return Pair(t.sum(), {"first": t[:2], "p": p * t})

    dims = Pair((), {"first": "two", "p": ("level",)})
    got = rankax.xarray.apply(both, P, t, output_dims=dims)
    assert isinstance(got, xr.Dataset)
    assert got["parts_first"].dims == ("time", "x", "two")
    assert got["parts_p"].dims == ("time", "x", "level")
    np.testing.assert_allclose(got["total"], bare(T, "time", "x", "level").sum(-1), rtol=1e-5)

    of_tuple = auto_vmap(p="level", t="level")(lambda p, t: (t[0], p @ t))
    first, second = rankax.xarray.apply(of_tuple, P, t)
    np.testing.assert_array_equal(first, bare(T, "time", "x", "level")[..., 0])
    np.testing.assert_allclose(second, bare(T, "time", "x", "level") @ P.values, rtol=1e-5)
    each = rankax.xarray.apply(both, P, xr.Dataset({"t": t}), output_dims=dims)
    assert list(each) == ["total", "parts_first", "parts_p"]
    xr.testing.assert_allclose(each["total"]["t"], got["total"])


def test_core_dims_name_what_the_kernel_does_not():
    dot = auto_vmap(1, 1)(lambda a, b: a @ b)
    got = rankax.xarray.apply(dot, P, T, core_dims={"a": "level", "b": ("level",)})
    np.testing.assert_allclose(got, bare(T, "time", "x", "level") @ P.values, rtol=1e-5)
    xr.testing.assert_identical(rankax.xarray.apply(dot, P, T, core_dims="level"), got)
    renamed = T.rename(level="height").drop_vars("height")
    got = rankax.xarray.apply(profile, P, renamed, core_dims={"t": ("height",)}, output_dims="z")
    assert got.dims == ("time", "x", "z")


def test_pytrees_of_named_arrays_take_core_dims_by_path():
    @auto_vmap(pose={"r": "row col", "t": 1}, v=1)
    def moved(pose, v):
        return pose["r"] @ v + pose["t"]

    r = xr.DataArray(RNG.normal(size=(3, 3, 4)).astype("float32"), dims=("col", "row", "n"))
    t = xr.DataArray(RNG.normal(size=(3, 4)).astype("float32"), dims=("row", "n"))
    v = np.ones(3, "float32")
    got = rankax.xarray.apply(
        moved, {"r": r.chunk(n=2), "t": t}, v, core_dims={"pose['t']": "row"}, output_dims="row"
    )
    assert got.dims == ("n", "row")
    want = bare(r, "n", "row", "col").sum(-1) + bare(t, "n", "row")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_methods_keywords_and_numbers():
    class Air:
        gas = 287.0

        @auto_vmap(t=0, p=0)
        def density(self, t, p=1000.0):
            return p / (self.gas * t)

    got = rankax.xarray.apply(Air().density, T.chunk(time=1), p=500.0)
    np.testing.assert_allclose(got, 500 / (287 * T.values), rtol=1e-5)


@pytest.mark.parametrize("t", [T, T.chunk(time=1, x=2)], ids=["numpy", "dask"])
@pytest.mark.parametrize(
    ("dims", "want"),
    [
        (None, np.argmax(WANTED)),
        ("time", np.argmax(WANTED, 0)),
        (("x", "time"), np.argmax(WANTED.T)),
    ],
)
def test_reduced_dimensions_are_named(t, dims, want):
    kernel = mean.with_options(reduce="argmax")
    got = rankax.xarray.apply(kernel, P, t, W, reduce_dims=dims)
    np.testing.assert_array_equal(got, want)
    assert got.dims == (("x",) if dims == "time" else ())


def test_what_is_kept_of_a_reduction_keeps_the_dimensions():
    kernel = auto_vmap(p="level", t="level", reduce={"best": BottomK(2), "all": None})(
        lambda p, t: {"best": p @ t, "all": t[0]}
    )
    dims = {"best": "rank", "all": None}
    t = T.chunk(time=1)
    got = rankax.xarray.apply(kernel, P, t, reduce_dims="time", output_dims=dims)
    assert got["all"].dims == ("x", "time")
    assert got["best_values"].dims == ("x", "rank")
    dots = bare(T, "x", "time", "level") @ P.values
    np.testing.assert_allclose(got["best_values"], np.sort(dots, -1)[:, :2], rtol=1e-5)
    np.testing.assert_allclose(got["all"], bare(T, "x", "time", "level")[..., 0])


# Errors.

FIRST = auto_vmap(p="level", t="level")(lambda p, t: t[:2])
PAIR = auto_vmap(p="level", t="level")(lambda p, t: {"a": p[0], "b": t[0]})
NOTHING = auto_vmap(p="level", t="level")(lambda p, t: ())
NO_RANK = auto_vmap(p="level", t=None)(lambda p, t: p)
SCALAR = auto_vmap(p="level", t="")(lambda p, t: p.sum() * t)
UNNAMED = auto_vmap(1, 1)(profile.__wrapped__)
TRACE = auto_vmap("n n")(jnp.trace)
TOTAL = profile.with_options(reduce="sum", reduce_axis=0)
THIN = xr.Dataset({"thick": T, "thin": T.isel(level=0, drop=True)})
BOTH = xr.Dataset({"warm": T, "cold": T.isel(time=0, drop=True)})


@pytest.mark.parametrize(
    ("kernel", "t", "options", "text"),
    [
        # Core dimensions that are absent, ambiguous or cut.
        (
            *(profile, T.rename(level="height"), {}),
            "for t, rank \"level\" declares the core dimension 'level', which is absent: t has the "
            "dimensions 'time', 'height' and 'x'; rename one, or write core_dims={'t': ('x',)}",
        ),
        (UNNAMED, T, {}, "p has rank 1, which does not name its core axes, and p has the dim"),
        (profile, THIN, {}, "t['thin'] lacks the core dimension 'level', which other variables"),
        (profile, T.chunk(level=2), {}, "t is cut into 2 chunks along its core dimension 'level'"),
        (SCALAR, T, {}, "'level' is a core dimension of p, but a batch dimension of t, whose"),
        (profile, T, {"core_dims": {"t": "lev"}}, "for t, core_dims names the core dimension 'le"),
        (profile, T, {"core_dims": {"t": ("level", "x")}}, 't has rank "level", that is 1 core ax'),
        (profile, T, {"core_dims": ["level"]}, "core_dims must be a name, or a dict from param"),
        # Names of outputs.
        (FIRST, T, {}, "output has 1 core axis, but no names; write output_dims=('dim0',)"),
        (FIRST, T, {"output_dims": ("a", "b")}, "output has 1 core axis, but output_dims names 2"),
        (FIRST, T, {"output_dims": "x"}, "output has the core dimension 'x', which is a batch dim"),
        (FIRST, T, {"output_dims": 1}, "output_dims must be a name or a tuple of names, got 1"),
        (
            *(PAIR, T, {"output_dims": {"a": (), "b": (), "c": ()}}),
            "the output_dims of output has an entry for output['c'], which is absent",
        ),
        # Arrays that cannot be taken.
        (profile, T.astype("float64"), {}, "t is an array of dtype float64, but JAX computes with"),
        (profile, T.values, {}, "t has shape (3, 4, 5)"),
        (NOTHING, T, {}, "the kernel returns no array"),
        (NO_RANK, T, {}, "t is an xarray object, but it has no rank; give it one, or pass its val"),
        # Dimensions to reduce.
        (profile, T, {"reduce_dims": "time"}, "reduce_dims='time' needs a kernel with the option"),
        (TOTAL, T, {}, "profile has reduce_axis=0, but the batch dimensions have names"),
        (
            TOTAL,
            BOTH,
            {"reduce_dims": "time"},
            "t['cold'] lacks the reduced dimension 'time',",
        ),
        (TOTAL, T, {"reduce_dims": "level"}, "reduce_dims names 'level', which is not a batch dim"),
    ],
)
def test_what_is_refused(kernel, t, options, text):
    begin = re.escape(f"rankax.xarray.apply({kernel.__name__}): {text}")
    with pytest.raises((TypeError, ValueError), match=f"^{begin}"):
        rankax.xarray.apply(kernel, P, t, **options)


@pytest.mark.parametrize("labels", [np.arange(6), np.arange(4)], ids=["longer", "other labels"])
def test_one_dimension_of_two_that_the_kernel_tells_apart(labels):
    kernel = auto_vmap(a="n", b="m")(lambda a, b: jnp.sum(a) * jnp.max(b))
    x = xr.DataArray(np.ones((3, 4), "float32"), dims=("b", "t"), coords={"t": np.arange(4) + 1})
    y = xr.DataArray(np.full((3, len(labels)), 2, "float32"), dims=("b", "t"), coords={"t": labels})
    got = rankax.xarray.apply(kernel, x, y, core_dims="t")
    assert (got.dims, got.values.tolist()) == (("b",), [8.0, 8.0, 8.0])


def test_an_output_may_be_shorter_than_its_dimension():
    x = xr.DataArray(np.arange(12.0, dtype="float32").reshape(3, 4) ** 2, dims=("b", "t"))
    x = x.assign_coords(t=np.arange(4), b=[1, 2, 3])
    got = rankax.xarray.apply(auto_vmap(a="t")(jnp.diff), x, output_dims="t")
    assert got.dims == ("b", "t")
    assert [*got.coords] == ["b"]
    np.testing.assert_array_equal(got, np.diff(x.values))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: rankax.xarray.apply(TRACE, T.rename(x="n")),
            "no xarray object has two dim",
        ),
        (lambda: rankax.xarray.apply(profile, P.values, P.values), "no argument with a rank is a "),
        (lambda: rankax.xarray.apply(len, P), "kernel must be decorated with rankax.auto_vmap"),
        (lambda: profile(P, T), "p is an xarray object; call rankax.xarray.apply(profile, ...)"),
    ],
)
def test_calls_of_another_kind_are_refused(call, text):
    assert text in refusal((TypeError, ValueError), call)


def test_a_compiled_kernel_is_traced_once_for_the_same_shapes():
    traces = []

    @auto_vmap(x="n", w=0, jit=True)
    def weighted(x, w, power):
        traces.append(x.shape)
        return {"sum": jnp.sum(x**power), "x": jnp.full(power, w)}

    def call(power, dtype="float32", n=3):
        x = xr.DataArray(np.arange(4 * n, dtype=dtype).reshape(4, n), dims=("t", "n"))
        return rankax.xarray.apply(weighted, x, 2.0, power, output_dims={"sum": (), "x": "p"})

    want = call(2)
    traces.clear()
    xr.testing.assert_identical(call(2), want)
    assert not traces
    assert call(3)["x"].shape == (4, 3)  # a static value decides
    assert call(2, n=5)["sum"].shape == (4,)
    assert len(traces) == 4  # for shapes and for values
    np.testing.assert_array_equal(call(2, "int32")["sum"], want["sum"])


def test_batch_axes_with_names_are_dimensions():
    @auto_vmap(t="time | level", w="x |", reduce="sum", over="x")
    def weighted(t, w):
        return jnp.sum(t) * w

    t = T.isel(x=0, drop=True)
    got = rankax.xarray.apply(weighted, t.transpose("level", "time"), W)
    assert got.dims == ("time",)
    np.testing.assert_allclose(got, np.sum(t, 1) * np.sum(W), rtol=1e-5)
    kept = rankax.xarray.apply(weighted, t, W, reduce_dims="time")
    np.testing.assert_allclose(kept, weighted.with_options(over="time")(t.values, W.values))
    np.testing.assert_allclose(rankax.xarray.apply(weighted, t.chunk(time=1), W), got)
    text = refusal(ValueError, rankax.xarray.apply, weighted, t, W.rename(x="station"))
    assert text == (
        "rankax.xarray.apply(weighted): w has rank \"x |\", but not the dimension 'x': it has "
        "'station'; rename one"
    )


HOURS = np.arange(6.0)
CLIMATE = xr.Dataset(
    {
        "t2m": (("time", "x"), np.outer(HOURS, [1.0, 2.0]) + 280, {"units": "K"}),
        "sst": (("x", "time"), np.outer([3.0, 4.0], HOURS), {"units": "K", "long_name": "sea"}),
        "mask": (("x",), [0.0, 1.0]),
    },
    {"time": HOURS, "x": [10, 20]},
)


@auto_vmap(y="x | time", t="time")
def fitted(y, t):
    slope, start = jnp.polyfit(t, y, 1)
    return {"trend": slope, "line": jnp.stack([slope, start])}


def fit(**given):
    data = CLIMATE[["t2m", "sst"]]
    given = {"dtype": "float32", "output_dims": {"trend": (), "line": "degree"}, **given}
    return rankax.xarray.apply(fitted, data, data.time, **given)


def test_one_dataset_of_all_variables_and_outputs():
    got = fit(to="dataset", output_coords={"degree": [1, 0]})
    assert {*got.data_vars} == {"t2m_trend", "sst_trend", "t2m_line", "sst_line"}
    np.testing.assert_allclose(got.sst_trend, [3, 4], rtol=1e-3)
    np.testing.assert_array_equal(got.degree, [1, 0])
    np.testing.assert_array_equal(got.x, [10, 20])
    assert got.t2m_line.dims == ("x", "degree")
    assert all(v.dtype == np.float32 for v in got.data_vars.values())
    assert "units" not in got.sst_trend.attrs
    assert CLIMATE.sst.attrs["units"] == "K"
    with xr.set_options(keep_attrs=True):
        assert fit(to="dataset").sst_trend.attrs == {"units": "K", "long_name": "sea"}
    lazy = rankax.xarray.apply(
        fitted,
        CLIMATE.t2m.chunk(x=1),
        CLIMATE.time,
        dtype="float32",
        to="dataset",
        output_dims={"trend": (), "line": "degree"},
    )
    assert {*lazy.data_vars} == {"trend", "line"}
    assert lazy.chunks["x"] == (1, 1)
    np.testing.assert_allclose(lazy.trend.compute(), [1, 2], rtol=1e-3)


def test_one_array_and_a_tuple_as_a_dataset():
    mean = auto_vmap(y="time")(lambda y: jnp.mean(y))
    one = rankax.xarray.apply(mean, CLIMATE.mask.rename(x="time"), dtype="float32", to="dataset")
    assert {*one.data_vars} == {"mask"}
    two = auto_vmap(y="time")(lambda y: (jnp.min(y), jnp.max(y)))
    got = rankax.xarray.apply(two, CLIMATE[["t2m"]], dtype="float32", to="dataset")
    assert {*got.data_vars} == {"t2m_0", "t2m_1"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtype": "int32"}, "dtype must be one of floats, such as 'float32', got 'int32'"),
        ({"to": "array"}, "to must be 'dataset' or None, got 'array'"),
        ({"output_coords": {"n": [1]}}, "output_coords names 'n', but the core dimensions of out"),
        ({"output_coords": [1]}, "output_coords must map dimensions of outputs to coordinates"),
        ({"dtype": None}, "is an array of dtype float64, but JAX computes with float32"),
    ],
)
def test_wrong_outputs_are_refused(given, text):
    assert text in refusal((TypeError, ValueError), fit, **given)


def test_a_variable_without_the_core_dimension_is_left_out():
    text = refusal(ValueError, rankax.xarray.apply, fitted, CLIMATE, CLIMATE.time, dtype="float32")
    assert text == (
        "rankax.xarray.apply(fitted): y['mask'] lacks the core dimension 'time', which other "
        "variables of y have; leave it out: y[['t2m', 'sst']]"
    )
