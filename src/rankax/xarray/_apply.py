# SPDX-License-Identifier: MIT
"""``apply``: a kernel on named arrays, through `xarray.apply_ufunc`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.blocks import blocks_of
from rankax._base.nodes import children_of, field_names, is_leaf
from rankax._base.trees import leaves_with_names, spread_prefix
from rankax._base.words import listed, plural
from rankax._blocks.dtypes import checked_dtype, in_native_order
from rankax._call.arguments import is_number
from rankax._call.bind import BoundKernel, flatten, rebind
from rankax._call.kernel import Kernel
from rankax._declare.dims import Rank
from rankax._declare.ranks import ranks_of_leaves
from rankax.xarray._dims import declared_names, dims_given, dims_of_argument, read_dims

__all__ = ["apply"]

# Not by `import`, for a type checker need not have it.
xr: Any = importlib.import_module("xarray")


def apply(
    kernel: Callable[..., Any],
    *args: Any,
    core_dims: Any = None,
    output_dims: Any = None,
    reduce_dims: Any = None,
    **kwargs: Any,
) -> Any:
    r"""Call a kernel of `rankax.auto_vmap` with named arrays, whose dimensions are matched by name.

    With ``x`` of dimensions ``("level", "time")`` and a kernel of rank ``"level"`` equivalent to ::

        xarray.apply_ufunc(kernel, x, input_core_dims=[["level"]], dask="allowed")

    Core dimensions are found by the names that the kernel declares, in any order. All others are
    batch dimensions, broadcast by name.

    Parameters
    ----------
    kernel : callable
        Decorated with `rankax.auto_vmap`; a bound method too.
    *args, **kwargs
        Its arguments. Each array with a rank, also inside a pytree, may be an `xarray.DataArray`,
        or a `xarray.Dataset`, of which each variable is taken in turn. Other arrays have no names,
        so they must have exactly the axes of their rank.
    core_dims : dict, optional
        From parameters to the names of their core dimensions, in the order of the kernel's axes:
        ``{"v": ("level",)}``. It is needed where the rank has no names (an int), or other ones than
        the array. For a part of a pytree the key is its path, as in an error: ``"pose['R']"``.
    output_dims : str, tuple of str, or a pytree of those, optional
        The names of the outputs' core dimensions; for several outputs, a tree like the output of
        the kernel with one entry for each array, or a dict by path. By default they are those that
        the kernel declares, which are the dimensions of the arguments where the names are the same.
    reduce_dims : str or tuple of str, optional
        The batch dimensions that a kernel with ``reduce`` reduces, in place of its ``reduce_axis``.
        By default all of them.

    Returns
    -------
    DataArray, Dataset, dict or tuple
        As the output of the kernel is: a `xarray.DataArray` for one array; a `xarray.Dataset` for a
        dict, NamedTuple or dataclass; a tuple for a tuple. With a Dataset among the arguments, each
        array is a Dataset of as many variables, and a dict stays a dict. Coordinates, names and
        attributes are kept by xarray's own rules (`xarray.set_options` of ``keep_attrs``).

        Where the data are arrays of dask or cubed, so are those that are returned, and nothing is
        computed yet.

    Raises
    ------
    TypeError
        An array holds dates or objects, or 64 bits where JAX computes with 32.
    TypeError
        An array without names has batch axes, or one with names has no rank.
    ValueError
        A core dimension is absent, ambiguous or cut into chunks.
    ValueError
        A core dimension of an output has no name.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np, xarray as xr
    >>> import rankax, rankax.xarray
    >>> @rankax.auto_vmap(p="level", t="level")
    ... def mean_temperature(p, t):
    ...     return jnp.trapezoid(t, p) / (p[-1] - p[0])
    >>> p = xr.DataArray(np.array([1000.0, 800.0, 500.0], "float32"), dims="level")
    >>> t = xr.DataArray(np.ones((3, 4), "float32"), dims=("level", "time"), name="t")
    >>> rankax.xarray.apply(mean_temperature, p, t).dims
    ('time',)
    """
    if inspect.ismethod(kernel):
        kernel, args = kernel.__func__, (kernel.__self__, *args)
    own = getattr(kernel, "_kernel", None)
    if not isinstance(own, Kernel):
        raise TypeError(
            f"rankax.xarray.apply: kernel must be decorated with rankax.auto_vmap, got {kernel!r}"
        )
    where = f"rankax.xarray.apply({own.name})"
    call = flatten(own, args, kwargs)
    named = _Named(own, kernel, call, where, core_dims, reduce_dims)
    outs, treedef = jax.tree.flatten(named.outputs())
    if not outs:
        raise TypeError(f"{where}: the kernel returns no array")
    dims = named.dims_of_outputs(treedef.unflatten(outs), output_dims)
    arrays = [leaf.value for leaf in named.leaves if leaf.dims is not None]
    found = xr.apply_ufunc(
        named.on_data,
        *arrays,
        input_core_dims=[list(d) for d in named.input_core_dims()],
        output_core_dims=[list(d) for d in dims],
        dask="allowed",
    )
    results = [found] if len(outs) == 1 else list(found)
    return _assembled(treedef.unflatten(results))


class _Leaf(NamedTuple):
    """One leaf of the arguments: a named array with its core dimensions, or anything else."""

    value: Any
    path: str
    rank: Rank | None
    dims: tuple[str, ...] | None  # None: it is no named array


class _Named:
    """The named arrays of a call, and what xarray has to know of it."""

    def __init__(
        self,
        kernel: Kernel,
        mapped: Callable[..., Any],
        call: BoundKernel,
        where: str,
        core_dims: Any,
        reduce_dims: Any,
    ) -> None:
        self.kernel = kernel
        self.call = call
        self.where = where
        self._check_untouched()
        self.leaves = [
            self._leaf(value, path, rank, core_dims)
            for value, path, rank in zip(
                call.leaves, call.structure.paths, call.structure.ranks, strict=True
            )
        ]
        self.batch_dims = tuple(
            dict.fromkeys(
                dim
                for leaf in self.leaves
                if leaf.dims is not None
                for variable in _variables(leaf.value)
                for dim in variable.dims
                if dim not in leaf.dims
            )
        )
        if all(leaf.dims is None for leaf in self.leaves):
            raise TypeError(
                f"{where}: no argument with a rank is a DataArray or a Dataset; call "
                f"{kernel.name} itself"
            )
        self._check_apart()
        self.reduced = self._reduced(reduce_dims)
        axes = tuple(range(-len(self.reduced), 0))
        reduce = kernel.preset.reduce is not None
        self.mapped: Any = mapped.with_options(reduce_axis=axes) if reduce else mapped  # pyright: ignore

    def _check_untouched(self) -> None:
        for name, value in self.call.arguments.arguments.items():
            if name not in self.call.names and blocks_of(value) == "xarray":
                raise TypeError(
                    f"{self.where}: {name} is an object of xarray, but it has no rank; give it "
                    "one, or pass its values"
                )

    def _check_apart(self) -> None:
        """Refuse a dimension that is core for one array and batch for another."""
        for leaf in self.leaves:
            for dim in leaf.dims or ():
                if dim in self.batch_dims:
                    other = next(
                        other
                        for other in self.leaves
                        if other.dims is not None
                        and dim not in other.dims
                        and any(dim in variable.dims for variable in _variables(other.value))
                    )
                    raise ValueError(
                        f"{self.where}: {dim!r} is a core dimension of {leaf.path}, but a batch "
                        f"dimension of {other.path}, whose rank is {other.rank}; rename it in one "
                        "of them, or declare it as core in both"
                    )

    def _leaf(self, value: Any, path: str, rank: Rank | None, core_dims: Any) -> _Leaf:
        if not isinstance(value, (xr.DataArray, xr.Dataset, xr.Variable)):
            if rank is not None and not is_number(value) and jnp.ndim(value) != rank.rank:
                raise TypeError(
                    f"{self.where}: {path} has shape {jnp.shape(value)} and rank {rank}, so it has "
                    "batch axes, but they have no names; pass an xarray.DataArray"
                )
            return _Leaf(value, path, rank, None)
        if rank is None:
            raise TypeError(
                f"{self.where}: {path} is an object of xarray, but it has no rank; give it one, or "
                "pass its values"
            )
        given = dims_given(core_dims, path, self.where)
        parameter = re.split(r"[.\[]", path)[0]
        dims: tuple[str, ...] = ()
        for variable, at in zip(_variables(value), _paths(value, path), strict=True):
            dims = dims_of_argument(rank, given, variable.dims, at, parameter, self.where)
            checked_dtype(variable.dtype, f"{self.where}: {at} is an array", at)
            self._check_whole(variable, dims, at)
        return _Leaf(value, path, rank, dims)

    def _check_whole(self, variable: Any, dims: Sequence[str], path: str) -> None:
        """Refuse a core dimension that is cut into chunks."""
        for dim in dims:
            chunks = dict(variable.chunksizes).get(dim, ())
            if len(chunks) > 1:
                raise ValueError(
                    f"{self.where}: {path} is cut into {plural(len(chunks), 'chunk')} along its "
                    f"core dimension {dim!r}, and one item needs it whole; pass "
                    f"{path}.chunk({{{dim!r}: -1}})"
                )

    def _reduced(self, given: Any) -> tuple[str, ...]:
        """Return the dimensions that are reduced, which come behind the other batch dimensions."""
        options = self.kernel.preset
        if options.reduce is None:
            if given is not None:
                raise TypeError(
                    f"{self.where}: reduce_dims={given!r} needs a kernel with reduce, by what to "
                    "reduce"
                )
            return ()
        if given is None:
            if options.reduce_axis is not None:
                raise ValueError(
                    f"{self.where}: {self.kernel.name} has reduce_axis={options.reduce_axis}, but "
                    "the batch dimensions have names; say which are reduced: reduce_dims="
                    f"{self.batch_dims[-1:]}"
                )
            return self.batch_dims
        names = read_dims(given, f"{self.where}: reduce_dims")
        if absent := [name for name in names if name not in self.batch_dims]:
            raise ValueError(
                f"{self.where}: reduce_dims names {absent[0]!r}, which is no batch dimension: "
                f"there are {listed([repr(dim) for dim in self.batch_dims]) or 'none'}"
            )
        return names

    # For xarray.

    def input_core_dims(self) -> list[tuple[str, ...]]:
        """Return the dimensions that xarray is to put last, of each named array."""
        return [(*self._present(leaf), *leaf.dims) for leaf in self.leaves if leaf.dims is not None]

    def _present(self, leaf: _Leaf) -> list[str]:
        """Return the reduced dimensions that an array has; all variables must have the same."""
        every = [[d for d in self.reduced if d in v.dims] for v in _variables(leaf.value)]
        for names, path in zip(every, _paths(leaf.value, leaf.path), strict=True):
            if names != every[0]:
                raise ValueError(
                    f"{self.where}: {path} has not the same reduced dimensions as the other "
                    f"variables: {listed(names) or 'none'}, not {listed(every[0]) or 'none'}"
                )
        return every[0] if every else []

    def on_data(self, *data: Any) -> Any:
        """Call the kernel with bare arrays, core axes last."""
        given = iter(data)
        leaves = [
            leaf.value if leaf.dims is None else self._aligned(leaf, next(given))
            for leaf in self.leaves
        ]
        out = self._called(leaves)
        arrays = jax.tree.leaves(out)
        if not any(isinstance(x, jax.Array) for x in data):
            arrays = [np.array(x) if isinstance(x, jax.Array) else x for x in arrays]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    def _aligned(self, leaf: _Leaf, data: Any) -> Any:
        """Give an array an axis for each reduced dimension that it lacks."""
        if isinstance(data, np.ndarray):
            data = in_native_order(data)
        present = self._present(leaf)
        if len(present) == len(self.reduced):
            return data
        index = [slice(None) if dim in present else None for dim in self.reduced]
        assert leaf.dims is not None
        return data[(Ellipsis, *index, *(slice(None) for _ in leaf.dims))]

    def _called(self, leaves: Sequence[Any], mapped: Any = None) -> Any:
        call = rebind(
            self.kernel,
            self.call.names,
            list(leaves),
            self.call.treedef,
            {k: v for k, v in self.call.arguments.arguments.items() if k not in self.call.names},
        )
        return (mapped or self.mapped)(*call.arguments.args, **call.arguments.kwargs)

    # The outputs.

    def outputs(self) -> Any:
        """Return the shapes of what the kernel returns without the batch dimensions that stay."""
        shapes = [self._shape(leaf) for leaf in self.leaves]
        at = [i for i, shape in enumerate(shapes) if shape is not None]
        plain = self.mapped.with_options(
            jit=False, compiler_options=None, chunk_size=None, memory_limit=None, progress=False
        )

        def trace(given: list[Any]) -> Any:
            leaves = [leaf.value for leaf in self.leaves]
            for i, leaf in zip(at, given, strict=True):
                leaves[i] = leaf
            return self._called(leaves, plain)

        return jax.eval_shape(trace, [shapes[i] for i in at])

    def _shape(self, leaf: _Leaf) -> jax.ShapeDtypeStruct | None:
        if leaf.dims is None:
            if leaf.rank is None or is_number(leaf.value):
                return None
            dtype = jax.dtypes.canonicalize_dtype(leaf.value.dtype)
            return jax.ShapeDtypeStruct(leaf.value.shape, dtype)
        variable = next(iter(_variables(leaf.value)))
        reduced = tuple(variable.sizes.get(dim, 1) for dim in self.reduced)
        core = tuple(variable.sizes[dim] for dim in leaf.dims)
        return jax.ShapeDtypeStruct(reduced + core, variable.dtype.newbyteorder("="))

    def dims_of_outputs(self, out: Any, given: Any) -> list[tuple[str, ...]]:
        """Return the names of all axes of each output that are no batch dimensions."""
        places = leaves_with_names(out, "output")
        said = _said(given, out, self.where)
        declared = self._declared(out)
        dims: list[tuple[str, ...]] = []
        is_kept = self._is_kept(out)
        for i, (path, leaf) in enumerate(places):
            front = self.reduced if is_kept[i] else ()
            count = len(leaf.shape) - len(front)
            names = said[i] if said[i] is not None else declared[i]
            if names is None or len(names) != count:
                raise ValueError(self._unnamed(path, count, names, said[i] is not None))
            if taken := [name for name in names if name in self.batch_dims]:
                raise ValueError(
                    f"{self.where}: {path} has the core dimension {taken[0]!r}, which is a batch "
                    "dimension of the arguments; give it another name by output_dims"
                )
            dims.append((*front, *names))
        return dims

    def _unnamed(self, path: str, count: int, names: Any, is_given: bool) -> str:
        axes = f"{self.where}: {path} has {plural(count, 'core axis')}"
        if is_given:
            return (
                f"{axes}, but output_dims names {plural(len(names), 'dimension')}: {listed(names)}"
            )
        example = tuple(f"dim{i}" for i in range(count))
        return f"{axes}, which nothing names; write output_dims={example}"

    def _is_kept(self, out: Any) -> list[bool]:
        """Say which outputs are not reduced, though the kernel reduces."""
        reductions = self.kernel.preset.reduce
        if reductions is None or all(entry is not None for entry in reductions.entries):
            return [False] * len(jax.tree.leaves(out))
        return [entry is None for entry in reductions.of_outputs(out)]

    def _declared(self, out: Any) -> list[tuple[str, ...] | None]:
        """Return the names that the kernel declares for its outputs, as the arguments have them."""
        count = len(jax.tree.leaves(out))
        scalars = [() if not leaf.shape else None for leaf in jax.tree.leaves(out)]
        if self.kernel.declaration.outputs is None:
            return scalars
        try:
            ranks = ranks_of_leaves(self.kernel.declaration.outputs, out, "output")
        except ValueError:  # a reduction makes something else of it
            return scalars
        known: dict[str, set[str]] = {}
        for leaf in self.leaves:
            if leaf.dims is not None and leaf.rank is not None:
                for name, dim in zip(declared_names(leaf.rank), leaf.dims, strict=True):
                    if name is not None:
                        known.setdefault(name, set()).add(dim)
        found: list[tuple[str, ...] | None] = []
        for i in range(count):
            rank = ranks[i]
            names = None if rank is None else declared_names(rank)
            if names is None or any(n is None or len(known.get(n, {n})) > 1 for n in names):
                found.append(scalars[i])
                continue
            known_names = [name for name in names if name is not None]
            found.append(tuple(next(iter(known.get(name, {name}))) for name in known_names))
        return found


def _variables(value: Any) -> list[Any]:
    """Return the arrays of a named object: itself, or the variables of a Dataset."""
    return list(value.data_vars.values()) if isinstance(value, xr.Dataset) else [value]


def _paths(value: Any, path: str) -> list[str]:
    if isinstance(value, xr.Dataset):
        return [f"{path}[{name!r}]" for name in value.data_vars]
    return [path]


def _said(given: Any, out: Any, where: str) -> list[tuple[str, ...] | None]:
    """Return what ``output_dims`` says of each output."""
    places = leaves_with_names(out, "output")
    if given is None:
        return [None] * len(places)
    if is_leaf(out):
        return [read_dims(given, f"{where}: output_dims")]

    def is_entry(node: Any) -> bool:
        return (
            node is None
            or isinstance(node, str)
            or (type(node) in (tuple, list) and all(isinstance(part, str) for part in node))
        )

    try:
        entries = spread_prefix(
            given, out, "output", is_entry=is_entry, what="entry of output_dims"
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return [
        None if entry is None else read_dims(entry, f"{where}: output_dims for {path}")
        for entry, (path, _) in zip(entries, places, strict=True)
    ]


def _assembled(tree: Any) -> Any:
    """Turn a tree of named arrays into a Dataset where it has names, else into tuples."""
    if isinstance(tree, (xr.DataArray, xr.Dataset, xr.Variable)):
        return tree
    children = children_of(tree)
    if field_names(tree, children) is None:
        return tuple(_assembled(child.value) for child in children)
    named = {"_".join(re.findall(r"\w+", path)): leaf for path, leaf in leaves_with_names(tree, "")}
    if all(isinstance(leaf, xr.DataArray) for leaf in named.values()):
        return xr.Dataset(named)
    return named
