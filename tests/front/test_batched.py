# SPDX-License-Identifier: MIT
"""``batched=True``: functions that take a batch, against `jax.vmap` of the function of one item."""

import re
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jaxtyping import Array, Float

import rankax
from helpers import REMAT3, assert_same, compilations, refusal, slow, temporary_bytes
from rankax import SplitKey, auto_vmap, chunked_reduce, chunked_vmap
from rankax.reductions import Best, TopK

DRAW = np.random.default_rng(11)
X = jnp.asarray(DRAW.normal(size=(4, 5, 3)), jnp.float32)
S = jnp.asarray(DRAW.uniform(0.5, 2, size=5), jnp.float32)
W = jnp.asarray(DRAW.normal(size=(3, 2)), jnp.float32)
ROWS = X.reshape(20, 3)


class Out(NamedTuple):
    """What a network returns."""

    value: jax.Array
    index: jax.Array


def network(x, s):
    """Take a batch of vectors and scales."""
    return Out(jnp.tanh(x @ W) * s[:, None], jnp.argmax(x, 1))


def of_item(x, s):
    return Out(jnp.tanh(x @ W) * s, jnp.argmax(x))


ONE = auto_vmap(x=1, s=0)(of_item)
BATCHED = auto_vmap(x=1, s=0, batched=True)(network)


def close(got, want):
    assert_same(got, want, rtol=1e-4, atol=1e-4)


def total(fun):
    return lambda *args: sum(
        jnp.sum(x**2) for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.floating)
    )


@pytest.mark.parametrize("chunk_size", [None, 3, slow(6)])
def test_values_and_gradients(chunk_size):
    kernel = BATCHED.with_options(chunk_size=chunk_size)
    close(kernel(X, S), ONE(X, S))

    @jax.jit
    def both(x, s):
        slopes = [jax.grad(total(f), (0, 1)) for f in (kernel, ONE)]
        return [(slope(x, s), jax.jvp(slope, (x, s), (x, s))[1]) for slope in slopes]

    close(*both(X, S))


@pytest.mark.parametrize(
    ("chunk_size", "reduce"),
    [(7, "sum"), (7, TopK(3)), slow(None, "logsumexp")],
    ids=str,
)
def test_reductions(reduce, chunk_size):
    options = {"reduce": Out(reduce, None)}
    kernels = BATCHED.with_options(**options, chunk_size=chunk_size), ONE.with_options(**options)
    close(*jax.jit(lambda x: [(f(x, S), jax.grad(total(f))(x, S)) for f in kernels])(X))


def test_the_best_along_one_axis():
    options = {"reduce": Best("cost"), "reduce_axis": 0}
    kernel = auto_vmap(1, **options)(lambda x: {"cost": jnp.sum(x**2, -1), "x": x})
    close(kernel.with_options(batched=True, chunk_size=3)(X), kernel(X))


def test_a_changed_weight_is_seen_and_nothing_is_compiled_again():
    weights = [W]
    kernel = auto_vmap(1, chunk_size=6, batched=True)(lambda x: jnp.tanh(x @ weights[0]))
    slope = jax.grad(total(kernel))
    kernel(ROWS), slope(ROWS)
    weights[0] = 2 * W
    got, counts = zip(*(compilations(call, ROWS) for call in (kernel, slope)), strict=True)
    assert counts == (0, 0)
    close(got[0], jnp.tanh(ROWS @ (2 * W)))
    close(got[1], jax.grad(lambda x: total(jnp.tanh)(x @ (2 * W)))(ROWS))


def test_a_bucket_compiles_one_program():
    seen = []
    kernel = auto_vmap(1, chunk_size=8, batched=True, jit=True, bucket=(20,))(
        lambda x: seen.append(len(x)) or jnp.tanh(x)
    )
    for count in (17, 18, 20):
        close(kernel(ROWS[:count]), jnp.tanh(ROWS[:count]))
    assert seen == [1, 7]


def test_a_rule_around_a_callback():
    @jax.custom_vjp
    def tanh(x):
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    tanh.defvjp(lambda x: (tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))
    kernel = auto_vmap(1, chunk_size=7, batched=True)(tanh)
    close(jax.jit(jax.grad(total(kernel)))(ROWS), jax.grad(total(jnp.tanh))(ROWS))


def test_what_where_leaves_out_sends_nothing_back():
    def log(x):
        return {"log": jnp.log(x[..., 0]), "ok": x[..., 0] > 0}

    options = {"reduce": "sum", "where": "ok"}
    kernel = auto_vmap(1, chunk_size=6, batched=True, **options)(log)
    one = auto_vmap(1, **options)(log)
    x = ROWS.at[3, 0].set(0.0)
    both = jax.jit(lambda f, x: (f(x), jax.grad(lambda x: f(x)["log"])(x)), static_argnums=0)
    close(both(kernel, x), both(one, x))


