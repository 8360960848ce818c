# SPDX-License-Identifier: MIT
"""A call of a kernel with arrays in blocks: what is checked, and what is left for the blocks.

Nothing is computed here. Shapes are checked as in every call; shapes and dtypes of the outputs are
those of the kernel traced for one item.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.blocks import blocks_of, in_blocks
from rankax._base.trees import leaves_with_names
from rankax._base.words import listed, plural
from rankax._blocks.backend import Backend, Chunks, Input
from rankax._blocks.dtypes import checked_dtype
from rankax._blocks.packing import Packing
from rankax._blocks.programs import (
    CONFIG,
    Leaf,
    MapBlock,
    MergeStates,
    OnBlocks,
    Reduce,
    ResultOfStates,
    Setup,
    StateOfBlock,
    States,
)
from rankax._call.arguments import check_key, converted, is_array, is_number
from rankax._call.bind import BoundKernel, flatten
from rankax._call.kernel import Kernel
from rankax._options import Options
from rankax._plan.leaves import LeafPlan
from rankax._plan.nesting import Nesting
from rankax._reduce.fold import Fold
from rankax._reduce.merge import BlockStates
from rankax._reduce.run import Reductions

__all__ = ["call_on_blocks"]


def call_on_blocks(
    kernel: Kernel, mapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a kernel with arguments of which some are arrays in blocks."""
    call = flatten(kernel, args, kwargs)
    package = _package(kernel, call)
    options = kernel.options()
    _check_options(kernel, options)
    leaves, values = _leaves(kernel, call, package)
    shapes = [
        jax.ShapeDtypeStruct(jnp.shape(value), leaf.item.dtype) if leaf.item is not None else value
        for leaf, value in zip(leaves, values, strict=True)
    ]
    nesting = dataclasses.replace(call, leaves=shapes).plan(options)
    if nesting.splits:
        raise _split_key(kernel, package, call, nesting)
    backend: Backend = importlib.import_module(f"rankax._blocks.on_{package}").BACKEND
    others = {k: v for k, v in call.arguments.arguments.items() if k not in call.names}
    setup = Setup(
        mapped,
        _options_of_blocks(options),
        {name: getattr(jax.config, name) for name in CONFIG},
        call.names,
        call.treedef,
        others,
        _with_items(leaves, nesting, call),
    )
    lazy = _Lazy(kernel, call, setup, nesting, backend, values)
    return lazy.mapped() if options.reduce is None else lazy.reduced(options.reduce)


def _package(kernel: Kernel, call: BoundKernel) -> str:
    """Return whose arrays came; refuse those of two packages, and those where no rank is."""
    found: dict[str, str] = {}
    ranks = zip(call.leaves, call.structure.paths, call.structure.ranks, strict=True)
    for leaf, path, rank in ranks:
        if package := blocks_of(leaf):
            if package == "xarray":
                raise in_blocks(package, kernel.name, path)
            if rank is None:
                raise _without_rank(kernel, package, path)
            found.setdefault(package, path)
    for name, value in call.arguments.arguments.items():
        if name in call.names:
            continue
        for path, leaf in _leaves_of(value, name):
            if package := blocks_of(leaf):
                raise _without_rank(kernel, package, path)
    if len(found) > 1:
        arrays = listed([f"{path} is of {package}" for package, path in found.items()])
        raise TypeError(
            f"{kernel.name}(): {arrays}, and one call is evaluated by one of them; convert one"
        )
    return next(iter(found))


def _leaves_of(value: Any, name: str) -> list[tuple[str, Any]]:
    try:
        return leaves_with_names(value, name)
    except (TypeError, ValueError):  # no pytree, so nobody looks inside
        return []


def _without_rank(kernel: Kernel, package: str, path: str) -> TypeError:
    return TypeError(
        f"{kernel.name}(): {path} is a {package} array, but it has no rank, so it would go whole "
        "to every item; give it a rank, or compute it first"
    )


def _split_key(kernel: Kernel, package: str, call: BoundKernel, nesting: Nesting) -> TypeError:
    path, shape = call.structure.paths[nesting.splits[0].position], nesting.plan.batch_shape
    return TypeError(
        f"{kernel.name}(): {path} has the rank SplitKey, but {package} evaluates block by block, "
        "and each block would count its items from 0 and draw the same; pass a key for each item: "
        f"jax.random.split({path}, {shape})"
    )


