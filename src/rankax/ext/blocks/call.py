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
from rankax.core.reduce.run import trace_reduced
from rankax.ext.blocks import programs
from rankax.ext.blocks.arrays import blocks_of
from rankax.ext.blocks.backend import Batch, BatchChunks, Input, small_blocks
from rankax.ext.runs import RunStates

# Options that blocks cannot have, and why.
_REFUSED = {
    "progress": "cannot be reported from blocks, which are evaluated elsewhere; use the progress "
    "bar or the dashboard of the scheduler",
    "batch_shape": "has no chunks, by which {evaluator} would evaluate it; pass a {package} array "
    "that has these axes",
    "bucket": "pads the arrays of a call, but {package} evaluates each block at its own length; "
    "give the chunks only a few lengths",
}


def call_on_blocks(mapped: Any, call: KernelCall, options: Options, backend: Any = None) -> Any:
    """Evaluate a call of the kernel ``mapped`` of which some leaves are arrays in blocks.

    Without a ``backend``, it is the one of the package of these arrays.
    """
    site = call.site
    package, leaves = _checked_leaves(call)
    evaluator = "rankax.stream" if package == "streamed" else package
    for name, why in _REFUSED.items():
        if (value := getattr(options, name)) != getattr(DEFAULTS, name):
            raise TypeError(
                f"{site}: {name}={value!r} {why.format(evaluator=evaluator, package=package)}, and "
                f"{call.name}.with_options({name}={getattr(DEFAULTS, name)})"
            )
    call = dataclasses.replace(call, leaves=leaves)
    plan = call.plan(options)
    if plan.splits:
        path = call.paths[plan.splits[0].position]
        raise TypeError(
            f"{site}: {path} has the rank SplitKey, but {evaluator} evaluates block by block, and "
            "each block would count its items from 0 and draw the same numbers; pass a key for "
            f"each item: jax.random.split({path}, {plan.batch_shape})"
        )
    backend = backend or importlib.import_module(f"rankax.ext.blocks.on_{package}")
    inputs = [
        (planned, *_as_input(leaves[place], place, planned.core_shape))
        for planned, place in zip(plan.leaves, call.ranked, strict=True)
    ]
    lazy = [(planned, value) for planned, _, value in inputs if blocks_of(value)]
    chunks = _batch_chunks(plan, lazy, site, None if backend.CAN_RECHUNK else package)
    # Numbers first. Of the arrays, those with core axes: cubed 0.27 unwraps blocks along axes that
    # the output lacks only if the first array has such axes.
    inputs.sort(key=lambda each: (not is_number(each[2]), not each[1].item.shape))
    ranks = zip(leaves, call.structure.ranks, strict=True)
    setup = programs.Setup(
        mapped,
        options.replace(reduce=None, reduce_axis=None, over=None, jit=False),
        {name: getattr(jax.config, name) for name in programs.CONFIG},
        call.shell,
        call.others,
        tuple(leaf if rank is None else None for leaf, rank in ranks),
        tuple(leaf for _, leaf, _ in inputs),
    )
    numbers = [value for _, _, value in inputs if is_number(value)]
    arrays: list[Input] = []
    for planned, leaf, value in inputs[len(numbers) :]:
        pairs = enumerate(planned.lengths, len(chunks) - len(planned.lengths))
        axes = tuple([axis for axis, size in pairs if size is not None])
        cuts = [
            chunks[axis] if size == sum(chunks[axis]) else (size,)  # an axis of length 1 broadcasts
            for size, axis in zip(planned.batch_axes, axes, strict=True)
        ]
        cuts += [(size,) for size in leaf.item.shape]
        arrays.append(Input(backend.cut(value, tuple(cuts), lazy[0][1]), axes, leaf.item))
    return _evaluated(backend, setup, plan, Batch(numbers, arrays, chunks), site)


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
        if package and package != "xarray":
            first.setdefault(package, f"{path} is a {package} array")
            check_dtype(leaf.dtype, subject, path)
            for axis, size in enumerate(leaf.shape):
                if size != size:  # dask has nan for an unknown length
                    raise ValueError(
                        f"{subject} of unknown length along axis {axis}; call "
                        f"{path}.compute_chunk_sizes() first"
                    )
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
    is_ragged = getattr(value, "bounds", None) is not None
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
            batch = leaf.lengths
            if len(batch) >= -axis and batch[axis] == size:
                place = sum(n is not None for n in batch[:axis])
                cuts.setdefault(tuple(value.chunks[place]), leaf.path)
        if len(cuts) > 1 and storing:
            (one, first), (other, second), *_ = cuts.items()
            raise ValueError(
                f"{site}: along batch axis {axis + len(plan.batch_shape)}, {first} has chunks of "
                f"{one[0]} and {second} of {other[0]}, and {storing} would have to store one of "
                "them again; rechunk one of them"
            )
        ends = sorted({end for cut in cuts for end in itertools.accumulate(cut)} - {0})
        chunks.append(tuple(np.diff(ends, prepend=0).tolist()) or (size,))
    return tuple(chunks)


