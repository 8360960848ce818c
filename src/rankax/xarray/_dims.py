# SPDX-License-Identifier: MIT
"""Which dimension of a named array is which core axis, and the dimensions of the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankax._base.words import listed, plural
from rankax._declare.dims import Dim, Rank

__all__ = ["declared_names", "dims_given", "dims_of_argument"]

Dims = tuple[str, ...]


def dims_given(given: Any, path: str, where: str) -> Dims | None:
    """Return what ``core_dims`` says of one leaf: by its own path, or by that of its parameter."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{where}: core_dims must be a dict from parameters to names of dimensions, as in "
            f"{{{path!r}: ('level',)}}, got {type(given).__name__} {given!r}"
        )
    found = next((given[key] for key in _places(path) if key in given), None)
    return None if found is None else read_dims(found, f"{where}: core_dims[{path!r}]")


def _places(path: str) -> list[str]:
    """Return a path and what is around it: ``pose['R'][0]``, ``pose['R']``, ``pose``."""
    ends = [i for i, letter in enumerate(path) if letter in "[."]
    return [path, *(path[:i] for i in reversed(ends))]


def read_dims(value: Any, where: str) -> Dims:
    """Return names of dimensions as a tuple."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{where} must be a name or a tuple of names, got {value!r}")
    return tuple(names)


def declared_names(rank: Rank) -> tuple[str | None, ...]:
    """Return the name of each core axis where it has one: ``n``, or ``xyz`` of ``xyz=3``."""
    dims = rank.dims if rank.dims is not None else (Dim("_"),) * rank.rank
    return tuple(_name(dim) for dim in dims)


def _name(dim: Dim) -> str | None:
    if dim.name is not None:
        return dim.name
    name, equals, _ = dim.text.lstrip("#?").partition("=")
    return name if equals and name.isidentifier() else None


def dims_of_argument(
    rank: Rank, given: Dims | None, dims: Sequence[Any], path: str, parameter: str, where: str
) -> Dims:
    """Return the core dimensions of a named array that has ``dims``, in the order of its rank."""
    example = f"core_dims={{{parameter!r}: {tuple(_example(dims, rank))!r}}}"
    has = f"{path} has the dimensions {listed([repr(dim) for dim in dims]) or 'of a scalar'}"
    if given is not None:
        names: tuple[str | None, ...] = given
        if len(given) != rank.rank:
            raise ValueError(
                f"{where}: {path} has rank {rank}, that is {plural(rank.rank, 'core axis')}, but "
                f"core_dims names {plural(len(given), 'dimension')}: {listed(list(given))}"
            )
    else:
        names = declared_names(rank)
    if any(name is None for name in names):
        raise ValueError(
            f"{where}: {path} has rank {rank}, which does not name its core axes, and {has}; say "
            f"which are meant, and in which order: {example}"
        )
    known = [name for name in names if name is not None]
    if absent := [name for name in known if name not in dims]:
        declares = "core_dims names" if given is not None else f"rank {rank} declares"
        raise ValueError(
            f"{where}: for {path}, {declares} the core dimension {absent[0]!r}, which is absent: "
            f"{has}; rename one, or write {example}"
        )
    if len(set(known)) < len(known):
        raise ValueError(
            f"{where}: {path} has rank {rank}, but no array of xarray has two dimensions of one "
            f"name; say which are meant: {example}"
        )
    return tuple(known)


def _example(dims: Sequence[Any], rank: Rank) -> list[Any]:
    """Return as many dimensions as a rank has axes, the last ones where there are enough."""
    names = list(dims)[-rank.rank :] if rank.rank else []
    return names + ["..."] * (rank.rank - len(names))
