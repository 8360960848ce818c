# SPDX-License-Identifier: MIT
"""``chunked_reduce``: a reduction of `jax.vmap` that never stores what it reduces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rankax._base.checks import check_bool, check_callable, positive_int
from rankax._base.functions import function_name
from rankax._map.chunked import axis_length, check_axes, resolve_arguments
from rankax._map.item import with_axis
from rankax._map.progress import checked_progress, told
from rankax._map.reduce import read_reductions, reduce_row
from rankax._map.rows import RowLevel, most_lanes
from rankax._map.tiles import with_tile
from rankax._plan.chunks import split_into_chunks

__all__ = ["chunked_reduce"]


def chunked_reduce(
    fun: Callable[..., Any],
    reduction: Any,
    chunk_size: int | None,
    in_axes: Any = 0,
    *,
    axis_size: int | None = None,
    checkpoint: bool = True,
    progress: bool | str | Callable[[int, int], object] = False,
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
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. The gradient of some reductions walks more than twice.

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, returns its outputs reduced.

    Raises
    ------
    TypeError
        If ``reduction`` holds anything else, or an argument is of a wrong type.
    ValueError
        If no reduction has this name, an output cannot be reduced so, or the mapped axes differ in
        length. All before the loop is compiled.

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
    size = None if axis_size is None else axis_length(axis_size, where)
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    check_axes(in_axes, where, "in_axes")
    check_bool(checkpoint, where, "checkpoint")
    shown = checked_progress(progress, where)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        mapping = resolve_arguments(fun, where, args, kwargs, in_axes, size)

        @functools.wraps(fun)
        def on_item(*items: Any) -> Any:
            item_args, item_kwargs = mapping.arguments(items)
            return fun(*item_args, **item_kwargs)

        length, axes = mapping.length, [axis for axis in mapping.axes if axis is not None]
        tile, traced = length, on_item
        if bound is not None and length > bound:
            avals = [with_axis(x, a) for x, a in zip(mapping.mapped, axes, strict=True)]
            traced, best = with_tile(on_item, avals)
            most = min(bound, most_lanes() or bound, best or bound)
            tile = split_into_chunks(length, most).size
        level = RowLevel(length, tile, tuple(axes))
        with told(shown if tile < length else False, function_name(fun)) as passed_on:
            found = reduce_row(
                traced,
                mapping.mapped,
                (level,),
                reductions,
                checkpoint=checkpoint,
                progress=passed_on,
            )
        return found.assemble(found.arrays)

    return reduced
