# SPDX-License-Identifier: MIT
"""Lanes compiled for an H100: its loops, what they launch, and which conditions the host reads.

A loop of unknown length costs a wait of the host for each condition, which takes as long as several
launches. A conditional costs none: it is part of a CUDA graph.
"""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

pytest.importorskip("jax_cuda13_plugin", reason="it is what compiles for a GPU: tox -e gpu")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from lockstep import oscillator
from rankax import auto_vmap

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
KERNEL = r" (?:fusion|custom-call|copy|reduce|scatter|sort|dynamic-update-slice|copy-start)\("
ITEMS = 100_000


def halved(x):
    return lax.while_loop(lambda x: x > 0.3, lambda x: x / 2, x)


def end(x):
    return oscillator(x)[0]


def lanes(kernel):
    return auto_vmap(0, lockstep=False)(kernel)


def gradient(mapped):
    return jax.grad(lambda x: jnp.sum(mapped(x) ** 2))


@functools.cache
def mesh():
    described = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    return Mesh(np.array(described.devices), ("d",), axis_types=(AxisType.Auto,))


def compiled(fun, items=ITEMS):
    sharding = NamedSharding(mesh(), PartitionSpec())
    like = jax.ShapeDtypeStruct((items,), jnp.float32, sharding=sharding)
    return jax.jit(fun).lower(like).compile()


def loops(program):
    """Return each loop: how deep it is, its steps (None: the host asks), and kernels a step.

    The kernels are those of its body and of its condition, if that is evaluated, without those of
    loops inside. Of a conditional, the larger side counts.
    """
    text = program.as_text()
    parts = dict(re.findall(r"\n(?:ENTRY )?%?([\w\.\-]+)[^\n]*\{\n(.*?)\n\}", text, re.DOTALL))
    found = []

    def sides(line):
        """Return the computations of a conditional."""
        listed = re.findall(r"branch_computations=\{([^}]*)\}", line)
        listed += re.findall(r"(?:true|false)_computation=(%?[\w.\-]+)", line)
        return [side.strip("% ") for each in listed for side in each.split(",")]

    def kernels(name):
        lines = [line for line in parts[name].split("\n") if " conditional(" in line]
        taken = [max(map(kernels, sides(line))) for line in lines]
        return len(re.findall(KERNEL, parts[name])) + sum(taken)

    def walk(name, depth):
        for line in parts[name].split("\n"):
            if loop := re.search(r" while\(.*condition=%?([\w\.\-]+), body=%?([\w\.\-]+)", line):
                known = re.search(r"known_trip_count[^\d]*(\d+)", line)
                launches = kernels(loop[2]) + (0 if known else kernels(loop[1]))
                found.append((depth, int(known[1]) if known else None, launches))
                walk(loop[2], depth + 1)
            for side in sides(line):
                walk(side, depth + 1)

    walk(re.search(r"\nENTRY %?([\w\.\-]+)", text)[1], 0)
    return found


@pytest.mark.parametrize(("kernel", "step"), [(halved, 2), (end, 11)], ids=["halved", "oscillator"])
def test_the_host_waits_once_in_eight_rounds(kernel, step):
    """Before, it waited in each round, and inside it once more in two steps of the loop.

    There were 4096 lanes, and a round was 14 kernels for the first kernel here, and 15 for the
    second; two steps were 3 and 10. With 65,536 lanes, XLA sums in two kernels, so a round is a few
    more, and for the oscillator there are a fifth as many rounds.
    """
    outer, rounds, steps = loops(compiled(lanes(kernel)))
    assert outer[:2] == (0, None)
    assert rounds[:2] == (1, 8)
    assert steps[:2] == (2, 8)
    assert outer[2] <= 10
    assert rounds[2] <= 21
    assert steps[2] <= step  # in two steps of the kernel's loop


def test_outputs_are_folded_between_rounds():
    """Before, the host asked in each round whether there is a tile to fold."""
    program = compiled(auto_vmap(0, lockstep=False, reduce="sum")(halved))
    found = [(depth, steps) for depth, steps, _ in loops(program)]
    assert found == [(0, None), (1, 8), (2, 8), (1, None)]  # the last one folds


def test_loops_of_a_gradient():
    """Of nine loops, two are gone: those over tiles forward, and over the steps of a tile."""
    found = [(depth, steps) for depth, steps, _ in loops(compiled(gradient(lanes(end))))]
    assert found == [
        # Lanes compute the values, and count the steps, by which the items are sorted.
        *[(0, None), (1, 8), (2, 8)],
        # Backward, over tiles of items, as many as there are lanes.
        (0, 2),
        # The steps of a tile again: their number and the last carry were not stored, because these
        # would be as long as the batch. The length differs from tile to tile.
        (1, None),
        # The steps of a tile, from the last to the first.
        (1, None),
        # The carries that are stored on the way to a step: in most steps none, for it is there.
        (2, None),
        # The steps from one stored carry to the next. A fixed number of them would be too many:
        # most of these carries are next to each other.
        (3, None),
    ]


def test_memory_is_that_of_the_lanes():
    """It is the same for ten times as many items."""

    def temporaries(items):
        return compiled(lanes(end), items).memory_analysis().temp_size_in_bytes

    assert temporaries(10 * ITEMS) <= temporaries(ITEMS) + 4096 < 6e6  # was 0.3e6 for 4096 lanes
