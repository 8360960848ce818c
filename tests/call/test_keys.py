# SPDX-License-Identifier: MIT
"""`SplitKey`: keys and draws of each item are those of `jax.random.split`, however it is walked."""

import functools
from typing import Annotated, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Key, PRNGKeyArray

from helpers import assert_same, compilations, refusal, slow, temporary_bytes
from rankax import SplitKey, auto_vmap
from rankax.reductions import Best, BottomK

KEY = jax.random.key(5)
BATCH = (3, 5)
X = jnp.asarray(np.arange(15.0).reshape(BATCH) / 15)
ROWS = jnp.asarray(np.arange(92.0).reshape(4, 23) / 92)


def noisy(x, key):
    """A draw, and the key that it is from."""
    return x + jax.random.normal(key), key


@functools.partial(jax.jit, static_argnums=1)
def own_keys(keys, batch):
    """What is meant: each of ``keys`` is split over the axes that they lack, and used as it is."""
    keys = keys.reshape((1,) * (len(batch) - keys.ndim) + keys.shape)
    lacking = [axis for axis, size in enumerate(batch) if keys.shape[axis] != size]
    split = functools.partial(jax.random.split, num=[batch[axis] for axis in lacking])
    keys = keys.squeeze(lacking)
    for _ in range(keys.ndim):
        split = jax.vmap(split)
    return jnp.moveaxis(split(keys), range(keys.ndim, len(batch)), lacking) if lacking else keys


draw_each = jax.jit(jax.vmap(jax.vmap(noisy)))


# The same keys and draws, however many items are in flight.


@pytest.mark.parametrize(
    ("options", "chunk_size"),
    [({}, 7), ({"checkpoint": False}, 7), slow({"jit": True}, 100)],
    ids=str,
)
def test_items_draw_what_split_keys_draw(chunk_size, options):
    keys = jax.random.split(KEY, (4, 23))
    mapped = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size, **options)(noisy)
    assert_same(mapped(ROWS, KEY), draw_each(ROWS, keys))


@pytest.mark.parametrize("chunk_size", [7, slow(1), slow(None)])
def test_reduced_items_draw_what_split_keys_draw(chunk_size):
    keys = jax.random.split(KEY, (4, 23))
    draws = np.asarray(draw_each(ROWS, keys)[0])

    @auto_vmap(
        x=0,
        key=SplitKey,
        chunk_size=chunk_size,
        reduce=("sum", "argmax", None, Best(by=0)),
        reduce_axis=0,
    )
    def kernel(x, key):
        draw, key = noisy(x, key)
        return draw, draw, key, (draw, jax.random.key_data(key))

    total, largest, kept, (least, data) = kernel(ROWS, KEY)
    assert_same(total, np.sum(draws, 0))
    assert_same(largest, np.argmax(draws, 0).astype(np.int32))
    assert_same(kept, keys)
    assert_same(least, np.min(draws, 0))
    words = np.asarray(jax.random.key_data(keys))
    assert_same(data, words[np.argmin(draws, 0), np.arange(23)])


def test_the_last_tile_of_a_reduction_goes_on_counting():
    """Behind the last whole tile there is a smaller one, which begins where that ends."""
    words = auto_vmap(x=0, key=SplitKey, reduce=BottomK(10), chunk_size=4)(
        lambda x, key: jnp.sum(jax.random.key_data(key).astype(jnp.float32)) * x
    )
    data = np.asarray(jax.random.key_data(jax.random.split(KEY, 10))).astype(np.float32)
    assert_same(jax.jit(words)(np.ones(10, "f4"), KEY)[0], np.sort(np.sum(data, 1)))


