# SPDX-License-Identifier: MIT
"""The loop: one `jax.lax.scan` evaluates the chunks of a level in bounded memory.

A level that is kept stores the outputs of its items, and one that is reduced folds them; it is the
same loop for both, and for any length. What becomes of an output is a `Sink`: a reduction
(`rankax.core.reduce.states`), or `Store`. How an operand enters the loop and how an output leaves
it decides the memory:

* Even chunks along axis 0 are the ``xs`` and ``ys`` of the scan. Cutting the axis is a reshape, so
  memory stays flat in every direction of differentiation.
* Any other operand is read by index, and so is its tangent. It needs no derivative rule of our own:
  the transpose adds the cotangent of each chunk in place (`access.take_chunk` says when), so that
  no input is copied, for any length and axis.
* Where such a loop is differentiated (``back``), its outputs leave as ``ys`` (`Store.as_rows`),
  which costs one copy of them and of their tangents or cotangents. Two alternatives
  that avoid this copy were tried and rejected, on XLA:CPU with JAX 0.10 and 0.12. If chunks are
  written in place, the transpose reads a chunk of the cotangent and then clears it, and XLA copies
  the cotangent in every step. If they are added in place, overlapping items have to be masked, and
  the zeros of that mask made the gradient of the distances in the benchmark a fifth slower.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from rankax.core.base.arrays import counted, has_tangent, zeros
from rankax.core.loop import access
from rankax.core.loop.spec import PLACE, LoopSpec, vmap_level
from rankax.core.plan.schedule import Chunks
from rankax.core.trace.derivatives import keep_rules
from rankax.core.trace.programs import evaluate, with_axis


@dataclasses.dataclass(frozen=True)
class TileSlots:
    """The slots of a tile: its items times the items of the levels inside, which are mapped whole.

    An output that is folded has them on its last axes, the items of the tile first.
    """

    size: int  # items of the level in a tile
    below: tuple[int, ...]  # the lengths of the levels inside
    dtype: Any  # of the indices of items

    @property
    def count(self) -> int:
        """The number of slots."""
        return self.size * math.prod(self.below)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one step of a loop evaluated."""

    outs: list[Any]  # outputs of the items; of an item that is a loop itself, what that returns
    at: jax.Array  # the first item, counted along the level
    ok: jax.Array | None  # the items of the level that no earlier step had; None: all
    slots: TileSlots

    @property
    def index(self) -> jax.Array:
        """The flat index of the item in each slot."""
        dtype = self.slots.dtype
        each = np.asarray(math.prod(self.slots.below)).astype(dtype)  # may overflow if not needed
        first = self.at.astype(dtype) * each
        return first + counted(self.slots.count, dtype)

    @property
    def new(self) -> jax.Array | None:
        """Whether the item in each slot is one that no earlier step had; None: all are."""
        if self.ok is None:
            return None
        each = lax.broadcast_in_dim(self.ok, (self.slots.size, *self.slots.below), (0,))
        return lax.reshape(each, (self.slots.count,))

    def in_slots(self, position: int) -> jax.Array:
        """Return an output that is folded, with all slots on the last axis."""
        out = self.outs[position]
        return lax.collapse(out, out.ndim - 1 - len(self.slots.below))


class Sink(Protocol):
    """What a loop asks of one output, or of several; a carry or rows that it lacks are None."""

    def start(self, slots: int) -> Any:
        """Return the carry of the first step."""

    def step(self, held: Any, tile: Tile) -> tuple[Any, Any]:
        """Return the next carry, and the row of the scan."""
        ...

    def end(self, held: Any, rows: Any) -> Any:
        """Return what the loop returns."""


