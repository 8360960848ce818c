# SPDX-License-Identifier: MIT
"""``rankax.xarray.apply`` beside the same kernel called with bare arrays, axes in order."""

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


WANTED = mean(P.values, bare(T, "time", "x", "level"), W.values)


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def chunked(x, **chunks):
    return x.chunk(chunks)


@pytest.mark.parametrize("t", [T, T.transpose("level", "x", "time"), T.chunk(time=1, x=2)])
def test_dimensions_are_found_in_any_order(t):
    got = rankax.xarray.apply(mean, P, t, W)
    assert isinstance(got.data, da.Array if t.chunks else np.ndarray)
    assert got.dtype == np.float32
    np.testing.assert_allclose(bare(got, "time", "x"), WANTED, rtol=1e-5)
    assert list(got.coords) == ["time"]
    assert "level" not in got.dims


def test_a_kernel_with_buckets():
    compiled = mean.with_options(jit=True, bucket=True)
    got = rankax.xarray.apply(compiled, P, T, W)
    np.testing.assert_allclose(bare(got, "time", "x"), WANTED, rtol=1e-5)


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


def test_each_variable_of_a_dataset():
    dataset = xr.Dataset({"t": T, "u": 2 * T})
    got = rankax.xarray.apply(mean, P, dataset, W)
    assert isinstance(got, xr.Dataset)
    assert list(got.data_vars) == ["t", "u"]
    np.testing.assert_allclose(bare(got["u"], "time", "x"), 2 * WANTED, rtol=1e-5)


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
        moved, {"r": r, "t": t}, v, core_dims={"pose['t']": "row"}, output_dims="row"
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

    got = rankax.xarray.apply(Air().density, T, p=500.0)
    np.testing.assert_allclose(got, 500 / (287 * T.values), rtol=1e-5)


@pytest.mark.parametrize("t", [T, T.chunk(time=1, x=2)], ids=["numpy", "dask"])
@pytest.mark.parametrize("dims", [None, "time", ("x", "time")])
def test_reduced_dimensions_are_named(t, dims):
    kernel = mean.with_options(reduce="argmax")
    got = rankax.xarray.apply(kernel, P, t, W, reduce_dims=dims)
    whole = np.asarray(WANTED)
    want = {
        None: whole.argmax(),
        "time": whole.argmax(0),
        ("x", "time"): whole.T.argmax(),
    }[dims]
    np.testing.assert_array_equal(got, want)
    assert got.dims == (("x",) if dims == "time" else ())


def test_what_is_kept_of_a_reduction_keeps_the_dimensions():
    kernel = auto_vmap(p="level", t="level", reduce={"best": BottomK(2), "all": None})(
        lambda p, t: {"best": p @ t, "all": t[0]}
    )
    got = rankax.xarray.apply(
        kernel,
        P,
        T.chunk(time=1),
        reduce_dims="time",
        output_dims={"best": "rank", "all": None},
    )
    assert got["all"].dims == ("x", "time")
    assert got["best_values"].dims == ("x", "rank")
    dots = bare(T, "x", "time", "level") @ P.values
    np.testing.assert_allclose(got["best_values"], np.sort(dots, -1)[:, :2], rtol=1e-5)
    np.testing.assert_allclose(got["all"], bare(T, "x", "time", "level")[..., 0])


# Errors.

WHERE = "rankax.xarray.apply"


def refused(error, *args, **kwargs):
    return refusal(error, rankax.xarray.apply, *args, **kwargs)


def test_a_core_dimension_that_is_absent_ambiguous_or_cut():
    high = T.rename(level="height")
    assert refused(ValueError, profile, P, high) == (
        f"{WHERE}(profile): for t, rank \"level\" declares the core dimension 'level', which is "
        "absent: t has the dimensions 'time', 'height' and 'x'; rename one, or write "
        "core_dims={'t': ('x',)}"
    )
    assert refused(ValueError, auto_vmap(1, 1, 0)(mean.__wrapped__), P, T, W) == (
        f"{WHERE}(mean): p has rank 1, which does not name its core axes, and p has the dimensions "
        "'level'; name the core dimensions in order: core_dims={'p': ('level',)}"
    )
    assert refused(ValueError, profile, P, T.chunk(level=2)) == (
        f"{WHERE}(profile): t is cut into 2 chunks along its core dimension 'level', and one item "
        "needs all of it; pass t.chunk({'level': -1})"
    )
    trace = auto_vmap("n n")(jnp.trace)
    assert refused(ValueError, trace, T.rename(x="n")) == (
        f'{WHERE}(trace): a has rank "n n", but no xarray object has two dimensions of one name; '
        "name the core dimensions: core_dims={'a': ('level', 'n')}"
    )


