# SPDX-License-Identifier: MIT
"""The axes of a batch that devices share, and the arrays that are put there.

Shared axes are found by the arrays of a call, or by the option ``devices``. An array that exists
shows its sharding; a tracer shows it only on a mesh with explicit axes, where shardings belong to
types. So inside a caller's own ``jit``, a `PartitionSpec` names the sharded axes. Any other value
of the option names the devices, and the longest axis that serves is cut.

Explicit axes of a mesh count even with one device, because JAX refuses to loop over them.
Axes of type ``Manual`` never count: inside `jax.shard_map`, each device maps its items as they are.

A call over devices of its own choice puts its inputs there first: one copy, in which each device
gets its part of what is mapped, and all of what is shared. Arrays that are there already are not
copied. A tracer cannot be put: its program is compiled for these devices, and JAX moves its inputs
there unless the caller has committed them to others (`committed_elsewhere`).
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rankax.core.base.arrays import is_staged, mesh_of, sharding_of
from rankax.core.base.messages import caller_level, listed, plural, positive_int
from rankax.core.plan.schedule import Plan, is_known
from rankax.core.trace.programs import ItemProgram
from rankax.ext.devices.mesh import Parts, is_inside
from rankax.ext.equations import LAPACK, operations

Devices = int | str | tuple[Any, ...] | PartitionSpec | None
DevicesOption = int | str | Sequence[Any] | PartitionSpec | None

# With as many CPU devices as threads, LAPACK waits for a thread that waits for it.
_HANGS = (0, 10) <= jax.__version_info__ < (0, 11)


def checked_devices(value: Any, site: str) -> Devices:
    """Return a valid value of the option ``devices``, or raise."""
    is_name = isinstance(value, str)
    if value is None or value is False or isinstance(value, PartitionSpec):
        return value
    if is_name and value == "all":
        return value
    if isinstance(value, (int, np.integer)):
        return positive_int(value, site, "devices")
    listed = [] if is_name or not isinstance(value, Iterable) else np.ravel(np.array(value, object))
    if len(listed) and all(isinstance(device, jax.Device) for device in listed):
        if len({*listed}) < len(listed):
            raise ValueError(f"{site}: devices names a device twice, got {value!r}")
        return tuple(listed)
    raise TypeError(
        f"{site}: devices must be 'all', a positive int, a sequence of jax.Device, a "
        f"jax.sharding.PartitionSpec, False, or None, got {value!r}"
        + (_hint(value) if is_name else "")
    )


def _hint(name: str) -> str:
    if name.lower() in ("cpu", "gpu", "tpu", "cuda", "rocm"):
        return f"; for all of this kind, pass 'all' or jax.devices({name.lower()!r})"
    return f"; the axes of a mesh are named by PartitionSpec({name!r})"


def named(devices: int | str | tuple[Any, ...], site: str) -> tuple[Any, ...]:
    """Return the devices that the option names, or say how to get so many."""
    if isinstance(devices, tuple):
        return devices
    local, kind = jax.local_devices(), jax.default_backend().upper()
    wanted = len(local) if devices == "all" else int(devices)
    if wanted <= len(local) and (devices == 1 or len(local) > 1 or kind != "CPU"):
        return tuple(local[:wanted])
    count = os.cpu_count() if devices == "all" else wanted
    raise ValueError(
        f"{site}: devices={devices!r}, but JAX has {plural(len(local), f'{kind} device')}; for "
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
    x = x if axis is None else parts.dealt(x, axis)
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, parts.names)
    return jax.device_put(x, NamedSharding(mesh, spec))


def sharded_like(whole: Callable[[], Any], out: Any, leaves: Sequence[Any]) -> Any:
    """Return the results of a loop with the types of a call of all items at once.

    On a mesh with explicit axes, shardings are part of types, and a loop gathers its inputs.
    """
    mesh = mesh_of(leaves)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return out

    def put(x: Any, like: Any) -> Any:
        spec = getattr(like.sharding, "spec", PartitionSpec())
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, out, jax.eval_shape(whole))


@contextlib.contextmanager
def committed_elsewhere(site: str) -> Generator[None]:
    """Say what to do where JAX refuses arrays of other devices.

    JAX has no class for this error, and the arrays, inside `jax.grad`, do not tell their devices.
    Test: ``tests/devices/test_chosen_devices.py::test_errors_of_devices``.
    """
    try:
        yield
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
        raise ValueError(
            f"{site}: inside jax.grad, jax.jvp or jax.vmap, an argument is committed to other "
            "devices than those of devices=; put it on them first, with jax.device_put"
        ) from error


def warn_of_hang(item: ItemProgram) -> None:
    """Warn of a fault of JAX 0.10: a program of several CPU devices that calls LAPACK may not end.

    Test: ``tests/upstream/test_upstream.py``.
    """
    devices, threads = jax.local_device_count(), os.environ.get("PJRT_NPROC") or os.cpu_count() or 1
    if not _HANGS or jax.default_backend() != "cpu" or not 1 < devices >= int(threads):
        return
    names = (operation.name for operation in operations(item.closed.jaxpr))
    if found := next((name for name in names if name in LAPACK), None):
        warnings.warn(
            f"{item.site}: with JAX 0.10, LAPACK (here {found}) can hang forever on {devices} "
            f"CPU devices that have {threads} threads; set the environment variable PJRT_NPROC to "
            f"{2 * devices} before JAX is first used, or use JAX 0.12",
            stacklevel=caller_level(),
        )


def find_parts(
    devices: Devices, leaves: Sequence[Any], whole: Plan, serves: Sequence[int], site: str
) -> tuple[Parts, ...]:
    """Return the parts of each batch axis that devices share.

    Parameters
    ----------
    devices : int, str, tuple of devices, PartitionSpec or None
        The option; None takes the shardings of the arrays.
    leaves : sequence
        The mapped ones: arrays, tracers or `jax.ShapeDtypeStruct`.
    whole : Plan
    serves : sequence of int
        The axes of the batch that may be cut, the best one first.
    site : str
        The called function, for errors.
    """
    is_manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    if is_manual or (devices is not None and is_inside()):
        return ()
    shape = whole.batch_shape
    if devices is not None and (unknown := next((n for n in shape if not is_known(n)), None)):
        raise ValueError(
            f"{site}: devices={devices!r} cannot divide the unknown length {unknown}; leave it "
            "out, or export a known length"
        )
    if isinstance(devices, PartitionSpec):
        return _named_parts(devices, leaves, whole, site)
    found: list[Parts] = []
    for axis, size in enumerate(shape):
        used = {name for parts in found for name in parts.names}
        pairs = zip(leaves, (own[axis] for own in whole.batch_axes), strict=True)
        parts = next(filter(None, (_sharded_parts(x, own, axis, size) for x, own in pairs)), None)
        if parts is not None and used.isdisjoint(parts.names):
            found.append(parts)
    if devices is None:
        return tuple(found)
    axis = next((axis for axis in serves if shape[axis]), None)
    if axis is None:
        return ()
    return _spread_parts(devices, tuple(found), leaves, axis, shape[axis], site)


def _sharded_parts(leaf: Any, leaf_axis: int | None, axis: int, size: int) -> Parts | None:
    """Return the parts of one batch axis if a leaf is sharded along it evenly."""
    sharding = sharding_of(leaf)
    if leaf_axis is None or not isinstance(sharding, NamedSharding):
        return None
    names = _mesh_axes(sharding, leaf_axis)
    count = math.prod(sharding.mesh.shape[name] for name in names)
    is_even = names and size and not size % count
    return Parts(axis, size, count, names, sharding.mesh) if is_even else None


def _spread_parts(
    devices: Any, found: tuple[Parts, ...], leaves: Sequence[Any], axis: int, size: int, site: str
) -> tuple[Parts, ...]:
    """Return one part of an axis for each device, on the mesh of the caller if there is one."""
    wanted, mesh = named(devices, site), mesh_of(leaves)
    known = mesh.devices.flat if isinstance(mesh, Mesh) else wanted  # an abstract mesh hides them
    is_theirs = mesh is not None and mesh.size == len(wanted) and set(known) == set(wanted)
    if is_theirs and math.prod(parts.count for parts in found) == len(wanted):
        return found
    is_unset = jax.sharding.get_abstract_mesh().empty
    if mesh is None or (is_unset and AxisType.Explicit not in mesh.axis_types):
        if len(wanted) == 1 and devices == "all":
            return ()
        own = np.asarray(wanted[:size], object)
        mesh = Mesh(own, ("rankax_devices",), axis_types=(AxisType.Auto,))
    elif not is_theirs:
        raise ValueError(
            f"{site}: devices={devices!r} names {plural(len(wanted), 'device')}, but the call is "
            f"on another mesh, of {plural(mesh.size, 'device')}; leave out devices= to use it"
        )
    return (Parts(axis, size, mesh.size, mesh.axis_names, mesh),) if size >= mesh.size else ()


def _named_parts(
    spec: PartitionSpec, leaves: Sequence[Any], whole: Plan, site: str
) -> tuple[Parts, ...]:
    """Return the parts that a spec names, one entry for each axis of the batch."""
    mesh, shape = mesh_of(leaves), whole.batch_shape
    if mesh is None:
        raise ValueError(
            f"{site}: devices={spec} names axes of a mesh, but no argument is on one here; give "
            "the number of devices, or call it with jax.set_mesh(mesh)"
        )
    if len(spec) > len(shape):
        raise ValueError(
            f"{site}: devices={spec} has {len(spec)} entries for the batch shape {shape}"
            f"{f', whose last axes are {listed(whole.names)}' if whole.names else ''}"
        )
    parts: list[Parts] = []
    for axis, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        names = _entry_names(entry)
        if unknown := [name for name in names if name not in mesh.shape]:
            raise ValueError(
                f"{site}: devices={spec} names {unknown[0]!r}, but the mesh has the axes "
                f"{listed([repr(name) for name in mesh.shape])}"
            )
        count = math.prod(mesh.shape[name] for name in names)
        if 1 < count <= size:
            parts.append(Parts(axis, size, count, names, mesh))
    return tuple(parts)


def _mesh_axes(sharding: NamedSharding, axis: int) -> tuple[str, ...]:
    """Return the axes of the mesh that shard an axis of an array, as far as they count here."""
    mesh = sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(
        name
        for name in _entry_names(sharding.spec[axis] if axis < len(sharding.spec) else None)
        if kinds[name] == AxisType.Explicit
        or (kinds[name] == AxisType.Auto and mesh.shape[name] > 1)
    )


def _entry_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
