# SPDX-License-Identifier: MIT
"""The loop: one `jax.lax.scan` evaluates the chunks of a level in bounded memory.

A level that is kept stores the outputs of its items, and one that is reduced folds them; it is the
same loop for both, and for any length. What becomes of an output is a `Sink`: a reduction
(`rankax.core.reduce.row`), or `Store`. How an operand enters the loop and how an output leaves
it decides the memory:

* Even chunks along axis 0 are the ``xs`` and ``ys`` of the scan. Cutting the axis is a reshape, so
  memory stays flat in every direction of differentiation.
* Any other operand is read by index, and so is its tangent. It needs no derivative rule of our own:
  the transpose adds the cotangent of each chunk in place (`take_chunk` says when), so that
  no input is copied, for any length and axis.
* Where such a loop is differentiated (``back``), outputs that have tangents leave as ``ys``
  (`Store.as_rows`), which costs one copy of them and of their tangents or cotangents. Two
  alternatives that avoid this copy were tried and rejected, on XLA:CPU with JAX 0.10 and 0.12. If
  chunks are written in place, the transpose reads a chunk of the cotangent and then clears it, and
  XLA copies the cotangent in every step. If they are added in place, overlapping items have to be
  masked, and the zeros of that mask made the gradient of the distances in the benchmark a fifth
  slower.

How chunks are read, written and joined. Chunks that divide axis 0 are rows of a stack
(`stack_chunks`). All others are read by index (`take_chunk`): if no chunk divides the axis, the
last one starts early (`next_start`) and overlaps the one before it. Forward, items in the overlap
are evaluated twice, and the last chunk overwrites them. In a derivative that would not do: a
cotangent of 0 is not nothing, because 0 times an infinite derivative is NaN, and a rule may send
something back for it. So there the last step evaluates its new items only (`with_short_last`): by
a second copy of the kernel, which takes time to compile. Each copy has a checkpoint of its own, or
the branches would store what they compute. Some sums take these items after the loop
(`Chunks.apart`).

Plain indexing would also be correct, but slow or memory-hungry. An operand that is read by index is
flat: its mapped axis and all later axes become one before the loop, and a chunk gets its shape back
after it is read. Workarounds, where each was seen, and the test that tells when it can be removed
(in ``tests/front/test_chunked_memory.py`` unless another file is named):

===============================  =====================  ========================================
workaround                       seen with              can go if this passes without it
===============================  =====================  ========================================
`first_start`: carried start     CPU, JAX 0.10          the benchmark of 400,003 items by 100
`scalar`, `zeros`: explicit      all                    ``test_strict_modes.py``
`carried_with`: types            all                    ``tests/devices``
`flatten_items`: LAPACK          CPU, JAX 0.10 to 0.12  ``kernels_that_want_another_layout``
`widen`: narrow floats           CPU, JAX 0.10 to 0.12  ``cotangents_of_any_dtype``
`take_chunk`: nothing between    all (XLA's design)     ``cotangents_are_added_in_place``
`use_once`: reads with one use   CPU, JAX 0.10          ``test_chunked_vmap.py``, ``jacfwd``
`is_stack`: axes of length 1     CPU, JAX 0.10 to 0.12  ``an_axis_of_length_1_costs_nothing``
`as_row`: chunks of one item     CPU, JAX 0.10 to 0.12  ``chunks_of_one_item_are_flat``
===============================  =====================  ========================================
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, PartitionSpec

from rankax.core.base.arrays import as_weak, counted, has_tangent, index_dtype, scalar, zeros
from rankax.core.loop.eager_programs import kernel_of_call
from rankax.core.loop.shared import MOST_PLAIN, borrow, lend, steps_per_sum, with_slope
from rankax.core.loop.spec import PLACE, vmap_level
from rankax.core.plan.schedule import Chunks, Level, at_most, is_known
from rankax.core.trace.derivatives import has_refs, keep_rules
from rankax.core.trace.programs import evaluate, with_axis

T = TypeVar("T")

_LEAST_GROUP = 4  # steps that are added as one


# How chunks are read, written and joined.


def first_start(chunks: Chunks) -> jax.Array:
    """Return where the first chunk starts: a number for a loop to carry.

    Carried, not looked up in an array: XLA:CPU would fuse the lookup with the read of the chunk,
    and repeat it for each element.
    """
    long = jax.dtypes.canonicalize_dtype(jnp.int64)
    if is_known(chunks.length) and chunks.length - chunks.size > jnp.iinfo(long).max:
        raise ValueError(
            f"{kernel_of_call()}: a loop over an axis of {chunks.length} items counts them in 64 "
            'bits; call jax.config.update("jax_enable_x64", True) first'
        )
    first = scalar(chunks.first, index_dtype(chunks.length))
    # From a known place, a cotangent is padded, and added to all others: not in place.
    return lax.optimization_barrier(first) if chunks.first and chunks.is_far else first


def next_start(start: jax.Array, chunks: Chunks) -> jax.Array:
    """Return where the chunk after the one at ``start`` starts."""
    number = start.dtype.type
    if not is_known(chunks.length):  # which the chunks divide
        return start + number(chunks.size)
    return jnp.minimum(start + number(chunks.size), number(chunks.length - chunks.size))


def carried_with(start: T, operands: Any) -> T:
    """Give the carry of a loop the type that it has after a step with these operands."""
    types = jax.sharding.get_abstract_mesh().axis_types
    if AxisType.Manual in types:
        axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(operands)))
        return jax.tree.map(lambda x: as_varying(x, axes - varying_axes(x)), start)
    return jax.tree.map(on_explicit_mesh, start)


def on_explicit_mesh(x: jax.Array) -> jax.Array:
    """Put an array on the mesh that is set, if that has explicit axes: loops need it in types.

    JAX 0.10 to 0.12 cannot map a loop whose carry lacks it.
    """
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    is_without = is_explicit and jax.typeof(x).sharding.mesh.empty
    return jax.sharding.reshard(x, PartitionSpec()) if is_without else x


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """Return the mesh axes along which devices may differ in a value, inside `jax.shard_map`."""
    aval: Any = jax.typeof(x)
    return aval.manual_axis_type.varying


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Declare that a value may differ among devices, which `jax.shard_map` checks."""
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def flatten_items(leaf: Any, axis: int) -> jax.Array:
    """Prepare ``leaf`` for `take_chunk`: ``axis`` and all later axes become one, by a reshape.

    Otherwise, a kernel that takes its items in another layout, such as a call of LAPACK, makes XLA
    copy the whole leaf into that layout, and memory grows with the axis. `use_once` relies on the
    flat shape, too.
    """
    before, rest = leaf.shape[:axis], leaf.shape[axis:]
    each, flat = math.prod(rest[1:]), math.prod(rest)
    # One axis, unless an index along it needs more than 32 bits, or a length that is not known.
    is_short = is_known(each) and (not is_known(flat) or flat < 2**31)
    after = (flat,) if is_short else (rest[0], each)
    return lax.reshape(leaf, (*before, *after))


