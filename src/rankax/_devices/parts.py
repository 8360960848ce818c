# SPDX-License-Identifier: MIT
"""A batch axis, cut into one contiguous part for each device.

With ``f`` the nest of loops for one part, an axis of N items over D devices is mapped as::

    jax.vmap(f)(x.reshape(D, N // D, ...)).reshape(N, ...)

A loop along a sharded axis would send each chunk to all devices. The reshape sends nothing, and at
each step of the loop inside `jax.vmap` every device evaluates a chunk of its own items.

* Arrays that all items share are broadcast to ``(D, ...)`` first, which copies nothing because
  each device has them already. So each device sums its own cotangent of them, and the sums are
  added once, after the loop. Without it, devices would exchange cotangents at each step.
* Inside a part, the loop reads every input by index. On its device a part has a leading axis of
  length 1, with which XLA would copy a stack of chunks.
* On meshes with explicit axes, types carry the shardings, so reshapes and broadcasts name them
  here. With `jax.sharding.auto_axes` or `jax.shard_map` around the loops they would not have to,
  but inside those a kernel cannot close over an array of the mesh (JAX 0.7 to 0.12).

* Where D does not divide N, the first ``N % D`` parts have one item more than the others, which
  begin one item earlier instead: so all parts are equally long, and D - ``N % D`` items are
  evaluated twice. `join` takes each once; `reduce_parts` merges the first item of a part into its
  state only where it counts. JAX cannot store such an axis in equal shards, so each device has all
  of an array that is cut so inside a program, and each gets all outputs: one all-gather of those,
  one of the cotangents in a reverse pass. Outputs on the first device alone would be smaller, but
  JAX refuses to combine them with results that are on all devices, such as a sum.

``tests/devices/test_devices.py`` checks what compiled programs send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rankax._base.arrays import counted, is_staged


@dataclasses.dataclass(frozen=True)
class Parts:
    """One axis of a batch, cut into ``count`` contiguous parts, one for each device.

    The parts are equally long. Each except the first ``length % count`` repeats one item of the
    part before, unless ``count`` divides the length.
    """

    axis: int
    count: int
    names: tuple[str, ...] = ()  # the mesh axes that shard it; empty if unknown
    mesh: Any = None
    is_alone: bool = False  # whether a loop of one device may end before those of others

    @property
    def is_explicit(self) -> bool:
        """Whether shardings are part of types here."""
        return any(type_of_axis(self.mesh, name) == AxisType.Explicit for name in self.names)

    def begin(self, length: int, number: Any) -> Any:
        """Return where the part of this number begins along an axis of ``length`` items."""
        shorter, longer = (np.asarray(n, number.dtype) for n in divmod(length, self.count))
        if not longer:
            return number * shorter
        repeats = (number >= longer).astype(number.dtype)
        return number * shorter + jnp.minimum(number, longer) - repeats


def overlapped(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return an axis of which ``count`` parts overlap as one that they divide."""
    length = x.shape[axis]
    shorter, longer = divmod(length, count)
    own = longer * (shorter + 1)  # the items of the parts that repeat none
    head, tail = (lax.slice_in_dim(x, *ends, axis=axis) for ends in ((0, own), (own, length)))
    repeated = lax.slice_in_dim(x, own - 1, length - 1, shorter, axis)
    tail = lax.concatenate([_rows(y, axis, count - longer) for y in (repeated, tail)], axis + 1)
    return lax.concatenate([head, lax.collapse(tail, axis, axis + 2)], axis)


