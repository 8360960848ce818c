# SPDX-License-Identifier: MIT
"""``chunked_vmap``: `jax.vmap` with at most ``chunk_size`` items in flight.

Here is what a caller sees: the arguments, checked before anything is traced. The loop is `loop.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from rankax._base.checks import check_callable, positive_int
from rankax._base.functions import function_name
from rankax._call.level import LevelWalk, item_program
from rankax._call.mapping import ArgumentMapping, axis_length, check_axes, resolve_arguments
from rankax._devices.parts import checked_shards
from rankax._fit.cpu import best_tile, tiles_matter
from rankax._fit.memory import Task, fit_to_limit, shape_of
from rankax._loop.loop import map_in_chunks
from rankax._loop.spec import LoopSpec
from rankax._plan.budget import checked_limit
from rankax._plan.chunks import split_into_chunks, split_into_tiles
from rankax._progress.report import checked_progress, told
from rankax._trace.item import (
    ItemProgram,
    checked_output_axes,
    has_order,
)

__all__ = ["chunked_vmap"]


def chunked_vmap(
    fun: Callable[..., Any],
    chunk_size: int | None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    checkpoint: bool = True,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    shards: int | jax.sharding.PartitionSpec | None = None,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis with at most ``chunk_size`` items in flight.

    Equivalent to ::

        jax.vmap(fun, in_axes, out_axes, axis_name=axis_name, axis_size=axis_size)

    but evaluated chunk after chunk, so that the intermediate values of at most ``chunk_size`` items
    exist at once, in the forward pass and in derivatives of every order.

    Parameters
    ----------
    fun : callable
        Takes and returns pytrees of arrays, for one item.
    chunk_size : int or None
        Upper bound of the items evaluated at once. A smaller chunk is used where it divides the
        axis (down to 4/5 of the bound) or makes the chunks alike in size; and a much smaller one
        on a CPU where ``fun`` sums few numbers at a time, for that is faster. ``None``, or a bound
        at least as large as the axis, is plain `jax.vmap` with exactly its program. ``1`` evaluates
        ``fun`` itself, item after item, without `jax.vmap`: a `jax.lax.cond` in it stays a branch,
        and ordered callbacks stay in order.
    in_axes, out_axes : int, None, or a pytree prefix of those, default 0
        As in `jax.vmap`; negative axes count from the end. Keyword arguments are mapped over
        axis 0. ``None`` passes an argument to every item; for an output it promises that the value
        does not depend on the item.
    axis_name : hashable, optional
        Accepted where `jax.vmap` is replaced. A collective over it is refused as soon as there is
        more than one chunk, for it would see the items of one chunk only.
    axis_size : int, optional
        Length of the mapped axis, needed only where no argument is mapped.
    checkpoint : bool, default True
        Recompute each chunk in the reverse pass instead of storing the intermediate values of
        all chunks. ``False`` is faster (one evaluation less) and takes memory that grows with the
        axis.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries keep to that: bytes,
        ``"2 GB"``, or ``"50%"`` of what is free. As in `auto_vmap`, where it is described.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. Without a second chunk there is nothing to show.
    shards : int or PartitionSpec, optional
        In how many parts the mapped axis lies on as many devices, or along which axes of a mesh;
        needed only where it cannot be seen, inside a `jax.jit` of your own. 1: walk it as one. See
        Notes.

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, returns its outputs with the
        axis at ``out_axes``. Shapes and dtypes are those of `jax.vmap`.

    Raises
    ------
    TypeError
        ``chunk_size`` is not an int or None.
    TypeError
        ``in_axes`` or ``out_axes`` holds anything but ints and None.
    TypeError
        ``fun`` returns something that is no array.
    ValueError
        ``chunk_size`` is not positive, or ``memory_limit`` is none or less than one item needs.
    ValueError
        The mapped axes differ in length, a leaf has no such axis, ``in_axes`` does not fit the
        arguments, or nothing is mapped.
    ValueError
        While tracing: ``out_axes`` does not fit what ``fun`` returns.
    ValueError
        While tracing, where there is more than one chunk: ``fun`` uses a collective over
        ``axis_name``; or it has an ordered effect, and a chunk has more than one item.

    Notes
    -----
    *Memory.* For ``n`` items, beyond inputs and outputs: forward, the intermediates of one chunk,
    whatever ``n``. In `jax.jvp` and `jax.vjp` the same where the chunk divides the axis and the
    axis is 0; otherwise, and of outputs that have an axis of length 1 in each item, also one copy
    of the outputs and of their tangents, or cotangents. Inputs
    are not copied, nor are their tangents or cotangents; only, in derivatives of that second case,
    those of less than 32 bits but for ``float16``, as ``float32``.

    *Time.* ``fun`` is traced once a call, however the axis divides. Outside `jax.jit`, a loop that
    does the same as one before is not compiled again; only derivatives are. Where no chunk divides
    the axis, the last one overlaps its neighbour and fewer than ``n / chunk_size`` items are
    computed twice; their cotangents count once.

    *Devices.* A mapped axis that is sharded is walked in parts, one on each device, side by side:
    ``chunk_size`` and ``memory_limit`` count per device, and nothing is sent, but for the sum of
    the cotangents of what is shared, once. Outputs lie as those of `jax.vmap`. That an axis is
    sharded is seen from arrays that are there, at an eager call, and always on a mesh with explicit
    axes. Items are mapped over the devices even where ``chunk_size`` is 1. A kernel with effects in
    order walks the axis as one.

    *Classes.* A pytree class is rebuilt with what it holds for one item, and for all, never for a
    chunk: it may check or convert its fields.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import chunked_vmap
    >>> def spread(points):  # (k, 3) -> (): needs (k, k, 3) numbers on the way
    ...     return jnp.sum((points[:, None] - points[None]) ** 2)
    >>> clouds = jnp.arange(10 * 4 * 3.0).reshape(10, 4, 3)
    >>> chunked_vmap(spread, 3)(clouds).shape
    (10,)
    >>> jax.grad(lambda c: chunked_vmap(spread, 3)(c).sum())(clouds).shape
    (10, 4, 3)
    """
    check_callable(fun, "chunked_vmap", "fun")
    where = f"chunked_vmap({function_name(fun)})"
    bound = None if chunk_size is None else positive_int(chunk_size, where, "chunk_size")
    limit = checked_limit(memory_limit, where)
    shown = checked_progress(progress, where)
    given_shards = checked_shards(shards, where)
    size = None if axis_size is None else axis_length(axis_size, where)
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    check_axes(in_axes, where, "in_axes")
    check_axes(out_axes, where, "out_axes")

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mapping = resolve_arguments(fun, where, args, kwargs, in_axes, size)
        parts = None if bound is limit is None else mapping.parts(given_shards, where)
        part = mapping if parts is None else mapping.part(parts)
        most = bound
        if limit is not None and mapping.length:
            item = item_program(fun, mapping, out_axes, axis_name)
            most = _chunk_within(limit, item, part, bound, where, checkpoint=checkpoint)
        # With a bound of 1 even a single item is a chunk, so that branches are always branches.
        if most is None or not mapping.length or part.length <= most != 1:
            whole = _in_one_chunk(fun, mapping, in_axes, out_axes, axis_name)
            return whole(*args, **kwargs)
        with told(shown, function_name(fun), 1 if parts is None else parts.count) as passed_on:
            item = item_program(fun, mapping, out_axes, axis_name)
            if parts is not None and has_order(item.closed):
                parts, part = None, mapping
            tile = best_tile(item.closed) if tiles_matter() else None
            chunks = split_into_tiles(part.length, most, tile or most)
            walk = LevelWalk(
                LoopSpec(chunks, mapping.mapped_axes, checkpoint=checkpoint, progress=passed_on)
            )
            if parts is None:
                outs = walk.run(item, mapping.mapped)
            else:
                outs = walk.in_parts(item, mapping.mapped, parts)
            return jax.tree.unflatten(item.out_tree, outs)

    return mapped


