# SPDX-License-Identifier: MIT
"""`chunked_jacfwd`, `chunked_jacrev` and `chunked_hessian` against those of JAX, and their rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import rankax
from helpers import assert_same, named_reductions, slow, temporary_bytes
from rankax import chunked_hessian, chunked_jacfwd, chunked_jacrev, reductions
from scan_cases import assert_same_weak_types

BOTH = [
    pytest.param(jax.jacfwd, chunked_jacfwd, id="jacfwd"),
    pytest.param(jax.jacrev, chunked_jacrev, id="jacrev"),
]
ALL = [*BOTH, pytest.param(jax.hessian, chunked_hessian, id="hessian")]


class Pose(NamedTuple):
    turn: jax.Array
    shift: jax.Array


def of_tree(tree):
    turned = jnp.outer(jnp.sin(tree["pose"].turn), tree["scale"])
    return {"all": turned, "sum": (jnp.sum(turned**2), tree["pose"].shift * tree["scale"][0])}


TREE = {"pose": Pose(jnp.array([0, 0.5, 1]), jnp.float32(2)), "scale": jnp.array([0.5, -1.5])}


def of_two(x, y, *, power=2):
    return jnp.sum(x) * y**power


def with_aux(x):
    return jnp.sin(x) * jnp.sum(x), {"aux": x[0]}


X = jnp.asarray(np.linspace(0.1, 1, 5))
C = jnp.asarray(np.linspace(0.1, 0.55, 3) + 2j)
ARRAY = (jnp.asarray(np.linspace(0, 1, 6).reshape(2, 3)),)

# A function, its arguments, and those of the transformation.
CASES = {
    "vector": (lambda x: jnp.cumsum(jnp.tanh(x)), (X,), {}),
    "number": (jnp.sin, (0.3,), {}),
    "matrix": (lambda x: x @ x.T, ARRAY, {}),
    "scalar output": (lambda x: jnp.sum(x**3), (X,), {}),
    "tree": (of_tree, (TREE,), {}),
    "two arguments": (of_two, (X, X[:3]), {"argnums": (1, 0)}),
    "a tuple of one": (of_two, (X, X[:3]), {"argnums": (1,)}),
    "negative argnums": (of_two, (X, X[:3]), {"argnums": -1}),
    "weak and not": (lambda x, y: (x * 1.5, x + y), (0.5, X), {"argnums": (0, 1)}),
    "aux": (with_aux, (X,), {"has_aux": True}),
    "holomorphic": (lambda z: z**2 * z[0], (C,), {"holomorphic": True}),
    "bfloat16": (lambda x: jnp.sin(x) * x[0], (X.astype(jnp.bfloat16),), {}),
    "constant": (lambda x: jnp.ones(2), (X,), {}),
    "empty": (lambda x: jnp.sin(x), (jnp.zeros(0),), {}),
    "a number as output": (lambda x: 1.0, (X,), {}),
}

# Reverse mode refuses these outputs.
FORWARD_CASES = {
    "complex output": (lambda x: lax.complex(x, 2 * x), (X,), {}),
    "integers": (lambda x: {"n": 2, "x": x}, (X,), {}),
}


@functools.cache
def in_jax(plain, name):
    fun, args, options = (CASES | FORWARD_CASES)[name]
    return jax.jit(plain(fun, **options))(*args)


def same_as_in_jax(got, plain, name):
    want = in_jax(plain, name)
    assert_same(got, want, rtol=2e-2 if name == "bfloat16" else 1e-5, atol=1e-5)
    assert_same_weak_types(got, want)


# A function and the transformations that differ most for it.
AS_IN_JAX = [
    ("jacfwd", "tree"),
    ("jacrev", "weak and not"),
    ("hessian", "a number as output"),
    *(slow("jacfwd", name) for name in ("vector", "matrix", "two arguments", "constant")),
    *(slow("jacrev", name) for name in ("number", "scalar output", "a tuple of one", "aux")),
    *(slow("hessian", name) for name in ("negative argnums", "bfloat16", "tree", "weak and not")),
    *(slow("jacfwd", name) for name in ("holomorphic", "bfloat16")),
    *(slow("jacrev", name) for name in ("empty", "tree")),
]
TRANSFORMATIONS = {
    "jacfwd": (jax.jacfwd, chunked_jacfwd),
    "jacrev": (jax.jacrev, chunked_jacrev),
    "hessian": (jax.hessian, chunked_hessian),
}


@pytest.mark.parametrize(("transformation", "name"), AS_IN_JAX)
def test_as_in_jax(transformation, name):
    plain, chunked = TRANSFORMATIONS[transformation]
    fun, args, options = CASES[name]
    each = [chunked(fun, **options, chunk_size=size) for size in (1, 2, None)]
    for got in jax.jit(lambda *args: [transformed(*args) for transformed in each])(*args):
        same_as_in_jax(got, plain, name)


@pytest.mark.parametrize(
    ("transformation", "name"),
    [("jacrev", "two arguments"), slow("jacfwd", "number"), slow("hessian", "weak and not")],
)
def test_eager_calls_are_as_in_jax(transformation, name):
    plain, chunked = TRANSFORMATIONS[transformation]
    fun, args, options = CASES[name]
    same_as_in_jax(chunked(fun, **options, chunk_size=2)(*args), plain, name)


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_outputs_that_only_forward_mode_takes(name):
    fun, args, _ = FORWARD_CASES[name]
    same_as_in_jax(chunked_jacfwd(fun, chunk_size=2)(*args), jax.jacfwd, name)


def test_integers_as_inputs():
    def fun(tree):
        return tree["x"] * tree["n"].astype(jnp.float32)[0]

    tree = {"n": jnp.arange(3), "x": X}
    want = jax.jit(jax.jacrev(fun, allow_int=True))(tree)
    assert_same(chunked_jacrev(fun, allow_int=True, chunk_size=2)(tree), want)


def test_complex_inputs_of_a_real_function():
    def fun(z):
        return jnp.abs(z) ** 2

    assert_same(chunked_jacrev(fun, chunk_size=2)(C), jax.jit(jax.jacrev(fun))(C))


def test_inputs_and_outputs_of_several_dtypes():
    def fun(pair):
        x, y = pair
        return y * jnp.sum(x).astype(jnp.float16), x * 2

    pair = X[:3], X.astype(jnp.float16)
    with jax.numpy_dtype_promotion("standard"):  # JAX needs it
        for plain, chunked in ((jax.jacfwd, chunked_jacfwd), (jax.jacrev, chunked_jacrev)):
            got, want = jax.jit(lambda x: (chunked(fun, chunk_size=2)(x), plain(fun)(x)))(pair)  # noqa: B023
            assert_same(got, want, rtol=1e-2)


def test_keywords_and_what_is_no_array():
    def fun(x, name, *, power):
        assert name == "any"
        return x**power

    want = jax.jit(lambda x: jax.jacfwd(fun)(x, "any", power=3))(X)
    assert_same(chunked_jacfwd(fun, chunk_size=2)(X, "any", power=3), want)


@pytest.mark.parametrize("order", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize(("plain", "chunked"), BOTH)
def test_jacobians_have_derivatives(plain, chunked, order):
    def fun(x):
        return jnp.sin(x) * jnp.sum(x**2)

    def both(jacobian):
        return order(jacobian)(X), jax.vmap(jacobian)(jnp.stack([X, -X]))

    got, want = jax.jit(lambda: (both(chunked(fun, chunk_size=2)), both(plain(fun))))()
    assert_same(got[0], want[0], rtol=1e-4, atol=1e-5)
    assert_same(got[1], want[1])


@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev, chunked_hessian])
@pytest.mark.parametrize("reduce", [None, "gram"])
def test_the_function_is_traced_once(chunked, reduce):
    traces = []

    def fun(x):
        traces.append(x)
        return jnp.sum(jnp.sin(x)) if chunked is chunked_hessian else jnp.sin(x)

    jax.jit(chunked(fun, chunk_size=2, reduce=reduce))(X)
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
    "mean": lambda j: j.mean(0),
    "argmin": lambda j: j.argmin(0),
    "logsumexp": lambda j: jax.nn.logsumexp(j, 0),
}
REDUCED = [
    pytest.param(chunked, chunk_size, id=f"{chunked.__name__}-{chunk_size}", marks=marks)
    for chunked in (chunked_jacfwd, chunked_jacrev)
    for chunk_size, marks in ((None, pytest.mark.slow), (1, pytest.mark.slow), (3, ()))
]


@pytest.mark.parametrize(("chunked", "chunk_size"), REDUCED)
@pytest.mark.parametrize("name", ["sum", "max", *map(slow, ("mean", "argmin", "logsumexp"))])
def test_rows_are_reduced(chunked, chunk_size, name):
    jacobian, unravel = matrix(of_tree)

    def by_hand(jacobian):
        row = ROWS[name](jacobian)
        return jax.tree.map(lambda x: x.astype(row.dtype), unravel(row.astype(jacobian.dtype)))

    got = jax.jit(chunked(of_tree, chunk_size=chunk_size, reduce=name))(TREE)
    assert_same(got, jax.jit(by_hand)(jacobian))


@pytest.mark.slow
@pytest.mark.parametrize(("chunked", "chunk_size"), REDUCED)
def test_a_reduction_may_return_a_tree_for_each_input(chunked, chunk_size):
    jacobian, _ = matrix(of_tree)
    least = jax.jit(chunked(of_tree, reduce=reductions.BottomK(2), chunk_size=chunk_size))(TREE)
    assert_same(least["pose"].turn.values, np.sort(jacobian[:, :3], 0)[:2])


@pytest.mark.parametrize(("chunked", "chunk_size"), REDUCED)
def test_the_gram_matrix_is_that_of_the_flat_inputs(chunked, chunk_size):
    jacobian = np.asarray(matrix(of_tree)[0])
    of = functools.partial(chunked, jax.jit(of_tree), chunk_size=chunk_size)
    assert_same(of(reduce="gram")(TREE), jacobian.T @ jacobian)
    weights = np.linspace(-0.5, 2, len(jacobian), dtype=np.float32)
    want = jacobian.T @ (weights[:, None] * jacobian)

    @jax.jit
    def weighted(weights):
        shaped = ravel_pytree(of_tree(TREE))[1](weights)
        return [of(reduce=reductions.Gram(w))(TREE) for w in (weights, shaped)]

    assert_same(weighted(weights), [want, want])


@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev])
@pytest.mark.parametrize("chunk_size", [slow(None), 2])
def test_the_diagonal_and_the_trace(chunked, chunk_size):
    def flow(tree):
        return jax.tree.map(lambda x: jnp.sin(x) * jnp.sum(tree["scale"]), tree)

    jacobian, unravel = matrix(flow)
    of = functools.partial(chunked, flow, chunk_size=chunk_size, has_aux=False)
    got = jax.jit(lambda tree: (of(reduce="trace")(tree), of(reduce="diagonal")(tree)))(TREE)
    assert_same(got, jax.jit(lambda j: (jnp.trace(j), unravel(jnp.diagonal(j))))(jacobian))


@pytest.mark.parametrize("chunk_size", [slow(None), 2])
def test_the_rows_of_a_hessian(chunk_size):
    @jax.jit
    def energy(tree):
        return jnp.sum(of_tree(tree)["all"] ** 3) + tree["pose"].shift ** 2, {"aux": 1.0}

    hessian, unravel = matrix(jax.grad(lambda tree: energy(tree)[0]))
    of = functools.partial(chunked_hessian, energy, has_aux=True, chunk_size=chunk_size)
    got, aux = of(reduce="trace")(TREE)
    assert_same(got, np.trace(hessian), atol=1e-5)
    assert aux == {"aux": 1.0}
    got = jax.jit(lambda tree: [of(reduce=r)(tree)[0] for r in ("diagonal", "gram")])(TREE)
    want = jax.jit(lambda h: [unravel(jnp.diagonal(h)), h @ h])(hessian)
    assert_same(got, want, atol=1e-5)


# The types of the inputs and the outputs of a function, and how near to its Jacobian it computes.
TYPES = {
    "wider outputs": (jnp.bfloat16, jnp.float32, 1e-5),
    "narrower outputs": (jnp.float32, jnp.bfloat16, 3e-2),
}


@pytest.mark.parametrize(
    ("chunked", "types"),
    [(chunked_jacrev, "narrower outputs"), (chunked_jacfwd, "wider outputs")],
)
def test_rows_have_the_types_of_the_jacobian(chunked, types):
    narrow, wide, rtol = TYPES[types]
    rng = np.random.default_rng(3)
    weights = jnp.asarray(rng.uniform(0.5, 1, (4, 4)), wide)
    x = jnp.asarray(np.linspace(0.2, 1, 4), narrow)

    @jax.jit
    def fun(x):
        return jnp.sin(weights @ x[::-1].astype(wide))

    plain = jax.jacfwd if chunked is chunked_jacfwd else jax.jacrev
    jacobian = jax.jit(plain(fun))(x)
    ways = {
        "gram": lambda j: j.T @ j,
        "diagonal": jnp.diagonal,
        "trace": jnp.trace,
        "sum": lambda j: j.sum(0),
        "max": lambda j: j.max(0),
    }
    got = jax.jit(lambda x: {way: chunked(fun, reduce=way, chunk_size=3)(x) for way in ways})(x)
    want = {way: by_hand(jacobian) for way, by_hand in ways.items()}
    rtol = rtol if jacobian.dtype == jnp.float32 else 3e-2
    assert_same(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev])
def test_the_gram_matrix_of_no_rows_is_zero(chunked):
    for fun in (lambda x: jnp.sin(x[:0]), lambda x: (), lambda x: {"a": x[:0], "b": ()}):
        for reduce in ("gram", reductions.Gram(jnp.ones(0))):
            got = chunked(fun, reduce=reduce, chunk_size=2)(X)
            assert_same(got, jnp.zeros((5, 5), jnp.float32))
    # Without inputs there is no number in it.
    empty = chunked(jnp.sin, reduce="gram", chunk_size=2)(X[:0])
    assert_same(empty, jnp.zeros((0, 0), jnp.float32))


def test_the_gram_matrix_of_a_complex_jacobian():
    def fun(z):
        return z**2 * z[0]

    jacobian = np.asarray(jax.jit(jax.jacfwd(fun, holomorphic=True))(C))
    for chunked in (chunked_jacfwd, chunked_jacrev):
        got = jax.jit(chunked(fun, holomorphic=True, reduce="gram", chunk_size=2))(C)
        assert_same(got, jacobian.conj().T @ jacobian)


def test_the_gram_matrix_of_real_inputs_is_real():
    def fun(x):
        return lax.complex(x**2, x[0] * x)

    jacobian = np.asarray(jax.jit(jax.jacfwd(fun))(X))
    got = jax.jit(chunked_jacfwd(fun, reduce="gram", chunk_size=2))(X)
    assert_same(got, (jacobian.conj().T @ jacobian).real)


@pytest.mark.parametrize(("plain", "chunked"), BOTH)
def test_reduced_rows_have_derivatives(plain, chunked):
    def fun(x):
        return jnp.sin(x) * jnp.sum(x**2)

    weights = jnp.linspace(0.5, 1, 5)

    def by_hand(x, weights):
        jacobian = plain(fun)(x)
        return jnp.sum(jnp.cos(jacobian.T @ (weights[:, None] * jacobian))) + jacobian.max(0).sum()

    def reduced(x, weights):
        gram = chunked(fun, reduce=reductions.Gram(weights), chunk_size=2)(x)
        return jnp.sum(jnp.cos(gram)) + chunked(fun, reduce="max", chunk_size=2)(x).sum()

    want = jax.jit(jax.grad(by_hand, (0, 1)))(X, weights)
    assert_same(jax.jit(jax.grad(reduced, (0, 1)))(X, weights), want, rtol=1e-4, atol=1e-4)


def test_a_whole_row_is_an_item_in_reverse_mode():
    norms = reductions.Fold(0.0, lambda row: jnp.vdot(row, row), jnp.add, jnp.sqrt)
    jacobian = np.tril(np.ones((5, 5), np.float32))
    got = chunked_jacrev(jnp.cumsum, reduce=norms, chunk_size=2)(X)
    assert_same(got, np.linalg.norm(jacobian))


def test_the_gram_matrix_of_any_items():
    rows = np.sin(np.arange(50, dtype=np.float32)).reshape(10, 5)

    def split(row):
        return {"a": row[:2], "b": row[2:].reshape(3, 1)}

    want = jax.jit(jax.grad(lambda rows: jnp.sum(jnp.sin(rows.T @ rows))))(rows)
    for chunk_size, wrap in ((None, jax.jit), (3, jax.jit), (5, lambda fun: fun)):
        reduced = wrap(rankax.chunked_reduce(split, "gram", chunk_size))
        assert_same(reduced(rows), rows.T @ rows)
        got = wrap(jax.grad(lambda rows: jnp.sum(jnp.sin(reduced(rows)))))(rows)  # noqa: B023
        assert_same(got, want, rtol=1e-4)


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
    assert_same(jax.jit(limited)(x), jax.jit(jax.jacfwd(fun))(x), rtol=1e-4, atol=1e-2)
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
        assert temporary_bytes(chunked(waves, chunk_size=50), POINT) < 50e6
        assert temporary_bytes(chunked(waves, chunk_size=10), POINT) < 10e6


@pytest.mark.optimized
@pytest.mark.parametrize("chunked", [chunked_jacfwd, chunked_jacrev])
def test_what_is_reduced_needs_no_jacobian(chunked):
    assert temporary_bytes(chunked(waves, reduce="gram", chunk_size=10), POINT) < 20e6
    assert temporary_bytes(chunked(waves, reduce="max", chunk_size=10), POINT) < 10e6

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


@pytest.mark.optimized
def test_a_hessian_of_a_scalar_needs_one_chunk_beyond_itself():
    def energy(p):
        return jnp.sum(jnp.sin(waves(p)) ** 2)

    plain = temporary_bytes(jax.hessian(energy), POINT)
    assert plain > 1e9
    assert temporary_bytes(chunked_hessian(energy, chunk_size=10), POINT) < N * N * 4 + 40e6
    assert temporary_bytes(chunked_hessian(energy, chunk_size=10, reduce="trace"), POINT) < 40e6


# Bad input.


@pytest.mark.parametrize(("plain", "chunked"), ALL)
@pytest.mark.parametrize(
    ("fun", "args", "options"),
    [
        (jnp.sin, (1,), {}),
        (jnp.sin, (1.0,), {"argnums": 1}),
        (jnp.sin, (1.0,), {"argnums": "a"}),
        (jnp.sin, (1.0,), {"holomorphic": True}),
        (3, (1.0,), {}),
        (lambda x: "text", (1.0,), {}),
    ],
)
def test_errors_are_those_of_jax(plain, chunked, fun, args, options):
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        plain(fun, **options)(*args)
    with pytest.raises(wanted.type) as caught:
        chunked(fun, **options, chunk_size=2)(*args)
    assert str(caught.value).split("\n")[0][:60] == str(wanted.value).split("\n")[0][:60]


@pytest.mark.parametrize(("plain", "chunked"), ALL[1:])
@pytest.mark.parametrize(
    ("fun", "has_aux"),
    [
        (lambda x: x > 0, False),
        (lambda x: lax.complex(x, x), False),
        (lambda x: (x, x, x), True),
    ],
)
def test_reverse_mode_refuses_what_it_refuses_in_jax(plain, chunked, fun, has_aux):
    with pytest.raises(TypeError) as wanted:
        plain(fun, has_aux=has_aux)(1.0)
    with pytest.raises(TypeError) as caught:
        chunked(fun, has_aux=has_aux, chunk_size=2)(1.0)
    assert str(caught.value)[:60] == str(wanted.value)[:60]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: chunked_jacfwd(jnp.sum, reduce="trace")(X),
            ValueError,
            "chunked_jacfwd(sum): 'trace' needs outputs with the structure and the shapes of the "
            "inputs, got () for (5,)",
        ),
        (
            lambda: chunked_jacfwd(jnp.sin, reduce=reductions.Best(0))(X),
            TypeError,
            "chunked_jacfwd(sin): Best(0) takes whole rows, but forward mode has columns; use "
            "chunked_jacrev",
        ),
        (
            lambda: chunked_jacrev(jnp.sin, reduce=("sum", "max")),
            TypeError,
            "chunked_jacrev(sin): reduce must be one reduction, which all inputs share",
        ),
        (
            lambda: chunked_jacrev(jnp.sin, reduce=reductions.Gram(X[:2]))(X),
            ValueError,
            "chunked_jacrev(sin): Gram has 2 weights for 5 outputs",
        ),
        (
            lambda: chunked_jacrev(jnp.sin, allow_int=True, reduce="sum")(jnp.arange(3)),
            TypeError,
            "chunked_jacrev(sin): reduce needs inputs and outputs of floats",
        ),
        (
            lambda: chunked_jacrev(jnp.sin, reduce="diagonl"),
            ValueError,
            "chunked_jacrev(sin): no reduction is called 'diagonl'; available: "
            + named_reductions("and"),
        ),
        (
            lambda: chunked_hessian(jnp.sum, chunk_size=0),
            ValueError,
            "chunked_hessian(sum): chunk_size must be a positive int, got 0",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_weights_belong_to_jacobians():
    with pytest.raises(ValueError, match="its weights are for the rows of a Jacobian"):
        rankax.chunked_reduce(jnp.sin, reductions.Gram(X), 2)(X)
