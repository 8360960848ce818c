# SPDX-License-Identifier: MIT
"""Reductions: those that `reduce` knows by name, and others."""

from rankax.core.protocol import BY_NAME
from rankax.ext.reductions.sums import All, AnyOf, Gram, LogSumExp, Mean, Prod, Sum
from rankax.ext.reductions.winners import ArgMax, ArgMin, Max, Min

_NAMED = (Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin())
_OTHERS = (AnyOf(), All(), LogSumExp(), Gram())

BY_NAME.update({reduction.name: reduction for reduction in (*_NAMED, *_OTHERS)})
