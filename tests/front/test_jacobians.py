# SPDX-License-Identifier: MIT
"""`chunked_jacfwd`, `chunked_jacrev` and `chunked_hessian` against those of JAX, and their rows."""

import functools
import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import rankax
from helpers import assert_same, slow, temporary_bytes
from rankax import chunked_hessian, chunked_jacfwd, chunked_jacrev, reductions
from scan_cases import assert_same_weak_types

TRANSFORMATIONS = {
    "jacfwd": (jax.jacfwd, chunked_jacfwd),
    "jacrev": (jax.jacrev, chunked_jacrev),
    "hessian": (jax.hessian, chunked_hessian),
}


class Pose(NamedTuple):
    turn: jax.Array
    shift: jax.Array


def of_tree(tree):
    turned = jnp.outer(jnp.sin(tree["pose"].turn), tree["scale"])
    return {"all": turned, "sum": (jnp.sum(turned**2), tree["pose"].shift * tree["scale"][0])}


TREE = {"pose": Pose(jnp.array([0, 0.5, 1]), jnp.float32(2)), "scale": jnp.array([0.5, -1.5])}


X = jnp.asarray(np.linspace(0.1, 1, 5))
C = jnp.asarray(np.linspace(0.1, 0.55, 3) + 2j)


# A function, its arguments, and those of the transformation.
CASES = {
    "tree": (of_tree, (TREE,), {}),
    "two arguments": (lambda x, y: jnp.sum(x) * y**2, (X, X[:3]), {"argnums": (1, 0)}),
    "weak and not": (lambda x, y: (x * 1.5, x + y), (0.5, X), {"argnums": (0, 1)}),
    "aux": (lambda x: (jnp.sin(x) * jnp.sum(x), {"a": x[0]}), (X,), {"has_aux": True}),
    "holomorphic": (lambda z: z**2 * z[0], (C,), {"holomorphic": True}),
    "bfloat16": (lambda x: jnp.sin(x) * x[0], (X.astype(jnp.bfloat16),), {}),
    "constant": (lambda x: jnp.ones(2), (X,), {}),
    "empty": (jnp.sin, (jnp.zeros(0),), {}),
    "a number as output": (lambda x: 1.0, (X,), {}),
    "complex output": (lambda x: lax.complex(x, 2 * x), (X,), {}),
    "complex inputs": (lambda z: jnp.abs(z) ** 2, (C,), {}),
    "integers as outputs": (lambda x: {"n": 2, "x": x}, (X,), {}),
    "integers": (
        lambda tree: tree["x"] * tree["n"].astype(jnp.float32)[0],
        ({"n": jnp.arange(3), "x": X},),
        {"allow_int": True},
    ),
}


def assert_as_in_jax(got, want, name):
    assert_same(got, want, rtol=2e-2 if name == "bfloat16" else 1e-5, atol=1e-5)
    assert_same_weak_types(got, want)


# Transformations, and the functions that differ most for them.
AS_IN_JAX = [
    *(("jacfwd", name) for name in ("tree", "complex output", "integers as outputs")),
    *(("jacrev", name) for name in ("weak and not", "complex inputs", "integers")),
    ("hessian", "a number as output"),
    *(slow("jacfwd", name) for name in ("two arguments", "constant", "holomorphic")),
    *(slow("jacrev", name) for name in ("aux", "empty")),
    *(slow("hessian", name) for name in ("bfloat16", "tree")),
]


@pytest.mark.parametrize(("transformation", "name"), AS_IN_JAX)
def test_as_in_jax(transformation, name):
    plain, chunked = TRANSFORMATIONS[transformation]
    fun, args, options = CASES[name]
    each = [plain(fun, **options), *(chunked(fun, **options, chunk_size=n) for n in (1, 2, None))]
    want, *in_chunks = jax.jit(lambda *args: [jacobian(*args) for jacobian in each])(*args)
    for got in in_chunks:
        assert_as_in_jax(got, want, name)


def test_an_eager_call_is_as_in_jax():
    fun, args, options = CASES["two arguments"]
    got = chunked_jacrev(fun, **options, chunk_size=2)(*args)
    assert_as_in_jax(got, jax.jit(jax.jacrev(fun, **options))(*args), "two arguments")


