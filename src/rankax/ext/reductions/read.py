# SPDX-License-Identifier: MIT
"""How the arguments ``reduce`` and ``where`` are read, and the reductions that have a name."""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from rankax.core.base.messages import check_output_key, listed
from rankax.core.base.trees import HasFields
from rankax.core.reduce.protocol import Keep, Reduction, Several
from rankax.core.reduce.run import Reductions
from rankax.ext.reductions.sums import All, AnyOf, Gram, LogSumExp, Mean, Prod, Sum
from rankax.ext.reductions.winners import ArgMax, ArgMin, Max, Min

ReductionName = Literal[
    "sum", "mean", "prod", "max", "min", "argmax", "argmin", "any", "all", "logsumexp", "gram"
]
_Entry = ReductionName | Reduction | Several | HasFields | None
Reduce: TypeAlias = "_Entry | tuple[Reduce, ...] | list[Reduce] | Mapping[str, Reduce]"

_NAMED = [
    *(Sum(), Mean(), Prod(), Max(), Min(), ArgMax(), ArgMin(), AnyOf(), All(), LogSumExp(), Gram())
]
_BY_NAME = {reduction.name: reduction for reduction in _NAMED}
_NAN = "to leave NaN out, return jnp.isfinite(value) beside the value, and name it with where="
_HINTS = {
    "average": "did you mean 'mean'?",
    "median": "a median needs all outputs at once, so it cannot be folded; keep them, without "
    "reduce= or with None for this output, and call jnp.median",
    **dict.fromkeys(("nanmax", "nanmean", "nanmin", "nansum"), _NAN),
    **dict.fromkeys(("bincount", "segment_sum"), "use rankax.reductions.ByLabel"),
    "histogram": "use rankax.reductions.Histogram(edges)",
    **dict.fromkeys(("top_k", "topk"), "use rankax.reductions.TopK(k), or BottomK(k)"),
    **dict.fromkeys(("std", "var"), "use rankax.reductions.Moments(), which has the variance"),
}


def read_reductions(value: Any, site: str, also: Sequence[str] = ()) -> Reductions:
    """Read names and objects; refuse anything else.

    Parameters
    ----------
    value : str, Reduction, None, or a pytree of those
    site : str
        The name of the called function, for errors.
    also : sequence of str
        What else the caller takes, for errors.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    parts = [_parts(leaf, site, [*_BY_NAME, *also]) for leaf in leaves]
    entries, structure = jax.tree.flatten(tree.unflatten(parts))
    if all(entry.is_kept for entry in entries):
        raise ValueError(f"{site}: reduce names no reduction, got {value!r}")
    ends = list(itertools.accumulate(len(jax.tree.leaves(part)) for part in parts))
    places = tuple(map(range, [0, *ends], ends))
    return Reductions(tuple(entries), structure, tree, places)


def _parts(leaf: Any, site: str, names: Sequence[str]) -> Any:
    """Return a reduction, or a tuple or dict of several."""
    if not isinstance(leaf, Several):
        return _reduction(leaf, site, names)
    mask = checked_where(leaf.where, site)
    return jax.tree.map(lambda part: _reduction(part, site, names).of_items(mask), leaf.reductions)


def _reduction(leaf: Any, site: str, names: Sequence[str]) -> Reduction:
    if leaf is None:
        return Keep()
    if isinstance(leaf, Reduction):
        checked_where(leaf.where, site)
        return leaf
    if isinstance(leaf, type) and issubclass(leaf, Reduction):
        raise TypeError(
            f"{site}: reduce got the class {leaf.__name__}; call it: {leaf.__name__}(...)"
        )
    if not isinstance(leaf, str):
        name = getattr(leaf, "__name__", None)  # such as jnp.sum
        hint = f"; did you mean {name!r}?" if name in _BY_NAME else ""
        raise TypeError(
            f"{site}: reduce must hold names ({listed(names, 'or')}), objects of "
            f"rankax.reductions and None, got {type(leaf).__name__} {name or repr(leaf)}{hint}"
        )
    if leaf not in _BY_NAME:
        close = difflib.get_close_matches(leaf, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"available: {listed(names)}"
        hint = _HINTS.get(leaf, hint)
        raise ValueError(f"{site}: no reduction is called {leaf!r}; {hint}")
    return _BY_NAME[leaf]


def checked_where(value: Any, site: str) -> str | int | None:
    """Return the name of a mask; refuse anything else."""
    if value is not None:
        check_output_key(value, site, "where")
    return value
