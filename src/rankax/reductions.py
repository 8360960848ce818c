# SPDX-License-Identifier: MIT
"""The reductions that `auto_vmap` and `chunked_reduce` accept as ``reduce``, besides names."""

from rankax.core.reduce.protocol import Reduction, Several
from rankax.ext.reductions.labels import ByLabel, Histogram
from rankax.ext.reductions.sums import (
    All,
    Fold,
    Gram,
    LogSumExp,
    Mean,
    Moments,
    MomentsResult,
    Prod,
    Sum,
)
from rankax.ext.reductions.sums import AnyOf as Any
from rankax.ext.reductions.winners import ArgMax, ArgMin, Best, BottomK, Max, Min, TopK, TopKResult

__all__ = [
    "All",
    "Any",
    "ArgMax",
    "ArgMin",
    "Best",
    "BottomK",
    "ByLabel",
    "Fold",
    "Gram",
    "Histogram",
    "LogSumExp",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "MomentsResult",
    "Prod",
    "Reduction",
    "Several",
    "Sum",
    "TopK",
    "TopKResult",
]

# The name that a pickle stores is the one a user can import.
for _name in __all__:
    globals()[_name].__module__ = __name__
Any.__name__ = Any.__qualname__ = "Any"
