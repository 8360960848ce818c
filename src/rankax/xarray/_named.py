# SPDX-License-Identifier: MIT
"""The dimensions of a call with named arrays: those of the arguments, and those of the outputs."""

import contextlib
import dataclasses
import difflib
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.call.kernels import KernelCall, KernelSpec, is_number
from rankax.core.base.messages import listed, plural
from rankax.core.base.trees import (
    children_of,
    field_names,
    is_leaf,
    leaves_with_names,
    spread_prefix,
)
from rankax.core.declare.dims import Dim, Rank
from rankax.core.declare.ranks import ranks_of_leaves
from rankax.ext.blocks.arrays import blocks_of
from rankax.ext.blocks.call import check_dtype
from rankax.ext.blocks.programs import in_native_order

Dims = tuple[str, ...]

# Imported by name because a type checker need not have xarray installed.
xr: Any = importlib.import_module("xarray")


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """One leaf of the arguments: a named array with its core dimensions, or anything else."""

    value: Any
    path: str
    rank: Rank | None
    core: Dims | None = None  # None: not a named array

    @property
    def variables(self) -> list[tuple[str, Any]]:
        """The arrays of a named array, with their paths: those of a Dataset, or itself."""
        if isinstance(self.value, xr.Dataset):
            return [(f"{self.path}[{name!r}]", v) for name, v in self.value.data_vars.items()]
        return [] if self.core is None else [(self.path, self.value)]

    def dims(self, reduced: Dims, site: str) -> Dims:
        """Return the reduced dimensions that all variables have, the same in all, and the core."""
        every = [tuple(d for d in reduced if d in v.dims) for _, v in self.variables]
        for dims, (path, _) in zip(every, self.variables, strict=True):
            if dims != every[0]:
                raise ValueError(
                    f"{site}: the reduced dimensions of {path} are {listed(dims) or 'none'}, but "
                    f"those of the other variables are {listed(every[0]) or 'none'}"
                )
        return *(every[0] if every else ()), *(self.core or ())

    def aligned(self, data: Any, reduced: Dims, site: str) -> Any:
        """Return the data of a named array with an axis for each reduced dimension it lacks."""
        if isinstance(data, np.ndarray):
            data = in_native_order(data)
        dims, core = self.dims(reduced, site), self.core or ()
        return data[(..., *(slice(None) if dim in dims else None for dim in (*reduced, *core)))]

    def shape(self, reduced: Dims) -> jax.ShapeDtypeStruct | None:
        """Return shape and dtype with the reduced and core axes only; None for other objects."""
        if self.core is not None:
            _, variable = self.variables[0]
            sizes = [variable.sizes.get(dim, 1) for dim in (*reduced, *self.core)]
            return jax.ShapeDtypeStruct(sizes, variable.dtype.newbyteorder("="))
        if self.rank is None or is_number(self.value):
            return None
        dtype = jax.dtypes.canonicalize_dtype(self.value.dtype)
        return jax.ShapeDtypeStruct(self.value.shape, dtype)


def named_leaves(call: KernelCall, core_dims: Any, site: str) -> list[NamedLeaf]:
    """Return the leaves of a call, with the core dimensions of the named arrays."""
    structure = call.structure
    triples = zip(call.leaves, structure.paths, structure.ranks, strict=True)
    for name, value in call.others.items():
        _leaf(value, name, None, core_dims, site)
    leaves = [_leaf(*triple, core_dims, site) for triple in triples]
    if all(leaf.core is None for leaf in leaves):
        raise TypeError(
            f"{site}: no argument with a rank is a DataArray or a Dataset; call {call.name} itself"
        )
    return leaves


def _leaf(value: Any, path: str, rank: Rank | None, core_dims: Any, site: str) -> NamedLeaf:
    is_named = blocks_of(value) == "xarray"
    if rank is None and is_named:
        raise TypeError(
            f"{site}: {path} is an xarray object, but it has no rank; give it one, or pass "
            "its values"
        )
    if rank is None or not is_named:
        if rank is not None and not is_number(value) and jnp.ndim(value) != rank.rank:
            raise TypeError(
                f"{site}: {path} has shape {jnp.shape(value)} and rank {rank}, so it has batch "
                "axes, but they have no names; pass an xarray.DataArray"
            )
        return NamedLeaf(value, path, rank)
    explicit = _explicit_core(core_dims, path, site)
    core: Dims = ()
    for at, variable in NamedLeaf(value, path, rank, core).variables:
        core = _core_dims(rank, explicit, variable.dims, at, path, site)
        check_dtype(variable.dtype, f"{site}: {at} is an array", at)
        for dim in core:
            if (number := len(variable.chunksizes.get(dim, ()))) > 1:
                raise ValueError(
                    f"{site}: {at} is cut into {plural(number, 'chunk')} along its core dimension "
                    f"{dim!r}, and one item needs all of it; pass {at}.chunk({{{dim!r}: -1}})"
                )
    return NamedLeaf(value, path, rank, core)