def test_wrong_names():
    assert refused(ValueError, profile, P, T, core_dims={"t": "lev"}) == (
        f"{WHERE}(profile): for t, core_dims names the core dimension 'lev', which is absent: t "
        "has the dimensions 'time', 'level' and 'x'; rename one, or write "
        "core_dims={'t': ('level',)}"
    )
    assert refused(ValueError, profile, P, T, core_dims={"t": ("level", "x")}) == (
        f'{WHERE}(profile): t has rank "level", that is 1 core axis, but core_dims names 2 '
        "dimensions: level and x"
    )
    assert refused(TypeError, profile, P, T, core_dims=["level"]) == (
        f"{WHERE}(profile): core_dims must be a name, or a dict from parameters to names, as in "
        "{'p': ('level',)}, got list ['level']"
    )
    assert refused(ValueError, mean, P, T, W, core_dims="level") == (
        f'{WHERE}(mean): w has rank "", that is 0 core axes, but core_dims names 1 dimension: level'
    )
    unnamed = auto_vmap(p="level", t="level")(lambda p, t: t[:2])
    assert refused(ValueError, unnamed, P, T) == (
        f"{WHERE}(<lambda>): output has 1 core axis, but no names; write output_dims=('dim0',)"
    )
    assert refused(ValueError, unnamed, P, T, output_dims=("a", "b")) == (
        f"{WHERE}(<lambda>): output has 1 core axis, but output_dims names 2 dimensions: a and b"
    )
    assert refused(ValueError, unnamed, P, T, output_dims="x") == (
        f"{WHERE}(<lambda>): output has the core dimension 'x', which is a batch dimension of the "
        "arguments; give it another name by output_dims"
    )
    assert refused(TypeError, profile, P, T, output_dims=1) == (
        f"{WHERE}(profile): output_dims must be a name or a tuple of names, got 1"
    )
    pair = auto_vmap(p="level", t="level")(lambda p, t: {"a": p[0], "b": t[0]})
    assert refused(ValueError, pair, P, T, output_dims={"a": (), "b": (), "c": ()}) == (
        f"{WHERE}(<lambda>): the output_dims of output has an entry for output['c'], which is "
        "absent"
    )
    scalar = auto_vmap(p="level", t="")(lambda p, t: p.sum() * t)
    assert refused(ValueError, scalar, P, T) == (
        f"{WHERE}(<lambda>): 'level' is a core dimension of p, but a batch dimension of t, whose "
        'rank is ""; rename it in one of them, or declare it as core in both'
    )


def test_arrays_that_cannot_be_taken():
    assert refused(TypeError, profile, P, T.astype("float64")) == (
        f"{WHERE}(profile): t is an array of dtype float64, but JAX computes with float32 by "
        "default, which would silently lose digits; call jax.config.update("
        '"jax_enable_x64", True) first, or convert t to float32'
    )
    assert refused(TypeError, profile, P, T.values) == (
        f'{WHERE}(profile): t has shape (3, 4, 5) and rank "level", so it has batch axes, but they '
        "have no names; pass an xarray.DataArray"
    )
    assert refused(TypeError, profile, P.values, P.values) == (
        f"{WHERE}(profile): no argument with a rank is a DataArray or a Dataset; call profile "
        "itself"
    )
    assert refused(TypeError, auto_vmap(p="level", t="level")(lambda p, t: ()), P, T) == (
        f"{WHERE}(<lambda>): the kernel returns no array"
    )
    assert refused(TypeError, auto_vmap(p="level", t=None)(lambda p, t: p), P, T) == (
        f"{WHERE}(<lambda>): t is an xarray object, but it has no rank; give it one, or pass "
        "its values"
    )
    assert refused(TypeError, len, P).startswith(
        f"{WHERE}: kernel must be decorated with rankax.auto_vmap, got <built-in"
    )
    with pytest.raises(TypeError) as info:
        profile(P, T)
    assert str(info.value) == (
        "profile(): p is an xarray object; call rankax.xarray.apply(profile, ...), which finds "
        "the core dimensions by name, or pass its .data"
    )


def test_reduced_dimensions_that_cannot_be():
    assert refused(TypeError, profile, P, T, reduce_dims="time") == (
        f"{WHERE}(profile): reduce_dims='time' needs a kernel with the option reduce"
    )
    total = profile.with_options(reduce="sum", reduce_axis=0)
    assert refused(ValueError, total, P, T) == (
        f"{WHERE}(profile): profile has reduce_axis=0, but the batch dimensions have names; name "
        "those to reduce: reduce_dims=('x',)"
    )
    both = xr.Dataset({"warm": T, "cold": T.isel(time=0, drop=True)})
    assert refused(ValueError, total, P, both, reduce_dims="time") == (
        f"{WHERE}(profile): the reduced dimensions of t['cold'] are none, but those of the other "
        "variables are time"
    )
    assert refused(ValueError, total, P, T, reduce_dims="level") == (
        f"{WHERE}(profile): reduce_dims names 'level', which is not a batch dimension; these are "
        "'time' and 'x'"
    )
