# SPDX-License-Identifier: MIT
"""How devices take part in a call: each has a part of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import core
from jax.sharding import AxisType, PartitionSpec

from rankax._options import AUTO, Options
from rankax.call.base import Call
from rankax.core.base.arrays import is_staged
from rankax.core.base.messages import caller_level, listed
from rankax.core.plan.schedule import Plan, Shape
from rankax.core.protocols import HERE, Placement
from rankax.core.trace.programs import ItemProgram, has_order
from rankax.core.walk import Nest
from rankax.ext.devices.mesh import Parts, inside, is_inside, without_mesh
from rankax.ext.devices.over_parts import over_parts, shapes_of
from rankax.ext.devices.place import committed_elsewhere, find_parts, put, warn_of_hang


@dataclasses.dataclass(frozen=True)
class OnDevices(Placement):
    """A batch that devices share."""

    parts: tuple[Parts, ...]

    def __bool__(self) -> bool:
        return True

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return math.prod(each.count for each in self.parts)

    @property
    def shown(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"devices": tuple((each.axis, each.count) for each in self.parts if each.count > 1)}

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        return inside()

    def around(self, site: str) -> contextlib.AbstractContextManager[Any]:
        return committed_elsewhere(site)

    def put(self, values: Sequence[Any], call: Call, options: Options) -> list[Any]:
        whole, parts = call.plan_whole(options), self.parts[0]
        # Its program cuts the axes that the devices do not divide.
        is_cut = {i for i in whole.mapped if not parts.longer}
        axes = {i: own[parts.axis] for i, own in zip(whole.mapped, whole.batch_axes, strict=True)}
        return [put(x, axes[i] if i in is_cut else None, parts) for i, x in enumerate(values)]

    def of_item(self, item: ItemProgram) -> Placement:
        return HERE if has_order(item.closed) else self

    def shapes(self, whole: Plan) -> list[Shape]:
        return shapes_of(whole, self.parts)

    def placed(
        self, whole: Plan, item: ItemProgram, leaves: Sequence[Any]
    ) -> tuple[ItemProgram, list[Any]]:
        parts, item = self.parts[0], without_mesh(item)
        consts = [put(x, None, parts) for x in item.closed.consts]
        pairs = zip(leaves, whole.batch_axes, strict=True)
        return item.with_constants(consts), [put(x, axes[parts.axis], parts) for x, axes in pairs]

    def walk(
        self, whole: Plan, nests: Mapping[Shape, Nest], item: ItemProgram, leaves: Sequence[Any]
    ) -> list[Any]:
        warn_of_hang(item)
        return over_parts(nests, item, leaves, whole, self.parts)


def devices_of(call: Call, options: Options) -> OnDevices | None:
    """Return the devices that share the batch of a call, if several do."""
    devices = options.devices
    if devices is False:
        return None
    whole = call.plan_whole(options)
    shape, reduced = whole.batch_shape, whole.reduced
    is_ordered = options.reduce is not None and options.reduce.are_ordered

    def is_mergeable(axis: int) -> bool:
        # Parts that are merged in order are consecutive items of a row.
        before = math.prod(shape[other] for other in reduced if other < axis)
        return not is_ordered or axis not in reduced or before == 1

    serves = list(filter(is_mergeable, range(len(shape))))
    # The longest axis first; of equals one that is kept, because its parts need not be merged.
    serves.sort(key=lambda axis: (-shape[axis], axis in reduced))
    leaves = [call.leaves[i] for i in whole.mapped]
    parts = find_parts(devices, leaves, whole, serves, call.site)
    odd = [each.axis for each in parts if each.axis not in serves]
    if odd and devices is not None:
        raise ValueError(
            f"{call.site}: {options.reduce} takes items in order, so only the first of the "
            f"reduced axes ({', '.join(whole.words[axis] for axis in reduced)}) can be sharded, "
            f"but axis {whole.words[odd[0]]} is"
        )
    parts = tuple(each for each in parts if each.axis in serves)
    return None if 0 in shape or not parts else OnDevices(parts)


def notes(place: Placement, options: Options) -> list[str]:
    """Say what a caller's own ``jit`` would hide of the shardings that a plan has found."""
    if options.devices is not None or not isinstance(place, OnDevices):
        return []
    if any(AxisType.Explicit in parts.mesh.axis_types for parts in place.parts):
        return []
    names = {parts.axis: parts.names for parts in place.parts}
    entries = map(names.get, range(max(names) + 1))
    spec = PartitionSpec(*(own[0] if own and len(own) == 1 else own for own in entries))
    return [f"inside a jax.jit of your own, which hides shardings: devices={spec}"]


def warn_of_hidden_shardings(call: Call, options: Options) -> None:
    """Warn if a caller's own ``jit`` may hide shardings, where a loop would gather the batch.

    That can be known only where a mesh is set.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [n for n, kind in kinds.items() if kind == AxisType.Auto and mesh.shape[n] > 1]
    is_traced = is_staged() and any(isinstance(x, core.Tracer) for x in call.leaves)
    if not axes or not is_traced or is_inside() or AxisType.Manual in kinds.values():
        return
    is_loop = options.memory_limit is not None or not options.lockstep or options.chunk_size == AUTO
    if is_loop or call.plan(options).has_loop:
        warnings.warn(
            f"{call.site}: inside jax.jit, rankax cannot see whether arguments are sharded over "
            f"{listed([repr(name) for name in axes])} of the mesh that is set; if the batch is, a "
            f"loop sends all of it to all devices; pass devices={PartitionSpec(axes[0])} to share "
            "it, or devices=False if it is not sharded",
            stacklevel=caller_level(),
        )
