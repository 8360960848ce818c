# SPDX-License-Identifier: MIT
"""A call with arrays in blocks (dask, cubed): checked here, evaluated block by block later.

Nothing is computed here. Shapes are checked as in every call; the shapes and dtypes of the outputs
are those of the kernel traced for one item. `_blocks/backend.py` says what a package provides.

Binding the arguments of an ordinary call refuses anything that is neither an array nor a number,
and the decorated function catches the refusal of arrays in blocks (`InBlocksError`) and calls
`call_on_blocks`. So ordinary calls pay nothing for this check, and no package is imported for it.
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

from rankax._base.blocks import blocks_of
from rankax._base.trees import leaves_with_names
from rankax._base.words import plural
from rankax._blocks.backend import Backend, Batch, BatchChunks, BlockReduction, Input
from rankax._blocks.leaves import block_leaves, package_of_call, with_core_shapes
from rankax._blocks.packing import Packing, layout_of
from rankax._blocks.programs import (
    CONFIG,
    MapBlock,
    MergeStates,
    OnBlocks,
    Reduce,
    ResultOfStates,
    Setup,
    StateOfBlock,
    States,
)
from rankax._call.bind import flatten
from rankax._call.kernel import Kernel
from rankax._plan.batch import BatchPlan
from rankax._reduce.merge import RunStates
from rankax._reduce.run import Reductions

__all__ = ["call_on_blocks"]


def call_on_blocks(
    kernel: Kernel, mapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a kernel with arguments of which some are arrays in blocks."""
    call, options, where = flatten(kernel, args, kwargs), kernel.options(), f"{kernel.name}()"
    package = package_of_call(kernel, call)
    if options.progress is not False:
        raise TypeError(
            f"{where}: progress={options.progress!r} cannot be reported from blocks, which are "
            "evaluated elsewhere; use the progress bar or the dashboard of the scheduler, and "
            f"{kernel.name}.with_options(progress=False)"
        )
    leaves, values, avals = block_leaves(kernel, call, package)
    nesting = dataclasses.replace(call, leaves=avals).plan(options)
    plan = nesting.plan
    if nesting.splits:
        path = call.structure.paths[nesting.splits[0].position]
        raise TypeError(
            f"{where}: {path} has the rank SplitKey, but {package} evaluates block by block, and "
            "each block would count its items from 0 and draw the same numbers; pass a key for "
            f"each item: jax.random.split({path}, {plan.batch_shape})"
        )
    ranked = iter(plan.leaves)
    plans = [None if rank is None else next(ranked) for rank in call.structure.ranks]
    setup = Setup(
        mapped,
        {**vars(options), "reduce": None, "reduce_axis": None, "jit": False},
        {name: getattr(jax.config, name) for name in CONFIG},
        call.names,
        call.treedef,
        call.others,
        with_core_shapes(leaves, avals, [p and p.core_shape for p in plans]),
    )
    backend: Backend = importlib.import_module(f"rankax._blocks.on_{package}").BACKEND
    triples = list(zip(setup.leaves, plans, values, strict=True))
    arrays = [(p, leaf.item, v) for leaf, p, v in triples if leaf.kind == "array"]
    in_blocks = [(p, v) for p, _, v in arrays if blocks_of(v)]
    chunks = _batch_chunks(plan, in_blocks, where, None if backend.can_rechunk else package)
    inputs = [_input(backend, chunks, p, item, v, like=in_blocks[0][1]) for p, item, v in arrays]
    numbers = [v for leaf, _, v in triples if leaf.kind == "number"]
    on_blocks = _BlockCall(setup, plan, backend, Batch(inputs, chunks), numbers)
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
    ends = sorted({end for chunks in cuts for end in itertools.accumulate(chunks)})
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False) if b > a)


def _input(
    backend: Backend, chunks: BatchChunks, leaf: Any, item: Any, value: Any, *, like: Any
) -> Input:
    batch = leaf.batch_axes
    cuts = [
        lengths if size == sum(lengths) else (size,)  # an axis of length 1 is broadcast
        for size, lengths in zip(batch, chunks[len(chunks) - len(batch) :], strict=True)
    ]
    core = [(size,) for size in item.shape]
    return Input(backend.cut(value, (*cuts, *core), like), len(batch), item.shape)