def widen(leaf: jax.Array) -> jax.Array:
    """Give ``leaf``, which is to be differentiated, a dtype that XLA can add in place.

    XLA:CPU adds floats like `bfloat16` as `float32`, and would convert the whole cotangent in every
    step.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float16:
        return leaf
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 32 else leaf


def flattened(leaf: Any, axis: int, *, back: bool) -> jax.Array:
    """Prepare an array for `take_chunk`.

    If several loops read one that is differentiated, they share this: nothing may come between
    their reads, whose transposes add to one cotangent in place.
    """
    flat = flatten_items(leaf, axis)
    return widen(flat) if back else flat


def take_chunk(leaf: jax.Array, start: jax.Array, chunks: Chunks, axis: int) -> jax.Array:
    """Read the chunk from ``start`` along ``axis`` of what `flatten_items` returned, still flat.

    Nothing may come between the leaf and this read, not even a reshape. In a loop, its transpose
    adds a cotangent of the shape of the leaf, which is zero outside the chunk. The algebraic
    simplifier of XLA, which all platforms share, rewrites the sum of an array with a
    `dynamic_update_slice` of zeros into an update in place, but only if it sees exactly that. If
    the loop added the whole arrays, a gradient would still be correct and small, but its time would
    grow with the square of the axis; ``tests/front/test_chunked_memory.py`` inspects programs.
    """
    each = leaf.shape[axis] // chunks.length  # numbers of one item along the axis
    start = start * start.dtype.type(each)
    # XLA:CPU would fuse the test for a negative index with the read of the chunk, and repeat it for
    # each element.
    return lax.dynamic_slice_in_dim(
        leaf, start, chunks.size * each, axis, allow_negative_indices=False
    )


def as_chunk(window: jax.Array, aval: Any) -> jax.Array:
    """Give a chunk its shape back, and its dtype, after `flatten_items`, `widen` and the like."""
    chunk = window if window.shape == aval.shape else lax.reshape(window, aval.shape)
    return chunk if chunk.dtype == aval.dtype else chunk.astype(aval.dtype)


def use_once(chunk: jax.Array, size: int, axis: int) -> jax.Array:
    """Give the read of a chunk by `take_chunk` a single use; return the chunk.

    XLA:CPU of JAX 0.10 makes a function of a read with several uses, and confuses two functions
    whose names differ only in a dash: ``dynamic_slice`` of a value, and ``dynamic-slice`` of its
    tangent if `jax.vmap` maps the tangent alone, as `jax.jacfwd` does. Then it fails to compile. A
    chunk that gets its shape back by a reshape has a single use already.
    """
    if chunk.shape[axis] != size:
        return chunk
    # In two steps each way, because JAX has no sharding for both at once on explicit meshes.
    flat = lax.reshape(lax.reshape(chunk, (chunk.size,)), (1, chunk.size))
    flat = lax.reshape(lax.optimization_barrier(flat), (chunk.size,))
    return lax.reshape(flat, chunk.shape)


def write_chunk(leaf: jax.Array, chunk: jax.Array, start: Any, axis: int) -> jax.Array:
    """Replace the items of ``leaf`` along ``axis`` from ``start``; in place inside a loop."""
    return lax.dynamic_update_slice_in_dim(leaf, chunk, start, axis, allow_negative_indices=False)


def is_stack(chunk: Any, axis: int, chunks: Chunks) -> bool:
    """Whether an array of such chunks can be ``xs`` or ``ys`` of the scan without a copy.

    If the items have an axis of length 1, XLA stores their stack in another layout, and copies all
    of it. Rows without such axes were tried, too: XLA then copies when the axes are added again.
    """
    return axis == 0 and chunks.even and 1 not in chunk.shape[1:]


def stack_chunks(leaf: Any, chunks: Chunks) -> jax.Array:
    """Split axis 0 of ``leaf`` into ``(steps, size)``, which costs nothing; for even chunks.

    Chunks of one item stay items, because XLA would copy a stack with an axis of length 1.
    """
    size = () if chunks.size == 1 else (chunks.size,)
    return lax.reshape(leaf, (chunks.steps, *size, *leaf.shape[1:]))


def as_row(chunk: jax.Array, chunks: Chunks, axis: int) -> jax.Array:
    """Return a chunk in the shape of a row of `stack_chunks`, for `join_chunks`."""
    return lax.squeeze(chunk, (0,)) if chunks.size == 1 and axis == 0 else chunk


def join_chunks(stack: jax.Array, chunks: Chunks, axis: int) -> jax.Array:
    """Join the chunks of ``stack``, each with its items on ``axis``, along that axis.

    A reshape if the chunks are even and ``axis`` is 0; one copy otherwise. An item that two chunks
    hold is taken from the earlier one.
    """
    if chunks.size == 1 and axis == 0:
        return stack
    leaf = lax.collapse(jnp.moveaxis(stack, 0, axis), axis, axis + 2)
    if chunks.even:
        return leaf
    whole = (chunks.steps - 1) * chunks.size
    head = lax.slice_in_dim(leaf, 0, whole, axis=axis)
    tail = lax.slice_in_dim(leaf, -(chunks.length - whole), None, axis=axis)
    return lax.concatenate([head, tail], axis)


# What a step evaluates, and what becomes of it.


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
    repeats: bool = True  # whether the others are evaluated again; otherwise their outputs are 0

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

    #: Whether the last axis of each array of its carry are slots, of which there may be one.
    has_slots = False

    def start(self, slots: int) -> Any:
        """Return the carry of the first step."""

    def step(self, held: Any, tile: Tile) -> tuple[Any, Any]:
        """Return the next carry, and the row of the scan."""
        ...

    def end(self, held: Any, rows: Any) -> Any:
        """Return what the loop returns."""

    # Where steps are taken in groups (`_by_groups`); by default, a group goes on with the carry.

    @property
    def of_group(self) -> "Sink":
        """The sink that takes the steps of a group."""
        return self

    def fresh(self, held: Any, slots: int) -> Any:
        """Return the carry of the first step of a group."""
        return held

    def with_group(self, held: Any, of_group: Any, rows: Any) -> Any:
        """Return the carry after a group, from those before it and of its last step, and rows."""
        return of_group


@dataclasses.dataclass(frozen=True)
class Store(Sink):
    """One output, an array or a tree of them, whole.

    * As rows: the ``ys`` of the scan. For even chunks along axis 0, joining them is a reshape.
    * Otherwise each chunk is written in place into a carried buffer, for any chunks and axis. The
      transpose would have to clear each chunk of the cotangent after reading it, so that an
      overlapping item does not count twice, and XLA copies the cotangent in every step. So where
      the loop is differentiated, outputs are rows, joined after the loop by one copy. If chunks
      overlap, so are those without a derivative (`with_short_last`).
    * Without an axis, every chunk returns the same, and the last one is kept.
    """

    position: int
    axis: int | None
    chunks: Chunks
    chunk: Any  # the types of the output of a chunk
    back: bool = False
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
                is_stack(aval, self.axis, self.chunks)
                or (self.back and (has_tangent(aval) or not self.chunks.even))
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
            x if is_row else write_chunk(x, out, tile.at, axis) for x, out, is_row in triples
        ]
        rows = [as_row(out, self.chunks, axis) if is_row else None for _, out, is_row in triples]
        return written, rows

    def end(self, held: list[Any], rows: list[Any] | None) -> Any:
        none: list[Any] = [None] * len(held)
        triples = zip(held, rows or none, self.as_rows, strict=True)
        axis = self.axis or 0
        outs = [join_chunks(row, self.chunks, axis) if is_row else x for x, row, is_row in triples]
        # What was written into a buffer has lost a weak type.
        return jax.tree.unflatten(jax.tree.structure(self.chunk), map(as_weak, outs, self.avals))


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
    if not chunks.over:
        return None
    last = at.dtype.type(chunks.length - chunks.size)
    repeated = jnp.where(at == last, at.dtype.type(chunks.over), at.dtype.type(0))
    return counted(chunks.size, at.dtype) >= repeated


def with_short_last(
    on_chunk: Callable[..., list[Any]],
    on_rest: Callable[..., list[Any]],
    axes: Sequence[int],
    out_axes: Sequence[int | None],
    chunks: Chunks,
) -> Callable[..., list[Any]]:
    """Return the program of a chunk, which evaluates no item that an earlier chunk had.

    Its first input says whether all items of the chunk are new. Otherwise ``on_rest`` takes those
    that are; the outputs of the others are zeros, and nothing comes back from them.
    """
    over = chunks.over

    def rest(*chunk: jax.Array) -> list[Any]:
        pairs = zip(chunk, axes, strict=True)
        outs = on_rest(*(lax.slice_in_dim(x, over, chunks.size, axis=axis) for x, axis in pairs))
        return list(map(padded, outs, out_axes))

    def padded(out: Any, axis: int | None) -> Any:
        return out if axis is None else jax.tree.map(functools.partial(in_front, axis), out)

    def in_front(axis: int, x: jax.Array) -> jax.Array:
        at = axis % x.ndim
        none = lax.full_like(x, 0, shape=(*x.shape[:at], over, *x.shape[at + 1 :]))
        return lax.concatenate([none, x], at)

    return lambda are_new, *chunk: lax.cond(are_new, on_chunk, rest, *chunk)


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


vars(_policy)["rankax_key"] = _KEPT  # for `core/loop/eager_programs.py`

# Inside a scan, XLA cannot merge the recomputation with the forward pass, so the barriers of
# prevent_cse are not needed.
checkpointed = functools.partial(jax.checkpoint, prevent_cse=False, policy=_policy)


class _Operands(NamedTuple):
    """The arrays of a loop: ``shared`` by all chunks, ``sliced`` by index, or ``stacked`` rows.

    Before the loop, sliced operands have the shape that `flatten_items` returns, and if they are
    differentiated, the dtype that `widen` returns. A step reads them with `take_chunk`.
    """

    shared: list[Any]
    sliced: list[Any]
    stacked: list[Any]
    slopes: dict[int, Any]  # of what is shared in a long loop


SinksOf = Callable[[Any, Chunks], Sequence[Sink]]  # from the types of a chunk


def sinks_of(folds: Sequence[Sink], kept: Sequence[int], **settings: bool) -> SinksOf:
    """Return what becomes of the outputs of a chunk: those that are kept whole are stored."""

    def sinks(outs: Sequence[Any], chunks: Chunks) -> list[Sink]:
        return [*folds, *(Store(i, 0, chunks, outs[i], **settings) for i in kept)]

    return sinks


def map_level(
    fun: Callable[..., Any], level: Level, out_axes: Sequence[int | None], *, back: bool
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
    level: Level,
    out_axes: Sequence[int | None],
    folds_of: SinksOf,
    *,
    back: bool,
    group: int = 0,
    below: tuple[int, ...] = (),
    index_dtype: Any = jnp.int32,
    flat: Sequence[Any] = (),
) -> list[Any]:
    """Evaluate ``fun``, which takes one item of each leaf, for all items of a level.

    Parameters
    ----------
    fun : callable
    leaves : sequence of arrays
    level : Level
    out_axes : sequence of int or None
        Where a chunk has its items in each output of ``fun``. None: an output that is the same for
        all items; in chunks of one item, anything, which is passed on as it is.
    folds_of : callable
        Returns what becomes of the outputs of a chunk, given their types.
    back : bool
        Whether the loop is the one that is differentiated.
    group : int
        How many steps the folds take at a time; 0: each. Only if nothing is differentiated.
    below, index_dtype
        As in `TileSlots`, of a level that is reduced.
    flat : sequence of arrays
        The mapped leaves as `flattened` returns them, if several loops read them.
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

    on_chunk = whole = _on_chunk(on_items, axes_in, level, chunks, out_axes, back=back)
    if is_short := back and chunks.over > 0:
        size = chunks.length % chunks.size
        rest = Chunks(size, size, 1, chunks.tile and min(chunks.tile, size))
        on_rest = _on_chunk(on_items, axes_in, level, rest, out_axes, back=back)
        wrap = checkpointed if level.checkpoint else lambda fun: fun
        on_chunk = with_short_last(wrap(whole), wrap(on_rest), axes_in, out_axes, chunks)
        inputs.insert(0, jax.ShapeDtypeStruct((), jnp.bool_))
    closed, outs = jax.make_jaxpr(on_chunk, return_shape=True)(*inputs)
    if is_short and has_refs(closed.jaxpr.constvars, closed.effects):
        # JAX cannot differentiate a branch that reads a `jax.Ref`.
        is_short = False
        closed, outs = jax.make_jaxpr(whole, return_shape=True)(*inputs[1:])
    closed, tree = keep_rules(closed), jax.tree.structure(outs)
    run = apart_from_constants(closed)
    folds = folds_of(tree.unflatten(closed.out_avals), chunks)
    pairs = zip(avals, axes, strict=True)
    # A loop in a loop would copy the rows of its group, which takes as long as a cheap kernel.
    is_stacked = [not group and is_stack(aval, axis, chunks) for aval, axis in pairs]
    operands = _Operands(list(closed.consts), [], [], {})
    for i, (leaf, axis, stacked) in enumerate(zip(arrays, axes, is_stacked, strict=True)):
        if stacked:
            operands.stacked.append(stack_chunks(leaf, chunks))
        elif flat:
            operands.sliced.append(flat[i])
        else:
            # A vector is read as it lies: `jax.vmap` around the loop would copy for a reshape.
            is_vector = group and chunks.size == 1 and leaf.ndim <= axis + 2
            operands.sliced.append(leaf if is_vector else flattened(leaf, axis, back=back))
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
        if is_short:
            chunk.insert(0, start != start.dtype.type(chunks.length - chunks.size))
        shared = list(operands.shared)
        for i, slope in operands.slopes.items():
            shared[i] = with_slope(shared[i], slope)
        return tree.unflatten(run(shared, chunk))

    is_long = level.differentiable and not at_most(chunks.steps, MOST_PLAIN)
    constants = zip(closed.consts, closed.jaxpr.constvars, strict=True) if is_long else ()
    sums = enumerate([steps_per_sum(*own, closed.jaxpr) for own in constants])
    lent = {i: steps for i, steps in sums if steps}
    slots = TileSlots(chunks.size, below, index_dtype)
    settings: dict[str, Any] = {"is_short": is_short, "group": group}
    return _scan_chunks(chunk_at, operands, lent, level, chunks, folds, slots, **settings)


