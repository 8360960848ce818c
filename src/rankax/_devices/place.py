# SPDX-License-Identifier: MIT
"""Devices that the option ``devices`` names, and the arrays that are put there.

A call over devices of its own choice puts its inputs there first: one copy, in which each device
gets its part of what is mapped, and all of what is shared. Arrays that are there already are not
copied. A tracer cannot be put: its program is compiled for these devices, and JAX moves its inputs
there unless the caller has committed them to others (`committed_elsewhere`).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Generator, Iterable
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rankax._base.arrays import is_staged
from rankax._base.checks import positive_int
from rankax._base.functions import caller_level
from rankax._base.words import plural
from rankax._devices.parts import Parts, overlapped
from rankax._trace.item import ItemProgram
from rankax._trace.work import operations

Devices = int | str | tuple[Any, ...] | PartitionSpec | None

# With as many CPU devices as threads, LAPACK waits for a thread that waits for it.
_HANGS = (0, 10) <= jax.__version_info__ < (0, 11)
_LAPACK = {
    *("cholesky", "triangular_solve", "lu", "geqrf", "geqp3", "householder_product", "ormqr"),
    *("eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal"),
}

_overlapped = jax.jit(overlapped, static_argnums=(1, 2))


def checked_devices(value: Any, where: str) -> Devices:
    """Return a valid value of the option ``devices``, or raise."""
    is_name = isinstance(value, str)
    if value is None or value is False or isinstance(value, PartitionSpec):
        return value
    if is_name and value == "all":
        return value
    if isinstance(value, (int, np.integer)):
        return positive_int(value, where, "devices")
    listed = [] if is_name or not isinstance(value, Iterable) else np.ravel(np.array(value, object))
    if len(listed) and all(isinstance(device, jax.Device) for device in listed):
        if len({*listed}) < len(listed):
            raise ValueError(f"{where}: devices names a device twice, got {value!r}")
        return tuple(listed)
    raise TypeError(
        f"{where}: devices must be 'all', a positive int, a sequence of jax.Device, a "
        f"jax.sharding.PartitionSpec, False, or None, got {value!r}"
        + (_hint(value) if is_name else "")
    )


def _hint(name: str) -> str:
    if name.lower() in ("cpu", "gpu", "tpu", "cuda", "rocm"):
        return f"; for all of this kind, pass 'all' or jax.devices({name.lower()!r})"
    return f"; the axes of a mesh are named by PartitionSpec({name!r})"


def named(devices: int | str | tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """Return the devices that the option names, or say how to get so many."""
    if isinstance(devices, tuple):
        return devices
    local, kind = jax.local_devices(), jax.default_backend().upper()
    wanted = len(local) if devices == "all" else int(devices)
    if wanted <= len(local) and (devices == 1 or len(local) > 1 or kind != "CPU"):
        return tuple(local[:wanted])
    count = os.cpu_count() if devices == "all" else wanted
    raise ValueError(
        f"{where}: devices={devices!r}, but JAX has {plural(len(local), f'{kind} device')}; for "
        f'more CPU devices, one for each core, call jax.config.update("jax_num_cpu_devices", '
        f"{count}) before JAX is first used"
    )


def put(x: Any, axis: int | None, parts: Parts) -> Any:
    """Put an array on the devices of a mesh, unless it is there: its parts, or all of it."""
    mesh, is_traced = parts.mesh, isinstance(x, core.Tracer) or is_staged()
    if is_traced or not isinstance(mesh, Mesh) or mesh.is_multi_process:
        return x
    if AxisType.Explicit in mesh.axis_types:
        return x
    is_there = isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat)
    if is_there or not isinstance(x, (jax.Array, np.ndarray)):
        return x
    if axis is not None and x.shape[axis] % parts.count:
        x = _overlapped(x, axis, parts.count)
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, parts.names)
    return jax.device_put(x, NamedSharding(mesh, spec))


@contextlib.contextmanager
def committed_elsewhere(where: str, parts: tuple[Parts, ...]) -> Generator[None]:
    """Say what to do where JAX refuses arrays that are committed to other devices."""
    try:
        yield
    except ValueError as error:
        if not parts or "incompatible devices" not in str(error):
            raise
        raise ValueError(
            f"{where}: inside jax.grad, jax.jvp or jax.vmap, an argument is committed to other "
            "devices than those of devices=; put it on them before, by jax.device_put"
        ) from error


def warn_of_hang(item: ItemProgram) -> None:
    """Warn of a fault of JAX 0.10: a program of several CPU devices that calls LAPACK may not end.

    Test: ``tests/upstream/test_upstream.py``.
    """
    devices, threads = jax.local_device_count(), os.environ.get("PJRT_NPROC") or os.cpu_count() or 1
    if not _HANGS or jax.default_backend() != "cpu" or not 1 < devices >= int(threads):
        return
    names = (operation.name for operation in operations(item.closed.jaxpr))
    if found := next((name for name in names if name in _LAPACK), None):
        warnings.warn(
            f"{item.where}: with JAX 0.10, LAPACK (here {found}) can hang for ever on {devices} "
            f"CPU devices that have {threads} threads; set the environment variable PJRT_NPROC to "
            f"{2 * devices} before JAX is first used, or use JAX 0.12",
            stacklevel=caller_level(),
        )
