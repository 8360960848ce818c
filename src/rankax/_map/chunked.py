# SPDX-License-Identifier: MIT
"""The memory-bounded engine: `jax.vmap` with at most ``chunk_size`` items in flight.

One `jax.lax.scan` walks the chunks. How an operand reaches it, and how an output leaves it, decides
the memory:

* Even chunks along axis 0 are the scan's own ``xs`` and ``ys``. Splitting the axis is a reshape, so
  nothing is copied in any direction of differentiation.
* Any other operand is read by index, and so is its tangent; the transpose adds each chunk's
  cotangent in place (`take_chunk` says what makes that so).
* Any other output is written in place by index. That is as good forward, but transposed it has to
  clear from the cotangent what it read, lest an overlapped item counts twice, and XLA copies the
  cotangent at every step. So the derivative of such a loop is that of one whose outputs leave as
  ``ys`` and are joined afterwards. Either loop is right without that rule, for JAX forgets the
  rules inside a scan that it has linearised.
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
from jax import core, lax

from rankax._base.checks import common_length, positive_int
from rankax._base.functions import function_name
from rankax._base.trees import leaves_with_names, spread_prefix
from rankax._base.words import plural
from rankax._map.access import (
    first_start,
    flatten_items,
    join_chunks,
    next_start,
    read_apart,
    stack_chunks,
    take_chunk,
    widen,
    write_chunk,
    zeros,
)
from rankax._map.calls import call_with_derivative_of, keep_rules
from rankax._map.item import (
    ItemProgram,
    checked_output_axes,
    chunk_program,
    is_axis,
    trace_item,
)
from rankax._plan.chunks import Chunks, split_into_chunks

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
        axis (down to 4/5 of the bound) or makes the chunks alike in size. ``None``, or a bound at
        least as large as the axis, is plain `jax.vmap` with exactly its program. ``1`` evaluates
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

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, returns its outputs with the
        axis at ``out_axes``. Shapes and dtypes are those of `jax.vmap`.

    Raises
    ------
    TypeError
        If ``chunk_size`` is not an int or None, ``in_axes`` or ``out_axes`` holds anything but ints
        and None, or ``fun`` returns something that is no array.
    ValueError
        If ``chunk_size`` is not positive, the mapped axes differ in length, a leaf has no such
        axis, ``in_axes`` does not fit the arguments, or nothing is mapped. While tracing: if
        ``out_axes`` does not fit what ``fun`` returns; where there is more than one chunk, if
        ``fun`` uses a collective over ``axis_name``, or an ordered effect and a chunk has more than
        one item.

    Notes
    -----
    *Memory.* For ``n`` items, beyond inputs and outputs: forward, the intermediates of one chunk,
    whatever ``n``. In `jax.jvp` and `jax.vjp` the same where the chunk divides the axis and the
    axis is 0; otherwise, and of outputs that have an axis of length 1 in each item, also one copy
    of the outputs and of their tangents, or cotangents. Inputs
    are not copied, nor are their tangents or cotangents; only, in derivatives of that second case,
    those of less than 32 bits but for ``float16``, as ``float32``.

    *Time.* ``fun`` is traced once however the axis divides. Where no chunk divides the axis, the
    last one overlaps its neighbour and fewer than ``n / chunk_size`` items are computed twice;
    their cotangents count once.

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
    if not callable(fun):
        raise TypeError(f"chunked_vmap: fun must be callable, got {type(fun).__name__}")
    where = f"chunked_vmap({function_name(fun)})"
    bound = None if chunk_size is None else positive_int(chunk_size, where, "chunk_size")
    size = None if axis_size is None else _axis_size(axis_size, where)
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    _check_axes(in_axes, where, "in_axes")
    _check_axes(out_axes, where, "out_axes")

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mapping = _resolve(fun, where, args, kwargs, in_axes, size)
        # With a bound of 1 even a single item is a chunk, so that branches are always branches.
        if bound is None or not mapping.length or mapping.length <= bound != 1:
            whole = _in_one_chunk(fun, mapping, in_axes, out_axes, axis_name)
            return whole(*args, **kwargs)
        chunks = split_into_chunks(mapping.length, bound)
        item = _item_program(fun, mapping, out_axes, axis_name)
        return _chunked_call(item, mapping, chunks, checkpoint=checkpoint)

    return mapped


# What is asked for: checked before anything is traced.


class _Mapping(NamedTuple):
    """The arguments of one call, flat, and the axis of each that is mapped."""

    leaves: list[Any]
    axes: list[int | None]
    treedef: Any
    length: int

    @property
    def mapped(self) -> list[Any]:
        return [x for x, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]

    def arguments(self, mapped: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other leaves in place of those that are mapped."""
        rest = iter(mapped)
        pairs = zip(self.leaves, self.axes, strict=True)
        leaves = [x if axis is None else next(rest) for x, axis in pairs]
        return self.treedef.unflatten(leaves)


