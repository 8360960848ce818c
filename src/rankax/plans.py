# SPDX-License-Identifier: MIT
"""The types of what the methods of kernels return."""

from rankax.core.plan.schedule import LeafPlan, Level
from rankax.ext.check import CheckReport, NonFinite
from rankax.ext.explain.plan import BatchPlan
from rankax.ext.memory.budget import MemoryFit
from rankax.ext.tune import Candidate, Tuning

__all__ = [
    "BatchPlan",
    "Candidate",
    "CheckReport",
    "LeafPlan",
    "Level",
    "MemoryFit",
    "NonFinite",
    "Tuning",
]

# The name that a pickle stores is the one a user can import. So the fields of these classes have
# annotations that are no strings: those would be looked up here.
for _name in __all__:
    globals()[_name].__module__ = __name__