@pytest.mark.parametrize("mode", ["jacfwd", "jacrev"])
def test_float_dtypes_are_mixed(mode):
    plain, chunked = TRANSFORMATIONS[mode]
    pair = X[:3], X.astype(jnp.float16)

    def fun(pair):
        return pair[1] * jnp.sum(pair[0]).astype(jnp.float16), pair[0] * 2

    with jax.numpy_dtype_promotion("standard"):  # JAX needs it
        got, want = jax.jit(lambda x: (chunked(fun, chunk_size=2)(x), plain(fun)(x)))(pair)
    assert_same(got, want, rtol=1e-2)


def test_keywords_and_what_is_no_array():
    def fun(x, name, *, power):
        assert name == "any"
        return x**power

    want = jax.jit(lambda x: jax.jacfwd(fun)(x, "any", power=3))(X)
    assert_same(chunked_jacfwd(fun, chunk_size=2)(X, "any", power=3), want)


def coupled(x):
    return jnp.sin(x) * jnp.sum(x**2)


@pytest.mark.parametrize(("mode", "order"), [("jacfwd", jax.jacrev), ("jacrev", jax.jacfwd)])
def test_jacobians_have_derivatives(mode, order):
    def both(jacobian):
        return order(jacobian)(X), jax.vmap(jacobian)(jnp.stack([X, -X]))

    plain, chunked = TRANSFORMATIONS[mode]
    got, want = jax.jit(lambda: (both(chunked(coupled, chunk_size=2)), both(plain(coupled))))()
    assert_same(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev, chunked_hessian])
@pytest.mark.parametrize("reduce", [None, "gram"])
def test_the_function_is_traced_once(chunked, reduce):
    traces = []

    def fun(x):
        traces.append(x)
        return jnp.sum(jnp.sin(x)) if chunked is chunked_hessian else jnp.sin(x)

    jax.eval_shape(chunked(fun, chunk_size=2, reduce=reduce), X)
    assert len(traces) == 1


# Reductions of the rows.


@functools.cache
def matrix(fun):
    """Return the Jacobian of a function of ``TREE`` as a matrix, and what shapes its rows."""
    flat, unravel = ravel_pytree(TREE)
    return jax.jit(jax.jacfwd(lambda v: ravel_pytree(fun(unravel(v)))[0]))(flat), unravel


ROWS = {
    "sum": lambda j: j.sum(0),
    "max": lambda j: j.max(0),
    "argmin": lambda j: j.argmin(0),
    "logsumexp": lambda j: jax.nn.logsumexp(j, 0),
}


@pytest.mark.parametrize(
    ("chunked", "chunk_size"),
    [(chunked_jacfwd, 3), (chunked_jacrev, 3), slow(chunked_jacfwd, 1), slow(chunked_jacrev, None)],
)
def test_rows_are_reduced(chunked, chunk_size):
    jacobian, unravel = matrix(of_tree)
    weights = jnp.linspace(-0.5, 2, len(jacobian))

    def reduced(reduce):
        return chunked(of_tree, chunk_size=chunk_size, reduce=reduce)(TREE)

    def by_hand(name):
        row = ROWS[name](jacobian)
        return jax.tree.map(lambda x: x.astype(row.dtype), unravel(row.astype(jacobian.dtype)))

    @jax.jit
    def both():
        shaped = ravel_pytree(of_tree(TREE))[1](weights)
        grams = [reduced(gram) for gram in ("gram", *map(reductions.Gram, (weights, shaped)))]
        weighted = jacobian.T @ (weights[:, None] * jacobian)
        least = reduced(reductions.BottomK(2))  # a tree for each input
        want = {name: by_hand(name) for name in ROWS}, [jacobian.T @ jacobian, weighted, weighted]
        return ({name: reduced(name) for name in ROWS}, grams), want, least["pose"].turn.values

    got, want, least = both()
    assert_same(got, want)
    assert_same(least, np.sort(jacobian[:, :3], 0)[:2])


@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev])
def test_the_diagonal_and_the_trace(chunked):
    def flow(tree):
        return jax.tree.map(lambda x: jnp.sin(x) * jnp.sum(tree["scale"]), tree)

    jacobian, unravel = matrix(flow)
    of = functools.partial(chunked, flow, chunk_size=2)
    got = jax.jit(lambda tree: (of(reduce="trace")(tree), of(reduce="diagonal")(tree)))(TREE)
    assert_same(got, jax.jit(lambda j: (jnp.trace(j), unravel(jnp.diagonal(j))))(jacobian))


