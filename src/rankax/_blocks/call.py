# SPDX-License-Identifier: MIT
"""A call with arrays in blocks (dask, cubed): checked here, evaluated block by block later.

Nothing is computed here. Shapes are checked as in every call; the shapes and dtypes of the outputs
are those of the kernel traced for one item. `_blocks/backend.py` says what a package provides.

Binding a call marks it if a leaf is such an array, which is asked of leaves only that are neither
arrays of JAX or NumPy nor numbers. So ordinary calls pay nothing for this check, and no package is
imported for it. A decorated kernel passes the calls that are marked to `call_on_blocks`, and
`rankax.stream`, which knows its arrays, all of them.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.blocks import blocks_of
from rankax._base.trees import leaves_with_names
from rankax._base.words import plural
from rankax._blocks.backend import Backend, Batch, BatchChunks, BlockReduction, Input
from rankax._blocks.leaves import block_leaves, package_of_call
from rankax._blocks.programs import (
    CONFIG,
    MapBlock,
    MergeStates,
    OnBlocks,
    Packing,
    ResultOfStates,
    Setup,
    StateOfBlock,
)
from rankax._call.bind import BoundKernel
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._reduce.run import Reductions


def call_on_blocks(mapped: Callable[..., Any], call: BoundKernel, options: Options) -> Any:
    """Evaluate a call of the kernel ``mapped`` of which some leaves are arrays in blocks."""
    kernel = call.kernel
    where = f"{kernel.name}()"
    package = package_of_call(kernel, call)
    evaluator = "rankax.stream" if package == "streamed" else package
    if options.progress is not False:
        raise TypeError(
            f"{where}: progress={options.progress!r} cannot be reported from blocks, which are "
            "evaluated elsewhere; use the progress bar or the dashboard of the scheduler, and "
            f"{kernel.name}.with_options(progress=False)"
        )
    if options.batch_shape is not None:
        raise TypeError(
            f"{where}: batch_shape={options.batch_shape} has no chunks, by which {evaluator} would "
            f"evaluate it; pass a {package} array that has these axes, and "
            f"{kernel.name}.with_options(batch_shape=None)"
        )
    if options.bucket:
        raise TypeError(
            f"{where}: bucket={options.bucket} fills up the arrays of a call, but {package} "
            "evaluates blocks, each as long as it is; give chunks few lengths, and "
            f"{kernel.name}.with_options(bucket=False)"
        )
    leaves, values, avals = block_leaves(kernel, call, package)
    nesting = dataclasses.replace(call, leaves=avals).plan(options)
    plan = nesting.plan
    if nesting.splits:
        path = call.structure.paths[nesting.splits[0].position]
        raise TypeError(
            f"{where}: {path} has the rank SplitKey, but {evaluator} evaluates block by block, and "
            "each block would count its items from 0 and draw the same numbers; pass a key for "
            f"each item: jax.random.split({path}, {plan.batch_shape})"
        )
    setup = Setup(
        mapped,
        {**vars(options), "reduce": None, "reduce_axis": None, "jit": False},
        {name: getattr(jax.config, name) for name in CONFIG},
        call.names,
        call.treedef,
        call.others,
        tuple(leaves),
    )
    backend: Backend = importlib.import_module(f"rankax._blocks.on_{package}").BACKEND
    ranked = [pair for pair in zip(leaves, values, strict=True) if pair[0].kind != "static"]
    numbers = [v for leaf, v in ranked if leaf.kind == "number"]
    planned = zip(plan.leaves, ranked, strict=True)
    arrays = [(p, leaf.item, v) for p, (leaf, v) in planned if leaf.kind == "array"]
    in_blocks = [(p, v) for p, _, v in arrays if blocks_of(v)]
    chunks = _batch_chunks(plan, in_blocks, where, None if backend.can_rechunk else package)
    inputs = [_input(backend, chunks, p, item, v, like=in_blocks[0][1]) for p, item, v in arrays]
    on_blocks = _BlockCall(setup, plan, backend, Batch(inputs, chunks), numbers, where)
    return on_blocks.mapped() if options.reduce is None else on_blocks.reduced(options.reduce)


def _batch_chunks(
    plan: BatchPlan, arrays: Sequence[tuple[Any, Any]], where: str, storing: str | None
) -> BatchChunks:
    """Return the chunks of the batch, which end wherever those of any array do.

    ``storing`` names a package that would have to store an array to rechunk it, which is refused.
    """
    for leaf, value in arrays:
        for axis in range(len(leaf.batch_axes), len(leaf.shape)):
            if (number := len(value.chunks[axis])) > 1:
                raise ValueError(
                    f"{where}: {leaf.path} has shape {leaf.shape} and rank {leaf.declared}, but "
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
                f"{where}: along batch axis {axis + len(plan.batch_shape)}, {first} has chunks of "
                f"{one[0]} and {second} of {other[0]}, and {storing} would have to store one of "
                "them again; rechunk one of them"
            )
        chunks.append(_refined(list(cuts)) if cuts else (size,))
    return tuple(chunks)


def _refined(cuts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the chunks that end wherever any of these do."""
    if len(cuts) == 1:
        return cuts[0]  # which may have chunks of length 0
    ends = {0, *(end for chunks in cuts for end in itertools.accumulate(chunks))}
    return tuple(np.diff(sorted(ends)).tolist())


