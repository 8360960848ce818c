# SPDX-License-Identifier: MIT
"""Small vectors by component: where they are stored so, and that results stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same
from rankax import auto_vmap, chunked_reduce
from rankax.ext.xla_cpu import library
from rankax.reductions import Several

pytestmark = pytest.mark.skipif(not library.IS_TUNED, reason="from JAX 0.12 on")

RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(n, 3)).astype(np.float32)) for n in (7, 5000))


def distance(x, y):
    return jnp.sqrt(jnp.sum((x - y) ** 2) + 1)


def total(**changes):
    options = {"reduce": "sum", "reduce_axis": -1, "chunk_size": 500, **changes}
    mapped = auto_vmap(x=1, y=1, **options)(distance)
    return lambda x, y: mapped(x[:, None], y)


def text(fun, *args):
    return jax.jit(fun).lower(*args).compile().as_text()


def test_small_vectors_are_stored_by_component():
    by_component = "f32[3,5000]"
    assert by_component in text(total(), X, Y)
    # Without the rule, a tile is read vector by vector. If not, the rule may go.
    plain = text(total(xla_cpu=False), X, Y)
    assert by_component not in plain
    assert "f32[500,3]" in plain
    # A gradient is up to three times as fast item by item.
    assert by_component not in text(jax.grad(lambda x, y: jnp.sum(total()(x, y))), X, Y)


def test_values_stay_the_same():
    both = Several("sum", "argmin")
    kernel = auto_vmap(x=1, y=1, reduce=both, reduce_axis=-1, chunk_size=500)(distance)
    got, want = (kernel.with_options(xla_cpu=on)(X[:, None], Y) for on in (True, False))
    assert_same(got, want, rtol=1e-5)


def test_sums_over_all_axes_read_vectors_again():
    of_all = auto_vmap(x=1, y=1, reduce="sum", chunk_size=500)(distance)
    assert "f32[3,5000]" in text(lambda x, y: of_all(x[:, None], y), X, Y)


def test_what_is_not_read_again_stays():
    """There is one row, so a copy would not pay."""
    for fun in (
        chunked_reduce(distance, "sum", 500, (None, 0)),
        auto_vmap(x=1, y=1, reduce="sum", chunk_size=500)(distance),
    ):
        assert "f32[3,5000]" not in text(fun, X[0], Y)


@pytest.mark.parametrize("size", [(5000, 17), (50_000, 3)], ids=["long vectors", "many"])
def test_large_arrays_stay(size):
    large = jnp.ones(size)
    mapped = auto_vmap(1, 1, reduce="sum", reduce_axis=-1, chunk_size=500)(distance)
    assert f"f32[{size[1]},{size[0]}]" not in text(lambda y: mapped(y[:3, None], y), large)