def test_the_rows_of_a_hessian():
    @jax.jit
    def energy(tree):
        return jnp.sum(of_tree(tree)["all"] ** 3) + tree["pose"].shift ** 2, {"aux": 1.0}

    hessian, unravel = matrix(jax.grad(lambda tree: energy(tree)[0]))
    of = functools.partial(chunked_hessian, energy, has_aux=True, chunk_size=2)
    got, aux = of(reduce="trace")(TREE)
    assert_same(got, np.trace(hessian), atol=1e-5)
    assert aux == {"aux": 1.0}
    got = jax.jit(lambda tree: [of(reduce=r)(tree)[0] for r in ("diagonal", "gram")])(TREE)
    want = jax.jit(lambda h: [unravel(jnp.diagonal(h)), h @ h])(hessian)
    assert_same(got, want, atol=1e-5)


# The types of the inputs and the outputs, and how near to the Jacobian a function computes.
@pytest.mark.parametrize(
    ("mode", "narrow", "wide", "rtol"),
    [("jacrev", jnp.float32, jnp.bfloat16, 3e-2), ("jacfwd", jnp.bfloat16, jnp.float32, 1e-5)],
)
def test_rows_have_the_types_of_the_jacobian(mode, narrow, wide, rtol):
    plain, chunked = TRANSFORMATIONS[mode]
    rng = np.random.default_rng(3)
    weights = jnp.asarray(rng.uniform(0.5, 1, (4, 4)), wide)
    x = jnp.asarray(np.linspace(0.2, 1, 4), narrow)

    def fun(x):
        return jnp.sin(weights @ x[::-1].astype(wide))

    jacobian = jax.jit(plain(fun))(x)
    ways = {"gram": lambda j: j.T @ j, "diagonal": jnp.diagonal, "trace": jnp.trace}
    ways |= {name: ROWS[name] for name in ("sum", "max")}
    got = jax.jit(lambda x: {way: chunked(fun, reduce=way, chunk_size=3)(x) for way in ways})(x)
    want = {way: by_hand(jacobian) for way, by_hand in ways.items()}
    assert_same(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev])
def test_the_gram_matrix_of_no_rows_is_zero(chunked):
    without_rows = (lambda x: jnp.sin(x[:0]), lambda x: (), lambda x: {"a": x[:0], "b": ()})

    @jax.jit
    def grams(x):
        each = itertools.product(without_rows, ("gram", reductions.Gram(jnp.ones(0))))
        return [chunked(fun, reduce=reduce, chunk_size=2)(x) for fun, reduce in each]

    assert_same(grams(X), [jnp.zeros((5, 5), jnp.float32)] * 6)
    # Without inputs there is no number in it.
    empty = chunked(jnp.sin, reduce="gram", chunk_size=2)(X[:0])
    assert_same(empty, jnp.zeros((0, 0), jnp.float32))


def test_the_diagonal_and_the_trace_of_no_columns():
    none = X[:0]
    for size in (None, 2):
        assert_same(chunked_jacrev(jnp.sin, reduce="diagonal", chunk_size=size)(none), none)
        laplacian = chunked_hessian(jnp.sum, reduce="trace", chunk_size=size)(none)
        assert_same(laplacian, jnp.trace(jax.hessian(jnp.sum)(none)))


@pytest.mark.parametrize(
    ("fun", "z", "chunked"),
    [
        (lambda z: z**2 * z[0], C, chunked_jacfwd),
        (lambda z: z**2 * z[0], C, chunked_jacrev),
        (lambda x: lax.complex(x**2, x[0] * x), X, chunked_jacfwd),
    ],
)
def test_the_gram_matrix_of_a_complex_jacobian(fun, z, chunked):
    holomorphic = z is C
    jacobian = np.asarray(jax.jit(jax.jacfwd(fun, holomorphic=holomorphic))(z))
    want = jacobian.conj().T @ jacobian
    got = jax.jit(chunked(fun, holomorphic=holomorphic, reduce="gram", chunk_size=2))(z)
    assert_same(got, want if holomorphic else want.real)