def _axis_size(value: Any, where: str) -> int:
    is_zero = not isinstance(value, bool) and value == 0
    return 0 if is_zero else positive_int(value, where, "axis_size")


def _check_axes(axes: Any, where: str, parameter: str) -> None:
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


def _resolve(
    fun: Callable[..., Any],
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Any,
    axis_size: int | None,
) -> _Mapping:
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
    return _Mapping(leaves, axes, jax.tree.structure((args, kwargs)), length)


# How it is done: one trace of an item, then one loop over the chunks.


def _item_program(
    fun: Callable[..., Any], mapping: _Mapping, out_axes: Any, axis_name: Hashable | None = None
) -> ItemProgram:
    axes = [axis for axis in mapping.axes if axis is not None]
    avals = [_aval(x, a) for x, a in zip(mapping.mapped, axes, strict=True)]
    return trace_item(
        fun, lambda *items: mapping.arguments(items), avals, out_axes, axis_name=axis_name
    )


def _in_one_chunk(
    fun: Callable[..., Any],
    mapping: _Mapping,
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


class _Operands(NamedTuple):
    """What a chunk reads: ``shared`` whole, ``sliced`` by index, ``stacked`` as its own row.

    Before the loop those that are sliced are as `flatten_items` returns them, and `widen` where
    they are differentiated; inside as `take_chunk` does.
    """

    shared: list[Any]
    sliced: list[Any]
    stacked: list[Any]


Body = Callable[[_Operands], list[Any]]


@dataclasses.dataclass(frozen=True)
class _Output:
    """One output of the chunk: its shape there, and how the chunks' outputs become one."""

    aval: Any  # of one chunk
    axis: int | None  # None: the same for every chunk, and the last one is kept
    in_place: bool  # written into a carried buffer; otherwise joined from the scan's ys

    @property
    def carried(self) -> bool:
        return self.in_place or self.axis is None

    def buffer(self, length: int) -> jax.Array:
        shape = list(self.aval.shape)
        if self.axis is not None:
            shape[self.axis] = length
        return zeros(tuple(shape), self.aval.dtype)

    def to_differentiate(self) -> _Output:
        """Return it as collected from the ``ys`` where it may have a tangent."""
        moves = jnp.issubdtype(self.aval.dtype, jnp.inexact)
        return dataclasses.replace(self, in_place=self.in_place and not moves)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The fixed facts of one loop."""

    chunks: Chunks
    sliced_axes: tuple[int, ...]
    outputs: tuple[_Output, ...]
    checkpoint: bool


def _chunked_call(item: ItemProgram, mapping: _Mapping, chunks: Chunks, *, checkpoint: bool) -> Any:
    axes = [axis for axis in mapping.axes if axis is not None]

    # A jaxpr, so that `fun` is traced once and everything it closes over becomes an operand, which
    # a rule of differentiation given by hand requires.
    mapped = mapping.mapped
    avals = [_aval(x, axis, chunks.size) for x, axis in zip(mapped, axes, strict=True)]
    closed = keep_rules(chunk_program(item, axes, avals, chunks.size))
    evaluate = _apart_from_constants(closed, avals)
    pairs = zip(closed.out_avals, item.out_axes, strict=True)
    outputs = [_output(aval, axis, chunks) for aval, axis in pairs]
    stacks = [_is_stack(axis, aval, chunks) for axis, aval in zip(axes, avals, strict=True)]
    sliced_axes = tuple(axis for axis, is_stack in zip(axes, stacks, strict=True) if not is_stack)
    layout = _Layout(chunks, sliced_axes, tuple(outputs), checkpoint)

    def body(operands: _Operands) -> list[Any]:
        sliced, stacked = iter(operands.sliced), iter(operands.stacked)
        chunk = [
            next(stacked) if is_stack else _as_chunk(next(sliced), aval)
            for is_stack, aval in zip(stacks, avals, strict=True)
        ]
        return evaluate(operands.shared, chunk)

    operands = _Operands(list(closed.consts), [], [])
    for leaf, axis, is_stack in zip(mapped, axes, stacks, strict=True):
        if is_stack:
            operands.stacked.append(stack_chunks(leaf, chunks))
        else:
            operands.sliced.append(flatten_items(leaf, axis))
    try:
        outs = _map_chunks(body, layout, operands)
    except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
        raise item.reuses_key() from error
    return jax.tree.unflatten(item.out_tree, outs)


def _apart_from_constants(closed: Any, avals: list[Any]) -> Callable[..., list[Any]]:
    """Return the program as a function ``(constants, inputs)`` that holds no constants itself.

    For they may be tracers of an outer trace, and JAX remembers such a function for a while.
    """
    jaxpr = closed.jaxpr
    if not any(isinstance(const, core.Tracer) for const in getattr(jaxpr, "consts", ())):
        return lambda constants, inputs: core.eval_jaxpr(jaxpr, constants, *inputs)
    # Newer versions of JAX keep them in the jaxpr, so they become inputs; `fun` is not run again.
    opened = jax.make_jaxpr(lambda consts, inputs: core.eval_jaxpr(jaxpr, consts, *inputs))
    jaxpr = opened(list(closed.consts), avals).jaxpr
    return lambda constants, inputs: core.eval_jaxpr(jaxpr, (), *constants, *inputs)


def _output(aval: Any, axis: int | None, chunks: Chunks) -> _Output:
    if axis is None:
        return _Output(aval, None, in_place=False)
    axis %= aval.ndim
    return _Output(aval, axis, in_place=not _is_stack(axis, aval, chunks))


def _is_stack(axis: int, chunk: Any, chunks: Chunks) -> bool:
    """Whether a leaf of such chunks can be ``xs`` or ``ys`` of the scan without a copy.

    XLA stores the stack of items that have an axis of length 1 with that axis elsewhere, and copies
    the whole: on CPUs, with JAX 0.7 to 0.12. ``test_an_axis_of_length_1_costs_nothing`` shows it.
    """
    return axis == 0 and chunks.even and 1 not in chunk.shape[1:]


def _aval(leaf: Any, axis: int, *size: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf with ``axis`` of another size, or without it."""
    shape = (*leaf.shape[:axis], *size, *leaf.shape[axis + 1 :])
    weak_type = getattr(leaf, "weak_type", False)  # PRNG keys have none
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak_type)


