# SPDX-License-Identifier: MIT
"""Eager calls: the loop is compiled once, and found again by what the kernel does.

Called outside `jax.jit`, a kernel is traced at each call, for only so is it seen that a number, an
array or a function that it uses has changed. That is cheap. But JAX compiles a new loop for a new
trace, whatever is in it. So the program of one item is compared with those that were compiled
before (`compare.py`), and where one is the same, its loop is run. Arrays that the kernel closes
over are inputs of that loop: they may change, and are not kept alive.

Each kept loop is a function of its own for `jax.jit`, so that all else on which its compilation
depends (shapes, devices, contexts, the configuration of JAX) is JAX's to compare.

Where a call is not eager, or its program cannot be compared, all is as if this file were not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend
from jax import core

from rankax._base.arrays import is_staged
from rankax._base.cache import Kept
from rankax._loop.loop import map_in_chunks
from rankax._loop.sinks import Sink
from rankax._loop.spec import LoopSpec
from rankax._trace.fingerprint import Unknown, fingerprint, opened, without_rules
from rankax._trace.item import ItemProgram

__all__ = ["is_eager", "map_chunks", "run_kept"]

ClosedJaxpr = jax.extend.core.ClosedJaxpr

_MOST_KEPT = 128  # compiled loops, of one or two megabytes each


def map_chunks(
    item: ItemProgram, leaves: Sequence[Any], spec: LoopSpec, sink: Sink | None = None
) -> list[Any]:
    """Do what `map_in_chunks` does; where the call is eager, by a loop that is kept."""
    if not is_eager([*leaves, *item.closed.consts]):
        return map_in_chunks(item, leaves, spec, sink)
    # Nothing differentiates an eager call, so there is nothing to recompute.
    spec = dataclasses.replace(spec, checkpoint=False, linear=True)
    closed = opened(item.closed)
    try:
        key = _Key((fingerprint(closed), item.where, item.out_axes, spec, sink))
        loop = _kept.find(key, lambda: _loop(item, closed.jaxpr, spec, sink))
    except Unknown:
        return map_in_chunks(item, leaves, spec, sink)
    try:
        return loop([_on_device(const) for const in closed.consts], list(leaves))
    except jax.errors.KeyReuseError as error:  # only with jax_debug_key_reuse
        raise item.reuses_key() from error


def run_kept(
    program: Callable[[ItemProgram, list[Any]], Any],
    item: ItemProgram,
    leaves: Sequence[Any],
    key: Hashable,
) -> Any:
    """Return ``program(item, leaves)``; where the call is eager, compiled, and kept.

    ``program`` holds nothing of the caller's, and does the same wherever ``key`` is the same. None:
    nobody knows whether it does, so it is not kept.
    """
    if not _is_evaluated([*leaves, *item.closed.consts]):
        return program(item, list(leaves))
    closed = opened(item.closed)

    def compiled(jaxpr: Any, of: ItemProgram) -> Any:
        return jax.jit(
            lambda consts, leaves: program(
                dataclasses.replace(of, closed=ClosedJaxpr(jaxpr, consts)), leaves
            )
        )

    try:
        outside = item.where, item.out_axes, item.out_tree, key
        # Without a key, as with a program that cannot be compared, nothing is found again.
        whole = _Key((fingerprint(closed), [] if key is None else outside))
        bare = dataclasses.replace(item, closed=None)
        run = _kept.find(whole, lambda: compiled(without_rules(closed.jaxpr), bare))
    except Unknown:
        closed = item.closed
        run = compiled(closed.jaxpr, item)
    return run([_on_device(const) for const in closed.consts], list(leaves))


def is_eager(arrays: Sequence[Any]) -> bool:
    """Whether a call with these arrays is evaluated now, and by nobody else."""
    if not _is_evaluated(arrays):
        return False
    # Where axes of a mesh are explicit, `jax.jit` gives types to what is made inside it that arrays
    # from outside lack.
    return jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types


def _is_evaluated(arrays: Sequence[Any]) -> bool:
    return not (any(isinstance(x, core.Tracer) for x in arrays) or is_staged())


def _loop(item: ItemProgram, jaxpr: Any, spec: LoopSpec, sink: Sink | None) -> Any:
    """Return the loop as a function of constants and inputs.

    It holds nothing of the caller's but whom it tells of its progress.
    """
    jaxpr = without_rules(jaxpr)
    bare = dataclasses.replace(item, closed=None, out_tree=None)

    def chunks_of(consts: list[Any], leaves: list[Any]) -> list[Any]:
        item = dataclasses.replace(bare, closed=ClosedJaxpr(jaxpr, consts))
        return map_in_chunks(item, leaves, spec, sink)

    return jax.jit(chunks_of)


def _on_device(const: Any) -> jax.Array:
    """Put an array of NumPy's on the device by an explicit transfer, which JAX's guard permits."""
    return const if isinstance(const, jax.Array) else jax.device_put(const)


class _Key:
    """A key whose hash is computed once."""

    def __init__(self, value: Hashable) -> None:
        self._value = value
        try:
            self._hash = hash(value)
        except TypeError:  # as of a sink that calls functions of the user's
            raise Unknown from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value


_kept: Kept[Any] = Kept(_MOST_KEPT)
