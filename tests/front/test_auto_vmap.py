# SPDX-License-Identifier: MIT
"""`auto_vmap` against its plain meaning: a Python loop over every index of the batch."""

import dataclasses
import functools
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from helpers import assert_same, primitives, slow
from rankax import Static, auto_vmap
from rankax.core.base.cache import Kept


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Leaf:
    """One array of a random call, its rank, and whether NumPy or JAX holds it."""

    value: Any
    rank: int

    def item(self, index: tuple[int, ...]) -> Any:
        """Return what the kernel sees at one index of the whole batch."""
        batch = np.shape(self.value)[: np.ndim(self.value) - self.rank]
        own = index[len(index) - len(batch) :]
        key = tuple(0 if n == 1 else i for i, n in zip(own, batch, strict=True))
        return self.value[key] if batch else self.value


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def array(dtype: Any, batch: tuple[int, ...], core: tuple[int, ...] = ()) -> Leaf:
    """Return an array of JAX that has these axes of the batch."""
    numbers = np.sin(np.arange(np.prod(batch + core))).reshape(batch + core)
    return Leaf(jnp.asarray(numbers > 0 if dtype == "bool" else numbers * 3, dtype), len(core))


def numpy_array(batch: tuple[int, ...], core: tuple[int, ...] = ()) -> Leaf:
    return Leaf(np.asarray(array("float32", batch, core).value), len(core))


def keys(batch: tuple[int, ...]) -> Leaf:
    return Leaf(jax.random.split(jax.random.key(7), batch), 0)


WIDE = array("float32", (3,), (2,))

# The trees of a, b and c, and options; "ranks" where they are not those of the leaves.
CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "an array": ([WIDE], {}),
    "no batch": ([array("float32", (), (2, 3)), Leaf(2.5, 0)], {}),
    "axes of length 1 and absent ones": (
        [array("float32", (2, 1, 2)), array("int32", (3, 1), (2,)), array("float16", (2,))],
        {"chunk_size": 5},
    ),
    "numbers of Python": ([{"b": Leaf(3, 0), "a": [WIDE]}, Leaf(True, 0)], {"chunk_size": 2}),
    "keys in a tuple": ([(keys((2, 1)), {"k": array("bool", (3,))})], {"chunk_size": 3}),
    "NumPy in a named tuple": (
        [Pair(numpy_array((2, 3), (1,)), array("int32", (3,))), numpy_array((1,))],
        {"jit": True, "chunk_size": 100},
    ),
    "one rank for a tree": (
        [{"x": WIDE, "y": (WIDE, WIDE)}, array("float32", (2, 1))],
        {"ranks": [1, 0], "chunk_size": 1},
    ),
    "a missing value, of any rank": ([Pair(None, WIDE)], {"ranks": [Pair(7, 1)], "jit": True}),
    "an empty batch": ([array("float32", (2, 0), (2,)), keys((2, 1))], {"chunk_size": 2}),
    "an empty item": ([array("float16", (3,), (0, 2)), array("bool", (1, 3), (1,))], {}),
}


def digest(x: Any) -> jax.Array:
    """One number that every element of ``x`` and their order decide."""
    if is_key(x):
        x = jax.random.bits(x, dtype=jnp.uint32) % jnp.uint32(97)
    x = jnp.ravel(jnp.asarray(x)).astype(jnp.float32)
    return jnp.sum(jnp.sin(x) * jnp.arange(1, x.size + 1, dtype=jnp.float32))


def kernel(a: Any, b: Any = None, c: Any = None, *, mode: str) -> dict[str, Any]:
    """Depend on every leaf and on their order; return every dtype and several shapes."""
    leaves = jax.tree.leaves((a, b, c))
    mix = jnp.float32(0.25 if mode == "up" else -0.5)
    for x in leaves:
        mix = mix * jnp.float32(0.5) + digest(x)
    returned = [x if is_key(x) else jnp.asarray(x) for x in reversed(leaves)]
    return {
        "mix": mix,
        "leaves": tuple(returned),
        "flags": Pair(mix > 0, None),
        "outer": jnp.stack([mix, mix**2])[:, None].astype(jnp.float16),
        "constant": jnp.int32(3),
    }


