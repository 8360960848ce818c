# SPDX-License-Identifier: MIT
"""A gufunc signature, ``"(n,3),(n)->()"``, that declares all ranks of a kernel.

It skips ``self`` and ``cls`` because it cannot express "no rank".
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from rankax._base.words import plural
from rankax._declare.binding import items_of_args, positional_names
from rankax._declare.dims import Dim, Rank, parse_dims

_GROUP = re.compile(r"\(([^()]*)\)")
_SIDE = re.compile(r"\s*\([^()]*\)\s*(,\s*\([^()]*\)\s*)*")
_CORE_DIM = re.compile(r"[A-Za-z_]\w*|\d+")


def from_gufunc(text: str, signature: inspect.Signature, site: str) -> tuple[dict[str, Any], Any]:
    """Read ``"(n,3),(n)->()"``: return ranks by parameter, and the rank tree of the outputs.

    ``*args`` takes all groups that remain for it.
    """
    inputs, arrow, outputs = text.partition("->")
    if not arrow or not _SIDE.fullmatch(inputs) or not _SIDE.fullmatch(outputs):
        raise ValueError(
            f"{site}: {text!r} is not a gufunc signature; one looks like '(n,3),(n)->()'"
        )
    ranks = [_core_dims(group, text, site) for group in _GROUP.findall(inputs)]
    results = [_core_dims(group, text, site) for group in _GROUP.findall(outputs)]
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    names = positional_names(parameters, len(ranks))
    required = [
        p.name
        for p in parameters
        if p.name in names and p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    if not len(required) <= len(ranks) <= len(names):
        raise TypeError(
            f"{site}: {text!r} has {plural(len(ranks), 'input')}, which does not fit the "
            f"parameters {signature}"
        )
    bound = items_of_args(names[: len(ranks)], ranks)
    return bound, results[0] if len(results) == 1 else tuple(results)


def _core_dims(group: str, text: str, site: str) -> Rank:
    words = [word.strip() for word in group.split(",")] if group.strip() else []
    for word in words:
        if not _CORE_DIM.fullmatch(word):
            flexible = "?" in word or "|" in word
            raise ValueError(
                f"{site}: {text!r} cannot be read at {word!r}; a core dimension is a name or a "
                f"size{' (optional and broadcastable ones are not supported)' if flexible else ''}"
            )
    return parse_dims(" ".join(words)) or Rank(0, ())


def to_gufunc(ranks: dict[str, Any], outputs: Any) -> str | None:
    """Write ranks as one signature; None if a parameter or the output is not a single array.

    An axis without a name gets a unique one: ``v_0``.
    """
    results = list(outputs) if type(outputs) in (tuple, list) else [outputs]
    declared = [*ranks.values(), *results]
    if not ranks or not results or not all(isinstance(rank, Rank) for rank in declared):
        return None
    inputs = [_group(rank, name) for name, rank in ranks.items()]
    written = [_group(rank, f"out{i}") for i, rank in enumerate(results)]
    return f"{','.join(inputs)}->{','.join(written)}"


def _group(rank: Rank, name: str) -> str:
    words: list[str] = []
    for axis, dim in enumerate(rank.dims or (Dim("_"),) * rank.rank):
        words.append(dim.name or (f"{name}_{axis}" if dim.size is None else str(dim.size)))
    return f"({','.join(words)})"
