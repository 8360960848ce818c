# SPDX-License-Identifier: MIT
"""Compile for an H100 on a machine that has none.

    python -m pip install -U pip && python -m pip install . --group gpu

Half a gigabyte, for Python 3.12 or newer. JAX makes devices from a description, and XLA compiles
for them to the end: what is fused, how memory is laid out, what a loop launches. Nothing runs, so
that times stay unknown. Import this before anything that imports JAX.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of each program that is too large

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

INSTALL = "no compiler for an H100: " + " ".join(__doc__.split("\n\n")[1].replace("\\", "").split())

# As `jax.devices()[0].client` describes an H100 SXM5 with 80 GB.
DESCRIPTION = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def gpus(hosts: int = 1, each: int = 1) -> Sequence[Any]:
    """Return the devices of hosts that have as many GPUs each.

    Raises
    ------
    RuntimeError
        If the packages for CUDA are not installed; it names them.
    """
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=DESCRIPTION, topology=f"1x{hosts}x{each}"
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise RuntimeError(INSTALL) from error
    return described.devices


@functools.cache
def mesh_of(hosts: int = 1, each: int = 1, kind: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of GPUs with one axis, ``"d"``."""
    return Mesh(np.array(gpus(hosts, each)), ("d",), axis_types=(kind,))


def shaped(
    *shape: int, dtype: Any = jnp.float32, mesh: Mesh | None = None, spec: Sequence[Any] = ()
) -> jax.ShapeDtypeStruct:
    """Return what an array is like that is on GPUs, by default on one.

    rankax reads the target of a call from the mesh.
    """
    sharding = NamedSharding(mesh or mesh_of(), PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(fun: Callable[..., Any], *arrays: jax.ShapeDtypeStruct) -> Any:
    """Compile a function for arrays that are like these."""
    return jax.jit(fun).lower(*arrays).compile()


def compiled_on_device(fun: Callable[..., Any], *arrays: jax.ShapeDtypeStruct) -> Any:
    """Compile a function that measures its memory, as with ``memory_limit``.

    It has to know the device, which the mesh in the type of an array does not tell.
    """
    device = gpus()[0]
    alone = SingleDeviceSharding(device)
    with jax.default_device(device):
        return compiled(fun, *(x.update(sharding=alone) for x in arrays))