def by_loop(trees: list[Any], mode: str) -> Any:
    every = jax.tree.leaves(trees, is_leaf=is_leaf)
    batch_shape = np.broadcast_shapes(
        *(np.shape(leaf.value)[: np.ndim(leaf.value) - leaf.rank] for leaf in every)
    )

    def at(index: tuple[int, ...]) -> Any:
        items = jax.tree.map(lambda leaf: leaf.item(index), trees, is_leaf=is_leaf)
        return one(*items, mode=mode)

    one = jax.jit(kernel, static_argnames="mode")
    outs = [at(index) for index in np.ndindex(batch_shape)]
    if outs:
        return jax.tree.map(
            lambda *xs: jnp.stack(xs).reshape(batch_shape + jnp.shape(xs[0])), *outs
        )
    shapes = jax.eval_shape(lambda: at_any(trees, mode))
    return jax.tree.map(lambda s: empty(batch_shape + s.shape, s.dtype), shapes)


def at_any(trees: list[Any], mode: str) -> Any:
    """Call the kernel for some item where the batch has none."""

    def some(leaf: Leaf) -> Any:
        core = np.shape(leaf.value)[np.ndim(leaf.value) - leaf.rank :]
        if is_key(leaf.value):
            return jax.random.key(0)
        return jnp.ones(core, jnp.result_type(leaf.value))

    return kernel(*jax.tree.map(some, trees, is_leaf=is_leaf), mode=mode)


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape)
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_name", [0, slow(2)])
def test_agrees_with_a_loop_over_every_index(name, by_name):
    trees, options = CALLS[name]
    options = dict(options)
    plain_ranks = jax.tree.map(lambda leaf: leaf.rank, trees, is_leaf=is_leaf)
    mapped = auto_vmap(*options.pop("ranks", plain_ranks), **options)(kernel)
    values = jax.tree.map(lambda leaf: leaf.value, trees, is_leaf=is_leaf)
    positional = max(0, len(values) - by_name)
    named = dict(zip("abc"[positional:], values[positional:], strict=False))
    for mode in ("up", "down"):
        got = mapped(*values[:positional], **named, mode=mode)
        assert_same(got, by_loop(trees, mode), rtol=1e-3, atol=1e-3)


# What becomes of a program.


def weighed(s: Any, v: Any, m: Any) -> Any:
    return v @ m @ v + s * v.size, jnp.cos(s)


S, V, M = map(jnp.asarray, (np.arange(4.0), np.ones((5, 3)), np.ones((4, 5, 3, 3))))


def test_a_stretched_axis_costs_one_reshape():
    by_hand = jax.vmap(jax.vmap(weighed, in_axes=(None, 0, 0)), in_axes=(0, None, 0))

    def squeezed(s, v, m):
        return by_hand(jnp.reshape(s, (4,)), v, m)

    args = (S[:, None], V, M)
    mapped = auto_vmap(0, 1, 2)(weighed)
    assert str(jax.make_jaxpr(mapped)(*args)) == str(jax.make_jaxpr(squeezed)(*args))


def ones(shape):
    return jnp.asarray(np.ones(shape, np.float32))


CASES = {
    "all": ((ones((4, 5)), ones((4, 5, 3)), M), [(0, 0, 0), (0, 0, 0)]),
    "one": ((2.0, V, ones((3, 3))), [(None, 0, None)]),
    "absent": ((ones(5), ones(3), M), [(None, None, 0), (0, None, 0)]),
    "three axes": (
        (ones((2, 4, 5)), V, M),
        [(0, None, None), (0, None, 0), (0, 0, 0)],
    ),
    "empty": ((ones((0, 5)), V, ones((3, 3))), [(0, None, None), (0, 0, None)]),
    "numpy": ((np.float32(2), np.ones((5, 3), np.float32), ones((3, 3))), [(None, 0, None)]),
}


