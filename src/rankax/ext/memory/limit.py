# SPDX-License-Identifier: MIT
"""Choose a chunk size that stays within a memory limit, by the bytes that the compiler reports.

`fit_to_limit` compiles the call for a few chunk sizes, for shapes alone; nothing runs.
`rankax.ext.memory.budget` picks the sizes to measure and chooses the largest one within the limit.
The answer is kept for each kind of call, so a share of free memory means what was free the first
time.

The whole call is compiled, not the chunk, because what the loop adds counts too, such as the copy
of the outputs where no chunk divides the batch. The gradient is measured with respect to all
floating arrays, including those that the kernel closes over, because a forward call does not show
what will be differentiated. Where no chunk is small enough for that, the cotangents of large arrays
are left out, for which nobody may ask: they are as large as the arrays, for any chunk. Arrays that
the kernel closes over become inputs of the measured program: they may be tracers of an outer trace,
and only their shapes are known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, SingleDeviceSharding

from rankax.core.base.arrays import Target, has_tangent, shape_of, target_of
from rankax.core.base.cache import Kept
from rankax.core.loop.eager_programs import Unknown, fingerprint
from rankax.core.plan.schedule import Shape, is_known
from rankax.core.trace.derivatives import of_some
from rankax.core.trace.programs import evaluate
from rankax.ext.equations import bytes_of_item
from rankax.ext.memory.budget import (
    MemoryFit,
    TooLargeError,
    fit_chunk,
    limit_in_bytes,
    shown_bytes,
)

# From a chunk size, and whether chunks are checkpointed, to the number of items in flight, and the
# call as a function of constants and arrays, which returns a list.
Program = Callable[[int, bool | None], tuple[int, Callable[..., Any]]]

Answer = TypeVar("Answer")

# The cotangent of an array may be left out if it has this share of a limit, and so many bytes.
_LARGE, _LEAST_LARGE = 10, 2**20

_kept: Kept[Any] = Kept(1024, "chunk sizes by memory limit")


def fit_to_limit(
    site: str, options: Any, sizes: Shape, item: Any, arrays: Any, program: Program, key: Hashable
) -> MemoryFit:
    """Return the chunk size that stays within a limit, measured once for each kind of call.

    Parameters
    ----------
    site : str
        The call, for errors.
    options : Options
        Those of the call. ``"50%"`` refers to the memory that is free at the first such call; with
        ``checkpoint=False``, the gradient need not stay within it.
    sizes : tuple of int
        Of the levels, outermost first.
    item : ClosedJaxpr
        The traced program of one item; with the other arguments, it identifies a kind of call. Of
        the arrays that it closes over, only the shapes are used.
    arrays : sequence
        What the call maps, or shapes.
    program : Program
    key : hashable
        Everything else that the call depends on.
    """
    shapes = stand_ins((item.consts, arrays), options.target, site)
    compiler, total = dict(options.compiler_options or ()) or None, math.prod(sizes)

    @functools.cache
    def limit() -> int:
        return limit_in_bytes(options.memory_limit, lambda: free_bytes(options.target))

    @functools.cache
    def measure(chunk_size: int) -> MemoryFit:
        in_flight, call = program(chunk_size, options.checkpoint)
        forward = _temporaries(jax.jit(call).trace(*shapes), compiler)
        cost = MemoryFit(limit(), chunk_size, in_flight, forward)
        if options.checkpoint is False:
            return cost
        traced, why = _gradient(call, *shapes)
        gradient = traced and _temporaries(traced, compiler)
        return dataclasses.replace(cost, gradient=gradient, no_gradient=why)

    def measure_apart(chunk_size: int, most: int) -> MemoryFit:
        """Measure a gradient without what cotangents of arrays of more than ``most`` bytes need.

        These are needed for any chunk, as by one of a single item, and are two copies at most; what
        more items need is in flight.
        """

        def own(chunk_size: int) -> int:
            traced, _ = _gradient(program(chunk_size, options.checkpoint)[1], *shapes, most=most)
            return _temporaries(traced, compiler) if traced else measure(chunk_size).forward

        large = filter(has_tangent, jax.tree.leaves(shapes))
        copies = 2 * sum(size for size in map(bytes_of_type, large) if size > most)
        theirs = min(copies, max(0, (measure(1).gradient or 0) - own(1)))
        cost = measure(chunk_size)
        gradient = max(own(chunk_size), (cost.gradient or 0) - theirs)
        return dataclasses.replace(cost, gradient=gradient, cotangents=theirs)

    def fit() -> MemoryFit:
        most = min(options.most or total, total)
        settings: Any = sizes, most, limit(), site
        share = max(limit() // _LARGE, _LEAST_LARGE)
        is_large = [has_tangent(x) and bytes_of_type(x) > share for x in jax.tree.leaves(shapes)]
        try:
            fits = bool(options.most) and measure(most).most <= limit()
            found = measure(most) if fits else fit_chunk(measure, *settings)
        except TooLargeError:
            if measure(1).gradient is None or not any(is_large):
                raise
            return fit_chunk(lambda chunk_size: measure_apart(chunk_size, share), *settings)
        may_store = options.checkpoint is None and options.rules.pays_to_store(item.jaxpr)
        if not may_store or found.gradient is None or found.chunk_size >= total:
            return found
        traced, _ = _gradient(program(found.chunk_size, False)[1], *shapes)
        gradient = _temporaries(traced, compiler)
        if gradient > limit():
            return found
        return dataclasses.replace(found, gradient=gradient, stored=True)

    def estimate() -> str:
        each = max(1, bytes_of_item(item.jaxpr))
        size = min(total, max(1, limit() // (2 * each)))
        return (
            f" (one item computes {shown_bytes(each)}, and its gradient about as much again, so "
            f"chunk_size={size} should do)"
        )

    return fit_once(site, item, shapes, (options, options.rules, sizes, key), fit, estimate)


def check_fits(
    site: str, options: Any, call: Callable[..., list[Any]], arrays: Sequence[Any], why: str
) -> None:
    """Refuse a call of some arrays that cannot be cut, if it needs more than the limit."""
    closed = jax.make_jaxpr(call)(*map(shape_of, arrays))
    shapes = stand_ins((closed.consts, list(arrays)), options.target, site)

    def whole(consts: list[Any], arrays: list[Any]) -> list[Any]:
        return evaluate(closed.jaxpr, consts, *arrays)

    def fit() -> tuple[int, int]:
        compiler = dict(options.compiler_options or ()) or None
        traced = jax.jit(whole).trace(*shapes), _gradient(whole, *shapes)[0]
        needs = max(_temporaries(each, compiler) for each in traced if each is not None)
        return needs, limit_in_bytes(options.memory_limit, lambda: free_bytes(options.target))

    needs, limit = fit_once(site, closed, shapes, (options, "whole"), fit)
    if needs > limit:
        raise ValueError(
            f"{site}: it needs {shown_bytes(needs)}, and memory_limit is {shown_bytes(limit)}, but "
            f"{why}; raise the limit to at least {needs} bytes"
        )


def fit_once(
    site: str,
    item: Any,
    arrays: Any,
    key: Hashable,
    fit: Callable[[], Answer],
    estimate: Callable[[], str] = str,
) -> Answer:
    """Return ``fit()``, or what it returned for an equal program, arrays of equal types and key.

    ``estimate``: returns what to say where nothing can be measured.
    """
    if any(hasattr(effect, "name") for effect in item.effects):
        raise ValueError(
            f"{site}: memory_limit cannot measure a kernel with a collective over an outer axis; "
            f"give chunk_size{estimate()}"
        )
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            f"{site}: memory_limit cannot measure a kernel inside jax.shard_map, where the types "
            f"of arrays name its mesh; give chunk_size{estimate()}"
        )
    leaves, treedef = jax.tree.flatten(arrays)
    types = tuple((shape.shape, shape.dtype) for shape in map(shape_of, leaves))
    try:
        program: Hashable = fingerprint(item)
    except Unknown:
        # If the program cannot be compared, its structure will do, because only memory matters.
        program = tuple((eqn.primitive, tuple(v.aval for v in eqn.outvars)) for eqn in item.eqns)
    return _kept.get_or_make((key, program, treedef, types, jax.default_backend()), fit)


def stand_ins(arrays: Any, target: Target | None, site: str) -> Any:
    """Return the shapes of arrays, on a device to compile for if that is not one of the default."""
    shapes = jax.tree.map(shape_of, arrays)
    sizes = (n for x in jax.tree.leaves(shapes) for n in x.shape)
    if unknown := next((n for n in sizes if not is_known(n)), None):
        raise ValueError(
            f"{site}: memory_limit cannot measure arrays of the unknown length {unknown}; give "
            "chunk_size"
        )
    if target is None or target.platform == jax.default_backend():
        return shapes
    try:
        device = target.device or jax.local_devices(backend=target.platform)[0]
    except RuntimeError:
        raise ValueError(
            f"{site}: memory_limit cannot measure a call compiled for a {target.platform}, "
            "because this process has none; give chunk_size"
        ) from None
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)


def gradient_bytes(call: Callable[..., Any], consts: Sequence[Any], arrays: Any, site: str) -> int:
    """Return the temporaries of the gradient of a call, or of the call if it has no gradient."""
    target = target_of(jax.tree.leaves((consts, arrays)))
    shapes, arrays = stand_ins((list(consts), arrays), target, site)
    traced, _ = _gradient(call, shapes, arrays)
    return _temporaries(traced or jax.jit(call).trace(shapes, arrays), None)


def _temporaries(traced: Any, options: dict[str, Any] | None) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    devices: dict[str, Any] = {}
    if AxisType.Explicit in mesh.axis_types:
        # Inside `jit` a mesh has no devices of its own; any will do to measure.
        devices["device_assignment"] = tuple(jax.devices()[: mesh.size])
    analysis = traced.lower().compile(options, **devices).memory_analysis()
    if analysis is None:
        raise NotImplementedError(
            "memory_limit: the compiler does not say how much memory a program needs here; give "
            "chunk_size"
        )
    return int(analysis.temp_size_in_bytes)


# How JAX 0.10 to 0.12 and Equinox refuse to differentiate, besides `NotImplementedError`; any other
# error is a fault of the kernel, such as a wrong name in its own rule. Faults raise the same,
# so the texts decide. Tests: ``tests/fit/test_memory_limit.py``, ``tests/upstream/test_names.py``.
_REFUSALS = (
    "Reverse-mode differentiation does not work",  # loops of traced length, and lockstep=False
    "callbacks do not support JVP",
    "cannot be differentiated",  # foreign functions
    "Linearization failed to produce known values",  # Pallas, reduce_window
    "gradient with respect to a and b not supported",  # betainc
    "can't apply forward-mode autodiff (jvp) to a custom_vjp function",
    "transpose_solve required for backwards mode",
    "autodifferentiate",  # Equinox and Diffrax
)


def _gradient(
    call: Callable[..., Any], consts: list[Any], arrays: list[Any], most: float = math.inf
) -> tuple[Any | None, str]:
    """Trace the gradient with respect to all floating arrays of at most so many bytes.

    None, and why, if there is none.
    """
    leaves, treedef = jax.tree.flatten((consts, arrays))
    moving = [
        i for i, leaf in enumerate(leaves) if has_tangent(leaf) and bytes_of_type(leaf) <= most
    ]

    def outputs(*leaves: Any) -> list[Any]:
        return [out for out in call(*treedef.unflatten(leaves)) if has_tangent(out)]

    def gradient(some: list[Any], rest: list[Any], cotangents: list[Any]) -> Any:
        _, pull = jax.vjp(of_some(outputs, rest, moving), *some)
        return pull(cotangents)

    some = [leaves[i] for i in moving]
    rest = [None if i in moving else leaf for i, leaf in enumerate(leaves)]
    cotangents = jax.eval_shape(outputs, *leaves)
    if not moving or not cotangents:
        return None, f"no {'output' if moving else 'argument'} holds floating-point numbers"
    try:
        return jax.jit(gradient).trace(some, rest, cotangents), ""
    except (RuntimeError, TypeError, ValueError) as error:  # among them NotImplementedError
        sentences = str(error).partition("\n")[0].split(". ")
        refusals = [s for s in sentences if any(known in s for known in _REFUSALS)]
        if isinstance(error, NotImplementedError):
            refusals.append(sentences[0] or "not implemented")
        if not refusals:
            raise
        return None, refusals[0].removesuffix(".")


def bytes_of_type(x: Any) -> int:
    """Return the bytes of an array, or of a type."""
    return math.prod(x.shape) * x.dtype.itemsize


def free_bytes(target: Target | None = None) -> int:
    """Return the free memory of the device of a call, or else of the machine."""
    device = (target and target.device) or jax.local_devices()[0]
    stats = device.memory_stats() or {}
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
