# SPDX-License-Identifier: MIT
"""``chunked_reduce``: a reduction of `jax.vmap` that never stores what it reduces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rankax._base.checks import check_callable
from rankax._base.functions import function_name
from rankax._call.mapping import bind_axes, checked_axes
from rankax._call.run import run
from rankax._options import check_batched, options_of
from rankax._reduce.run import read_reductions


def chunked_reduce(
    fun: Callable[..., Any],
    reduce: Any,
    chunk_size: int | None,
    in_axes: Any = 0,
    *,
    where: str | int | None = None,
    axis_size: int | None = None,
    checkpoint: bool | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    devices: int | str | Sequence[Any] | jax.sharding.PartitionSpec | None = None,
    lockstep: bool = True,
    batched: bool = False,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis and reduce its outputs, with few items in flight.

    Equivalent, for ``reduce="sum"``, to ::

        lambda *args: jax.tree.map(lambda out: out.sum(0), jax.vmap(fun, in_axes)(*args))

    but evaluated tile by tile, so that neither the outputs of all items nor their intermediate
    values are ever stored, in the forward pass and in derivatives of every order.

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
        Maximum number of items evaluated at once. A tile is smaller where that is faster, as on a
        CPU. ``None``: all at once, by `jax.vmap` and the `jax.numpy` function.
    where : str or int, optional
        The key, field or index of the output that says whether an item counts: one boolean. What
        is left out adds nothing to results and gradients. See `auto_vmap`.
    in_axes, axis_size
        As in `jax.vmap`; keyword arguments are mapped over axis 0.
    checkpoint : bool, optional
        Recompute each tile in the reverse pass instead of storing its intermediate values. None:
        as in `auto_vmap`.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit:
        bytes, ``"2 GB"``, or ``"50%"`` of the free memory. See `auto_vmap`.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. The gradient of some reductions makes two forward passes.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the mapped axis: ``"all"`` local devices, the first n, a list, or mesh
        axes. ``None``: as the arrays are sharded. ``False``: do not divide the axis. With several
        CPU devices, all cores work. See Notes.
    lockstep : bool, default True
        ``False``: each item stops when it is done, where a loop in ``fun`` depends on the item. See
        `auto_vmap`.
    batched : bool, default False
        ``fun`` takes a batch itself: in each argument that is mapped, and in each output, it has
        one axis in front, that of the items of a chunk. ``in_axes`` says where the axis is in the
        whole array. See `auto_vmap`.

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, returns its outputs reduced.

    Raises
    ------
    TypeError
        ``reduce`` holds anything else, or an argument has a wrong type.
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
    which is evaluated once more. Among equal items the first gets the whole derivative;
    `jax.numpy.max` shares it.

    *Order.* Items are added in another order than by `jax.numpy`, so the last digits of a sum
    differ. The last tile overlaps the one before it if no tile divides the axis; items that were
    counted before add nothing and send nothing back: no item counts twice.

    *Devices.* Each device reduces its own part of the axis, which may have any length, and the
    partial states are merged once: sums, means, ``any`` and ``all`` by one sum or the like over the
    devices, all else by sending the states, one or a few numbers per device, to every device.

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
    options = options_of(
        caller,
        where=where,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        devices=devices,
        lockstep=lockstep,
        batched=batched,
    )
    check_batched(options, caller)
    options = dataclasses.replace(options, reduce=read_reductions(reduce, caller))
    axes = checked_axes(caller, in_axes, axis_size)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        return run(bind_axes(fun, caller, args, kwargs, axes, batched=batched), options)

    return reduced
