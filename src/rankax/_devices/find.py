# SPDX-License-Identifier: MIT
"""Find the axes of a batch that devices share: by its arrays, or by the option ``devices``.

An array that exists shows its sharding; a tracer shows it only on a mesh with explicit axes, where
shardings belong to types. So inside a caller's own ``jit``, a `PartitionSpec` names the sharded
axes. Any other value of the option names the devices, and the longest axis that serves is cut.

Axes of a mesh with one device count if they are explicit, because JAX refuses to loop over them.
Axes of type ``Manual`` never count: inside `jax.shard_map`, each device maps its items as they are.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rankax._base.words import listed, plural
from rankax._devices.mesh import can_leave_mesh, is_inside, mesh_of, sharding_of
from rankax._devices.parts import Parts
from rankax._devices.place import Devices, named


def find_parts(
    devices: Devices,
    leaves: Sequence[Any],
    axes: Sequence[Sequence[int | None]],
    shape: Sequence[int],
    where: str,
    serves: Sequence[int],
) -> tuple[Parts, ...]:
    """Return the parts of each batch axis that devices share.

    Parameters
    ----------
    devices : int, str, tuple of devices, PartitionSpec or None
        The option; None takes the shardings of the leaves.
    leaves : sequence
        Arrays, tracers or `jax.ShapeDtypeStruct`.
    axes : sequence of sequences
        For each leaf, its axis for each axis of the batch.
    shape : sequence of int
        The batch shape.
    where : str
        The called function, for errors.
    serves : sequence of int
        The axes of the batch that may be cut, the best one first.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types or not can_leave_mesh():
        return ()
    if devices is not None and is_inside():
        return ()
    if isinstance(devices, PartitionSpec):
        return _named_parts(devices, leaves, shape, where)
    found: tuple[Parts, ...] = ()
    for axis, size in enumerate(shape):
        parts = _sharded_parts(leaves, axes, axis, size)
        if parts is not None and not any(set(parts.names) & set(each.names) for each in found):
            found = (*found, parts)
    if devices is None:
        return found
    axis = next((axis for axis in serves if shape[axis]), None)
    if axis is None:
        return ()
    return _spread_parts(devices, found, leaves, axis, shape[axis], where)


def _sharded_parts(
    leaves: Sequence[Any], axes: Sequence[Sequence[int | None]], axis: int, size: int
) -> Parts | None:
    """Return the parts of one batch axis, from the first leaf that is sharded along it evenly."""
    for leaf, own in zip(leaves, axes, strict=True):
        sharding, leaf_axis = sharding_of(leaf), own[axis]
        if leaf_axis is None or not isinstance(sharding, NamedSharding):
            continue
        names = _mesh_axes(sharding, leaf_axis)
        count = math.prod(sharding.mesh.shape[name] for name in names)
        if names and size and not size % count:
            return Parts(axis, count, names, sharding.mesh)
    return None


def _spread_parts(
    devices: Any, found: tuple[Parts, ...], leaves: Sequence[Any], axis: int, size: int, where: str
) -> tuple[Parts, ...]:
    """Return one part of an axis for each device, on the mesh of the caller if there is one."""
    wanted, mesh = named(devices, where), mesh_of(leaves)
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
            f"{where}: devices={devices!r} names {plural(len(wanted), 'device')}, but the call is "
            f"on a mesh of {mesh.size} or of others; leave out devices= to use it"
        )
    return (Parts(axis, mesh.size, mesh.axis_names, mesh),) if size >= mesh.size else ()


def _named_parts(
    spec: PartitionSpec, leaves: Sequence[Any], shape: Sequence[int], where: str
) -> tuple[Parts, ...]:
    """Return the parts that a spec names, one entry for each axis of the batch."""
    mesh = mesh_of(leaves)
    if mesh is None:
        raise ValueError(
            f"{where}: devices={spec} names axes of a mesh, but no argument is on one here; give "
            "the number of devices, or call it with jax.set_mesh(mesh)"
        )
    if len(spec) > len(shape):
        raise ValueError(
            f"{where}: devices={spec} has {len(spec)} entries for the batch shape {tuple(shape)}"
        )
    parts: list[Parts] = []
    for axis, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        names = _entry_names(entry)
        if unknown := [name for name in names if name not in mesh.shape]:
            raise ValueError(
                f"{where}: devices={spec} names {unknown[0]!r}, but the mesh has the axes "
                f"{listed([repr(name) for name in mesh.shape])}"
            )
        count = math.prod(mesh.shape[name] for name in names)
        if 1 < count <= size:
            parts.append(Parts(axis, count, names, mesh))
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
