# SPDX-License-Identifier: MIT
"""Settings of the test session: strict JAX, how it compiles, and the Hypothesis budgets."""

import os
from pathlib import Path

# Before JAX is imported. A default only, so that JAX_PLATFORMS=cuda runs the tests on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import HealthCheck, settings

# What is silently promoted here would hide a wrong batch axis or a lost dtype.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

for name, max_examples in {"quick": 6, "full": 30}.items():
    settings.register_profile(
        name,
        max_examples=max_examples,
        # The first example of a shape compiles, so no single time says anything.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        # In CI a failure must come from the change, not from the draw.
        derandomize=bool(os.environ.get("CI")),
    )
settings.load_profile(os.environ.get("RANKAX_HYPOTHESIS", "quick"))

HASTILY = pytest.StashKey[bool]()


def pytest_runtest_setup(item):
    """Compile hastily: a program of a test is compiled once and run once, on little.

    It saves up to a quarter of the time. Left out is work of LLVM; XLA plans loops, fusions and
    memory as for users. What looks at a compiled program is marked `optimized` all the same, and is
    compiled as users have it.
    """
    hastily = item.get_closest_marker("optimized") is None
    if hastily != item.config.stash.get(HASTILY, None):
        jax.clear_caches()  # they would hand out what was compiled the other way
        jax.config.update("jax_disable_most_optimizations", hastily)
        item.config.stash[HASTILY] = hastily


# Read by type checkers (see tox.ini); some of it is wrong on purpose.
collect_ignore = ["typing"]


def pytest_ignore_collect(collection_path, config):
    """Collect the client programs only where they are named; others lack their packages."""
    clients = Path(__file__).parent / "clients"
    named = any(
        (config.invocation_params.dir / arg.split("::")[0]).resolve().is_relative_to(clients)
        for arg in config.args
    )
    return True if collection_path == clients and not named else None
