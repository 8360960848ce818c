# SPDX-License-Identifier: MIT
import functools
import inspect
import math
from collections import Counter

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
    refusal,
    slow,
    weekly,
)
from rankax import chunked_hessian, chunked_jacfwd, chunked_jacrev, chunked_reduce, chunked_vmap
from scan_cases import assert_same_weak_types
from situations.plain import item_by_item

# 12 items are even in chunks of 4, 13 are not; 1 + 12 divides nothing that is near 4 or 5.
EVEN, UNEVEN = 12, 13
LENGTHS = pytest.mark.parametrize("length", [EVEN, UNEVEN])


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


def in_chunks_of(size):
    """Return `chunked_vmap` for this size, to be called as `jax.vmap` is."""
    return lambda fun, in_axes=0, out_axes=0: chunked_vmap(fun, size, in_axes, out_axes)


CHUNKED = in_chunks_of(4)


# Values.


@LENGTHS
def test_equals_a_python_loop(length):
    x, k = items(length)
    assert_same(chunked_vmap(kernel, 4)(x, k), item_by_item(kernel, [1, 0], x, k))


# Nothing to cut, a prime, and what many numbers divide.
@pytest.mark.parametrize("length", [1, 7, slow(12), weekly(31)])
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
        function = value_and_gradients(in_chunks_of(chunk_size))
        traced = function.trace(*args)
        assert not traced.jaxpr.consts  # so that the text says all
        programs.setdefault(str(traced.jaxpr), (chunk_size, function))
    # At least each divisor cuts the axis in its own way.
    assert len(programs) >= sum(length % divisor == 0 for divisor in range(1, length + 1))
    want = value_and_gradients(jax.vmap)(*args)
    results = jax.jit(lambda *args: {size: f(*args) for size, f in programs.values()})(*args)
    assert_same(results, dict.fromkeys(results, want))


@pytest.mark.parametrize(
    ("leaves", "axes", "chunk_size", "out_axis"),
    [
        ({"float16": (2, 9, 3), "bool": (1, 9)}, [1, -1], 2, 0),
        ({"uint8": (5, 3), "float32": (2, 2)}, [-2, None], 3, 1),
        ({"bool": (7, 1, 1), "uint8": (2, 7), "int32": (3, 2)}, [-3, 1, None], 1, 0),
        ({"float32": (2, 0), "int32": (0,)}, [1, 0], 1, -1),
    ],
)
def test_equals_vmap_on_trees(leaves, axes, chunk_size, out_axis):
    arrays = [
        jnp.asarray((np.arange(math.prod(shape)).reshape(shape) * 7 % 5).astype(dtype))
        for dtype, shape in leaves.items()
    ]

    def one(tree):
        total = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in tree["in"])
        return {"same": tree["in"], "order": total * jnp.arange(1.0, 3.0), "static": None}

    in_axes = [{"in": axes}]  # JAX takes a list for a tuple, too
    out_axes = {"same": axes, "order": out_axis, "static": 0}
    want = jax.jit(jax.vmap(one, in_axes, out_axes))({"in": arrays})
    chunked = jax.jit(chunked_vmap(one, chunk_size, in_axes, out_axes))
    assert_same(chunked({"in": arrays}), want)


# Axes.


def test_keyword_arguments_are_mapped_over_axis_0():
    x, k = items(UNEVEN)
    want = jax.jit(jax.vmap(kernel))(x, k)
    assert_same(chunked_vmap(kernel, 4, in_axes=1)(x.T, k=k), want)
    assert_same(chunked_vmap(kernel, 4, in_axes=())(k=k, x=x), want)


@pytest.mark.parametrize("axis_size", [EVEN, np.int64(UNEVEN), 0])
def test_axis_size_alone_gives_the_length(axis_size):
    rows = chunked_vmap(lambda: jnp.arange(2), 4, axis_size=axis_size)()
    assert_same(rows, jnp.tile(jnp.arange(2), (int(axis_size), 1)))
    # What is not mapped may be any object.
    got = chunked_vmap(lambda x, by: x * len(by), 4, None, axis_size=axis_size)(2.0, "abc")
    assert_same(got, jnp.full(int(axis_size), 6.0))
    # It may repeat what the arguments say.
    assert_same(chunked_vmap(lambda row: row, 4, axis_size=axis_size)(rows), rows)