def _on_chunk(
    on_items: Callable[..., Any],
    axes: Sequence[int],
    level: Level,
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
        within = Level(
            tiles,
            tuple(axes),
            checkpoint=level.checkpoint,
            linear=level.linear,
            differentiable=level.differentiable,
        )
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
    lent: Mapping[int, int],
    level: Level,
    chunks: Chunks,
    folds: Sequence[Sink],
    slots: TileSlots,
    *,
    is_short: bool,
    group: int,
) -> list[Any]:
    """Evaluate the chunks one after another, and pass their outputs to the folds.

    ``lent``: what is shared, and how many of its cotangents are added plainly (`steps_per_sum`).
    ``is_short``: whether the last chunk evaluates its new items only.
    """
    reports = level.observer and level.observer.reports(chunks.length, chunks.size, chunks.steps)
    if level.checkpoint:
        chunk_at = checkpointed(chunk_at)
    takers = [fold.of_group for fold in folds] if group else folds

    def one_step(held: Any, start: Any, operands: _Operands) -> Any:
        ok = new_items(start, chunks) if level.reduced else None
        tile = Tile(chunk_at(start, operands), start, ok, slots, repeats=not is_short)
        return steps_of(takers, held, tile)

    if level.checkpoint and not level.linear:
        one_step = checkpointed(one_step)

    def step(carry: tuple[Any, Any, Any], stacked: Any) -> tuple[tuple[Any, Any, Any], Any]:
        start, held, shared = carry
        number = lax.div(start, start.dtype.type(chunks.size))
        borrowed = {i: borrow(own, number, lent[i]) for i, own in shared.items()}
        slopes = {i: slope for i, (slope, _) in borrowed.items()}
        shared = {i: own for i, (_, own) in borrowed.items()}
        held, rows = one_step(held, start, operands._replace(stacked=stacked, slopes=slopes))
        if reports is not None:  # outside the checkpoints, which would report again
            reports.step(start)
        return (next_start(start, chunks), carried_with(held, operands), shared), rows

    begin = [fold.start(slots.count) for fold in folds]
    init = (
        first_start(chunks),
        carried_with(begin, operands),
        {i: lend(operands.shared[i]) for i in lent},
    )
    if chunks.first:  # one step, of sums
        after = step(init, [])
    elif group:
        after = _by_groups(step, init, operands, chunks.steps // group, group, folds, slots)
    else:
        after = _scan(step, init, operands.stacked, chunks.steps, folds)
    (end, held, _), rows = after
    outs = ends_of(folds, held, rows)
    if reports is not None:
        reports.end(end, outs)
    return outs


Carry = tuple[Any, Any, Any]  # where the step starts, what each fold holds, and what is shared


def _scan(
    step: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    rows: list[Any],
    steps: Any,
    folds: Sequence[Sink],
) -> tuple[Carry, Any]:
    """Return `jax.lax.scan`, which takes an unknown number of steps only from an array.

    One slot is carried without its axis. XLA:CPU computes no vectors along an axis of length 1,
    also if `jax.vmap` puts another one in front.
    Test: ``tests/xla_cpu/test_across.py``.
    """
    if not is_known(steps):
        numbered = [counted(steps, jnp.int32), *rows]
        return lax.scan(lambda carry, own: step(carry, own[1:]), init, numbered)
    pairs = zip(folds, init[1], strict=True)
    alone = [x for fold, own in pairs if fold.has_slots for x in jax.tree.leaves(own)]
    if not any(x.shape[-1:] == (1,) for x in alone):
        return lax.scan(step, init, rows, steps)
    ones = [
        jax.tree.map(lambda x, fold=fold: fold.has_slots and x.shape[-1:] == (1,), own)
        for fold, own in zip(folds, init[1], strict=True)
    ]

    def apart(carry: Carry) -> Carry:
        start, held, shared = carry
        held = jax.tree.map(lambda x, one: lax.squeeze(x, (x.ndim - 1,)) if one else x, held, ones)
        return start, held, shared

    def whole(carry: Carry) -> Carry:
        start, held, shared = carry
        held = jax.tree.map(lambda x, one: lax.expand_dims(x, (x.ndim,)) if one else x, held, ones)
        return start, held, shared

    def packed(carry: Carry, own: Any) -> tuple[Carry, Any]:
        carry, row = step(whole(carry), own)
        return apart(carry), row

    carry, rows = lax.scan(packed, apart(init), rows, steps)
    return whole(carry), rows


def group_of(steps: int) -> int:
    """Return how many steps a group has, each as many; 0 if there are few, or no such number.

    The rest would be a loop of its own, and so a second copy of the kernel. Of a number of steps
    that the program finds, a GPU asks the host each time.
    """
    sizes = range(MOST_PLAIN, _LEAST_GROUP - 1, -1)
    return 0 if at_most(steps, MOST_PLAIN) else next((n for n in sizes if steps % n == 0), 0)


def _by_groups(
    step: Callable[[Any, Any], tuple[Any, Any]],
    init: tuple[Any, Any, Any],
    operands: _Operands,
    groups: int,
    size: int,
    folds: Sequence[Sink],
    slots: TileSlots,
) -> tuple[Any, Any]:
    """Take the steps in groups; return the carry at the end, and no rows."""
    takers = [fold.of_group for fold in folds]

    def group(carry: tuple[Any, Any, Any], _: Any) -> tuple[tuple[Any, Any, Any], Any]:
        start, held, shared = carry
        fresh = [fold.fresh(own, slots.count) for fold, own in zip(folds, held, strict=True)]
        begin = start, carried_with(fresh, operands), shared
        (start, ends, shared), rows = _scan(step, begin, [], size, takers)
        every = zip(folds, held, ends, rows, strict=True)
        held = [fold.with_group(*own) for fold, *own in every]
        return (start, held, shared), [None] * len(folds)

    return _scan(group, init, [], groups, folds)
