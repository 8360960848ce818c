# SPDX-License-Identifier: MIT
"""Assign each rank of the decorator to a parameter, or to an item of ``*args`` or ``**kwargs``."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rankax.core.base.messages import plural
from rankax.core.declare.dims import Dim, Rank, parse_dims

Parameter = inspect.Parameter
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)


class BoundRanks(NamedTuple):
    """The explicit ranks of a kernel: of parameters, of single items of some, and of the outputs.

    ``items`` has the ranks of items of ``*args`` and ``**kwargs``, by parameter and key:
    ``{"args": {"[0]": 1}}``. The other items have the rank of the parameter.
    """

    whole: dict[str, Any]
    items: dict[str, dict[str, Any]]
    outputs: Any = None


def _by_position(ranks: inspect.BoundArguments) -> BoundRanks:
    """Return ranks that were bound as arguments.

    One rank for ``*args`` is that of all its items, of several each is that of one.
    """
    bound = BoundRanks({}, {})
    for name, rank in ranks.arguments.items():
        if ranks.signature.parameters[name].kind is not Parameter.VAR_POSITIONAL:
            bound.whole[name] = rank
        elif len(rank) == 1:
            (bound.whole[name],) = rank
        else:
            bound.items[name] = {f"[{i}]": one for i, one in enumerate(rank)}
    return bound


def bind_ranks(
    ranks: tuple[Any, ...],
    named: Mapping[str, Any],
    by_parameter: Mapping[str, Any],
    signature: inspect.Signature,
    site: str,
    known_options: Collection[str],
) -> BoundRanks:
    """Assign ranks to parameters, as a call would bind arguments.

    Those of ``named`` were written as keywords, where an option may have been meant, and those of
    ``by_parameter`` in ``ranks=``.
    """
    parameters = signature.parameters
    try:
        bound = _by_position(signature.bind_partial(*ranks))
    except TypeError:
        positional = [name for name, p in parameters.items() if p.kind not in _BY_NAME]
        raise TypeError(
            f"{site}: too many ranks; {plural(len(ranks), 'rank')} for "
            f"{plural(len(positional), 'positional parameter')}"
            + (f" ({', '.join(positional)})" if positional else "")
        ) from None
    several = {name: tuple(by_key.values()) for name, by_key in bound.items.items()}
    given = {name: (rank, "by position") for name, rank in {**bound.whole, **several}.items()}
    many = next((p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD), None)
    by_name = [(name, rank, "by name") for name, rank in named.items()]
    in_ranks = [(name, rank, "in ranks") for name, rank in by_parameter.items()]
    for name, rank, origin in by_name + in_ranks:
        if name in given:
            first, before = given[name]
            raise TypeError(
                f"{site}: parameter {name!r} has two ranks, {first!r} {before} and {rank!r} "
                f"{origin}"
            )
        given[name] = rank, origin
        if name in parameters:
            bound.whole[name] = rank
        elif many is not None:
            if name in named:
                _refuse_option(name, many, known_options, site)
            bound.items.setdefault(many, {})[f"[{name!r}]"] = rank
        else:
            hint = _hint(name, list(parameters), known_options)
            raise TypeError(f"{site}: the kernel has no parameter {name!r}; {hint}")
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
    "axis": "did you mean the option 'reduce_axis'?",
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


# Gufunc signatures.

_GROUP = re.compile(r"\(([^()]*)\)")
_SIDE = re.compile(r"\s*\([^()]*\)\s*(,\s*\([^()]*\)\s*)*")
_CORE_DIM = re.compile(r"[A-Za-z_]\w*|\d+")


def from_gufunc(text: str, signature: inspect.Signature, site: str) -> BoundRanks:
    """Read a signature for the whole kernel: ``"(n,3),(n)->()"``.

    ``*args`` takes all groups that remain for it. ``self`` and ``cls`` are skipped because a
    signature cannot express "no rank".
    """
    inputs, arrow, outputs = text.partition("->")
    if not arrow or not _SIDE.fullmatch(inputs) or not _SIDE.fullmatch(outputs):
        raise ValueError(
            f"{site}: {text!r} is not a gufunc signature; one looks like '(n,3),(n)->()'"
        )
    ranks = [_core_dims(group, text, site) for group in _GROUP.findall(inputs)]
    results = [_core_dims(group, text, site) for group in _GROUP.findall(outputs)]
    parameters = [p for p in signature.parameters.values() if p.kind not in _BY_NAME]
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    try:
        bound = _by_position(inspect.Signature(parameters).bind(*ranks))
    except TypeError:
        raise TypeError(
            f"{site}: {text!r} has {plural(len(ranks), 'input')}, which does not fit the "
            f"parameters {signature}"
        ) from None
    return bound._replace(outputs=results[0] if len(results) == 1 else tuple(results))


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
