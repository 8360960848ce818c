# SPDX-License-Identifier: MIT
"""What the compiled programs need besides their arguments and results.

Nothing runs: programs are compiled for shapes, and XLA says what it would allocate.
"""

import math

import jax
import jax.numpy as jnp
import pytest

from helpers import REMAT3, operations_on, slow, temporary_bytes, weekly
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax._options import Options
from rankax.core.protocols import NO_RULES

pytestmark = pytest.mark.optimized

CHUNK = 1000
EVEN, UNEVEN = 200_000, 200_003
MB = 10**6


def distances(points):
    """Sum of the distances of all pairs: 8 x 8 x 3 intermediate numbers, 768 bytes a step."""
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


def turned(p):
    return jnp.sin(p) * distances(p)


def clouds(length, axis=0, core=(8, 3)):
    return jax.ShapeDtypeStruct((*core[:axis], length, *core[axis:]), jnp.float32)


def loss(f):
    return lambda *args: jnp.sum(f(*args))


def push(f):
    return lambda x, t: jax.jvp(f, (x,), (t,))


def pull(f):
    return lambda args, cotangents: jax.vjp(f, *args)[1](cotangents)


@pytest.mark.parametrize("axis", [slow(0), 1])
def test_chunks_of_one_item_are_flat(axis):
    f = chunked_vmap(distances, 1, in_axes=axis)
    x = clouds(20_000, axis)  # 1.9 MB, and 15 MB of intermediate numbers
    assert temporary_bytes(f, x) < 0.01 * MB
    assert temporary_bytes(jax.grad(loss(f)), x) < 0.2 * MB  # the starts of the chunks, and outputs


@pytest.mark.parametrize("core", [(16, 1), (4, 1, 5)])
def test_an_axis_of_length_1_costs_nothing(core):
    # XLA copied the whole stack of such items into another layout: 13 MB here, for (16, 1).
    x = clouds(EVEN, core=core)
    f = chunked_vmap(lambda item: (jnp.sin(item).sum(), jnp.sin(item) * 2), CHUNK)
    for program in (f, jax.grad(lambda x: sum(map(jnp.sum, f(x))))):
        assert temporary_bytes(program, x) < 0.1 * MB


EACH = chunked_vmap(distances, CHUNK)
OUTPUTS = UNEVEN * 4
WEIGHTS = jax.ShapeDtypeStruct((8, 3), jnp.float32)
NUMBERS = jax.ShapeDtypeStruct((UNEVEN,), jnp.float32)
INTEGERS = jax.ShapeDtypeStruct((UNEVEN,), jnp.int32)


def closed_over(w, x):
    return jnp.sum(chunked_vmap(lambda p: distances(p * w), CHUNK)(x))


def scaled(scale, x, kind):
    one = lambda s, p, k: distances(p) * s * k.astype(s.dtype)  # noqa: E731
    return jnp.sum(chunked_vmap(one, CHUNK)(scale, x, kind))


def in_scan(x):
    def step(total, scale):
        return total + jnp.sum(EACH(x) * scale), None

    return jax.lax.scan(step, jnp.zeros(()), jnp.arange(3.0))[0]


# A copy of uneven clouds would be 19 MB; their outputs are 0.8 MB.
BOUNDED = {
    "gradient, even": (jax.grad(loss(EACH)), [clouds(EVEN)], 2 * MB),
    "jvp, even": (push(EACH), [clouds(EVEN)] * 2, 4 * MB),
    "forward over reverse": (
        lambda x, v: push(jax.grad(loss(EACH)))(x, v)[1],
        [clouds(UNEVEN)] * 2,
        4 * MB + 2 * OUTPUTS,
    ),
    "what is closed over": (jax.grad(closed_over), [WEIGHTS, clouds(UNEVEN)], 2 * MB),
    "one of three inputs": (
        jax.grad(scaled),
        [NUMBERS, clouds(UNEVEN), INTEGERS],
        2 * MB + OUTPUTS,
    ),
    # Whose first pass stores all intermediates, as `jax.checkpoint` does there; the next one, more.
    "reverse over reverse": (
        jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(lambda x: jnp.sum(jnp.sin(EACH(x))))(x)))),
        [clouds(UNEVEN)],
        (6500 if REMAT3 else 1420) * UNEVEN,
    ),
    "inside scan": (in_scan, [clouds(UNEVEN)], 2 * MB + OUTPUTS),
}


@pytest.mark.parametrize(("program", "args", "most"), BOUNDED.values(), ids=BOUNDED)
def test_no_input_is_copied(program, args, most):
    assert temporary_bytes(program, *args) < most


@pytest.mark.parametrize("axis", [0, 1, slow(2)])
def test_no_uneven_input_is_copied_along_any_axis(axis):
    f, x = chunked_vmap(distances, CHUNK, in_axes=axis), clouds(UNEVEN, axis)
    both = chunked_vmap(lambda p: (distances(p), p * 2), CHUNK, in_axes=axis, out_axes=(0, axis))
    assert temporary_bytes(both, x) < 2 * MB
    assert temporary_bytes(jax.grad(loss(f)), x) < 2 * MB + OUTPUTS
    assert temporary_bytes(push(f), x, x) < 4 * MB + 2 * OUTPUTS


