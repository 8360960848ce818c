# SPDX-License-Identifier: MIT
"""Kernels called with arrays of dask and cubed, beside the same kernels called with NumPy's."""

import importlib
import pickle
import re
import subprocess
import sys
import threading
from typing import NamedTuple

import cubed
import dask
import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import rankax
from helpers import assert_same, refusal, slow
from rankax import BatchShapeError, CoreDimensionError, Ragged, RankError, SplitKey, auto_vmap
from rankax.reductions import Best, BottomK, Fold, Gram, Moments, Several, TopK

RNG = np.random.default_rng(0)
S = RNG.normal(size=(4, 1)).astype("float32")
V = RNG.normal(size=(5, 3)).astype("float32")
M = RNG.normal(size=(4, 5, 3, 3)).astype("float32")

PACKAGES = ["dask", "cubed"]


def in_blocks(package, x, chunks):
    return {"dask": da, "cubed": cubed}[package].from_array(x, chunks=chunks)


def computed(tree):
    """The values of a tree of arrays in blocks, all of which are what they said."""
    leaves, treedef = jax.tree.flatten(tree)
    with dask.config.set(scheduler="synchronous"):
        values = [leaf.compute() for leaf in leaves]
    for leaf, value in zip(leaves, values, strict=True):
        assert isinstance(leaf, (da.Array, cubed.Array))
        assert isinstance(value, np.ndarray)
        assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype)
    return treedef.unflatten(values)


def plus(x, y):
    return x + y


add = auto_vmap(x=0, y=0)(plus)
double = auto_vmap(x=0)(lambda x: 2 * x)


class Pair(NamedTuple):
    norm: Array
    parts: dict


def energy(s, v, m):
    return v @ m @ v + s, Pair(jnp.abs(s) * 2, {"v": v[:2] * s, "n": jnp.argmax(v)})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_tree_of_outputs_in_blocks_is_that_of_numpy(package):
    kernel = auto_vmap(s=0, v=1, m=2)(energy)
    m = in_blocks(package, M, (3, 2, 3, 3))
    v = in_blocks(package, V, (2, 3))
    got = kernel(jnp.asarray(S), v, m)
    assert [type(x).__module__.split(".")[0] for x in jax.tree.leaves(got)] == [package] * 4
    assert got[0].chunks == ((3, 1), (2, 2, 1))
    assert_same(computed(got), kernel(S, V, M))


@pytest.mark.parametrize("scale", [2.0, np.float64(2), jnp.float32(2)])
def test_a_number_is_as_weak_as_in_every_call(scale):
    scaled = auto_vmap(x=0, by=0)(lambda x, by: x * by)
    x = np.arange(4, dtype="float16")
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        want = scaled(x, scale)
        assert_same(computed(scaled(da.from_array(x, chunks=3), scale)), want)


def test_a_large_array_of_numpy_goes_along():
    weights = np.arange(400_000.0, dtype="float32").reshape(4, 100_000)
    total = auto_vmap(x=0, w=1)(lambda x, w: x * w.sum())
    x = np.arange(4, dtype="float32")
    assert_same(computed(total(da.from_array(x, 2), weights)), total(x, weights))


def forbidden(block, block_info=None):
    raise AssertionError("computed too early")


def test_only_one_item_is_traced_to_know_the_outputs():
    shapes = []

    @auto_vmap(v=1)
    def norm(v):
        shapes.append(v.shape)
        return jnp.sqrt(v @ v), v[:2]

    v = da.from_array(V, chunks=(2, 3)).map_blocks(
        forbidden, dtype=np.float32, meta=np.empty((0, 0), np.float32)
    )
    lengths, heads = norm(v)
    assert shapes == [(3,)]
    assert (lengths.shape, lengths.dtype) == ((5,), np.float32)
    assert (heads.shape, heads.chunks) == ((5, 2), ((2, 2, 1), (2,)))
    with pytest.raises(AssertionError, match="computed too early"):
        lengths.compute(scheduler="synchronous")


TRACES = []


@auto_vmap(v=1)
def counted(v):
    TRACES.append(1)
    return v @ v


