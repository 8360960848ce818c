# SPDX-License-Identifier: MIT
"""How the client programs run. Only `tox -e clients` collects this folder."""

import jax

# The other tests are strict about promotion. Third-party code is not written for that.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")
