# SPDX-License-Identifier: MIT
"""Chunked calls outside `jax.jit`: compiled once, and never stale."""

import gc
import math
import warnings
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from helpers import assert_same, at_each_run, compilations, slow
from rankax import auto_vmap, chunked_vmap
from rankax.core.base.cache import Kept
from rankax.core.loop import eager_programs as eager
from rankax.core.plan.schedule import Tiles
from rankax.core.protocols import Rules
from rankax.ext.xla_cpu.rules import XlaCpu

X = jnp.asarray(np.arange(30.0).reshape(10, 3) / 30)
W = jnp.asarray(np.arange(9.0).reshape(3, 3) / 9)
TABLE = np.arange(3, dtype=np.float32)


@jax.custom_jvp
def softplus(x):
    return jnp.logaddexp(x, jnp.zeros_like(x))


softplus.defjvp(lambda primals, tangents: (softplus(*primals), tangents[0] * 7))


doubled = jax.custom_vjp(lambda x: x * 2)
doubled.defvjp(lambda x: (doubled(x), x), lambda x, cotangent: (x,))


@jax.jit
def projected(x):
    return W @ x + TABLE


def scanned(x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(w @ c), c), x, jnp.stack([W, W]))


def branching(x):
    y = jax.lax.cond(x[0] > 0.3, lambda y: y @ W, lambda y: y, x)
    return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y * 2 + 1, y)


TRANSFORMS = {
    "grad": lambda f: jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "hessian": lambda f: lambda x: jax.hessian(lambda s: jnp.sum(f(s * x)))(jnp.float32(1)),
}


def chunks(kernel, transform=lambda f: f, size=4):
    return lambda: transform(chunked_vmap(kernel, size))


def reduced(reduce, transform=lambda f: f):
    """Pairs of rows, in tiles of both axes."""

    def kernel(x, y):
        return (jnp.sum((x - y) ** 2),)

    call = auto_vmap(1, 1, reduce=(reduce,), reduce_axis=-1, chunk_size=3)
    return lambda: transform(lambda x: call(kernel)(x[:, None], jnp.cos(X)))


def solve(x):
    return jnp.linalg.solve(W + 3 * jnp.eye(3), x)


def powers(x):
    return jnp.sin(x) * jnp.sum(x**3)


# Functions that make a function of `X`: another one at each call, as in a loop. The first nine are
# tested at each run.
CALLS = {
    "a sum": chunks(lambda x: (jnp.sum((x[:, None] - x[None]) ** 2), jnp.argmax(x)), size=5),
    "branches": chunks(branching, size=1),
    "a gradient": chunks(lambda x: jnp.sum(jnp.sin(x) ** 2), TRANSFORMS["grad"]),
    "a hessian of a scan": chunks(lambda x: scanned(x)[0], TRANSFORMS["hessian"]),
    "a sum of pairs": reduced("sum"),
    "the least of pairs": reduced(rankax.reductions.BottomK(2)),
    "a gradient of pairs": reduced("logsumexp", TRANSFORMS["grad"]),
    "a matrix": lambda: lambda x: rankax.chunked_jacrev(powers, chunk_size=2, reduce="gram")(x[0]),
    "columns": lambda: lambda x: rankax.chunked_jacfwd(powers, chunk_size=2)(x[0]),
    "a scan": chunks(scanned),
    "rules": chunks(lambda x: softplus(doubled(x))),
    "jit with arrays": chunks(lambda x: projected(x) + projected(2 * x)),
    "random": chunks(lambda x: x * jax.random.normal(jax.random.key(0), x.shape)),
    "a tangent": chunks(solve, TRANSFORMS["jvp"]),
    "a map of a map": chunks(solve, TRANSFORMS["vmap"]),
    "the first of pairs": reduced("argmin"),
}


@pytest.mark.parametrize("make", at_each_run([*CALLS][:9], CALLS))
def test_a_second_call_compiles_nothing(make):
    _, some = compilations(make(), X)
    second, more = compilations(make(), X)
    assert some > more == 0
    assert_same(second, jax.jit(make())(X), rtol=1e-4, atol=1e-5)


