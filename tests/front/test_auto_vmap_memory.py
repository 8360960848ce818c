# SPDX-License-Identifier: MIT
"""That ``chunk_size`` bounds the memory, as the compiled program itself says.

Every kernel here holds an intermediate that no compiler can avoid: two values of each of its
elements are needed, in an order that is known only when it is sorted.
"""

import jax
import jax.numpy as jnp
import pytest

from helpers import at_each_run, temporary_bytes
from rankax import auto_vmap

pytestmark = pytest.mark.optimized

WIDTH = 4096  # elements of the intermediate of one evaluation
ITEM = 4 * WIDTH  # and its bytes
SLACK = 5  # evaluations beyond the chunk, of hundreds in the batch


def heavy(a, b):
    """Sort ``WIDTH`` numbers that depend on both arguments."""
    grid = jnp.sin(jnp.linspace(0.0, 1.0, WIDTH) * a * 40 + b)
    return jnp.sort(grid)[WIDTH // 3] * a


def shapes(*batches):
    return [jax.ShapeDtypeStruct(batch, jnp.float32) for batch in batches]


def gradient(f):
    return jax.grad(lambda *args: jnp.sum(f(*args)), argnums=(0, 1))


BATCHES = {
    "one axis": [(600,), ()],
    "one axis, uneven": [(601,), (601,)],
    "two against one": [(50, 1), (80,)],
    "merged": [(20, 7), (20, 7)],
    "three axes": [(6, 1, 5), (7, 1)],
    "three axes, all apart": [(9, 1, 1), (1, 8, 7)],
}


def measured(batches, chunk_size, **options):
    """Return how many evaluations the plan runs at once, and the temporaries of both passes."""
    mapped = auto_vmap(0, 0, chunk_size=chunk_size, **options)(heavy)
    args = shapes(*batches)
    forward, backward = temporary_bytes(mapped, *args), temporary_bytes(gradient(mapped), *args)
    return mapped.plan(*args).in_flight, forward, backward


@pytest.fixture(scope="module")
def bytes_per_item():
    """Temporaries of one evaluation, forward and backward, as the compiler lays them out."""
    whole = auto_vmap(0, 0)(heavy)
    few, many = shapes((4,), (4,)), shapes((12,), (12,))
    return [
        (temporary_bytes(f, *many) - temporary_bytes(f, *few)) / 8 for f in (whole, gradient(whole))
    ]


def test_the_intermediates_are_unavoidable(bytes_per_item):
    forward, backward = bytes_per_item
    assert forward >= ITEM
    assert backward >= 2 * ITEM


@pytest.mark.parametrize(
    "batches", at_each_run(["one axis, uneven", "two against one", "merged"], BATCHES)
)
def test_no_more_evaluations_than_the_chunk_exist_at_once(batches, bytes_per_item):
    chunk_size = 12
    in_flight, forward, backward = measured(batches, chunk_size)
    assert chunk_size / 2 < in_flight <= chunk_size
    # What one level computes for all items of the next, and outputs and cotangents, are the slack.
    assert forward <= (chunk_size + SLACK) * bytes_per_item[0]
    assert backward <= (chunk_size + SLACK) * bytes_per_item[1]


def test_without_checkpoint_the_gradient_grows_with_the_batch(bytes_per_item):
    _, forward, backward = measured([(120,), ()], 12, checkpoint=False)
    assert forward <= (12 + SLACK) * bytes_per_item[0]
    assert backward > 120 * ITEM


def test_jit_is_bounded_too(bytes_per_item):
    mapped = auto_vmap(0, 0, chunk_size=12, jit=True)(heavy)
    args = shapes((50, 1), (80,))
    lowered = mapped.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert lowered <= (12 + SLACK) * bytes_per_item[0]


def test_an_outer_product_is_never_broadcast():
    mapped = auto_vmap(1, 1, chunk_size=4096)(lambda x, y: jnp.sum(jnp.abs(x - y)))
    args = shapes((3000, 1, 64), (1, 3001, 64))
    assert temporary_bytes(mapped, *args) < 12e6
    plan = mapped.plan(*args)
    assert plan.batch_shape == (3000, 3001)
    assert plan.in_flight > 100


def test_an_outer_product_broadcasts_nothing_without_chunks():
    """The two inputs are 1.5 MB; their broadcast product with all 64 elements would be 2.3 GB."""
    mapped = auto_vmap(1, 1)(jnp.dot)
    args = shapes((3000, 1, 64), (1, 3001, 64))
    assert temporary_bytes(mapped, *args) < 2 * 3000 * 3001 * 4


def test_axes_mapped_alike_are_walked_as_one():
    mapped = auto_vmap(0, 0, chunk_size=10)(heavy)
    plan = mapped.plan(*shapes((1000, 7), (1000, 7)))
    assert plan.steps == 700
    assert plan.in_flight == 10
    equations = jax.make_jaxpr(mapped)(*shapes((1000, 7), (1000, 7))).eqns
    assert [e.params["length"] for e in equations if e.primitive.name == "scan"] == [700]