# Leaves of every kind.


keys_in_branches = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="JAX 0.10.0 refuses keys from a branch in a gradient: see docs/limits.md",
)


@pytest.mark.parametrize(
    ("length", "chunk_size"),
    [pytest.param(UNEVEN, 4, marks=keys_in_branches), slow(5, 1), (0, 4), weekly(EVEN, 4)],
)
def test_leaves_of_every_kind(length, chunk_size):
    numbers = np.arange(length)
    tree = {
        "bool": numbers % 3 == 0,
        "int8": numbers.astype(np.int8),
        "complex": jnp.asarray(numbers * (1 - 1j), jnp.complex64),
        "key": jax.random.split(jax.random.key(3), length),
    }

    def one(x, empty, item):
        use, keep = jax.random.split(item["key"])
        drawn = jax.random.normal(use, (2,)) * x
        return item | {"empty": empty, "drawn": drawn, "keep": keep, "not": ~item["bool"]}

    def loss(mapped, *args):
        outs = mapped(*args, tree)
        return weigh(outs), outs

    args = jnp.arange(float(length)), jnp.zeros((length, 0, 2))
    both = jax.jit(jax.grad(loss, (1, 2), has_aux=True), static_argnums=0)
    want = both(jax.vmap(one), *args)
    assert_same(both(chunked_vmap(one, chunk_size), *args), want, rtol=1e-4)
    assert_same(chunked_vmap(one, chunk_size)(*args, tree), want[1])


@LENGTHS
def test_weak_types_promote_inside_the_kernel_as_under_vmap(length):
    weak, half = lax.full((length,), 2.0), jnp.ones(3, jnp.float16)
    assert weak.weak_type

    def one(weak):
        return weak * half  # float16 with a weak float, an error with a strong float32

    assert_same(chunked_vmap(one, 4)(weak), jax.vmap(one)(weak))


@pytest.mark.parametrize("chunk_size", [weekly(1), slow(2), 3, slow(7), slow(None)])
@pytest.mark.parametrize(
    "x",
    [jnp.arange(7), jnp.arange(7.0), *(lax.full((7,), number) for number in (2, 2.0, 2j))],
    ids=lambda x: str(jax.typeof(x)),
)
@jax.numpy_dtype_promotion("standard")
def test_results_and_derivatives_are_weak_as_under_vmap(x, chunk_size):
    def many(x):
        count, _ = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))
        return 2.0, 3, 2j, True, x, x * 2, x * 2.0, x * 2j, x[None] * 2, x * jnp.ones(2), count

    def forward(mapped):
        return mapped(x)

    def pushed(mapped):
        return jax.jvp(mapped, (x,), (x,))

    def pulled(mapped):
        floats = jax.eval_shape(mapped, x)
        at = [i for i, out in enumerate(floats) if jnp.issubdtype(out.dtype, jnp.inexact)]
        outs, transpose = jax.vjp(lambda x: [mapped(x)[i] for i in at], x)
        return transpose(outs)

    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    for derivative in (forward, pushed, pulled) if is_float else (forward,):
        got, want = derivative(chunked_vmap(many, chunk_size)), derivative(jax.vmap(many))
        assert_same(got, want)
        assert_same_weak_types(got, want)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, slow(None)])
@pytest.mark.parametrize("shared", [2.0, lax.full((3,), 2.0), jnp.ones(3)], ids=str)
def test_cotangents_of_shared_arguments_are_weak_as_under_vmap(shared, chunk_size):
    x = jnp.arange(7.0)

    def gradients(map_of):
        mapped = map_of(jnp.multiply, in_axes=(0, None))
        return jax.grad(lambda x, shared: mapped(x, shared).sum(), (0, 1))(x, shared)

    got, want = gradients(in_chunks_of(chunk_size)), gradients(jax.vmap)
    assert_same(got, want)
    assert_same_weak_types(got, want)