def _input(
    backend: Backend, chunks: BatchChunks, leaf: Any, item: Any, value: Any, *, like: Any
) -> Input:
    axes = tuple(range(len(chunks) - len(leaf.batch_axes), len(chunks)))
    cuts = [
        chunks[axis] if size == sum(chunks[axis]) else (size,)  # an axis of length 1 is broadcast
        for size, axis in zip(leaf.batch_axes, axes, strict=True)
    ]
    core = [(size,) for size in item.shape]
    return Input(backend.cut(value, (*cuts, *core), like), axes, item.shape)


@dataclasses.dataclass(frozen=True)
class _BlockCall:
    """A call that has been checked, and its arrays as inputs of the backend."""

    setup: Setup
    plan: BatchPlan
    backend: Backend
    batch: Batch
    numbers: list[Any]
    where: str  # how an error message begins

    def mapped(self) -> Any:
        """Return the outputs of all items."""
        outs, treedef = jax.tree.flatten(self.outputs_of_item())
        return treedef.unflatten(self.map(outs, tuple(range(len(outs)))))

    def outputs_of_item(self) -> Any:
        """Return what the kernel returns for one item, as shapes and dtypes."""
        out = jax.eval_shape(self.setup.on_item, *self.setup.shapes_of_item())
        for path, leaf in leaves_with_names(out, "output"):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(
                    f"{self.where}: {path} is a PRNG key, which no array in blocks can hold; "
                    "return jax.random.key_data of it"
                )
        return out

    def map(self, outs: Sequence[Any], only: tuple[int, ...]) -> list[Any]:
        """Return some of the outputs of all items."""
        if not only:
            return []
        fun = OnBlocks.of(MapBlock(self.setup, only), self.numbers)
        return self.backend.map(fun, self.batch, Packing.of([outs[i] for i in only]))

    def reduced(self, reductions: Reductions) -> Any:
        """Return the reduced outputs: states of blocks, merged in a tree, and the result of these.

        A reduction whose merge does not commute needs the blocks in the order of the items. Of
        equal items, the one with the smaller index wins, because the items of one block may come
        between those of another.
        """
        axes = self.plan.reduced
        sizes = tuple(self.plan.batch_shape[axis] for axis in axes)
        self._check_order(reductions, axes)
        out = self.outputs_of_item()
        runs = self.setup.runs(sizes)

        avals = self._states_of_one_block(axes, sizes)
        states, states_tree = jax.tree.flatten(avals)
        layout = Packing.of(states, len(self.plan.batch_shape) - len(axes))
        results, treedef = jax.tree.flatten(
            jax.eval_shape(lambda x: runs.finish(states_tree.unflatten(x)), layout.items)
        )

        entries = enumerate(reductions.of_outputs(out))
        kept = iter(
            self.map(jax.tree.leaves(out), tuple(i for i, entry in entries if entry.is_kept))
        )
        both = zip(runs.outputs, reductions.entries, strict=True)
        whole = [[next(kept) for _ in own.avals] if r.is_kept else [] for own, r in both]
        if not results:
            return runs.assemble(treedef.unflatten([]), whole)

        fields = self.setup, axes, sizes, states_tree, layout
        state = OnBlocks.of(StateOfBlock(*fields), self.numbers)
        merge = OnBlocks.of(MergeStates(*fields), ())
        size = sum(layout.sizes)
        packed = self.backend.reduce(BlockReduction(state, merge, axes, size), self.batch)
        chunks = tuple(c for axis, c in enumerate(self.batch.chunks) if axis not in axes)
        batch = Batch([Input(packed, tuple(range(len(chunks))), (size,))], chunks)
        finish = OnBlocks.of(ResultOfStates(*fields), ())
        values = self.backend.map(finish, batch, Packing.of(results))
        return runs.assemble(treedef.unflatten(values), whole)

    def _check_order(self, reductions: Reductions, axes: Sequence[int]) -> None:
        """Refuse chunks along more than the first reduced axis if the order of items matters."""
        if not reductions.are_ordered:
            return
        first = next((axis for axis in axes if self.plan.batch_shape[axis] > 1), None)
        for axis in axes:
            if len(chunks := self.batch.chunks[axis]) > 1 and axis != first:
                raise ValueError(
                    f"{self.where}: Fold merges items in their order, so of the reduced axes only "
                    f"the first can be cut, but batch axis {axis} has chunks {chunks}; rechunk it "
                    "to one chunk"
                )

    def _states_of_one_block(self, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """Return the states of a block of one item, as shapes and dtypes."""
        setup = self.setup.unbounded()
        items, numbers = setup.shapes_of_item()
        arrays = [
            jax.ShapeDtypeStruct((1,) * len(i.axes) + item.shape, item.dtype)
            for i, item in zip(self.batch.inputs, items, strict=True)
        ]
        arrays += [jax.ShapeDtypeStruct((1,), np.dtype(np.int32)) for _ in axes]
        program = StateOfBlock(setup, axes, sizes, None, Packing(()))
        return jax.eval_shape(program.traced, arrays, numbers)