@pytest.mark.parametrize("options", [{}, {"chunk_size": 40}, {"jit": True}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_without_stretched_axes_the_program_is_nested_vmap(case, options):
    args, nest = CASES[case]
    by_hand = weighed
    for in_axes in reversed(nest):
        by_hand = jax.vmap(by_hand, in_axes=in_axes)
    mapped = auto_vmap(0, 1, 2, **options)(weighed)
    assert str(jax.make_jaxpr(mapped)(*args)) == str(jax.make_jaxpr(by_hand)(*args))


def test_pytrees_give_exactly_the_hand_nested_program():
    def pull(body, t):
        return {"f": body["pos"] * body["mass"] * t, "mass": body["mass"]}

    body = {"mass": jnp.ones(5), "pos": jnp.ones((4, 5, 3))}
    in_axes = [({"mass": None, "pos": 0}, None), ({"mass": 0, "pos": 0}, None)]
    by_hand = jax.vmap(jax.vmap(pull, in_axes=in_axes[1]), in_axes=in_axes[0])
    mapped = auto_vmap({"mass": 0, "pos": 1}, t=0)(pull)
    assert str(jax.make_jaxpr(mapped)(body, 2.0)) == str(jax.make_jaxpr(by_hand)(body, 2.0))


def test_without_batch_axes_the_kernel_is_simply_called():
    args = (2.0, jnp.ones(3), jnp.ones((3, 3)))
    mapped = auto_vmap(0, 1, 2, chunk_size=1)(weighed)
    assert str(jax.make_jaxpr(mapped)(*args)) == str(jax.make_jaxpr(weighed)(*args))
    received = []
    auto_vmap(0, 1)(lambda s, v: received.extend([s, v]) or ())(args[0], args[1])
    assert received[0] is args[0]
    assert received[1] is args[1]


def test_a_stretched_axis_is_reshaped_away_and_never_broadcast():
    mapped = auto_vmap(1, 1)(lambda a, b: jnp.dot(a, b) * jnp.sum(a))
    a, b = jnp.ones((6, 1, 3)), jnp.ones((1, 7, 3))
    jaxpr = jax.make_jaxpr(mapped)(a, b)
    by_hand = jax.vmap(
        jax.vmap(lambda a, b: jnp.dot(a, b) * jnp.sum(a), in_axes=(None, 0)), in_axes=(0, None)
    )
    added = primitives(mapped, a, b) - primitives(by_hand, a[:, 0], b[0])
    assert added == {"reshape": 2}
    # The kernel multiplies (6, 7) results; its inputs never have both batch axes.
    shapes = {var.aval.shape for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    assert (6, 7, 3) not in shapes


def test_an_axis_of_length_one_everywhere_stays_in_the_output():
    mapped = auto_vmap(0, 1)(lambda s, v: s * v)
    v = jnp.arange(3.0)
    assert_same(mapped(jnp.full((1, 1), 2.0), v[None]), 2 * v[None, None])
    x = jnp.arange(5.0)[None, :, None]
    assert_same(auto_vmap(0, chunk_size=2)(jnp.sin)(x), jnp.sin(x))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}, {"chunk_size": 40}])
def test_the_kernel_is_traced_once_a_call(options):
    traces = 0

    @auto_vmap(0, 1, **options)
    def f(s, v):
        nonlocal traces
        traces += 1
        return s * v.sum()

    for count in range(1, 3):
        f(jnp.ones((7, 1)), jnp.ones((5, 3)))
        assert traces == (1 if "jit" in options else count)


# Transformations of the result.


OPTIONS = [{}, {"chunk_size": 3}, {"chunk_size": 3, "checkpoint": False}, {"jit": True}]


def potential(s, v):
    return jnp.sin(s) * jnp.sum(v**2) + v[1] * s**2


def by_hand(s, v):
    return jax.vmap(jax.vmap(potential, in_axes=(None, 0)), in_axes=(0, None))(s[:, 0], v)


@pytest.fixture(params=OPTIONS, ids=str)
def batched(request):
    return auto_vmap(0, 1, **request.param)(potential)


S4 = jnp.asarray(np.linspace(0.1, 1.0, 4)[:, None])
V5 = jnp.asarray(np.linspace(-1.0, 2.0, 15).reshape(5, 3))


def test_gradients(batched):
    def loss(f, s, v):
        return jnp.sum(f(s, v) * jnp.arange(20.0).reshape(4, 5))

    gradient = jax.grad(loss, argnums=(1, 2))
    assert_same(gradient(batched, S4, V5), jax.jit(gradient, static_argnums=0)(by_hand, S4, V5))


def test_tangents(batched):
    tangents = (jnp.cos(S4), jnp.sin(V5))
    want = jax.jit(jax.jvp, static_argnums=0)(by_hand, (S4, V5), tangents)
    assert_same(jax.jvp(batched, (S4, V5), tangents), want)


