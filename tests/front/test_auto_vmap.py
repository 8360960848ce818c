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

from helpers import assert_same, slow
from rankax import Static, auto_vmap
from situations.plain import item_by_item


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Leaf:
    """One array of a random call, its rank, and whether NumPy or JAX holds it."""

    value: Any
    rank: int


def is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def array(dtype: Any, batch: tuple[int, ...], core: tuple[int, ...] = ()) -> Leaf:
    """Return an array of JAX that has these axes of the batch."""
    numbers = np.sin(np.arange(np.prod(batch + core))).reshape(batch + core)
    return Leaf(jnp.asarray(numbers > 0 if dtype == "bool" else numbers * 3, dtype), len(core))


WIDE, KEYS = array("float32", (3,), (2,)), Leaf(jax.random.split(jax.random.key(7), (2, 1)), 0)

# Each kind of argument reaches a kernel in two ways: by itself, and as one of a compiled program.
OPTIONS = pytest.mark.parametrize("options", [{"chunk_size": 2}, {"jit": True}], ids=str)

# The trees of a, b and c, and options; "ranks" where they are not those of the leaves.
CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "no batch": ([array("float32", (), (2, 3)), Leaf(2.5, 0)], {}),
    "axes of length 1 and absent ones": (
        [array("float32", (2, 1, 2)), array("int32", (3, 1), (2,)), array("float16", (2,))],
        {"chunk_size": 5},
    ),
    "numbers of Python": ([{"b": Leaf(3, 0), "a": [WIDE]}, Leaf(True, 0)], {"chunk_size": 2}),
    "keys in a tuple": ([(KEYS, {"k": array("bool", (3,))})], {"chunk_size": 3}),
    "NumPy in a named tuple": (
        [
            Pair(Leaf(np.ones((2, 3, 1), np.float32), 1), array("int32", (3,))),
            Leaf(np.ones(1, np.int8), 0),
        ],
        {"jit": True, "chunk_size": 100},
    ),
    "one rank for a tree": (
        [{"x": WIDE, "y": (WIDE, WIDE)}, array("float32", (2, 1))],
        {"ranks": [1, 0], "chunk_size": 1},
    ),
    "a missing value, of any rank": ([Pair(None, WIDE)], {"ranks": [Pair(7, 1)], "jit": True}),
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


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("mode", "by_name"), [("up", 0), slow("down", 2)])
def test_agrees_with_a_loop_over_every_index(name, mode, by_name):
    trees, options = CALLS[name]
    options = dict(options)
    plain_ranks = jax.tree.map(lambda leaf: leaf.rank, trees)
    mapped = auto_vmap(*options.pop("ranks", plain_ranks), **options)(kernel)
    values = jax.tree.map(lambda leaf: leaf.value, trees)
    positional = max(0, len(values) - by_name)
    named = dict(zip("abc"[positional:], values[positional:], strict=False))
    got = mapped(*values[:positional], **named, mode=mode)
    arrays, tree = jax.tree.flatten(values)
    one = lambda *xs: kernel(*tree.unflatten(xs), mode=mode)  # noqa: E731
    want = item_by_item(one, jax.tree.leaves(plain_ranks), *arrays)
    assert_same(got, want, rtol=1e-3, atol=1e-3)


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


def test_without_batch_axes_the_kernel_is_simply_called():
    args = (2.0, jnp.ones(3), jnp.ones((3, 3)))
    mapped = auto_vmap(0, 1, 2, chunk_size=1)(weighed)
    assert str(jax.make_jaxpr(mapped)(*args)) == str(jax.make_jaxpr(weighed)(*args))
    received = []
    auto_vmap(0, 1)(lambda s, v: received.extend([s, v]) or ())(args[0], args[1])
    assert received[0] is args[0]
    assert received[1] is args[1]


# Transformations of the result.


S4 = jnp.asarray(np.linspace(0.1, 1.0, 4)[:, None])
V5 = jnp.asarray(np.linspace(-1.0, 2.0, 15).reshape(5, 3))


