# SPDX-License-Identifier: MIT
import contextlib
import functools
import math
import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import (
    REMAT3,
    assert_same,
    at_each_run,
    equations,
    is_checkpoint,
    primitives,
    slow,
    weekly,
)
from rankax import chunked_vmap

# 12 items are even in chunks of 4, 13 are not; 1 + 12 divides nothing that is near 4 or 5.
EVEN, UNEVEN = 12, 13
LENGTHS = pytest.mark.parametrize("length", [EVEN, UNEVEN])
# Where both cost seconds.
UNEVEN_FIRST = pytest.mark.parametrize("length", [weekly(EVEN), UNEVEN])


def kernel(x, k):
    """Mixes all of a vector, in order, with an integer."""
    wave = jnp.tanh(x * jnp.arange(1.0, x.size + 1)) * k.astype(x.dtype)
    return jnp.cumsum(wave), k + jnp.argmax(wave)


def items(length, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(length, 3)), jnp.float32)
    return x, jnp.asarray(rng.integers(1, 9, size=length), jnp.int32)


def weigh(tree):
    """A scalar in which every number counts differently, so that no gradient is constant."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            weights = jnp.cos(jnp.arange(float(leaf.size))).reshape(leaf.shape)
            total += jnp.sum(weights * (leaf + leaf**2))
    return total


WEIGHED = jax.jit(weigh)  # one program where the rest is evaluated eagerly


# Values.


@LENGTHS
@pytest.mark.parametrize("jit", [False, True])
def test_equals_a_python_loop(length, jit):
    x, k = items(length)
    f = chunked_vmap(kernel, 4)
    one = jax.jit(kernel)
    loop = [one(x[i], k[i]) for i in range(length)]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *loop)
    assert_same((jax.jit(f) if jit else f)(x, k), want)


# Nothing to cut, a prime, and what many numbers divide. The larger cost seconds.
@pytest.mark.parametrize("length", [1, 7, slow(2), slow(12), weekly(13), weekly(24), weekly(31)])
def test_gradients_for_every_length_and_chunk_size(length):
    """Every combination is traced; those that give one program are evaluated once."""
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.normal(size=(length, 2)), jnp.float32)
    k = jnp.asarray(rng.integers(0, 3, size=length), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(length, 2)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)

    def value_and_gradients(transform):
        def loss(x, table, k, weights):  # closes over the table; integers in the tree of the item
            def one(item):
                return {"y": jnp.sin(item["x"] * table[item["k"]]), "k": item["k"] * 2}

            out = transform(one)({"x": x, "k": k})
            return jnp.sum(out["y"] * weights), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    args = x, table, k, weights
    programs = {}
    for chunk_size in range(1, length + 2):  # any more, and the program is that of vmap
        function = value_and_gradients(functools.partial(_chunked, chunk_size=chunk_size))
        traced = function.trace(*args)
        assert not traced.jaxpr.consts  # so that the text says all
        programs.setdefault(str(traced.jaxpr), (chunk_size, function))
    # At least each divisor cuts the axis in its own way.
    assert len(programs) >= sum(length % divisor == 0 for divisor in range(1, length + 1))
    want = value_and_gradients(jax.vmap)(*args)
    results = jax.jit(lambda *args: {size: f(*args) for size, f in programs.values()})(*args)
    assert_same(results, dict.fromkeys(results, want))


def _chunked(fun, chunk_size):
    return chunked_vmap(fun, chunk_size)


@pytest.mark.parametrize(
    ("length", "dtypes", "cores", "axes", "chunk_size", "out_axis"),
    [
        (9, ["float32"], [()], [0], 4, -1),
        (9, ["float16", "bool"], [(2, 3), (1,)], [1, -1], 2, 0),
        (5, ["uint8", "float32"], [(3,), (2, 2)], [-2, None], 3, 1),
        (6, ["int32", "float16", "float32"], [(0, 2), (), (3,)], [2, 0, -2], 6, -2),
        (7, ["bool", "uint8", "int32"], [(1, 1), (2,), (3, 2)], [-3, 1, None], 1, 0),
        (0, ["float32", "int32"], [(2,), ()], [1, 0], 1, -1),
    ],
)
def test_equals_vmap_on_trees(length, dtypes, cores, axes, chunk_size, out_axis):
    arrays = []
    for dtype, core, axis in zip(dtypes, cores, axes, strict=True):
        shape = list(core)
        if axis is not None:
            shape.insert(axis % (len(core) + 1), length)
        values = np.arange(math.prod(shape)).reshape(shape) * 7 % 5
        arrays.append(jnp.asarray(values.astype(dtype)))

    def one(tree):
        total = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in tree["in"])
        return {"same": tree["in"], "order": total * jnp.arange(1.0, 3.0), "static": None}

    in_axes = ({"in": axes},)
    out_axes = {"same": axes, "order": out_axis, "static": 0}
    want = jax.jit(jax.vmap(one, in_axes, out_axes))({"in": arrays})
    chunked = jax.jit(chunked_vmap(one, chunk_size, in_axes, out_axes))
    assert_same(chunked({"in": arrays}), want)


# Axes.


class Pose(NamedTuple):
    rotation: jax.Array
    shift: jax.Array


@pytest.mark.parametrize(
    ("length", "out_axes"),
    [
        pytest.param(EVEN, -2, id="-2-12"),
        pytest.param(EVEN, 0, id="0-12"),
        pytest.param(UNEVEN, {"a": 2, "b": (0, None)}, id="tree-13"),
        pytest.param(EVEN, 1, id="1-12", marks=pytest.mark.slow),
        pytest.param(EVEN, -1, id="-1-12", marks=pytest.mark.slow),
    ],
)
def test_prefixes_of_in_axes_and_out_axes(length, out_axes):
    def one(pose, pair, scale):
        moved = pose.rotation @ pair[0] * scale + pose.shift
        outer = jnp.outer(moved, pair[1]["w"])
        return {"a": outer, "b": (outer.T + 1, scale if constant else moved)}

    constant = isinstance(out_axes, dict)

    rng = np.random.default_rng(1)
    pose = Pose(
        jnp.asarray(rng.normal(size=(3, length, 3)), jnp.float32),
        jnp.asarray(rng.normal(size=(3, length)), jnp.float32),
    )
    pair = (jnp.arange(3.0), {"w": jnp.asarray(rng.normal(size=(length, 2)), jnp.float32)})
    scale = jnp.array([1.0, 2.0, 3.0])
    # A list in the place of the outermost tuple is taken as JAX takes it.
    in_axes = [Pose(1, -1), (None, 0), None]

    def outputs_and_gradient(transform):
        f = transform(one, in_axes=in_axes, out_axes=out_axes)

        def loss(*args):
            outs = f(*args)
            return weigh(outs), outs

        gradient, outs = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(pose, pair, scale)
        return outs, gradient

    want = outputs_and_gradient(jax.vmap)
    assert_same(chunked_vmap(one, 4, tuple(in_axes), out_axes)(pose, pair, scale), want[0])
    got = outputs_and_gradient(functools.partial(_chunked_with, chunk_size=4))
    assert_same(got[0], want[0])
    assert_same(got[1], want[1], rtol=1e-4, atol=1e-4)


def _chunked_with(fun, in_axes=0, out_axes=0, *, chunk_size, **options):
    return chunked_vmap(fun, chunk_size, in_axes, out_axes, **options)


@LENGTHS
def test_keyword_arguments_are_mapped_over_axis_0(length):
    x, k = items(length)
    want = jax.jit(jax.vmap(kernel))(x, k)
    assert_same(chunked_vmap(kernel, 4)(x, k=k), want)
    assert_same(chunked_vmap(kernel, 4, in_axes=1)(x.T, k=k), want)
    assert_same(chunked_vmap(kernel, 4, in_axes=())(k=k, x=x), want)
    assert_same(chunked_vmap(kernel, 4, in_axes=())(x=x, k=k), want)


@LENGTHS
def test_out_axes_none_keeps_what_no_item_changes(length):
    shared = {"scale": jnp.array(2), "mask": jnp.array([True, False])}

    def one(x):
        return x * 2, shared

    got = chunked_vmap(one, 4, out_axes=(0, None))(jnp.arange(length))
    assert_same(got, (jnp.arange(length) * 2, shared))


@pytest.mark.parametrize("axis_size", [EVEN, UNEVEN, np.int64(UNEVEN), 0])
def test_axis_size_alone_gives_the_length(axis_size):
    def one(x):
        return x * 3, jnp.arange(2)

    got = chunked_vmap(one, 4, in_axes=None, axis_size=axis_size)(jnp.array(2.0))
    assert_same(got, jax.vmap(one, in_axes=None, axis_size=int(axis_size))(jnp.array(2.0)))
    got = chunked_vmap(lambda: jnp.arange(2), 4, axis_size=axis_size)()
    assert_same(got, jnp.tile(jnp.arange(2), (int(axis_size), 1)))


def test_axis_size_may_repeat_what_the_arguments_say():
    x = jnp.arange(13.0)
    assert_same(chunked_vmap(jnp.sin, 4, axis_size=13)(x), jnp.sin(x))


def test_unmapped_arguments_may_be_any_object():
    def one(x, name, factor, missing):
        assert missing is None
        return x * len(name) * factor

    got = chunked_vmap(one, 4, in_axes=(0, None, None, 0))(jnp.arange(13), "abc", 2, None)
    assert_same(got, jnp.arange(13) * 6)


# Leaves of every kind.


@UNEVEN_FIRST
def test_typed_keys_in_and_out(length):
    keys = jax.random.split(jax.random.key(3), length)

    def one(key, x):
        use, keep = jax.random.split(key)
        return jax.random.normal(use, (2,)) * x, keep

    x = jnp.arange(float(length))

    def gradient(transform):
        return jax.jit(jax.grad(lambda x: weigh(transform(one)(keys, x)[0])))(x)

    assert_same(chunked_vmap(one, 4)(keys, x), jax.jit(jax.vmap(one))(keys, x))
    chunked = functools.partial(_chunked, chunk_size=4)
    assert_same(gradient(chunked), gradient(jax.vmap), rtol=1e-4)


@LENGTHS
def test_closed_over_key(length):
    def one(i):
        return jax.random.uniform(jax.random.fold_in(key, i), (2,)), key

    key, i = jax.random.key(0), jnp.arange(length)
    want = jax.jit(jax.vmap(one, out_axes=(0, None)))(i)
    assert_same(chunked_vmap(one, 4, out_axes=(0, None))(i), want)


@UNEVEN_FIRST
def test_bool_integer_and_zero_size_leaves(length):
    tree = {
        "bool": np.arange(length) % 3 == 0,
        "int8": np.arange(length, dtype=np.int8),
        "empty": np.zeros((length, 0, 2), np.float32),
        "complex": np.arange(length) * np.complex64(1 - 1j),
    }

    def one(item):
        return item | {"not": ~item["bool"], "abs": jnp.abs(item["complex"]), "void": jnp.zeros(0)}

    assert_same(chunked_vmap(one, 4)(tree), jax.jit(jax.vmap(one))(tree))
    gradient = jax.grad(lambda empty: WEIGHED(chunked_vmap(one, 4)(tree | {"empty": empty})))
    assert_same(gradient(tree["empty"]), tree["empty"])


def test_zero_length_axis():
    def one(x):
        return jnp.sum(x), x.astype(jnp.int32)

    got = chunked_vmap(one, 4)(jnp.zeros((0, 3), jnp.float16))
    assert_same(got, (jnp.zeros(0, jnp.float16), jnp.zeros((0, 3), jnp.int32)))
    gradient = jax.grad(lambda x: weigh(chunked_vmap(one, 4)(x)))(jnp.zeros((0, 3)))
    assert_same(gradient, jnp.zeros((0, 3)))


def test_numpy_arrays():
    x = np.arange(13, dtype=np.int16)
    assert_same(chunked_vmap(lambda v: v * 2, 4)(x), jnp.arange(13, dtype=jnp.int16) * 2)


@LENGTHS
def test_weak_types_promote_inside_the_kernel_as_under_vmap(length):
    half = jnp.ones(3, jnp.float16)

    def one(weak):
        return weak * half  # float16 with a weak float, an error with a strong float32

    weak = lax.full((length,), 2.0)
    assert weak.weak_type
    assert_same(chunked_vmap(one, 4)(weak), jax.vmap(one)(weak))


def test_weak_types_are_kept_where_chunks_are_even():
    weak = lax.full((EVEN,), 2.0)
    assert chunked_vmap(lambda x: x * 2, 4)(weak).weak_type
    assert not chunked_vmap(lambda x: x * jnp.ones(()), 4)(weak).weak_type


# Programs.


TRANSFORMS = {
    "call": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x, k: weigh(f(x, k))),
    "jvp": lambda f: lambda x, k: jax.jvp(lambda x: f(x, k)[0], (x,), (x,)),
    "jacrev": lambda f: jax.jacrev(lambda x, k: f(x, k)[0]),
    "hessian": lambda f: jax.hessian(lambda x, k: weigh(f(x, k))),
    "vmap": lambda f: lambda x, k: jax.vmap(f)(x[None], k[None]),
    "jit-grad": lambda f: jax.jit(jax.grad(lambda x, k: weigh(f(x, k)))),
}
QUICK = ["call", "jit", "jvp", "vmap", "jit-grad"]


@LENGTHS
@pytest.mark.parametrize("transform", at_each_run(QUICK, TRANSFORMS))
def test_kernel_is_traced_once(length, transform):
    traces = []

    def counted(x, k):
        traces.append(x.shape)
        return kernel(x, k)

    transform(chunked_vmap(counted, 4))(*items(length))
    assert traces == [(3,)]


@pytest.mark.parametrize("chunk_size", [None, UNEVEN, UNEVEN + 1, 10**9])
def test_one_chunk_is_exactly_the_program_of_vmap(chunk_size):
    x, k = items(UNEVEN)
    options = {"in_axes": (1, 0), "out_axes": (1, 0)}
    want = jax.make_jaxpr(jax.vmap(kernel, **options))(x.T, k)
    assert str(jax.make_jaxpr(chunked_vmap(kernel, chunk_size, **options))(x.T, k)) == str(want)


@LENGTHS
def test_otherwise_one_loop_holds_the_chunk(length):
    x, k = items(length)
    program = jax.make_jaxpr(chunked_vmap(kernel, 4))(x, k)
    (loop,) = (e for e in equations(program.jaxpr) if e.primitive.name == "scan")
    assert loop.params["length"] == math.ceil(length / 4)
    (wave,) = (e for e in equations(loop.params["jaxpr"].jaxpr) if e.primitive.name == "tanh")
    assert wave.outvars[0].aval.shape == (4, 3)


def _is_whole(shape):
    return UNEVEN in shape or UNEVEN * 3 in shape


def test_what_is_read_by_index_is_flat_before_the_loop():
    """Only reads touch the whole: a reshape there, and the loop would not be transposed well."""

    def whole_operands(f, *args):
        (loop,) = (e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.params.get("length"))
        return Counter(
            equation.primitive.name
            for equation in equations(loop.params["jaxpr"].jaxpr)
            if any(_is_whole(v.aval.shape) for v in equation.invars if hasattr(v, "aval"))
        )

    got = whole_operands(chunked_vmap(kernel, 4, checkpoint=False), *items(UNEVEN))
    outputs = len(jax.tree.leaves(jax.eval_shape(kernel, *(x[0] for x in items(UNEVEN)))))
    assert got == {"dynamic_slice": 2, "dynamic_update_slice": outputs}


def test_an_axis_that_32_bits_cannot_count_is_not_made():
    """Only shapes: 2**29 + 1 items of 8 numbers, as one axis, would be past 2**31."""
    x = jax.ShapeDtypeStruct((2**29 + 1, 8), jnp.float32)
    program = jax.make_jaxpr(chunked_vmap(jnp.sin, 2**20))(x)
    reads = [e for e in equations(program.jaxpr) if e.primitive.name == "dynamic_slice"]
    assert [e.invars[0].aval.shape for e in reads] == [x.shape]


@pytest.mark.parametrize(("length", "out_axis"), [(UNEVEN, 0), (EVEN, 1), (UNEVEN, 1)])
def test_derivatives_write_nothing_in_place(length, out_axis):
    """A cotangent that is carried and overwritten is copied whole at every step of the loop."""

    x, _ = items(length)

    def loss(scale):
        return weigh(chunked_vmap(lambda row: jnp.sin(row * scale), 4, out_axes=out_axis)(x))

    assert primitives(loss, 2.0)["dynamic_update_slice"] == 1
    for program in (jax.grad(loss), lambda scale: jax.jvp(loss, (scale,), (scale,))):
        assert primitives(program, 2.0)["dynamic_update_slice"] == 0


@pytest.mark.skipif(REMAT3, reason="it makes tangents of zeros, see test_switches.py")
def test_inputs_that_do_not_move_have_no_tangents():
    x, _ = items(UNEVEN)

    def f(scale, x):
        return chunked_vmap(lambda row: jnp.sin(row * scale), 4)(x)

    # Chunks of `x` are read, and those of its tangent only where it moves.
    assert primitives(f, 2.0, x)["dynamic_slice"] == 1
    assert primitives(lambda s: jax.jvp(lambda s: f(s, x), (s,), (s,)), 2.0)["dynamic_slice"] == 1
    assert primitives(lambda s: jax.jvp(f, (s, x), (s, x)), 2.0)["dynamic_slice"] == 2


@LENGTHS
@pytest.mark.parametrize("checkpoint", [True, False])
def test_checkpoint_recomputes_in_the_reverse_pass(length, checkpoint):
    def one(row):
        return jnp.exp(jnp.cumsum(row))

    x, _ = items(length)
    gradient = jax.jit(jax.grad(lambda x: weigh(chunked_vmap(one, 4, checkpoint=checkpoint)(x))))
    names = primitives(gradient, x)
    # Once forward, and once more in the reverse pass where nothing was stored.
    assert names["exp"] == (2 if checkpoint else 1)
    assert any(map(is_checkpoint, names)) == checkpoint
    want = jax.jit(jax.grad(lambda x: weigh(jax.vmap(one)(x))))(x)
    assert_same(gradient(x), want, rtol=1e-4)


def test_a_smaller_chunk_that_divides_is_preferred():
    f, x = chunked_vmap(jnp.sin, 6), jnp.ones(20)  # 4 x 5, not 6 + 6 + 6 + 2
    (loop,) = (e for e in equations(jax.make_jaxpr(f)(x).jaxpr) if e.primitive.name == "scan")
    assert loop.params["length"] == 4
    assert not {"dynamic_slice", "dynamic_update_slice"} & set(primitives(f, x))


def test_checkpoint_is_checked():
    text = "chunked_vmap(sin): checkpoint must be True or False, got 'no'"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        chunked_vmap(jnp.sin, 2, checkpoint="no")


def test_metadata_of_the_kernel():
    f = chunked_vmap(kernel, 4)
    assert f.__name__ == "kernel"
    assert f.__doc__ == "Mixes all of a vector, in order, with an integer."
    assert f.__wrapped__ is kernel


# Composed with transformations. `w` is closed over everywhere, and differentiated too.


def smooth(x, w):
    return jnp.tanh(x @ w) * x[0] + jnp.sum(w**2) * x[1]


def both(length, make):
    """Evaluate ``make(transform)`` with the chunked transform and with `jax.vmap`."""
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.normal(size=(length, 2)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(2,)), jnp.float32)
    chunked = functools.partial(_chunked_with, chunk_size=4)
    got, want = jax.jit(lambda x, w: [make(t)(x, w) for t in (chunked, jax.vmap)])(x, w)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


def total(transform):
    return lambda x, w: weigh(transform(lambda row: smooth(row, w))(x))


def rows(transform):
    return lambda x, w: transform(lambda row: smooth(row, w))(x)


def pushed(f):
    def push(x, w):
        return jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))

    return push


def pulled(f):
    def pull(x, w):
        out, back = jax.vjp(f, x, w)
        return out, back(jnp.cos(out))

    return pull


def linearized(f):
    def push(x, w):
        out, linear = jax.linearize(f, x, w)
        transposed = jax.linear_transpose(linear, x, w)
        return out, linear(jnp.cos(x), jnp.sin(w)), transposed(jnp.cos(out))

    return push


def both_arguments(derivative):
    return lambda f: derivative(f, argnums=(0, 1))


@pytest.mark.parametrize(
    ("length", "derivative"),
    [
        pytest.param(UNEVEN, lambda f: pulled(lambda *args: pushed(f)(*args)[1]), id="vjp-jvp-13"),
        pytest.param(EVEN, pushed, id="jvp-12"),
        pytest.param(EVEN, both_arguments(jax.jacfwd), id="jacfwd-12"),
        pytest.param(EVEN, pulled, id="vjp-12", marks=pytest.mark.slow),
        pytest.param(EVEN, linearized, id="linearize-12", marks=pytest.mark.slow),
        pytest.param(EVEN, both_arguments(jax.jacrev), id="jacrev-12", marks=pytest.mark.slow),
        pytest.param(EVEN, lambda f: pushed(pulled(f)), id="jvp-vjp-12", marks=pytest.mark.slow),
    ],
)
def test_first_derivatives(length, derivative):
    both(length, lambda transform: derivative(rows(transform)))


HIGHER = {
    "hessian": both_arguments(jax.hessian),  # forward over reverse
    "rev-rev": lambda f: both_arguments(jax.jacrev)(both_arguments(jax.jacrev)(f)),
    "rev-fwd": lambda f: both_arguments(jax.jacrev)(both_arguments(jax.jacfwd)(f)),
    "fwd-fwd": lambda f: both_arguments(jax.jacfwd)(both_arguments(jax.jacfwd)(f)),
    "third": lambda f: jax.grad(lambda x, w: weigh(jax.hessian(f)(x, w))),
    "third, reverse": lambda f: jax.grad(
        lambda x, w: weigh(jax.grad(lambda x, w: weigh(jax.grad(f)(x, w)))(x, w))
    ),
    "linearize grad": lambda f: (
        lambda x, w: jax.linearize(both_arguments(jax.grad)(f), x, w)[1](jnp.cos(x), jnp.sin(w))
    ),
}


@pytest.mark.parametrize("length", [UNEVEN, weekly(EVEN)])
@pytest.mark.parametrize("derivative", at_each_run(["hessian", "fwd-fwd"], HIGHER))
def test_higher_derivatives(length, derivative):
    both(length, lambda transform: derivative(total(transform)))


AROUND = {
    "chunks": lambda f: chunked_vmap(f, 2),
    "even chunks": lambda f: chunked_vmap(f, 1),
    "scan": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), None, x)[1],
    "carry": lambda f: lambda x: lax.scan(lambda c, row: (weigh(f(row * c)), c), 1.0, x),
    "checkpoint": lambda f: lambda x: lax.map(jax.checkpoint(f), x),
}


HIGHER_INSIDE = {
    f"{derivative} in {around}": (HIGHER[derivative], AROUND[around])
    for derivative in HIGHER
    for around in AROUND
    if around in ("chunks", "scan") or derivative in ("hessian", "rev-rev", "third")
}


@pytest.mark.parametrize(
    "case",
    at_each_run(["hessian in chunks"], HIGHER_INSIDE, pytest.mark.weekly),
)
def test_higher_derivatives_inside_another_loop(case):
    """A scan that JAX has linearised forgets the rules inside: what is left must be right."""
    chunked = functools.partial(_chunked_with, chunk_size=2)
    got = _inside(chunked, *case)
    want = _inside_by_vmap(case[0], case[1] if case[1] is AROUND["carry"] else jax.vmap)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


def _inside(transform, derivative, around):
    def row(row, w):
        one = lambda item: (jnp.sin(item * w) * w[::-1], jnp.cos(item * w))  # noqa: E731
        return transform(one, out_axes=(0, 1))(row)

    x, w = jnp.cos(jnp.arange(15.0)).reshape(3, 5), jnp.array([0.5, 2.0])
    return jax.jit(derivative(lambda x, w: weigh(around(lambda r: row(r, w))(x))))(x, w)


@functools.cache  # all loops but one give what `jax.vmap` gives
def _inside_by_vmap(derivative, around):
    return _inside(jax.vmap, derivative, around)


EVALUATED = {
    "eager": contextlib.nullcontext,
    "jit": contextlib.nullcontext,
    "disable_jit": jax.disable_jit,
}


@jax.jit
def of_outputs(out):
    return jnp.sum(out["first"] * out["second"] * out["both"] + out["second"] ** 2)


@pytest.mark.parametrize("how", ["eager", "jit", slow("disable_jit")])
@pytest.mark.parametrize("outer", [jax.grad, slow(jax.jacfwd)])
def test_outputs_that_move_in_the_second_derivative_only(outer, how):
    def one(x, y):
        return {"first": jnp.sin(x), "second": jnp.cos(y), "both": x * y**2, "neither": 3}

    def second(transform):
        gradient = jax.grad(lambda x, y: of_outputs(transform(one)(x, y)))
        return outer(lambda y: jnp.sum(gradient(x, y) ** 2))

    x, y = (jnp.asarray(np.linspace(a, a + 1, 7)) for a in (0.1, 1.0))
    chunked = functools.partial(_chunked_with, chunk_size=3)
    got = jax.jit(second(chunked)) if how == "jit" else second(chunked)
    want = jax.jit(second(jax.vmap))(y)
    with EVALUATED[how]():
        assert_same(got(y), want, rtol=1e-4)


@UNEVEN_FIRST
def test_tangents_that_are_python_numbers(length):
    x = jnp.linspace(0.1, 1.0, length)

    def push(transform):
        return jax.jvp(lambda w: transform(lambda s: jnp.sin(s * w))(x), (2.0,), (0.5,))

    chunked = functools.partial(_chunked_with, chunk_size=4)
    assert_same(push(chunked), push(jax.vmap))


def turned(x, w):
    return jnp.sin(x) * w * x[::-1]


def mixed(x, w):
    return jnp.array([x[1] * w[0] - x[0] * w[1], x[0] * x[1], w[0] * x[0] ** 2])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kernel", [turned, mixed])
def test_values_are_told_from_tangents_that_are_mapped(kernel, axis):
    """XLA:CPU of JAX 0.10 fails where it takes the reading of one for that of the other."""

    def jacobian(transform):
        def mapped(x, w):
            return transform(kernel, in_axes=axis)(x.swapaxes(0, axis), w.swapaxes(0, axis))

        return jax.jit(jax.jacfwd(mapped))(x, jnp.cos(x))

    x = jnp.linspace(0.1, 1.0, 2 * UNEVEN).reshape(UNEVEN, 2)
    chunked = functools.partial(_chunked_with, chunk_size=4)
    assert_same(jacobian(chunked), jacobian(jax.vmap), rtol=1e-4)


@UNEVEN_FIRST
def test_hessian_without_jit(length):
    x = jnp.arange(float(length))
    got = jax.hessian(lambda x: WEIGHED(chunked_vmap(jnp.sin, 4)(x)))(x)
    assert_same(got, jax.jit(jax.hessian(lambda x: weigh(jnp.sin(x))))(x))


@UNEVEN_FIRST
def test_vmap_of_grad_inside(length):
    both(
        length, lambda transform: lambda x, w: transform(jax.grad(smooth), in_axes=(0, None))(x, w)
    )


@pytest.mark.parametrize(("length", "inner_size"), [(UNEVEN, 4), (EVEN, 4), slow(EVEN, 3)])
def test_nested_in_itself(length, inner_size):
    def nested(outer, inner):
        def block(x, w):
            return inner(lambda s: jnp.sin(s * w[0] * x) + s**2)(jnp.arange(7.0))

        return lambda x, w: outer(lambda row: block(row, w))(x)

    x, w = jnp.cos(jnp.arange(length * 2.0)).reshape(length, 2), jnp.array([0.5, 2.0])
    chunked = nested(lambda f: chunked_vmap(f, 4), lambda f: chunked_vmap(f, inner_size))
    want = jax.jit(pulled(nested(jax.vmap, jax.vmap)))(x, w)
    assert_same(jax.jit(pulled(chunked))(x, w), want, rtol=1e-4, atol=1e-5)


@UNEVEN_FIRST
def test_under_vmap_with_batched_closed_over_values(length):
    def make(transform):
        def f(x, w):
            several = jnp.stack([x, x + 1, x * 2])
            weights = jnp.stack([w, w * 3, w - 1])
            over_both = jax.vmap(pulled(rows(transform)))(several, weights)
            over_closed = jax.vmap(pulled(rows(transform)), in_axes=(None, 0))(x, weights)
            over_axis = jax.vmap(rows(transform), in_axes=(1, None), out_axes=1)(
                jnp.moveaxis(several, 0, 1), w
            )
            return over_both, over_closed, over_axis

        return f

    both(length, make)


@UNEVEN_FIRST
def test_under_scan_and_checkpoint(length):
    def make(transform):
        @jax.checkpoint
        def step(x, w):
            y = rows(transform)(x, w)
            return jnp.tanh(x + y[:, None]), y

        def f(x, w):
            return lax.scan(step, x, jnp.stack([w, w * 2, w + 1]))

        return pulled(lambda x, w: f(x, w)[1])

    both(length, make)


@pytest.mark.parametrize(
    ("length", "wrap"),
    [
        pytest.param(UNEVEN, jax.checkpoint, id="checkpoint-13"),
        pytest.param(EVEN, jax.jit, id="jit-12", marks=pytest.mark.slow),
    ],
)
def test_second_derivatives_through_a_wrapper(length, wrap):
    def make(transform):
        gradient = jax.grad(wrap(total(transform)))
        reverse, forward = (both_arguments(j)(gradient) for j in (jax.jacrev, jax.jacfwd))
        return lambda x, w: (reverse(x, w), forward(x, w))

    both(length, make)


@UNEVEN_FIRST
def test_inside_while_loop_and_cond(length):
    def make(transform):
        def f(x, w):
            grown = lax.while_loop(
                lambda s: jnp.sum(s**2) < 50, lambda s: s * 2 + rows(transform)(s, w)[:, None], x
            )
            return lax.cond(jnp.sum(grown) > 0, rows(transform), lambda x, w: x[:, 0], grown, w)

        return f

    both(length, make)


@jax.custom_vjp
def clipped(x):
    return x**2


clipped.defvjp(lambda x: (x**2, x), lambda x, ct: (jnp.clip(ct * x, -0.5, 0.5),))


@jax.custom_jvp
def doubled(x):
    return jnp.sin(x)


@doubled.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), 2 * tangents[0] * primals[0]


@UNEVEN_FIRST
def test_kernels_with_rules_of_their_own(length):
    both(length, lambda t: pulled(lambda x, w: t(lambda row: clipped(row * w))(x)))
    both(length, lambda t: pulled(lambda x, w: t(lambda row: doubled(row * w))(x)))
    both(length, lambda t: pushed(lambda x, w: t(lambda row: doubled(row * w))(x)))


@UNEVEN_FIRST
def test_under_custom_vjp_and_eval_shape(length):
    def make(transform):
        @jax.custom_vjp
        def f(x, w):
            return rows(transform)(x, w)

        f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda r, ct: pulled(rows(transform))(*r)[1])
        return pulled(f)

    both(length, make)
    x = jax.ShapeDtypeStruct((length, 3), jnp.bfloat16)
    got = jax.eval_shape(chunked_vmap(lambda row: row[:2], 4), x)
    assert (got.shape, got.dtype) == ((length, 2), jnp.bfloat16)


def test_only_some_inputs_are_differentiated():
    """The others, and their overlap, must not reach the gradient; nor may it lose an item."""
    x, k = items(UNEVEN)
    other = jnp.cos(x)

    def loss(transform, x, other, w):
        return weigh(transform(lambda a, b, i: a * b * w + i.astype(jnp.float32))(x, other, k))

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(transform, *args):
        some = (1,), (2,), (3,), (1, 2), (2, 3), (1, 2, 3)
        return [jax.grad(loss, argnums)(transform, *args) for argnums in some]

    chunked, args = functools.partial(_chunked_with, chunk_size=4), (x, other, np.float32(1.5))
    assert_same(gradients(chunked, *args), gradients(jax.vmap, *args), rtol=1e-4, atol=1e-5)


def test_cotangents_of_overlapping_items_count_once():
    # 13 items as 4 + 4 + 4 + 4 from item 9: items 9, 10, 11 are read twice.
    ones = jnp.ones(UNEVEN)
    gradient = jax.grad(lambda x, s: jnp.sum(chunked_vmap(lambda v: v * s, 4)(x)), argnums=(0, 1))
    assert_same(gradient(ones, jnp.array(3.0)), (3 * ones, jnp.array(13.0)))


def test_side_effects_of_the_kernel_happen_in_each_chunk(capfd):
    def one(x):
        jax.debug.print("item {}", x)
        return x

    chunked_vmap(one, 2)(jnp.arange(4)).block_until_ready()
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == [
        "",
        "item 0",
        "item 1",
        "item 2",
        "item 3",
    ]


# Errors.


def add(x, y):
    return jax.tree.leaves(x)[0] + jax.tree.leaves(y)[0]


FIVE = np.ones(5, np.float32)


@pytest.mark.parametrize(
    ("error", "text", "chunk_size", "options"),
    [
        (ValueError, "chunked_vmap(add): chunk_size must be a positive int, got 0", 0, {}),
        (ValueError, "chunked_vmap(add): chunk_size must be a positive int, got -1", -1, {}),
        (TypeError, "chunked_vmap(add): chunk_size must be a positive int, got float 2.5", 2.5, {}),
        (TypeError, "chunked_vmap(add): chunk_size must be a positive int, got True", True, {}),
        (
            TypeError,
            "chunked_vmap(add): chunk_size must be a positive int, got '3'; memory_limit='2 GB' "
            "picks a size that fits the memory, and kernel.tune(...) the fastest one",
            "3",
            {},
        ),
        (
            ValueError,
            "chunked_vmap(add): axis_size must be a positive int, got -1",
            3,
            {"axis_size": -1},
        ),
        (
            TypeError,
            "chunked_vmap(add): axis_size must be a positive int, got float 2.5",
            3,
            {"axis_size": 2.5},
        ),
        (
            TypeError,
            "chunked_vmap(add): axis_size must be a positive int, got False",
            3,
            {"axis_size": False},
        ),
        (
            TypeError,
            "chunked_vmap(add): in_axes must hold ints and None, got float 0.5 at in_axes[1]['b']",
            3,
            {"in_axes": (0, {"b": 0.5})},
        ),
        (
            TypeError,
            "chunked_vmap(add): in_axes must hold ints and None, got bool True at in_axes",
            3,
            {"in_axes": True},
        ),
        (
            TypeError,
            "chunked_vmap(add): out_axes must hold ints and None, got str '0' at out_axes",
            3,
            {"out_axes": "0"},
        ),
    ],
)
def test_bad_options_are_refused_when_the_function_is_made(error, text, chunk_size, options):
    with pytest.raises(error) as raised:
        chunked_vmap(add, chunk_size, **options)
    assert str(raised.value) == text


def test_function_that_cannot_be_called():
    with pytest.raises(TypeError) as raised:
        chunked_vmap(3, 3)
    assert str(raised.value) == "chunked_vmap: fun must be callable, got int"


@pytest.mark.parametrize("chunk_size", [None, 2, 5])
@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (
            (FIVE, FIVE[:3]),
            {},
            "chunked_vmap(add): the looped axes must have one length, got 5 and 3\n\n"
            "    leaf  shape  axis  length\n"
            "    x     (5,)   0     5\n"
            "  > y     (3,)   0     3",
        ),
        (
            ({"a": FIVE, "b": FIVE[:4]}, np.ones((2, 5), np.float32)),
            {"in_axes": (0, -1)},
            "chunked_vmap(add): the looped axes must have one length, got 5 and 4\n\n"
            "    leaf    shape   axis  length\n"
            "    x['a']  (5,)    0     5\n"
            "  > x['b']  (4,)    0     4\n"
            "    y       (2, 5)  -1    5",
        ),
        (
            (FIVE, 1.0),
            {},
            "chunked_vmap(add): y lacks the axis to loop over\n\n"
            "    leaf  shape  axis\n"
            "    x     (5,)   0\n"
            "  > y     ()     0",
        ),
        (
            (FIVE, FIVE),
            {"in_axes": (1, -2)},
            "chunked_vmap(add): x and y lack the axis to loop over\n\n"
            "    leaf  shape  axis\n"
            "  > x     (5,)   1\n"
            "  > y     (5,)   -2",
        ),
        (
            (FIVE, FIVE),
            {"axis_size": 4},
            "chunked_vmap(add): the looped axes must have one length, got 5 and 4\n\n"
            "    leaf       shape  axis  length\n"
            "    x          (5,)   0     5\n"
            "    y          (5,)   0     5\n"
            "  > axis_size  (4,)   0     4",
        ),
        (
            (FIVE, FIVE),
            {"in_axes": None},
            "chunked_vmap(add): nothing is mapped; map at least one array through in_axes, or give "
            "axis_size",
        ),
        (
            (FIVE, FIVE),
            {"in_axes": (0,)},
            "chunked_vmap(add): in_axes has 1 entry for 2 positional arguments",
        ),
        (
            ({"a": FIVE}, FIVE),
            {"in_axes": ({"b": 0}, 0)},
            "chunked_vmap(add): the in_axes of x has an entry for x['b'], which is absent; the "
            "in_axes of x has no entry for x['a'] (None would leave it as it is)",
        ),
        (
            ([FIVE], FIVE),
            {"in_axes": ((0, 0), 0)},
            "chunked_vmap(add): the in_axes of x is a tuple of 2 entries, but x is list",
        ),
    ],
    ids=[
        "lengths",
        "lengths-in-tree",
        "scalar",
        "axis-out-of-range",
        "axis-size",
        "nothing-mapped",
        "entries",
        "keys",
        "container",
    ],
)
def test_bad_arguments_are_refused_before_tracing(chunk_size, args, options, text):
    def untraceable(x, y):
        raise AssertionError("traced")

    untraceable.__name__ = "add"
    with pytest.raises(ValueError) as raised:  # noqa: PT011, the whole text is compared
        chunked_vmap(untraceable, chunk_size, **options)(*args)
    assert str(raised.value) == text


def test_errors_name_arguments_as_the_kernel_does():
    def tagged(first, *rest, **named):
        return first

    short = (
        "chunked_vmap(tagged): the looped axes must have one length, got 5 and 4\n\n"
        "    leaf     shape  axis  length\n"
        "    first    (5,)   0     5\n"
        "    rest[0]  (5,)   0     5\n"
        "  > rest[1]  (4,)   0     4\n"
        "    z        (5,)   0     5"
    )
    with pytest.raises(ValueError, match=re.escape(short)):
        chunked_vmap(tagged, 2)(FIVE, FIVE, FIVE[:4], z=FIVE)
    with pytest.raises(ValueError, match=re.escape("chunked_vmap(tagged): rest[0] lacks the axis")):
        chunked_vmap(functools.partial(tagged, FIVE), 2)(1.0, FIVE)


def test_errors_count_arguments_without_a_signature():
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole text is compared
        chunked_vmap(max, 2)(FIVE, FIVE[:4])
    assert str(caught.value) == (
        "chunked_vmap(max): the looped axes must have one length, got 5 and 4\n\n"
        "    leaf     shape  axis  length\n"
        "    args[0]  (5,)   0     5\n"
        "  > args[1]  (4,)   0     4"
    )
