# SPDX-License-Identifier: MIT
"""What the compiled programs need besides their arguments and results.

Nothing runs: programs are compiled for shapes, and XLA says what it would allocate.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from helpers import operations_on, primitives, slow, temporary_bytes, weekly
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.core.hooks import NO_RULES
from rankax.core.options import Options

pytestmark = pytest.mark.optimized

CHUNK = 1000
EVEN, UNEVEN, LONG = 200_000, 200_003, 400_003
MB = 10**6


def distances(points):
    """Sum of the distances of all pairs: 8 x 8 x 3 intermediate numbers, 768 bytes a step."""
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


def clouds(length):
    return jax.ShapeDtypeStruct((length, 8, 3), jnp.float32)


def clouds_along(axis, length):
    shape = [8, 3]
    shape.insert(axis, length)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def input_bytes(length):
    return length * 8 * 3 * 4


def loss(f):
    return lambda *args: jnp.sum(f(*args))


def push(f):
    return lambda x, t: jax.jvp(f, (x,), (t,))


@pytest.mark.parametrize("length", [slow(EVEN), UNEVEN, slow(LONG)])
def test_forward_is_flat(length):
    f = chunked_vmap(distances, CHUNK)
    assert temporary_bytes(f, clouds(length)) < 2 * MB


@pytest.mark.parametrize("axis", [slow(0), 1])
def test_chunks_of_one_item_are_flat(axis):
    f = chunked_vmap(distances, 1, in_axes=axis)
    x = clouds_along(axis, 20_000)  # 1.9 MB, and 15 MB of intermediate numbers
    assert temporary_bytes(f, x) < 0.01 * MB
    assert temporary_bytes(jax.grad(loss(f)), x) < 0.2 * MB  # the starts of the chunks, and outputs


@pytest.mark.parametrize("core", [(16, 1), slow((1, 16)), (4, 1, 5), slow((1,))])
def test_an_axis_of_length_1_costs_nothing(core):
    # XLA copied the whole stack of such items into another layout: 13 MB here, for (16, 1).
    x = jax.ShapeDtypeStruct((EVEN, *core), jnp.float32)
    f = chunked_vmap(lambda item: (jnp.sin(item).sum(), jnp.sin(item) * 2), CHUNK)
    for program in (f, jax.grad(lambda x: sum(map(jnp.sum, f(x))))):
        assert temporary_bytes(program, x) < 0.1 * MB


@pytest.mark.parametrize("length", [EVEN, slow(2 * EVEN)])
def test_derivatives_are_flat_where_the_chunk_divides(length):
    f = chunked_vmap(distances, CHUNK)
    x = clouds(length)
    assert temporary_bytes(jax.grad(loss(f)), x) < 2 * MB
    assert temporary_bytes(push(f), x, x) < 4 * MB


def output_bytes(length):
    return length * 4


@pytest.mark.parametrize("length", [UNEVEN, slow(LONG)])
def test_derivatives_copy_no_input_where_it_does_not(length):
    f = chunked_vmap(distances, CHUNK)
    x = clouds(length)
    assert temporary_bytes(jax.grad(loss(f)), x) < 2 * MB + output_bytes(length)
    assert temporary_bytes(push(f), x, x) < 4 * MB + 2 * output_bytes(length)


@pytest.mark.parametrize("length", [slow(EVEN), UNEVEN])
@pytest.mark.parametrize("axis", [1, 2])
def test_derivatives_copy_no_input_along_any_axis(length, axis):
    f = chunked_vmap(distances, CHUNK, in_axes=axis)
    x = clouds_along(axis, length)
    assert temporary_bytes(jax.grad(loss(f)), x) < 2 * MB + output_bytes(length)
    assert temporary_bytes(push(f), x, x) < 4 * MB + 2 * output_bytes(length)


@pytest.mark.parametrize("length", [UNEVEN, slow(LONG)])
def test_derivatives_copy_the_outputs_once_where_it_does_not(length):
    f = chunked_vmap(lambda p: jnp.sin(p) * distances(p), CHUNK)
    x = clouds(length)
    one = input_bytes(length)  # the outputs are as large as the inputs

    def pull(x, cotangent):
        return jax.vjp(f, x)[1](cotangent)

    assert one < temporary_bytes(pull, x, x) < 2 * MB + one
    assert one < temporary_bytes(push(f), x, x) < 4 * MB + 2 * one


def without_names(fun, *args):
    """Return the compiled program, without what says where in the source it comes from."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    return re.sub(r", metadata=\{[^}]*\}", "", text[text.index("\n\n%") :])


