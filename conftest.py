# SPDX-License-Identifier: MIT
"""Settings of the test session: strict JAX, how it compiles, and the Hypothesis budgets."""

import functools
import gc
import os
from collections import Counter
from pathlib import Path

# Before JAX is imported. A default only, so that JAX_PLATFORMS=cuda runs the tests on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Imported, NetKet sets a mesh for the whole process, in which other tests would run.
os.environ.setdefault("NETKET_SHARDING", "0")

import jax
import pytest
from hypothesis import HealthCheck, settings

# What is silently promoted here would hide a wrong batch axis or a lost dtype.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traces leave hardly any reference cycles, and looking for them takes 5 % of the time.
gc.set_threshold(50_000, 20, 100)

# In CI, a failure must come from the change, not from the draw: each run tries the same cases.
# Elsewhere, and in the fuzzer, each run draws others.
IN_CI = bool(os.environ.get("CI"))

for name, max_examples in {"quick": 20, "many": 200}.items():
    settings.register_profile(
        name,
        max_examples=max_examples,
        # The first example of each shape compiles, so it takes much longer than the others.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        derandomize=IN_CI,
    )
settings.load_profile(os.environ.get("RANKAX_HYPOTHESIS", "quick"))


# XLA has two ways to hand a fusion to LLVM. The older compiles in about 0.6 of the time, and makes
# programs that need other memory than those of users. JAX 0.11 dropped it.
TWO_FUSIONS = jax.__version_info__ < (0, 11)


ALONE = "JAX 0.10 runs tests of compiled programs in a session of their own, tox -e optimized"


def as_users(config):
    """Whether programs have the fusions that users have, as tests marked `optimized` need."""
    return not TWO_FUSIONS or config.getoption("markexpr").startswith("optimized")


def pytest_configure(config):
    """Compile with most optimizations of LLVM off, because a program of a test runs once.

    XLA plans loops, fusions and memory as for users: the texts of 78 programs, and the memory that
    they need, were the same on JAX 0.10 and 0.12.
    """
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of processes that tests start, too
    jax.config.update("jax_disable_most_optimizations", True)
    # LLVM gets a program in one part, not in up to 32 for as many threads, which before JAX 0.11 is
    # a quarter less to do. Other processes of tests have the other cores.
    add_flag("--xla_cpu_parallel_codegen_split_count=1")
    if not as_users(config):
        add_flag("--xla_cpu_use_fusion_emitters=false")
    if IN_CI or os.environ.get("RANKAX_TIMES"):
        config.pluginmanager.register(Times())
    if is_named(config, "devices"):
        add_flag("--xla_force_host_platform_device_count=8")
        # With more threads than devices, LAPACK cannot hang (JAX 0.10).
        os.environ["PJRT_NPROC"] = "16"


def add_flag(flag):
    """Hand a flag to XLA, which reads them when the first program compiles."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def processor_seconds():
    """Return the processor time of this process, and of those that it has waited for."""
    return sum(os.times()[:4])


class Times:
    """Print which tests, and which files, took most processor time."""

    def __init__(self):
        self.tests = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self.began = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("seconds", processor_seconds() - self.began))
        return report

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid] += dict(report.user_properties).get("seconds", 0)

    def pytest_terminal_summary(self, terminalreporter):
        files = Counter()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"{files.total():.0f} s of processor time; most of it")
        for name, seconds in self.tests.most_common(10) + files.most_common(10):
            terminalreporter.line(f"{seconds:6.1f} s  {name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart():
    """Let calls broadcast batch axes, in a session in which nothing inside may promote ranks.

    Test: ``tests/front/test_rank_promotion.py``.
    """
    import rankax.call.kernels  # not before coverage begins, in this hook

    of_call = rankax.call.kernels._numbers_of_axes
    rankax.call.kernels._numbers_of_axes = functools.wraps(of_call)(lambda call: {})


def pytest_runtest_setup(item):
    """Leave out a test of programs where they are not those of users."""
    if item.get_closest_marker("optimized") and not as_users(item.config):
        pytest.skip(ALONE)


def pytest_terminal_summary(terminalreporter):
    """Say how many tests were skipped because of JAX 0.10, why, and what runs them."""
    skipped = terminalreporter.getreports("skipped")
    if count := sum(ALONE in str(report.longrepr) for report in skipped):
        terminalreporter.section(f"{count} tests skipped: {ALONE}")


def pytest_collection_finish():
    """Let no test that collects garbage look through all modules: more than a second each."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _caches():
    """Choose tiles as if each core had a cache of 1 MiB, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankax.ext.xla_cpu.rules._cache_bytes", lambda: 2**20)
        yield


@pytest.fixture
def unchecked():
    """Compile no second program to compare with, as `tox -e check` does; the test counts them."""
    import rankax  # not before coverage begins

    with rankax.options(check=False):
        yield


# Read by type checkers (see tox.ini); some of it is wrong on purpose.
collect_ignore = ["tests/typing"]


def is_named(config, folder):
    """Whether a session was asked for this folder of `tests`, or a part of it."""
    folder = Path(__file__).parent / "tests" / folder
    paths = (config.invocation_params.dir / arg.split("::")[0] for arg in config.args)
    return any(path.resolve().is_relative_to(folder) for path in paths)


def pytest_ignore_collect(collection_path, config):
    """Leave out what needs packages or devices that other tests do not have, unless it is named."""
    if collection_path.parent.name == "tests" and collection_path.name in ("clients", "devices"):
        return None if is_named(config, collection_path.name) else True
    return None
