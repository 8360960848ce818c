# SPDX-License-Identifier: MIT
"""One gufunc signature, ``"(n,3),(n)->()"``, for the whole kernel."""

from __future__ import annotations

import inspect
import re
from typing import Any

from rankax._base.words import plural
from rankax._declare.dims import Dim, Rank, parse_dims

__all__ = ["from_gufunc", "to_gufunc"]

_GROUP = re.compile(r"\(([^()]*)\)")
_SIDE = re.compile(r"\s*\([^()]*\)\s*(,\s*\([^()]*\)\s*)*")
_CORE_DIM = re.compile(r"[A-Za-z_]\w*|\d+")


def from_gufunc(
    text: str, signature: inspect.Signature, where: str
) -> tuple[list[tuple[str, Rank]], Any]:
    """Read ``"(n,3),(n)->()"``: positional parameters with ranks, and a rank tree of the outputs.

    ``*args`` comes once for each group that is left for it.
    """
    inputs, arrow, outputs = text.partition("->")
    if not arrow or not _SIDE.fullmatch(inputs) or not _SIDE.fullmatch(outputs):
        raise ValueError(
            f"{where}: {text!r} is not a gufunc signature; one looks like '(n,3),(n)->()'"
        )
    ranks = [_core_dims(group, text, where) for group in _GROUP.findall(inputs)]
    results = [_core_dims(group, text, where) for group in _GROUP.findall(outputs)]
    names = _gufunc_parameters(signature, len(ranks))
    if names is None:
        raise TypeError(
            f"{where}: {text!r} has {plural(len(ranks), 'input')}, which does not fit the "
            f"parameters {signature}"
        )
    outcome = results[0] if len(results) == 1 else tuple(results)
    return list(zip(names, ranks, strict=True)), outcome


def _gufunc_parameters(signature: inspect.Signature, count: int) -> list[str] | None:
    """Name the ``count`` parameters a signature speaks of, in order; ``self`` is not one."""
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    positional = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    names = [p.name for p in positional]
    if positional and positional[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        names += names[-1:] * (count - len(names))
    return names[:count] if len(required) <= count <= len(names) else None


def _core_dims(group: str, text: str, where: str) -> Rank:
    words = [word.strip() for word in group.split(",")] if group.strip() else []
    for word in words:
        if not _CORE_DIM.fullmatch(word):
            flexible = "?" in word or "|" in word
            raise ValueError(
                f"{where}: {text!r} cannot be read at {word!r}; a core dimension is a name or a "
                f"size{' (optional and broadcastable ones are not supported)' if flexible else ''}"
            )
    rank = parse_dims(" ".join(words))
    return Rank(0, ()) if rank is None else rank


def to_gufunc(ranks: dict[str, Any], outputs: Any) -> str | None:
    """Write ranks as one signature; None where a parameter or the output is no single array.

    An axis without a name gets one that no other has: ``v_0``.
    """
    groups: list[str] = []
    for name, rank in ranks.items():
        if not isinstance(rank, Rank):
            return None
        groups.append(_group(rank, name))
    results = list(outputs) if type(outputs) in (tuple, list) else [outputs]
    if not groups or not results or not all(isinstance(rank, Rank) for rank in results):
        return None
    written = [_group(rank, f"out{i}") for i, rank in enumerate(results)]
    return f"{','.join(groups)}->{','.join(written)}"


def _group(rank: Rank, name: str) -> str:
    dims = rank.dims if rank.dims is not None else tuple(Dim("_") for _ in range(rank.rank))
    words = [_word(dim, f"{name}_{axis}") for axis, dim in enumerate(dims)]
    return f"({','.join(words)})"


def _word(dim: Dim, otherwise: str) -> str:
    if dim.name is not None:
        return dim.name
    return otherwise if dim.size is None else str(dim.size)
