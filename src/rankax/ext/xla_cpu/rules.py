# SPDX-License-Identifier: MIT
"""When the rules for XLA on a CPU hold, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from rankax.core.protocol import (
    COMPILER_RULES,
    NO_RULES,
    LoopSpec,
    Options,
    Rules,
    Tiles,
    bool_option,
    register,
    switch,
)
from rankax.ext.xla_cpu import components, extremes, kept_residuals, kept_values, library, tiles

# The versions of JAX that the rules were measured with; `__init__.py` says how to raise the second.
_SINCE, _BEFORE = (0, 12), (0, 13)

#: Whether the rules hold for kernels that do not say so themselves.
DEFAULT = switch("RANKAX_XLA_CPU", default=True)


class XlaCpu(Rules):
    """The rules."""

    most_reduced = tiles.MOST_REDUCED

    def tiles(self, jaxpr: Jaxpr, updated: int) -> Tiles:
        return tiles.best_tiles(jaxpr, updated)

    def pays_to_store(self, jaxpr: Jaxpr) -> bool:
        return tiles.pays_to_store(jaxpr)

    def evaluated(self, jaxpr: Jaxpr, mapped: Sequence[int]) -> Any:
        return kept_values.keep_inputs(kept_values.keep_values(jaxpr), mapped)

    def differentiated(self, jaxpr: Jaxpr, mapped: Sequence[int]) -> Any:
        return kept_residuals.keep_residuals(self.evaluated(jaxpr, mapped))

    def differs_back(self, jaxpr: Jaxpr) -> bool:
        return kept_residuals.slices_again(jaxpr)

    def stored(
        self, leaves: Sequence[Any], specs: tuple[LoopSpec, ...]
    ) -> tuple[list[Any], tuple[LoopSpec, ...]]:
        return components.by_component(leaves, specs)

    def folded(self, step: Any, jaxpr: Jaxpr, *, again: bool) -> Any:
        return extremes.in_tiles(step, jaxpr, again=again)

    def compiled(self, fun: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        return library.jit(fun, args, options)


class XlaCpuByHand(XlaCpu):
    """The rules of a caller who says what the library of XLA computes."""

    tiles = Rules.tiles
    compiled = Rules.compiled


_XLA_CPU, _BY_HAND = XlaCpu(), XlaCpuByHand()


def rules_of(compiler_options: Mapping[str, Any]) -> Rules:
    """Return the rules of a call on a CPU with these options of the compiler."""
    holds = _SINCE <= jax.__version_info__ < _BEFORE and not (
        # Tiles may overlap, so that a key is used twice.
        getattr(jax.config, "jax_debug_key_reuse", False)
    )
    if not holds:
        return NO_RULES
    return _BY_HAND if library.OPTION in compiler_options else _XLA_CPU


def _rules_of_call(options: Options) -> Rules | None:
    return (
        rules_of(dict(options.compiler_options or ()))
        if options.xla_cpu and options.on_cpu
        else None
    )


COMPILER_RULES.append(_rules_of_call)
register(bool_option("xla_cpu", DEFAULT, scoped=True, for_all=True))
