# SPDX-License-Identifier: MIT
"""A batch axis, cut into one contiguous part for each device.

Where D devices do not divide N items, the first ``N % D`` parts have one item more than the others,
which begin one item earlier instead: so all parts are equally long, and D - ``N % D`` items are
evaluated twice. `join` takes each once; `over_parts` merges the first item of a part into its
state only where it counts. JAX cannot store such an axis in equal shards, so each device has all of
an array that is cut so inside a program, and each gets all outputs: one all-gather of those, one of
the cotangents in a reverse pass. Outputs on the first device alone would be smaller, but JAX
refuses to combine them with results that are on all devices, such as a sum.

``tests/devices/test_devices.py`` checks what compiled programs send.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from rankax._base.arrays import is_staged


@dataclasses.dataclass(frozen=True)
class Parts:
    """One axis of a batch, cut into ``count`` contiguous parts, one for each device.

    The parts are equally long. Each except the first ``length % count`` repeats one item of the
    part before, unless ``count`` divides the length.
    """

    axis: int
    count: int
    names: tuple[str, ...] = ()  # the mesh axes that shard it
    mesh: Any = None

    @property
    def mesh_here(self) -> Any:
        """The mesh as it is entered, whose axes may be of another type."""
        here = jax.sharding.get_abstract_mesh()
        return self.mesh if here.empty else here

    def begin(self, length: int, number: Any) -> Any:
        """Return where the part of this number begins along an axis of ``length`` items."""
        shorter, longer = (np.asarray(n, number.dtype) for n in divmod(length, self.count))
        if not longer:
            return number * shorter
        repeats = (number >= longer).astype(number.dtype)
        return number * shorter + jnp.minimum(number, longer) - repeats

    def has_first(self, length: int, begin: Any) -> Any:
        """Whether the first item of the part that begins here is not one of the part before."""
        shorter, longer = divmod(length, self.count)
        return begin < np.asarray(longer * (shorter + 1) - 1, begin.dtype)


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


def divided(x: jax.Array, axes: Sequence[int | None], all_parts: Sequence[Parts]) -> jax.Array:
    """Return an array of which the parts divide each axis; ``axes`` has those of the batch."""
    for parts in all_parts:
        axis = axes[parts.axis]
        if axis is not None and x.shape[axis] % parts.count:
            x = _on_each(
                overlapped(_on_each(x, parts.mesh_here), axis, parts.count), parts.mesh_here
            )
    return x


def join(out: jax.Array, axis: int, length: int, parts: Parts) -> jax.Array:
    """Return an axis of overlapping parts as its ``length`` items, on each device."""
    longer = length % parts.count
    if not longer:
        return out
    out = _rows(_on_each(out, parts.mesh_here), axis, parts.count)
    head, tail = (lax.slice_in_dim(out, *e, axis=axis) for e in ((0, longer), (longer, None)))
    tail = lax.slice_in_dim(tail, 1, None, axis=axis + 1)
    return lax.concatenate([lax.collapse(x, axis, axis + 2) for x in (head, tail)], axis)


def gathered(arrays: Sequence[jax.Array], mesh: Any) -> list[jax.Array]:
    """Send arrays that have the parts on axis 0 to all devices, those of one dtype as one array."""
    outs = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        positions = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = [
            lax.reshape(arrays[i], (len(arrays[i]), arrays[i].size // len(arrays[i])))
            for i in positions
        ]
        whole = _on_each(lax.concatenate(flat, 1), mesh, [0])
        stop = 0
        for i, x in zip(positions, flat, strict=True):
            start, stop = stop, stop + x.shape[1]
            piece = lax.slice_in_dim(whole, start, stop, axis=1)
            outs[i] = lax.reshape(piece, arrays[i].shape)
    return outs


def _on_each(x: jax.Array, mesh: Any, axes: Sequence[int] | None = None) -> jax.Array:
    """Give each device all of an array along these axes, by default all; XLA settles the others."""
    if not is_staged():  # the sharding of an eager array is settled
        return x
    axes = range(x.ndim) if axes is None else axes
    spec = [None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(x.ndim)]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
