# SPDX-License-Identifier: MIT
"""A call with arrays in blocks (dask, cubed): checked here, evaluated block by block later.

Nothing is computed here. Shapes are checked as in every call; the shapes and dtypes of the outputs
are those of the kernel traced for one item. `ext/blocks/backend.py` says what a package provides.

Binding a call marks it if a leaf is such an array, which is asked of leaves only that are neither
arrays of JAX or NumPy nor numbers. So ordinary calls pay nothing for this check, and no package is
imported for it. A decorated kernel passes the calls that are marked to `call_on_blocks`, and
`rankax.stream`, which knows its arrays, all of them.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._options import DEFAULTS, Options
from rankax.call.kernels import KernelCall, is_array, is_number
from rankax.core.base.messages import listed, plural, traced_as
from rankax.core.base.trees import leaves_with_names
from rankax.core.plan.schedule import Plan
from rankax.core.reduce.run import Reductions, trace_reduced
from rankax.ext.blocks import programs
from rankax.ext.blocks.arrays import blocks_of, in_blocks
from rankax.ext.blocks.backend import Backend, Batch, BatchChunks, Input, small_blocks
from rankax.ext.runs import RunStates


def call_on_blocks(mapped: Any, call: KernelCall, options: Options) -> Any:
    """Evaluate a call of the kernel ``mapped`` of which some leaves are arrays in blocks."""
    kernel = call.kernel
    site = f"{kernel.name}()"
    package, leaves = _checked_leaves(call)
    evaluator = "rankax.stream" if package == "streamed" else package
    refused = {
        "progress": "cannot be reported from blocks, which are evaluated elsewhere; use the "
        "progress bar or the dashboard of the scheduler",
        "batch_shape": f"has no chunks, by which {evaluator} would evaluate it; pass a {package} "
        "array that has these axes",
        "bucket": f"pads the arrays of a call, but {package} evaluates each block at its own "
        "length; give the chunks only a few lengths",
    }
    for name, why in refused.items():
        if (value := getattr(options, name)) != getattr(DEFAULTS, name):
            raise TypeError(
                f"{site}: {name}={value!r} {why}, and "
                f"{kernel.name}.with_options({name}={getattr(DEFAULTS, name)})"
            )
    call = dataclasses.replace(call, leaves=leaves)
    plan = call.plan(options)
    if plan.splits:
        path = call.structure.paths[plan.splits[0].position]
        raise TypeError(
            f"{site}: {path} has the rank SplitKey, but {evaluator} evaluates block by block, and "
            "each block would count its items from 0 and draw the same numbers; pass a key for "
            f"each item: jax.random.split({path}, {plan.batch_shape})"
        )
    inputs = [
        (planned, *_as_input(call.leaves[place], place, planned.core_shape))
        for planned, place in zip(plan.leaves, call.ranked, strict=True)
    ]
    backend: Backend = importlib.import_module(f"rankax.ext.blocks.on_{package}").BACKEND
    lazy = [(planned, value) for planned, _, value in inputs if blocks_of(value)]
    chunks = _batch_chunks(plan, lazy, site, None if backend.can_rechunk else package)
    # Numbers first. Of the arrays, those with core axes: cubed 0.27 unwraps blocks along axes that
    # the output lacks only if the first array has such axes.
    inputs.sort(key=lambda each: (not is_number(each[2]), not each[1].item.shape))
    ranks = zip(call.leaves, call.structure.ranks, strict=True)
    setup = programs.Setup(
        mapped,
        options.replace(reduce=None, reduce_axis=None, jit=False),
        {name: getattr(jax.config, name) for name in programs.CONFIG},
        call.shell,
        call.others,
        tuple(leaf if rank is None else None for leaf, rank in ranks),
        tuple(leaf for _, leaf, _ in inputs),
    )
    numbers = [value for _, _, value in inputs if is_number(value)]
    arrays = [
        _input(backend, chunks, planned, leaf.item, value, like=lazy[0][1])
        for planned, leaf, value in inputs[len(numbers) :]
    ]
    on_blocks = _BlockCall(setup, plan, backend, Batch(arrays, chunks), numbers, site)
    return on_blocks.reduced(setup.reductions) if setup.reductions else on_blocks.maps()


def _checked_leaves(call: KernelCall) -> tuple[str, list[Any]]:
    """Return the package that evaluates a call, and the leaves, which JAX or the package can take.

    Arrays of two packages are refused, and so are arrays in blocks without a rank.
    """
    kernel, structure = call.kernel, call.structure
    triples = list(zip(structure.paths, call.leaves, structure.ranks, strict=True))
    for name, value in call.others.items():
        with contextlib.suppress(TypeError, ValueError):  # not a pytree
            triples += [(path, leaf, None) for path, leaf in leaves_with_names(value, name)]
    first: dict[str, str] = {}  # the first array of each package
    leaves: list[Any] = []
    for path, leaf, rank in triples:
        package = blocks_of(leaf)
        subject = f"{kernel.name}(): {path} is a {package} array"
        if package and rank is None:
            raise TypeError(
                f"{subject}, but it has no rank, so every item would receive all of it; give it a "
                "rank, or compute it first"
            )
        if package == "xarray":
            raise in_blocks(package, kernel.name, path)
        if package:
            first.setdefault(package, f"{path} is a {package} array")
            _check_blocks(leaf, subject, path)
        elif rank is not None and not (is_array(leaf) or is_number(leaf)):
            leaf = kernel.converted(leaf, path, shapes_only=False)
        if rank is not None and rank.is_key:
            kernel.check_key(leaf, path, rank)
        leaves.append(leaf)
    if len(first) > 1:
        raise TypeError(
            f"{kernel.name}(): {listed(list(first.values()))}, but one package has to evaluate the "
            "call; convert one"
        )
    return next(iter(first)), leaves[: len(call.leaves)]


def _check_blocks(value: Any, subject: str, path: str) -> None:
    check_dtype(value.dtype, subject, path)
    for axis, size in enumerate(value.shape):
        if size != size:  # dask has nan for an unknown length
            raise ValueError(
                f"{subject} of unknown length along axis {axis}; call "
                f"{path}.compute_chunk_sizes() first"
            )


def _as_input(value: Any, place: int, core: tuple[int, ...]) -> tuple[programs.Leaf, Any]:
    """Return how a block receives a checked leaf; and the number, or the array that is cut."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value))
        item = jax.ShapeDtypeStruct((*core, *data.shape[value.ndim :]), data.dtype)
        return programs.Leaf(place, item, jax.random.key_impl(value)), data
    if isinstance(value, jax.Array) and not value.shape and jax.typeof(value).weak_type:
        value = value.item()
    # A NumPy float64 is a Python float too, but not weakly typed.
    if is_number(value) and not isinstance(value, np.generic):
        item = jax.ShapeDtypeStruct((), jax.typeof(value).dtype, weak_type=True)
        return programs.Leaf(place, item), value
    value = value if blocks_of(value) else np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(value.dtype).newbyteorder("="))
    is_ragged = getattr(value, "lengths", None) is not None
    return programs.Leaf(place, jax.ShapeDtypeStruct(core, dtype), is_ragged=is_ragged), value


