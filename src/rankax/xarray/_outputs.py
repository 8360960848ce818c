# SPDX-License-Identifier: MIT
"""The outputs of a call with named arrays: their dimensions, and how they are put together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from rankax._base.trees import children_of, field_names, is_leaf, leaves_with_names, spread_prefix
from rankax._base.words import listed, plural
from rankax._call.arguments import KernelSpec
from rankax._declare.ranks import ranks_of_leaves
from rankax.xarray._named import Dims, NamedLeaf, declared_names, read_dims, xr


def dims_of_outputs(
    kernel: KernelSpec,
    leaves: Sequence[NamedLeaf],
    out: Any,
    output_dims: Any,
    batch: Dims,
    reduced: Dims,
    where: str,
) -> list[list[str]]:
    """Return the names of the axes of each output: the explicit ones, or those declared.

    Outputs that the kernel keeps whole have the ``reduced`` dimensions in front.
    """
    reductions = kernel.preset.reduce
    kept: list[int] = []
    if reductions is not None and any(entry.is_kept for entry in reductions.entries):
        kept = [i for i, entry in enumerate(reductions.of_outputs(out)) if entry.is_kept]
    explicit = _explicit_dims(output_dims, out, where)
    declared = _declared_dims(kernel, leaves, out)
    all_dims: list[list[str]] = []
    for i, (path, leaf) in enumerate(leaves_with_names(out, "output")):
        front = reduced if i in kept else ()
        count = len(leaf.shape) - len(front)
        dims = declared[i] if explicit[i] is None else explicit[i]
        axes = f"{where}: {path} has {plural(count, 'core axis')}"
        if dims is None or (explicit[i] is None and len(dims) != count):
            example = tuple(f"dim{axis}" for axis in range(count))
            raise ValueError(f"{axes}, but no names; write output_dims={example}")
        if len(dims) != count:
            raise ValueError(
                f"{axes}, but output_dims names {plural(len(dims), 'dimension')}: {listed(dims)}"
            )
        if taken := [name for name in dims if name in batch]:
            raise ValueError(
                f"{where}: {path} has the core dimension {taken[0]!r}, which is a batch dimension "
                "of the arguments; give it another name by output_dims"
            )
        all_dims.append([*front, *dims])
    return all_dims


def _explicit_dims(output_dims: Any, out: Any, where: str) -> list[Dims | None]:
    """Return the entry of ``output_dims`` for each output."""
    if output_dims is None:
        return [None] * len(jax.tree.leaves(out))
    if is_leaf(out):
        return [read_dims(output_dims, f"{where}: output_dims")]

    def is_entry(node: Any) -> bool:
        is_tuple = type(node) in (tuple, list) and all(isinstance(name, str) for name in node)
        return node is None or isinstance(node, str) or is_tuple

    try:
        entries = spread_prefix(output_dims, out, "output", is_entry=is_entry, what="output_dims")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return [
        None if entry is None else read_dims(entry, f"{where}: output_dims for {path}")
        for entry, (path, _) in zip(entries, leaves_with_names(out, "output"), strict=True)
    ]


def _declared_dims(kernel: KernelSpec, leaves: Sequence[NamedLeaf], out: Any) -> list[Dims | None]:
    """Return the declared names of each output, as the dimensions that the arguments have.

    A name that stands for different dimensions of the arguments decides nothing.
    """
    all_dims: list[Dims | None] = [None if x.shape else () for x in jax.tree.leaves(out)]
    if kernel.declaration.outputs is None:
        return all_dims
    try:
        ranks = ranks_of_leaves(kernel.declaration.outputs, out, "output")
    except ValueError:  # a reduction returns another tree
        return all_dims
    dims_of: dict[str | None, set[str]] = {}
    for leaf in leaves:
        if leaf.core is not None and leaf.rank is not None:
            for name, dim in zip(declared_names(leaf.rank), leaf.core, strict=True):
                dims_of.setdefault(name, set()).add(dim)
    for i, rank in enumerate(ranks):
        names = (None,) if rank is None else declared_names(rank)
        dims = [dims_of.get(name, {name}) for name in names if name is not None]
        if len(dims) == len(names) and all(len(each) == 1 for each in dims):
            all_dims[i] = tuple(dim for (dim,) in dims)
    return all_dims


def assembled(tree: Any) -> Any:
    """Return a Dataset for a tree of named arrays whose nodes have field names, else tuples."""
    if isinstance(tree, (xr.DataArray, xr.Dataset, xr.Variable)):
        return tree
    children = children_of(tree)
    if field_names(tree, children) is None:
        return tuple(assembled(child.value) for child in children)
    named = {"_".join(re.findall(r"\w+", path)): leaf for path, leaf in leaves_with_names(tree, "")}
    if all(isinstance(leaf, xr.DataArray) for leaf in named.values()):
        return xr.Dataset(named)
    return named
