# SPDX-License-Identifier: MIT
"""The dimensions of a call with named arrays: those of the arguments, and those of the outputs."""

import contextlib
import difflib
import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

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
from rankax.core.declare.ranks import ranks_of_output
from rankax.ext.blocks.arrays import blocks_of
from rankax.ext.blocks.call import check_dtype
from rankax.ext.blocks.programs import in_native_order

Dims = tuple[str, ...]

# Imported by name because a type checker need not have xarray installed.
xr: Any = importlib.import_module("xarray")


class NamedLeaf(NamedTuple):
    """A named array among the leaves of the arguments, with its core dimensions."""

    value: Any
    path: str
    rank: Rank
    core: Dims

    @property
    def variables(self) -> list[tuple[str, Any]]:
        """The arrays of it, with their paths: those of a Dataset, or itself."""
        if not isinstance(self.value, xr.Dataset):
            return [(self.path, self.value)]
        return [(f"{self.path}[{name!r}]", v) for name, v in self.value.data_vars.items()]

    def dims(self, reduced: Dims, site: str) -> Dims:
        """Return the reduced dimensions that it has, and the core dimensions."""
        dims = *(dim for dim in reduced if dim in self.value.dims), *self.core
        for at, variable in self.variables:
            if absent := [dim for dim in dims if dim not in variable.dims]:
                what = "core" if absent[0] in self.core else "reduced"
                names = [
                    str(name) for name, x in self.value.data_vars.items() if {*dims} <= {*x.dims}
                ]
                advice = f"; leave it out: {self.path}[{names}]" if names else ""
                raise ValueError(
                    f"{site}: {at} lacks the {what} dimension {absent[0]!r}, which other variables "
                    f"of {self.path} have{advice}"
                )
        return dims

    def aligned(self, data: Any, reduced: Dims) -> Any:
        """Return its data with an axis for each reduced dimension that it lacks."""
        if isinstance(data, np.ndarray):
            data = in_native_order(data)
        lacks = (None if dim not in self.value.dims else slice(None) for dim in reduced)
        return data[(..., *lacks, *(slice(None) for _ in self.core))]

    def shape(self, reduced: Dims) -> jax.ShapeDtypeStruct:
        """Return shape and dtype with the reduced and core axes only."""
        sizes = [self.value.sizes.get(dim, 1) for dim in (*reduced, *self.core)]
        _, variable = self.variables[0]
        return jax.ShapeDtypeStruct(sizes, variable.dtype.newbyteorder("="))


def checked_dtype(value: Any, site: str) -> Any:
    """Return a dtype of floats."""
    if value is None or jnp.issubdtype(value, jnp.floating):
        return None if value is None else jnp.dtype(value)
    raise TypeError(f"{site}: dtype must be one of floats, such as 'float32', got {value!r}")


def _converted(value: Any, dtype: Any) -> Any:
    """Convert the floats of a named array, or of all variables of a Dataset."""
    if dtype is None:
        return value
    if isinstance(value, xr.Dataset):
        return value.assign({name: _converted(x, dtype) for name, x in value.data_vars.items()})
    return value.astype(dtype) if value.dtype.kind == "f" else value


def named_leaves(call: KernelCall, core_dims: Any, dtype: Any, site: str) -> dict[int, NamedLeaf]:
    """Return the named arrays among the leaves of a call, by position; floats get this dtype."""
    triples = [*zip(call.paths, call.leaves, call.structure.ranks, strict=True)]
    triples += [(name, value, None) for name, value in call.others.items()]
    named: dict[int, NamedLeaf] = {}
    for i, (path, value, rank) in enumerate(triples):
        if blocks_of(value) == "xarray":
            if rank is None:
                raise TypeError(
                    f"{site}: {path} is an xarray object, but it has no rank; give it one, or pass "
                    "its values"
                )
            value = _converted(value, dtype)
            core = _core_dims(rank, core_dims, [*value.dims], path, site)
            if absent := [repr(axis) for axis in rank.batch if axis not in value.dims]:
                raise ValueError(
                    f"{site}: {path} has rank {rank}, but not the dimension "
                    f"{listed(absent, 'or')}: it has "
                    f"{listed([repr(d) for d in value.dims]) or 'none'}; rename one"
                )
            named[i] = NamedLeaf(value, path, rank, core)
            _check_variables(named[i], site)
        elif rank is not None and not is_number(value) and jnp.ndim(value) != rank.rank:
            raise TypeError(
                f"{site}: {path} has shape {jnp.shape(value)} and rank {rank}, so it has batch "
                "axes, but they have no names; pass an xarray.DataArray"
            )
    if not named:
        raise TypeError(
            f"{site}: no argument with a rank is a DataArray or a Dataset; call {call.name} itself"
        )
    return named