def test_a_kernel_is_compiled_once_for_all_blocks_and_calls():
    TRACES.clear()
    x = np.ones((12, 3), "float32")
    lazy = counted(da.from_array(x, chunks=(3, 3)))
    assert len(TRACES) == 1  # for the shapes
    computed(lazy)
    assert len(TRACES) == 2  # for the four blocks
    computed(counted(da.from_array(x + 1, chunks=(3, 3))))
    assert len(TRACES) == 3  # for the shapes again; the program is found


def test_the_bound_on_memory_holds_in_a_block():
    lengths = []

    def squared(v):
        lengths.append(v.shape[0])
        return np.sum(v * v, axis=-1)

    @auto_vmap(v=1)
    def norm(v):
        return jax.pure_callback(squared, v[0], v, vmap_method="expand_dims")

    with rankax.options(chunk_size=2):
        lazy = norm(da.from_array(V[:4], chunks=(4, 3)))
    # The scope has ended, but its options hold for the blocks.
    np.testing.assert_allclose(computed(lazy), np.sum(V[:4] ** 2, -1), rtol=1e-6)
    assert lengths == [2, 2]


NAMES = ("sum", "prod", "max", "min", "argmin", "any", "all", "logsumexp", "gram")
OBJECTS = (Moments(), Gram(center=True), BottomK(2), TopK(3))
SOME, OTHERS = Several("mean", "argmax"), Several(*NAMES, *OBJECTS)


def output(s, v, m):
    return v @ m @ v + s * v


@pytest.mark.parametrize(
    ("reduce", "axis", "chunk_size"),
    [(SOME, (0, 1), 2), slow(SOME, 0, None), slow(OTHERS, (0, 1), 2)],
)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_reduction_over_blocks_is_that_of_numpy(package, reduce, axis, chunk_size):
    options = {"reduce": reduce, "reduce_axis": axis, "chunk_size": chunk_size}
    kernel = auto_vmap(s=0, v=1, m=2, **options)(output)
    got = kernel(S, in_blocks(package, V, (2, 3)), in_blocks(package, M, (1, 2, 3, 3)))
    assert_same(computed(got), kernel(S, V, M), rtol=1e-4)


def test_a_tree_of_reductions_keeps_what_it_is_told_to():
    def hit(s, v, m):
        return {"all": s * v, "best": {"by": v @ m @ v, "v": v}, "sum": (s, v.sum())}

    reduce = {"all": None, "best": Best("by"), "sum": "sum"}
    kernel = auto_vmap(s=0, v=1, m=2, reduce=reduce, reduce_axis=1)(hit)
    got = kernel(S, da.from_array(V, chunks=(2, 3)), da.from_array(M, chunks=(3, 2, 3, 3)))
    assert_same(computed(got), kernel(S, V, M))


def test_items_that_count_over_blocks():
    """One block has none."""

    def root(s, v, m):
        out = output(s, v, m)
        return {"a": jnp.sqrt(out), "ok": jnp.all(out > 0) & (s < 0.5)}

    s = np.linspace(-1, 1, S.size, dtype="float32").reshape(S.shape)
    options = {"reduce": {"a": SOME, "ok": None}, "where": "ok", "chunk_size": 2}
    kernel = auto_vmap(s=0, v=1, m=2, **options)(root)
    got = kernel(s, da.from_array(V, chunks=(2, 3)), da.from_array(M, chunks=(1, 2, 3, 3)))
    assert_same(computed(got), kernel(s, V, M), rtol=1e-4)


CASES = {
    "ties": np.zeros((6, 7), "float32"),
    "nan": np.where(np.eye(6, 7, 3) > 0, np.nan, 1.0).astype("float32"),
    "lowest": np.full((6, 7), np.iinfo(np.int32).min, "int32"),
}


EACH = Several("argmin", "argmax", BottomK(5), TopK(12))
winners = auto_vmap(x=0, reduce=EACH)(lambda x: x)


@pytest.mark.parametrize("case", ["ties", "nan", slow("lowest")])
def test_of_equals_the_first_in_the_whole_wins(case):
    x = CASES[case]
    # Blocks of four items in two rows: the items of one are between those of another.
    assert_same(computed(winners(da.from_array(x, chunks=(2, 2)))), jax.jit(winners)(x))


