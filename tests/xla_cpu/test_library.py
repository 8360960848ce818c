# SPDX-License-Identifier: MIT
"""Calls that are compiled without the library of XLA:CPU that sums: which, and what they return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, equations
from rankax import auto_vmap
from rankax.ext.xla_cpu import library

pytestmark = pytest.mark.skipif(not library.IS_TUNED, reason="from JAX 0.12 on")

X = jnp.asarray(np.linspace(-1, 1, 600 * 8 * 3, dtype=np.float32).reshape(600, 8, 3))
OPTION = "xla_cpu_experimental_ynn_fusion_type"


def distances(x):
    return jnp.sum(jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, axis=-1) + 1e-3))


def norms(x):
    for _ in range(3):
        x = jnp.sqrt(jnp.abs(x)) / (1 + x * x * jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)))
    return x


def with_callback(x):
    jax.debug.callback(lambda _: None, x[0, 0])
    return distances(x)


def has_library(lowered):
    return "__ynn_fusion" in lowered.compile().as_text()


def is_chosen(kernel, *args):
    return not has_library(kernel.lower(*args))


# Which.


def test_short_sums_are_left_to_loops(monkeypatch):
    assert has_library(jax.jit(jax.vmap(distances)).lower(X))
    kernel = auto_vmap(2, jit=True)(distances)
    assert is_chosen(kernel, X)
    assert is_chosen(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert is_chosen(kernel.with_options(reduce="sum"), X)
    assert is_chosen(kernel.with_options(compiler_options={"xla_embed_ir_in_executable": True}), X)
    monkeypatch.setattr(library, "IS_TUNED", False)
    assert not is_chosen(auto_vmap(2, jit=True)(distances), X)


def test_values_that_would_be_computed_again_stay_stored():
    """Compiled without the library, a longer chain takes thirty times as long."""
    assert not is_chosen(auto_vmap(2, jit=True)(norms), X)
    wide = jnp.ones((2, 3000, 3))  # where a value of one item is as large as what a library sums
    assert not is_chosen(auto_vmap(2, jit=True)(norms), wide)


SHARED = np.linspace(1, 2, 9, dtype=np.float32).reshape(3, 3)


CHOSEN = {
    "short": (lambda x: jnp.sum(x * x, axis=-1), True),
    "columns": (lambda x: jnp.sum(x * x, axis=0), True),
    "long": (lambda x: jnp.sum(x * x), False),
    "short and long": (lambda x: jnp.sum(x * x, axis=-1) + jnp.sum(x * x), False),
    "short, of fewer numbers": (lambda x: jnp.max(jnp.sum(x * x, axis=-1)), True),
    "sine": (lambda x: jnp.sum(jnp.sin(x), axis=-1), False),
    "shared matrix": (lambda x: jnp.sum(x @ SHARED, axis=-1), False),
    "product of each item": (lambda x: jnp.sum(x.T @ x, axis=-1), True),
    "shared function": (lambda x: jnp.sum(x / (2 * jnp.sqrt(SHARED[:1])), axis=-1), True),
    "integers": (lambda x: jnp.sum(x.astype(jnp.int32), axis=-1), False),
    "no sum": (lambda x: 2 * x, False),
    "callback": (with_callback, False),
}


@pytest.mark.parametrize(("kernel", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_what_is_chosen(kernel, chosen):
    program = jax.make_jaxpr(jax.vmap(kernel))(jnp.ones((2000, 8, 3))).jaxpr
    assert library.pays_to_sum_in_loops(program) == chosen


def test_few_items_and_chunks_are_too_small_for_the_library():
    program = jax.make_jaxpr(jax.vmap(distances))(X[:20]).jaxpr
    assert not library.pays_to_sum_in_loops(program)
    kernel = auto_vmap(2, chunk_size=599)(distances)
    assert kernel.plan(X).steps > 1
    assert not library.pays_to_sum_in_loops(jax.make_jaxpr(kernel)(X).jaxpr)
    assert not has_library(jax.jit(kernel).lower(X))


@pytest.mark.parametrize(
    "options",
    [{"chunk_size": 599}, {"memory_limit": "1 GB"}, {"devices": 1}, {"lockstep": False}],
    ids=str,
)
def test_calls_that_are_bounded_or_divided_get_no_option(options, monkeypatch):
    monkeypatch.setattr(library, "jit", lambda *_: pytest.fail("asked"))
    auto_vmap(2, jit=True, **options)(distances)(X)


def test_what_the_caller_asks_for_comes_first(monkeypatch):
    kernel = auto_vmap(2, jit=True, compiler_options={OPTION: "LIBRARY_FUSION_TYPE_REDUCE"})
    assert not is_chosen(kernel(distances), X)
    monkeypatch.setenv("XLA_FLAGS", f"--{OPTION}=LIBRARY_FUSION_TYPE_REDUCE")
    assert not is_chosen(auto_vmap(2, jit=True)(distances), X)


# Tiles that are products of matrices.

POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 800, 3)), jnp.float32)


def slots_of(fun):
    """Return how many numbers the running state of a sum has."""
    kernel = auto_vmap(1, 1, reduce="sum")(fun)
    ys = jnp.tile(POINTS[1], (200, 1))
    program = jax.make_jaxpr(lambda x, y: kernel(x, y))(POINTS[0, 0], ys)
    loops = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan"]
    return max(v.aval.size for loop in loops for v in loop.outvars)


def test_the_library_sums_what_it_multiplies():
    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1, jit=True)(lambda x, y: jnp.sin(x @ y))
    text = kernel.lower(POINTS[0][:, None], POINTS[1]).compile().as_text()
    (own,) = [each for each in text.split("\n}\n") if " sine(" in each]
    assert " dot(" in own
    assert " reduce(" in own


def test_which_sums_join_the_slots_of_a_tile():
    assert slots_of(lambda x, y: x @ y) == 1
    assert slots_of(lambda x, y: jnp.exp(POINTS[0, :3] @ y @ x)) == 1
    # Of a vector with itself: the row shares neither.
    assert slots_of(lambda x, y: jnp.exp((x - y) @ (y - x))) > 1
    assert slots_of(lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))) > 1


@pytest.mark.parametrize("reduce", ["sum", "mean", "logsumexp"])
def test_sums_of_products_are_those_of_vmap(reduce):
    x, y = POINTS[0, 99:], POINTS[1, 99:].at[3].set(-jnp.inf)  # 701, which no tile divides
    plain = {"sum": jnp.sum, "mean": jnp.mean, "logsumexp": jax.nn.logsumexp}[reduce]

    def fun(x, y):
        return jnp.where(jnp.isfinite(y[0]), jnp.tanh(x @ jnp.nan_to_num(y)), 0.5)

    kernel = auto_vmap(1, 1, reduce=reduce, reduce_axis=-1)(fun)

    def by_hand(x, y):
        return jax.vmap(lambda x: plain(jax.vmap(lambda y: fun(x, y))(y)))(x)

    def mine(x, y):
        return kernel(x[:, None], y)

    assert_same(jax.jit(mine)(x, y), by_hand(x, y), rtol=1e-5, atol=1e-5)
    for argnums in (0, 1):
        of = [jax.grad(lambda *a, f=f: jnp.sum(f(*a)), argnums) for f in (mine, by_hand)]
        assert_same(jax.jit(of[0])(x, y), of[1](x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [700, 701])
def test_no_product_is_left_out_where_tiles_do_not_divide(length):
    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(lambda x, y: jnp.sin(x @ y))
    x, y = POINTS[0, :length], POINTS[1, :length]
    assert "select_n" not in str(jax.make_jaxpr(kernel)(x[:, None], y))


def test_long_sums_of_products_do_not_drift():
    ones = jnp.full((1, 1), 0.1, jnp.float32)
    many = jnp.ones((3_000_001, 1), jnp.float32)
    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(lambda x, y: x @ y)
    right = 3_000_001 * float(np.float32(0.1))
    assert abs(float(kernel(ones[:, None], many)[0]) - right) < 4 * np.spacing(np.float32(right))


SINES = jnp.asarray(np.random.default_rng(0).normal(size=120_000), jnp.float32)


def is_in_library(kernel, *args):
    """Whether one computation has a sine and the sum that follows."""
    text = kernel.with_options(jit=True).lower(*args).compile().as_text()
    own = [each for each in text.split("\n}\n") if " sine(" in each]
    return all(" reduce(" in each for each in own)


def test_sines_are_left_to_the_library():
    total = auto_vmap(0, reduce="sum")
    assert is_in_library(total(lambda x: jnp.sin(x) * jnp.exp(-x * x)), SINES)
    assert is_in_library(total(lambda x: jnp.sum(jnp.sin(x * jnp.arange(8.0)))), SINES)
    assert "cpu_math" not in str(total(jnp.sin).plan(SINES))
    chosen = total(lambda x: jnp.where(x > 0, jnp.sin(x), x))
    assert "cpu_math" in str(chosen.plan(SINES))
    assert chosen.plan(SINES).levels[0].tile <= 1024
    assert not is_in_library(chosen, SINES)  # if it is: see `_makes_numbers_one_by_one`


def test_functions_of_one_number_at_a_time_go_to_the_library():
    def tile(fun):
        return auto_vmap(0, reduce="sum")(fun).plan(SINES).levels[0].tile

    for fun in (jnp.log1p, jnp.arctan, jnp.expm1, jax.lax.lgamma, jax.lax.erf_inv, jnp.tan):
        assert tile(fun) > 4096
        assert tile(lambda x, fun=fun: jnp.exp(-x) * fun(x * x)) > 4096
    for fun in (jnp.exp, jnp.log, jnp.sqrt, jnp.tanh, jax.lax.erf, jnp.cbrt):  # as fast or faster
        assert tile(fun) <= 1024


@pytest.mark.parametrize("reduce", ["sum", "mean", "logsumexp"])
@pytest.mark.parametrize("length", [120_000, 119_993])
def test_sums_of_sines_are_those_of_vmap(reduce, length):
    def fun(x):
        return jnp.sin(3 * x) * jnp.cos(x)

    plain = {"sum": jnp.sum, "mean": jnp.mean, "logsumexp": jax.nn.logsumexp}[reduce]
    mine = auto_vmap(0, reduce=reduce)(fun)
    x = SINES[:length]
    assert mine.plan(x).levels[0].tile > 4096
    assert_same(mine(x), plain(jax.vmap(fun)(x)), rtol=1e-5, atol=1e-4)
    got, want = jax.grad(mine)(x), jax.grad(lambda x: plain(jax.vmap(fun)(x)))(x)
    assert_same(got, want, rtol=1e-4, atol=1e-6)


# What they return.


def test_values_and_derivatives_are_those_of_vmap():
    kernel, plain = auto_vmap(2, jit=True)(distances), jax.vmap(distances)
    assert_same(kernel(X), jax.jit(plain)(X), rtol=1e-5)

    for transform, args in (
        (lambda f: jax.grad(lambda x: jnp.sum(f(x))), X),
        (jax.vmap, X[None]),
        (lambda f: lambda x: f(x[0]), X[None]),
    ):
        assert_same(transform(kernel)(args), jax.jit(transform(plain))(args), rtol=1e-4)


def test_a_kernel_that_closes_over_a_tracer():
    def loss(scale, wrap):
        return jnp.sum(wrap(lambda x: distances(scale * x))(X))

    got = jax.grad(loss)(2.0, auto_vmap(2, jit=True))
    assert_same(got, jax.grad(loss)(2.0, jax.vmap), rtol=1e-4)


def test_a_kernel_is_traced_once():
    traces = []
    kernel = auto_vmap(2, jit=True)(lambda x: traces.append(0) or distances(x))
    for x in (X, 2 * X, np.asarray(X)):
        kernel(x)
    kernel.lower(X)
    assert len(traces) == 1


def test_without_jit_the_kernel_itself_runs():
    calls = []
    kernel = auto_vmap(2, jit=True)(lambda x: calls.append(0) or distances(x))
    with jax.disable_jit():
        assert_same(kernel(X), jax.vmap(distances)(X), rtol=1e-5)
    assert len(calls) == 1


def test_eager_reductions(monkeypatch):
    compiled = []

    def largest(x):
        return jnp.max(3 * jax.vmap(distances)(x))

    def recorded(fun, args, options):
        compiled.append((jitted := jit(fun, args, options)).lower(*args))
        return jitted

    jit = library.jit
    monkeypatch.setattr(library, "jit", recorded)
    kernel = auto_vmap(2, reduce="max")(lambda x: 3 * distances(x))
    x = X * np.linspace(1, 2, 600, dtype=np.float32)[:, None, None]  # no two items are equal
    assert_same(kernel(x), largest(x), rtol=1e-5)
    (lowered,) = compiled
    assert not has_library(lowered)
    assert_same(jax.grad(kernel)(x), jax.grad(largest)(x), rtol=1e-4)
    assert len(compiled) == 2  # the second without an option, which a derivative cannot have
