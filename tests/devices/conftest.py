# SPDX-License-Identifier: MIT
"""The mesh of a test, over the eight devices that the root conftest.py gives this folder."""

import contextlib

import jax
import pytest
from jax.sharding import AxisType


@pytest.fixture
def mesh(request):
    """The mesh that `sharding.on` asks for."""
    kind, enter = request.param
    made = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType[kind],))
    is_entered = enter and kind == "Explicit"
    # Types and shapes are mixed as users do.
    with (
        jax.set_mesh(made) if is_entered else contextlib.nullcontext(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield made
