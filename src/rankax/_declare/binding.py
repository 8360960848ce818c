# SPDX-License-Identifier: MIT
"""Which parameter, or item of ``*args`` and ``**kwargs``, each rank of the decorator is for."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rankax._base.trees import Items
from rankax._base.words import plural
from rankax._declare.annotations import Unpacked

__all__ = ["ANNOTATED", "bind_ranks", "items_of_args", "leaves_rest", "with_rest"]

Parameter = inspect.Parameter
ANNOTATED = object()  # the rank of the other items, where the annotation says it


def bind_ranks(
    ranks: tuple[Any, ...],
    named: Mapping[str, Any],
    signature: inspect.Signature,
    where: str,
    known_options: Collection[str],
) -> dict[str, Any]:
    """Give each rank its parameter, as a call would bind arguments."""
    parameters = signature.parameters
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    ]
    count = len(positional)
    if positional and parameters[positional[-1]].kind is Parameter.VAR_POSITIONAL:
        positional += positional[-1:] * (len(ranks) - count)
    if len(ranks) > len(positional):
        raise TypeError(
            f"{where}: too many ranks; {plural(len(ranks), 'rank')} for "
            f"{plural(count, 'positional parameter')}"
            + (f" ({', '.join(positional)})" if positional else "")
        )
    bound = items_of_args(positional[: len(ranks)], ranks)
    many = next((p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD), None)
    items: dict[str, Any] = {}  # of **kwargs
    for name, rank in named.items():
        if name not in parameters and many is not None:
            _refuse_option(name, many, known_options, where)
            items[f"[{name!r}]"] = rank
            continue
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=1)
            known = ", ".join(parameters) or "no parameters"
            hint = f"did you mean {close[0]!r}?" if close else f"it has {known}"
            raise TypeError(f"{where}: the kernel has no parameter {name!r}; {hint}")
        if name in bound:
            first = bound[name]
            first = tuple(first.entries.values()) if isinstance(first, Items) else first
            raise TypeError(
                f"{where}: parameter {name!r} has two ranks, {first!r} by position and {rank!r} by "
                "name"
            )
        bound[name] = rank
    if many is not None and items:
        bound[many] = Items(items, bound.get(many, ANNOTATED))
    return bound


def items_of_args(names: Sequence[str], ranks: Sequence[Any]) -> dict[str, Any]:
    """Pair names and ranks; where ``*args`` comes more than once, each of its items has its own."""
    bound = dict(zip(names, ranks, strict=True))
    first = names.index(names[-1]) if names else 0
    if len(names) - first > 1:
        items = {f"[{i}]": rank for i, rank in enumerate(ranks[first:])}
        bound[names[-1]] = Items(items, ANNOTATED)
    return bound


def _refuse_option(name: str, many: str, known_options: Collection[str], where: str) -> None:
    """Keep a misspelled option from becoming the rank of an item that no call passes."""
    if close := difflib.get_close_matches(name, known_options, n=1, cutoff=0.7):
        raise TypeError(
            f"{where}: {name!r} would be the rank of an item of **{many}; did you mean the option "
            f"{close[0]!r}?"
        )


def leaves_rest(rank: Any) -> bool:
    """Whether some items of ``*args`` or ``**kwargs`` have ranks, and the others the annotated."""
    return isinstance(rank, Items) and rank.rest is ANNOTATED


def with_rest(rank: Any, annotated: Any) -> Any:
    """Give items that have no rank of their own that of the annotation."""
    if not leaves_rest(rank):
        return rank
    # Unpack[...] says what all items are together, which single ones override as a whole.
    return Items(rank.entries, None if isinstance(annotated, Unpacked) else annotated)
