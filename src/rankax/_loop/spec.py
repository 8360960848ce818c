# SPDX-License-Identifier: MIT
"""One level of a nest, as data: everything that its program depends on except the item.

A nest has one `LoopSpec` for each level, outermost level first. They are part of the key of memory
measurements (`_call/run.py`), so the key has every new option of loops.
"""

import dataclasses

from rankax._plan.chunks import Chunks
from rankax._progress.bars import Progress


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """How the items along one axis are evaluated.

    Attributes
    ----------
    chunks : Chunks
        The length of the axis, and the chunks that it is cut into.
    in_axes : tuple of int or None
        Where each leaf has the axis.
    is_loop : bool
        Whether chunks are evaluated one after another. Otherwise `jax.vmap` maps the axis.
    reduced : bool
        Whether the items are folded. Otherwise their outputs are stored.
    numbered : bool
        Whether each item takes its place along the axis as its last input (`keys.py`).
    checkpoint : bool
        Whether the reverse pass computes each chunk again instead of storing its intermediates.
    linear : bool
        Whether a derivative needs no carry of a step. Otherwise steps are checkpointed as a whole,
        so that what they compute is not stored either.
    progress : Progress or None
        Where the loop reports.
    derivative : Chunks or None
        The chunks of a derivative, if they are others.
    lockstep : bool
        Whether `while` loops stay as they are where the loop is differentiated. Otherwise they get
        a reverse pass.
    lanes : int or None
        How many lanes walk the items of this level, whose items end by themselves (`_lockstep`).
        None: chunks, whose items run together.
    """

    chunks: Chunks
    in_axes: tuple[int | None, ...]
    is_loop: bool = True
    reduced: bool = False
    numbered: bool = False
    checkpoint: bool = True
    linear: bool = True
    progress: Progress | None = None
    derivative: Chunks | None = None
    lockstep: bool = True
    lanes: int | None = None