def test_a_second_derivative_in_tiles_compiles_nothing(monkeypatch):
    monkeypatch.setattr(Rules, "tiles", lambda *_: Tiles(5, 2))
    monkeypatch.setattr(XlaCpu, "tiles", Rules.tiles)

    def mapped(x):
        return jnp.sum(chunked_vmap(lambda x: jnp.tanh(x) * 0.7193, 6)(x))

    assert "length=2\n" in str(jax.make_jaxpr(mapped)(X))
    assert "length=5\n" in str(jax.make_jaxpr(jax.grad(mapped))(X))
    some, more = (compilations(jax.grad(mapped), x)[1] for x in (X, X + 1))
    assert some > more == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("reduce", "lockstep"), [(None, True), ("logsumexp", False), slow("argmax", True)]
)
def test_a_warm_call_traces_the_kernel_and_nothing_else(monkeypatch, reduce, lockstep):
    def kernel(x):
        return jnp.sum(jnp.sin(x) * 0.3317)

    options = {"chunk_size": 3, "lockstep": lockstep} | ({"reduce": reduce} if reduce else {})
    mapped = auto_vmap(1, **options)(kernel)
    first, traced, make = mapped(X), [], jax.make_jaxpr
    monkeypatch.setattr(jax, "make_jaxpr", lambda *args, **_: traced.append(args) or make(*args))
    assert_same(mapped(X), first)
    assert len(traced) == 1


@pytest.mark.parametrize("options", [{"memory_limit": "1 GB"}, {"lockstep": False}], ids=str)
def test_a_traced_call_without_a_loop_is_one_program(options):
    def kernel(x):
        return jnp.sum(jnp.sin(x) * x) + 2.0, x

    x = jnp.sin(jnp.arange(7 * 13.0)).reshape(7, 13)
    mapped = auto_vmap(1, **options)(kernel)
    assert mapped.plan(x).steps == 1  # which measures a limit
    out, compiled = compilations(mapped, x)
    assert compiled == 1
    assert_same(out, jax.vmap(kernel)(x))


def test_other_shapes_dtypes_and_axes_are_other_programs():
    def kernel(x):
        return x * 2

    for x in (X, X[:8], X.astype(jnp.int32), X[:, :2]):
        assert_same(chunked_vmap(kernel, 4)(x), x * 2)
    assert_same(chunked_vmap(kernel, 2, 1, 1)(X), X * 2)
    assert_same(chunked_vmap(kernel, 2, 1)(X), X.T * 2)
    out, compiled = compilations(chunked_vmap(kernel, 3), X)  # items in flight cannot be seen in it
    assert compiled > 0
    assert_same(out, X * 2)


# What a kernel finds outside may change.


def assert_fresh(kernel, change):
    """Assert that each call sees what ``change`` does before it."""
    for value in range(3):
        change(value)
        want = jax.jit(jax.vmap(lambda x: kernel(x)))(X)  # a new function, so traced again
        mapped = chunked_vmap(kernel, 4)
        assert_same(mapped(X), want)
        assert_same(mapped(X), want)


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 2.0, 1.0),
        (X[0], X[1], X[0]),
        (np.float32(2), np.full(3, 3, np.float32), 2.0),
        slow((1, 1.0, True)),
        slow((0.0, -0.0, math.nan)),
        slow((X[:1, 0], X[0], X[0, 0])),
        slow((jnp.int32(3), jnp.float32(3), np.int32(4))),
    ],
    ids=["floats", "rows", "weak and typed", "weak types", "zeros", "shapes", "types"],
)
def test_what_is_outside_may_change(values):
    outside = SimpleNamespace(value=None)
    outside_list = [None]

    def by_attribute(x):
        sign = jnp.copysign(jnp.ones_like(x), jnp.full_like(x, outside.value))
        return x * outside.value, sign

    def in_a_loop(x):
        return jax.lax.fori_loop(0, 2, lambda i, y: y + outside_list[0], x)

    def set_value(i):
        outside.value = outside_list[0] = values[i]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_fresh(by_attribute, set_value)
        assert_fresh(in_a_loop, set_value)


def assert_choice_is_fresh(functions, kernel):
    """Assert that a kernel which calls one of three functions calls the one of now."""
    chosen = [None]

    def change(i):
        chosen[0] = functions[i]

    assert_fresh(lambda x: kernel(lambda *args: chosen[0](*args), x), change)


def test_operands_may_change_places():
    functions = jnp.subtract, lambda x, y: y - x, jnp.arctan2
    assert_choice_is_fresh(functions, lambda f, x: f(x, jnp.cos(x)))