def _as_chunk(window: jax.Array, aval: jax.ShapeDtypeStruct) -> jax.Array:
    """Undo `flatten_items` and `widen` for what was read of them."""
    chunk = lax.reshape(window, aval.shape)
    return chunk if chunk.dtype == aval.dtype else chunk.astype(aval.dtype)


def _map_chunks(body: Body, layout: _Layout, operands: _Operands) -> list[Any]:
    """Run the loop; where it reads or writes by index, its derivative is that of another one."""
    if not operands.sliced and not any(output.in_place for output in layout.outputs):
        return _loop(body, layout, operands)

    def body_apart(operands: _Operands) -> list[Any]:
        windows = zip(operands.sliced, layout.sliced_axes, strict=True)
        apart = [read_apart(window, layout.chunks.size, axis) for window, axis in windows]
        return body(operands._replace(sliced=apart))

    def to_differentiate(operands: _Operands) -> list[Any]:
        outputs = tuple(output.to_differentiate() for output in layout.outputs)
        wide = operands._replace(sliced=[widen(leaf) for leaf in operands.sliced])
        return _loop(body_apart, dataclasses.replace(layout, outputs=outputs), wide)

    return call_with_derivative_of(
        to_differentiate, functools.partial(_loop, body, layout), operands
    )


def _loop(body: Body, layout: _Layout, operands: _Operands) -> list[Any]:
    """Walk the chunks once, and collect each output as it says."""
    chunks, outputs = layout.chunks, layout.outputs
    carried = [output for output in outputs if output.carried]

    def one_chunk(start: Any, operands: _Operands) -> list[Any]:
        window = [
            take_chunk(leaf, start, chunks, axis)
            for leaf, axis in zip(operands.sliced, layout.sliced_axes, strict=True)
        ]
        return body(operands._replace(sliced=window))

    if layout.checkpoint:
        # A scan keeps the recomputation apart by itself, so the barriers of prevent_cse are waste.
        one_chunk = jax.checkpoint(one_chunk, prevent_cse=False)

    def step(carry: tuple[Any, list[Any]], stacked: Any) -> Any:
        start, buffers = carry
        outs = list(zip(outputs, one_chunk(start, operands._replace(stacked=stacked)), strict=True))
        held = zip(buffers, [(output, out) for output, out in outs if output.carried], strict=True)
        buffers = [
            out if output.axis is None else write_chunk(buffer, out, start, output.axis)
            for buffer, (output, out) in held
        ]
        rows = [out for output, out in outs if not output.carried]
        return (next_start(start, chunks), buffers), rows

    empty = [output.buffer(chunks.length) for output in carried]
    init = first_start(chunks), empty
    (_, buffers), ys = lax.scan(step, init, operands.stacked, chunks.steps)
    from_carry, from_ys = iter(buffers), iter(ys)
    return [
        next(from_carry) if output.carried else join_chunks(next(from_ys), chunks, output.axis or 0)
        for output in outputs
    ]