def _check_options(kernel: Kernel, options: Options) -> None:
    if options.progress is not False:
        raise TypeError(
            f"{kernel.name}(): progress={options.progress!r} cannot be told from blocks, which "
            "are evaluated elsewhere; use the progress bar or the dashboard of the scheduler, and "
            f"{kernel.name}.with_options(progress=False)"
        )


def _options_of_blocks(options: Options) -> dict[str, Any]:
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return {**given, "reduce": None, "reduce_axis": None, "jit": False}


# From arguments to leaves.


def _leaves(kernel: Kernel, call: BoundKernel, package: str) -> tuple[list[Leaf], list[Any]]:
    """Say what each leaf becomes in a block; return also the arrays and numbers."""
    leaves: list[Leaf] = []
    values: list[Any] = []
    for i, rank in enumerate(call.structure.ranks):
        value, path = call.leaves[i], call.structure.paths[i]
        if rank is None:
            leaf = Leaf("static", value)
        elif blocks_of(value):
            leaf = _leaf_in_blocks(kernel, value, path, package)
        else:
            if not (is_array(value) or is_number(value)):
                value = converted(kernel, value, path, shapes_only=False)
            leaf, value = _leaf(value)
        if i in call.structure.keys and leaf.key_impl is None:
            check_key(kernel, value, path, rank)
        leaves.append(leaf)
        values.append(value)
    return leaves, values


def _leaf(value: Any) -> tuple[Leaf, Any]:
    """Say what an array of JAX or NumPy becomes, or a number."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # As what it is, for its shape counts; its data go.
        return Leaf("array", None, jax.random.key_impl(value), _aval(value)), value
    if isinstance(value, jax.Array) and not value.shape and jax.typeof(value).weak_type:
        value = value.item()
    # A float64 of NumPy is a float of Python's too, but not a weak one.
    if is_number(value) and not isinstance(value, np.generic):
        return Leaf("number", None, None, _aval(value)), value
    value = np.asarray(value)
    return Leaf("array", None, None, _aval(value)), value


def _aval(value: Any) -> jax.ShapeDtypeStruct:
    """Return dtype and weakness as JAX has them."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct((), value.dtype)
    if not isinstance(value, np.ndarray):
        aval = jax.typeof(value)
        return jax.ShapeDtypeStruct((), aval.dtype, weak_type=True)
    dtype = jax.dtypes.canonicalize_dtype(value.dtype.newbyteorder("="))
    return jax.ShapeDtypeStruct((), dtype)


def _leaf_in_blocks(kernel: Kernel, value: Any, path: str, package: str) -> Leaf:
    came = f"{kernel.name}(): {path} is a {package} array"
    native = checked_dtype(value.dtype, came, path)
    if any(size != size for size in value.shape):
        raise ValueError(
            f"{came} of unknown length along axis "
            f"{[size != size for size in value.shape].index(True)}; call "
            f"{path}.compute_chunk_sizes() first"
        )
    return Leaf("array", None, None, jax.ShapeDtypeStruct((), native))


def _with_items(leaves: Sequence[Leaf], nesting: Nesting, call: BoundKernel) -> tuple[Leaf, ...]:
    """Give each leaf the shape of one item; that of a key is one of its data."""
    ranked = [i for i, rank in enumerate(call.structure.ranks) if rank is not None]
    cores = {i: leaf.core_shape for i, leaf in zip(ranked, nesting.plan.leaves, strict=True)}
    found: list[Leaf] = []
    for i, leaf in enumerate(leaves):
        if leaf.item is None:
            found.append(leaf)
            continue
        item = jax.ShapeDtypeStruct(cores[i], leaf.item.dtype, weak_type=bool(leaf.item.weak_type))
        if leaf.key_impl is not None:
            item = _key_data_of(item)
        found.append(dataclasses.replace(leaf, item=item))
    return tuple(found)


def _key_data_of(item: Any) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, item)
    return jax.ShapeDtypeStruct(data.shape, data.dtype)


