# SPDX-License-Identifier: MIT
"""One leaf of a call: its shape, divided by its rank into batch axes and core axes."""

import dataclasses

from rankax._declare.dims import Rank
from rankax._plan.levels import Shape


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One ranked leaf of a call.

    Attributes
    ----------
    path : str
        Its name, as the caller writes it: ``pose.rotation``.
    shape : tuple of int
    rank : int
        The declared number of core axes.
    core_shape : tuple of int
        ``shape`` without its leading batch axes.
    batch_axes : tuple of int
        The lengths of those axes.
    declared : str
        The rank as it was written; ignored in comparisons.
    is_split : bool
        Whether its rank is `rankax.SplitKey`.
    """

    path: str
    shape: Shape
    rank: int
    core_shape: Shape
    batch_axes: Shape
    declared: str = dataclasses.field(compare=False)
    is_split: bool = False


def leaf_plan(path: str, shape: Shape, rank: Rank) -> LeafPlan:
    """Divide a shape by its rank; one with too few axes has no batch axes."""
    batch = max(0, len(shape) - rank.rank)
    return LeafPlan(path, shape, rank.rank, shape[batch:], shape[:batch], str(rank), rank.is_split)