@dataclasses.dataclass(frozen=True)
class Store(Sink):
    """One output, an array or a tree of them, whole.

    * As rows: the ``ys`` of the scan. For even chunks along axis 0, joining them is a reshape.
    * Otherwise each chunk is written in place into a carried buffer, for any chunks and axis. The
      transpose would have to clear each chunk of the cotangent after reading it, so that an
      overlapping item does not count twice, and XLA copies the cotangent in every step. So where
      the loop is differentiated, outputs are rows, joined after the loop by one copy.
      A level that is reduced evaluates something else in place of items that an earlier chunk had
      (`without_repeated`), so there even those without a derivative are rows.
    * Without an axis, every chunk returns the same, and the last one is kept.
    """

    position: int
    axis: int | None
    chunks: Chunks
    chunk: Any  # the types of the output of a chunk
    back: bool = False
    reduced: bool = False
    scattered: bool = False  # where tiles are put together out of order, there are no rows

    @property
    def avals(self) -> list[Any]:
        """The types of the arrays of a chunk."""
        return jax.tree.leaves(self.chunk)

    @property
    def as_rows(self) -> list[bool]:
        return [
            self.axis is not None
            and not self.scattered
            and (
                access.is_stack(aval, self.axis, self.chunks)
                or (self.back and (self.reduced or has_tangent(aval)))
            )
            for aval in self.avals
        ]

    def start(self, slots: int) -> list[Any]:
        pairs = zip(self.avals, self.as_rows, strict=True)
        return [None if is_row else self._buffer(aval) for aval, is_row in pairs]

    def _buffer(self, aval: Any) -> jax.Array:
        shape = list(aval.shape)
        if self.axis is not None:
            shape[self.axis] = self.chunks.length
        return zeros(tuple(shape), aval.dtype)

    def step(self, held: list[Any], tile: Tile) -> tuple[list[Any], list[Any]]:
        outs, axis = jax.tree.leaves(tile.outs[self.position]), self.axis
        if axis is None:
            return outs, [None] * len(outs)
        triples = list(zip(held, outs, self.as_rows, strict=True))
        written = [
            x if is_row else access.write_chunk(x, out, tile.at, axis) for x, out, is_row in triples
        ]
        rows = [
            access.as_row(out, self.chunks, axis) if is_row else None for _, out, is_row in triples
        ]
        return written, rows

    def end(self, held: list[Any], rows: list[Any] | None) -> Any:
        none: list[Any] = [None] * len(held)
        triples = zip(held, rows or none, self.as_rows, strict=True)
        axis = self.axis or 0
        outs = [
            access.join_chunks(row, self.chunks, axis) if is_row else x
            for x, row, is_row in triples
        ]
        return jax.tree.unflatten(jax.tree.structure(self.chunk), outs)


def steps_of(folds: Sequence[Sink], held: Sequence[Any], tile: Tile) -> tuple[list[Any], list[Any]]:
    """Return the next carry and the row of each fold."""
    pairs = [fold.step(own, tile) for fold, own in zip(folds, held, strict=True)]
    return [own for own, _ in pairs], [row for _, row in pairs]


