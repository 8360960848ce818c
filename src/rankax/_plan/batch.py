# SPDX-License-Identifier: MIT
"""What one call needs, from shapes alone: the batch shape and the maps that cover it."""

import dataclasses
import math

from rankax._plan.levels import Level, Shape

__all__ = ["BatchPlan", "LeafPlan"]


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One ranked leaf of a call.

    Attributes
    ----------
    path : str
        Where it is, in the caller's words: ``pose.rotation``.
    shape : tuple of int
        As it was passed.
    rank : int
        How many core axes are declared for it.
    core_shape : tuple of int
        ``shape`` without its leading batch axes.
    batch_axes : tuple of int
        ``shape`` with those axes only.
    declared : str
        The rank as it was written; not compared, since it says the same in other words.
    """

    path: str
    shape: Shape
    rank: int
    core_shape: Shape
    batch_axes: Shape
    declared: str = dataclasses.field(compare=False)


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
    """

    kernel: str
    batch_shape: Shape
    leaves: tuple[LeafPlan, ...]
    levels: tuple[Level, ...]
    untouched: tuple[tuple[str, Shape], ...] = ()

    @property
    def evaluations(self) -> int:
        """How many items the kernel is evaluated for, which is the size of the batch."""
        return math.prod(self.batch_shape)

    @property
    def in_flight(self) -> int:
        """How many of them are evaluated at once."""
        return math.prod(level.tile for level in self.levels)

    @property
    def steps(self) -> int:
        """How many times the kernel's batched program runs, one after another."""
        return math.prod(level.steps for level in self.levels)

    def __str__(self) -> str:
        from rankax._plan.text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from rankax._plan.html import plan_html

        return plan_html(self)