def check_dtype(dtype: Any, subject: str, path: str) -> None:
    """Say why JAX cannot compute with a dtype.

    JAX narrows the arrays that it is given, and so does a call with arrays of JAX or NumPy. An
    array in blocks holds data from a store, and nothing would show that its digits are cut off.

    Parameters
    ----------
    dtype : dtype
    subject : str
        How an error message begins: what arrived where.
    path : str
        The array, as the caller knows it.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "OSTUMm" or dtype.type is np.void:
        raise TypeError(
            f"{subject} of dtype {dtype}, which JAX does not support; convert it to numbers"
        )
    native = dtype.newbyteorder("=")
    narrow = jax.dtypes.canonicalize_dtype(native)
    if narrow != native:
        raise TypeError(
            f"{subject} of dtype {native}, but JAX computes with {narrow} by default, which would "
            'silently lose digits; call jax.config.update("jax_enable_x64", True) first, or '
            f"convert {path} to {narrow}"
        )


def _batch_chunks(
    plan: Plan, arrays: Sequence[tuple[Any, Any]], site: str, storing: str | None
) -> BatchChunks:
    """Return the chunks of the batch, which end wherever those of any array do.

    ``storing`` names a package that would have to store an array to rechunk it, which is refused.
    """
    for leaf, value in arrays:
        for axis in range(len(leaf.batch_axes), len(leaf.shape)):
            if (number := len(value.chunks[axis])) > 1:
                raise ValueError(
                    f"{site}: {leaf.path} has shape {leaf.shape} and rank {leaf.declared}, but "
                    f"its core axis {axis} is cut into {plural(number, 'chunk')}, and one item "
                    f"needs all of it; pass {leaf.path}.rechunk({{{axis}: {value.shape[axis]}}})"
                )
    chunks: list[tuple[int, ...]] = []
    for axis, size in enumerate(plan.batch_shape, -len(plan.batch_shape)):
        cuts: dict[tuple[int, ...], str] = {}
        for leaf, value in arrays:
            batch = leaf.batch_axes
            if len(batch) >= -axis and batch[axis] == size:
                cuts.setdefault(tuple(value.chunks[len(batch) + axis]), leaf.path)
        if len(cuts) > 1 and storing:
            (one, first), (other, second), *_ = cuts.items()
            raise ValueError(
                f"{site}: along batch axis {axis + len(plan.batch_shape)}, {first} has chunks of "
                f"{one[0]} and {second} of {other[0]}, and {storing} would have to store one of "
                "them again; rechunk one of them"
            )
        ends = sorted({end for cut in cuts for end in itertools.accumulate(cut)} - {0})
        ways = [(size,), *cuts]  # one way of cutting may have chunks of length 0
        chunks.append(ways[-1] if len(cuts) < 2 else tuple(np.diff(ends, prepend=0).tolist()))
    return tuple(chunks)


def _input(
    backend: Backend, chunks: BatchChunks, leaf: Any, item: Any, value: Any, *, like: Any
) -> Input:
    axes = tuple(range(len(chunks) - len(leaf.batch_axes), len(chunks)))
    cuts = [
        chunks[axis] if size == sum(chunks[axis]) else (size,)  # an axis of length 1 is broadcast
        for size, axis in zip(leaf.batch_axes, axes, strict=True)
    ]
    core = [(size,) for size in item.shape]
    return Input(backend.cut(value, (*cuts, *core), like), axes, item)


@dataclasses.dataclass(frozen=True)
class _BlockCall:
    """A call that has been checked, and its arrays as inputs of the backend."""

    setup: programs.Setup
    plan: Plan
    backend: Backend
    batch: Batch
    numbers: list[Any]
    site: str  # how an error message begins

    def maps(self) -> Any:
        """Return the outputs of all items."""
        outs, treedef = jax.tree.flatten(self.outputs_of_item())
        return treedef.unflatten(self.map(outs, tuple(range(len(outs)))))

    def outputs_of_item(self) -> Any:
        """Return what the kernel returns for one item, as shapes and dtypes."""
        out = jax.eval_shape(self.setup.on_item, *(leaf.item for leaf in self.setup.inputs))
        for path, leaf in leaves_with_names(out, "output"):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(
                    f"{self.site}: {path} is a PRNG key, which no array in blocks can hold; "
                    "return jax.random.key_data of it"
                )
        return out

    def map(self, outs: Sequence[Any], only: tuple[int, ...]) -> list[Any]:
        """Return some of the outputs of all items."""
        if not only:
            return []
        fun = programs.OnBlocks.of(programs.MapBlock(self.setup, only), self.numbers)
        return self.backend.map(fun, self.batch, [outs[i] for i in only])

    def reduced(self, reductions: Reductions) -> Any:
        """Return the reduced outputs: states of blocks, merged in a tree, and the result of these.

        A reduction whose merge does not commute needs the blocks in the order of the items. Of
        equal items, the one with the smaller index wins, because the items of one block may come
        between those of another.
        """
        axes = self.plan.reduced
        self._check_order(reductions, axes)
        out = self.outputs_of_item()
        sizes = tuple(self.plan.batch_shape[axis] for axis in axes)
        on_item = traced_as(self.setup.mapped.spec.fun)(functools.partial(self.setup.on_counted))
        items = [leaf.item for leaf in self.setup.inputs]
        traced = trace_reduced(on_item, items, reductions, math.prod(sizes))
        runs = RunStates(reductions, traced.outputs, sizes)

        chunks, first = self.batch.chunks, self.batch.inputs[0].array
        place = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.int64))
        positions = [Input(self.backend.positions(chunks[a], first), (a,), place) for a in axes]
        batch = Batch([*self.batch.inputs, *positions], chunks)
        block = programs.StateOfBlock(self.setup, axes, sizes, runs.outputs, None, ()).unbounded()
        values = *items[: len(self.numbers)], *small_blocks(batch.inputs)
        states, states_tree = jax.tree.flatten(jax.eval_shape(block.traced, *values))
        kept = len(chunks) - len(axes)
        leaves = tuple(jax.ShapeDtypeStruct(x.shape[kept:], x.dtype) for x in states)
        results, treedef = jax.tree.flatten(
            jax.eval_shape(lambda x: runs.finish(states_tree.unflatten(x)), leaves)
        )

        entries = enumerate(reductions.of_outputs(out))
        kept = iter(
            self.map(jax.tree.leaves(out), tuple(i for i, entry in entries if entry.is_kept))
        )
        both = zip(runs.outputs, reductions.entries, strict=True)
        whole = [[next(kept) for _ in own.avals] if r.is_kept else [] for own, r in both]
        if not results:
            return runs.assemble(treedef.unflatten([]), whole)

        fields = self.setup, axes, sizes, runs.outputs, states_tree, leaves
        state = programs.OnBlocks.of(programs.StateOfBlock(*fields), self.numbers)
        packed = self.backend.reduce(
            state, programs.OnBlocks.of(programs.MergeStates(*fields)), batch, axes
        )
        chunks = tuple(c for axis, c in enumerate(chunks) if axis not in axes)
        item = jax.ShapeDtypeStruct((programs.record(leaves).itemsize,), np.dtype(np.uint8))
        merged = Input(packed, tuple(range(len(chunks))), item)
        finish = programs.OnBlocks.of(programs.ResultOfStates(*fields))
        values = self.backend.map(finish, Batch([merged], chunks), results)
        return runs.assemble(treedef.unflatten(values), whole)

    def _check_order(self, reductions: Reductions, axes: Sequence[int]) -> None:
        """Refuse chunks along more than the first reduced axis if the order of items matters."""
        if not reductions.are_ordered:
            return
        first = next((axis for axis in axes if self.plan.batch_shape[axis] > 1), None)
        for axis in axes:
            if len(chunks := self.batch.chunks[axis]) > 1 and axis != first:
                raise ValueError(
                    f"{self.site}: Fold merges items in order, so only the first of the reduced "
                    f"axes can be cut, but batch axis {axis} has chunks {chunks}; rechunk it "
                    "to one chunk"
                )
