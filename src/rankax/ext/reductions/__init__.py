# SPDX-License-Identifier: MIT
"""Reductions: those that `reduce` knows by name, and others."""

from rankax.core.hooks import HINTS
from rankax.core.reduce.run import BY_NAME
from rankax.ext.reductions.sums import All, AnyOf, Gram, LogSumExp, Mean, Prod, Sum
from rankax.ext.reductions.winners import ArgMax, ArgMin, Max, Min

_NAMED = (Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin())
_OTHERS = (AnyOf(), All(), LogSumExp(), Gram())

BY_NAME.update({reduction.name: reduction for reduction in (*_NAMED, *_OTHERS)})
_NAN = "to leave NaN out, return jnp.isfinite(value) beside the value, and name it with where="
HINTS.update(
    average="did you mean 'mean'?",
    median="a median needs all outputs at once, so it cannot be folded; keep them, without reduce= "
    "or with None for this output, and call jnp.median",
    **dict.fromkeys(("nanmax", "nanmean", "nanmin", "nansum"), _NAN),
    **dict.fromkeys(("std", "var"), "use rankax.reductions.Moments(), which has the variance"),
)