# Programs.


TRANSFORMS = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(lambda x, k: weigh(f(x, k))),
    "hessian": lambda f: jax.hessian(lambda x, k: weigh(f(x, k))),
    "vmap": lambda f: lambda x, k: jax.vmap(f)(x[None], k[None]),
}


@LENGTHS
@pytest.mark.parametrize("name", TRANSFORMS)
def test_kernel_is_traced_once(name, length):
    traces = []

    def counted(x, k):
        traces.append(x.shape)
        return kernel(x, k)

    f, args = TRANSFORMS[name](chunked_vmap(counted, 4)), items(length)
    if name == "call":
        f(*args)
    else:
        jax.eval_shape(f, *args)
    assert traces == [(3,)]


@pytest.mark.parametrize("chunk_size", [None, UNEVEN, 10**9])
def test_one_chunk_is_exactly_the_program_of_vmap(chunk_size):
    x, k = items(UNEVEN)
    options = {"in_axes": (1, 0), "out_axes": (1, 0)}
    want = jax.make_jaxpr(jax.vmap(kernel, **options))(x.T, k)
    assert str(jax.make_jaxpr(chunked_vmap(kernel, chunk_size, **options))(x.T, k)) == str(want)


# A smaller chunk that divides is preferred: 4 of 5 items, not 6 + 6 + 6 + 2.
@pytest.mark.parametrize(
    ("length", "chunk_size", "steps", "at_once"),
    [(EVEN, 4, 3, 4), (UNEVEN, 4, 4, 4), (20, 6, 4, 5)],
)
def test_otherwise_one_loop_holds_the_chunk(length, chunk_size, steps, at_once):
    f, args = chunked_vmap(kernel, chunk_size), items(length)
    (loop,) = (e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name == "scan")
    assert loop.params["length"] == steps
    (wave,) = (e for e in equations(loop.params["jaxpr"].jaxpr) if e.primitive.name == "tanh")
    assert wave.outvars[0].aval.shape == (at_once, 3)
    by_index = {"dynamic_slice", "dynamic_update_slice"} & set(primitives(f, *args))
    assert bool(by_index) == (length == UNEVEN)


def test_what_is_read_by_index_is_flat_before_the_loop():
    """Only reads touch the whole: a reshape there, and the loop would not be transposed well."""
    whole = {UNEVEN, UNEVEN * 3}

    def whole_operands(f, *args):
        (loop,) = (e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.params.get("length"))
        return Counter(
            equation.primitive.name
            for equation in equations(loop.params["jaxpr"].jaxpr)
            if any(whole & {*getattr(v.aval, "shape", ())} for v in equation.invars)
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


@pytest.mark.parametrize(
    ("length", "checkpoint", "copies"), [(UNEVEN, True, 2), (EVEN, True, 1), (EVEN, False, 1)]
)
def test_checkpoint_recomputes_in_the_reverse_pass(length, checkpoint, copies):
    def one(row):
        return jnp.exp(jnp.cumsum(row))

    x, _ = items(length)
    mapped = chunked_vmap(one, 4, checkpoint=checkpoint)
    names = primitives(jax.grad(lambda x: weigh(mapped(x))), x)
    # Once forward, and once more in the reverse pass where nothing was stored; a short last chunk
    # is a copy of the program.
    assert names["exp"] == (2 if checkpoint else 1) * copies
    assert any(map(is_checkpoint, names)) == checkpoint


def test_metadata_of_the_kernel():
    f = chunked_vmap(kernel, 4)
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("kernel", kernel.__doc__, kernel)


# Composed with transformations. `w` is closed over everywhere, and differentiated too.


def smooth(x, w):
    return jnp.tanh(x @ w) * x[0] + jnp.sum(w**2) * x[1]


def both(make, length=UNEVEN):
    """Evaluate ``make(transform)`` with the chunked transform and with `jax.vmap`."""
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.normal(size=(length, 2)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(2,)), jnp.float32)
    got, want = jax.jit(lambda x, w: [make(t)(x, w) for t in (CHUNKED, jax.vmap)])(x, w)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


