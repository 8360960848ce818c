# SPDX-License-Identifier: MIT
"""Write a numerical kernel for one item; call it on any broadcastable batch, in bounded memory."""

__version__ = "0.1.0"
__all__ = [
    "BatchPlan",
    "BatchShapeError",
    "Candidate",
    "CoreDimensionError",
    "LeafPlan",
    "Level",
    "MemoryFit",
    "RankError",
    "SplitKey",
    "Static",
    "Tuning",
    "Tunings",
    "auto_vmap",
    "checkpoint_chunked_scan",
    "chunked_hessian",
    "chunked_jacfwd",
    "chunked_jacrev",
    "chunked_reduce",
    "chunked_vmap",
    "load_tuning",
    "options",
    "ranks_like",
    "reductions",
    "sliced_scan",
]

import rankax.reductions as reductions
from rankax._declare.like import ranks_like as ranks_like
from rankax._declare.split_key import SplitKey as SplitKey
from rankax._errors import BatchShapeError as BatchShapeError
from rankax._errors import CoreDimensionError as CoreDimensionError
from rankax._errors import RankError as RankError
from rankax._front.auto_vmap import auto_vmap as auto_vmap
from rankax._front.chunked_reduce import chunked_reduce as chunked_reduce
from rankax._front.chunked_vmap import chunked_vmap as chunked_vmap
from rankax._front.jacobians import chunked_hessian as chunked_hessian
from rankax._front.jacobians import chunked_jacfwd as chunked_jacfwd
from rankax._front.jacobians import chunked_jacrev as chunked_jacrev
from rankax._options import options as options
from rankax._plan.batch import BatchPlan as BatchPlan
from rankax._plan.budget import MemoryFit as MemoryFit
from rankax._plan.levels import Level as Level
from rankax._plan.shapes import LeafPlan as LeafPlan
from rankax._scan.checkpointed import checkpoint_chunked_scan as checkpoint_chunked_scan
from rankax._scan.sliced import sliced_scan as sliced_scan
from rankax._static import Static as Static
from rankax._tune.table import Candidate as Candidate
from rankax._tune.table import Tuning as Tuning
from rankax._tune.table import Tunings as Tunings
from rankax._tune.table import load_tuning as load_tuning

# The name that a pickle stores, and that a traceback shows, is the one a user can import. So the
# fields of public classes have annotations that are no strings: those would be looked up here.
for _name in set(__all__) - {"reductions"}:
    globals()[_name].__module__ = __name__
