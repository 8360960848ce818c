# SPDX-License-Identifier: MIT
"""How the client programs run. Only `tox -e clients` collects this folder."""

import jax
import pytest

# The other tests are strict about promotion. Third-party code is not written for that.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")


# A chunk that divides the batch, compiled; one that does not, eager; lanes.
WAYS = {
    "chunk_size=3-jit": {"chunk_size": 3, "jit": True},
    "chunk_size=4-eager": {"chunk_size": 4, "jit": False},
    "lanes": {"chunk_size": 4, "jit": True, "lockstep": False},
}


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def way(request):
    return request.param
