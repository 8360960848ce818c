# SPDX-License-Identifier: MIT
"""``chunked_vmap``: `jax.vmap` with at most ``chunk_size`` items in flight.

Here is what a caller sees: the arguments, checked before anything is traced. The loop is `loop.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.checks import check_callable, common_length, positive_int
from rankax._base.functions import function_name
from rankax._base.trees import leaves_with_names, spread_prefix
from rankax._base.words import plural
from rankax._map.cost import Task, fit_to_limit, shape_of
from rankax._map.eager import map_chunks
from rankax._map.item import (
    ItemProgram,
    checked_output_axes,
    has_order,
    is_axis,
    trace_item,
    with_axis,
)
from rankax._map.keys import PLACE
from rankax._map.loop import map_in_chunks
from rankax._map.progress import Progress, checked_progress, told
from rankax._map.shards import Parts, Shards, checked_shards, find_parts, part_shape
from rankax._map.side_by_side import First, Layout, map_parts
from rankax._map.tiles import best_tile, tiles_matter
from rankax._plan.budget import checked_limit
from rankax._plan.chunks import Chunks, split_into_chunks, split_into_tiles

__all__ = [
    "ArgumentMapping",
    "axis_length",
    "check_axes",
    "chunked_level",
    "chunked_vmap",
    "resolve_arguments",
]


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
            item = _item_program(fun, mapping, out_axes, axis_name)
            most = _chunk_within(limit, item, part, bound, where, checkpoint=checkpoint)
        # With a bound of 1 even a single item is a chunk, so that branches are always branches.
        if most is None or not mapping.length or part.length <= most != 1:
            whole = _in_one_chunk(fun, mapping, in_axes, out_axes, axis_name)
            return whole(*args, **kwargs)
        with told(shown, function_name(fun), 1 if parts is None else parts.count) as passed_on:
            item = _item_program(fun, mapping, out_axes, axis_name)
            if parts is not None and has_order(item.closed):
                parts, part = None, mapping
            tile = best_tile(item.closed) if tiles_matter() else None
            chunks = split_into_tiles(part.length, most, tile or most)
            walk = _Walk(mapping.mapped_axes, chunks, checkpoint, passed_on)
            if parts is None:
                outs = walk.run(item, mapping.mapped)
            else:
                outs = walk.in_parts(item, mapping.mapped, parts)
            return jax.tree.unflatten(item.out_tree, outs)

    return mapped


# What is asked for: checked before anything is traced.


class ArgumentMapping(NamedTuple):
    """The arguments of one call, flat, and the axis of each that is mapped."""

    leaves: list[Any]
    axes: list[int | None]
    treedef: Any
    length: int

    @property
    def mapped(self) -> list[Any]:
        return [x for x, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]

    @property
    def mapped_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in self.axes if axis is not None)

    @property
    def item_avals(self) -> list[jax.ShapeDtypeStruct]:
        """Return shape and dtype of what one item has of each leaf that is mapped."""
        pairs = zip(self.mapped, self.mapped_axes, strict=True)
        return [with_axis(x, axis) for x, axis in pairs]

    def parts(self, shards: Shards, where: str) -> Parts | None:
        """Return the parts in which the mapped axis lies, if there are any."""
        axes = [(axis,) for axis in self.mapped_axes]
        found = find_parts(shards, self.mapped, axes, (self.length,), where)
        return found[0] if found else None

    def part(self, parts: Parts) -> ArgumentMapping:
        """Return one part of it, of which the mapped leaves are shapes only."""
        leaves = [
            x if axis is None else shape_of(x, part_shape(jnp.shape(x), axis, parts))
            for x, axis in zip(self.leaves, self.axes, strict=True)
        ]
        return self._replace(leaves=leaves, length=self.length // parts.count)

    def arguments(self, mapped: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other leaves in place of those that are mapped."""
        rest = iter(mapped)
        pairs = zip(self.leaves, self.axes, strict=True)
        leaves = [x if axis is None else next(rest) for x, axis in pairs]
        return self.treedef.unflatten(leaves)


def axis_length(value: Any, where: str) -> int:
    is_zero = not isinstance(value, bool) and value == 0
    return 0 if is_zero else positive_int(value, where, "axis_size")


def check_axes(axes: Any, where: str, parameter: str) -> None:
    for path, entry in jax.tree_util.tree_flatten_with_path(axes)[0]:
        if not is_axis(entry):
            raise TypeError(
                f"{where}: {parameter} must hold ints and None, got {type(entry).__name__} "
                f"{entry!r} at {parameter}{jax.tree_util.keystr(path)}"
            )