def affine(x):
    return {"a": jnp.array([[x, 1.0], [0.0, 1.0]])}


PRODUCT = Fold({"a": jnp.asarray(np.eye(2))}, lambda out: out, lambda f, g: {"a": f["a"] @ g["a"]})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_fold_merges_blocks_in_their_order(package):
    x = np.linspace(0.5, 1.5, 30, dtype="float32").reshape(10, 3)
    kernel = auto_vmap(x=0, reduce=PRODUCT, chunk_size=4)(affine)
    want = kernel(x)
    reversed_ = kernel(x[::-1, ::-1])
    assert not np.allclose(want["a"], reversed_["a"])  # the order shows
    assert_same(computed(kernel(in_blocks(package, x, (1, 3)))), want, rtol=1e-4)
    assert refusal(ValueError, lambda: kernel(in_blocks(package, x, (10, 2)))) == (
        "affine(): Fold merges items in order, so only the first of the reduced axes can be cut, "
        "but batch axis 1 has chunks (2, 1); rechunk it to one chunk"
    )


def test_empty_blocks_batches_and_outputs():
    x = np.arange(6, dtype="float32")
    empty = da.from_array(x, chunks=((4, 0, 2),))
    some = double.with_options(reduce=Several("sum", "argmin", BottomK(2)))
    assert_same(computed(some(empty)), some(x))
    assert_same(computed(double(empty)), double(x))
    total = double.with_options(reduce="sum")
    assert_same(computed(total(da.from_array(x[:0]))), total(x[:0]))
    none = auto_vmap(v=1, reduce="sum")(lambda v: v[:0])
    assert_same(computed(none(da.from_array(V, chunks=(2, 3)))), none(V))


def test_dask_arrays_are_cut_where_any_is():
    x = np.arange(10.0, dtype="float32")
    got = add(da.from_array(x, chunks=4), da.from_array(x, chunks=5))
    assert got.chunks == ((4, 1, 3, 2),)
    assert_same(computed(got), add(x, x))


def test_each_item_has_its_own_key():
    keys = jax.random.split(jax.random.key(0), (4, 1))
    draw = auto_vmap(key=0, x=0)(lambda key, x: x + jax.random.normal(key))
    x = np.arange(6, dtype="float32")
    assert_same(computed(draw(keys, da.from_array(x, chunks=2))), draw(keys, x))
    with pytest.raises(TypeError, match="is a PRNG key, which no array in blocks can hold"):
        auto_vmap(key=0, x=0)(lambda key, x: key)(keys, da.from_array(x, chunks=2))


def test_blocks_are_computed_as_jax_was_set_at_the_call():
    x = np.linspace(0, 1, 6)
    third = auto_vmap(x=0)(lambda x: x / 3)
    with jax.enable_x64(True):
        lazy = third(da.from_array(x, chunks=2))
    value = computed(lazy)
    assert value.dtype == np.float64
    np.testing.assert_allclose(value, x / 3, rtol=1e-12)
    assert refusal(TypeError, third, da.from_array(x, chunks=2)).startswith(
        "<lambda>(): x is a dask array of dtype float64, but JAX computes with float32 by default"
    )


def test_other_byte_orders_are_read():
    x = np.arange(6, dtype=">f4")
    assert_same(computed(double(da.from_array(x, chunks=4))), double(x.astype("float32")))


def add_in_place(block):
    block += 1
    return block


def test_a_later_step_may_write_into_a_block():
    x = double(da.ones(3, chunks=3, dtype="float32"))
    assert computed(x.map_blocks(add_in_place, dtype=x.dtype)).tolist() == [3, 3, 3]


@auto_vmap(v=1, by=0, reduce="sum")
def scaled(v, by):
    TRACES.append(1)
    return v @ v * by