def _check_variables(leaf: NamedLeaf, site: str) -> None:
    for at, variable in leaf.variables:
        check_dtype(variable.dtype, f"{site}: {at} is an array", at)
        for dim in leaf.core:
            if (number := len(variable.chunksizes.get(dim, ()))) > 1:
                raise ValueError(
                    f"{site}: {at} is cut into {plural(number, 'chunk')} along its core dimension "
                    f"{dim!r}, and one item needs all of it; pass {at}.chunk({{{dim!r}: -1}})"
                )


def _explicit_core(core_dims: Any, path: str, parameter: str, site: str) -> Dims | None:
    """Return the entry of ``core_dims`` for one leaf; a name is the entry for every leaf."""
    if core_dims is None or isinstance(core_dims, str):
        return None if core_dims is None else (core_dims,)
    if not isinstance(core_dims, Mapping):
        raise TypeError(
            f"{site}: core_dims must be a name, or a dict from parameters to names, as in "
            f"{{{path!r}: ('level',)}}, got {type(core_dims).__name__} {core_dims!r}"
        )
    entry = core_dims.get(path, core_dims.get(parameter))
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


def _core_dims(rank: Rank, core_dims: Any, dims: list[Any], path: str, site: str) -> Dims:
    """Return the core dimensions of a named array that has ``dims``, in the order of its rank."""
    parameter = re.split(r"[.\[]", path)[0]
    explicit = _explicit_core(core_dims, path, parameter, site)
    last = dims[-rank.rank :] if rank.rank else []
    example = tuple(last + ["..."] * (rank.rank - len(last)))
    advice = f"core_dims={{{parameter!r}: {example!r}}}"
    present = f"{path} has the dimensions {listed([repr(d) for d in dims]) or 'of a scalar'}"
    if explicit is not None and len(explicit) != rank.rank:
        raise ValueError(
            f"{site}: {path} has rank {rank}, that is {plural(rank.rank, 'core axis')}, but "
            f"core_dims names {plural(len(explicit), 'dimension')}: {listed(list(explicit))}"
        )
    names = declared_names(rank) if explicit is None else explicit
    core = tuple(name for name in names if name is not None)
    if len(core) < len(names):
        raise ValueError(
            f"{site}: {path} has rank {rank}, which does not name its core axes, and {present}; "
            f"name the core dimensions in order: {advice}"
        )
    if absent := [name for name in core if name not in dims]:
        known = [dim for dim in dims if isinstance(dim, str)]
        close = [dim for name in core for dim in difflib.get_close_matches(name, known, 1)]
        if len({*close}) == len(core):
            advice = f"core_dims={{{parameter!r}: {tuple(close)!r}}}"
        declares = "core_dims names" if explicit is not None else f"rank {rank} declares"
        raise ValueError(
            f"{site}: for {path}, {declares} the core dimension {absent[0]!r}, which is absent: "
            f"{present}; rename one, or write {advice}"
        )
    if len(set(core)) < len(core):
        raise ValueError(
            f"{site}: {path} has rank {rank}, but no xarray object has two dimensions of one "
            f"name; name the core dimensions: {advice}"
        )
    return core


def batch_dims(leaves: Collection[NamedLeaf], site: str) -> Dims:
    """Return all batch dimensions; refuse one that is a core dimension of another array."""
    first: dict[str, NamedLeaf] = {}  # the first leaf with each batch dimension
    for leaf in leaves:
        for dim in leaf.value.dims:
            if dim not in leaf.core:
                first.setdefault(dim, leaf)
    for leaf in leaves:
        for dim in leaf.core:
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
    reduce_dims = options.over if reduce_dims is None else reduce_dims
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
    leaves: Collection[NamedLeaf],
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
    kept: list[bool] = [False] * len(jax.tree.leaves(out))
    if reductions is not None and any(entry.is_kept for entry in reductions.entries):
        kept = [entry.is_kept for entry in reductions.of_outputs(out)]
    explicit = _explicit_dims(output_dims, out, site)
    declared = _declared_dims(kernel, leaves, out)
    all_dims: list[list[str]] = []
    named = zip(leaves_with_names(out, "output"), kept, explicit, declared, strict=True)
    for (path, leaf), is_kept, names, dims in named:
        front = reduced if is_kept else ()
        count = len(leaf.shape) - len(front)
        axes = f"{site}: {path} has {plural(count, 'core axis')}"
        if names is None:
            dims = dims if count else ()
            if dims is None or len(dims) != count:
                example = tuple(f"dim{axis}" for axis in range(count))
                raise ValueError(f"{axes}, but no names; write output_dims={example}")
        elif len(dims := names) != count:
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