def total(transform):
    return lambda x, w: weigh(transform(lambda row: smooth(row, w))(x))


def rows(transform):
    return lambda x, w: transform(lambda row: smooth(row, w))(x)


def pushed(f):
    return lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))


def pulled(f):
    def pull(x, w):
        out, back = jax.vjp(f, x, w)
        return out, back(jnp.cos(out))

    return pull


jacfwd, jacrev, hessian = (
    functools.partial(derivative, argnums=(0, 1))
    for derivative in (jax.jacfwd, jax.jacrev, jax.hessian)
)


@pytest.mark.parametrize("derivative", [pushed, jacfwd], ids=["jvp", "jacfwd"])
def test_first_derivatives_of_even_chunks(derivative):
    both(lambda transform: derivative(rows(transform)), EVEN)


def in_scan(transform):
    @jax.checkpoint
    def step(x, w):
        y = rows(transform)(x, w)
        return jnp.tanh(x + y[:, None]), y

    return pulled(lambda x, w: lax.scan(step, x, jnp.stack([w, w * 2, w + 1]))[1])


def in_while_loop_and_cond(transform):
    f = rows(transform)

    def grown(x, w):
        x = lax.while_loop(lambda s: jnp.sum(s**2) < 50, lambda s: s * 2 + f(s, w)[:, None], x)
        return lax.cond(jnp.sum(x) > 0, f, lambda x, w: x[:, 0], x, w)

    return grown


def in_itself(transform):
    def block(row, w):
        return transform(lambda s: jnp.sin(s * w[0] * row) + s**2)(jnp.arange(7.0))

    return pulled(lambda x, w: transform(lambda row: block(row, w))(x))


def over_batches(transform):
    f, along_axis = pulled(rows(transform)), jax.vmap(rows(transform), (1, None), 1)

    def over(x, w):
        several, weights = jnp.stack([x, x + 1, x * 2]), jnp.stack([w, w * 3, w - 1])
        over_closed = jax.vmap(f, in_axes=(None, 0))(x, weights)
        return jax.vmap(f)(several, weights), over_closed, along_axis(several.swapaxes(0, 1), w)

    return over


def twice_through_checkpoint(transform):
    gradient = jax.grad(jax.checkpoint(total(transform)))
    return lambda x, w: (jacrev(gradient)(x, w), jacfwd(gradient)(x, w))


def along_other_axes(transform):
    def one(item, w):
        return jnp.outer(jnp.sin(item["x"] * w), item["y"]), item["x"]

    mapped = transform(one, ({"x": -1, "y": 1}, None), (1, -1))
    return lambda x, w: pulled(lambda x, w: mapped({"x": x.T, "y": jnp.cos(x).T}, w)[0])(x, w)


COMPOSED = {
    "other axes": along_other_axes,
    "vjp of jvp": lambda transform: pulled(lambda *args: pushed(rows(transform))(*args)[1]),
    "scan": in_scan,
    "while_loop and cond": in_while_loop_and_cond,
    "itself": in_itself,
    "vmap": over_batches,
    "checkpoint": twice_through_checkpoint,
}


@pytest.mark.parametrize("make", at_each_run(COMPOSED.keys() - {"checkpoint"}, COMPOSED))
def test_composed_with_transformations(make):
    both(make)


HIGHER = {
    "hessian": hessian,  # forward over reverse
    "rev-rev": lambda f: jacrev(jacrev(f)),
    "fwd-fwd": lambda f: jacfwd(jacfwd(f)),
    "third": lambda f: jax.grad(lambda x, w: weigh(jax.hessian(f)(x, w))),
}


@pytest.mark.parametrize("derivative", at_each_run(["hessian"], HIGHER))
def test_higher_derivatives(derivative):
    both(lambda transform: derivative(total(transform)))


AROUND = {
    "chunks": lambda f: chunked_vmap(f, 2),
    "scan": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), None, x)[1],
    "carry": lambda f: lambda x: lax.scan(lambda c, row: (weigh(f(row * c)), c), 1.0, x),
    "checkpoint": lambda f: lambda x: lax.map(jax.checkpoint(f), x),
}


