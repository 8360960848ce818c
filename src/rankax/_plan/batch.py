# SPDX-License-Identifier: MIT
"""The plan of one call, made from shapes alone: `plan` prints it, and the call executes it."""

import dataclasses
import math

from rankax._base.words import plural
from rankax._plan.budget import MemoryFit
from rankax._plan.levels import Level, Shape
from rankax._plan.shapes import LeafPlan
from rankax._plan.show import Shown, ends_lines, untouched_line


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The plan of one call of a kernel, as ``print(kernel.plan(...))`` shows it.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    batch_shape : tuple of int
        The leading axes of every output.
    leaves : tuple of LeafPlan
        Every leaf that has a rank, in the order of the parameters.
    levels : tuple of Level
        The nested maps, outermost first.
    untouched : tuple of (str, tuple of int)
        Path and shape of every other array with axes. It has no rank, so every item gets all of it.
    memory : MemoryFit or None
        The chunk size chosen for ``memory_limit``, and the memory that it needs.
    reduced : tuple of int
        The axes of the batch shape that are reduced.
    reduce : str
        The name of the reduction.
    devices : tuple of (int, int)
        The axes of the batch shape that several devices share, and the number of devices of each.
        They work side by side; the levels are those of the part of one device.
    lanes : int or None
        With ``lockstep=False``, how many items are in flight, each of which ends by itself.
    ends : tuple of str, or None
        With ``lockstep=False``, where items part: loops whose length depends on the item, and
        expensive branches. Empty: nowhere, so they run in lockstep.
    filled : tuple of (int, int)
        With ``bucket=``, the axes of the batch shape that are filled up, and the length that each
        has in the arguments and the results.
    """

    kernel: str
    batch_shape: Shape
    leaves: tuple[LeafPlan, ...]
    levels: tuple[Level, ...]
    untouched: tuple[tuple[str, Shape], ...] = ()
    memory: MemoryFit | None = None
    reduced: tuple[int, ...] = ()
    reduce: str = ""
    devices: tuple[tuple[int, int], ...] = ()
    lanes: int | None = None
    ends: tuple[str, ...] | None = None
    filled: tuple[tuple[int, int], ...] = ()

    @property
    def evaluations(self) -> int:
        """The number of items, which is the size of the batch."""
        return math.prod(self.batch_shape)

    @property
    def in_flight(self) -> int:
        """The number of items evaluated at once, on each device if there are several."""
        return math.prod(level.tile for level in self.levels) if self.lanes is None else self.lanes

    @property
    def steps(self) -> int:
        """The number of times that the batched kernel runs, one after another.

        Where items end by themselves, the number of items that each lane evaluates on average.
        """
        if self.lanes is not None:
            return -(-self.evaluations // self.lanes)
        return math.prod(level.steps for level in self.levels)

    def __str__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> Shown:
        summary, notes = self._summary(), self._notes()
        return Shown(self.kernel, summary, self.batch_shape, self.leaves, self.levels, notes)

    def _summary(self) -> str:
        if not self.leaves or not self.batch_shape:
            lacking = "batch axes" if self.leaves else "argument with a rank"
            return f": no {lacking}, so the kernel is simply called"
        return (
            f": batch shape {self.batch_shape}, "
            f"{plural(self.evaluations, 'evaluation')}, {self.in_flight} in flight"
            f"{' on each device' if self.devices else ''}, "
            f"{'items end by themselves' if self.lanes else plural(self.steps, 'step')}"
        )

    def _items_of_part(self, axis: int, count: int) -> str:
        shorter, longer = divmod(self.batch_shape[axis], count)
        return plural(shorter, "item") if not longer else f"{shorter} or {shorter + 1} items"

    def _notes(self) -> list[str]:
        """Describe what the leaves and levels do not show, such as devices and reductions."""
        notes = [
            f"axis {axis}: {length} items, in a bucket of {self.batch_shape[axis]}"
            for axis, length in self.filled
        ]
        notes += [] if self.ends is None else ends_lines(self.ends, self.lanes)
        notes += [
            f"axis {axis}: over {count} devices, {self._items_of_part(axis, count)} on each"
            for axis, count in self.devices
        ]
        if self.reduced:
            kept = tuple(n for axis, n in enumerate(self.batch_shape) if axis not in self.reduced)
            notes.append(f"reduced by {self.reduce}, to {kept}")
        if self.memory is not None:
            notes.append(str(self.memory))
        return notes + untouched_line(self.untouched)
