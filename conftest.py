# SPDX-License-Identifier: MIT
"""Settings of the test session: strict JAX, how it compiles, and the Hypothesis budgets."""

import gc
import os
from collections import defaultdict
from pathlib import Path

# Before JAX is imported. A default only, so that JAX_PLATFORMS=cuda runs the tests on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import HealthCheck, settings

# What is silently promoted here would hide a wrong batch axis or a lost dtype.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# What a trace leaves is hardly ever a cycle; to look for them takes a twentieth of the time.
gc.set_threshold(50_000, 20, 100)

# In CI a failure must come from the change, not from the draw. More of what each run repeats finds
# little, so there are fewer; at home, and in the fuzzer, each run draws others.
IN_CI = bool(os.environ.get("CI"))

for name, max_examples in {"quick": 3, "full": 10 if IN_CI else 30}.items():
    settings.register_profile(
        name,
        max_examples=max_examples,
        # The first example of a shape compiles, so no single time says anything.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        derandomize=IN_CI,
    )
settings.load_profile(os.environ.get("RANKAX_HYPOTHESIS", "quick"))


def pytest_addoption(parser):
    parser.addoption(
        "--as-users",
        action="store_true",
        help="run the tests marked `optimized`, and no others, with the fusions that users have",
    )


# XLA has two ways to hand a fusion to LLVM. The older compiles in about 0.6 of the time, and makes
# programs that need other memory. JAX 0.11 dropped it.
TWO_FUSIONS = jax.__version_info__ < (0, 11)


def pytest_configure(config):
    """Compile hastily: a program of a test is compiled once and run once, on little.

    What is left out is work of LLVM. XLA plans loops, fusions and memory as for users: the texts
    of 78 programs and the memory that they need were the same on JAX 0.7, 0.10 and 0.12.
    """
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of processes that tests start, too
    jax.config.update("jax_disable_most_optimizations", True)
    if TWO_FUSIONS and not config.getoption("as_users"):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = flags.strip()


# Where a case is a program to compile. Elsewhere all cases are cheap.
ROOMS = {"blocks", "call", "devices", "fit", "front", "fuzz", "lockstep", "loop", "ragged"}
ROOMS |= {"reduce", "scan"}
CHEAP = {"test_auto_vmap_errors.py", "test_call_errors.py", "test_options.py"}
CHEAP |= {"test_ragged_errors.py", "test_ragged_type.py"}
CASES = int(os.environ.get("RANKAX_CASES", "3"))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by markers
def pytest_collection_modifyitems(config, items):
    """Mark slow all but some cases of a test, and choose by how they compile."""
    cases = defaultdict(list)
    for item in items:
        room = item.path.parent.name
        few = room in ROOMS and item.path.name not in CHEAP
        if CASES == 1:  # on another version of JAX, which may break any operation
            few = room != "ops"
        if few and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        kept = {i * (len(same) - 1) // max(1, CASES - 1) for i in range(CASES)}
        for i, item in enumerate(same):
            if i not in kept:
                item.add_marker("slow")
    as_users = config.getoption("as_users")
    left = {
        item
        for item in items
        if bool(TWO_FUSIONS and item.get_closest_marker("optimized")) != as_users
    }
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def pytest_sessionfinish(session):
    """Of what was asked for, there may be nothing to compile as users have it."""
    if (
        session.config.getoption("as_users")
        and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    ):
        session.exitstatus = pytest.ExitCode.OK


# Read by type checkers (see tox.ini); some of it is wrong on purpose.
collect_ignore = ["tests/typing"]


def pytest_ignore_collect(collection_path, config):
    """Collect the client programs only where they are named; others lack their packages."""
    clients = Path(__file__).parent / "tests" / "clients"
    named = any(
        (config.invocation_params.dir / arg.split("::")[0]).resolve().is_relative_to(clients)
        for arg in config.args
    )
    if collection_path == clients and not named:
        return True
    # To import every module takes longer than some of these tests.
    modules = config.getoption("as_users") and collection_path.suffix == ".py"
    return True if modules and "mark.optimized" not in collection_path.read_text() else None
