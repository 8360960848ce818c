# SPDX-License-Identifier: MIT
"""What ragged arguments cannot be, or do not go together with."""

from __future__ import annotations

import numpy as np

from rankax._options import Options
from rankax.call.kernels import KernelCall
from rankax.core.base.arrays import is_spread


def check_options(call: KernelCall, options: Options) -> None:
    if options.batched:
        path = call.structure.paths[next(iter(call.structure.nodes))]
        raise TypeError(
            f"{call.site}: {path} is Ragged, but with batched=True the function takes a whole "
            "chunk; write it for one item, or fill the items up and pass a boolean array"
        )
    for i, leaf in enumerate(call.leaves):
        if options.devices is None and call.structure.ranks[i] is not None and is_spread(leaf):
            raise ValueError(
                f"{call.site}: {call.structure.paths[i]} is sharded over devices, but ragged "
                "items are read by index from all of it; with devices=, the devices share the items"
            )


def dimensions(call: KernelCall) -> dict[int, str]:
    """Return the first dimension of each ragged leaf; refuse what does not go together."""
    found: dict[int, str] = {}
    first: dict[str, int] = {}  # the leaf that has a dimension first
    structure, site = call.structure, call.site
    for i in structure.nodes:
        path, rank = structure.paths[i], structure.ranks[i]
        dims = rank.dims if rank is not None else None
        if not dims or dims[0].name is None:
            raise TypeError(
                f"{site}: {path} is Ragged, so its first core dimension needs a name, as in "
                f'{path}="n 3", but its rank is {rank}'
            )
        name = dims[0].name
        if any(name in (dim.name, *dim.names) for dim in dims[1:]):
            raise TypeError(
                f"{site}: {path} is Ragged, but its rank {rank} has {name!r} more than once; only "
                "the first axis of an item may differ"
            )
        if len(shape := np.shape(call.leaves[i])) != len(dims):
            raise ValueError(
                f"{site}: {path} is Ragged with values of shape {shape}, but its rank {rank} asks "
                f"for {len(dims)}: the rows, and {len(dims) - 1} for one row"
            )
        if found:
            other = first.get(name, next(iter(found)))
            mine, its = structure.nodes[i], structure.nodes[other]
            its_path = structure.paths[other]
            if len(mine) != len(its):
                raise ValueError(
                    f"{site}: {path} has {len(mine)} items, but {its_path} has {len(its)}"
                )
            if name in first and (differs := mine.lengths != its.lengths).any():
                at = int(np.argmax(differs))
                raise ValueError(
                    f"{site}: item {at} of {path} has {mine.lengths[at]} rows, but that of "
                    f"{its_path} has {its.lengths[at]}"
                )
        found[i] = name
        first.setdefault(name, i)
    for i, rank in enumerate(structure.ranks):
        for dim in (rank.dims or ()) if rank is not None and i not in found else ():
            name = next((name for name in (dim.name, *dim.names) if name in first), None)
            if name is not None:
                raise TypeError(
                    f"{site}: {structure.paths[i]} has the dimension {name!r}, in which "
                    f"{structure.paths[first[name]]} is Ragged; pass it as Ragged of the same "
                    "lengths, if that is its first core dimension, or give the dimension another "
                    "name"
                )
    return found