def test_without_checkpoint_the_gradient_grows():
    """The figures above are not small because XLA would need little anyway."""
    stored = chunked_vmap(distances, CHUNK, checkpoint=False)
    assert temporary_bytes(jax.grad(loss(stored)), clouds(EVEN)) > 100 * MB


LAPACK = {
    "eigenvalues": lambda matrix: jnp.sum(jnp.linalg.eigh(matrix)[0] ** 3),
    "Cholesky": lambda matrix: jnp.sum(jnp.linalg.cholesky(matrix)),
    "solution": lambda matrix: jnp.sum(jnp.linalg.solve(matrix, matrix[0])),
}


@pytest.mark.parametrize("kernel", LAPACK)
@pytest.mark.parametrize(("axis", "length"), [(0, 20_011), weekly(1, 20_000)])
def test_kernels_that_want_another_layout_copy_no_input(axis, length, kernel):
    """LAPACK is given columns; XLA must not turn the whole input around before the loop."""
    x, f = clouds(length, axis, (8, 8)), chunked_vmap(LAPACK[kernel], 100, in_axes=axis)
    assert temporary_bytes(f, x) < MB < length * 8 * 8 * 4
    assert temporary_bytes(jax.grad(loss(f)), x) < MB + 4 * length


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
@pytest.mark.parametrize(("axis", "checkpoint"), [(0, True), weekly(1, False)])
def test_cotangents_are_added_in_place(axis, checkpoint, order):
    """A sum or a copy of the whole in the loop would cost time that grows as the square."""
    f = chunked_vmap(distances, 100, in_axes=axis, checkpoint=checkpoint)
    x = clouds(PART, axis)
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
        return "f32[" in str(jax.make_jaxpr(lambda x: jax.jvp(f, (x,), (x,)))(x))

    assert not widened((50, 3), 0)
    assert widened((53, 3), 0) == widened((3, 50), 1) == (dtype != "float16")


def test_cotangents_of_many_batches_are_added_in_place():
    f = chunked_vmap(distances, 100)
    batches = jax.ShapeDtypeStruct((5, PART, 8, 3), jnp.float32)
    for program in (jax.vmap(jax.grad(loss(f))), jax.grad(loss(jax.vmap(f)))):
        found = operations_on(flat(batches.shape, 1), program, batches)
        assert not {"add", "copy"} & set(found)
        assert found["dynamic-update-slice"] == 1


# What uneven maps and reductions need today, beside arguments and results. A change that needs less
# lowers these figures; one that needs more is seen.


DERIVATIVES = {
    "forward": lambda f: lambda args, _: f(*args),
    "vjp": pull,
    "jvp": lambda f: lambda args, _: jax.jvp(f, args, args),
    "jvp of vjp": lambda f: lambda *args: jax.jvp(pull(f), args, args),
    "vjp of vjp": lambda f: lambda *args: jax.vjp(pull(f), *args)[1](args[0]),
}
PRIME = 20_011
CLOUDS = (clouds(PRIME),)  # 1.92 MB
GRID = (
    jax.ShapeDtypeStruct((101, 1, 8, 3), jnp.float32),
    jax.ShapeDtypeStruct((203,), jnp.float32),  # outputs of 1.97 MB
)
# The function, its arguments, and for each derivative the temporaries in kB, in tiles.
UNEVEN_CALLS = {
    "arrays": (chunked_vmap(turned, CHUNK), CLOUDS, (0, 1936, 3843, 1942, 3863)),
    "two axes": (
        auto_vmap(2, 0, chunk_size=30)(lambda p, s: s * turned(p)),
        GRID,
        (59, 2110, 3977, 2178, 4102),
    ),
    "a sum": (chunked_reduce(turned, "sum", CHUNK), CLOUDS, (0, 1940, 6, 1955, 1966)),
    "outputs kept beside a sum": (
        chunked_reduce(lambda p: (distances(p), turned(p)), ("sum", None), CHUNK),
        CLOUDS,
        (3842, 3869, 3844, 3875, 3938),
    ),
}

# Without tiles, a whole chunk of 1000 items counts: 1 kB an item, and as much for each derivative.
# The most of two machines: XLA:CPU of JAX 0.10 fuses for the processor that it finds.
WHOLE_CHUNKS = {
    "arrays": (275, 2379, 4300, 6104, 7076),
    "a sum": (275, 631, 1434, 3948, 5968),
    "outputs kept beside a sum": (252, 2800, 4038, 6852, 7154),
}


@pytest.mark.parametrize(
    "name", ["arrays", "two axes", "outputs kept beside a sum", weekly("a sum")]
)
def test_uneven_calls_need_no_more_than_they_did(name):
    f, args, most = UNEVEN_CALLS[name]
    most = most if Options().rules is not NO_RULES else WHOLE_CHUNKS.get(name, most)
    cotangents = jax.eval_shape(f, *args)
    needed = {
        derivative: temporary_bytes(make(f), args, cotangents) / 1000
        for derivative, make in DERIVATIVES.items()
        if not (REMAT3 and derivative == "vjp of vjp")  # for which the next checkpoint stores more
    }
    bounds = {name: 1.05 * kB + 10 for name, kB in zip(DERIVATIVES, most, strict=True)}
    assert {name: kB for name, kB in needed.items() if kB > bounds[name]} == {}