def _explicit_core(core_dims: Any, path: str, site: str) -> Dims | None:
    """Return the entry of ``core_dims`` for one leaf, by its path or by that of a node above.

    A name is the entry for every leaf.
    """
    if core_dims is None:
        return None
    if isinstance(core_dims, str):
        return (core_dims,)
    if not isinstance(core_dims, Mapping):
        raise TypeError(
            f"{site}: core_dims must be a name, or a dict from parameters to names, as in "
            f"{{{path!r}: ('level',)}}, got {type(core_dims).__name__} {core_dims!r}"
        )
    # For example ``pose['R'][0]``, then ``pose['R']``, then ``pose``.
    ends = [len(path), *(i for i, letter in reversed([*enumerate(path)]) if letter in "[.")]
    entry = next((core_dims[path[:end]] for end in ends if path[:end] in core_dims), None)
    return None if entry is None else read_dims(entry, f"{site}: core_dims[{path!r}]")


def read_dims(value: Any, site: str) -> Dims:
    """Return names of dimensions as a tuple."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{site} must be a name or a tuple of names, got {value!r}")
    return tuple(names)


def declared_names(rank: Rank) -> tuple[str | None, ...]:
    """Return the name of each core axis that has one: ``n``, or ``xyz`` for ``xyz=3``."""
    names: list[str | None] = []
    for dim in rank.dims if rank.dims is not None else (Dim("_"),) * rank.rank:
        name, equals, _ = dim.text.lstrip("#?").partition("=")
        names.append(dim.name or (name if equals and name.isidentifier() else None))
    return tuple(names)


def _core_dims(
    rank: Rank, explicit: Dims | None, dims: Sequence[Any], at: str, path: str, site: str
) -> Dims:
    """Return the core dimensions of a named array that has ``dims``, in the order of its rank."""
    last = list(dims)[-rank.rank :] if rank.rank else []
    example = tuple(last + ["..."] * (rank.rank - len(last)))
    parameter = re.split(r"[.\[]", path)[0]
    advice = f"core_dims={{{parameter!r}: {example!r}}}"
    present = f"{at} has the dimensions {listed([repr(d) for d in dims]) or 'of a scalar'}"
    if explicit is not None and len(explicit) != rank.rank:
        raise ValueError(
            f"{site}: {at} has rank {rank}, that is {plural(rank.rank, 'core axis')}, but "
            f"core_dims names {plural(len(explicit), 'dimension')}: {listed(list(explicit))}"
        )
    names = declared_names(rank) if explicit is None else explicit
    core = tuple(name for name in names if name is not None)
    if len(core) < len(names):
        raise ValueError(
            f"{site}: {at} has rank {rank}, which does not name its core axes, and {present}; "
            f"name the core dimensions in order: {advice}"
        )
    if absent := [name for name in core if name not in dims]:
        known = [dim for dim in dims if isinstance(dim, str)]
        close = [dim for name in core for dim in difflib.get_close_matches(name, known, 1)]
        if len({*close}) == len(core):
            advice = f"core_dims={{{parameter!r}: {tuple(close)!r}}}"
        declares = "core_dims names" if explicit is not None else f"rank {rank} declares"
        raise ValueError(
            f"{site}: for {at}, {declares} the core dimension {absent[0]!r}, which is absent: "
            f"{present}; rename one, or write {advice}"
        )
    if len(set(core)) < len(core):
        raise ValueError(
            f"{site}: {at} has rank {rank}, but no xarray object has two dimensions of one "
            f"name; name the core dimensions: {advice}"
        )
    return core


def batch_dims(leaves: Sequence[NamedLeaf], site: str) -> Dims:
    """Return all batch dimensions; refuse one that is a core dimension of another array."""
    first: dict[str, NamedLeaf] = {}  # the first leaf with each batch dimension
    for leaf in leaves:
        for _, variable in leaf.variables:
            for dim in variable.dims:
                if dim not in (leaf.core or ()):
                    first.setdefault(dim, leaf)
    for leaf in leaves:
        for dim in leaf.core or ():
            if dim in first:
                raise ValueError(
                    f"{site}: {dim!r} is a core dimension of {leaf.path}, but a batch dimension "
                    f"of {first[dim].path}, whose rank is {first[dim].rank}; rename it in one of "
                    "them, or declare it as core in both"
                )
    return tuple(first)


def reduced_dims(kernel: KernelSpec, reduce_dims: Any, batch: Dims, site: str) -> Dims:
    """Return the dimensions that are reduced, which follow the other batch dimensions."""
    options = kernel.preset
    if options.reduce is None:
        if reduce_dims is not None:
            raise TypeError(
                f"{site}: reduce_dims={reduce_dims!r} needs a kernel with the option reduce"
            )
        return ()
    if reduce_dims is None:
        if options.reduce_axis is not None:
            raise ValueError(
                f"{site}: {kernel.name} has reduce_axis={options.reduce_axis}, but the batch "
                f"dimensions have names; name those to reduce: reduce_dims={batch[-1:]}"
            )
        return batch
    names = read_dims(reduce_dims, f"{site}: reduce_dims")
    if absent := [name for name in names if name not in batch]:
        raise ValueError(
            f"{site}: reduce_dims names {absent[0]!r}, which is not a batch dimension; these are "
            f"{listed([repr(dim) for dim in batch]) or 'none'}"
        )
    return names


# Outputs.


def dims_of_outputs(
    kernel: KernelSpec,
    leaves: Sequence[NamedLeaf],
    out: Any,
    output_dims: Any,
    batch: Dims,
    reduced: Dims,
    site: str,
) -> list[list[str]]:
    """Return the names of the axes of each output: the explicit ones, or those declared.

    Outputs that the kernel keeps whole have the ``reduced`` dimensions in front.
    """
    reductions = kernel.preset.reduce
    kept: list[int] = []
    if reductions is not None and any(entry.is_kept for entry in reductions.entries):
        kept = [i for i, entry in enumerate(reductions.of_outputs(out)) if entry.is_kept]
    explicit = _explicit_dims(output_dims, out, site)
    declared = _declared_dims(kernel, leaves, out)
    all_dims: list[list[str]] = []
    for i, (path, leaf) in enumerate(leaves_with_names(out, "output")):
        front = reduced if i in kept else ()
        count = len(leaf.shape) - len(front)
        dims = (declared[i] if count else ()) if explicit[i] is None else explicit[i]
        axes = f"{site}: {path} has {plural(count, 'core axis')}"
        if dims is None or (explicit[i] is None and len(dims) != count):
            example = tuple(f"dim{axis}" for axis in range(count))
            raise ValueError(f"{axes}, but no names; write output_dims={example}")
        if len(dims) != count:
            raise ValueError(
                f"{axes}, but output_dims names {plural(len(dims), 'dimension')}: {listed(dims)}"
            )
        if taken := [name for name in dims if name in batch]:
            raise ValueError(
                f"{site}: {path} has the core dimension {taken[0]!r}, which is a batch dimension "
                "of the arguments; give it another name by output_dims"
            )
        all_dims.append([*front, *dims])
    return all_dims


def _explicit_dims(output_dims: Any, out: Any, site: str) -> list[Dims | None]:
    """Return the entry of ``output_dims`` for each output."""
    if output_dims is None:
        return [None] * len(jax.tree.leaves(out))
    if is_leaf(out):
        return [read_dims(output_dims, f"{site}: output_dims")]

    def is_entry(node: Any) -> bool:
        is_tuple = type(node) in (tuple, list) and all(isinstance(name, str) for name in node)
        return node is None or isinstance(node, str) or is_tuple

    try:
        entries = spread_prefix(output_dims, out, "output", is_entry=is_entry, what="output_dims")
    except ValueError as error:
        raise ValueError(f"{site}: {error}") from None
    return [
        None if entry is None else read_dims(entry, f"{site}: output_dims for {path}")
        for entry, (path, _) in zip(entries, leaves_with_names(out, "output"), strict=True)
    ]


def _declared_dims(kernel: KernelSpec, leaves: Sequence[NamedLeaf], out: Any) -> list[Dims | None]:
    """Return the declared names of each output, as the dimensions that the arguments have.

    A name that stands for different dimensions of the arguments decides nothing.
    """
    all_dims: list[Dims | None] = [None] * len(jax.tree.leaves(out))
    ranks: Sequence[Rank | None] = ()
    if kernel.declaration.outputs is not None:
        with contextlib.suppress(ValueError):  # a reduction returns another tree
            ranks = ranks_of_leaves(kernel.declaration.outputs, out, "output")
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