def test_chunked_vmap_and_chunked_reduce():
    rows, want = ROWS[:5], jax.jit(jax.vmap(of_item))(ROWS[:5], S)
    mapped = chunked_vmap(network, 2, (1, 0), Out(1, 0), batched=True)
    close(mapped(rows.T, S), Out(want.value.T, want.index))
    reduced = chunked_reduce(network, "sum", 2, batched=True)
    close(reduced(rows, S), jax.tree.map(lambda x: x.sum(0), want))
    shared = chunked_vmap(lambda x, w: x @ w, 2, (0, None), batched=True)
    close(shared(ROWS, W), ROWS @ W)


def test_no_batch_axes_and_no_items():
    kernel = BATCHED.with_options(chunk_size=3)
    close(kernel(X[0, 0], 2.0), ONE(X[0, 0], 2.0))
    close(kernel(X[:0], S), ONE(X[:0], S))
    total = kernel.with_options(reduce="sum")
    close(total(X[:0], S), ONE.with_options(reduce="sum")(X[:0], S))


def test_pytrees_and_split_keys():
    def draw(key, pair):
        return jax.vmap(lambda key: jax.random.normal(key, (2,)))(key) + pair["a"], pair["b"]

    def draw_one(key, pair):
        return jax.random.normal(key, (2,)) + pair["a"], pair["b"]

    key, pair = jax.random.key(0), {"a": ROWS[:, :2], "b": ROWS > 0}
    ranks = {"key": SplitKey, "pair": 1}
    want = auto_vmap(**ranks)(draw_one)(key, pair)
    close(auto_vmap(**ranks, chunk_size=6, batched=True)(draw)(key, pair), want)


def test_vmap_from_outside():
    def scaled(w, x):
        return auto_vmap(1, chunk_size=6, batched=True)(lambda x: jnp.tanh(x @ w))(x)

    ws = jnp.stack([W, 2 * W, 3 * W])
    xs = jnp.stack([ROWS, ROWS + 1, ROWS + 2])

    def each(f):
        of_weights = jax.vmap(jax.grad(total(f)), (0, None))
        return jax.vmap(f)(ws, xs), jax.vmap(f, (None, 0))(W, xs), of_weights(ws, ROWS)

    close(*jax.jit(lambda: [each(f) for f in (scaled, lambda w, x: jnp.tanh(x @ w))])())


@pytest.mark.parametrize(
    ("options", "x", "lengths"),
    [
        ({}, X, [1, 20]),
        ({"chunk_size": 7}, X, [1, 7]),
        ({"chunk_size": 5}, X[:, :1], [1, 4]),
        # Of a reduction, a CPU would evaluate 1024 items at once.
        ({"chunk_size": 3000, "reduce": "sum"}, np.ones((6000, 1), np.float32), [1, 3000]),
    ],
    ids=["all", "uneven", "even", "sum"],
)
def test_lengths(options, x, lengths):
    seen = []
    auto_vmap(1, batched=True, **options)(lambda x: seen.append(len(x)) or x * 2)(x)
    assert seen == lengths


def test_an_exported_program_of_any_length():
    (length,) = jax.export.symbolic_shape("n")
    kernel = auto_vmap(1, batched=True)(lambda x: jnp.tanh(x @ W))
    shape = jax.ShapeDtypeStruct((length, 3), jnp.float32)
    close(jax.export.export(jax.jit(kernel))(shape).call(ROWS), jnp.tanh(ROWS @ W))


@pytest.mark.optimized
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_temporaries_do_not_grow_with_the_batch(reduce):
    w = jnp.ones((32, 256))
    fun = lambda x: jnp.sum(jnp.tanh(x @ w) ** 2, 1)  # noqa: E731
    kernel = auto_vmap(1, chunk_size=16, batched=True, reduce=reduce)(fun)
    for program in (kernel, jax.grad(lambda x: kernel(x).sum())):
        few, many = (temporary_bytes(program, jnp.ones((n, 32))) for n in (640, 16_000))
        assert many < few + 64


@pytest.mark.optimized
def test_a_memory_limit():
    w = jnp.ones((8, 256))
    fun = lambda x: jnp.sum(jnp.tanh(x @ w) ** 2, 1)  # noqa: E731
    kernel = auto_vmap(1, memory_limit="200 kB", batched=True)(fun)
    x = jnp.asarray(DRAW.normal(size=(1000, 8)), jnp.float32)
    assert 10 < kernel.plan(x).in_flight < 500
    assert temporary_bytes(jax.grad(lambda x: kernel(x).sum()), x) < 200_000
    close(kernel(x), fun(x))


def test_a_default_chunk_is_chosen_once():
    """Its own program, once it was known, counted as values of one item: 2 items for 21."""
    weights = jnp.zeros((256, 256))
    kernel = auto_vmap(1, batched=True, reduce="sum")(lambda x: jnp.sum(jnp.tanh(x @ weights), -1))
    assert kernel.plan(jax.ShapeDtypeStruct((4096, 256), "float32")).in_flight > 50


