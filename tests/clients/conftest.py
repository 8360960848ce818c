# SPDX-License-Identifier: MIT
"""How the client programs run. Only `tox -e clients` collects this folder."""

import jax
import pytest

# The other tests are strict about promotion. Third-party code is not written for that.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")


# A chunk that divides the batch and one that does not, one of them eager and one compiled.
@pytest.fixture(params=[(3, True), (4, False)], ids=["chunk_size=3-jit", "chunk_size=4-eager"])
def way(request):
    chunk_size, jit = request.param
    return {"chunk_size": chunk_size, "jit": jit}