def ends_of(folds: Sequence[Sink], held: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
    """Return what a loop returns for each fold."""
    return [fold.end(*own) for fold, *own in zip(folds, held, rows, strict=True)]


def new_items(at: jax.Array, chunks: Chunks) -> jax.Array | None:
    """Return which items of the chunk at an index no earlier chunk has; None: all, in every chunk.

    The last chunk starts early if no chunk divides the axis.
    """
    over = chunks.steps * chunks.size - chunks.length
    if not over:
        return None
    last = at.dtype.type(chunks.length - chunks.size)
    repeated = jnp.where(at == last, at.dtype.type(over), at.dtype.type(0))
    return counted(chunks.size, at.dtype) >= repeated


def without_repeated(chunk: Sequence[jax.Array], axes: Sequence[int], ok: jax.Array) -> list[Any]:
    """Put the last item in place of those that an earlier chunk had.

    The outputs of these count for nothing, but 0 times an infinite derivative is NaN. The transpose
    of this choice drops their cotangents. The cotangents of what all items share are finite if the
    cotangent of the last item is.
    """

    def each(x: jax.Array, axis: int) -> jax.Array:
        mask = lax.broadcast_in_dim(ok, x.shape, (axis,))
        last = lax.index_in_dim(x, x.shape[axis] - 1, axis)
        return jnp.where(mask, x, lax.stop_gradient(jnp.broadcast_to(last, x.shape)))

    # Chosen in every chunk, XLA:CPU would choose again in each use of the chunk: gradients of pairs
    # take six times as long (JAX 0.10).
    return lax.cond(ok[0], list, lambda chunk: list(map(each, chunk, axes)), list(chunk))


# The checkpoint name of values that a reverse pass keeps: few numbers, each found by a whole loop.
_KEPT = "rankax_kept"
_save_kept = jax.checkpoint_policies.save_only_these_names(_KEPT)


def saved(tree: Any) -> Any:
    """Return arrays that a reverse pass keeps."""
    return jax.tree.map(lambda x: checkpoint_name(x, _KEPT), tree)


def _policy(primitive: Any, /, *_: Any, **params: Any) -> Any:
    """Say what a checkpoint saves.

    JAX's own policy fails for primitives with a parameter named ``prim``, such as Equinox has.
    Test: ``test_chunked_kernels.py``.
    """
    return _save_kept(primitive, name=params.get("name"))


vars(_policy)["rankax_key"] = _KEPT  # for `core/trace/fingerprint.py`


class _Operands(NamedTuple):
    """The arrays of a loop: ``shared`` by all chunks, ``sliced`` by index, or ``stacked`` rows.

    Before the loop, sliced operands have the shape that `flatten_items` returns, and if they are
    differentiated, the dtype that `widen` returns. A step reads them with `take_chunk`.
    """

    shared: list[Any]
    sliced: list[Any]
    stacked: list[Any]


SinksOf = Callable[[Any, Chunks], Sequence[Sink]]  # from the types of a chunk


def sinks_of(folds: Sequence[Sink], kept: Sequence[int], **settings: bool) -> SinksOf:
    """Return what becomes of the outputs of a chunk: those that are kept whole are stored."""

    def sinks(outs: Sequence[Any], chunks: Chunks) -> list[Sink]:
        return [*folds, *(Store(i, 0, chunks, outs[i], **settings) for i in kept)]

    return sinks


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
        As in `TileSlots`, of a level that is reduced.
    """
    chunks = (back and level.derivative) or level.chunks
    mapped = [(x, axis) for x, axis in zip(leaves, level.in_axes, strict=True) if axis is not None]
    arrays, axes = [jnp.asarray(x) for x, _ in mapped], [axis for _, axis in mapped]
    axes_in = [*axes, 0] if level.numbered else axes  # 0: the axis of the places
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
    run = apart_from_constants(closed)
    folds = folds_of(tree.unflatten(closed.out_avals), chunks)
    is_stacked = [
        access.is_stack(aval, axis, chunks) for aval, axis in zip(avals, axes, strict=True)
    ]
    operands = _Operands(list(closed.consts), [], [])
    for leaf, axis, stacked in zip(arrays, axes, is_stacked, strict=True):
        if stacked:
            operands.stacked.append(access.stack_chunks(leaf, chunks))
        else:
            flat = access.flatten_items(leaf, axis)
            operands.sliced.append(access.widen(flat) if back else flat)
    sliced_axes = [axis for axis, stacked in zip(axes, is_stacked, strict=True) if not stacked]

    def chunk_at(start: Any, operands: _Operands) -> Any:
        def window(leaf: jax.Array, axis: int) -> jax.Array:
            taken = access.take_chunk(leaf, start, chunks, axis)
            return access.use_once(taken, chunks.size, axis) if back else taken

        sliced, rows = map(window, operands.sliced, sliced_axes), iter(operands.stacked)
        chunk = [
            access.as_chunk(next(rows if stacked else sliced), aval)
            for stacked, aval in zip(is_stacked, avals, strict=True)
        ]
        if level.numbered:
            chunk.append(start.astype(PLACE.dtype) + counted(chunks.size, PLACE.dtype))
        ok = new_items(start, chunks) if back and level.reduced else None
        if ok is not None:
            chunk = without_repeated(chunk, axes_in, ok)
        return tree.unflatten(run(operands.shared, chunk))

    slots = TileSlots(chunks.size, below, index_dtype)
    return _scan_chunks(chunk_at, operands, level, chunks, folds, slots)


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


def apart_from_constants(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Return the program as a function ``(constants, inputs)`` that holds no constants itself.

    They may be tracers of an outer trace, and JAX keeps such a function alive for a while.
    """
    # JAX 0.12 keeps constants in the jaxpr; replacing its variables drops them.
    jaxpr = closed.jaxpr.replace(constvars=list(closed.jaxpr.constvars))
    return lambda constants, inputs: evaluate(jaxpr, constants, *inputs)


def _scan_chunks(
    chunk_at: Callable[[Any, _Operands], Any],
    operands: _Operands,
    level: LoopSpec,
    chunks: Chunks,
    folds: Sequence[Sink],
    slots: TileSlots,
) -> list[Any]:
    """Evaluate the chunks one after another, and pass their outputs to the folds."""
    sizes = chunks.length, chunks.size, chunks.steps
    reports = level.observer and level.observer.reports(*sizes)
    # Inside a scan, XLA cannot merge the recomputation with the forward pass, so the barriers of
    # prevent_cse are not needed.
    checkpointed = functools.partial(jax.checkpoint, prevent_cse=False, policy=_policy)
    if level.checkpoint:
        chunk_at = checkpointed(chunk_at)

    def one_step(held: Any, start: Any, operands: _Operands) -> Any:
        ok = new_items(start, chunks) if level.reduced else None
        return steps_of(folds, held, Tile(chunk_at(start, operands), start, ok, slots))

    if level.checkpoint and not level.linear:
        one_step = checkpointed(one_step)

    def step(carry: tuple[Any, Any], stacked: Any) -> tuple[tuple[Any, Any], Any]:
        start, held = carry
        held, rows = one_step(held, start, operands._replace(stacked=stacked))
        if reports is not None:  # outside the checkpoints, which would report again
            reports.step(start)
        return (access.next_start(start, chunks), access.carried_with(held, operands)), rows

    begin = [fold.start(slots.count) for fold in folds]
    init = access.first_start(chunks), access.carried_with(begin, operands)
    (end, held), rows = lax.scan(step, init, operands.stacked, chunks.steps)
    outs = ends_of(folds, held, rows)
    if reports is not None:
        reports.end(end, outs)
    return outs