@pytest.mark.optimized
def test_keys_are_never_an_array():
    """400,000 keys would be 3.2 MB, and 400,000 numbers 1.6 MB; a chunk needs 26 kB."""

    def draw(x, key):
        return jnp.sum(x * jax.random.normal(key, (16,)))

    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=100)(draw)
    by_hand = auto_vmap(x=0, key=0, chunk_size=100)(draw)
    x = jnp.zeros(400_000)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(kernel(x, KEY)))(x)

    assert temporary_bytes(kernel, x, KEY) < 100_000
    assert temporary_bytes(gradient, x) < 100_000
    many = temporary_bytes(lambda x, key: by_hand(x, jax.random.split(key, x.size)), x, KEY)
    assert many > 3_200_000  # so it is the keys that would be seen


# Which keys are split.


@pytest.mark.parametrize(
    ("shape", "chunk_size"),
    [((2, 1, 5), 4), ((), 4), ((2, 1, 5), None), slow((5,), 4), slow((3, 1), 4)],
    ids=str,
)
def test_keys_are_split_over_the_axes_that_they_lack(shape, chunk_size):
    keys = jax.random.split(KEY, shape) if shape else KEY
    batch = np.broadcast_shapes(BATCH, shape)
    want = own_keys(keys, batch)
    mapped = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size)(noisy)
    assert_same(mapped(X, keys)[1], want)
    kept = mapped.with_options(reduce=("max", None), reduce_axis=0)
    assert_same(kept(X, keys)[1], want)


def test_keys_that_lack_nothing_are_used_as_they_are():
    kernel = auto_vmap(x=0, key=SplitKey)(noisy)
    assert_same(kernel(0.5, KEY), noisy(0.5, KEY))  # one item: simply called
    keys = jax.random.split(KEY, 5)
    assert_same(kernel(X[0], keys), kernel(X[0], KEY))
    assert_same(jax.vmap(kernel)(X[0], keys), kernel(X[0], KEY))
    assert_same(kernel(0.5, keys)[1], keys)
    alone = auto_vmap(SplitKey, chunk_size=2)(lambda key: key)
    assert_same(alone(KEY), KEY)
    assert_same(alone(keys), keys)
    assert_same(auto_vmap(SplitKey)(lambda key: key)(KEY), KEY)  # the rank, not a kernel


@pytest.mark.parametrize("chunk_size", [2, None])
def test_no_items_get_no_keys(chunk_size):
    none = jnp.zeros((3, 0))
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size)(noisy)
    assert_same(kernel(none, KEY), (none, jax.random.split(KEY, (3, 0))))
    assert_same(kernel.with_options(reduce=("sum", None))(none, KEY)[0], jnp.zeros(()))


def test_the_keys_of_a_tree_are_split_each_on_its_own():
    kernel = auto_vmap(0, {"a": SplitKey, "rest": SplitKey}, SplitKey, chunk_size=4)(
        lambda x, tree, key: (tree, key)
    )
    a, b = jax.random.split(KEY)
    tree = {"a": a, "rest": [b, None]}  # one entry for all of a list
    columns = jax.random.split(jax.random.key(9), 5)
    want = jax.tree.map(lambda key: own_keys(key, BATCH), (tree, columns))
    assert_same(kernel(X, tree, columns), want)


# Generators.


@pytest.mark.parametrize(
    ("chunk_size", "impl"), [(4, "threefry2x32"), (1, "rbg"), (None, "unsafe_rbg")]
)
def test_each_generator(impl, chunk_size):
    key = jax.random.key(3, impl=impl)
    got = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size)(lambda x, key: key)(X, key)
    want = jax.random.split(key, BATCH)
    if impl == "unsafe_rbg":
        same = jax.random.wrap_key_data(jax.random.key_data(key), impl="rbg")
        words = jax.random.key_data(jax.random.split(same, BATCH))
        want = jax.random.wrap_key_data(words, impl=impl)
    assert_same(got, want)


def test_keys_are_counted_whatever_threefry_splits_by():
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=4)(lambda x, key: key)
    want = jax.random.split(KEY, BATCH)
    with jax.threefry_partitionable(False):
        assert_same(kernel(X, KEY), want)
        other = jax.random.split(KEY, BATCH)
        assert (jax.random.key_data(other) != jax.random.key_data(want)).all()


