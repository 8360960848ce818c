# SPDX-License-Identifier: MIT
"""``chunked_reduce``: a reduction of `jax.vmap` that never stores what it reduces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from rankax._base.checks import check_callable
from rankax._base.functions import function_name
from rankax._call.mapping import bind_axes, checked_axes
from rankax._call.run import run
from rankax._options import options_of
from rankax._reduce.run import read_reductions

__all__ = ["chunked_reduce"]


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
        `auto_vmap`. The gradient of some reductions makes two forward passes.
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
    options = options_of(
        where,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        shards=shards,
    )
    options = dataclasses.replace(options, reduce=read_reductions(reduction, where))
    axes = checked_axes(where, in_axes, axis_size)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        return run(bind_axes(fun, where, args, kwargs, axes), options)

    return reduced
