# SPDX-License-Identifier: MIT
"""How devices take part in a call: each has a part of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

from rankax._options import Options
from rankax.call.base import Call
from rankax.core.base.arrays import is_spread
from rankax.core.plan.schedule import Plan
from rankax.core.protocols import Layout, Placement
from rankax.core.trace.programs import ItemProgram, has_order
from rankax.ext.devices.mesh import Parts, inside
from rankax.ext.devices.over_parts import SharedLayout
from rankax.ext.devices.place import committed_elsewhere, find_parts, put


@dataclasses.dataclass(frozen=True)
class OnDevices(Placement):
    """A batch that devices share."""

    parts: tuple[Parts, ...]

    @property
    def key(self) -> Hashable:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts

    def __bool__(self) -> bool:
        return True

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        return inside(self.parts)

    def around(self, site: str) -> contextlib.AbstractContextManager[Any]:
        return committed_elsewhere(site, self.parts)

    def put(self, values: Sequence[Any], bound: Call, options: Options) -> list[Any]:
        axes = cut_axes(bound, options, self.parts)
        return [put(x, axes.get(i), self.parts[0]) for i, x in enumerate(values)]

    def layout(self, whole: Plan, item: ItemProgram | None) -> Layout:
        plan = whole
        if item is not None and has_order(item.closed):
            return Layout(plan.batch_shape)
        return SharedLayout(plan.batch_shape, self.parts, whole.batch_axes, plan.reduced)


def devices_of(bound: Call, options: Options) -> OnDevices | None:
    """Return the devices that share the batch of a call, if several do."""
    parts = parts_of(bound, options)
    return OnDevices(parts) if parts else None


def parts_of(bound: Call, options: Options) -> tuple[Parts, ...]:
    """Return the parts of the batch of a call; none if `jax.vmap` will do."""
    devices = options.devices
    if devices is False or (devices is None and not any(map(is_spread, bound.leaves))):
        return ()
    whole = bound.plan_whole(options)
    leaves = [bound.leaves[i] for i in whole.mapped]
    shape, reduced = whole.batch_shape, whole.reduced
    is_ordered = options.reduce is not None and options.reduce.are_ordered

    def is_mergeable(axis: int) -> bool:
        # Parts that are merged in order are consecutive items of a row.
        before = math.prod(shape[other] for other in reduced if other < axis)
        return not is_ordered or axis not in reduced or before == 1

    serves = list(filter(is_mergeable, range(len(shape))))
    # The longest axis first; of equals one that is kept, because its parts need not be merged.
    serves.sort(key=lambda axis: (-shape[axis], axis in reduced))
    parts = find_parts(devices, leaves, whole.batch_axes, shape, bound.site, serves)
    odd = [each.axis for each in parts if each.axis not in serves]
    if odd and devices is not None:
        raise ValueError(
            f"{bound.site}: {options.reduce} takes items in order, so only the first of the "
            f"reduced axes {reduced} can be sharded, but axis {odd[0]} is"
        )
    return () if 0 in shape else tuple(each for each in parts if each.axis in serves)


def cut_axes(bound: Call, options: Options, parts: tuple[Parts, ...]) -> dict[int, int | None]:
    """Return the axis of each leaf that the devices divide; a compiled call cuts all others."""
    whole = bound.plan_whole(options)
    axis = parts[0].axis
    if whole.batch_shape[axis] % parts[0].count:
        return {}
    return {i: axes[axis] for i, axes in zip(whole.mapped, whole.batch_axes, strict=True)}