def test_a_simulator_without_vmap():
    shapes = set()

    def simulate(x):
        shapes.add(x.shape)
        return np.asarray(x).sum(-1)

    def simulator(x):
        return jax.pure_callback(simulate, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)

    kernel = auto_vmap(1, chunk_size=7, batched=True)(simulator)
    close(kernel(X), X.sum(-1))
    assert shapes == {(7, 3)}
    close(jax.jit(jax.vmap(kernel))(X), X.sum(-1))
    close(kernel.with_options(reduce="max")(X), X.sum(-1).max())
    assert kernel.nonfinite(X.at[1, 2, 0].set(jnp.nan)).indices.tolist() == [[1, 2]]


# Where it meets other options.


def test_check_finds_a_function_that_mixes_its_items():
    kernel = auto_vmap(1, chunk_size=7, batched=True)(lambda x: x - x.mean(0, keepdims=True))
    with pytest.raises(ValueError, match="but the kernel by itself gives"):
        kernel.check(ROWS)


@pytest.mark.parametrize("gradient", [False, slow(True)])
def test_check_agrees_with_a_function_that_does_not(gradient):
    assert BATCHED.with_options(chunk_size=7).check(X, S, items=2, gradient=gradient).items


def test_nonfinite_gradients():
    kernel = auto_vmap(0, chunk_size=7, batched=True)(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0))
    x = jnp.ones(20).at[17].set(0.0)
    assert kernel.nonfinite(x, gradient=True).indices.tolist() == [[17]]


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (
            lambda x: {"row": x, "sum": x.sum(), "w": W},
            "the first axis of each output is that of the items, but for 1 item, output['sum'] and "
            "output['w'] have another shape\n\n"
            "    output         shape\n"
            "    output['row']  (1, 3)\n"
            "  > output['sum']  ()\n",
        ),
        (
            lambda x: jnp.zeros((7, 2)) if len(x) > 1 else jnp.zeros((1, 2, 2)),
            "only the first axis of an output may depend on the number of items",
        ),
        (
            lambda x: jnp.zeros((1, 2)),
            "but for 7 items, output has another shape\n\n    output  shape\n  > output  (1, 2)",
        ),
        (
            lambda x: x if len(x) > 1 else (x, x),
            "but for 7 items it returns output, and for 1 item output[0] and output[1]",
        ),
    ],
)
def test_outputs_without_the_axis_are_named(fun, text):
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        auto_vmap(1, chunk_size=7, batched=True)(fun)(ROWS)
    assert str(error.value).startswith("<lambda>() at ")


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("auto_vmap(network)", lambda: auto_vmap(1, 0, batched=True, lockstep=False)(network)),
        ("chunked_vmap(network)", lambda: chunked_vmap(network, 3, batched=True, lockstep=False)),
        ("network()", lambda: BATCHED(X, S)),
    ],
)
def test_lanes_are_refused(where, call):
    text = (
        f"{where}: lockstep=False lets each item end by itself, but with batched=True the function "
        "takes a whole chunk; leave out one of them"
    )
    with rankax.options(lockstep=False):
        assert refusal(TypeError, call) == text


def test_an_error_of_the_function_says_what_it_gets():
    with pytest.raises(TypeError) as error:
        auto_vmap(1, batched=True, chunk_size=7)(lambda x: x @ jnp.ones(4))(ROWS)
    note = "With batched=True, it gets them with one axis in front, for the items."
    assert any(note in text for text in error.value.__notes__)


def test_annotations_describe_the_batch():
    def norm(x: Float[Array, "n 3"]) -> Float[Array, "n"]:
        return jnp.sqrt(jnp.sum(x**2, 1))

    close(auto_vmap(1, batched=True, chunk_size=7)(norm)(X), norm(ROWS).reshape(4, 5))
    text = (
        "auto_vmap(norm): no rank is declared; give ranks, as in auto_vmap(0, 1), because "
        "with batched=True, annotations describe the batch"
    )
    assert refusal(TypeError, auto_vmap(batched=True), norm) == text


@pytest.mark.skipif(REMAT3, reason="checkify does not know the new checkpoint of JAX")
def test_checkify_looks_inside():
    def log(x):
        checkify.check(jnp.all(x < 100), "too large")
        return jnp.log(x)

    kernel = auto_vmap(1, batched=True, chunk_size=7)(log)
    checked = jax.jit(checkify.checkify(kernel, checkify.user_checks | checkify.nan_checks))
    rows = jnp.abs(ROWS)
    error, out = checked(rows)
    assert error.get() is None
    close(out, jnp.log(rows))
    assert "too large" in checked(rows.at[3].set(200.0))[0].get()
    assert "nan" in checked(rows.at[3].set(-1.0))[0].get()


def test_references_are_refused():
    seen = jax.new_ref(jnp.zeros(3))

    def counting(x):
        seen[...] += x.sum(0)
        return x

    with pytest.raises(ValueError, match=r"it cannot use a jax.Ref; return the value instead"):
        auto_vmap(1, chunk_size=7, batched=True)(counting)(ROWS)
