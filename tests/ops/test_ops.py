# SPDX-License-Identifier: MIT
"""The operations of JAX in chunks, against a loop over items in Python.

A sixtieth of the operations is tested each time, each in one of the two `CASES`; with
RANKAX_OPS=all, as ``tox -e ops`` sets it, all operations are, in both.
To add an operation, or arguments of one, add a line to `samples.py`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.operations import (
    ALL,
    MAPPED,
    REFUSED,
    Operation,
    assert_close,
    chosen,
    data,
    possible,
    value,
    vjp,
)
from ops.samples import COLLECTIVE
from rankax import chunked_vmap

pytestmark = pytest.mark.filterwarnings("ignore")  # they are about the operations

# Length, chunk size, and the batch axis of inputs and outputs. Here chunks are the rows of a scan;
# there they overlap, are read by index, and written.
CASES = [(4, 2, 0), (5, 2, -1)]


def by_loop(f, arrays, modes):
    """Transform the function of each item on its own."""

    @jax.jit
    def one(arrays):
        return jax.tree.map(data, [mode(f, arrays) for mode in modes])

    items = [one([x[n] for x in arrays]) for n in range(len(arrays[0]))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *items)


def in_chunks(f, arrays, modes, cases):
    """Transform the map for each of the cases, in one program."""

    @jax.jit
    def all_cases(arrays):
        results = []
        for length, size, axis in cases:
            items = [jnp.moveaxis(x[:length], 0, axis) for x in arrays]
            out = [mode(chunked_vmap(f, size, axis, axis), items) for mode in modes]
            results.append(jax.tree.map(lambda x, axis=axis: data(jnp.moveaxis(x, axis, 0)), out))
        return results

    return all_cases(arrays)


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("call", chosen(MAPPED))
def test_in_chunks_as_in_a_loop(call):
    f = Operation(call)
    arrays = f.arrays(5)
    modes, errors = possible(f, [x[0] for x in arrays])
    assert value in modes
    for mode, error in errors.items():
        with pytest.raises(error):
            jax.eval_shape(lambda xs, mode=mode: mode(chunked_vmap(f, 2), xs), arrays)
    want = by_loop(f, arrays, modes)
    cases = CASES if ALL else [CASES[f.seed % 2]]
    for (length, *_), got in zip(cases, in_chunks(f, arrays, modes, cases), strict=True):
        assert_close(got, jax.tree.map(lambda x, n=length: x[:n], want))


@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_what_cannot_be_mapped_says_so(words, call):
    f = Operation(call)
    arrays = f.arrays(5)
    mapped = chunked_vmap(f, 2, axis_name="x")
    try:
        jax.eval_shape(lambda arrays: [value(mapped, arrays), vjp(mapped, arrays)], arrays)
    except Exception as error:
        assert re.search(words, str(error))  # noqa: PT017
    else:  # in another JAX
        assert words != COLLECTIVE
        test_in_chunks_as_in_a_loop(call)
