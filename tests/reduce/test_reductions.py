# SPDX-License-Identifier: MIT
"""Reductions by name, against `jax.numpy` on what they never store."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same as assert_equal
from helpers import enable_x64, named_reductions, primitives, refusal, slow, temporary_bytes
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import (
    Best,
    BottomK,
    Fold,
    Gram,
    Moments,
    MomentsResult,
    Several,
    TopK,
    TopKResult,
)

DRAW = np.random.default_rng(0).normal
X, Y, W = (jnp.asarray(DRAW(size=size)) for size in ((4, 3), (23, 3), 23))

PLAIN = {
    name: getattr(jnp, name)
    for name in ("sum", "mean", "prod", "max", "min", "argmax", "argmin", "any", "all")
} | {"logsumexp": jax.nn.logsumexp}


def gauss(x, y, w):
    """Depends on every input, each in its own way; of either sign."""
    return w * jnp.exp(-jnp.sum((x - 2 * y) ** 2) / 9) + 0.1 * x[0]


def reduced(reduce, axis, chunk_size=6, kernel=gauss):
    ranks = {"x": 1, "y": 1, "w": 0}
    return auto_vmap(**ranks, reduce=reduce, reduce_axis=axis, chunk_size=chunk_size)(kernel)


def of_pairs(kernel, x, y, w):
    """The outputs for all pairs, of maps by hand."""
    return jax.vmap(jax.vmap(kernel, (None, 0, 0)), (0, None, None))(x[:, 0], y, w)


def plainly(reduce, axis):
    """`jax.numpy` on the outputs for all pairs."""

    def call(*args):
        out = of_pairs(gauss, *args)
        if reduce in ("max", "min") and axis in (-1, 0):
            # That of jax.numpy divides 0 by 0 where XLA computes an item twice, not quite alike.
            at = PLAIN[f"arg{reduce}"](out, axis=axis, keepdims=True)
            return jnp.take_along_axis(out, at, axis).squeeze(axis)
        return PLAIN[reduce](out, axis=axis)

    return call


ARGS = (X[:, None], Y, W)
TANGENTS = tuple(jnp.asarray(np.cos(x)) for x in ARGS)


assert_same = functools.partial(assert_equal, rtol=3e-5)


def all_names(call, *args, names=tuple(PLAIN)):
    """Evaluate ``call(name)`` for many reductions in one compiled program."""
    return jax.jit(lambda *args: {name: call(name)(*args) for name in names})(*args)


@pytest.mark.parametrize(
    ("axis", "size"),
    [(0, 6), slow(-1, 1), slow(-1, 91), slow(None, 6), slow((1, 0), 6), slow(None, None)],
    ids=str,
)
def test_values(axis, size):
    found = all_names(lambda name: reduced(name, axis, size), *ARGS)
    # jnp.argmin takes no tuple: all axes are one there.
    expected = all_names(lambda name: plainly(name, None if axis == (1, 0) else axis), *ARGS)
    assert_same(found, expected)


def loss_of(fun):
    """A number that depends on every number of the result, on each otherwise."""

    def loss(*args):
        return sum(
            jnp.sum(jnp.sin(out + jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)))
            for out in jax.tree.leaves(fun(*args))
            if jnp.issubdtype(out.dtype, jnp.floating)
        )

    return loss


def assert_same_gradients(found, expected, argnums=(0, 1, 2), rtol=2e-4):
    """Compare values, and the gradients of a number that depends on all of them."""

    def both(fun):
        return jax.jit(lambda *args: (fun(*args), jax.grad(loss_of(fun), argnums)(*args)))(*ARGS)

    assert_same(*map(both, (found, expected)), rtol=rtol)


@pytest.mark.parametrize("axis", [-1, slow(0), slow(None)])
def test_first_derivatives(axis):
    names = "prod", "max", "logsumexp"

    def expected(*args):
        return {name: plainly(name, axis)(*args) for name in names}

    def both(fun):
        # XLA:GPU cannot compile the loops of "max" if all that they read is constant.
        return jax.jit(
            lambda *args: (jax.grad(loss_of(fun), (0, 1, 2))(*args), jax.jvp(fun, args, TANGENTS))
        )(*ARGS)

    found = reduced(Several(**dict(zip(names, names, strict=True))), axis)
    assert_same(*map(both, (found, expected)), rtol=2e-4)


@pytest.mark.parametrize("name", ["logsumexp", slow("prod"), slow("min")])
def test_second_derivatives(name):
    """By the items, and by a number that the kernel closes over."""

    def derivatives(reduce):
        def total(v, scale):
            return jnp.sin(reduce(lambda v: jnp.sin(scale * v) + 2 * v)(v))

        return jax.hessian(total, (0, 1))(v, 0.7)

    v = jnp.asarray(np.linspace(0.2, 1.5, 5))
    each = (lambda f: chunked_reduce(f, name, 2)), (lambda f: lambda v: PLAIN[name](jax.vmap(f)(v)))
    found, expected = jax.jit(lambda: [derivatives(reduce) for reduce in each])()
    assert_same(found, expected, rtol=3e-4)


@pytest.mark.parametrize("dtype", ["bool", "complex64", slow("uint8"), slow("bfloat16")])
def test_dtypes(dtype):
    real = np.asarray([3, 1, 1, 0, 2, 5, 5, 4, 2, 7, 0])
    values = jnp.asarray(real, dtype) * jnp.asarray(1 + 2j if dtype == "complex64" else 1, dtype)
    unfit = {"max", "min", "argmax", "argmin"} if dtype == "complex64" else set()
    for name in unfit:
        text = f"it cannot be reduced by {name}: output has dtype complex64, and complex numbers "
        text += "have no order; return their real part or jnp.abs of them"
        if name in ("max", "min"):
            text += f", or take jnp.{name} of what chunked_vmap returns: it compares real parts"
            whole = PLAIN[name](chunked_vmap(lambda v: v, 3)(values), axis=0)
            assert_same(whole, PLAIN[name](values, axis=0))
        with pytest.raises(ValueError, match=re.escape(text)):
            chunked_reduce(lambda v: v, name, 3)(values)
    names = tuple(sorted(PLAIN.keys() - unfit))
    found = all_names(lambda name: chunked_reduce(lambda v: v, name, 3), values, names=names)
    expected = all_names(lambda name: lambda v: PLAIN[name](v, axis=0), values, names=names)
    assert_same(found, expected, rtol=1e-2 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("name", ["any", "all"])
def test_a_number_is_true_as_in_numpy(name):
    rows = [[1j, 1j, 2j, 1j], [0j, 1j, 0, 0], [0, -0.0, -0j, 0], [np.nan, 1, 1j * np.nan, np.inf]]
    rows = [kind(rows) for kind in (np.asarray, np.real, np.imag, np.isnan)]
    want = {i: getattr(np, name)(values, axis=1) for i, values in enumerate(rows)}
    values = {i: jnp.asarray(values.T) for i, values in enumerate(rows)}
    for size in (1, 3, None):
        assert_same(chunked_reduce(lambda v: v, name, size)(values), want)


@pytest.mark.parametrize("name", [*PLAIN, "gram"])
def test_weak_types_do_not_depend_on_the_chunks(name):
    weak = lax.full((5,), 2.0)
    by_size = [chunked_reduce(lambda v: v, name, size)(weak) for size in (2, 5, None)]
    assert {str(jax.typeof(out)) for out in by_size} == {str(jax.typeof(by_size[-1]))}


@pytest.mark.parametrize("name", ["max", "min"])
def test_winners_of_weak_types_are_strong_in_a_derivative(name):
    calls = [chunked_reduce(lambda _: 1.5, name, size) for size in (2, None)]
    values = [out for call in calls for out in jax.jvp(call, (jnp.arange(3.0),), (jnp.ones(3),))]
    assert not any(jax.typeof(out).weak_type for out in values)


def test_numbers_of_64_bits():
    names = "sum", "mean", "max", "argmax"
    with enable_x64():
        values = jnp.asarray([2**40, 3, -1, 2**40 + 1, 5])
        found = all_names(lambda name: chunked_reduce(lambda v: v, name, 2), values, names=names)
        assert_same(found, {name: PLAIN[name](values) for name in names}, rtol=1e-15)


SPECIAL = {
    "nan": [1.0, np.nan, -2.0, np.nan, 3.0, 0.0, 1.0],
    "nan last": [1.0, 2.0, -2.0, 0.5, 3.0, 0.0, np.nan],
    "inf": [1.0, np.inf, -2.0, np.inf, 3.0, 0.0, 1.0],
    "-inf": [-np.inf] * 7,
    "all inf": [np.inf] * 7,
    "both": [np.inf, 1.0, -np.inf, 1.0, 2.0, 3.0, 4.0],
    "equal": [2.0, 1.0, 1.0, 2.0, 1.0, 2.0, 1.0],
    "zeros": [0.0, -0.0, 0.0, -0.0, -0.0, 0.0, -0.0],
    "huge": [3e38, -3e38, 88.0, 1e-38, 3e38, 1.0, 2.0],
}


@jax.jit
def plain_and_reduced(values):
    found = {name: chunked_reduce(lambda v: v, name, 3)(values) for name in PLAIN}
    return {name: PLAIN[name](values, axis=0) for name in PLAIN}, found


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values(case):
    expected, found = plain_and_reduced(jnp.asarray(SPECIAL[case]))
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("name", "bad"), [("logsumexp", 7), slow("sum", 10), slow("max", 9), slow("max", 10)]
)
def test_what_one_item_does_stays_with_it(name, bad):
    """The infinite derivative of one is no nan of another; item 7 is in two tiles."""
    weights = np.arange(11, dtype="float32")
    values = np.where(weights == bad, 0, weights + 1)
    found = chunked_reduce(lambda v, w: jnp.sqrt(v) + w, name, 4)
    found = jax.jit(jax.grad(found, (0, 1)))(values, weights)
    expected = jax.grad(lambda v, w: PLAIN[name](jnp.sqrt(v) + w, axis=0), (0, 1))
    of_values, of_weights = map(np.array, jax.jit(expected)(values, weights))
    if name == "max":
        # Plain `jax.numpy` multiplies the infinite derivative by the weight 0 of a loser.
        of_values[bad] = found[0][bad]
    assert_same(found, (of_values, of_weights))
    assert np.isfinite(np.delete(found[0], bad)).all()


@pytest.mark.parametrize(
    ("name", "shape"), [("sum", (0, 3)), ("logsumexp", (0, 0)), ("mean", (3, 0))]
)
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_empty_batches(name, shape):
    values = jnp.ones(shape)
    kernel = auto_vmap(0, reduce=name, reduce_axis=-1, chunk_size=2)(lambda v: v)
    assert_same(kernel(values), PLAIN[name](values, axis=-1))


@pytest.mark.parametrize("reduce", ["max", "min", "argmax", "argmin", Best("x")], ids=str)
def test_an_empty_batch_has_no_smallest_item(reduce):
    kernel = chunked_reduce(lambda v: {"x": v}, reduce, 2)
    name = "Best('x')" if isinstance(reduce, Best) else reduce
    text = f": {name} needs at least 1 item; the reduced axes have 0"
    with pytest.raises(ValueError, match=re.escape(text)):
        kernel(jnp.ones(0))


# The other reductions.


def outputs(x, y, w):
    off = x - y
    return {"distance": jnp.sqrt(off @ off), "force": w * off, "number": jnp.int32(7)}


@pytest.mark.parametrize("largest", [True, slow(False)])
def test_best(largest):
    def expected(*args):
        outs = of_pairs(outputs, *args)
        pick = jnp.argmax if largest else jnp.argmin
        at = pick(outs["distance"], axis=-1)
        return jax.tree.map(lambda out: jax.vmap(lambda row, i: row[i])(out, at), outs)

    assert_same_gradients(reduced(Best("distance", largest=largest), -1, 6, outputs), expected)


@pytest.mark.parametrize("size", [2, slow(500)])
def test_the_names_of_top_and_bottom_are_those_of_jax(size):
    values = np.float32([3.0, 1.0, np.nan, 1.0, 0.0, 0.0, np.inf, 3.0, -np.inf, 2.0, 1.0])
    call = chunked_reduce(lambda v: (v, v), (BottomK(11), TopK(6)), size)
    bottom, top = jax.jit(call)(values)
    assert_same(tuple(top), tuple(lax.top_k(values, 6)))
    order = np.argsort(values, stable=True).astype("int32")  # nan comes last, equals stay in order
    assert_same(tuple(bottom), (values[order], order))
    assert (BottomK(6).name, TopK(6).name) == ("BottomK(6)", "TopK(6)")


@pytest.mark.parametrize(("kind", "k"), [(BottomK, 1), (TopK, 9), slow(BottomK, 8)])
def test_top_and_bottom_k_of_many_equals(kind, k):
    """With the worst value among the items; up to 8, each lane has its own."""

    @jax.jit
    def indices(values):
        top = auto_vmap(0, reduce=kind(k))(lambda x: x)
        return {size: top.with_options(chunk_size=size)(values).indices for size in (3, 40)}

    numbers = np.random.default_rng(0).choice([-128, -1, 0, 127], 23 * 11)
    for flat in (numbers, np.sort(numbers)):
        want = np.argsort(-flat if kind is TopK else flat, stable=True)[:k]
        for size, found in indices(flat.astype("int8").reshape(23, 11)).items():
            assert found.tolist() == want.tolist(), size


def test_moments_of_infinite_numbers():
    moments = jax.jit(chunked_reduce(lambda v: v, Moments(), 2))
    nan, inf = np.nan, np.inf
    for values, mean in ([1, inf, 2], inf), ([1, 2, -inf], -inf), ([inf, 1, -inf], nan):
        found = moments(np.float32(values))
        np.testing.assert_array_equal(found.mean, mean)
        assert jnp.isnan(found.variance)


@pytest.mark.parametrize("count", [8, 17])  # with more than 16 numbers, each tile is merged
def test_moments_of_large_numbers(count):
    values = np.sin(np.arange(12.0 * count)).reshape(12, count) + 2

    @jax.jit
    def found(scale):
        of_row = chunked_reduce(lambda v: v, Moments(), 5)
        rows = jnp.asarray(values, "float32") * scale
        return of_row(rows), jax.lax.map(of_row, rows[None])

    for scale in (1e17, 1e20):
        for moments in found(jnp.float32(scale)):
            mean, variance = moments.mean.reshape(count), moments.variance.reshape(count)
            np.testing.assert_allclose(mean, np.mean(values, 0) * scale, rtol=1e-5)
            # Its square is too large for a float32, but not for a float64.
            expected = np.var(values, 0) * scale**2
            expected = np.where(expected > 3.4e38, np.inf, expected)
            np.testing.assert_allclose(variance, expected, rtol=1e-4)


def test_extrema_of_floats_without_infinity():
    names = ("max", "min", "argmax", "argmin")
    extrema = jax.jit(
        lambda values: [chunked_reduce(lambda v: v, name, 3)(values) for name in names]
    )
    for values in ([1, -3, 2, 4, -2, 3, 0.5], [-1, -3, -2, -4, -2, -3, -0.5]):
        narrow = np.asarray(values, jnp.float8_e4m3fn)
        for name, found in zip(names, extrema(narrow), strict=True):
            assert found.dtype == (narrow.dtype if name in ("max", "min") else jnp.int32)
            assert float(found) == getattr(np, name)(values)


def test_a_single_item_is_not_mapped():
    def branch(x):
        return jax.lax.cond(x > 0, jnp.sin, lambda x: x, x)

    one = jnp.ones(1)
    for call in (
        chunked_reduce(branch, "sum", 1),
        auto_vmap(0, chunk_size=1, reduce="sum")(branch),
    ):
        assert "cond" in str(jax.make_jaxpr(call)(one))
        assert_same(call(one), jnp.sin(one[0]))
        assert_same(jax.grad(call)(one), jnp.cos(one))


def test_bottom_k_of_vectors_and_its_derivative():
    def kernel(x, y, w):
        return w * jnp.cos(x - y)

    def expected(*args):
        outs = of_pairs(kernel, *args)
        return jnp.sort(outs, axis=1)[:, :2], jnp.argsort(outs, axis=1)[:, :2]

    found = reduced(BottomK(2), -1, 6, kernel)
    assert_same_gradients(lambda *args: tuple(found(*args)), expected)


def test_moments():
    def expected(*args):
        outs = of_pairs(outputs, *args)["distance"]
        return MomentsResult(jnp.int32(outs.size), jnp.mean(outs), jnp.var(outs))

    found = reduced(Moments(), None, 6, lambda x, y, w: outputs(x, y, w)["distance"])
    assert_same_gradients(found, expected, (0, 1))


def test_moments_do_not_cancel():
    values = 1e6 + jnp.arange(1000.0) % 2
    found = chunked_reduce(lambda v: v, Moments(), 30)(values)
    np.testing.assert_allclose(found.variance, 0.25, rtol=1e-3)


def compose(first, second):
    """Affine maps one after another, which do not commute."""
    return {"a": second["a"] * first["a"], "b": second["a"] * first["b"] + second["b"]}


AFFINE = Fold(
    {"a": 1.0, "b": 0.0},
    lift=lambda out: {"a": out, "b": jnp.cos(3 * out)},
    merge=compose,
    finish=lambda state: state["a"] * 2 + state["b"],
)


@pytest.mark.parametrize("size", [5, slow(1)])
def test_a_fold_keeps_the_order_of_the_items(size):
    def expected(*args):
        step = lambda state, out: (compose(state, AFFINE.lift(out)), None)  # noqa: E731
        start = {"a": jnp.ones(4), "b": jnp.zeros(4)}
        return AFFINE.finish(lax.scan(step, start, of_pairs(gauss, *args).T)[0])

    assert_same_gradients(reduced(AFFINE, -1, size), expected, (0, 2), rtol=1e-3)


def test_a_fold_of_nothing_is_the_identity():
    fold = Fold(jnp.zeros(2), lambda out: out, jnp.add)
    assert_same(chunked_reduce(lambda v: v, fold, 2)(jnp.ones((0, 2))), jnp.zeros(2))


# Trees of outputs, and several axes.


def test_one_reduction_holds_for_a_part_of_the_tree():
    def nested(x, y, w):
        return outputs(x, y, w), w * (x - y)

    outs = jax.device_get(jax.jit(of_pairs, static_argnums=0)(outputs, *ARGS))
    sums = jax.tree.map(lambda x: x.sum(1, dtype=x.dtype), outs)
    for size in (None, 6):
        found = jax.jit(reduced(("sum", "max"), -1, size, nested))(*ARGS)
        assert_same(found, (sums, outs["force"].max(1)))


@jax.jit
def of_three(a, b, c):
    return {"sum": jnp.sin(a + 2 * b + 3 * c), "kept": a - b * c, "arg": jnp.cos(a * b - c)}


@pytest.mark.parametrize(("axes", "size"), [((-1, 0), 7), slow((0, 2), 7), slow((0, 1, 2), 1)])
def test_several_axes_in_any_place(axes, size):
    sides = (2, 1, 1, 1), (1, 3, 1, 5), (1, 1, 4, 1)
    args = [np.arange(math.prod(side), dtype="float32").reshape(side) for side in sides]
    reduce = {"sum": "sum", "kept": None, "arg": "argmax"}
    found = auto_vmap(0, 0, 0, reduce=reduce, reduce_axis=axes, chunk_size=size)(of_three)
    found, outs = jax.jit(found)(*args), jax.device_get(of_three(*args))
    inner = tuple(axis for axis in range(4) if axis in [n % 4 for n in axes])
    flat = np.moveaxis(outs["arg"], inner, range(-len(inner), 0))
    flat = flat.reshape(*flat.shape[: 4 - len(inner)], -1)
    first = flat.argmax(-1).astype("int32")
    expected = {"sum": outs["sum"].sum(axes), "kept": outs["kept"], "arg": first}
    assert_same(found, expected, atol=1e-5)


def test_the_derivative_of_several_reductions_at_once():
    reduce = {"distance": "min", "force": None, "number": "max"}

    def expected(*args):
        outs = of_pairs(outputs, *args)
        at = jnp.argmin(outs["distance"], -1, keepdims=True)
        first = jnp.take_along_axis(outs["distance"], at, -1)[:, 0]
        return {"distance": first, "force": outs["force"], "number": outs["number"].max(1)}

    assert_same_gradients(reduced(reduce, -1, 6, outputs), expected)


def parts(x, y, w):
    """Numbers of which some are equal, and others, of which the largest are looked for."""
    return {"few": jnp.round(3 * w) * x[0] ** 2, "vector": w * jnp.cos(x - y)}


def of_rows(outs):
    """What `OF_ROWS` gives for each row."""
    few, vector = outs["few"], outs["vector"]
    place = jnp.argsort(few, axis=1, stable=True)[:, :2]
    first = jnp.take_along_axis(few, place, 1)
    largest = jnp.take_along_axis(vector, vector.argmax(1, keepdims=True), 1)[:, 0]
    return {
        "few": (first[:, 0], place[:, 0], few.mean(1), TopKResult(first, place)),
        "vector": largest,
    }


OF_ROWS = {"few": Several("min", "argmin", "mean", BottomK(2)), "vector": "max"}


@pytest.mark.parametrize("rows", [2, slow(1)])
def test_the_derivatives_of_a_choice_from_a_whole_row(rows):
    draw = np.random.default_rng(3).normal
    args = tuple(jnp.asarray(draw(size=size)) for size in ((5, 1, 3), (60, 3), 60))

    def expected(*args):
        return of_rows(of_pairs(parts, *args))

    def derivatives(fun):
        gradient = jax.grad(loss_of(fun), (0, 1, 2))
        return jax.jit(lambda *args: (fun(*args), jax.jvp(gradient, args, args)))(*args)

    found = reduced(OF_ROWS, -1, rows * 60, parts)
    assert_same(*map(derivatives, (found, expected)), rtol=2e-4)


def test_outputs_without_a_derivative_are_not_evaluated_again():
    evaluated = []

    def count(value):
        evaluated.append(value.size)
        return value

    def kernel(x, y):
        aval = jax.ShapeDtypeStruct((), x.dtype)
        number = jax.pure_callback(count, aval, lax.stop_gradient(x + y), vmap_method="expand_dims")
        return {"float": number * x, "ints": number.astype("int32") * jnp.arange(50)}

    fun = auto_vmap(0, 0, reduce="max", reduce_axis=-1, chunk_size=40)(kernel)

    def loss(x):
        found = fun(x, jnp.arange(20.0))
        return found["float"].sum(), found["ints"]

    jax.block_until_ready(jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.ones((4, 1))))
    # Each item once, and the winners of the floats again, not those of 50 integers.
    assert 4 * 20 <= sum(evaluated) <= 4 * (20 + 2)


@pytest.mark.parametrize(("name", "at"), [("max", 1), ("min", 2)])
def test_the_derivative_of_an_extremum_of_all_at_once(name, at):
    values = np.float32([1, 4, 0, 4, 0])

    @jax.jit
    def gradients(values):
        kernels = (lambda v: v**2 + 1), (lambda v: 3 * v)
        return [
            [jax.grad(chunked_reduce(kernel, name, size))(values) for kernel in kernels]
            for size in (None, 2)
        ]

    first = (np.arange(5) == at).astype("float32")
    assert_same(gradients(values), [[2 * first * values, 3 * first]] * 2)


def test_the_derivative_of_a_logsumexp_of_infinite_items():
    each = chunked_reduce(lambda v: v, "logsumexp", 2), jax.nn.logsumexp
    found, expected = (jax.jit(jax.value_and_grad(fun)) for fun in each)
    for values in ([-np.inf, 1.0, 2.0], [-np.inf] * 3):
        assert_same(found(np.float32(values)), expected(np.float32(values)))


def test_no_batch_and_an_axis_of_length_1():
    row = jnp.arange(3.0)
    assert_same(auto_vmap(1, reduce="sum", chunk_size=2)(lambda v: v * 2)(row), 2 * row)
    for axis, want in (1, row), (None, jnp.mean(row)):
        mean = auto_vmap(0, reduce="mean", reduce_axis=axis, chunk_size=2)(lambda v: v)
        assert_same(mean(row[:, None]), want)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Hit:
    """A class of outputs that checks what it holds."""

    distance: jax.Array
    normal: jax.Array

    def __post_init__(self):
        assert self.distance.shape == self.normal.shape[:-1]


def test_classes_of_outputs_see_items_and_results_only():
    found = reduced(Best("distance"), -1, 6, lambda x, y, w: Hit(jnp.sum(x * y), w * y))(*ARGS)
    x, y, w = map(np.asarray, (X, Y, W))
    assert_same(found.normal, (w[:, None] * y)[np.argmin(x @ y.T, -1)])


# How it is called.


@pytest.mark.parametrize("reduce", ["sum", "min", Best("distance")], ids=str)
def test_the_kernel_is_traced_once(reduce):
    traces = []

    def kernel(x, y, w):
        traces.append(x)
        out = outputs(x, y, w)
        return out if isinstance(reduce, Best) else out["distance"]

    fun = reduced(reduce, -1, 6, kernel)
    jax.eval_shape(fun, *ARGS)
    assert len(traces) == 1
    jax.eval_shape(jax.grad(loss_of(fun)), *ARGS)
    assert len(traces) == 2


@pytest.mark.parametrize("size", [6, 2 * 23])
@pytest.mark.parametrize(
    ("reduce", "again"), [("max", 1), (BottomK(2), 2), slow(Best("distance"), 1)], ids=str
)
def test_the_derivative_of_a_choice_looks_at_the_winners_only(reduce, again, size):
    evaluated = []

    def count(value):
        evaluated.append(value.size)
        return value

    @jax.custom_jvp
    def counted(value):
        # Without an effect, so that what nobody uses is not computed.
        aval = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return jax.pure_callback(count, aval, value, vmap_method="expand_dims")

    counted.defjvp(lambda primals, tangents: (counted(*primals), *tangents))

    def kernel(x, y, w):
        out = outputs(x, y, w)
        out["distance"] = counted(out["distance"])
        return out if isinstance(reduce, Best) else out["distance"]

    fun = reduced(reduce, -1, size, kernel)
    # The value is asked for, too, or else nothing would be evaluated forward.
    both = jax.value_and_grad(lambda x, y, w: (jax.tree.leaves(fun(x, y, w))[0] ** 2).sum())
    jax.block_until_ready(jax.jit(both)(*ARGS))
    # Each item once, and each winner again: forward, and in the reverse pass.
    assert 4 * 23 <= sum(evaluated) <= 4 * (23 + 2 * again)


def test_chunked_reduce_takes_what_vmap_takes():
    m = jnp.arange(12.0).reshape(3, 4)

    def kernel(pair, scale, *, shift):
        return pair["a"] * scale + shift

    found = chunked_reduce(kernel, reduce="sum", chunk_size=2, in_axes=({"a": 1}, None))(
        {"a": m}, 2.0, shift=jnp.arange(4.0)
    )
    assert_same(found, (m * 2 + jnp.arange(4.0)[None]).sum(1))
    assert_same(chunked_reduce(lambda: 3.0, "sum", 2, axis_size=5)(), jnp.asarray(15.0))
    text = "chunked_reduce(kernel): the looped axes must have one length, got 4 and 3"
    with pytest.raises(ValueError, match=re.escape(text)):
        chunked_reduce(kernel, "sum", 2, in_axes=({"a": 1}, None))({"a": m}, 2.0, shift=jnp.ones(3))


# Errors and plans.


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"reduce": "summ"}, ValueError, "no reduction is called 'summ'; did you mean 'sum'?"),
        ({"reduce": {"distance": "median"}}, ValueError, "a median needs all outputs at once"),
        ({"reduce": "topk"}, ValueError, "use rankax.reductions.TopK(k), or BottomK(k)"),
        ({"reduce": "std"}, ValueError, "use rankax.reductions.Moments(), which has the variance"),
        ({"reduce": "kurtosis"}, ValueError, f"available: {named_reductions('and')}"),
        (
            {"reduce": jnp.sum},
            TypeError,
            f"reduce must hold names ({named_reductions('or')}), objects of rankax.reductions and "
            "None, got function sum; did you mean 'sum'?",
        ),
        ({"reduce": TopK}, TypeError, "reduce got the class TopK; call it: TopK(...)"),
        ({"reduce": {"distance": None}}, ValueError, "reduce names no reduction, got "),
        ({"reduce": "sum", "reduce_axis": 1.5}, TypeError, "reduce_axis must be an int, a tuple"),
        ({"reduce_axis": 0}, TypeError, "reduce_axis=0 has no effect without reduce="),
    ],
)
def test_wrong_options(options, error, text):
    with pytest.raises(error, match=rf"^auto_vmap\(outputs\): .*{re.escape(text)}"):
        auto_vmap(1, 1, 0, **options)(outputs)


NOT_ONE_ARRAY = {"distance": Best("t", largest=True), "force": None, "number": None}


@pytest.mark.parametrize(
    ("reduce", "axis", "text"),
    [
        ("sum", 2, "reduce_axis 2 is out of range for the batch shape (4, 23)"),
        ("sum", (0, -2), "reduce_axis (0, -2) names an axis of the batch shape (4, 23) twice"),
        (Moments(), -1, "dtype int32, and moments needs floats; return it as a float"),
        (Best("t"), -1, "output has no output 't'; it has output['distance'], output['force'] and"),
        (NOT_ONE_ARRAY, -1, "it is one array; return a dict with the key 't', or take the largest"),
        (Best("force"), -1, "output['force'] decides, so it must be one real number, but it has"),
        (BottomK(24), -1, "BottomK(24) needs at least 24 items; the reduced axes have 23"),
        ({"distance": "sum"}, -1, "no entry for output['force'] and output['number'] (None would"),
    ],
)
def test_what_does_not_fit(reduce, axis, text):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        reduced(reduce, axis, None if axis == 2 else 6, outputs)(*ARGS)
    assert str(caught.value).startswith(f"outputs() at {__file__}:")


def test_keys_are_no_numbers():
    def drawn(key, x):
        return {"key": jax.random.fold_in(key, 0), "x": x}

    text = "it cannot be reduced by sum: output['key'] has non-numeric dtype key<fry>"
    with pytest.raises(ValueError, match=re.escape(text)):
        chunked_reduce(drawn, "sum", 2, in_axes=(None, 0))(jax.random.key(0), jnp.ones(5))


def test_a_product_of_integers_beside_one_that_is_differentiated():
    values = jnp.array([3.0, 2.0, 4.0, 0.5, 3.0])

    def product(values):
        reduce = chunked_reduce(lambda v: {"n": v.astype(int) + 1, "v": jnp.sin(v)}, "prod", 2)
        return reduce(values)

    def plain(values):
        return {"n": jnp.prod(values.astype(int) + 1), "v": jnp.prod(jnp.sin(values))}

    def both(fun):
        return jax.jit(lambda x: (fun(x), jax.grad(lambda x: fun(x)["v"])(x)))(values)

    assert_equal(both(product), both(plain))


@pytest.mark.parametrize(
    ("fold", "text"),
    [
        (Fold(np.zeros(2, "float32"), abs, jnp.add), "but identity has shape (2,) and dtype"),
        (
            Fold(0.0, abs, lambda a, b: (a + b).astype(jnp.float16)),
            "but what merge returns has shape () and dtype float16 there",
        ),
        (Fold((0.0, 0.0), abs, jnp.add), "but identity has PyTreeDef((*, *))"),
    ],
)
def test_a_fold_that_does_not_fit(fold, text):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        chunked_reduce(lambda v: v, fold, 2)(jnp.ones(5))
    assert "it cannot be reduced by Fold: lift returns a state of " in str(caught.value)


def test_a_fold_may_not_hold_a_tracer():
    def traced(scale):
        fold = Fold(0.0, lambda v: v, lambda a, b: scale * (a + b))
        return chunked_reduce(lambda v: v, fold, 2)(jnp.ones(5))

    text = "its identity, merge or finish holds an array that JAX is tracing; let lift put it into"
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.grad(traced)(1.0)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TopK(0), ValueError, "TopK: k must be a positive int, got 0"),
        (lambda: BottomK(-1), ValueError, "BottomK: k must be a positive int, got -1"),
        (lambda: TopK(3, largest=True), TypeError, "TopK.__init__() got an unexpected keyword"),
        (lambda: BottomK(3, largest=True), TypeError, "BottomK.__init__() got an unexpected"),
        (lambda: Best(0, largest=1), TypeError, "Best: largest must be True or False, got 1"),
        (lambda: Best(None), TypeError, "Best: by must be the key, field or index of an output"),
        (lambda: Fold(0, 1, 2), TypeError, "Fold: lift must be callable, got int"),
        (lambda: Fold({"a": [0, "b"]}, abs, max), TypeError, "Fold: identity['a'][1] must be an"),
        (lambda: Gram(["a", 1]), TypeError, "Gram: weights[0] must be an array or a scalar, got"),
    ],
)
def test_wrong_objects(make, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        make()


@pytest.mark.parametrize("kind", [TopK, slow(BottomK)])
def test_many_of_a_length_that_no_tile_divides(kind):
    """Only the last of the tiles overlaps another, so only it is sorted."""
    x = np.asarray(DRAW(size=37), np.float32).round()
    x[[3, 30]] = np.nan
    x[[5, 33]] = -np.inf
    numbers = np.asarray([0, -(2**31), 2**31 - 1], np.int32)[np.arange(37) % 3]
    call = chunked_reduce(lambda v: v, kind(12), 16)

    def plainly(v):
        order = np.argsort(v if kind is BottomK else -v.astype(float), kind="stable")
        nan = np.isnan(v[order]) & (kind is TopK)
        return np.concatenate([order[nan], order[~nan]])[:12]

    for values in (x, numbers):
        got = jax.jit(call)(values)
        assert_same(got.indices, plainly(values).astype(np.int32))
        assert_same(got.values, values[plainly(values)])
    assert primitives(call, x)["top_k"] == 1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (TopK, jnp.float32),
        (BottomK, jnp.float32),
        (TopK, jnp.int16),
        (BottomK, jnp.bfloat16),
        slow(TopK, jnp.float16),
        slow(BottomK, jnp.bool_),
    ],
)
def test_numbers_are_compared_as_floats(kind, dtype):
    """Those that are next to each other, with many equal ones and some that do not count."""
    rng, info = np.random.default_rng(0), jnp.finfo(jnp.float32)
    x = np.float32([np.nan, np.inf, info.max, 1.0, info.tiny, 0.0])
    x = np.concatenate([x, -x])
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, -x)])
    x = x[np.abs(x) != info.smallest_subnormal]
    x = jnp.asarray(rng.permutation(np.concatenate(40 * [x]))).astype(dtype)
    counts = jnp.asarray(rng.random(x.size) < 0.5)
    key = np.asarray(x, np.float32) if jnp.issubdtype(dtype, jnp.inexact) else np.asarray(x)
    key = key.astype(np.float64)
    key = np.where(np.isnan(key), 1e300, np.where(np.isinf(key), np.sign(key) * 1e200, key))
    order = np.argsort(key if kind is BottomK else -key, kind="stable")
    for k, size in (9, 16), (4, 1100):  # XLA:GPU sorts fewer than 1024
        reduce = Several(kind(k), kind(k, where=1)), None
        call = jax.jit(chunked_reduce(lambda v, own: (v, own), reduce, size))
        every, counted = call(x, counts)[0]
        assert_same(every.indices, order[:k].astype(np.int32))
        some = order[np.asarray(counts)[order]]
        assert_same(counted.indices, some[:k].astype(np.int32))
        assert_same(counted.values, x[some[:k]])


@pytest.mark.parametrize("weights", [np.ones(3), {"a": [1.0]}], ids=type)
def test_weights_are_those_of_a_jacobian(weights):
    mapped = auto_vmap(1, reduce=Gram(weights), chunk_size=2)(lambda x: 2 * x)
    text = "its weights are for the rows of a Jacobian; scale the output"
    for call in (mapped, mapped.plan):
        assert refusal(ValueError, call, jnp.ones((5, 3))).endswith(text)


def test_the_plan_says_what_is_reduced():
    kernel = reduced("sum", -1, 6)
    assert str(kernel.plan(*ARGS)) == (
        "gauss: batch shape (4, 23), 92 evaluations, 6 in flight, 16 steps\n"
        "  leaf   shape      rank  core  batch axes\n"
        "  x      (4, 1, 3)  1     (3,)  4 1*\n"
        "  y      (23, 3)    1     (3,)  - 23\n"
        "  w      (23,)      0     ()    - 23\n"
        "  batch  (4, 23)                4 23\n"
        "  axis 0: 4 chunks of 1 over 4, mapping x\n"
        "  axis 1: 4 tiles of 6 over 23, mapping y, w, reduced\n"
        "  (1* stretched, - absent: used again for each item, never copied)\n"
        "  reduced by sum, to (4,)\n"
        "  along axis 1, y and w go together, item by item"
    )


# Memory.


@pytest.mark.optimized
def test_large_outputs_have_one_accumulator():
    """Where items have many numbers, a lane for each item of a tile would be as large as a tile."""
    total = chunked_reduce(lambda v: jnp.outer(v, v), "sum", 1000)
    vectors = jnp.sin(jnp.arange(2100 * 64.0)).reshape(2100, 64)
    assert_same(total(vectors), vectors.T @ vectors, rtol=1e-3, atol=1e-3)
    used = temporary_bytes(total, vectors)
    # XLA of JAX 0.10.0 writes the products of a chunk of whole items before it adds them.
    assert used < (1e6 if jax.__version_info__ >= (0, 12) else 1000 * vectors[:64].nbytes)


def test_the_least_of_many_are_items_though_they_are_nan():
    """Its empty places, which rank with nan, must not pass for items with other indices."""
    x, y = jnp.array([[jnp.nan], [jnp.nan], [5.0], [jnp.nan]]), jnp.arange(2.0)
    kernel = auto_vmap(x=0, y=0, reduce=BottomK(5))(lambda x, y: x + y)
    got = jax.jit(kernel.with_options(chunk_size=1))(x, y)
    assert got.indices.tolist() == [4, 5, 0, 1, 2]
    assert_same(got, jax.jit(kernel)(x, y))