@pytest.mark.parametrize("make", [lambda f: lambda x, t: f(x), push], ids=["forward", "jvp"])
def test_even_chunks_compile_to_the_program_of_lax_map(make):
    """So a difference between their times is the machine's; where a chunk is not cut into tiles."""
    x = clouds(EVEN)
    by_hand = make(lambda x: jax.lax.map(waves, x, batch_size=100))
    assert without_names(make(chunked_vmap(waves, 100)), x, x) == without_names(by_hand, x, x)


def waves(points):
    return jnp.exp(points) * jnp.prod(points, axis=-1, keepdims=True)


def test_without_checkpoint_the_gradient_grows():
    """The figures above are not small because XLA would need little anyway."""
    stored = chunked_vmap(distances, CHUNK, checkpoint=False)
    assert temporary_bytes(jax.grad(loss(stored)), clouds(EVEN)) > 100 * MB


def test_intermediates_that_no_compiler_fuses_away():
    def factors(p):
        return jnp.sum(jnp.linalg.cholesky(p @ p.T + 0.1 * jnp.eye(8)))

    x = clouds(EVEN)
    assert temporary_bytes(jax.vmap(factors), x) > EVEN * 8 * 8 * 4
    assert temporary_bytes(chunked_vmap(factors, CHUNK), x) < 2 * MB
    assert temporary_bytes(jax.grad(loss(chunked_vmap(factors, CHUNK))), x) < 4 * MB


@pytest.mark.parametrize("length", [slow(EVEN), UNEVEN])
def test_gradient_of_closed_over_values_copies_no_input(length):
    def f(w, x):
        return jnp.sum(chunked_vmap(lambda p: distances(p * w), CHUNK)(x))

    w = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    assert temporary_bytes(jax.grad(f), w, clouds(length)) < 2 * MB


@pytest.mark.parametrize("length", [slow(EVEN), UNEVEN])
def test_inputs_that_nobody_differentiates_are_not_copied(length):
    def f(scale, x, kind):
        def one(s, p, k):
            return distances(p) * s * k.astype(s.dtype)

        return jnp.sum(chunked_vmap(one, CHUNK)(scale, x, kind))

    scale = jax.ShapeDtypeStruct((length,), jnp.float32)
    kind = jax.ShapeDtypeStruct((length,), jnp.int32)
    # The outputs are 0.8 MB; a copy of `x` would be 19 MB.
    bound = 2 * MB + output_bytes(length)
    assert temporary_bytes(jax.grad(f), scale, clouds(length), kind) < bound


@pytest.mark.parametrize("length", [slow(EVEN), UNEVEN])
@pytest.mark.parametrize("axis", [1, 2])
def test_forward_is_flat_along_any_axis(length, axis):
    f = chunked_vmap(lambda p: (distances(p), p * 2), CHUNK, in_axes=axis, out_axes=(0, axis))
    assert temporary_bytes(f, clouds_along(axis, length)) < 2 * MB


LAPACK = {
    "eigenvalues": lambda matrix: jnp.sum(jnp.linalg.eigh(matrix)[0] ** 3),
    "Cholesky": lambda matrix: jnp.sum(jnp.linalg.cholesky(matrix)),
    "solution": lambda matrix: jnp.sum(jnp.linalg.solve(matrix, matrix[0])),
}


@pytest.mark.parametrize("kernel", LAPACK)
@pytest.mark.parametrize(("axis", "length"), [(0, 20_011), weekly(1, 20_000), weekly(2, 20_011)])
def test_kernels_that_want_another_layout_copy_no_input(axis, length, kernel):
    """LAPACK is given columns; XLA must not turn the whole input around before the loop."""
    shape = [8, 8]
    shape.insert(axis, length)
    x = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    f = chunked_vmap(LAPACK[kernel], 100, in_axes=axis)
    assert temporary_bytes(f, x) < MB < length * 8 * 8 * 4
    assert temporary_bytes(jax.grad(loss(f)), x) < MB + output_bytes(length)


