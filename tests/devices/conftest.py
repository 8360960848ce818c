# SPDX-License-Identifier: MIT
"""Run a test on a mesh where its devices are: in this session or, by name, in another."""

import contextlib

import jax
import pytest
from jax.sharding import AxisType

from meshes import Mesh, Session

SESSIONS = {}


@pytest.fixture
def mesh(request):
    """The mesh that `on` asks for; in a session without its devices, what was asked for."""
    wanted = request.param
    if wanted.devices != request.config.getoption("devices"):
        yield wanted
        return
    kind = getattr(AxisType, wanted.kind)
    made = jax.make_mesh((wanted.devices,), ("d",), axis_types=(kind,))
    is_explicit = kind == AxisType.Explicit
    entered = jax.set_mesh(made) if is_explicit and wanted.enter else contextlib.nullcontext()
    # Types and shapes are mixed as users do.
    with entered, jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    wanted = pyfuncitem.funcargs.get("mesh")
    if not isinstance(wanted, Mesh):
        return None
    if wanted.devices not in SESSIONS:
        SESSIONS[wanted.devices] = Session(wanted.devices)
    outcome, text = SESSIONS[wanted.devices].run(pyfuncitem.nodeid)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "died":  # the next test begins another
        SESSIONS.pop(wanted.devices).close()
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True, trylast=True)  # before coverage is put together
def pytest_runtestloop():
    try:
        return (yield)
    finally:
        while SESSIONS:
            SESSIONS.popitem()[1].close()
