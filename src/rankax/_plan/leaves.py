# SPDX-License-Identifier: MIT
"""One array of a call, and how its rank parts its axes."""

import dataclasses

from rankax._declare.dims import Rank
from rankax._plan.levels import Shape

__all__ = ["LeafPlan", "leaf_plan"]


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
    is_split : bool
        Whether it is a key, or keys, of which each item gets its own, by `SplitKey`.
    """

    path: str
    shape: Shape
    rank: int
    core_shape: Shape
    batch_axes: Shape
    declared: str = dataclasses.field(compare=False)
    is_split: bool = False


def leaf_plan(path: str, shape: Shape, rank: Rank) -> LeafPlan:
    """Part a shape by its rank; one with too few axes has no batch axes."""
    batch = max(0, len(shape) - rank.rank)
    return LeafPlan(path, shape, rank.rank, shape[batch:], shape[:batch], str(rank), rank.is_split)