def _evaluated(backend: Any, setup: programs.Setup, plan: Plan, batch: Batch, site: str) -> Any:
    """Return the outputs of a call that has been checked."""
    out = jax.eval_shape(setup.on_item, *(leaf.item for leaf in setup.inputs))
    for path, leaf in leaves_with_names(out, "output"):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{site}: {path} is a PRNG key, which no array in blocks can hold; "
                "return jax.random.key_data of it"
            )
    items, treedef = jax.tree.flatten(out)

    def outputs(only: Sequence[int]) -> list[Any]:
        if not only:
            return []
        step = functools.partial(programs.outputs, only=tuple(only))
        program = programs.kept(programs.Program(setup, step))
        return backend.map_blocks(program, batch, [items[i] for i in only])

    if (reductions := setup.reductions) is None:
        return treedef.unflatten(outputs(range(len(items))))
    if reductions.are_ordered:
        _check_order(plan, batch.chunks, site)
    runs, values = _reduced(backend, setup, plan, batch)
    entries = enumerate(reductions.of_outputs(out))
    kept = iter(outputs([i for i, entry in entries if entry.is_kept]))
    both = zip(runs.outputs, reductions.entries, strict=True)
    return runs.assemble(
        values, [[next(kept) for _ in own.avals] if r.is_kept else [] for own, r in both]
    )


def _reduced(
    backend: Any, setup: programs.Setup, plan: Plan, batch: Batch
) -> tuple[RunStates, Any]:
    """Return the results of reductions: states of blocks, merged in a tree, and what these give.

    A reduction whose merge does not commute needs the blocks in the order of the items. Of
    equal items, the one with the smaller index wins, because the items of one block may come
    between those of another.
    """
    axes, chunks = plan.reduced, batch.chunks
    sizes = tuple(plan.batch_shape[axis] for axis in axes)
    on_item = traced_as(setup.mapped.spec.fun)(functools.partial(setup.on_counted))
    items = [leaf.item for leaf in setup.inputs]
    traced = trace_reduced(on_item, items, setup.reductions, math.prod(sizes))
    runs = RunStates(setup.reductions, traced.outputs, sizes)
    place = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.int64))
    first = batch.inputs[0].array
    positions = [Input(backend.positions(chunks[a], first), (a,), place) for a in axes]
    batch = batch._replace(inputs=[*batch.inputs, *positions])
    small = *items[: len(batch.numbers)], *small_blocks(batch.inputs)
    of_block = functools.partial(programs.states, runs, axes)
    of_small = jax.eval_shape(functools.partial(of_block, setup.unbounded), *small)
    of_small, structure = jax.tree.flatten(of_small)
    items = [jax.ShapeDtypeStruct(x.shape[len(chunks) :], x.dtype) for x in of_small]
    of_row = functools.partial(programs.result, runs, 0, structure, setup)
    results, treedef = jax.tree.flatten(jax.eval_shape(of_row, *items))
    if not results:
        return runs, treedef.unflatten([])

    new, of_states = programs.Program, (runs, len(chunks) - len(axes), structure)
    state = programs.kept(new(setup, of_block, returns=items))
    merging = functools.partial(programs.merged, *of_states)
    merge = programs.kept(new(setup, merging, takes=items, returns=items))
    finishing = functools.partial(programs.result, *of_states)
    finish = programs.kept(new(setup, finishing, takes=items))
    merged = backend.reduce_blocks(state, merge, batch, axes)
    chunks = tuple(c for axis, c in enumerate(chunks) if axis not in axes)
    item = programs.packed_item(items)
    whole = Batch((), [Input(merged, tuple(range(len(chunks))), item)], chunks)
    return runs, treedef.unflatten(backend.map_blocks(finish, whole, results))


def _check_order(plan: Plan, chunks: BatchChunks, site: str) -> None:
    """Refuse chunks along more than the first reduced axis, where the order of items matters."""
    cut = [axis for axis in plan.reduced if plan.batch_shape[axis] > 1][1:]
    for axis in cut:
        if len(chunks[axis]) > 1:
            raise ValueError(
                f"{site}: Fold merges items in order, so only the first of the reduced axes can be "
                f"cut, but batch axis {axis} has chunks {chunks[axis]}; rechunk it to one chunk"
            )