@pytest.mark.parametrize(
    ("derivative", "around"),
    [
        slow("hessian", "chunks"),
        *(weekly("hessian", loop) for loop in ("scan", "carry", "checkpoint")),
        *(weekly(derivative, loop) for derivative in ("rev-rev", "third") for loop in AROUND),
    ],
)
def test_higher_derivatives_inside_another_loop(derivative, around):
    """A scan that JAX has linearised forgets the rules inside: what is left must be right."""

    def make(transform):
        def loss(x, w):
            def of_item(item):
                return jnp.sin(item * w) * w[::-1], jnp.cos(item * w)

            row = transform(of_item, out_axes=(0, 1))
            return weigh(AROUND[around](row)(jnp.ravel(x)[:15].reshape(3, 5)))

        return HIGHER[derivative](loss)

    both(make)


@jax.jit
def of_outputs(out):
    return jnp.sum(out["first"] * out["second"] * out["both"] + out["second"] ** 2)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_outputs_that_move_in_the_second_derivative_only(wrap):
    def one(x, y):
        return {"first": jnp.sin(x), "second": jnp.cos(y), "both": x * y**2, "neither": 3}

    def second(transform):
        gradient = jax.grad(lambda x, y: of_outputs(transform(one)(x, y)))
        return jax.grad(lambda y: jnp.sum(gradient(x, y) ** 2))

    x, y = (jnp.asarray(np.linspace(a, a + 1, 7)) for a in (0.1, 1.0))
    want = jax.jit(second(jax.vmap))(y)
    assert_same(wrap(second(in_chunks_of(3)))(y), want, rtol=1e-4)


def test_tangents_that_are_python_numbers():
    x = jnp.linspace(0.1, 1.0, UNEVEN)
    mapped = lambda w: chunked_vmap(lambda s: jnp.sin(s * w), 4)(x)  # noqa: E731
    want = jnp.sin(x * 2), jnp.cos(x * 2) * x / 2
    assert_same(jax.jvp(mapped, (2.0,), (0.5,)), want)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x, w: jnp.sin(x) * w * x[::-1],
        lambda x, w: jnp.array([x[1] * w[0] - x[0] * w[1], x[0] * x[1], w[0] * x[0] ** 2]),
    ],
    ids=["turned", "mixed"],
)
def test_values_are_told_from_tangents_that_are_mapped(kernel):
    """XLA:CPU of JAX 0.10 fails where it takes the reading of one for that of the other."""

    def jacobians(transform):
        def along(axis):
            def mapped(x, w):
                return transform(kernel, in_axes=axis)(x.swapaxes(0, axis), w.swapaxes(0, axis))

            return jax.jacfwd(mapped)

        return jax.jit(lambda x: [along(axis)(x, jnp.cos(x)) for axis in (0, 1)])(x)

    x = jnp.linspace(0.1, 1.0, 2 * UNEVEN).reshape(UNEVEN, 2)
    assert_same(jacobians(CHUNKED), jacobians(jax.vmap), rtol=1e-4)


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

    args = x, other, np.float32(1.5)
    assert_same(gradients(CHUNKED, *args), gradients(jax.vmap, *args), rtol=1e-4, atol=1e-5)


# Errors.


FIVE = np.ones(5, np.float32)
HOLD = "axes must hold ints and None, got"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("chunk_size must be a positive int, got 0", {"chunk_size": 0}),
        ("chunk_size must be a positive int, got float 2.5", {"chunk_size": 2.5}),
        (
            "chunk_size must be a positive int, got '3'; memory_limit='2 GB' picks a size that "
            "fits the memory, and kernel.tune(...) the fastest one",
            {"chunk_size": "3"},
        ),
        ("axis_size must be a positive int, got -1", {"axis_size": -1}),
        ("axis_size must be a positive int, got False", {"axis_size": False}),
        (f"in_{HOLD} float 0.5 at in_axes[1]['b']", {"in_axes": (0, {"b": 0.5})}),
        (f"in_{HOLD} bool True at in_axes", {"in_axes": True}),
        (f"out_{HOLD} str '0' at out_axes", {"out_axes": "0"}),
        ("checkpoint must be True or False, got 'no'", {"checkpoint": "no"}),
    ],
)
def test_bad_options_are_refused_when_the_function_is_made(text, options):
    error = ValueError if text.endswith(("got 0", "got -1")) else TypeError
    options = {"chunk_size": 3} | options
    assert (
        refusal(error, lambda: chunked_vmap(kernel, **options)) == f"chunked_vmap(kernel): {text}"
    )


