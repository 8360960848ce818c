# SPDX-License-Identifier: MIT
"""``bucket=``: pad the axes of a batch to one of a few lengths, and cut the results.

A padded axis has copies of its last item at its end. The program gets the true lengths as numbers
(`Call.lengths`), so it is the same for all lengths of a bucket:

* Outputs with an axis for the batch are cut. The cotangents of the copies are zero.
* For a reduction, each item says whether it counts (`Marked`); copies do not, as with ``where``.
* Keys are split, and indices counted, as if there were no copies.

If XLA padded and cut, it would need a program for each length. So `_resize` is a primitive that
NumPy evaluates on the host, even where it is differentiated or mapped. Where JAX adds it to a
program after all, as in ``jax.jit(jax.vjp(kernel, x)[1])``, it is lowered. Frequent lengths get a
compiled program that cuts the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from rankax._options import Options
from rankax.call.kernels import KernelCall
from rankax.core.base.arrays import is_spread, shape_of
from rankax.core.base.cache import Kept
from rankax.core.loop.spec import index_without_fill
from rankax.core.plan.schedule import Shape
from rankax.core.reduce.protocol import Keep, Reduction
from rankax.ext.lengths import bucket_of
from rankax.ext.reductions.winners import FirstK


class Filling(NamedTuple):
    """How the batch of a call is padded."""

    shapes: dict[int, Shape]  # of the mapped leaves
    lengths: dict[int, int]  # of the padded axes, without copies
    cut: Shape  # the padded batch shape
    batch_shape: Shape
    reduced: tuple[int, ...]


def filling_of(call: KernelCall, options: Options) -> Filling | None:
    """Return how a call is padded, which follows from its shapes; None: not at all."""
    if not options.bucket:
        return None
    shapes = tuple([getattr(x, "shape", None) for x in call.leaves])
    over = options.over or options.reduce_axis
    key = shapes, options.bucket, options.batch_shape, options.reduce, over
    filling = call.structure.fillings.get_or_make(key, lambda: _filling_of(call, options))
    for i in filling.shapes if filling and options.devices is None else ():
        if is_spread(call.leaves[i]):
            raise ValueError(
                f"{call.site}: {call.structure.paths[i]} is sharded over devices, but bucket= "
                "pads it on the host; with devices=, the devices share the padded batch"
            )
    return filling


def _filling_of(call: KernelCall, options: Options) -> Filling | None:
    """Do what `filling_of` does, without a cache.

    An axis of length 1 broadcasts, and an empty batch has no item to copy.
    """
    planned = call.plan_whole(options)
    plan = planned
    shape, lengths = list(plan.batch_shape), dict[int, int]()
    for i, axes in zip(planned.mapped, planned.batch_axes, strict=True):
        for axis, length in enumerate(plan.batch_shape):
            if axes[axis] is None or length == 1:
                continue
            lengths[axis] = length
            size = bucket_of(length, options.bucket)
            if size is None:
                most = options.bucket[-1] if isinstance(options.bucket, tuple) else ""
                raise ValueError(
                    f"{call.site}: {call.structure.paths[i]} has {length} items along batch axis "
                    f"{plan.words[axis]}, but the largest bucket is {most}; add a larger one, or "
                    "use bucket=True, which has no end"
                )
            shape[axis] = size
    row = math.prod(plan.batch_shape[axis] for axis in plan.reduced)
    entries = () if options.reduce is None else options.reduce.entries
    # Without the copies, `FirstK` may have too few items, which it says itself.
    too_few = any(isinstance(entry, FirstK) and entry.k > row for entry in entries)
    if not plan.evaluations or too_few or not lengths:
        return None
    part = call.part(planned, tuple(shape))
    shapes = {i: part.leaves[i].shape for i in planned.mapped}
    lengths = dict(sorted(lengths.items()))
    return Filling(shapes, lengths, tuple(shape), plan.batch_shape, plan.reduced)


def filled(call: KernelCall, filling: Filling, *, only_shapes: bool = False) -> KernelCall:
    """Return a call with its arrays padded by copies of their last items."""
    leaves, arrays = list(call.leaves), list[int]()
    for i, shape in filling.shapes.items():
        if only_shapes or isinstance(leaves[i], jax.ShapeDtypeStruct):
            leaves[i] = shape_of(leaves[i], shape)
        else:
            arrays.append(i)
    wanted = [filling.shapes[i] for i in arrays]
    padded = resized([leaves[i] for i in arrays], wanted, copies=True)
    for i, x in zip(arrays, padded, strict=True):
        leaves[i] = x
    return dataclasses.replace(call, leaves=leaves, lengths=filling.lengths, cut=filling.cut)


def with_places(out: Any, call: KernelCall, options: Options) -> Any:
    """Return a result whose indices count the items as if there were no copies."""
    plan = call.plan(options)

    def place(index: jax.Array) -> jax.Array:
        return index_without_fill(index, plan.batch_shape, plan.reduced, call.lengths)

    return _by_entry(lambda entry, part: entry.with_places(part, place), out, options)


def cut(out: Any, filling: Filling, options: Options) -> Any:
    """Return a result without the copies."""

    def cut_part(entry: Reduction, part: Any) -> Any:
        gone = () if entry.is_kept else filling.reduced
        front = [size for axis, size in enumerate(filling.batch_shape) if axis not in gone]
        leaves, structure = jax.tree.flatten(part)
        shapes = [(*front, *x.shape[len(front) :]) for x in leaves]
        return structure.unflatten(resized(leaves, shapes))

    return _by_entry(cut_part, out, options)


def _by_entry(fun: Callable[[Reduction, Any], Any], out: Any, options: Options) -> Any:
    """Apply a function to each reduction and its part of the result."""
    if options.reduce is None:
        return fun(Keep(), out)
    entries, structure = options.reduce.entries, options.reduce.structure
    pairs = zip(entries, structure.flatten_up_to(out), strict=True)
    return structure.unflatten([fun(entry, part) for entry, part in pairs])


def resized(arrays: Sequence[Any], shapes: Sequence[Shape], *, copies: bool = False) -> list[Any]:
    """Cut the axes of arrays at their ends, or lengthen them: by zeros, or by copies."""
    pairs = list(zip(arrays, shapes, strict=True))
    if any(isinstance(x, core.Tracer) or _is_key(x) for x in arrays):
        return [_resized_one(x, shape, copies=copies) for x, shape in pairs]
    changed = {i: x for i, (x, shape) in enumerate(pairs) if x.shape != shape}
    is_free = bool(changed) and not any(getattr(x, "committed", 0) for x in changed.values())
    key = tuple([(x.shape, shape) for x, shape in pairs])
    if is_free and not copies and next(_times.get_or_make(key, itertools.count)) >= _OFTEN:
        return _on_device(as_inputs([*arrays]), tuple(shapes))
    on_host = zip(changed, _on_host([*changed.values()]), strict=True)
    resized = {i: _by(np, x, shape=shapes[i], copies=copies) for i, x in on_host}
    put = as_inputs if copies else jax.device_put
    resized = put(resized) if is_free else {i: _placed(resized[i], changed[i]) for i in changed}
    return [resized.get(i, x) for i, x in enumerate(arrays)]


def as_inputs(values: Any) -> Any:
    """Return NumPy arrays as inputs of `jax.jit`; with a transfer guard, transferred explicitly."""
    config: Any = jax.config
    is_free = config.jax_transfer_guard_host_to_device in (None, "allow")
    return values if is_free else jax.device_put(values)


def _on_host(arrays: list[Any]) -> list[Any]:
    """Return arrays of NumPy: several times as fast as `jax.device_get`, which a guard needs."""
    config: Any = jax.config
    if config.jax_transfer_guard_device_to_host not in (None, "allow"):
        return jax.device_get(arrays)
    for x in arrays if len(arrays) > 1 else ():
        if isinstance(x, jax.Array):
            x.copy_to_host_async()
    return list(map(np.asarray, arrays))


# To cut results takes NumPy, and JAX to transfer them, longer than a program of a few microseconds.
# It is compiled after so many repeats, when compiling has paid for itself.
_times: Kept[Iterator[int]] = Kept(1024, "how often a result was cut")
_OFTEN = 32


@functools.partial(jax.jit, static_argnums=1)
def _on_device(arrays: list[Any], shapes: Sequence[Shape]) -> list[Any]:
    return list(map(_resized_one, arrays, shapes))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _resized_one(x: Any, shape: Shape, *, copies: bool = False) -> Any:
    if x.shape == shape:
        return x
    if _is_key(x):
        data = jax.random.key_data(x)
        data = _resized_one(data, (*shape, *data.shape[x.ndim :]), copies=copies)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _resize.bind(x, shape=shape, copies=copies)


def _by(package: Any, x: Any, *, shape: Shape, copies: bool) -> Any:
    for axis, size in enumerate(shape):
        front, more = (slice(None),) * axis, size - x.shape[axis]
        if more < 0:
            x = x[(*front, slice(size))]
        elif more:
            last = x[(*front, slice(-1, None))] if copies else package.zeros((), x.dtype)
            end = package.broadcast_to(last, (*x.shape[:axis], more, *x.shape[axis + 1 :]))
            x = package.concatenate([x, end], axis)
    return x


_resize = jax.extend.core.Primitive("rankax_resize")


def _placed(resized: Any, x: Any) -> Any:
    sharding = x.sharding if getattr(x, "committed", False) else None
    try:
        return jax.device_put(resized, sharding)
    except ValueError:  # the devices do not divide it, so each gets all of it
        return jax.device_put(resized, NamedSharding(x.sharding.mesh, PartitionSpec()))


@_resize.def_impl
def _(x: Any, *, shape: Shape, copies: bool) -> Any:
    return resized([x], [shape], copies=copies)[0]


@_resize.def_abstract_eval
def _(x: Any, *, shape: Shape, **_: Any) -> Any:
    return x.update(shape=shape, weak_type=False)


def _transposed(cotangent: Any, x: Any, **_: Any) -> Any:
    return [_resized_one(cotangent, x.aval.shape)]


def _batching_rule(args: Sequence[Any], dims: Sequence[int], *, shape: Shape, **params: Any) -> Any:
    (x,), (dim,) = args, dims
    shape = (*shape[:dim], x.shape[dim], *shape[dim:])
    return _resize.bind(x, shape=shape, **params), dim


ad.deflinear2(_resize, _transposed)  # which drops the cotangents of copies
batching.primitive_batchers[_resize] = _batching_rule
mlir.register_lowering(_resize, mlir.lower_fun(functools.partial(_by, jnp), multiple_results=False))