def potential(s, v):
    return jnp.sin(s) * jnp.sum(v**2) + v[1] * s**2


@functools.cache
def transformed(**options):
    """Return what each transformation makes of the mapped function; without options, by hand."""

    def by_hand(s, v):
        return jax.vmap(jax.vmap(potential, in_axes=(None, 0)), in_axes=(0, None))(s[:, 0], v)

    mapped = auto_vmap(0, 1, **options)(potential) if options else by_hand

    def loss(s, v):
        return jnp.sum(mapped(s, v) * jnp.arange(20.0).reshape(4, 5))

    return jax.jit(
        lambda s, v: {
            "gradients": jax.grad(loss, (0, 1))(s, v),
            "tangents": jax.jvp(mapped, (s, v), (jnp.cos(s), jnp.sin(v))),
            "vmap": jax.vmap(mapped, (0, None), 1)(jnp.stack([s, 2 * s]), v),
            "hessian": jax.hessian(loss)(s, v),
        }
    )(S4, V5)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": None},
        {"chunk_size": 3},
        {"chunk_size": 3, "checkpoint": False},
        {"chunk_size": 3, "jit": True},
    ],
    ids=str,
)
def test_transformations_of_the_result(options):
    assert_same(transformed(**options), transformed())


# What an argument can be.


@OPTIONS
def test_python_scalars_and_weak_arrays_stay_weakly_typed(options):
    mapped = auto_vmap(0, 0, **options)(lambda a, b: a * b)
    halves = jnp.ones(3, jnp.float16)
    assert mapped(2.0, halves).dtype == jnp.float16
    assert mapped(halves, 2).dtype == jnp.float16
    assert jnp.asarray(mapped(2, 3.0)).weak_type
    weak = jax.vmap(lambda _: 2.0)(halves)
    assert weak.weak_type
    assert mapped(weak, halves).dtype == jnp.float16


def test_an_unmapped_scalar_reaches_the_kernel_as_it_came():
    received = []
    auto_vmap(0, 0, 0)(lambda a, b, c: received.extend([a, b]) or c)(2.5, True, jnp.ones(3))
    assert received == [2.5, True]
    assert [type(value) for value in received] == [float, bool]