def _argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Name positional arguments as ``fun`` does; by position where it has no signature."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def resolve_arguments(
    fun: Callable[..., Any],
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Any,
    axis_size: int | None,
) -> ArgumentMapping:
    """Give every leaf its axis and find the common length, or say which leaf does not fit."""
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{where}: in_axes has {plural(len(in_axes), 'entry')} for "
            f"{plural(len(args), 'positional argument')}"
        )
    prefixes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    names = _argument_names(fun, len(args))
    named: list[tuple[str, Any]] = []
    axes: list[int | None] = []
    for name, prefix, arg in [
        *zip(names, prefixes, args, strict=True),
        *((name, 0, kwargs[name]) for name in sorted(kwargs)),
    ]:
        named += leaves_with_names(arg, name)
        try:
            axes += spread_prefix(prefix, arg, name, is_entry=is_axis, what="in_axes")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    table = [(name, x, a) for (name, x), a in zip(named, axes, strict=True) if a is not None]
    if not table and axis_size is None:
        raise ValueError(
            f"{where}: nothing is mapped; map at least one array through in_axes, or give axis_size"
        )
    if axis_size is not None:
        table.append(("axis_size", np.broadcast_to(0, axis_size), 0))
    length = common_length(table, where)
    leaves = [x if a is None else jnp.asarray(x) for (_, x), a in zip(named, axes, strict=True)]
    axes = [None if a is None else a % jnp.ndim(x) for a, x in zip(axes, leaves, strict=True)]
    return ArgumentMapping(leaves, axes, jax.tree.structure((args, kwargs)), length)


# How it is done: one trace of an item, then one loop over the chunks (`map_chunks`).


def _item_program(
    fun: Callable[..., Any],
    mapping: ArgumentMapping,
    out_axes: Any,
    axis_name: Hashable | None = None,
    *,
    numbered: bool = False,
) -> ItemProgram:
    avals = mapping.item_avals
    if not numbered:
        return trace_item(fun, lambda *x: mapping.arguments(x), avals, out_axes, axis_name)

    def arguments(*items: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = mapping.arguments(items[:-1])
        return (*args, items[-1]), kwargs

    return trace_item(fun, arguments, [*avals, PLACE], out_axes, axis_name)


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
                _item_program(fun, mapping, out_axes).check_unmapped_outputs()
            raise

    return call


@dataclasses.dataclass(frozen=True)
class _Walk:
    """How the items of one call, or of each of its parts, are walked."""

    axes: tuple[int, ...]  # of the mapped leaves
    chunks: Chunks
    checkpoint: bool
    progress: Progress | None
    numbered: bool = False

    def run(self, item: ItemProgram, leaves: list[Any]) -> list[Any]:
        return map_chunks(
            item,
            leaves,
            self.axes,
            self.chunks,
            checkpoint=self.checkpoint,
            numbered=self.numbered,
            progress=self.progress,
        )

    def in_parts(self, item: ItemProgram, leaves: list[Any], parts: Parts) -> list[Any]:
        walk = dataclasses.replace(self, chunks=dataclasses.replace(self.chunks, by_index=True))
        layout = Layout(
            (self.chunks.length * parts.count,), (parts,), tuple((axis,) for axis in self.axes)
        )
        out_axes = [(axis,) for axis in item.out_axes]
        return map_parts(walk.part, item, leaves, layout, out_axes, walk)

    def part(self, item: ItemProgram, leaves: list[Any], _: First) -> list[Any]:
        return self.run(item, leaves)


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
            return map_in_chunks(of_item, leaves, axes, chunks, checkpoint=checkpoint)

        return chunks.size, whole, shapes

    most = mapping.length if bound is None else min(bound, mapping.length)
    of_call = tuple((shape.shape, shape.dtype) for shape in shapes), axes, item.out_axes
    task = Task(where, limit, (mapping.length,), most, with_gradient=checkpoint)
    return fit_to_limit(task, item.closed, item.closed.consts, program, of_call).chunk_size


def chunked_level(
    fun: Callable[..., Any],
    in_axes: Sequence[int | None],
    size: int,
    tile: int,
    *,
    checkpoint: bool,
    progress: Progress | None,
    numbered: bool = False,
    by_index: bool = False,
) -> Callable[..., Any]:
    """Return `chunked_vmap` of ``fun`` for one level of a nest, of which nothing has to be checked.

    ``fun`` takes arrays, mapped along ``in_axes`` of length ``size``, and returns a list of them.
    Where it is ``numbered``, it takes the place of its item last (see `keys.py`).
    """
    chunks = dataclasses.replace(split_into_chunks(size, tile), by_index=by_index)

    def mapped(*leaves: Any) -> Any:
        treedef = jax.tree.structure((leaves, {}))
        arrays = [x if a is None else jnp.asarray(x) for x, a in zip(leaves, in_axes, strict=True)]
        mapping = ArgumentMapping(arrays, list(in_axes), treedef, size)
        item = _item_program(fun, mapping, 0, numbered=numbered)
        walk = _Walk(mapping.mapped_axes, chunks, checkpoint, progress, numbered)
        return jax.tree.unflatten(item.out_tree, walk.run(item, mapping.mapped))

    return mapped