# A prime, so that chunks are read by index, and a length that nothing else has.
PART = 4_003
ORDERS = {
    "gradient": lambda f: jax.grad(loss(f)),
    "jvp of gradient": lambda f: lambda x: jax.jvp(jax.grad(loss(f)), (x,), (x,)),
    "gradient of gradient": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(loss(f))(x)))),
}


def flat(shape, axis):
    """Return the shape that an array has in the loop."""
    return (*shape[:axis], math.prod(shape[axis:]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("axis", "checkpoint"), [(0, True), weekly(1, False), weekly(2, True)])
def test_cotangents_are_added_in_place(axis, checkpoint, order):
    """A sum or a copy of the whole in the loop would cost time that grows as the square."""
    f = chunked_vmap(distances, 100, in_axes=axis, checkpoint=checkpoint)
    x = clouds_along(axis, PART)
    found = operations_on(flat(x.shape, axis), ORDERS[order](f), x)
    assert not {"add", "copy", "convert", "select"} & set(found)
    assert found["dynamic-update-slice"] >= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_cotangents_of_any_dtype_are_added_in_place(dtype):
    f = chunked_vmap(lambda p: jnp.sum(jnp.sin(p) * p[::-1]).real, 100)
    x = jax.ShapeDtypeStruct((PART, 8, 3), dtype)
    found = operations_on(flat(x.shape, 0), jax.grad(loss(f)), x)
    assert not {"add", "copy"} & set(found)
    assert found["dynamic-update-slice"] == 1
    # XLA:CPU adds bfloat16 as float32: converted before the loop, and back after it.
    assert found["convert"] <= (2 if dtype == "bfloat16" else 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_narrow_floats_are_widened_where_chunks_are_no_stack(dtype):
    """The line of docs/limits.md: "Narrow floats"."""

    def widened(shape, axis):
        f = chunked_vmap(jnp.sin, 10, in_axes=axis)
        x = jax.ShapeDtypeStruct(shape, dtype)
        return primitives(lambda x: jax.jvp(f, (x,), (x,)), x)["convert_element_type"] > 0

    assert not widened((50, 3), 0)
    assert widened((53, 3), 0) == widened((3, 50), 1) == (dtype != "float16")


def test_cotangents_of_many_batches_are_added_in_place():
    f = chunked_vmap(distances, 100)
    batches = jax.ShapeDtypeStruct((5, PART, 8, 3), jnp.float32)
    for program in (jax.vmap(jax.grad(loss(f))), jax.grad(loss(jax.vmap(f)))):
        found = operations_on(flat(batches.shape, 1), program, batches)
        assert not {"add", "copy"} & set(found)
        assert found["dynamic-update-slice"] == 1


@pytest.mark.parametrize("length", [slow(EVEN), UNEVEN])
def test_forward_over_reverse_is_as_small(length):
    f = chunked_vmap(distances, CHUNK)

    def hessian_times_vector(x, v):
        return jax.jvp(jax.grad(loss(f)), (x,), (v,))[1]

    x = clouds(length)
    assert temporary_bytes(hessian_times_vector, x, x) < 4 * MB + 2 * output_bytes(length)


def test_inside_scan_the_bound_holds():
    f = chunked_vmap(distances, CHUNK)

    def steps(x):
        def step(total, scale):
            return total + jnp.sum(f(x) * scale), None

        return jax.lax.scan(step, jnp.zeros(()), jnp.arange(3.0))[0]

    assert temporary_bytes(steps, clouds(UNEVEN)) < 2 * MB + UNEVEN * 4


# What uneven maps and reductions need today, beside arguments and results. A change that needs less
# lowers these figures; one that needs more is seen.


def turned(p):
    return jnp.sin(p) * distances(p)


def pull(f):
    return lambda args, cotangents: jax.vjp(f, *args)[1](cotangents)


DERIVATIVES = {
    "forward": lambda f: lambda args, _: f(*args),
    "vjp": pull,
    "jvp": lambda f: lambda args, _: jax.jvp(f, args, args),
    "jvp of vjp": lambda f: lambda *args: jax.jvp(pull(f), args, args),
    "vjp of vjp": lambda f: lambda *args: jax.vjp(pull(f), *args)[1](args[0]),
}
PRIME = 20_011
CLOUDS = (clouds(PRIME),)  # 1.92 MB
WEIGHTS = jax.ShapeDtypeStruct((8, 3), jnp.float32)
GRID = (
    jax.ShapeDtypeStruct((101, 1, 8, 3), jnp.float32),
    jax.ShapeDtypeStruct((203,), jnp.float32),  # outputs of 1.97 MB
)
# The function, its arguments, and for each derivative the temporaries in kB, in tiles.
UNEVEN_CALLS = {
    "numbers": (chunked_vmap(distances, CHUNK), CLOUDS, (0, 90, 160, 100, 175)),
    "arrays": (chunked_vmap(turned, CHUNK), CLOUDS, (0, 1936, 3843, 1942, 3863)),
    "arrays along axis 1": (
        chunked_vmap(turned, CHUNK, 1, 1),
        (clouds_along(1, PRIME),),
        (0, 3843, 3843, 3843, 5764),
    ),
    "shared weights": (
        chunked_vmap(lambda p, w: turned(p * w), CHUNK, (0, None)),
        (*CLOUDS, WEIGHTS),
        (0, 1936, 3843, 1950, 3866),
    ),
    "uneven in uneven": (
        chunked_vmap(chunked_vmap(turned, 30), 10),
        (jax.ShapeDtypeStruct((101, 203, 8, 3), jnp.float32),),
        (176, 2144, 4093, 2261, 4171),
    ),
    "two axes": (
        auto_vmap(2, 0, chunk_size=30)(lambda p, s: s * turned(p)),
        GRID,
        (59, 2110, 3977, 2174, 4102),
    ),
    "a sum": (chunked_reduce(turned, "sum", CHUNK), CLOUDS, (0, 1940, 6, 1955, 1966)),
    "outputs kept beside a sum of rows": (
        auto_vmap(2, 0, chunk_size=30, reduce=("sum", None), reduce_axis=1)(
            lambda p, s: (s * distances(p), s * turned(p))
        ),
        GRID,
        (39, 49, 77, 52, 2039),
    ),
    "outputs kept beside a sum": (
        chunked_reduce(lambda p: (distances(p), turned(p)), ("sum", None), CHUNK),
        CLOUDS,
        (3842, 3869, 3844, 3875, 3938),
    ),
}

# Without tiles, a whole chunk of 1000 items counts: 1 kB an item, and as much for each derivative.
WHOLE_CHUNKS = {
    "numbers": (96, 267, 1228, 3530, 3668),
    "arrays": (275, 2379, 4300, 6104, 7076),
    "arrays along axis 1": (183, 3843, 4392, 6988, 6801),
    "shared weights": (183, 2379, 4484, 6100, 8181),
    "uneven in uneven": (585, 2924, 5086, 4557, 6292),
    "a sum": (275, 410, 1434, 3948, 5968),
    "outputs kept beside a sum": (99, 2339, 4038, 6852, 7154),
}


OTHER_CALLS = [name for name in UNEVEN_CALLS if name != "outputs kept beside a sum"]


def has_tiles():
    return Options().rules is not NO_RULES


@pytest.mark.parametrize("name", ["outputs kept beside a sum", *map(weekly, OTHER_CALLS)])
def test_uneven_calls_need_no_more_than_they_did(name):
    f, args, most = UNEVEN_CALLS[name]
    most = most if has_tiles() else WHOLE_CHUNKS.get(name, most)
    cotangents = jax.eval_shape(f, *args)
    needed = {
        derivative: temporary_bytes(make(f), args, cotangents) / 1000
        for derivative, make in DERIVATIVES.items()
    }
    bounds = {name: 1.05 * kB + 10 for name, kB in zip(DERIVATIVES, most, strict=True)}
    assert {name: kB for name, kB in needed.items() if kB > bounds[name]} == {}


def test_reverse_over_reverse_stores_no_more_than_it_did():
    """The first pass stores all intermediates, as `jax.checkpoint` does there: 1.2 kB an item."""
    f = chunked_vmap(distances, CHUNK)
    both = jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x))))
    assert temporary_bytes(both, *CLOUDS) < (1300 if has_tiles() else 1420) * PRIME
