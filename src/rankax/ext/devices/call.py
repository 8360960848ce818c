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

    def put(self, values: Sequence[Any], call: Call, options: Options) -> list[Any]:
        whole, parts = call.plan_whole(options), self.parts[0]
        # Its program cuts the axes that the devices do not divide.
        is_cut = {i for i in whole.mapped if not parts.longer}
        axes = {i: own[parts.axis] for i, own in zip(whole.mapped, whole.batch_axes, strict=True)}
        return [put(x, axes[i] if i in is_cut else None, parts) for i, x in enumerate(values)]

    def layout(self, whole: Plan, item: ItemProgram | None) -> Layout:
        if item is not None and has_order(item.closed):
            return Layout(whole.batch_shape)
        return SharedLayout(self.parts, whole)


def devices_of(call: Call, options: Options) -> OnDevices | None:
    """Return the devices that share the batch of a call, if several do."""
    devices = options.devices
    if devices is False or (devices is None and not any(map(is_spread, call.leaves))):
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
