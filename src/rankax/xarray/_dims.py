# SPDX-License-Identifier: MIT
"""Which dimension of a named array is which core axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankax._base.words import listed, plural
from rankax._declare.dims import Dim, Rank

__all__ = ["Dims", "core_dims_at", "declared_names", "dims_of_argument", "read_dims"]

Dims = tuple[str, ...]


def core_dims_at(core_dims: Any, path: str, where: str) -> Dims | None:
    """Return the entry of ``core_dims`` for one leaf, by its path or by that of a node above."""
    if core_dims is None:
        return None
    if not isinstance(core_dims, Mapping):
        raise TypeError(
            f"{where}: core_dims must be a dict from parameters to names of dimensions, as in "
            f"{{{path!r}: ('level',)}}, got {type(core_dims).__name__} {core_dims!r}"
        )
    # For example ``pose['R'][0]``, then ``pose['R']``, then ``pose``.
    ends = [len(path), *(i for i, letter in reversed([*enumerate(path)]) if letter in "[.")]
    entry = next((core_dims[path[:end]] for end in ends if path[:end] in core_dims), None)
    return None if entry is None else read_dims(entry, f"{where}: core_dims[{path!r}]")


def read_dims(value: Any, where: str) -> Dims:
    """Return names of dimensions as a tuple."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{where} must be a name or a tuple of names, got {value!r}")
    return tuple(names)


def declared_names(rank: Rank) -> tuple[str | None, ...]:
    """Return the name of each core axis that has one: ``n``, or ``xyz`` for ``xyz=3``."""
    names: list[str | None] = []
    for dim in rank.dims if rank.dims is not None else (Dim("_"),) * rank.rank:
        name, equals, _ = dim.text.lstrip("#?").partition("=")
        names.append(dim.name or (name if equals and name.isidentifier() else None))
    return tuple(names)


def dims_of_argument(
    rank: Rank, explicit: Dims | None, dims: Sequence[Any], path: str, parameter: str, where: str
) -> Dims:
    """Return the core dimensions of a named array that has ``dims``, in the order of its rank."""
    last = list(dims)[-rank.rank :] if rank.rank else []
    example = tuple(last + ["..."] * (rank.rank - len(last)))
    advice = f"core_dims={{{parameter!r}: {example!r}}}"
    present = f"{path} has the dimensions {listed([repr(d) for d in dims]) or 'of a scalar'}"
    if explicit is not None and len(explicit) != rank.rank:
        raise ValueError(
            f"{where}: {path} has rank {rank}, that is {plural(rank.rank, 'core axis')}, but "
            f"core_dims names {plural(len(explicit), 'dimension')}: {listed(list(explicit))}"
        )
    names = declared_names(rank) if explicit is None else explicit
    core = tuple(name for name in names if name is not None)
    if len(core) < len(names):
        raise ValueError(
            f"{where}: {path} has rank {rank}, which does not name its core axes, and {present}; "
            f"name the core dimensions in order: {advice}"
        )
    if absent := [name for name in core if name not in dims]:
        declares = "core_dims names" if explicit is not None else f"rank {rank} declares"
        raise ValueError(
            f"{where}: for {path}, {declares} the core dimension {absent[0]!r}, which is absent: "
            f"{present}; rename one, or write {advice}"
        )
    if len(set(core)) < len(core):
        raise ValueError(
            f"{where}: {path} has rank {rank}, but no xarray object has two dimensions of one "
            f"name; name the core dimensions: {advice}"
        )
    return core
