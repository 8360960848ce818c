# SPDX-License-Identifier: MIT
"""The reductions that `auto_vmap` and `chunked_reduce` accept as ``reduce``, besides names."""

from rankax._reduce.fold import Fold as Fold
from rankax._reduce.gram import Gram as Gram
from rankax._reduce.protocol import Reduction as Reduction
from rankax._reduce.protocol import Several as Several
from rankax._reduce.sums import All as All
from rankax._reduce.sums import AnyOf as Any
from rankax._reduce.sums import LogSumExp as LogSumExp
from rankax._reduce.sums import Mean as Mean
from rankax._reduce.sums import Moments as Moments
from rankax._reduce.sums import MomentsResult as MomentsResult
from rankax._reduce.sums import Prod as Prod
from rankax._reduce.sums import Sum as Sum
from rankax._reduce.winners import ArgMax as ArgMax
from rankax._reduce.winners import ArgMin as ArgMin
from rankax._reduce.winners import Best as Best
from rankax._reduce.winners import Max as Max
from rankax._reduce.winners import Min as Min
from rankax._reduce.winners import TopK as TopK
from rankax._reduce.winners import TopKResult as TopKResult

__all__ = [
    "All",
    "Any",
    "ArgMax",
    "ArgMin",
    "Best",
    "Fold",
    "Gram",
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