def test_functions_in_a_loop_may_change():
    functions = jnp.sin, jax.jit(lambda x: W @ x), jnp.cos
    kernel = lambda f, x: jax.lax.fori_loop(0, 2, lambda i, y: f(y), x)  # noqa: E731
    assert_choice_is_fresh(functions, kernel)


def test_an_array_of_numpy_may_be_changed_in_place():
    table = np.ones(3, np.float32)

    def change(i):
        table[:] = i

    assert_fresh(lambda x: x * table, change)


def test_a_callback_is_called_as_it_is_now():
    factor = [1.0]

    def kernel(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x * factor[0], shape, x, vmap_method="sequential")

    assert_same(chunked_vmap(kernel, 5)(X), X)
    factor[0] = np.float32(2)
    assert_same(chunked_vmap(kernel, 5)(X), X * 2)


def test_effects_happen_at_each_call():
    seen = []

    def kernel(x):
        jax.debug.callback(lambda x: seen.append(float(x[0])), x, ordered=True)
        return x

    for _ in range(2):
        seen.clear()
        jax.block_until_ready(chunked_vmap(kernel, 1)(X))
        jax.effects_barrier()
        np.testing.assert_allclose(seen, X[:, 0])


# The configuration of JAX.


def test_x64_makes_another_program():
    def kernel(x):
        return x + jnp.array(1, float).astype(x.dtype), jnp.sum(x > 0)

    narrow = chunked_vmap(kernel, 4)(X)
    with jax.enable_x64(True):
        wide = chunked_vmap(kernel, 4)(X)
    assert (wide[1].dtype, narrow[1].dtype) == (jnp.int64, jnp.int32)
    assert_same(chunked_vmap(kernel, 4)(X), narrow)


def mesh(kind):
    return jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(kind,)))


CONTEXTS = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "mesh": lambda: mesh(jax.sharding.AxisType.Auto),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_makes_another_program(name):
    kernel = chunked_vmap(lambda x: W @ x, 4)
    kernel(X)
    with CONTEXTS[name]():
        out, some = compilations(kernel, X)
        assert some > 0
        assert_same(out, X @ W.T)
        assert compilations(kernel, X)[1] == 0
    assert compilations(kernel, X)[1] == 0


def test_an_explicit_mesh_stays_as_it_was():
    with mesh(jax.sharding.AxisType.Explicit):
        for _ in range(2):
            assert_same(chunked_vmap(lambda x: W @ x, 4)(X), X @ W.T)


# What is kept, and for how long.


def test_nothing_of_the_caller_is_kept_alive():
    def call():
        weights = jnp.ones((3, 3)) * 1.5
        table = jnp.arange(3.0) + 1
        held = set()

        @jax.custom_jvp
        def rule(x):
            return x * 2

        @rule.defjvp
        def _(primals, tangents):
            return held, table

        def kernel(x):
            assert held is not None
            y = jax.lax.scan(lambda c, _: (rule(c) @ weights, None), x, length=2)[0]
            return rule(y) + jax.jit(lambda x: x + table)(x)

        mapped = chunked_vmap(kernel, 5)
        x = X + 1
        jax.block_until_ready(mapped(x))
        return [weakref.ref(value) for value in (weights, table, held, kernel, x)]

    found = call()
    gc.collect()
    assert [ref() for ref in found] == [None] * 5


def test_only_so_many_programs_are_kept(monkeypatch):
    monkeypatch.setattr(eager, "_kept", Kept(4, "few"))

    def times(number):
        return chunked_vmap(lambda x: x * number, 5)

    times(-1.0)(X)
    assert compilations(times(-1.0), X)[1] == 0
    for number in range(4):
        times(float(number))(X)
    assert compilations(times(-1.0), X)[1] > 0


def test_what_a_fold_calls_may_change():
    scale = 2.0
    fold = rankax.reductions.Fold(0.0, lambda x: x, lambda a, b: jnp.hypot(a, scale * b / scale))
    call = rankax.chunked_reduce(lambda x: x[0], fold, 3)
    np.testing.assert_allclose(call(X), jnp.linalg.norm(X[:, 0]), rtol=1e-6)
    fold.merge = jnp.add
    np.testing.assert_allclose(call(X), X[:, 0].sum(), rtol=1e-6)