def _rows(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Make an axis two, the first of which has length ``count``."""
    return lax.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))


def over_parts(
    fun: Callable[[list[Any], list[Any], Any], list[Any]],
    parts: Parts,
    shared: Sequence[Any],
    leaves: Sequence[Any],
    axes: Sequence[int | None],
) -> list[Any]:
    """Map ``fun(shared, leaves, number)`` over the parts, which are counted by ``number``.

    Leaves are cut along their axes; those without an axis, and all that is ``shared``, are passed
    whole. Outputs have the parts on axis 0.
    """
    arrays = [jnp.asarray(x) for x in (*shared, *leaves)]
    numbers = _split(counted(parts.count, jnp.uint32), 0, parts)
    inputs: list[Any] = [numbers]
    in_axes: list[int | None] = [0]
    for i, (x, axis) in enumerate(zip(arrays, [*[None] * len(shared), *axes], strict=True)):
        # The traced kernel has fixed types for what it closes over, with or without the mesh.
        is_fixed = parts.is_explicit and i < len(shared) and jax.typeof(x).sharding.mesh.empty
        if axis is not None:
            inputs.append(_split(x, axis, parts))
            in_axes.append(axis)
        elif jnp.issubdtype(x.dtype, jnp.inexact) and not is_fixed:
            inputs.append(_spread(x, parts))
            in_axes.append(0)
        else:  # integers have no cotangent
            inputs.append(x)
            in_axes.append(None)

    def on_part(numbers: Any, *arrays: Any) -> list[Any]:
        number = lax.squeeze(numbers, (0,))
        return fun(list(arrays[: len(shared)]), list(arrays[len(shared) :]), number)

    if parts.is_alone:
        return _each_alone(on_part, in_axes, parts)(*inputs)
    return jax.vmap(on_part, in_axes=tuple(in_axes), axis_size=parts.count)(*inputs)


def _each_alone(
    on_part: Callable[..., list[Any]], in_axes: Sequence[int | None], parts: Parts
) -> Callable[..., list[Any]]:
    """Map over the parts as `jax.vmap` does, but a `while_loop` of one device asks no other."""

    def on_device(*arrays: Any) -> list[Any]:
        pairs = zip(arrays, in_axes, strict=True)
        outs = on_part(*(x if axis is None else lax.squeeze(x, (axis,)) for x, axis in pairs))
        return [lax.expand_dims(out, (0,)) for out in outs]

    specs = [
        PartitionSpec() if i is None else PartitionSpec(*[None] * i, parts.names) for i in in_axes
    ]
    return jax.shard_map(
        on_device,
        mesh=parts.mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(parts.names),
        axis_names=set(parts.names),
        check_vma=False,
    )


def join(out: jax.Array, axis: int, length: int, parts: Parts) -> jax.Array:
    """Join the parts on axis 0 of ``out`` along ``axis``, sharded as with `jax.vmap`.

    If they overlap, each device gets the ``length`` items.
    """
    out = jnp.moveaxis(out, 0, axis)
    if longer := length % parts.count:
        out = _on_each(out, parts)
        head, tail = (lax.slice_in_dim(out, *e, axis=axis) for e in ((0, longer), (longer, None)))
        tail = lax.slice_in_dim(tail, 1, None, axis=axis + 1)
        return lax.concatenate([lax.collapse(x, axis, axis + 2) for x in (head, tail)], axis)
    shape = (*out.shape[:axis], out.shape[axis] * out.shape[axis + 1], *out.shape[axis + 2 :])
    if parts.is_explicit:
        spec = _spec(out)
        del spec[axis + 1]
        return lax.reshape(out, shape, out_sharding=_typed(out, spec))
    return _constrained(lax.reshape(out, shape), parts, {axis: parts.names})


def gathered(arrays: Sequence[jax.Array], parts: Parts) -> list[jax.Array]:
    """Send arrays that have the parts on axis 0 to all devices, those of one dtype as one array."""
    outs = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        positions = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = [
            lax.reshape(arrays[i], (parts.count, arrays[i].size // parts.count)) for i in positions
        ]
        whole = lax.concatenate(flat, 1) if len(flat) > 1 else flat[0]
        if parts.is_explicit:
            whole = _resharded(whole, [None, *_spec(whole)[1:]], parts)
        else:
            whole = _constrained(whole, parts, {0: None})
        start = 0
        for i, x in zip(positions, flat, strict=True):
            stop = start + x.shape[1]
            piece = lax.slice_in_dim(whole, start, stop, axis=1)
            outs[i] = lax.reshape(piece, arrays[i].shape)
            start = stop
    return outs


def _split(x: jax.Array, axis: int, parts: Parts) -> jax.Array:
    """Make an axis two: the parts, and the items of one part."""
    if x.shape[axis] % parts.count:
        x = _on_each(overlapped(_on_each(x, parts), axis, parts.count), parts)
    each = x.shape[axis] // parts.count
    shape = (*x.shape[:axis], parts.count, each, *x.shape[axis + 1 :])
    if parts.is_explicit:
        spec = _without(_spec(x), parts.names)
        spec[axis] = parts.names
        x = _resharded(x, spec, parts)
        spec.insert(axis + 1, None)
        return lax.reshape(x, shape, out_sharding=_typed(x, spec))
    return _constrained(lax.reshape(x, shape), parts, {axis: parts.names, axis + 1: None})


def _spread(x: jax.Array, parts: Parts) -> jax.Array:
    """Broadcast an array to all parts, on a new axis 0."""
    shape, axes = (parts.count, *x.shape), tuple(range(1, x.ndim + 1))
    if parts.is_explicit:
        spec = _without(_spec(x), parts.names)
        x = _resharded(x, spec, parts)
        sharding = _typed(x, [parts.names, *spec])
        return lax.broadcast_in_dim(x, shape, axes, out_sharding=sharding)
    return _constrained(lax.broadcast_in_dim(x, shape, axes), parts, {0: parts.names})


def _on_each(x: jax.Array, parts: Parts) -> jax.Array:
    """Give each device all of an array."""
    if parts.is_explicit:
        return _resharded(x, _without(_spec(x), parts.names), parts)
    return _constrained(x, parts, dict.fromkeys(range(x.ndim)))


# On a mesh with automatic axes, constraints pass the shardings to XLA.


def _constrained(x: jax.Array, parts: Parts, entries: Mapping[int, Any]) -> jax.Array:
    """Constrain the sharding of some axes and leave the others to XLA."""
    if not parts.names or not is_staged():  # the sharding of an eager array is settled
        return x
    spec = [entries.get(axis, PartitionSpec.UNCONSTRAINED) for axis in range(x.ndim)]
    return lax.with_sharding_constraint(x, NamedSharding(parts.mesh, PartitionSpec(*spec)))


# On a mesh with explicit axes, the sharding is in the type.


def _spec(x: jax.Array) -> list[Any]:
    spec = jax.typeof(x).sharding.spec
    return [*spec, *[None] * (x.ndim - len(spec))]


def _without(spec: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Remove mesh axes from a spec, because no spec may use one twice."""
    return [
        tuple(name for name in entry_names(entry) if name not in names) or None for entry in spec
    ]


def _typed(x: jax.Array, spec: Sequence[Any]) -> NamedSharding:
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def _resharded(x: jax.Array, spec: Sequence[Any], parts: Parts) -> jax.Array:
    """Change the sharding of an array; nothing is sent if each device had it whole."""
    mesh = jax.typeof(x).sharding.mesh
    mesh = getattr(parts.mesh, "abstract_mesh", parts.mesh) if mesh.empty else mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def entry_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def type_of_axis(mesh: Any, name: str) -> AxisType:
    """Return whether a mesh axis is automatic, explicit or manual."""
    return mesh.axis_types[mesh.axis_names.index(name)]