def test_a_program_is_found_again_by_its_pickle():
    x = da.from_array(V, chunks=(2, 3))
    lazy, equal, other = scaled(x, 2.0), scaled(x, 2.0), scaled(x, 3.0)
    assert lazy.name == equal.name != other.name
    computed(lazy)
    TRACES.clear()
    assert_same(computed(pickle.loads(pickle.dumps(lazy))), np.sum(V * V) * 2, rtol=1e-6)
    assert_same(computed(equal), np.sum(V * V) * 2, rtol=1e-6)
    assert_same(computed(other), np.sum(V * V) * 3, rtol=1e-6)
    assert TRACES == []


def test_a_kernel_that_nothing_can_pickle_works_in_this_process():
    kernel = auto_vmap(v=1, lock=None)(lambda v, lock: v @ v)
    lazy = kernel(da.from_array(V, chunks=(2, 3)), threading.Lock())
    assert_same(computed(lazy), np.sum(V * V, 1))


# Errors.

NORM = auto_vmap(v="n 3", w="n")(lambda v, w: w @ v)
W = np.ones(2, "float32")


def test_core_axes_that_are_cut_and_wrong_shapes():
    v = da.ones((4, 2, 3), chunks=(4, 1, 3), dtype="f4")
    assert refusal(ValueError, NORM, v, W) == (
        '<lambda>(): v has shape (4, 2, 3) and rank "n 3", but its core axis 1 is cut into 2 '
        "chunks, and one item needs all of it; pass v.rechunk({1: 2})"
    )
    few = refusal(RankError, NORM, da.ones(3, dtype="f4"), W)
    assert 'v         (3,)   "n 3"  too few axes' in few
    v = da.ones((4, 2, 3), chunks=(2, 2, 3), dtype="f4")
    long, batch = np.ones(5, "f4"), np.ones((3, 2), "f4")
    assert "the core dimensions disagree" in refusal(CoreDimensionError, NORM, v, long)
    assert "do not broadcast" in refusal(BatchShapeError, NORM, v, batch)


X = da.from_array(np.arange(6, dtype="float32"), chunks=3)
JITTED = double.with_options(jit=True)
X_AND_Y = auto_vmap(x="n", y=0)(lambda x, y: y)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: NORM(da.ones((2, 3), dtype="M8[s]"), W), "v is a dask array of dtype datetime64"),
        (lambda: double(X[X > 2]), "x is a dask array of unknown length along axis 0; call x."),
        (lambda: auto_vmap(0, None)(plus)(X, [X]), "y[0] is a dask array, but it has no rank, so"),
        (lambda: add(X, cubed.ones(6, dtype="f4")), "x is a dask array and y is a cubed array"),
        (lambda: X_AND_Y(Ragged(V[:, 0], [3, 2]), X[:2]), "x is Ragged, which goes with arrays of"),
        (lambda: X_AND_Y(Ragged(X, [4, 2]), 3.0), "x is Ragged, which goes with arrays of JAX and"),
        (
            lambda: double.with_options(progress="mean")(X),
            "progress='mean' cannot be reported from",
        ),
        (
            lambda: double.with_options(jit=True, bucket=True)(X),
            "bucket=True pads the arrays of a call, but dask evaluates each block at its own",
        ),
        *(
            (lambda what=what: getattr(JITTED, what)(X), "x is a dask array, whose blocks only a")
            for what in ("plan", "tune", "lower")
        ),
    ],
)
def test_what_blocks_are_refused(call, text):
    with pytest.raises((TypeError, ValueError), match=rf"^(<lambda>|plus)\(\): {re.escape(text)}"):
        call()


def test_cubed_is_told_of_the_memory_limit():
    x = cubed.ones(6, chunks=3, dtype=np.float32, spec=cubed.Spec(allowed_mem="1 GB"))
    for reduce in (None, "sum"):
        own = double.with_options(reduce=reduce)
        computed(own.with_options(memory_limit="50%")(x))
        message = refusal(ValueError, own.with_options(memory_limit="2 GB")(x).compute)
        assert "exceeds allowed_mem" in message


def test_cubed_arrays_that_are_cut_differently():
    x = np.arange(10.0, dtype="float32")
    blocks = cubed.from_array(x, chunks=4), cubed.from_array(x, chunks=5)
    assert refusal(ValueError, add, *blocks) == (
        "plus(): along batch axis 0, x has chunks of 4 and y of 5, and cubed would have to store "
        "one of them again; rechunk one of them"
    )