def resized_dims(
    leaves: Collection[NamedLeaf], outs: Sequence[Any], dims_of_outs: Sequence[Sequence[str]]
) -> set[str]:
    """Return the core dimensions that xarray is not to align.

    They have several lengths, or the kernel declares several names for them.
    """
    lengths: dict[str, set[int]] = {}
    names: dict[str, set[str]] = {}
    for leaf in leaves:
        for dim, name in zip(leaf.core, declared_names(leaf.rank), strict=True):
            lengths.setdefault(dim, set()).add(leaf.value.sizes[dim])
            names.setdefault(dim, set()).update([name] if name else ())
    for out, dims in zip(outs, dims_of_outs, strict=True):
        for dim, length in zip(dims, out.shape, strict=True):
            if dim in lengths:  # reduced dimensions have the length 1 here
                lengths[dim].add(length)
    return {dim for dim in lengths if len(lengths[dim]) > 1 or len(names[dim]) > 1}


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
    paths = [path for path, _ in leaves_with_names(out, "output")]
    return [
        None if entry is None else read_dims(entry, f"{site}: output_dims for {path}")
        for entry, path in zip(entries, paths, strict=True)
    ]


def _declared_dims(
    kernel: KernelSpec, leaves: Collection[NamedLeaf], out: Any
) -> list[Dims | None]:
    """Return the declared names of each output, as the dimensions that the arguments have.

    A name that stands for different dimensions of the arguments decides nothing.
    """
    ranks: Sequence[Rank | None] = [None] * len(jax.tree.leaves(out))
    if kernel.declaration.outputs is not None:
        with contextlib.suppress(ValueError):  # a reduction returns another tree
            ranks = ranks_of_output(kernel.declaration.outputs, out)
    dims_of: dict[str | None, set[str]] = {}
    for leaf in leaves:
        for name, dim in zip(declared_names(leaf.rank), leaf.core, strict=True):
            dims_of.setdefault(name, set()).add(dim)
    dims_of[None] = set()  # an axis without a name

    def dims(rank: Rank | None) -> Dims | None:
        names = (None,) if rank is None else declared_names(rank)
        found = [dims_of.get(name, {name}) for name in names]
        known = [str(dim) for every in found for dim in every if len(every) == 1]
        return tuple(known) if len(known) == len(names) else None

    return list(map(dims, ranks))


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


def with_coords(tree: Any, coords: Any, all_dims: Sequence[Sequence[str]], site: str) -> Any:
    """Give outputs coordinates along their core dimensions, and take units from them.

    A kernel may return something of other units than its arguments have.
    """
    if not isinstance(coords, Mapping):
        raise TypeError(
            f"{site}: output_coords must map dimensions of outputs to coordinates, as in "
            f"{{'degree': [2, 1, 0]}}, got {type(coords).__name__} {coords!r}"
        )
    known = {dim for dims in all_dims for dim in dims}
    if absent := [dim for dim in coords if dim not in known]:
        raise ValueError(
            f"{site}: output_coords names {absent[0]!r}, but the core dimensions of outputs are "
            f"{listed([repr(dim) for dim in sorted(known)]) or 'none'}"
        )

    def changed(leaf: Any) -> Any:
        if along := {dim: x for dim, x in coords.items() if dim in leaf.dims}:
            leaf = leaf.assign_coords(along)
        if xr.get_options()["keep_attrs"] == "default":
            for x in leaf.data_vars.values() if isinstance(leaf, xr.Dataset) else [leaf]:
                x.attrs.pop("units", None)
        return leaf

    return jax.tree.map(changed, tree, is_leaf=lambda x: isinstance(x, (xr.DataArray, xr.Dataset)))


def as_dataset(tree: Any, name: str) -> Any:
    """Return one Dataset; names begin with the variable, if an argument is a Dataset."""
    variables: dict[str, Any] = {}
    for path, leaf in leaves_with_names(tree, ""):
        key = "_".join(re.findall(r"\w+", path))
        if isinstance(leaf, xr.Dataset):
            variables |= {f"{v}_{key}".strip("_"): x for v, x in leaf.data_vars.items()}
        else:
            variables[key or leaf.name or name] = leaf
    return xr.Dataset(variables)
