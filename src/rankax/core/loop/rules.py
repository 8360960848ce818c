# SPDX-License-Identifier: MIT
"""What a call does to work around a compiler: nothing, unless rules for a compiler say more.

A call asks one object, `Options.rules`, at each place where such a rule may act. These are the
answers without rules, which leave the program that one would write by hand. Those for XLA on a CPU
are in `rankax.ext.xla_cpu`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rankax.core.loop.spec import LoopSpec
from rankax.core.plan.schedule import WHOLE_CHUNKS, Tiles


class Rules:
    """No rules."""

    most_reduced: int | None = None  # how many items a reduction evaluates at once, at most

    def tiles(self, jaxpr: Any, updated: int) -> Tiles:
        """Return how many items are best evaluated at once.

        Parameters
        ----------
        jaxpr : Jaxpr
            The program of an item.
        updated : int
            How many numbers of its state a reduction updates with each tile.
        """
        return WHOLE_CHUNKS

    def pays_to_store(self, jaxpr: Any) -> bool:
        """Whether to store what an item computes takes less time than to compute it again."""
        return True

    def evaluated(self, jaxpr: Any, mapped: Sequence[int]) -> Any:
        """Return the program of an item as a loop evaluates it; ``mapped``: inputs of chunks."""
        return jaxpr

    def differentiated(self, jaxpr: Any, mapped: Sequence[int]) -> Any:
        """Return the program of an item as a loop that is differentiated evaluates it."""
        return jaxpr

    def differs_back(self, jaxpr: Any) -> bool:
        """Whether `differentiated` may return another program than `evaluated`."""
        return False

    def stored(
        self, leaves: Sequence[Any], specs: tuple[LoopSpec, ...]
    ) -> tuple[list[Any], tuple[LoopSpec, ...]]:
        """Return the arrays that a reduction reads as it reads them best, and where they are."""
        return list(leaves), specs

    def folded(self, step: Any, jaxpr: Any, *, again: bool) -> Any:
        """Return an `Accumulation` as tiles enter it.

        Its joined states equal the ones of ``step``, once `Accumulator.found` has completed them,
        which may evaluate the best tile ``again``.
        """
        return step

    def compiled(self, fun: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return `jax.jit` of ``fun``, which is called with arguments like ``args``."""
        return jax.jit(fun, compiler_options=dict(options) or None)


NO_RULES = Rules()