# How it is done: one trace of an item, then one loop over the chunks (`map_chunks`).


def _in_one_chunk(
    fun: Callable[..., Any],
    mapping: ArgumentMapping,
    in_axes: Any,
    out_axes: Any,
    axis_name: Hashable | None,
) -> Callable[..., Any]:
    """Return `jax.vmap` of ``fun``, but for the errors."""
    returned = False

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal returned
        out = fun(*args, **kwargs)
        checked_output_axes(fun, out, out_axes)
        returned = True
        return out

    vmapped = jax.vmap(checked, in_axes, out_axes, axis_name=axis_name, axis_size=mapping.length)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return vmapped(*args, **kwargs)
        except ValueError:
            if returned and axis_name is None:  # all is well with `fun`, so it is traced again
                item_program(fun, mapping, out_axes).check_unmapped_outputs()
            raise

    return call


def _chunk_within(
    limit: int | str,
    item: ItemProgram,
    mapping: ArgumentMapping,
    bound: int | None,
    where: str,
    *,
    checkpoint: bool,
) -> int:
    """Return the chunk size, of at most ``bound``, that keeps to a memory limit."""
    axes = mapping.mapped_axes
    shapes = [shape_of(leaf) for leaf in mapping.mapped]

    def program(chunk_size: int) -> tuple[int, Callable[..., Any], list[Any]]:
        chunks = split_into_chunks(mapping.length, chunk_size)

        def whole(consts: list[Any], leaves: list[Any]) -> list[Any]:
            of_item = item.with_constants(consts)
            if chunks.steps == 1 != chunk_size:
                return of_item.on_chunk(axes, chunks.size)(*leaves)
            return map_in_chunks(of_item, leaves, LoopSpec(chunks, axes, checkpoint=checkpoint))

        return chunks.size, whole, shapes

    most = mapping.length if bound is None else min(bound, mapping.length)
    of_call = tuple((shape.shape, shape.dtype) for shape in shapes), axes, item.out_axes
    task = Task(where, limit, (mapping.length,), most, with_gradient=checkpoint)
    return fit_to_limit(task, item.closed, item.closed.consts, program, of_call).chunk_size