def test_more_items_than_an_int_can_number():
    x = da.ones(2**31, chunks=2**28, dtype="float32")
    same = auto_vmap(x=0)(lambda x: x)
    assert same.with_options(reduce="sum")(x).shape == ()
    count = same.with_options(reduce=Moments())(x).count
    assert (count.shape, count.dtype) == ((), np.float32)
    text = refusal(ValueError, same.with_options(reduce="argmax"), x)
    assert "cannot be reduced by argmax: the indices of 2147483648 items need 64 bits; call" in text


# What else is promised.


def test_the_signature_has_declared_and_generated_names():
    def dot(v: Float[Array, "n 3"], w: Float[Array, "n+1 _"]) -> Float[Array, "3"]:
        return v[0]

    assert auto_vmap(dot).signature == "(n,3),(w_0,w_1)->(3)"
    assert auto_vmap(2, 2)(dot).signature == "(v_0,v_1),(w_0,w_1)->(3)"
    assert auto_vmap("(n,3),(n)->(),(n)")(lambda a, b: (a, b)).signature == "(n,3),(n)->(),(n)"
    assert auto_vmap(1)(lambda v: v).signature is None
    kernel = auto_vmap("(n),(n)->()")(lambda a, b: a @ b)
    lazy = da.apply_gufunc(kernel, kernel.signature, V, V, output_dtypes=np.float32)
    np.testing.assert_allclose(lazy.compute(), np.sum(V * V, 1), rtol=1e-6)


@pytest.mark.slow
def test_no_package_is_imported_before_its_arrays_come():
    code = (
        "import sys, jax.numpy as jnp, rankax\n"
        "assert float(rankax.auto_vmap(1)(lambda v: v @ v)(jnp.ones(3))) == 3\n"
        "assert not {'dask', 'cubed', 'xarray', 'zarr'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_xarray_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "rankax.xarray", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(ImportError, lambda: importlib.import_module("rankax.xarray")) == (
        "rankax.xarray needs xarray, which is not installed: pip install xarray"
    )


def test_a_key_that_would_be_split_in_each_block_is_refused():
    """Each block would count its items from 0, and all would draw the same."""
    draw = auto_vmap(x=0, key=SplitKey)(lambda x, key: x + jax.random.normal(key))
    key, x = jax.random.key(0), np.arange(6, dtype=np.float32)
    blocks = da.from_array(x, 2)
    assert refusal(TypeError, draw, blocks, key) == (
        "<lambda>(): key has the rank SplitKey, but dask evaluates block by block, and each "
        "block would count its items from 0 and draw the same numbers; pass a key for each item: "
        "jax.random.split(key, (6,))"
    )
    assert_same(jnp.asarray(draw(blocks, jax.random.split(key, 6)).compute()), draw(x, key))
    with pytest.raises(TypeError, match="wrap_key_data"):
        draw(blocks, jax.random.PRNGKey(0))


@pytest.mark.parametrize("package", PACKAGES)
def test_kernels_that_take_a_batch(package):
    kernel = auto_vmap(1, chunk_size=2, batched=True)(lambda v: jnp.cumsum(v, axis=1))
    for each in (kernel, kernel.with_options(reduce="sum")):
        assert_same(computed(each(in_blocks(package, V, (3, 3)))), each(V))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "given", [{}, {"reduce": "sum", "over": "j"}, {"reduce": "argmax"}], ids=str
)
def test_batch_axes_with_names(package, given):
    def gauss(x, y, w):
        return w * jnp.exp(-jnp.sum((x - y) ** 2))

    kernel = auto_vmap(x="i | 3", y="j | 3", w="j |", **given)(gauss)
    y = RNG.normal(size=(4, 3)).astype("float32")
    x, w = in_blocks(package, V, (2, 3)), in_blocks(package, S[:, 0], (3,))
    assert_same(computed(kernel(x, y, w)), jax.tree.map(np.asarray, kernel(V, y, S[:, 0])))
    with pytest.raises(BatchShapeError, match="Batch axis j is 5 "):
        kernel(x, V, w)
