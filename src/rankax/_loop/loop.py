# SPDX-License-Identifier: MIT
"""The loop: one `jax.lax.scan` evaluates the chunks of a level in bounded memory.

A level that is kept stores the outputs of its items, and one that is reduced folds them; it is the
same loop for both, and for any length (`rankax._loop.store`). How an operand enters the loop and
how an output leaves it decides the memory:

* Even chunks along axis 0 are the ``xs`` and ``ys`` of the scan. Cutting the axis is a reshape, so
  memory stays flat in every direction of differentiation.
* Any other operand is read by index, and so is its tangent. It needs no derivative rule of our own:
  the transpose adds the cotangent of each chunk in place (`access.take_chunk` says when), so that
  no input is copied, for any length and axis.
* Where such a loop is differentiated (``back``), its outputs leave as ``ys`` (`Store`), which
  costs one copy of them and of their tangents or cotangents. Two alternatives
  that avoid this copy were tried and rejected, on XLA:CPU with JAX 0.10 and 0.12. If chunks are
  written in place, the transpose reads a chunk of the cotangent and then clears it, and XLA copies
  the cotangent in every step. If they are added in place, overlapping items have to be masked, and
  the zeros of that mask made the gradient of the distances in the benchmark a fifth slower.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax

from rankax._base.arrays import counted
from rankax._loop.access import (
    as_chunk,
    carried_with,
    first_start,
    flatten_items,
    is_stack,
    next_start,
    stack_chunks,
    take_chunk,
    use_once,
    widen,
)
from rankax._loop.keys import PLACE, vmap_level
from rankax._loop.spec import LoopSpec
from rankax._loop.store import (
    Sink,
    Store,
    Tile,
    TileLanes,
    ends_of,
    new_items,
    steps_of,
    without_repeated,
)
from rankax._plan.chunks import Chunks
from rankax._progress.report import Reports
from rankax._trace.derivatives import keep_rules
from rankax._trace.item import with_axis
from rankax._trace.programs import evaluate

# The checkpoint name of values that a reverse pass keeps: few numbers, each found by a whole loop.
KEPT_IN_REVERSE = "rankax_kept"


_save_kept = jax.checkpoint_policies.save_only_these_names(KEPT_IN_REVERSE)


def _policy(primitive: Any, /, *_: Any, **params: Any) -> Any:
    """Say what a checkpoint saves.

    JAX's own policy fails for primitives with a parameter named ``prim``, such as those of Equinox.
    Test: ``test_chunked_kernels.py``.
    """
    return _save_kept(primitive, name=params.get("name"))


vars(_policy)["rankax_key"] = KEPT_IN_REVERSE  # for `_trace/fingerprint.py`


class _Operands(NamedTuple):
    """The arrays of a loop: ``shared`` by all chunks, ``sliced`` by index, or ``stacked`` rows.

    Before the loop, sliced operands have the shape that `flatten_items` returns, and if they are
    differentiated, the dtype that `widen` returns. A step reads them with `take_chunk`.
    """

    shared: list[Any]
    sliced: list[Any]
    stacked: list[Any]


SinksOf = Callable[[Any, Chunks], Sequence[Sink]]  # from the types of a chunk


def map_level(
    fun: Callable[..., Any], level: LoopSpec, out_axes: Sequence[int | None], *, back: bool
) -> Callable[..., list[Any]]:
    """Return ``fun`` mapped over a level; it takes arrays and returns a list of arrays or trees."""
    if not level.is_loop:
        return vmap_level(fun, level, list(out_axes))

    def stores(outs: Sequence[Any], chunks: Chunks) -> list[Sink]:
        pairs = enumerate(zip(out_axes, outs, strict=True))
        return [Store(i, axis, chunks, out, back=back) for i, (axis, out) in pairs]

    return lambda *leaves: run_loop(fun, leaves, level, out_axes, stores, back=back)


def run_loop(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    level: LoopSpec,
    out_axes: Sequence[int | None],
    folds_of: SinksOf,
    *,
    back: bool,
    below: tuple[int, ...] = (),
    index_dtype: Any = jnp.int32,
) -> list[Any]:
    """Evaluate ``fun``, which takes one item of each leaf, for all items of a level.

    Parameters
    ----------
    fun : callable
    leaves : sequence of arrays
    level : LoopSpec
    out_axes : sequence of int or None
        Where a chunk has its items in each output of ``fun``. None: an output that is the same for
        all items; in chunks of one item, anything, which is passed on as it is.
    folds_of : callable
        Returns what becomes of the outputs of a chunk, given their types.
    back : bool
        Whether the loop is the one that is differentiated.
    below, index_dtype
        As in `TileLanes`, of a level that is reduced.
    """
    chunks = (back and level.derivative) or level.chunks
    mapped = [(x, axis) for x, axis in zip(leaves, level.in_axes, strict=True) if axis is not None]
    arrays, axes = [jnp.asarray(x) for x, _ in mapped], [axis for _, axis in mapped]
    axes_in = [*axes, 0] if level.numbered else axes  # with that of the places
    # As a jaxpr: an inner loop is traced once, and all that the item closes over is an operand.
    avals = [with_axis(x, axis, chunks.size) for x, axis in zip(arrays, axes, strict=True)]
    inputs = avals + ([with_axis(PLACE, 0, chunks.size)] if level.numbered else [])

    def on_items(*items: Any) -> Any:
        rest, pairs = iter(items), zip(leaves, level.in_axes, strict=True)
        own = [leaf if axis is None else next(rest) for leaf, axis in pairs]
        return fun(*own, *rest)

    on_chunk = _on_chunk(on_items, axes_in, level, chunks, out_axes, back=back)
    closed, outs = jax.make_jaxpr(on_chunk, return_shape=True)(*inputs)
    closed, tree = keep_rules(closed), jax.tree.structure(outs)
    run = apart_from_constants(closed, inputs)
    folds = folds_of(tree.unflatten(closed.out_avals), chunks)
    is_stacked = [is_stack(aval, axis, chunks) for aval, axis in zip(avals, axes, strict=True)]
    operands = _Operands(list(closed.consts), [], [])
    for leaf, axis, stacked in zip(arrays, axes, is_stacked, strict=True):
        if stacked:
            operands.stacked.append(stack_chunks(leaf, chunks))
        else:
            flat = flatten_items(leaf, axis)
            operands.sliced.append(widen(flat) if back else flat)
    sliced_axes = [axis for axis, stacked in zip(axes, is_stacked, strict=True) if not stacked]

    def chunk_at(start: Any, operands: _Operands) -> Any:
        def window(leaf: jax.Array, axis: int) -> jax.Array:
            taken = take_chunk(leaf, start, chunks, axis)
            return use_once(taken, chunks.size, axis) if back else taken

        sliced, rows = map(window, operands.sliced, sliced_axes), iter(operands.stacked)
        chunk = [
            as_chunk(next(rows if stacked else sliced), aval)
            for stacked, aval in zip(is_stacked, avals, strict=True)
        ]
        if level.numbered:
            chunk.append(start.astype(PLACE.dtype) + counted(chunks.size, PLACE.dtype))
        ok = new_items(start, chunks) if back and level.reduced else None
        if ok is not None:
            chunk = without_repeated(chunk, axes_in, ok)
        return tree.unflatten(run(operands.shared, chunk))

    lanes = TileLanes(chunks.size, below, index_dtype)
    return _scan_chunks(chunk_at, operands, level, chunks, folds, lanes)


def _on_chunk(
    on_items: Callable[..., Any],
    axes: Sequence[int],
    level: LoopSpec,
    chunks: Chunks,
    out_axes: Sequence[int | None],
    *,
    back: bool,
) -> Callable[..., Any]:
    """Return the program of a chunk, which is itself a loop if the chunk is cut into tiles.

    A single item is not mapped, so a branch stays a branch, and effects stay in order.
    """
    if chunks.tile is not None:
        tiles = Chunks(chunks.size, chunks.tile, -(-chunks.size // chunks.tile))
        within = LoopSpec(tiles, tuple(axes), checkpoint=level.checkpoint, linear=level.linear)
        return map_level(on_items, within, out_axes, back=back)
    if chunks.size > 1:
        return jax.vmap(on_items, tuple(axes), list(out_axes), axis_size=chunks.size)

    def on_one(*chunk: Any) -> Any:
        items = [lax.squeeze(x, (axis,)) for x, axis in zip(chunk, axes, strict=True)]

        def along(axis: int | None, out: Any) -> Any:
            if axis is None:
                return out
            return jax.tree.map(lambda x: lax.expand_dims(jnp.asarray(x), (axis,)), out)

        return list(map(along, out_axes, on_items(*items)))

    return on_one


def apart_from_constants(closed: Any, avals: list[Any]) -> Callable[..., list[Any]]:
    """Return the program as a function ``(constants, inputs)`` that holds no constants itself.

    They may be tracers of an outer trace, and JAX keeps such a function alive for a while.
    """
    jaxpr = closed.jaxpr
    if not any(isinstance(const, core.Tracer) for const in getattr(jaxpr, "consts", ())):
        return lambda constants, inputs: evaluate(jaxpr, constants, *inputs)
    # JAX 0.12 keeps constants in the jaxpr, 0.10 does not; tracing turns them into inputs.
    trace = jax.make_jaxpr(lambda consts, inputs: evaluate(jaxpr, consts, *inputs))
    jaxpr = trace(list(closed.consts), avals).jaxpr
    return lambda constants, inputs: evaluate(jaxpr, (), *constants, *inputs)


def _scan_chunks(
    chunk_at: Callable[[Any, _Operands], Any],
    operands: _Operands,
    level: LoopSpec,
    chunks: Chunks,
    folds: Sequence[Sink],
    lanes: TileLanes,
) -> list[Any]:
    """Evaluate the chunks one after another, and pass their outputs to the folds."""
    reports = level.progress and Reports(level.progress, chunks.length, chunks.size, chunks.steps)
    # Inside a scan, XLA cannot merge the recomputation with the forward pass, so the barriers of
    # prevent_cse are not needed.
    checkpointed = functools.partial(jax.checkpoint, prevent_cse=False, policy=_policy)
    if level.checkpoint:
        chunk_at = checkpointed(chunk_at)

    def one_step(held: Any, start: Any, operands: _Operands) -> Any:
        ok = new_items(start, chunks) if level.reduced else None
        return steps_of(folds, held, Tile(chunk_at(start, operands), start, ok, lanes))

    if level.checkpoint and not level.linear:
        one_step = checkpointed(one_step)

    def step(carry: tuple[Any, Any], stacked: Any) -> tuple[tuple[Any, Any], Any]:
        start, held = carry
        held, rows = one_step(held, start, operands._replace(stacked=stacked))
        if reports is not None:  # outside the checkpoints, which would report again
            reports.step(start)
        return (next_start(start, chunks), carried_with(held, operands)), rows

    begin = [fold.start(lanes.count) for fold in folds]
    init = first_start(chunks), carried_with(begin, operands)
    (end, held), rows = lax.scan(step, init, operands.stacked, chunks.steps)
    outs = ends_of(folds, held, rows)
    if reports is not None:
        reports.end(end, outs)
    return outs
