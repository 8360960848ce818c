# SPDX-License-Identifier: MIT
"""Batches that lie on several devices, each case in a process with simulated ones.

For the number of devices is fixed when JAX starts; all other tests run on one.
"""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from helpers import slow
from shards_cases import CASES

CAN_ENTER = pytest.mark.skipif(
    not hasattr(jax.sharding, "use_abstract_mesh"), reason="JAX 0.7 enters no mesh inside jit"
)


def enters_mesh(*values, also=()):
    return pytest.param(*values, marks=[CAN_ENTER, *also])


HERE = pathlib.Path(__file__).parent


def run(name, kind, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, str(HERE / "shards_cases.py"), name, kind, str(devices)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("maps_send_nothing", "Auto", 4),
        ("eager_calls_see_how_arrays_lie", "Auto", 4),
        slow("reductions_send_once", "Auto", 4),
        ("nan_survives_the_merge", "Auto", 4),
        ("a_part_may_be_masked", "Auto", 4),
        ("some_items_count", "Auto", 4),
        slow("some_items_count", "Explicit", 4),
        ("narrow_floats_are_merged_wide", "Auto", 4),
        ("memory_of_a_device_does_not_grow", "Auto", 4),
        ("other_ways_to_map", "Auto", 4),
        ("the_plan_says_it", "Auto", 4),
        slow("shard_map_checks_what_varies", "Auto", 4),
        ("errors", "Auto", 4),
        enters_mesh("some_kernels_on_an_explicit_mesh", "Explicit", 4),
        slow("maps_send_nothing", "Explicit", 4),
        slow("maps_send_nothing", "Auto", 8),
        slow("maps_send_nothing", "Explicit", 8),
        slow("second_derivatives", "Auto", 4),
        slow("second_derivatives", "Explicit", 4),
        slow("reductions_send_once", "Explicit", 4),
        slow("other_reductions_send_once", "Auto", 8),
        slow("other_reductions_send_once", "Explicit", 8),
        slow("memory_of_a_device_does_not_grow", "Explicit", 4),
        slow("one_of_several_axes", "Auto", 4),
        slow("one_of_several_axes", "Auto", 8),
        slow("split_keys_are_those_of_the_whole_batch", "Auto", 4),
        slow("progress_counts_all_parts", "Auto", 4),
        slow("progress_counts_all_parts", "Explicit", 4),
        enters_mesh("other_calls_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("every_kernel_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("every_gradient_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("eager_calls_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
    ],
)
def test_parts_are_walked_side_by_side(name, kind, devices):
    run(name, kind, devices)


def test_no_case_is_forgotten():
    (cases,) = test_parts_are_walked_side_by_side.pytestmark
    given = {getattr(values, "values", values)[0] for values in cases.args[1]}
    assert given == set(CASES)
