# SPDX-License-Identifier: MIT
"""What can be given as ``reduce`` to `auto_vmap` and `chunked_reduce`, besides a name."""

from rankax._map.fold import Fold as Fold
from rankax._map.reduction import Reduction as Reduction
from rankax._map.sums import All as All
from rankax._map.sums import AnyOf as Any
from rankax._map.sums import LogSumExp as LogSumExp
from rankax._map.sums import Mean as Mean
from rankax._map.sums import Moments as Moments
from rankax._map.sums import MomentsResult as MomentsResult
from rankax._map.sums import Prod as Prod
from rankax._map.sums import Sum as Sum
from rankax._map.winners import ArgMax as ArgMax
from rankax._map.winners import ArgMin as ArgMin
from rankax._map.winners import Best as Best
from rankax._map.winners import Max as Max
from rankax._map.winners import Min as Min
from rankax._map.winners import TopK as TopK
from rankax._map.winners import TopKResult as TopKResult

__all__ = [
    "All",
    "Any",
    "ArgMax",
    "ArgMin",
    "Best",
    "Fold",
    "LogSumExp",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "MomentsResult",
    "Prod",
    "Reduction",
    "Sum",
    "TopK",
    "TopKResult",
]

# The name that a pickle stores is the one a user can import.
for _name in __all__:
    globals()[_name].__module__ = __name__
Any.__name__ = Any.__qualname__ = "Any"