class _Lazy:
    """A call that is checked, and the arrays in blocks that it becomes."""

    def __init__(
        self,
        kernel: Kernel,
        call: BoundKernel,
        setup: Setup,
        nesting: Nesting,
        backend: Backend,
        values: Sequence[Any],
    ) -> None:
        self.kernel = kernel
        self.setup = setup
        self.plan = nesting.plan
        self.backend = backend
        ranked = [i for i, rank in enumerate(call.structure.ranks) if rank is not None]
        plans = dict(zip(ranked, nesting.plan.leaves, strict=True))
        both = zip(values, setup.leaves, strict=True)
        self.numbers = [value for value, leaf in both if leaf.kind == "number"]
        arrays = [
            (plans[i], setup.leaves[i], values[i])
            for i in ranked
            if setup.leaves[i].kind == "array"
        ]
        for plan, _, value in arrays:
            self._check_core(plan, value)
        self.chunks = self._chunks([(plan, value) for plan, _, value in arrays])
        self.like = next(value for _, _, value in arrays if blocks_of(value))
        self.inputs = [self._input(plan, leaf, value) for plan, leaf, value in arrays]

    def _check_core(self, leaf: LeafPlan, value: Any) -> None:
        """Refuse an array that is cut along a core axis."""
        if blocks_of(value) is None:
            return
        for axis in range(len(leaf.batch_axes), len(leaf.shape)):
            if len(value.chunks[axis]) > 1:
                raise ValueError(
                    f"{self.kernel.name}(): {leaf.path} has shape {leaf.shape} and rank "
                    f"{leaf.declared}, but its core axis {axis} is cut into "
                    f"{plural(len(value.chunks[axis]), 'chunk')}, and one item needs it whole; "
                    f"pass {leaf.path}.rechunk({{{axis}: {value.shape[axis]}}})"
                )

    def _chunks(self, arrays: Sequence[tuple[LeafPlan, Any]]) -> Chunks:
        """Return how the batch is cut: where any array in blocks is."""
        chunks: list[tuple[int, ...]] = []
        count = len(self.plan.batch_shape)
        for axis, size in enumerate(self.plan.batch_shape):
            cuts: dict[tuple[int, ...], str] = {}
            for leaf, value in arrays:
                own = axis - count + len(leaf.batch_axes)
                if own >= 0 and leaf.batch_axes[own] == size and blocks_of(value):
                    cuts.setdefault(tuple(value.chunks[own]), leaf.path)
            if len(cuts) > 1 and not self.backend.cuts_freely:
                raise ValueError(self._other_chunks(axis, cuts))
            chunks.append(_refined(list(cuts)) if cuts else (size,))
        return tuple(chunks)

    def _other_chunks(self, axis: int, cuts: dict[tuple[int, ...], str]) -> str:
        (one, first), (other, second), *_ = cuts.items()
        return (
            f"{self.kernel.name}(): along batch axis {axis}, {first} has chunks of {one[0]} and "
            f"{second} of {other[0]}, and cubed would have to store one of them anew; rechunk one "
            "of them"
        )

    def _input(self, plan: LeafPlan, leaf: Leaf, value: Any) -> Input:
        if leaf.key_impl is not None:
            value = np.asarray(jax.random.key_data(value))
        item = leaf.item
        assert item is not None
        batch = plan.batch_axes
        own = self.chunks[len(self.chunks) - len(batch) :] if batch else ()
        cut = tuple(
            chunks if length == sum(chunks) else (length,)
            for length, chunks in zip(batch, own, strict=True)
        )
        whole = tuple((length,) for length in item.shape)
        return Input(self.backend.cut(value, cut + whole, self.like), len(batch), item.shape)

    # From leaves to the result.

    def _outputs(self) -> Any:
        """Return what the kernel returns for one item, as shapes."""
        out = jax.eval_shape(self.setup.on_item, *self.setup.shapes_of_item())
        for path, leaf in leaves_with_names(out, "output"):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(
                    f"{self.kernel.name}(): {path} is a PRNG key, which no array in blocks can "
                    "hold; return jax.random.key_data of it"
                )
        return out

    def mapped(self) -> Any:
        """Return the outputs of all items."""
        outs, treedef = jax.tree.flatten(self._outputs())
        return treedef.unflatten(self._map(outs, tuple(range(len(outs)))))

    def _map(self, outs: Sequence[Any], only: tuple[int, ...]) -> list[Any]:
        """Return some of the outputs of all items."""
        if not only:
            return []
        layout = layout_of([outs[i] for i in only])
        program = MapBlock(self.setup, only, self._packed(layout))
        fun = OnBlocks.of(program, self.numbers)
        return self.backend.map(fun, self.inputs, layout, self.chunks)

    def _packed(self, layout: Packing) -> Packing | None:
        return layout if self.backend.packs and len(layout.shapes) > 1 else None

    def reduced(self, reductions: Reductions) -> Any:
        """Return the outputs, reduced."""
        axes = self.plan.reduced
        self._check_order(reductions, axes)
        reduce = Reduce(axes, tuple(self.plan.batch_shape[axis] for axis in axes))
        out = self._outputs()
        parts = self.setup.parts(reduce.sizes)
        _check_count(self.kernel, parts, reduce)
        states = self._states(reduce)
        values = jax.eval_shape(
            lambda leaves: parts.results(states.treedef.unflatten(leaves)), states.layout.items()
        )
        results, treedef = jax.tree.flatten(values)
        kept = self._kept(out, reductions, parts)
        arrays = self._reduced(reduce, states, results)
        return parts.assembled(treedef.unflatten(arrays), kept)

    def _check_order(self, reductions: Reductions, axes: Sequence[int]) -> None:
        """Refuse blocks whose items lie among each other, where they are merged in order."""
        split = [axis for axis in axes if len(self.chunks[axis]) > 1]
        first = next((axis for axis in axes if self.plan.batch_shape[axis] > 1), None)
        if not any(isinstance(r, Fold) for r in reductions.entries) or set(split) <= {first}:
            return
        axis = next(axis for axis in split if axis != first)
        raise ValueError(
            f"{self.kernel.name}(): Fold merges items in their order, so of the reduced axes only "
            f"the first can be cut, but batch axis {axis} has chunks {self.chunks[axis]}; rechunk "
            "it to one chunk"
        )

    def _states(self, reduce: Reduce) -> States:
        """Return how the states of a block are packed."""
        bare = {**self.setup.options, "chunk_size": None, "memory_limit": None}
        setup = dataclasses.replace(self.setup, options=bare)
        program = StateOfBlock(setup, reduce, layout_of([]))
        items, numbers = setup.shapes_of_item()
        arrays = [
            jax.ShapeDtypeStruct((1,) * given.batch + item.shape, item.dtype)
            for given, item in zip(self.inputs, items, strict=True)
        ]
        index = jax.ShapeDtypeStruct((1,), np.dtype(np.int32))
        found = jax.eval_shape(program.traced, [*arrays, *(index for _ in reduce.axes)], numbers)
        leaves, treedef = jax.tree.flatten(found)
        kept = len(self.plan.batch_shape) - len(reduce.axes)
        return States(treedef, layout_of(leaves, kept))

    def _kept(self, out: Any, reductions: Reductions, parts: BlockStates) -> list[list[Any]]:
        """Return the outputs that are kept whole, for each part."""
        entries = reductions.of_outputs(out)
        outs = jax.tree.leaves(out)
        positions = tuple(i for i, entry in enumerate(entries) if entry is None)
        arrays = iter(self._map(outs, positions))
        both = zip(parts.parts, reductions.entries, strict=True)
        return [[next(arrays) for _ in part.avals] if r is None else [] for part, r in both]

    def _reduced(self, reduce: Reduce, states: States, results: Sequence[Any]) -> list[Any]:
        """Return the results of the reductions, flat."""
        packed = self.backend.reduce(
            OnBlocks.of(StateOfBlock(self.setup, reduce, states.layout), self.numbers),
            OnBlocks.of(MergeStates(self.setup, reduce, states), ()),
            self.inputs,
            reduce.axes,
            sum(states.layout.sizes),
            self.chunks,
            self.like,
        )
        if not results:
            return []
        kept = tuple(c for axis, c in enumerate(self.chunks) if axis not in reduce.axes)
        layout = layout_of(results)
        program = ResultOfStates(self.setup, reduce, states, self._packed(layout))
        given = Input(packed, len(kept), (sum(states.layout.sizes),))
        return self.backend.map(OnBlocks.of(program, ()), [given], layout, kept)


def layout_of(avals: Sequence[Any], batch: int = 0) -> Packing:
    """Return the layout of items, which have so many batch axes in front."""
    shapes = tuple(tuple(aval.shape[batch:]) for aval in avals)
    return Packing(shapes, tuple(np.dtype(aval.dtype) for aval in avals))


def _refined(cuts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the chunks that end wherever any of these do."""
    ends = sorted({end for chunks in cuts for end in itertools.accumulate(chunks)})
    if len(cuts) == 1:
        return cuts[0]  # which may have chunks of length 0
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False) if b > a)


def _check_count(kernel: Kernel, parts: BlockStates, reduce: Reduce) -> None:
    """Refuse to number more items than an int has numbers."""
    count = math.prod(reduce.sizes)
    if count < 2**31 or jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return
    for reduction in parts.reductions.entries:
        if reduction is not None and reduction.numbers_items:
            raise ValueError(
                f"{kernel.name}(): {reduction.name} numbers its items, and {count} of them need 64 "
                'bits; call jax.config.update("jax_enable_x64", True) first'
            )