@pytest.mark.parametrize("mode", ["jacfwd", "jacrev"])
def test_reduced_rows_have_derivatives(mode):
    plain, chunked = TRANSFORMATIONS[mode]

    def by_hand(x, weights):
        jacobian = plain(coupled)(x)
        return jnp.sum(jnp.cos(jacobian.T @ (weights[:, None] * jacobian)))

    def reduced(x, weights):
        return jnp.sum(jnp.cos(chunked(coupled, reduce=reductions.Gram(weights), chunk_size=2)(x)))

    weights = jnp.linspace(0.5, 1, 5)
    both = jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (reduced, by_hand)])
    got, want = both(X, weights)
    assert_same(got, want, rtol=1e-4, atol=1e-4)


def test_a_whole_row_is_an_item_in_reverse_mode():
    norms = reductions.Fold(0.0, lambda row: jnp.vdot(row, row), jnp.add, jnp.sqrt)
    got = chunked_jacrev(jnp.cumsum, reduce=norms, chunk_size=2)(X)
    assert_same(got, jnp.float32(np.sqrt(15)))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_the_gram_matrix_of_any_items(chunk_size):
    rows = np.sin(np.arange(50, dtype=np.float32)).reshape(10, 5)
    gram = rankax.chunked_reduce(lambda row: {"a": row[:2], "b": row[2:, None]}, "gram", chunk_size)

    @jax.jit
    def values_and_gradients(rows):
        each = gram, lambda rows: rows.T @ rows
        return [(f(rows), jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(rows)) for f in each]

    assert_same(*values_and_gradients(rows), rtol=1e-4)


@pytest.mark.optimized
def test_the_gradient_of_a_gram_matrix_stores_no_items():
    def total(x):
        return jnp.sum(jnp.sin(rankax.chunked_reduce(jnp.cumsum, "gram", 500)(x)))

    few, many = (jax.ShapeDtypeStruct((n, 100), jnp.float32) for n in (40_000, 400_000))
    need = temporary_bytes(jax.grad(total), few)
    assert temporary_bytes(jax.grad(total), many) <= need + 4096 < 40_000 * 100 * 4


def test_a_memory_limit_and_progress():
    reports = []

    def fun(x):
        return jnp.sin(jnp.outer(x, jnp.arange(1000.0))).sum(1)

    x = np.linspace(0, 1, 100, dtype=np.float32)
    limited = chunked_jacfwd(fun, memory_limit="1 MB")
    rates = np.arange(1000.0, dtype=np.float32)
    want = np.diag((rates * np.cos(np.outer(x, rates))).sum(1))
    assert_same(jax.jit(limited)(x), want, rtol=1e-4, atol=0.1)
    shown = chunked_jacrev(fun, chunk_size=10, progress=lambda *pair: reports.append(pair))
    shown(x)
    jax.effects_barrier()
    assert reports[-1] == (100, 100)


# Memory.

M, N = 20_000, 2000
POINT = jax.ShapeDtypeStruct((N,), jnp.float32)
RATES = jnp.asarray(np.linspace(1, 2, 4))


def waves(p):
    """From 2000 inputs to 20,000 outputs, by way of 80,000 numbers, and of these in order."""
    u = jnp.repeat(p, M // N)
    return jnp.sort(jnp.sin(u[:, None] * RATES[None]), axis=0).sum(1)


@pytest.mark.optimized
def test_a_jacobian_needs_one_chunk_beyond_itself():
    assert temporary_bytes(jax.jacrev(waves), POINT) > 1e9
    for chunked in (chunked_jacfwd, chunked_jacrev):  # the output has 160 MB, and is not copied
        assert temporary_bytes(chunked(waves, chunk_size=10), POINT) < 10e6


@pytest.mark.optimized
@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev])
def test_what_is_reduced_needs_no_jacobian(chunked):
    assert temporary_bytes(chunked(waves, reduce="gram", chunk_size=10), POINT) < 20e6

    def flow(u):
        return jnp.sin(u) * jnp.sum(jnp.sin(u))

    large = jax.ShapeDtypeStruct((M,), jnp.float32)  # the Jacobian has 1.6 GB
    assert temporary_bytes(chunked(flow, reduce="trace", chunk_size=10), large) < 10e6


@pytest.mark.optimized
def test_both_passes_of_a_hessian_are_bounded():
    def layer(p, weights):  # 200 rows of 5000 numbers each
        return jnp.tanh(weights @ jnp.sin(jnp.repeat(p, 50)))

    shapes = (100,), (200, 5000)
    point, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    need = temporary_bytes(chunked_hessian(layer, chunk_size=10), point, weights)
    rows_at_once = chunked_jacfwd(jax.jacrev(layer), chunk_size=10)
    assert need < temporary_bytes(rows_at_once, point, weights) / 3