@dataclasses.dataclass(frozen=True)
class _BlockCall:
    """A call that has been checked, and its arrays as inputs of the backend."""

    setup: Setup
    plan: BatchPlan
    backend: Backend
    batch: Batch
    numbers: list[Any]

    @property
    def where(self) -> str:
        return f"{self.setup.kernel.name}()"

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
        layout = layout_of([outs[i] for i in only])
        program = MapBlock(self.setup, only, self._packed(layout))
        return self.backend.map(OnBlocks.of(program, self.numbers), self.batch, layout)

    def _packed(self, layout: Packing) -> Packing | None:
        """Return the layout if the outputs have to be packed."""
        return layout if self.backend.has_one_output and len(layout.shapes) > 1 else None

    def reduced(self, reductions: Reductions) -> Any:
        """Return the reduced outputs: states of blocks, merged in a tree, and the result of these.

        A reduction whose merge does not commute needs the blocks in the order of the items. Of
        equal items, the one with the smaller index wins, because the items of one block may come
        between those of another.
        """
        axes = self.plan.reduced
        reduce = Reduce(axes, tuple(self.plan.batch_shape[axis] for axis in axes))
        if reductions.are_ordered:
            self._check_order(axes)
        out = self.outputs_of_item()
        of_blocks = self.setup.runs(reduce.sizes)
        self._check_count(of_blocks, math.prod(reduce.sizes))
        states = self._states(reduce)
        results, treedef = jax.tree.flatten(
            jax.eval_shape(
                lambda leaves: of_blocks.finish(states.treedef.unflatten(leaves)),
                states.layout.items(),
            )
        )
        whole = self._whole(out, reductions, of_blocks)
        values = treedef.unflatten(self._reduced(reduce, states, results) if results else [])
        return of_blocks.assemble(values, whole)

    def _check_order(self, axes: Sequence[int]) -> None:
        """Refuse chunks along more than the first reduced axis: their items alternate."""
        first = next((axis for axis in axes if self.plan.batch_shape[axis] > 1), None)
        for axis in axes:
            if len(chunks := self.batch.chunks[axis]) > 1 and axis != first:
                raise ValueError(
                    f"{self.where}: Fold merges items in their order, so of the reduced axes only "
                    f"the first can be cut, but batch axis {axis} has chunks {chunks}; rechunk it "
                    "to one chunk"
                )

    def _check_count(self, of_blocks: RunStates, count: int) -> None:
        """Refuse indices of more items than an int32 can number."""
        if count < 2**31 or jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
            return
        for reduction in of_blocks.reductions.entries:
            if reduction.numbers_items:
                raise ValueError(
                    f"{self.where}: {reduction.name} numbers its items, and {count} of them need "
                    '64 bits; call jax.config.update("jax_enable_x64", True) first'
                )

    def _states(self, reduce: Reduce) -> States:
        """Return how the states of a block are packed."""
        options = {**self.setup.options, "chunk_size": None, "memory_limit": None}
        setup = dataclasses.replace(self.setup, options=options)
        program = StateOfBlock(setup, reduce, layout_of([]))
        items, numbers = setup.shapes_of_item()
        arrays = [
            jax.ShapeDtypeStruct((1,) * i.batch + item.shape, item.dtype)
            for i, item in zip(self.batch.inputs, items, strict=True)
        ]
        arrays += [jax.ShapeDtypeStruct((1,), np.dtype(np.int32)) for _ in reduce.axes]
        states, treedef = jax.tree.flatten(jax.eval_shape(program.traced, arrays, numbers))
        kept = len(self.plan.batch_shape) - len(reduce.axes)
        return States(treedef, layout_of(states, kept))

    def _whole(self, out: Any, reductions: Reductions, of_blocks: RunStates) -> list[list[Any]]:
        """Return the outputs that are kept whole, for each entry of the reductions."""
        entries = enumerate(reductions.of_outputs(out))
        positions = tuple(i for i, entry in entries if entry.is_kept)
        arrays = iter(self.map(jax.tree.leaves(out), positions))
        both = zip(of_blocks.outputs, reductions.entries, strict=True)
        return [[next(arrays) for _ in own.avals] if r.is_kept else [] for own, r in both]

    def _reduced(self, reduce: Reduce, states: States, results: Sequence[Any]) -> list[Any]:
        """Return the arrays of the results."""
        size = sum(states.layout.sizes)
        state = OnBlocks.of(StateOfBlock(self.setup, reduce, states.layout), self.numbers)
        merge = OnBlocks.of(MergeStates(self.setup, reduce, states), ())
        packed = self.backend.reduce(BlockReduction(state, merge, reduce.axes, size), self.batch)
        chunks = [c for axis, c in enumerate(self.batch.chunks) if axis not in reduce.axes]
        batch = Batch([Input(packed, len(chunks), (size,))], tuple(chunks))
        layout = layout_of(results)
        program = ResultOfStates(self.setup, reduce, states, self._packed(layout))
        return self.backend.map(OnBlocks.of(program, ()), batch, layout)
