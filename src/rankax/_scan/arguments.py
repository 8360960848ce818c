# SPDX-License-Identifier: MIT
"""The arguments of both scans, checked before the body is traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from rankax._base.checks import (
    check_callable,
    checked_int,
    common_length,
    positive_int,
)
from rankax._base.functions import function_name
from rankax._base.trees import check_leaves, leaves_with_names
from rankax._base.words import listed, plural, table
from rankax._progress.bars import checked_progress


class ScanCall(NamedTuple):
    """The arguments of a scan, checked; ``site`` is the call as errors name it."""

    site: str
    f: Callable[..., Any]
    init: Any
    xs: Any
    length: int
    reverse: bool
    unroll: int | bool
    progress: Any


def scan_call(
    scan: str, f: Any, init: Any, xs: Any, length: Any, reverse: bool, unroll: Any, progress: Any
) -> ScanCall:
    """Check the arguments; convert leaves to arrays and ``unroll`` to what every JAX accepts."""
    site = f"{scan}({function_name(f)})" if callable(f) else scan
    progress = checked_progress(progress, site)
    check_callable(f, site, "f")
    if not isinstance(unroll, bool):
        unroll = _checked_int(site, "unroll", unroll, "a bool or a non-negative int", least=0)
        unroll = unroll or True  # 0 unrolls the entire loop, but some versions of JAX refuse it
    check_leaves(site, init, "init")
    check_leaves(site, xs, "xs")
    init, xs = jax.tree.map(jnp.asarray, (init, xs))
    length = _scan_length(site, xs, length)
    return ScanCall(site, f, init, xs, length, reverse, unroll, progress)


def kept_indices(site: str, length: int, save_at: Any, **bounds: Any) -> Sequence[int]:
    """Return the steps whose outputs are kept, in the order of the outputs, counted from 0.

    Of a slice, any integer is legal, except a step of 0.
    """
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if save_at is None:
        for name, bound in given.items():
            bounds[name] = _checked_int(site, name, bound, "an int or None", bools=True)
        if bounds["step"] == 0:
            raise ValueError(f"{site}: step must not be 0")
        return range(length)[slice(bounds["start"], bounds["stop"], bounds["step"])]
    if given:
        raise TypeError(f"{site}: save_at excludes start, stop and step, got {listed([*given])}")
    if not isinstance(save_at, Sequence) and getattr(save_at, "ndim", 0) != 1:
        raise TypeError(f"{site}: save_at must be a sequence of ints, got {_described(save_at)}")
    indices = [
        _checked_int(site, f"save_at[{i}]", index, "an int") for i, index in enumerate(save_at)
    ]
    for i, index in enumerate(indices):
        if not -length <= index < length:
            raise ValueError(
                f"{site}: save_at[{i}] is {index}, but there are only {plural(length, 'step')}"
            )
    return [index % length for index in indices]


def _described(value: Any) -> str:
    return "a traced array" if isinstance(value, jax.core.Tracer) else type(value).__name__


def _checked_int(site: str, name: str, value: Any, expected: str, **options: Any) -> int:
    refusal = f"{site}: {name} must be {expected}, got"
    return checked_int(value, refusal, came=_described(value), **options)


def chunk_sizes(site: str, chunk_size: Any, length: int) -> tuple[int, ...]:
    """Return the nested chunk sizes, outermost first."""
    if chunk_size is None:
        return (length,)
    if isinstance(chunk_size, str) and chunk_size == "sqrt":
        return (math.isqrt(max(length - 1, 0)) + 1,)
    if isinstance(chunk_size, str) or not isinstance(chunk_size, Sequence):
        return (positive_int(chunk_size, site, "chunk_size"),)
    if not chunk_size:
        raise ValueError(f"{site}: chunk_size must hold at least one size, got {chunk_size!r}")
    return tuple(positive_int(size, site, f"chunk_size[{i}]") for i, size in enumerate(chunk_size))


def _scan_length(site: str, xs: Any, length: Any) -> int:
    if length is not None:
        length = _checked_int(site, "length", length, "a non-negative int", least=0)
    leaves = leaves_with_names(xs, "xs")
    if not leaves:
        if length is None:
            raise ValueError(f"{site}: give length, or xs with at least one array to scan over")
        return length
    steps = common_length([(path, leaf, 0) for path, leaf in leaves], site)
    if length is not None and length != steps:
        rows = [(path, str(leaf.shape), str(steps)) for path, leaf in leaves]
        raise ValueError(
            f"{site}: length is {length}, but the leading axis of xs is {steps}; "
            "leave length out\n\n" + table(("leaf", "shape", "length"), rows, range(len(rows)))
        )
    return steps
