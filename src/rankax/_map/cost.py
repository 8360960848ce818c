# SPDX-License-Identifier: MIT
"""What a call needs, by the compiler's own account, and the chunk that keeps to a limit.

Programs are compiled for shapes alone, and never run. What is compiled is the whole call with a
chunk size that is tried, and the pull-back of cotangents through it: so all is counted that the
loop adds to the chunk. Arrays that the kernel closes over are inputs there, since they may be
tracers of an outer trace, of which the shape is all that is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._base.kept import Kept
from rankax._map.compare import Unknown, fingerprint
from rankax._plan.budget import Cost, MemoryFit, fit_chunk, limit_in_bytes

__all__ = ["Program", "fit_to_limit", "shape_of"]

# A call with a chunk size: how many items are in flight, and the call as a function of constants
# and arrays, which are given by their shapes.
Program = Callable[[int], tuple[int, Callable[..., Any], Sequence[Any]]]

_kept = Kept(1024)


def fit_to_limit(
    item: Any,
    consts: Sequence[Any],
    program: Program,
    key: Hashable,
    limit: int | str,
    sizes: Sequence[int],
    most: int,
    where: str,
    *,
    with_gradient: bool,
) -> MemoryFit:
    """Return the chunk size that keeps to a limit, measured once for each kind of call.

    Parameters
    ----------
    item : ClosedJaxpr
        The traced program of one item, by which calls are told apart, with ``key``.
    consts : sequence
        What that program uses besides the item; of which only shapes are looked at.
    program : callable
        Returns, for a chunk size, how many items are in flight, the call as a function
        ``(constants, arrays)`` that returns a list, and the shapes of its arrays.
    key : hashable
        What the call depends on besides the item, the limit and the largest chunk.
    limit : int or str
        In normal form; a share is one of what is free when such a call is first seen.
    sizes : sequence of int
        Of the levels, outermost first.
    most : int
        The largest chunk.
    where : str
        The function, for errors.
    with_gradient : bool
        Whether the gradient has to keep to the limit, too.
    """
    if any(hasattr(effect, "name") for effect in item.effects):
        raise ValueError(
            f"{where}: memory_limit cannot measure a kernel with a collective over an outer axis; "
            "give chunk_size"
        )
    shapes = [shape_of(const) for const in consts]
    of_consts = tuple((shape.shape, shape.dtype) for shape in shapes)
    key = _program_key(item), of_consts, key, limit, most, with_gradient, jax.default_backend()

    def measure(chunk_size: int) -> Cost:
        in_flight, call, arrays = program(chunk_size)
        forward = _temporaries(jax.jit(call).trace(shapes, list(arrays)))
        gradient = _of_gradient(call, shapes, list(arrays)) if with_gradient else None
        return Cost(in_flight, forward, gradient)

    return _kept.find(
        key, lambda: fit_chunk(measure, sizes, most, limit_in_bytes(limit, _free_bytes), where)
    )


def _program_key(item: Any) -> Hashable:
    try:
        found = fingerprint(item)
        hash(found)
    except (Unknown, TypeError):
        # Of a program that cannot be compared, how it is built will do: it is about memory only.
        return tuple((eqn.primitive, tuple(v.aval for v in eqn.outvars)) for eqn in item.eqns)
    return found


def shape_of(value: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array or number, or of a stand-in; or of one with ``shape``."""
    if not hasattr(value, "dtype"):
        value = jax.eval_shape(lambda: jnp.asarray(value))
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak_type = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(
        tuple(value.shape) if shape is None else shape, dtype, weak_type=bool(weak_type)
    )


def _temporaries(traced: Any) -> int:
    analysis = traced.lower().compile().memory_analysis()
    if analysis is None:
        raise NotImplementedError(
            f"memory_limit: the compiler for {jax.default_backend()} does not say what memory a "
            "program needs; give chunk_size"
        )
    return int(analysis.temp_size_in_bytes)


def _of_gradient(call: Callable[..., Any], consts: list[Any], arrays: list[Any]) -> int | None:
    """Return the temporaries of the gradient with respect to all that has one, if anything."""
    leaves, treedef = jax.tree.flatten((consts, arrays))
    moving = [i for i, leaf in enumerate(leaves) if _moves(leaf)]

    def of_moving(some: list[Any], rest: list[Any]) -> list[Any]:
        merged = list(rest)
        for i, leaf in zip(moving, some, strict=True):
            merged[i] = leaf
        return [out for out in call(*treedef.unflatten(merged)) if _moves(out)]

    def gradient(some: list[Any], rest: list[Any], cotangents: list[Any]) -> Any:
        _, pull = jax.vjp(lambda some: of_moving(some, rest), some)
        return pull(cotangents)

    some = [leaves[i] for i in moving]
    rest = [None if i in moving else leaf for i, leaf in enumerate(leaves)]
    cotangents = jax.eval_shape(of_moving, some, rest)
    if not moving or not cotangents:
        return None
    try:
        traced = jax.jit(gradient).trace(some, rest, cotangents)
    except Exception:  # whatever it is, this kernel cannot be differentiated
        return None
    return _temporaries(traced)


def _moves(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _free_bytes() -> int:
    """Return what the first device has free, or else the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