@pytest.mark.parametrize("inner", [jax.jit, slow(jax.checkpoint)], ids=["jit", "checkpoint"])
def test_tracers_that_the_kernel_closes_over(inner):
    """The rule of `softplus` is wrong, so that a derivative without it is seen."""

    def total(factor):
        return jnp.sum(chunked_vmap(lambda x: inner(lambda y: softplus(y * factor))(x), 4)(X))

    factors = jnp.arange(1.0, 4.0)
    totals = jnp.stack([total(factor) for factor in factors])
    assert_same(jax.vmap(total)(factors), totals)
    assert_same(jax.jit(total)(factors[1]), totals[1])
    assert_same(jax.grad(total)(factors[0]), 7 * jnp.sum(X))


@pytest.mark.filterwarnings("ignore:rule.*is compiled at every call")
@pytest.mark.parametrize("order", [1, 2])
def test_rules_may_change(order):
    factor = [1.0]

    @jax.custom_jvp
    def rule(x):
        return jnp.sin(x)

    @rule.defjvp
    def _(primals, tangents):
        return rule(*primals), factor[0] * jnp.cos(primals[0]) * tangents[0]

    def total(x):
        return jnp.sum(chunked_vmap(rule, 4)(x))

    for value in (1.0, 3.0):
        factor[0] = value
        got = jax.grad(total)(X) if order == 1 else jax.grad(lambda x: jax.grad(total)(x).sum())(X)
        want = value * jnp.cos(X) if order == 1 else -value * jnp.sin(X)
        assert_same(got, want)


def warnings_of(f, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(*args)
    return [str(warning.message) for warning in caught if warning.filename == __file__]


@pytest.mark.parametrize(("transform", "reduce"), [("grad", "sum"), slow("vmap", None)])
def test_a_derivative_that_is_compiled_again_warns_once(transform, reduce, monkeypatch):
    monkeypatch.setattr(eager, "_warnings", Kept(4, "few"))

    def kernel(x):
        return jnp.sum(softplus(x))

    apply = TRANSFORMS[transform](auto_vmap(1, chunk_size=5, reduce=reduce)(kernel))
    calls = [warnings_of(apply, X), *(compilations(warnings_of, apply, X) for _ in range(2))]
    assert [calls[0], calls[2][0]] == [[], []]
    assert calls[1][0] == [
        f"kernel() at {__file__}:{kernel.__code__.co_firstlineno}: outside jax.jit, its derivative "
        "(or vmap) in chunks is compiled at every call, because it uses a jax.custom_jvp or "
        "jax.custom_vjp function or a checkpoint policy, which may have changed; call it inside "
        "jax.jit, or give auto_vmap jit=True"
    ]
    assert min(calls[1][1], calls[2][1]) > 0


def test_what_is_compiled_once_for_each_use_does_not_warn():
    mapped = auto_vmap(1, chunk_size=2)(lambda x: softplus(jnp.sum(x)))
    for transform in ("grad", "vmap"):  # each compiles another program
        assert warnings_of(TRANSFORMS[transform](mapped), X) == []
    for f in (TRANSFORMS["grad"](mapped.with_options(jit=True)), mapped):
        assert [warnings_of(f, X) for _ in range(2)] == [[], []]


def test_jax_that_keeps_compiled_programs_in_files_does_not_warn(tmp_path):
    gradient = TRANSFORMS["grad"](chunked_vmap(lambda x: softplus(x) ** 2, 4))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert [warnings_of(gradient, X) for _ in range(3)] == [[], [], []]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


class Alike:
    """An object whose ``==`` overlooks a difference, from a module that says it is JAX's."""

    __module__ = "jax._src.alike"

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 0


def test_equality_is_trusted_by_class_not_by_module():
    primitive = jax.extend.core.Primitive("scaled")
    primitive.def_impl(lambda x, alike: x * alike.value)
    primitive.def_abstract_eval(lambda x, alike: x)
    lower = jax.interpreters.mlir.lower_fun(
        lambda x, alike: x * alike.value, multiple_results=False
    )
    jax.interpreters.mlir.register_lowering(primitive, lower)
    x = jnp.arange(6.0)
    for value in (2.0, 3.0):
        kernel = chunked_vmap(lambda x, v=value: primitive.bind(x, alike=Alike(v)), 1)
        np.testing.assert_array_equal(kernel(x), value * x)
