# SPDX-License-Identifier: MIT
"""Write a numerical kernel for one item; call it on any broadcastable batch, in bounded memory."""

__version__ = "1.0.0rc1"
__all__ = [
    "BatchShapeError",
    "CoreDimensionError",
    "Mask",
    "Ragged",
    "RankError",
    "SplitKey",
    "Static",
    "auto_vmap",
    "caches",
    "checkpoint_chunked_scan",
    "checkpoint_while_loop",
    "chunked_hessian",
    "chunked_jacfwd",
    "chunked_jacrev",
    "chunked_reduce",
    "chunked_vmap",
    "clear_caches",
    "options",
    "plans",
    "ranks_like",
    "reductions",
    "sliced_scan",
]

import rankax.plans as plans
import rankax.reductions as reductions
from rankax._errors import BatchShapeError, CoreDimensionError, RankError
from rankax._front.chunked import chunked_reduce, chunked_vmap
from rankax._front.kernel import auto_vmap
from rankax._options import options
from rankax._static import Static
from rankax.core.base.cache import caches, clear_caches
from rankax.core.declare.mask import Mask
from rankax.core.declare.ranks import ranks_like
from rankax.core.declare.split_key import SplitKey
from rankax.ext.jacobians import chunked_hessian, chunked_jacfwd, chunked_jacrev
from rankax.ext.ragged.type import Ragged
from rankax.ext.scan.checkpointed import checkpoint_chunked_scan
from rankax.ext.scan.sliced import sliced_scan
from rankax.ext.scan.while_loop import checkpoint_while_loop

# The name that a pickle stores, and that a traceback shows, is the one a user can import. So the
# fields of public classes have annotations that are no strings: those would be looked up here.
for _name in set(__all__) - {"plans", "reductions"}:
    globals()[_name].__module__ = __name__