# Inside other transformations.


def reparametrised(x, key):
    return jnp.sin(x * jax.random.normal(key, (3,))).sum()


@pytest.mark.parametrize("reduce", [None, slow("max")], ids=str)
def test_derivatives_are_those_of_split_keys(reduce):
    keys = jax.random.split(KEY, BATCH)
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=4, reduce=reduce)(reparametrised)

    def plain(x):
        out = jax.vmap(jax.vmap(reparametrised))(x, keys)
        return out if reduce is None else jnp.max(out)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(fun):
        return jax.jvp(jax.grad(lambda x: fun(x).sum()), (X,), (jnp.cos(X),)), jax.jacrev(fun)(X)

    got, want = derivatives(lambda x: kernel(x, KEY)), derivatives(plain)
    assert_same(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("chunk_size", "jit"), [(4, False), (None, True)])
def test_keys_that_are_traced(chunk_size, jit):
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size, jit=jit)(lambda x, key: key)
    keys = jax.random.split(KEY, 2)
    want = jnp.stack([own_keys(key, BATCH) for key in keys])
    assert_same(jax.jit(kernel)(X, KEY), own_keys(KEY, BATCH))
    assert_same(jax.vmap(kernel, (None, 0))(X, keys), want)
    assert_same(jax.lax.map(lambda key: kernel(X, key), keys), want)


def test_symbolic_shapes_export():
    kernel = auto_vmap(x=0, y=0, key=SplitKey)(lambda x, y, key: (x * y, jax.random.key_data(key)))
    n, m = jax.export.symbolic_shape("n, m")
    x, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, 1), (m,)))
    with_key = jax.jit(lambda x, y: kernel(x, y, KEY))
    again = jax.export.deserialize(jax.export.export(with_key)(x, y).serialize())
    assert_same(again.call(X[:, :1], X[0]), with_key(X[:, :1], X[0]))


@pytest.mark.parametrize("chunk_size", [4, None])
def test_strict_modes_of_jax(chunk_size):
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=chunk_size, jit=True)(
        lambda x, key: x + jax.random.normal(key)
    )
    want = kernel(X, KEY)
    with jax.checking_leaks(), jax.debug_key_reuse(True), jax.debug_nans(True):
        assert_same(kernel(X, KEY), want)
    with jax.transfer_guard("disallow"):
        found = kernel(X, KEY)
    assert_same(found, want)  # which copies from a GPU
    if chunk_size:
        with jax.disable_jit():
            assert_same(kernel(X, KEY), want)


def test_an_eager_call_compiles_once_for_all_keys():
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=4)(noisy)
    for reduced in (kernel, kernel.with_options(reduce=("sum", None))):
        reduced(X, KEY)
        key = jax.random.key(1)
        got, compiled = compilations(reduced, X, key)
        assert compiled == 0
        assert_same(got[1], own_keys(key, BATCH))


# Plans and annotations.


def test_a_plan_shows_which_keys_are_split():
    kernel = auto_vmap(x=0, key=SplitKey, chunk_size=5, jit=True)(noisy)
    plan = kernel.plan(X, jax.ShapeDtypeStruct((3, 1), KEY.dtype))
    text = str(plan)
    assert "\n  key    (3, 1)  SplitKey  ()    3 1/\n" in text
    assert text.endswith("\n  (/ split: each item has a key of its own)")
    assert plan.leaves[1].is_split
    whole = kernel.plan(X, jax.random.split(KEY, BATCH))
    assert "split" not in str(whole)


class Pair(NamedTuple):
    first: Annotated[PRNGKeyArray, SplitKey]
    second: Annotated[Key[Array, ""], SplitKey]


