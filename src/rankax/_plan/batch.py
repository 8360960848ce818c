# SPDX-License-Identifier: MIT
"""What one call does, from shapes alone: printed by `plan`, and carried out by the call."""

import dataclasses
import math

from rankax._plan.budget import MemoryFit
from rankax._plan.html import plan_html
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Level, Shape
from rankax._plan.text import plan_text

__all__ = ["BatchPlan"]


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """What one call of a kernel does: printed by ``print(kernel.plan(...))``.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    batch_shape : tuple of int
        What every output gains in front.
    leaves : tuple of LeafPlan
        Every leaf that has a rank, in the order of the parameters.
    levels : tuple of Level
        The nested maps, outermost first.
    untouched : tuple of (str, tuple of int)
        Path and shape of every other array that has axes: it has no rank, and goes whole to every
        item.
    memory : MemoryFit or None
        What was chosen for ``memory_limit``, and what the compiler says that it needs.
    reduced : tuple of int
        The axes of the batch shape that are reduced.
    reduce : str
        By what.
    parts : tuple of (int, int)
        The axes of the batch shape that lie on several devices, and in how many parts each of them
        is walked, side by side. The levels are those of one part.
    """

    kernel: str
    batch_shape: Shape
    leaves: tuple[LeafPlan, ...]
    levels: tuple[Level, ...]
    untouched: tuple[tuple[str, Shape], ...] = ()
    memory: MemoryFit | None = None
    reduced: tuple[int, ...] = ()
    reduce: str = ""
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def evaluations(self) -> int:
        """How many items the kernel is evaluated for, which is the size of the batch."""
        return math.prod(self.batch_shape)

    @property
    def in_flight(self) -> int:
        """How many of them are evaluated at once; of each part, where the batch lies in parts."""
        return math.prod(level.tile for level in self.levels)

    @property
    def steps(self) -> int:
        """How many times the kernel's batched program runs, one after another."""
        return math.prod(level.steps for level in self.levels)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)