def test_a_function_that_cannot_be_called_is_refused():
    assert refusal(TypeError, chunked_vmap, 3, 3) == "chunked_vmap: fun must be callable, got int"


MISFITS = {
    "lengths": (
        ({"a": FIVE, "b": FIVE[:4]}, np.ones((2, 5), np.float32)),
        {"in_axes": (0, -1)},
        "the looped axes must have one length, got 5 and 4\n\n"
        "    leaf    shape   axis  length\n"
        "    x['a']  (5,)    0     5\n"
        "  > x['b']  (4,)    0     4\n"
        "    y       (2, 5)  -1    5",
    ),
    "axis-out-of-range": (
        (FIVE, FIVE),
        {"in_axes": (1, -2)},
        "x and y lack the axis to loop over\n\n"
        "    leaf  shape  axis\n"
        "  > x     (5,)   1\n"
        "  > y     (5,)   -2",
    ),
    "axis-size": (
        (FIVE, None),
        {"axis_size": 4},
        "the looped axes must have one length, got 5 and 4\n\n"
        "    leaf       shape  axis  length\n"
        "    x          (5,)   0     5\n"
        "  > axis_size  (4,)   0     4",
    ),
    "too few axes": (
        (FIVE, FIVE),
        {"in_axes": (0,)},
        "in_axes has 1 entry for 2 positional arguments",
    ),
    "nothing-mapped": (
        (FIVE, FIVE),
        {"in_axes": None},
        "nothing is mapped; map at least one array through in_axes, or give axis_size",
    ),
    "container": (
        ([FIVE], FIVE),
        {"in_axes": ((0, 0), 0)},
        "the in_axes of x is a tuple of 2 entries, but x is list",
    ),
}


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(("args", "options", "text"), MISFITS.values(), ids=MISFITS)
def test_bad_arguments_are_refused_before_tracing(chunk_size, args, options, text):
    def untraceable(x, y):
        raise AssertionError("traced")

    mapped = chunked_vmap(untraceable, chunk_size, **options)
    assert refusal(ValueError, mapped, *args) == f"chunked_vmap(untraceable): {text}"


def test_errors_name_arguments_as_the_kernel_does():
    def tagged(first, *rest, **named):
        return first

    text = refusal(ValueError, chunked_vmap(tagged, 2), FIVE, FIVE, FIVE[:4], z=FIVE)
    assert text == (
        "chunked_vmap(tagged): the looped axes must have one length, got 5 and 4\n\n"
        "    leaf     shape  axis  length\n"
        "    first    (5,)   0     5\n"
        "    rest[0]  (5,)   0     5\n"
        "  > rest[1]  (4,)   0     4\n"
        "    z        (5,)   0     5"
    )
    given = functools.partial(tagged, FIVE)
    text = refusal(ValueError, chunked_vmap(given, 2), 1.0, FIVE)
    assert text.startswith("chunked_vmap(tagged): rest[0] lacks the axis")
    without_signature = refusal(ValueError, chunked_vmap(max, 2), FIVE, FIVE[:4])
    assert "\n  > args[1]  (4,)   0     4" in without_signature


def test_jit_is_refused_with_what_to_write():
    for function in (chunked_vmap, chunked_reduce, chunked_jacfwd, chunked_jacrev, chunked_hessian):
        with pytest.raises(TypeError) as refused:
            function(jnp.sum, jit=True)
        name = function.__name__
        assert str(refused.value) == f"{name}: there is no option jit; write jax.jit({name}(...))"
        assert "jit" not in inspect.signature(function).parameters
