# SPDX-License-Identifier: MIT
"""A mapped axis that is spread over devices, as parts that are walked side by side.

A loop along a sharded axis would have each chunk sent to all devices. So the axis, of N items in D
contiguous parts, becomes two, of D and N / D, which moves nothing; `jax.vmap` maps the first, and
the loop walks the second: at each step, every device evaluates a chunk of its own items.

What all items share gets an axis of D, too, by a broadcast that copies nothing, for each device
has it already. Thus each device adds up its own cotangent of it, and they are summed once, behind
the loop; else they would be summed at each step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rankax._base.arrays import counted, is_staged
from rankax._base.checks import positive_int
from rankax._base.words import listed

__all__ = [
    "Parts",
    "Shards",
    "checked_shards",
    "find_parts",
    "gathered",
    "is_spread",
    "join",
    "over_parts",
    "part_shape",
]

Shards = int | PartitionSpec | None


def checked_shards(value: Any, where: str) -> Shards:
    """Return what was given as ``shards``, or say what it must be."""
    if value is None or isinstance(value, PartitionSpec):
        return value
    if isinstance(value, (str, tuple, list)):
        raise TypeError(
            f"{where}: shards must be a positive int, a jax.sharding.PartitionSpec, or None, got "
            f"{value!r}; the axes of a mesh are named by PartitionSpec"
            f"{value if isinstance(value, tuple) else f'({value!r})'}"
        )
    return positive_int(value, where, "shards")


@dataclasses.dataclass(frozen=True)
class Parts:
    """One axis of a batch in ``count`` contiguous parts, and where they lie."""

    axis: int
    count: int
    names: tuple[str, ...] = ()  # the axes of a mesh that they lie along; none where nobody knows
    mesh: Any = None

    @property
    def is_explicit(self) -> bool:
        """Whether shardings are part of types here."""
        return any(_types(self.mesh)[name] == AxisType.Explicit for name in self.names)


# Which parts there are.


def find_parts(
    shards: Shards,
    leaves: Sequence[Any],
    axes: Sequence[Sequence[int | None]],
    shape: Sequence[int],
    where: str,
    *,
    in_chunks: bool = True,
) -> tuple[Parts, ...]:
    """Return the parts of the axes of a batch, those of axes that are whole left out.

    Parameters
    ----------
    shards : int, PartitionSpec or None
        What the caller says of them; None: what can be seen.
    leaves : sequence
        Arrays, tracers or `jax.ShapeDtypeStruct`.
    axes : sequence of sequences
        For each leaf, where it has each axis of the batch.
    shape : sequence of int
        Of the batch.
    where : str
        The function that was called, for errors.
    in_chunks : bool, default True
        Whether the batch is walked in chunks, for which items must be whole.
    """
    if shards is None and not any(map(is_spread, leaves)):
        return ()
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return ()  # inside `jax.shard_map`, where each device walks its own items as it is
    if isinstance(shards, PartitionSpec):
        return _named_parts(shards, leaves, shape, where)
    if in_chunks:
        _check_items(leaves, axes, where)
    seen = [_seen(leaves, [own[b] for own in axes], b, n, where) for b, n in enumerate(shape)]
    if shards is None:
        return tuple(parts for parts in seen if parts is not None)
    return _counted_parts(shards, seen, leaves, shape, where)


def is_spread(leaf: Any) -> bool:
    """Whether an array lies on a mesh of several devices, or of one as far as types tell."""
    sharding = _sharding(leaf)
    if not isinstance(sharding, NamedSharding):
        return False
    return sharding.mesh.size > 1 or AxisType.Explicit in sharding.mesh.axis_types


def _check_items(leaves: Sequence[Any], axes: Sequence[Sequence[int | None]], where: str) -> None:
    """Refuse items that do not lie on one device, where types say so: JAX would name a reshape."""
    for leaf, own in zip(leaves, axes, strict=True):
        sharding = _sharding(leaf)
        if not isinstance(sharding, NamedSharding):
            continue
        types = _types(sharding.mesh)
        within = [axis for axis in range(len(leaf.shape)) if axis not in own]
        names = tuple(name for axis in within for name in _names(sharding, axis))
        if odd := tuple(name for name in names if types[name] == AxisType.Explicit):
            raise ValueError(
                f"{where}: items of one argument lie along the mesh axes {odd}, but a loop over "
                "chunks needs each of them whole on a device; use jax.sharding.reshard"
            )


def _seen(
    leaves: Sequence[Any], axes: Sequence[int | None], axis: int, size: int, where: str
) -> Parts | None:
    """Return how one axis of the batch lies, by the first leaf that is not whole along it."""
    found: list[Parts] = []
    for leaf, own in zip(leaves, axes, strict=True):
        sharding = _sharding(leaf)
        if own is None or not isinstance(sharding, NamedSharding):
            continue
        if names := _names(sharding, own):
            count = math.prod(sharding.mesh.shape[name] for name in names)
            found.append(Parts(axis, count, names, sharding.mesh))
    first = next((parts for parts in found if not size % parts.count), None)
    if first is not None and first.is_explicit:
        odd = [parts.names for parts in found if parts.names != first.names]
        if odd:
            raise ValueError(
                f"{where}: one argument lies along the mesh axes {first.names} where it is mapped, "
                f"another along {odd[0]}; use jax.sharding.reshard, so that they lie alike"
            )
    return first if size else None


def _counted_parts(
    count: int, seen: Sequence[Parts | None], leaves: Sequence[Any], shape: Any, where: str
) -> tuple[Parts, ...]:
    if count == 1:
        return ()
    if not shape or shape[0] % count:
        there = f"are {shape[0]} items" if shape else "is no batch axis"
        raise ValueError(
            f"{where}: shards={count} needs a batch whose axis 0 it divides, but there {there}"
        )
    if not shape[0]:
        return ()
    if seen[0] is not None and seen[0].count == count:
        return (seen[0],)
    mesh = _mesh(leaves)
    sizes = {} if mesh is None else {name: n for name, n in mesh.shape.items() if n > 1}
    if list(sizes.values()) == [count]:  # it can only be this one
        return (Parts(0, count, tuple(sizes), mesh),)
    return (Parts(0, count),)


def _named_parts(
    spec: PartitionSpec, leaves: Sequence[Any], shape: Sequence[int], where: str
) -> tuple[Parts, ...]:
    mesh = _mesh(leaves)
    if mesh is None:
        raise ValueError(
            f"{where}: shards={spec} names axes of a mesh, but no argument lies on one here; give "
            "the number of parts, or call it with jax.set_mesh(mesh)"
        )
    if len(spec) > len(shape):
        raise ValueError(
            f"{where}: shards={spec} has {len(spec)} entries for the batch shape {tuple(shape)}"
        )
    found: list[Parts] = []
    for axis, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        names = _entry_names(entry)
        if unknown := [name for name in names if name not in mesh.shape]:
            raise ValueError(
                f"{where}: shards={spec} names {unknown[0]!r}, but the mesh has the axes "
                f"{listed([repr(name) for name in mesh.shape])}"
            )
        count = math.prod(mesh.shape[name] for name in names)
        if size % count:
            raise ValueError(
                f"{where}: shards={spec} cuts axis {axis} of the batch in {count} parts, where "
                f"there are {size} items, which {count} does not divide"
            )
        if count > 1 and size:
            found.append(Parts(axis, count, names, mesh))
    return tuple(found)


def _sharding(leaf: Any) -> Any:
    """Return how an array lies, as far as it can be seen: of a tracer its type may say so."""
    if isinstance(leaf, core.Tracer):
        return getattr(jax.typeof(leaf), "sharding", None)
    return getattr(leaf, "sharding", None)


def _mesh(leaves: Sequence[Any]) -> Any:
    """Return the mesh on which arrays lie; None where there is none."""
    shardings = [_sharding(leaf) for leaf in leaves]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if not mesh.empty), None)


def _entry_names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _names(sharding: NamedSharding, axis: int) -> tuple[str, ...]:
    """Return the axes of the mesh that an axis of an array lies along."""
    types = _types(sharding.mesh)
    entry = sharding.spec[axis] if axis < len(sharding.spec) else None
    # An explicit axis counts even with one device, for a loop along it is refused all the same.
    return tuple(
        name
        for name in _entry_names(entry)
        if types[name] == AxisType.Explicit
        or (types[name] == AxisType.Auto and sharding.mesh.shape[name] > 1)
    )


def _types(mesh: Any) -> dict[str, Any]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


# How arrays are cut into parts, and put together again.


def part_shape(shape: Sequence[int], axis: int, parts: Parts) -> tuple[int, ...]:
    """Return the shape of one part of an array that has the parts along ``axis``."""
    return (*shape[:axis], shape[axis] // parts.count, *shape[axis + 1 :])


def over_parts(
    fun: Callable[[list[Any], list[Any], Any], list[Any]],
    parts: Parts,
    shared: Sequence[Any],
    leaves: Sequence[Any],
    axes: Sequence[int | None],
) -> list[Any]:
    """Call ``fun(shared, leaves, number)`` for all parts at once, each with its number.

    Each leaf is given its own part along its axis; what is ``shared``, or has no axis, is given
    whole. What comes back has the parts on axis 0.
    """
    arrays = [jnp.asarray(x) for x in (*shared, *leaves)]
    places = [None] * len(shared) + list(axes)
    in_axes: list[int | None] = []
    cut: list[Any] = []
    for x, axis in zip(arrays, places, strict=True):
        if axis is not None:
            in_axes.append(axis)
            cut.append(_split(x, axis, parts))
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            in_axes.append(0)
            cut.append(_spread(x, parts))
        else:  # it has no cotangent
            in_axes.append(None)
            cut.append(x)
    count = len(shared)
    numbers = _split(counted(parts.count, jnp.uint32), 0, parts)

    def of_part(numbers: Any, *arrays: Any) -> list[Any]:
        number = lax.squeeze(numbers, (0,))
        return fun(list(arrays[:count]), list(arrays[count:]), number)

    mapped = jax.vmap(of_part, in_axes=(0, *in_axes), axis_size=parts.count)
    return mapped(numbers, *cut)


def join(out: jax.Array, axis: int, parts: Parts) -> jax.Array:
    """Put the parts on axis 0 of ``out`` together along ``axis``; it lies as `jax.vmap` left it."""
    out = jnp.moveaxis(out, 0, axis)
    shape = (*out.shape[:axis], out.shape[axis] * out.shape[axis + 1], *out.shape[axis + 2 :])
    if parts.is_explicit:
        spec = _spec(out)
        del spec[axis + 1]
        return lax.reshape(out, shape, out_sharding=_typed(out, spec))
    return _placed(lax.reshape(out, shape), parts, {axis: parts.names})


def gathered(arrays: Sequence[jax.Array], parts: Parts) -> list[jax.Array]:
    """Return arrays that have the parts on axis 0 with all of them on each device.

    Those of one dtype are sent as one.
    """
    found = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        own = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = [lax.reshape(arrays[i], (parts.count, arrays[i].size // parts.count)) for i in own]
        whole = lax.concatenate(flat, 1) if len(flat) > 1 else flat[0]
        if parts.is_explicit:
            whole = _resharded(whole, [None, *_spec(whole)[1:]], parts)
        else:
            whole = _placed(whole, parts, {0: None})
        start = 0
        for i, x in zip(own, flat, strict=True):
            stop = start + x.shape[1]
            piece = lax.slice_in_dim(whole, start, stop, axis=1)
            found[i] = lax.reshape(piece, arrays[i].shape)
            start = stop
    return found


def _split(x: jax.Array, axis: int, parts: Parts) -> jax.Array:
    each = x.shape[axis] // parts.count
    shape = (*x.shape[:axis], parts.count, each, *x.shape[axis + 1 :])
    if parts.is_explicit:
        spec = _without(_spec(x), parts.names)
        spec[axis] = parts.names
        x = _resharded(x, spec, parts)
        spec.insert(axis + 1, None)
        return lax.reshape(x, shape, out_sharding=_typed(x, spec))
    return _placed(lax.reshape(x, shape), parts, {axis: parts.names, axis + 1: None})


def _spread(x: jax.Array, parts: Parts) -> jax.Array:
    shape, behind = (parts.count, *x.shape), tuple(range(1, x.ndim + 1))
    if parts.is_explicit:
        spec = _without(_spec(x), parts.names)
        x = _resharded(x, spec, parts)
        to = _typed(x, [parts.names, *spec])
        return lax.broadcast_in_dim(x, shape, behind, out_sharding=to)
    return _placed(lax.broadcast_in_dim(x, shape, behind), parts, {0: parts.names})


def _placed(x: jax.Array, parts: Parts, entries: Mapping[int, Any]) -> jax.Array:
    """Tell XLA how some axes lie; all else is left to it."""
    if not parts.names or not is_staged():  # eager arrays lie where they are
        return x
    spec = [entries.get(axis, PartitionSpec.UNCONSTRAINED) for axis in range(x.ndim)]
    return lax.with_sharding_constraint(x, NamedSharding(parts.mesh, PartitionSpec(*spec)))


# Where axes of a mesh are explicit, an array's type says how it lies.


def _spec(x: jax.Array) -> list[Any]:
    spec = jax.typeof(x).sharding.spec
    return [*spec, *[None] * (x.ndim - len(spec))]


def _without(spec: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Leave out axes of the mesh that the parts lie along: no axis can be used twice."""
    return [
        tuple(name for name in _entry_names(entry) if name not in names) or None for entry in spec
    ]


def _typed(x: jax.Array, spec: Sequence[Any]) -> NamedSharding:
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def _resharded(x: jax.Array, spec: Sequence[Any], parts: Parts) -> jax.Array:
    """Give an array another type; nothing is sent where it lay whole on each device."""
    mesh = jax.typeof(x).sharding.mesh
    mesh = getattr(parts.mesh, "abstract_mesh", parts.mesh) if mesh.empty else mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