def test_vmap_and_jit_of_the_result(batched):
    s = jnp.stack([S4, 2 * S4])
    got = jax.jit(jax.vmap(batched, in_axes=(0, None), out_axes=1))(s, V5)
    assert_same(got, jax.jit(jax.vmap(by_hand, in_axes=(0, None), out_axes=1))(s, V5))


def test_eval_shape(batched):
    specs = (jax.ShapeDtypeStruct((4, 1), jnp.float32), jax.ShapeDtypeStruct((5, 3), jnp.float32))
    out = jax.eval_shape(batched, *specs)
    assert (out.shape, out.dtype) == ((4, 5), jnp.float32)
    assert batched.plan(*specs) == batched.plan(S4, V5)


def test_hessian(batched):
    v = V5[:2]
    want = jax.jit(jax.hessian(lambda s: jnp.sum(by_hand(s, v))))(S4)
    assert_same(jax.jit(jax.hessian(lambda s: jnp.sum(batched(s, v))))(S4), want)


def test_gradients_of_what_the_kernel_closes_over():
    def through_closure(w):
        return jnp.sum(auto_vmap(x=0, chunk_size=2)(lambda x: jnp.sin(w * x))(jnp.arange(5.0)))

    want = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(w * jnp.arange(5.0)))))(0.7)
    assert_same(jax.grad(through_closure)(0.7), want)


# What an argument can be.


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_typed_and_raw_keys(options):
    keys = jax.random.split(jax.random.key(3), 5)
    want = jnp.stack([jax.random.normal(key, (2,)) for key in keys])
    draw = auto_vmap(0, **options)(lambda key: jax.random.normal(key, (2,)))
    assert_same(draw(keys), want)
    raw = auto_vmap(1, **options)(lambda key: jax.random.normal(key, (2,)))
    assert_same(raw(jax.random.key_data(keys)), want)


def test_keys_come_out_of_a_kernel_with_the_batch_in_front():
    keys = jax.random.split(jax.random.key(3), (2, 3))
    got = auto_vmap(0)(lambda key: jax.random.split(key, 4))(keys)
    assert got.shape == (2, 3, 4)
    want = jnp.stack([jnp.stack([jax.random.split(k, 4) for k in row]) for row in keys])
    assert_same(got, want)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_python_scalars_stay_weakly_typed(options):
    mapped = auto_vmap(0, 0, **options)(lambda a, b: a * b)
    halves = jnp.ones(3, jnp.float16)
    assert mapped(2.0, halves).dtype == jnp.float16
    assert mapped(halves, 2).dtype == jnp.float16
    assert jnp.asarray(mapped(2, 3.0)).weak_type


def test_an_unmapped_scalar_reaches_the_kernel_as_it_came():
    received = []
    auto_vmap(0, 0, 0)(lambda a, b, c: received.extend([a, b]) or c)(2.5, True, jnp.ones(3))
    assert received == [2.5, True]
    assert [type(value) for value in received] == [float, bool]


def test_weak_arrays_stay_weak_in_a_batch():
    weak = jnp.asarray(2.0) * jnp.asarray([1.0])  # strong
    assert not weak.weak_type
    weak = jax.vmap(lambda _: 2.0)(jnp.ones(3))
    assert weak.weak_type
    for options in ({}, {"chunk_size": 2}):
        out = auto_vmap(0, 0, **options)(lambda a, b: a * b)(weak, jnp.ones(3, jnp.float16))
        assert out.dtype == jnp.float16


