# SPDX-License-Identifier: MIT
"""``chunked_vmap``: `jax.vmap` with at most ``chunk_size`` items in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from rankax._base.checks import check_callable
from rankax._base.functions import function_name
from rankax._call.mapping import bind_axes, checked_axes
from rankax._call.run import run
from rankax._options import check_batched, options_of


def chunked_vmap(
    fun: Callable[..., Any],
    chunk_size: int | None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    checkpoint: bool | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    devices: int | str | Sequence[Any] | jax.sharding.PartitionSpec | None = None,
    lockstep: bool = True,
    batched: bool = False,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis with at most ``chunk_size`` items in flight.

    Equivalent to ::

        jax.vmap(fun, in_axes, out_axes, axis_name=axis_name, axis_size=axis_size)

    but evaluated chunk by chunk, so that the intermediate values of at most ``chunk_size`` items
    exist at once, in the forward pass and in derivatives of every order.

    Parameters
    ----------
    fun : callable
        Takes and returns pytrees of arrays, for one item.
    chunk_size : int or None
        Maximum number of items evaluated at once. A smaller chunk is used where it divides the axis
        (down to 4/5 of the bound) or evens out the chunks, and a much smaller one on a CPU where
        that is faster, such as for sums of few numbers. ``None``, or a bound
        at least as large as the axis, is plain `jax.vmap` with exactly its program. ``1`` evaluates
        ``fun`` itself, item by item, without `jax.vmap`: a `jax.lax.cond` stays a branch, and
        ordered callbacks stay in order.
    in_axes, out_axes : int, None, or a pytree prefix of those, default 0
        As in `jax.vmap`; negative axes count from the end. Keyword arguments are mapped over
        axis 0. ``None`` passes an argument to every item; for an output it promises that the value
        does not depend on the item.
    axis_name : hashable, optional
        Accepted for code that replaces `jax.vmap`. With more than one chunk, a collective over it
        is an error, because it would see the items of one chunk only.
    axis_size : int, optional
        Length of the mapped axis, needed only if no argument is mapped.
    checkpoint : bool, optional
        Recompute each chunk in the reverse pass instead of storing the intermediate values of
        all chunks. ``False`` saves one evaluation, but needs memory that grows with the axis.
        None: as in `auto_vmap`.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit:
        bytes, ``"2 GB"``, or ``"50%"`` of the free memory. See `auto_vmap`.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. A single chunk shows nothing.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the mapped axis: ``"all"`` local devices, the first n, a list, or mesh
        axes. ``None``: as the arrays are sharded. ``False``: do not divide the axis. With several
        CPU devices, all cores work. See Notes.
    lockstep : bool, default True
        ``False``: each item stops when it is done, where a loop in ``fun`` depends on the item.
        ``chunk_size`` lanes take the next item when theirs is done. See `auto_vmap`.
    batched : bool, default False
        ``fun`` takes a batch itself: in each argument that is mapped, and in each output, it has
        one axis in front, that of the items of a chunk. ``in_axes`` says where the axis is in the
        whole array. See `auto_vmap`.

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
        ``fun`` returns something other than arrays.
    ValueError
        ``chunk_size`` is not positive, ``memory_limit`` cannot be read, or one item needs more.
    ValueError
        The mapped axes differ in length, a leaf has no such axis, ``in_axes`` does not fit the
        arguments, or nothing is mapped.
    ValueError
        While tracing: ``out_axes`` does not fit what ``fun`` returns.
    ValueError
        While tracing, with more than one chunk: ``fun`` uses a collective over ``axis_name``; or it
        has an ordered effect, and a chunk has more than one item.

    Notes
    -----
    *Memory.* For ``n`` items, beyond inputs and outputs: forward, the intermediate values of one
    chunk, for any ``n``. In `jax.jvp` and `jax.vjp` the same if the chunk divides the axis and the
    axis is 0. Otherwise, and for outputs that have an axis of length 1 in each item, one copy of
    the outputs and of their tangents or cotangents comes on top. Inputs are not copied, nor are
    their tangents or cotangents; except that, in derivatives of that second case, those narrower
    than 32 bits are copied as ``float32`` (``float16`` is not).

    *Time.* ``fun`` is traced once a call, however the axis divides. Outside `jax.jit`, a loop that
    does the same as an earlier one is not compiled again, except in derivatives if ``fun`` has
    custom rules. Where no chunk divides the axis, the last one overlaps its neighbour and fewer
    than ``n / chunk_size`` items are computed twice; their cotangents count once.

    *Devices.* An axis that devices share is evaluated in parts, one per device, side by side:
    ``chunk_size`` and ``memory_limit`` count per device, and nothing is sent except the cotangents
    of shared arguments, which are summed over the devices once. Outputs have the same sharding as
    with `jax.vmap`; if the devices do not divide the axis, each has all of them. Without
    ``devices``, sharding is read from concrete arrays in an eager call, and always on a mesh with
    explicit axes. A kernel with ordered effects evaluates the axis as one.

    *Classes.* A pytree class is rebuilt with the values of one item, or of all, never with those of
    a chunk: it may check or convert its fields.

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
    options = options_of(
        where,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        devices=devices,
        lockstep=lockstep,
        batched=batched,
    )
    check_batched(options, where)
    axes = checked_axes(where, in_axes, axis_size, out_axes, axis_name)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return run(bind_axes(fun, where, args, kwargs, axes, batched=batched), options)

    return mapped
