# SPDX-License-Identifier: MIT
"""``chunked_reduce``: a reduction of `jax.vmap` that never stores what it reduces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rankax._base.checks import check_bool, check_callable, positive_int
from rankax._base.functions import function_name
from rankax._call.mapping import ArgumentMapping, axis_length, check_axes, resolve_arguments
from rankax._call.over_parts import First, Layout, reduce_parts
from rankax._devices.parts import checked_shards
from rankax._fit.cpu import best_tile, tiles_matter
from rankax._fit.memory import Task, fit_to_limit, shape_of
from rankax._loop.spec import LoopSpec
from rankax._plan.budget import checked_limit
from rankax._plan.chunks import Chunks, split_into_chunks
from rankax._progress.report import checked_progress, told
from rankax._reduce.row import most_lanes, whole_level
from rankax._reduce.run import Reduced, Reductions, read_reductions, reduce_row
from rankax._trace.item import ItemProgram, has_order, trace_item

__all__ = ["chunked_reduce"]


@dataclasses.dataclass(frozen=True)
class _RowWalk:
    """How a row, or each of its parts, is walked."""

    level: LoopSpec

    def run(self, item: ItemProgram, leaves: Sequence[Any], reductions: Reductions) -> Reduced:
        def on_item(*items: Any) -> Any:
            return item.out_tree.unflatten(item(*items))

        return reduce_row(on_item, leaves, (self.level,), reductions, item.where)

    def part(
        self, item: ItemProgram, leaves: Sequence[Any], _: First, reductions: Reductions
    ) -> Reduced:
        return self.run(item, leaves, reductions)


def chunked_reduce(
    fun: Callable[..., Any],
    reduction: Any,
    chunk_size: int | None,
    in_axes: Any = 0,
    *,
    axis_size: int | None = None,
    checkpoint: bool = True,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    shards: int | jax.sharding.PartitionSpec | None = None,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis and reduce what it returns, with few items in flight.

    Equivalent, for ``reduction="sum"``, to ::

        lambda *args: jax.tree.map(lambda out: out.sum(0), jax.vmap(fun, in_axes)(*args))

    but evaluated tile after tile, so that neither the outputs of all items nor what is computed on
    the way to them are ever stored, in the forward pass and in derivatives of every order.

    Parameters
    ----------
    fun : callable
        Takes and returns pytrees of arrays, for one item.
    reduction : str, Reduction, None, or a pytree prefix of those
        What becomes of each output of ``fun``, or of a part of them. A name: ``"sum"``, ``"mean"``,
        ``"prod"``, ``"max"``, ``"min"``, ``"argmax"``, ``"argmin"``, ``"any"``, ``"all"`` or
        ``"logsumexp"``, with the values and dtypes of `jax.numpy` (`jax.nn.logsumexp` for the
        last). An object from `rankax.reductions`, as ``TopK(3)`` or ``Best("distance")``. ``None``
        keeps an output whole, with the mapped axis in front.
    chunk_size : int or None
        Upper bound of the items evaluated at once. A tile is smaller where that is faster, as on a
        CPU. ``None``: all at once, by `jax.vmap` and the function of `jax.numpy`.
    in_axes, axis_size
        As in `jax.vmap`; keyword arguments are mapped over axis 0.
    checkpoint : bool, default True
        Recompute each tile in the reverse pass instead of storing what it computed.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries keep to that: bytes,
        ``"2 GB"``, or ``"50%"`` of what is free. As in `auto_vmap`, where it is described.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. The gradient of some reductions walks more than twice.
    shards : int or PartitionSpec, optional
        In how many parts the mapped axis lies on as many devices, or along which axes of a mesh;
        needed only where it cannot be seen, inside a `jax.jit` of your own. 1: walk it as one. See
        Notes.

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, returns its outputs reduced.

    Raises
    ------
    TypeError
        ``reduction`` holds anything else, or an argument is of a wrong type.
    ValueError
        No reduction has this name, or an output cannot be reduced so. This and what follows is
        seen before the loop is compiled.
    ValueError
        The mapped axes differ in length.
    ValueError
        ``memory_limit`` is none, or less than one item needs.

    Notes
    -----
    *Memory.* Accumulators and one tile, whatever the number of items; ``prod`` and ``Fold`` store
    one accumulator for each tile in a derivative.

    *Derivatives.* Sums, means and moments are differentiated tile by tile; ``logsumexp`` in a
    second pass; ``max``, ``min``, ``TopK`` and ``Best`` at the winners only, each of which is
    evaluated once more. Of equal items the first has the whole derivative, where `jax.numpy.max`
    shares it among them.

    *Order.* Items are added in another order than by `jax.numpy`, so that the last digits of a sum
    differ. What is left over behind the last whole tile is a smaller tile: no item counts twice.

    *Devices.* As `chunked_vmap`, each device reduces its own part of a sharded axis, and what they
    found is merged once: sums, means, extremes, ``any`` and ``all`` by one sum or the like over
    the devices, all else by sending what was found, a number or a few of each device, to all.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from rankax import chunked_reduce
    >>> def potential(source, mass):
    ...     return -mass / jnp.linalg.norm(source)
    >>> sources, masses = jnp.full((10_000, 3), 2.0), jnp.full(10_000, 3.0**0.5)
    >>> chunked_reduce(potential, "sum", chunk_size=1000)(sources, masses).round()
    Array(-5000., dtype=float32)
    """
    check_callable(fun, "chunked_reduce", "fun")
    where = f"chunked_reduce({function_name(fun)})"
    reductions = read_reductions(reduction, where)
    bound = None if chunk_size is None else positive_int(chunk_size, where, "chunk_size")
    limit = checked_limit(memory_limit, where)
    size = None if axis_size is None else axis_length(axis_size, where)
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    check_axes(in_axes, where, "in_axes")
    check_bool(checkpoint, where, "checkpoint")
    shown = checked_progress(progress, where)
    given_shards = checked_shards(shards, where)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        mapping = resolve_arguments(fun, where, args, kwargs, in_axes, size)

        @functools.wraps(fun)
        def on_item(*items: Any) -> Any:
            item_args, item_kwargs = mapping.arguments(items)
            return fun(*item_args, **item_kwargs)

        parts = None if bound is limit is None else mapping.parts(given_shards, where)
        part = mapping if parts is None else mapping.part(parts)
        most = bound
        if limit is not None and mapping.length:
            task = Task(where, limit, (part.length,), bound or part.length, checkpoint)
            most = _chunk_within(task, on_item, part, reductions)
        if most is None or part.length <= most:
            whole = whole_level(mapping.length, mapping.mapped_axes)
            return reduce_row(on_item, mapping.mapped, (whole,), reductions).assembled()
        item = trace_item(on_item, lambda *items: (items, {}), mapping.item_avals, 0)
        if has_order(item.closed):
            parts, part = None, mapping
        tile = _tile(part.length, most, best_tile(item.closed) if tiles_matter() else None)
        level = _row_level(part.length, tile, mapping.mapped_axes, checkpoint)
        level = dataclasses.replace(level, by_index=parts is not None)
        with told(shown, function_name(fun), 1 if parts is None else parts.count) as passed_on:
            walk = _RowWalk(dataclasses.replace(level, progress=passed_on))
            if parts is None:
                return walk.run(item, mapping.mapped, reductions).assembled()
            axes = tuple((axis,) for axis in mapping.mapped_axes)
            layout = Layout((mapping.length,), (parts,), axes, reduced=(0,))
            return reduce_parts(walk.part, item, mapping.mapped, layout, reductions, walk)

    return reduced


