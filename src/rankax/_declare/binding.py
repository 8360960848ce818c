# SPDX-License-Identifier: MIT
"""Assign each rank of the decorator to a parameter, or to an item of ``*args`` or ``**kwargs``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rankax._base.trees import Items
from rankax._base.words import plural
from rankax._declare.annotations import Unpacked

Parameter = inspect.Parameter
ANNOTATED = object()  # placeholder for the rank of the other items, which the annotation declares


def positional_names(parameters: Sequence[Parameter], count: int) -> list[str]:
    """Return the names of positional parameters; ``*args`` is repeated to make ``count`` names."""
    kinds = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind not in kinds]
    names = [parameter.name for parameter in positional]
    if positional and positional[-1].kind is Parameter.VAR_POSITIONAL:
        names += names[-1:] * (count - len(names))
    return names


def bind_ranks(
    ranks: tuple[Any, ...],
    named: Mapping[str, Any],
    by_parameter: Mapping[str, Any],
    signature: inspect.Signature,
    site: str,
    known_options: Collection[str],
) -> dict[str, Any]:
    """Assign ranks to parameters, as a call would bind arguments.

    Those of ``named`` were written as keywords, where an option may have been meant, and those of
    ``by_parameter`` in ``ranks=``.
    """
    parameters = signature.parameters
    positional = positional_names(list(parameters.values()), len(ranks))
    if len(ranks) > len(positional):
        raise TypeError(
            f"{site}: too many ranks; {plural(len(ranks), 'rank')} for "
            f"{plural(len(positional), 'positional parameter')}"
            + (f" ({', '.join(positional)})" if positional else "")
        )
    bound = items_of_args(positional[: len(ranks)], ranks)
    many = next((p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD), None)
    items: dict[str, Any] = {}  # of **kwargs
    by_name = [(name, rank, "by name") for name, rank in named.items()]
    in_ranks = [(name, rank, "in ranks") for name, rank in by_parameter.items()]
    origins = dict.fromkeys(bound, "by position")
    for name, rank, origin in [*by_name, *in_ranks]:
        if name in origins:
            first = bound[name] if name in bound else items[f"[{name!r}]"]
            first = tuple(first.entries.values()) if isinstance(first, Items) else first
            raise TypeError(
                f"{site}: parameter {name!r} has two ranks, {first!r} {origins[name]} and "
                f"{rank!r} {origin}"
            )
        origins[name] = origin
        if name in parameters:
            bound[name] = rank
        elif many is not None:
            if name in named:
                _refuse_option(name, many, known_options, site)
            items[f"[{name!r}]"] = rank
        else:
            hint = _hint(name, list(parameters), known_options)
            raise TypeError(f"{site}: the kernel has no parameter {name!r}; {hint}")
    if many is not None and items:
        bound[many] = Items(items, bound.get(many, ANNOTATED))
    return bound


def checked_ranks(value: Any, signature: inspect.Signature, site: str) -> Mapping[str, Any]:
    """Return what ``ranks=`` maps; refuse anything but names of parameters and their ranks."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    name = "ranks" if "ranks" in signature.parameters else "x"
    raise TypeError(
        f"{site}: ranks must map names of parameters to ranks, as in ranks={{{name!r}: 0}}, got "
        f"{type(value).__name__} {value!r}"
    )


SYNONYMS = {  # in JAX and NumPy
    "axis_size": "did you mean the option 'batch_shape'?",
    "batch_size": "did you mean the option 'chunk_size'?",
    "in_axes": (
        "auto_vmap takes ranks in place of in_axes: the number of axes of each argument for one "
        "item, as in auto_vmap(0, 1)"
    ),
    "out_axes": "the batch axes of the outputs always come first; use jnp.moveaxis on the result",
    "signature": (
        "pass a gufunc signature as the first argument, as in auto_vmap('(n,3),(n)->()')"
    ),
    "shards": "did you mean the option 'devices'?",
}


def _hint(name: str, parameters: list[str], known_options: Collection[str]) -> str:
    """Return a hint for a name that is neither a parameter nor an option."""
    known = [*parameters, "ranks", *known_options, *SYNONYMS]
    close = next(iter(difflib.get_close_matches(name, known, n=1)), None)
    if close is None:
        return f"it has {', '.join(parameters) or 'no parameters'}"
    if close in parameters:
        return f"did you mean {close!r}?"
    return SYNONYMS.get(close) or f"did you mean the option {close!r}?"


def items_of_args(names: Sequence[str], ranks: Sequence[Any]) -> dict[str, Any]:
    """Pair names and ranks; if ``*args`` occurs more than once, each of its items has a rank."""
    bound = dict(zip(names, ranks, strict=True))
    first = names.index(names[-1]) if names else 0
    if len(names) - first > 1:
        items = {f"[{i}]": rank for i, rank in enumerate(ranks[first:])}
        bound[names[-1]] = Items(items, ANNOTATED)
    return bound


def _refuse_option(name: str, many: str, known_options: Collection[str], site: str) -> None:
    """Refuse a misspelled option, which would become the rank of an item that no call passes."""
    close = difflib.get_close_matches(name, known_options, n=1, cutoff=0.7)
    hint = f"did you mean the option {close[0]!r}?" if close else None
    hint = SYNONYMS.get(name, hint)
    if hint is not None:
        raise TypeError(
            f"{site}: {name!r} would be the rank of an item of **{many}; {hint} (for an item of "
            f"that name, write ranks={{{name!r}: ...}})"
        )


def lacks_rest(rank: Any) -> bool:
    """Return whether only some items of ``*args`` or ``**kwargs`` have explicit ranks."""
    return isinstance(rank, Items) and rank.rest is ANNOTATED


def with_rest(rank: Any, annotated: Any) -> Any:
    """Give the items without an explicit rank that of the annotation."""
    if not lacks_rest(rank):
        return rank
    # Unpack[...] declares all items together, so explicit ranks override it as a whole.
    return Items(rank.entries, None if isinstance(annotated, Unpacked) else annotated)
