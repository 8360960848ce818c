# SPDX-License-Identifier: MIT
"""Find the axes of a batch that devices share: by its arrays, or by the option ``devices``.

An array that exists shows its sharding; a tracer shows it only on a mesh with explicit axes, where
shardings belong to types. So inside a caller's own ``jit``, a `PartitionSpec` names the sharded
axes. Any other value of the option names the devices, and the longest axis that serves is cut.

Axes of a mesh with one device count if they are explicit, because JAX refuses to loop over them.
Axes of type ``Manual`` never count: inside `jax.shard_map`, each device maps its items as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rankax._base.arrays import is_staged
from rankax._base.words import listed, plural
from rankax._devices.parts import Parts, entry_names, type_of_axis
from rankax._devices.place import Devices, named

# JAX 0.7 has another name for the first and lacks the second: in `jit`, the caller sets the mesh.
_set_mesh: Any = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh", None)
_use_abstract_mesh: Any = getattr(jax.sharding, "use_abstract_mesh", None)


def find_parts(
    devices: Devices,
    leaves: Sequence[Any],
    axes: Sequence[Sequence[int | None]],
    shape: Sequence[int],
    where: str,
    *,
    in_chunks: bool = True,
    serves: Sequence[int] = (),
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
    in_chunks : bool, default True
        Whether a loop walks the batch, which needs each item whole on one device.
    serves : sequence of int
        The axes of the batch that may be cut, the best one first.
    """
    if devices is None and not any(map(is_spread, leaves)):
        return ()
    is_inside = devices is not None and _is_inside.get()
    if is_inside or AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return ()
    if isinstance(devices, PartitionSpec):
        return _named_parts(devices, leaves, shape, where)
    if in_chunks:
        _check_items(leaves, axes, where)
    by_axis = [
        _sharded_parts(leaves, [leaf_axes[axis] for leaf_axes in axes], axis, size, where)
        for axis, size in enumerate(shape)
    ]
    found = tuple(parts for parts in by_axis if parts is not None)
    if devices is None:
        return found
    axis = next((axis for axis in serves if shape[axis]), None)
    if devices == 1 or axis is None:
        return ()
    return _spread_parts(devices, found, leaves, axis, shape[axis], where)


_is_inside = ContextVar("rankax_is_inside_parts", default=False)


@contextlib.contextmanager
def inside(parts: tuple[Parts, ...]) -> Generator[None]:
    """Trace a kernel that devices share: the calls that it makes in turn use no other devices."""
    token = _is_inside.set(_is_inside.get() or bool(parts))
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_spread(leaf: Any) -> bool:
    """Whether an array is on a mesh of several devices, or on any mesh with explicit axes."""
    sharding = _sharding(leaf)
    if not isinstance(sharding, NamedSharding):
        return False
    return sharding.mesh.size > 1 or AxisType.Explicit in sharding.mesh.axis_types


def on_mesh(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Enter the mesh with explicit axes that arrays are on, unless a mesh is entered already.

    Without it, arrays that are made on the way (zeros, counters) would not fit those on the mesh.
    """
    mesh = _mesh(leaves) if jax.sharding.get_abstract_mesh().empty else None
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return contextlib.nullcontext()
    if is_staged():
        mesh = getattr(mesh, "abstract_mesh", mesh)
        return _use_abstract_mesh(mesh) if _use_abstract_mesh else contextlib.nullcontext()
    try:
        return _set_mesh(mesh)
    except (TypeError, ValueError):
        # An eager derivative, or `jax.vmap`, in which JAX lets only the caller set the mesh.
        return contextlib.nullcontext()


def _check_items(leaves: Sequence[Any], axes: Sequence[Sequence[int | None]], where: str) -> None:
    """Refuse items that explicit types shard; JAX's own error would name a reshape."""
    for leaf, leaf_axes in zip(leaves, axes, strict=True):
        sharding = _sharding(leaf)
        if not isinstance(sharding, NamedSharding):
            continue
        core_axes = [axis for axis in range(len(leaf.shape)) if axis not in leaf_axes]
        names = [name for axis in core_axes for name in _mesh_axes(sharding, axis)]
        explicit = tuple(n for n in names if type_of_axis(sharding.mesh, n) == AxisType.Explicit)
        if explicit:
            raise ValueError(
                f"{where}: items of one argument are sharded along the mesh axes {explicit}, but a "
                "loop over chunks needs each of them whole on a device; use jax.sharding.reshard"
            )


def _sharded_parts(
    leaves: Sequence[Any], axes: Sequence[int | None], axis: int, size: int, where: str
) -> Parts | None:
    """Return the parts of one batch axis, from the first leaf that is sharded along it evenly."""
    candidates: list[Parts] = []
    for leaf, leaf_axis in zip(leaves, axes, strict=True):
        sharding = _sharding(leaf)
        if leaf_axis is None or not isinstance(sharding, NamedSharding):
            continue
        if names := _mesh_axes(sharding, leaf_axis):
            count = math.prod(sharding.mesh.shape[name] for name in names)
            candidates.append(Parts(axis, count, names, sharding.mesh))
    first = next((parts for parts in candidates if not size % parts.count), None)
    if first is not None and first.is_explicit:
        others = [parts.names for parts in candidates if parts.names != first.names]
        if others:
            raise ValueError(
                f"{where}: one argument is sharded along the mesh axes {first.names} where it is "
                f"mapped, another along {others[0]}; use jax.sharding.reshard to shard them alike"
            )
    return first if size else None


def _spread_parts(
    devices: Any, found: tuple[Parts, ...], leaves: Sequence[Any], axis: int, size: int, where: str
) -> tuple[Parts, ...]:
    """Return one part of an axis for each device, on the mesh of the caller if there is one."""
    wanted, mesh = named(devices, where), _mesh(leaves)
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
    mesh = _mesh(leaves)
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
        names = entry_names(entry)
        if unknown := [name for name in names if name not in mesh.shape]:
            raise ValueError(
                f"{where}: devices={spec} names {unknown[0]!r}, but the mesh has the axes "
                f"{listed([repr(name) for name in mesh.shape])}"
            )
        count = math.prod(mesh.shape[name] for name in names)
        if 1 < count <= size:
            parts.append(Parts(axis, count, names, mesh))
    return tuple(parts)


def _sharding(leaf: Any) -> Any:
    """Return the sharding of an array; of a tracer, the one in its type."""
    if isinstance(leaf, core.Tracer):
        return getattr(jax.typeof(leaf), "sharding", None)
    return getattr(leaf, "sharding", None)


def _mesh(leaves: Sequence[Any]) -> Any:
    """Return the mesh that arrays are on, or else the mesh that is set; None without one."""
    shardings = [_sharding(leaf) for leaf in leaves]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if not mesh.empty), None)


def _mesh_axes(sharding: NamedSharding, axis: int) -> tuple[str, ...]:
    """Return the axes of the mesh that shard an axis of an array, as far as they count here."""
    mesh = sharding.mesh
    entry = sharding.spec[axis] if axis < len(sharding.spec) else None
    types = {name: type_of_axis(mesh, name) for name in entry_names(entry)}
    return tuple(
        name
        for name, kind in types.items()
        if kind == AxisType.Explicit or (kind == AxisType.Auto and mesh.shape[name] > 1)
    )
