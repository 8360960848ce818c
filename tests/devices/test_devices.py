# SPDX-License-Identifier: MIT
"""Batches that several devices share: cases in processes that simulate those.

For the number of devices is fixed when JAX starts; all other tests run on one.
"""

import functools
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import devices_cases
import rankax
from helpers import slow
from rankax import auto_vmap, chunked_vmap

CAN_ENTER = pytest.mark.skipif(
    not hasattr(jax.sharding, "use_abstract_mesh"),
    reason="JAX 0.7 neither enters nor leaves a mesh inside jit",
)


def enters_mesh(*values, also=()):
    return pytest.param(*values, marks=[CAN_ENTER, *also])


@functools.cache
def process(devices):
    """A process with so many devices, which runs one case after another."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    # With more threads than devices, LAPACK cannot hang (JAX 0.10).
    variables = {"XLA_FLAGS": flags.strip(), "PJRT_NPROC": str(2 * devices)}
    begin = (exec, (f"import os; os.environ.update({variables})",))  # before it imports JAX
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), *begin)


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("maps_send_nothing", "Auto", 4),
        ("eager_calls_see_how_arrays_lie", "Auto", 4),
        slow("reductions_send_once", "Auto", 4),
        ("nan_survives_the_merge", "Auto", 4),
        ("a_part_may_be_masked", "Auto", 4),
        ("some_items_count", "Auto", 4),
        enters_mesh("some_items_count", "Explicit", 4, also=[pytest.mark.slow]),
        ("narrow_floats_are_merged_wide", "Auto", 4),
        ("memory_of_a_device_does_not_grow", "Auto", 4),
        ("other_ways_to_map", "Auto", 4),
        ("the_plan_says_it", "Auto", 4),
        slow("shard_map_checks_what_varies", "Auto", 4),
        ("errors", "Auto", 4),
        ("kernels_that_take_a_batch", "Auto", 4),
        enters_mesh("kernels_that_take_a_batch", "Explicit", 4, also=[pytest.mark.slow]),
        ("maps_of_any_length_send_nothing_inside", "Auto", 4),
        ("usual_reductions_of_any_length", "Auto", 4),
        ("some_items_of_any_length_count", "Auto", 3),
        slow("other_reductions_of_any_length", "Auto", 8),
        ("basis_vectors_of_a_jacobian_are_items", "Auto", 4),
        ("every_length_counts_once", "Auto", 3),
        ("a_call_takes_arrays_from_anywhere", "Auto", 4),
        ("devices_are_chosen", "Auto", 4),
        ("items_end_alone", "Auto", 4),
        ("inner_kernels_use_one_device", "Auto", 4),
        ("the_longest_axis_that_serves_is_spread", "Auto", 4),
        slow("named_axes_are_of_any_length", "Auto", 4),
        ("keys_of_any_length_are_those_of_the_whole_batch", "Auto", 4),
        ("plans_and_tuning_know_devices", "Auto", 4),
        ("errors_of_devices", "Auto", 4),
        ("buckets_are_filled_up_and_shared", "Auto", 4),
        ("ragged_items_are_shared", "Auto", 4),
        ("gradients_of_convolutions_are_right", "Auto", 4),
        enters_mesh("gradients_of_convolutions_are_right", "Explicit", 4),
        ("jacobians_of_convolutions", "Auto", 4),
        ("callbacks_run_on_each_device", "Auto", 4),
        ("ffts_and_factors_send_nothing", "Auto", 4),
        ("stretched_axes_of_any_length", "Auto", 4),
        ("items_end_alone_in_shard_map", "Auto", 4),
        ("lapack_may_hang_with_jax_0_10", "Auto", 4),
        enters_mesh("shared_arrays_are_summed_once_on_an_explicit_mesh", "Explicit", 4),
        enters_mesh("items_end_alone_on_an_explicit_mesh", "Explicit", 4),
        enters_mesh("some_kernels_on_an_explicit_mesh", "Explicit", 4),
        slow("no_operation_is_divided", "Auto", 4),
        ("random_calls_with_other_options", "Auto", 4),
        slow("many_random_calls_with_other_options", "Auto", 4),
        slow("random_programs_on_all_devices", "Auto", 4),
        enters_mesh("maps_send_nothing", "Explicit", 8, also=[pytest.mark.slow]),
        slow("second_derivatives", "Auto", 4),
        enters_mesh("second_derivatives", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("reductions_send_once", "Explicit", 4, also=[pytest.mark.slow]),
        slow("other_reductions_send_once", "Auto", 8),
        enters_mesh("other_reductions_send_once", "Explicit", 8, also=[pytest.mark.slow]),
        enters_mesh("memory_of_a_device_does_not_grow", "Explicit", 4, also=[pytest.mark.slow]),
        slow("one_of_several_axes", "Auto", 8),
        slow("split_keys_are_those_of_the_whole_batch", "Auto", 4),
        slow("progress_counts_all_parts", "Auto", 4),
        enters_mesh("progress_counts_all_parts", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("other_calls_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("every_kernel_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("every_gradient_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
        enters_mesh("eager_calls_on_an_explicit_mesh", "Explicit", 4, also=[pytest.mark.slow]),
    ],
)
def test_parts_are_walked_side_by_side(name, kind, devices):
    process(devices).submit(devices_cases.run, name, kind, devices).result()


def test_no_case_is_forgotten():
    (cases,) = test_parts_are_walked_side_by_side.pytestmark
    given = {getattr(values, "values", values)[0] for values in cases.args[1]}
    assert given == set(devices_cases.CASES)


def test_one_cpu_device_says_how_to_get_more():
    mapped = chunked_vmap(lambda x: x, 2, devices="all")
    with pytest.raises(
        ValueError,
        match=re.escape(
            "chunked_vmap(<lambda>): devices='all', but JAX has 1 CPU device; for more "
            "CPU devices, one for each core, call "
            f'jax.config.update("jax_num_cpu_devices", {os.cpu_count()}) before JAX is first used'
        ),
    ):
        mapped(jnp.ones(4))
    (device,) = jax.devices()
    out = chunked_vmap(lambda x: x * 2, 2, devices=[device])(jnp.arange(4.0))
    np.testing.assert_array_equal(out, [0, 2, 4, 6])
    np.testing.assert_array_equal(chunked_vmap(lambda x: x, 2, devices=1)(jnp.ones(4)), np.ones(4))


@pytest.mark.parametrize(
    "call",
    [
        lambda: auto_vmap(1, shards=2)(lambda x: x),
        lambda: auto_vmap(1)(lambda x: x).with_options(shards=2),
        lambda: rankax.options(shards=2),
    ],
)
def test_the_old_name_of_the_option_leads_to_the_new_one(call):
    with pytest.raises(TypeError, match=r"did you mean (the option )?'?devices'?"):
        call()