def _tile(length: int, most: int, best: int | None) -> int:
    return split_into_chunks(length, min(most, most_lanes() or most, best or most)).size


def _row_level(length: int, tile: int, axes: tuple[int, ...], checkpoint: bool) -> LoopSpec:
    chunks = Chunks(length, tile, length // tile if tile else 0)
    return LoopSpec(chunks, axes, tile < length, checkpoint=checkpoint)


def _chunk_within(
    task: Task, on_item: Callable[..., Any], mapping: ArgumentMapping, reductions: Reductions
) -> int:
    """Return the chunk size that keeps to a memory limit."""
    item = trace_item(on_item, lambda *items: (items, {}), mapping.item_avals, 0)
    best = best_tile(item.closed) if tiles_matter() else None
    shapes = [shape_of(leaf) for leaf in mapping.mapped]

    def program(chunk_size: int) -> tuple[int, Callable[..., Any], list[Any]]:
        tile = mapping.length
        if chunk_size < mapping.length:
            tile = _tile(mapping.length, chunk_size, best)
        level = _row_level(mapping.length, tile, mapping.mapped_axes, task.with_gradient)

        def whole(consts: list[Any], leaves: list[Any]) -> list[Any]:
            of_item = item.with_constants(consts)

            def fun(*items: Any) -> Any:
                return item.out_tree.unflatten(of_item(*items))

            found = reduce_row(fun, leaves, (level,), reductions)
            return jax.tree.leaves(found.assembled())

        return tile, whole, shapes

    of_call = tuple((s.shape, s.dtype) for s in shapes), mapping.mapped_axes, reductions
    return fit_to_limit(task, item.closed, item.closed.consts, program, of_call).chunk_size
