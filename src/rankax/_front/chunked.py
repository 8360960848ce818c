# SPDX-License-Identifier: MIT
"""``chunked_vmap``: `jax.vmap` in chunks; ``chunked_reduce``: without ever storing the outputs.

`call/axes.py` binds their calls; all checks precede the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from rankax._options import Options, check_together, given_options, resolve
from rankax.call.axes import bind_axes, checked_axes
from rankax.core.base.messages import (
    check_callable,
    function_name,
    refuses_jit,
)
from rankax.ext.devices.place import DevicesOption
from rankax.ext.progress import ProgressOption
from rankax.ext.reductions.read import Reduce, read_reductions
from rankax.pipeline import evaluate


@refuses_jit
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
    progress: ProgressOption | None = None,
    devices: DevicesOption = None,
    lockstep: bool | None = None,
    batched: bool = False,
    cpu_math: bool | None = None,
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
        (down to 4/5 of the bound) or evens out the chunks, and a much smaller one on a CPU with JAX
        0.12, where its values fit the cache. ``None``, or a bound at least as large as the axis,
        gives exactly the program of `jax.vmap` (without ``cpu_math``). ``1`` evaluates ``fun``
        itself, item by item, without `jax.vmap`: a `jax.lax.cond` stays a branch, and ordered
        callbacks stay in order.
    in_axes, out_axes : int, None, or a pytree prefix of those, default 0
        As in `jax.vmap`; negative axes count from the end. Keyword arguments are mapped over
        axis 0. ``None`` passes an argument to every item; for an output it promises that the value
        does not depend on the item.
    axis_name : hashable, optional
        Accepted for code that replaces `jax.vmap`. `jax.lax.axis_size` is the length of the axis.
        With more than one chunk, any other collective over it is an error, because it would see
        only the items of one chunk.
    axis_size : int, optional
        Length of the mapped axis, needed only if no argument is mapped.
    checkpoint : bool, optional
        Recompute each chunk in the reverse pass instead of storing the intermediate values of
        all chunks. ``False`` saves one evaluation, but needs memory that grows with the axis.
        None: as in `auto_vmap`.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit:
        bytes, ``"2 GB"``, or ``"50%"`` of the free memory. See `auto_vmap`.
    progress : bool, str, callable or observer, optional
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. A single chunk shows nothing.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the mapped axis: ``"all"`` local devices, the first n, a list, or mesh
        axes. ``None``: as the arrays are sharded. ``False``: do not divide the axis. With several
        CPU devices, all cores work. See Notes.
    lockstep : bool, optional
        ``False``: each item stops when it is done, if a loop in ``fun`` depends on the item. Each
        of ``chunk_size`` lanes takes the next item when its own is done. See `auto_vmap`.
    batched : bool, default False
        ``fun`` takes a batch itself: in each argument that is mapped, and in each output, it has
        one axis in front, for the items of a chunk. ``in_axes`` says where the axis is in the
        whole array. See `auto_vmap`.
    cpu_math : bool, optional
        On a CPU, compute sines, angles and powers by vectorised programs in place of the C library,
        each to 4 units in the last place. None: as `rankax.options` says, or else not. See
        `auto_vmap`. (`rankax.options` also has ``xla_cpu``.)

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, and returns its outputs with the
        axis at ``out_axes``. Shapes and dtypes are as with `jax.vmap`.

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
    chunk, for any ``n``. In `jax.jvp` and `jax.vjp`, the same if the chunk divides the axis and the
    axis is 0. Otherwise, and for outputs that have an axis of length 1 in each item, also one copy
    of the outputs and of their tangents or cotangents. Inputs are not copied, nor are their
    tangents or cotangents; except that, in derivatives in this second case, those narrower than 32
    bits are copied as ``float32`` (``float16`` is not).

    *Time.* ``fun`` is traced once per call, however the axis divides. Outside `jax.jit`, a loop
    that does the same as an earlier one is not compiled again, except in derivatives if ``fun`` has
    custom rules. Where no chunk divides the axis, the last one overlaps its neighbour and fewer
    than ``n / chunk_size`` items are computed twice; their cotangents count once.

    *Devices.* An axis that devices share is evaluated in parts, one per device, side by side:
    ``chunk_size`` and ``memory_limit`` count per device, and nothing is sent except the cotangents
    of shared arguments, which are summed over the devices once. Outputs have the same sharding as
    with `jax.vmap`; if the devices do not divide the axis, each has all of them. Without
    ``devices``, sharding is read from concrete arrays in an eager call, and always on a mesh with
    explicit axes. The axis of a kernel with ordered effects is not divided.

    *Classes.* A pytree class is rebuilt with the values of one item, or of all, never with the
    values of a chunk, so it may check or convert its fields.

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
    site = f"chunked_vmap({function_name(fun)})"
    given = given_options(
        site,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        devices=devices,
        lockstep=lockstep,
        batched=batched,
        cpu_math=cpu_math,
    )
    axes = {"in_axes": in_axes, "axis_size": axis_size, "out_axes": out_axes}
    return function_of_batches(fun, site, given, **axes, axis_name=axis_name)


@refuses_jit
def chunked_reduce(
    fun: Callable[..., Any],
    reduce: Reduce,
    chunk_size: int | None,
    in_axes: Any = 0,
    *,
    where: str | int | None = None,
    axis_size: int | None = None,
    checkpoint: bool | None = None,
    memory_limit: int | str | None = None,
    progress: ProgressOption | None = None,
    devices: DevicesOption = None,
    lockstep: bool | None = None,
    batched: bool = False,
    cpu_math: bool | None = None,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis and reduce its outputs, with few items in flight.

    Equivalent, for ``reduce="sum"``, to ::

        lambda *args: jax.tree.map(lambda out: out.sum(0), jax.vmap(fun, in_axes)(*args))

    but evaluated tile by tile, so that neither the outputs of all items nor their intermediate
    values are ever stored, in the forward pass and in derivatives of every order. For several axes,
    which may have names, see ``reduce=`` and ``over=`` of `auto_vmap`.

    Parameters
    ----------
    fun : callable
        Takes and returns pytrees of arrays, for one item.
    reduce : str, Reduction, None, or a pytree prefix of those
        How to reduce each output of ``fun``, or each subtree of outputs. A name: ``"sum"``,
        ``"mean"``, ``"prod"``, ``"max"``, ``"min"``, ``"argmax"``, ``"argmin"``, ``"any"``,
        ``"all"``, ``"logsumexp"`` or ``"gram"``, with the values and dtypes of `jax.numpy`
        (`jax.nn.logsumexp`; `rankax.reductions.Gram`). An object from `rankax.reductions`, such as
        ``TopK(3)`` or ``Best("distance")``. ``None`` keeps an output whole, with the mapped axis in
        front.
    chunk_size : int or None
        Maximum number of items evaluated at once. On a CPU, from JAX 0.12 on, a tile is smaller.
        ``None``: all at once, by `jax.vmap` and the `jax.numpy` function.
    where : str or int, optional
        The argument that says whether an item counts, or the key, field or index of such an output:
        one boolean. Items left out add nothing to results and gradients. See `auto_vmap`.
    in_axes, axis_size
        As in `jax.vmap`; keyword arguments are mapped over axis 0.
    checkpoint : bool, optional
        Recompute each tile in the reverse pass instead of storing its intermediate values. None:
        as in `auto_vmap`.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit:
        bytes, ``"2 GB"``, or ``"50%"`` of the free memory. See `auto_vmap`.
    progress : bool, str, callable or observer, optional
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. The gradient of some reductions makes two forward passes.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the mapped axis: ``"all"`` local devices, the first n, a list, or mesh
        axes. ``None``: as the arrays are sharded. ``False``: do not divide the axis. With several
        CPU devices, all cores work. See Notes.
    lockstep : bool, optional
        ``False``: each item stops when it is done, if a loop in ``fun`` depends on the item. See
        `auto_vmap`.
    batched : bool, default False
        ``fun`` takes a batch itself: in each argument that is mapped, and in each output, it has
        one axis in front, for the items of a chunk. ``in_axes`` says where the axis is in the
        whole array. See `auto_vmap`.
    cpu_math : bool, optional
        On a CPU, compute sines, angles and powers by vectorised programs in place of the C library,
        each to 4 units in the last place. None: as `rankax.options` says, or else not. See
        `auto_vmap`. (`rankax.options` also has ``xla_cpu``.)

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, and returns its reduced outputs.

    Raises
    ------
    TypeError
        ``reduce`` holds anything else, or an argument has the wrong type.
    ValueError
        No reduction has this name, or an output cannot be reduced this way. This error and the
        following ones are raised before the loop is compiled.
    ValueError
        The mapped axes differ in length.
    ValueError
        ``memory_limit`` cannot be read, or one item needs more.

    Notes
    -----
    *Memory.* One tile and its accumulators, for any number of items; in a derivative, ``prod`` and
    ``Fold`` store one accumulator per tile.

    *Derivatives.* Sums, means and moments are differentiated tile by tile; ``logsumexp`` in a
    second pass; ``max``, ``min``, ``TopK``, ``BottomK`` and ``Best`` at the winners only, each of
    which is evaluated once more. Among equal items, the first gets the whole derivative;
    `jax.numpy.max` divides it among them.

    *Order.* Items are added in a different order from `jax.numpy`, so the last digits of a sum
    differ. The last tile overlaps the one before it if no tile divides the axis; items that were
    counted before add nothing and send nothing back: no item counts twice.

    *Devices.* Each device reduces its own part of the axis, which may have any length, and the
    partial states are merged once: sums, means, ``any`` and ``all`` by one sum or similar
    collective over the devices, all others by sending the states, one or a few numbers per device,
    to every device.

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
    caller = f"chunked_reduce({function_name(fun)})"
    given = given_options(
        caller,
        where=where,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        devices=devices,
        lockstep=lockstep,
        batched=batched,
        cpu_math=cpu_math,
    )
    given["reduce"] = read_reductions(reduce, caller)
    return function_of_batches(fun, caller, given, in_axes=in_axes, axis_size=axis_size)


def function_of_batches(
    fun: Callable[..., Any], site: str, given: Mapping[str, Any], **axes: Any
) -> Callable[..., Any]:
    """Return a function as it is mapped along ``axes``, which are arguments of `checked_axes`.

    A scope decides the options that are not ``given``.
    """
    preset, axes = Options(**given), checked_axes(site, **axes)
    check_together(preset, site)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return evaluate(bind_axes(fun, site, args, kwargs, **axes), resolve(given, preset))

    return mapped