# Bad input.


@pytest.mark.parametrize(
    ("transformation", "fun", "x", "options"),
    [
        ("jacfwd", jnp.sin, 1, {}),
        ("hessian", jnp.sin, 1.0, {"argnums": "a"}),
        ("jacfwd", jnp.sin, 1.0, {"holomorphic": True}),
        ("hessian", 3, 1.0, {}),
        ("jacfwd", lambda x: "text", 1.0, {}),
        ("jacrev", lambda x: x > 0, 1.0, {}),
        ("hessian", lambda x: lax.complex(x, x), 1.0, {}),
        ("jacrev", lambda x: (x, x, x), 1.0, {"has_aux": True}),
    ],
)
def test_errors_are_those_of_jax(transformation, fun, x, options):
    plain, chunked = TRANSFORMATIONS[transformation]
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        plain(fun, **options)(x)
    with pytest.raises(wanted.type) as caught:
        chunked(fun, **options, chunk_size=2)(x)
    assert str(caught.value).split("\n")[0][:60] == str(wanted.value).split("\n")[0][:60]


BAD = {
    "jacfwd(sum): 'trace' needs outputs with the structure and the shapes of the inputs": (
        lambda: chunked_jacfwd(jnp.sum, reduce="trace")(X)
    ),
    "jacfwd(sin): Best(0) takes whole rows, but forward mode has columns; use chunked_jacrev": (
        lambda: chunked_jacfwd(jnp.sin, reduce=reductions.Best(0))(X)
    ),
    "jacrev(sin): reduce must be one reduction, which all inputs share": (
        lambda: chunked_jacrev(jnp.sin, reduce=("sum", "max"))
    ),
    "jacrev(sin): Gram has 2 weights for 5 outputs": (
        lambda: chunked_jacrev(jnp.sin, reduce=reductions.Gram(X[:2]))(X)
    ),
    "jacrev(sin): reduce needs inputs and outputs of floats": (
        lambda: chunked_jacrev(jnp.sin, allow_int=True, reduce="sum")(jnp.arange(3))
    ),
    "hessian(sum): chunk_size must be a positive int, got 0": (
        lambda: chunked_hessian(jnp.sum, chunk_size=0)
    ),
    "hessian(sum): no reduction is called 'diag'; did you mean 'diagonal'?": (
        lambda: chunked_hessian(jnp.sum, reduce="diag")
    ),
    "any, all, logsumexp, gram, diagonal and trace": (
        lambda: chunked_hessian(jnp.sum, reduce="laplacian")
    ),
    "its weights are for the rows of a Jacobian": (
        lambda: rankax.chunked_reduce(jnp.sin, reductions.Gram(X), 2)(X)
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_named(text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        BAD[text]()


@pytest.mark.parametrize("chunked", [chunked_jacfwd, slow(chunked_jacrev)])
def test_types_are_found_once(chunked, monkeypatch):
    """JAX takes longer to find what a Jacobian is like than to evaluate a small one."""
    plain = jax.jacfwd if chunked is chunked_jacfwd else jax.jacrev
    x, w = jnp.linspace(0, 1, 4), jnp.ones((3, 4))

    def layer(x, w):
        return {"y": jnp.tanh(w @ x), "weak": x.sum() * 2}

    asked, eval_shape = [], jax.eval_shape
    monkeypatch.setattr(jax, "eval_shape", lambda *a: asked.append(a) or eval_shape(*a))
    rankax.clear_caches()
    for given in [(x, w), (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), (x[:0], w[:, :0])]:
        for expected in (2, 0):
            asked.clear()
            got = chunked(layer, (0, 1), chunk_size=2)(*given)
            assert len(asked) == expected
        assert_same(got, plain(layer, (0, 1))(*given), atol=1e-2)
    got = chunked(lambda x, w: x * 2, (0, 1), chunk_size=2)(x, w)  # outputs of other types
    assert_same(got, plain(lambda x, w: x * 2, (0, 1))(x, w))
    for _ in range(2):
        with pytest.raises(TypeError, match="real"):
            chunked(layer, (0, 1), chunk_size=2)(jnp.arange(4), w)