class HasArray:
    """Converts itself to a JAX array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


@OPTIONS
def test_objects_that_convert_themselves(options):
    mapped = auto_vmap(1, 0, **options)(lambda v, s: jnp.sum(v * s))
    got = mapped(HasArray(V5), HasArray(jnp.float32(2.0)))
    assert_same(got, jnp.sum(V5 * 2, axis=1))
    assert mapped.plan(HasArray(V5), 2.0).batch_shape == (5,)


@OPTIONS
@pytest.mark.parametrize("shape", [(0, 4), (1, 0)])
def test_a_batch_without_items_keeps_dtype_and_trailing_shape(shape, options):
    mapped = auto_vmap(1, 0, **options)(lambda v, n: {"v": v[:2], "n": n, "k": jax.random.key(0)})
    got = mapped(np.ones((*shape, 3), np.float16), np.ones(shape[-1:], np.int32))
    assert (got["v"].shape, got["v"].dtype) == ((*shape, 2), jnp.float16)
    assert (got["n"].shape, got["n"].dtype) == (shape, jnp.int32)
    assert got["k"].shape == shape


def test_unranked_objects_pass_by_identity():
    marker, listing, mapping = object(), [1, object()], {"b": 1, "a": {2}}
    received = []

    @auto_vmap(x=0, chunk_size=2)
    def f(x, a, *rest, b, **others):
        received.extend([a, rest[0], b, others["c"]])
        return x + 1

    assert_same(f(jnp.arange(5.0), marker, listing, b=mapping, c=f), jnp.arange(5.0) + 1)
    assert all(
        got is want for got, want in zip(received, [marker, listing, mapping, f], strict=True)
    )


@OPTIONS
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


@OPTIONS
def test_none_passes_through_whatever_its_rank(options):
    @auto_vmap(1, 0, {"a": 1, "b": 2}, **options)
    def f(x, weight=None, extra=None):
        out = jnp.sum(x) if weight is None else jnp.sum(x) * weight
        return (out, weight) if extra is None else (out + extra["a"][0], extra["b"])

    plain, weight = jnp.sum(V5, axis=1), jnp.arange(5.0)
    assert_same(f(V5), (plain, None))
    assert_same(f(V5, weight), (plain * weight, weight))
    assert_same(f(V5, extra={"a": jnp.ones(3), "b": None}), (plain + 1, None))


# What a kernel can be.


@OPTIONS
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
    assert_same(got, ((a * 2 + 3 * a - 3 + 2 + 2) * 2 + a) * 3 + 1)


@OPTIONS
def test_a_positional_only_default_after_one_without_a_rank(options):
    @auto_vmap(x=0, b=0, **options)
    def f(x, a=3.0, b=2.0, /):
        return x * a + b

    assert_same(f(jnp.arange(4.0)), jnp.arange(4.0) * 3 + 2)
    assert_same(f(jnp.arange(4.0), 1.0), jnp.arange(4.0) + 2)


@OPTIONS
def test_a_default_array_brings_its_batch(options):
    table = jnp.arange(12.0).reshape(4, 3)

    @auto_vmap(0, 1, **options)
    def f(x, row=table):
        return x + row[1]

    assert_same(f(1.0), 1 + table[:, 1])
    assert_same(f(jnp.arange(2.0)[:, None]), jnp.arange(2.0)[:, None] + table[None, :, 1])
    assert_same(f(1.0, table[0]), jnp.float32(2.0) * jnp.ones_like(table[0, 0]))
    assert f.plan(1.0).batch_shape == (4,)


@OPTIONS
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


def test_a_parameter_called_self_can_be_passed_by_name():
    mapped = auto_vmap(self=0)(lambda self, args, kwargs: self + args + kwargs)
    assert_same(mapped(self=jnp.arange(3.0), args=1.0, kwargs=2.0), jnp.arange(3.0) + 3)
    assert mapped.plan(self=jnp.arange(3.0), args=1.0, kwargs=2.0).batch_shape == (3,)


def test_partials():
    """That give names; test_wrapper.py has one that gives the first argument."""
    f = functools.partial(lambda a, s, v, scale: a * s * jnp.sum(v) * scale, s=2.0, scale=0.5)
    got = auto_vmap(a=0, v=1)(f)(jnp.arange(5.0), v=V5)
    assert_same(got, jnp.arange(5.0) * jnp.sum(V5, axis=1))


@OPTIONS
def test_static_travels_through_ranked_arguments(options):
    mapped = auto_vmap(0, **options)(lambda x: x["base"] ** x["n"].value)
    assert_same(mapped({"base": jnp.arange(5.0), "n": Static(3)}), jnp.arange(5.0) ** 3)


def test_structures_of_two_calls_are_not_mixed_up():
    mapped = auto_vmap(0, 1)(lambda x, v: jax.tree.map(lambda x: x * 2, (x, v)))
    for first in (jnp.ones(2), {"a": jnp.ones(2)}, {"b": jnp.ones(2)}, (jnp.ones(2), 1.0)):
        got = mapped(first, jnp.ones((2, 3)))[0]
        want = jax.tree.map(lambda x: x * jnp.full(2, 2.0), first)
        assert_same(got, want)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 5, 30]), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 400),
)
def test_a_plan_never_has_more_in_flight_than_asked(axes, chunk_size):
    first = tuple(n if who & 1 else 1 for n, who in axes)
    second = tuple(n if who & 2 else 1 for n, who in axes)
    args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (first, (*second, 3)))
    plan = auto_vmap(0, 1, chunk_size=chunk_size)(lambda s, v: v * s).plan(*args)
    assert plan.batch_shape == np.broadcast_shapes(first, second)
    assert plan.in_flight <= max(chunk_size, 1)
    # Each level at least half fills the room that the inner ones leave.
    assert plan.steps <= 2 ** len(plan.levels) * -(-plan.evaluations // chunk_size)