def test_annotations_declare_keys_that_are_split():
    @auto_vmap(chunk_size=4)
    def kernel(
        x: Float[Array, ""],
        key: Annotated[PRNGKeyArray, SplitKey],
        pair: Pair,
        other: Annotated[jax.Array, "seed", SplitKey] | None = None,
    ):
        return key, pair, other

    want = own_keys(KEY, BATCH)
    assert_same(kernel(X, KEY, Pair(KEY, KEY)), (want, Pair(want, want), None))
    assert_same(kernel(X, KEY, Pair(KEY, KEY), KEY), (want, Pair(want, want), want))


SENTENCE = (
    "SplitKey annotates the type of a single key, as in "
    "Annotated[jaxtyping.PRNGKeyArray, rankax.SplitKey]"
)
UNION = (
    "it is a union of rank 0 and rank SplitKey, so the number of batch axes cannot be known; give "
    "the parameter one rank explicitly, or write two kernels"
)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        pytest.param(SplitKey, SENTENCE, id="alone"),
        pytest.param(Annotated[Key[Array, "n"], SplitKey], SENTENCE, id="a vector"),
        pytest.param(Annotated[Float[Array, ""], SplitKey], SENTENCE, id="numbers"),
        pytest.param(Annotated[PRNGKeyArray, SplitKey] | Float[Array, ""], UNION, id="a union"),
    ],
)
def test_annotations_of_what_is_no_single_key_are_refused(hint, text):
    def kernel(key):
        return key

    kernel.__annotations__ = {"key": hint}
    assert refusal(ValueError, auto_vmap, kernel) == (
        f"auto_vmap(kernel): the annotation of key: {text}"
    )


# What is refused.


def test_what_is_no_typed_key_is_refused():
    kernel = auto_vmap(x=0, key=SplitKey)(noisy)
    raw = (
        "noisy(): key has the rank SplitKey, but it is an array of dtype uint32 and shape (2,); "
        "make keys with jax.random.key, not jax.random.PRNGKey, or pass "
        "jax.random.wrap_key_data(key)"
    )
    key = jax.random.PRNGKey(0)
    assert refusal(TypeError, kernel, X, key) == raw
    assert refusal(TypeError, kernel.with_options(jit=True), X, np.asarray(key)) == raw
    assert refusal(TypeError, kernel, 0.5, key) == raw
    assert refusal(TypeError, kernel.plan, X, jax.ShapeDtypeStruct((2,), jnp.uint32)) == raw
    assert refusal(TypeError, jax.jit(kernel), X, key) == raw
    assert refusal(TypeError, kernel, X, 0) == (
        "noisy(): key has the rank SplitKey, but it is the number 0; make a key from it: "
        "jax.random.key(0)"
    )
    tree = auto_vmap(0, {"a": SplitKey})(lambda x, keys: x)
    assert "keys['a'] has the rank SplitKey" in refusal(TypeError, tree, X, {"a": X})
    assert refusal(TypeError, SplitKey) == (
        "SplitKey is the rank itself, without parentheses: auto_vmap(key=SplitKey)"
    )


def test_more_keys_than_jax_counts_are_refused():
    kernel = auto_vmap(x=0, y=0, key=SplitKey, chunk_size=2**20)(lambda x, y, key: key)

    def like(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    x, y, key = like(2**17, 1), like(2**16), jax.eval_shape(jax.random.key, 0)
    assert refusal(ValueError, kernel.plan, x, y, key).partition(": ")[2] == (
        "each key of key would be split into 8589934592 keys, but JAX counts only 4294967296; "
        "pass keys that have a batch axis themselves, such as jax.random.split(key, n) for an "
        "axis of length n"
    )
    rows = jax.ShapeDtypeStruct((2**17, 1), key.dtype)
    assert kernel.plan(x, y, rows).evaluations == 2**33
    as_many = jax.eval_shape(kernel, like(1, 2**16, 1), y, key)
    assert as_many.shape == (1, 2**16, 2**16)