class HasArray:
    """Converts itself to a JAX array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_objects_that_convert_themselves(options):
    mapped = auto_vmap(1, 0, **options)(lambda v, s: jnp.sum(v * s))
    got = mapped(HasArray(V5), HasArray(jnp.float32(2.0)))
    assert_same(got, jnp.sum(V5 * 2, axis=1))
    assert mapped.plan(HasArray(V5), 2.0).batch_shape == (5,)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_numpy_arrays_and_scalars(options):
    mapped = auto_vmap(1, 0, 0, **options)(lambda v, s, i: jnp.sum(v) * s + i.astype(jnp.float32))
    got = mapped(np.asarray(V5), np.float32(2), np.arange(5, dtype=np.int8))
    assert_same(got, jnp.sum(V5, axis=1) * 2 + jnp.arange(5.0))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (1, 0)])
def test_a_batch_without_items_keeps_dtype_and_trailing_shape(shape, options):
    mapped = auto_vmap(1, 0, **options)(lambda v, n: {"v": v[:2], "n": n, "k": jax.random.key(0)})
    got = mapped(np.ones((*shape, 3), np.float16), np.ones(shape[-1:], np.int32))
    assert (got["v"].shape, got["v"].dtype) == ((*shape, 2), jnp.float16)
    assert (got["n"].shape, got["n"].dtype) == (shape, jnp.int32)
    assert got["k"].shape == shape


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=str)
def test_unranked_objects_pass_by_identity(options):
    marker, listing, mapping = object(), [1, object()], {"b": 1, "a": {2}}
    received = []

    @auto_vmap(x=0, **options)
    def f(x, a, *rest, b, **others):
        received.extend([a, rest[0], b, others["c"]])
        return x + 1

    assert_same(f(jnp.arange(5.0), marker, listing, b=mapping, c=f), jnp.arange(5.0) + 1)
    assert all(
        got is want for got, want in zip(received, [marker, listing, mapping, f], strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_unranked_pytrees_of_arrays_are_made_in_the_trace(options):
    """As in `jax.vmap`: `nnx.grad` refuses a model that was made in another trace."""
    params, received = {"w": jnp.ones(3)}, []

    @auto_vmap(params=None, x=1, **options)
    def f(params, x):
        received.append(params)
        return params["w"] @ x

    assert_same(f(params, jnp.ones((5, 3))), jnp.full(5, 3.0))
    assert received
    assert all(got is not params for got in received)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_none_passes_through_whatever_its_rank(options):
    @auto_vmap(1, 0, {"a": 1, "b": 2}, **options)
    def f(x, weight=None, extra=None):
        out = jnp.sum(x)
        if weight is not None:
            out = out * weight
        if extra is not None and extra["b"] is None:
            out = out + extra["a"][0]
        return out, weight

    plain = jnp.sum(V5, axis=1)
    assert_same(f(V5), (plain, None))
    assert_same(f(V5, None, None), (plain, None))
    assert_same(f(V5, jnp.arange(5.0)), (plain * jnp.arange(5.0), jnp.arange(5.0)))
    got = f(V5, extra={"a": jnp.ones(3), "b": None})
    assert_same(got, (plain + 1, None))


# What a kernel can be.


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_every_kind_of_parameter(options):
    @auto_vmap(a=0, b=1, rest=1, k=0, others=0, **options)
    def f(a, b=(1.0), /, *rest, k=2.0, n=3, **others):
        total = a * 2 + jnp.sum(jnp.asarray(b)) * k - n
        for i, r in enumerate(rest):
            total = total + (i + 1) * jnp.sum(r)
        for name in sorted(others):
            total = total * len(name) + others[name]
        return total

    a = jnp.arange(4.0)
    got = f(a, jnp.ones(3), jnp.ones((4, 2)), jnp.ones((4, 1)), k=a, bb=a, ccc=1.0)
    want = [
        float(
            f.__wrapped__(x, jnp.ones(3), jnp.ones(2), jnp.ones(1), k=x, bb=x, ccc=jnp.float32(1))
        )
        for x in a
    ]
    np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_a_positional_only_default_after_one_without_a_rank(options):
    @auto_vmap(x=0, b=0, **options)
    def f(x, a=3.0, b=2.0, /):
        return x * a + b

    assert_same(f(jnp.arange(4.0)), jnp.arange(4.0) * 3 + 2)
    assert_same(f(jnp.arange(4.0), 1.0), jnp.arange(4.0) + 2)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_a_default_array_brings_its_batch(options):
    table = jnp.arange(12.0).reshape(4, 3)

    @auto_vmap(0, 1, **options)
    def f(x, row=table):
        return x + row[1]

    assert_same(f(1.0), 1 + table[:, 1])
    assert_same(f(jnp.arange(2.0)[:, None]), jnp.arange(2.0)[:, None] + table[None, :, 1])
    assert_same(f(1.0, table[0]), jnp.float32(2.0) * jnp.ones_like(table[0, 0]))
    assert f.plan(1.0).batch_shape == (4,)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"jit": True}], ids=str)
def test_rank_trees_on_variadic_parameters_hold_for_each(options):
    @auto_vmap(pairs=(0, 1), named={"w": 0}, **options)
    def f(*pairs, **named):
        out = jnp.float32(0)
        for scale, vector in pairs:
            out = out * 2 + scale * jnp.sum(vector)
        return out + sum(named[name]["w"] for name in sorted(named))

    s, v = jnp.arange(5.0), V5
    got = f((s, v), (2.0, v[0]), one={"w": s}, two={"w": 1.0})
    want = (s * jnp.sum(v, 1)) * 2 + 2 * jnp.sum(v[0]) + s + 1
    assert_same(got, want)
    assert f.plan((s, v), one={"w": s}).leaves[2].path == "named['one']['w']"


class Scaler:
    factor = 2.0

    def __init__(self, offset=1.0):
        self.offset = offset

    @auto_vmap(None, 1)
    def method(self, v):
        return jnp.sum(v) * self.factor + self.offset

    @auto_vmap(v=1)
    @classmethod
    def outer_class(cls, v):
        return jnp.sum(v) * cls.factor

    @classmethod
    @auto_vmap(v=1)
    def inner_class(cls, v):
        return jnp.sum(v) * cls.factor

    @auto_vmap(1)
    @staticmethod
    def outer_static(v):
        return jnp.sum(v)

    @staticmethod
    @auto_vmap(1)
    def inner_static(v):
        return jnp.sum(v)

    @auto_vmap(v=1)
    def __call__(self, v):
        return jnp.sum(v) - self.offset


def test_methods_of_every_kind():
    total, item = jnp.sum(V5, axis=1), Scaler(3.0)
    assert_same(item.method(V5), total * 2 + 3)
    assert_same(Scaler.method(self=item, v=V5), total * 2 + 3)
    assert_same(item(V5), total - 3)
    for owner in (Scaler, item):
        assert_same(owner.outer_class(V5), total * 2)
        assert_same(owner.inner_class(V5), total * 2)
        assert_same(owner.outer_static(V5), total)
        assert_same(owner.inner_static(V5), total)
    assert_same(auto_vmap(1)(Scaler.outer_static.__wrapped__)(V5), total)
    assert_same(auto_vmap(2)(item.method)(jnp.stack([V5, V5])), jnp.stack([total * 2 + 3] * 2))


def test_a_parameter_called_self_can_be_passed_by_name():
    mapped = auto_vmap(self=0)(lambda self, args, kwargs: self + args + kwargs)
    assert_same(mapped(self=jnp.arange(3.0), args=1.0, kwargs=2.0), jnp.arange(3.0) + 3)
    assert mapped.plan(self=jnp.arange(3.0), args=1.0, kwargs=2.0).batch_shape == (3,)


def test_partials_and_callable_objects():
    def f(a, s, v, scale=1.0):
        return a * s * jnp.sum(v) * scale

    total = jnp.sum(V5, axis=1)
    first = auto_vmap(0, 1)(functools.partial(f, 3.0))
    assert_same(first(2.0, V5), 6 * total)
    named = auto_vmap(a=0, v=1)(functools.partial(f, s=2.0, scale=0.5))
    assert_same(named(jnp.arange(5.0), v=V5), jnp.arange(5.0) * total)

    class Affine:
        def __init__(self, w):
            self.w = w

        def __call__(self, x, b=0.0):
            return jnp.dot(self.w, x) + b

    mapped = auto_vmap(1, b=0)(Affine(jnp.arange(3.0)))
    assert_same(mapped(V5, jnp.ones(5)), V5 @ jnp.arange(3.0) + 1)


def test_static_travels_through_ranked_arguments():
    def power(x):
        return x["base"] ** x["n"].value

    for options in ({}, {"chunk_size": 2}, {"jit": True}):
        mapped = auto_vmap(0, **options)(power)
        got = mapped({"base": jnp.arange(5.0), "n": Static(3)})
        assert_same(got, jnp.arange(5.0) ** 3)


def test_structures_of_two_calls_are_not_mixed_up():
    mapped = auto_vmap(0, 1)(lambda x, v: jax.tree.map(lambda x: x * 2, (x, v)))
    for first in (jnp.ones(2), {"a": jnp.ones(2)}, {"b": jnp.ones(2)}, (jnp.ones(2), 1.0)):
        got = mapped(first, jnp.ones((2, 3)))[0]
        want = jax.tree.map(lambda x: x * jnp.full(2, 2.0), first)
        assert_same(got, want)


def test_what_is_kept_of_many_calls_is_bounded():
    mapped = auto_vmap(0)(lambda x: jax.tree.map(lambda leaf: leaf * 2, x))
    mapped.spec.structures = structures = Kept(2, "few")
    for name in "abcab":
        for n in (1, 2, 3, 1):
            x = jnp.arange(float(n))
            assert_same(mapped({name: x}), {name: x * 2})
    assert len(structures._values) == 2


def test_results_do_not_depend_on_earlier_shapes():
    mapped = auto_vmap(0, 0, chunk_size=4)(lambda a, b: a - b)
    for a, b in [
        ((5,), (5,)),
        ((5, 1), (5,)),
        ((1, 5), (5,)),
        ((), (5,)),
        ((5, 1), (1, 5)),
        ((), ()),
    ]:
        x, y = jnp.arange(5.0)[: int(np.prod(a))].reshape(a), jnp.ones(b)
        assert_same(mapped(x, y), jnp.broadcast_to(x - jnp.float32(1), np.broadcast_shapes(a, b)))


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 12, 100])
def test_chunks_over_all_axes_agree_with_no_chunks(chunk_size):
    a, b, c = jnp.arange(8.0).reshape(4, 1, 2), jnp.arange(3.0)[:, None], V5[:2]
    plain = auto_vmap(0, 0, 1)(lambda a, b, c: {"x": a * c + b, "n": jnp.sum(c) > a})
    chunked = auto_vmap(0, 0, 1, chunk_size=chunk_size)(plain.__wrapped__)
    assert_same(chunked(a, b, c), plain(a, b, c))
    assert chunked.plan(a, b, c).in_flight <= chunk_size or chunk_size == 100


@functools.cache
def second_derivatives_of_an_outer_product(chunk_size):
    outer = auto_vmap(0, 0, chunk_size=chunk_size)(lambda a, b: jnp.sin(a * b) * b)

    def loss(x, y):
        return jnp.sum(outer(x[:, None], y) ** 2)

    @jax.jit
    def both(x, y):
        reverse = jax.jacrev(jax.jacrev(loss, (0, 1)), (0, 1))
        return jax.hessian(loss, (0, 1))(x, y), reverse(x, y)

    return both(jnp.arange(1.0, 5.0) / 7, jnp.arange(1.0, 4.0))


@pytest.mark.parametrize("chunk_size", [slow(1), 2, slow(3), slow(5), 7])
def test_higher_derivatives_of_chunks_over_two_axes(chunk_size):
    got, want = map(second_derivatives_of_an_outer_product, (chunk_size, None))
    assert_same(got, want, rtol=1e-4, atol=1e-4)


def test_adjacent_axes_mapped_alike_are_one():
    mapped = auto_vmap(1, chunk_size=10)(lambda v: jnp.sum(v))
    plan = mapped.plan(jax.ShapeDtypeStruct((1000, 7, 3), jnp.float32))
    assert [level.axes for level in plan.levels] == [(0, 1)]
    assert plan.in_flight <= 10
    assert plan.steps == 700


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 5, 30]), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 400),
)
def test_a_plan_never_has_more_in_flight_than_asked(axes, chunk_size):
    first = tuple(n if who & 1 else 1 for n, who in axes)
    second = tuple(n if who & 2 else 1 for n, who in axes)
    mapped = auto_vmap(0, 1, chunk_size=chunk_size)(lambda s, v: v * s)
    args = (
        jax.ShapeDtypeStruct(first, jnp.float32),
        jax.ShapeDtypeStruct((*second, 3), jnp.float32),
    )
    plan = mapped.plan(*args)
    assert plan.batch_shape == np.broadcast_shapes(first, second)
    assert plan.in_flight <= max(chunk_size, 1)
    # Each level at least half fills the room that the inner ones leave.
    assert plan.steps <= 2 ** len(plan.levels) * -(-plan.evaluations // chunk_size)
