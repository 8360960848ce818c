# SPDX-License-Identifier: MIT
"""How the chunks of an array are read, written and joined, as XLA handles it best.

Chunks that divide axis 0 are rows of a stack (`stack_chunks`). All others are read by index
(`take_chunk`): if no chunk divides the axis, the last one starts early (`next_start`) and overlaps
the one before it. Items in the overlap are evaluated twice but used once: forward, the last chunk
overwrites them; in a derivative, `join_chunks` keeps the earlier copy.

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

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from rankax.core.base.arrays import scalar
from rankax.core.loop.reuse import kernel_of_call
from rankax.core.plan.schedule import Chunks

T = TypeVar("T")


def first_start(chunks: Chunks) -> jax.Array:
    """Return where the first chunk starts: a number for a loop to carry.

    Carried, not looked up in an array: XLA:CPU would fuse the lookup with the read of the chunk,
    and repeat it for each element.
    """
    long = jax.dtypes.canonicalize_dtype(jnp.int64)
    if chunks.length - chunks.size > jnp.iinfo(long).max:
        raise ValueError(
            f"{kernel_of_call()}: a loop over an axis of {chunks.length} items counts them in 64 "
            'bits; call jax.config.update("jax_enable_x64", True) first'
        )
    return scalar(0, jnp.int32 if chunks.length < 2**31 else long)


def next_start(start: jax.Array, chunks: Chunks) -> jax.Array:
    """Return where the chunk after the one at ``start`` starts."""
    number = start.dtype.type
    return jnp.minimum(start + number(chunks.size), number(chunks.length - chunks.size))


def carried_with(start: T, operands: Any) -> T:
    """Give the carry of a loop the type that it has after a step with these operands."""
    types = jax.sharding.get_abstract_mesh().axis_types
    if AxisType.Manual in types:
        axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(operands)))
        return jax.tree.map(lambda x: _varying(x, axes - varying_axes(x)), start)
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


def _varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Declare that a value may differ among devices, which `jax.shard_map` checks."""
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def flatten_items(leaf: Any, axis: int) -> jax.Array:
    """Prepare ``leaf`` for `take_chunk`: ``axis`` and all later axes become one, by a reshape.

    Otherwise, a kernel that takes its items in another layout, such as a call of LAPACK, makes XLA
    copy the whole leaf into that layout, and memory grows with the axis. `use_once` relies on the
    flat shape, too.
    """
    before, rest = leaf.shape[:axis], leaf.shape[axis:]
    flat = math.prod(rest)
    # One axis, unless an index along it needs more than 32 bits.
    after = (flat,) if flat < 2**31 else (rest[0], math.prod(rest[1:]))
    return lax.reshape(leaf, (*before, *after))


def widen(leaf: jax.Array) -> jax.Array:
    """Give ``leaf``, which is to be differentiated, a dtype that XLA can add in place.

    XLA:CPU adds floats like `bfloat16` as `float32`, and would convert the whole cotangent in every
    step.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float16:
        return leaf
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 32 else leaf


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
