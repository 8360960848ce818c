# SPDX-License-Identifier: MIT
"""The arguments of a scan, checked, and its body, traced once."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from rankax._base.checks import check_callable, checked_int, common_length, positive_int
from rankax._base.functions import NotedErrors, function_location, function_name, traced_as
from rankax._base.trees import check_leaves, leaves_with_names, type_name
from rankax._base.words import listed, plural, table
from rankax._progress.bars import checked_progress
from rankax._trace.derivatives import keep_rules
from rankax._trace.item import ItemProgram, with_axis


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


# The body.


def trace_body(call: ScanCall) -> tuple[ItemProgram, list[Any], list[Any]]:
    """Trace the body for one step and check what it returns.

    Returns its program, whose ``out_tree`` is that of ``(carry, y)``, and the leaves of the first
    carry and of ``xs``. The program takes and returns leaves, because a class that checks or
    converts its leaves must only see the values of one step, or those of all steps.
    """
    tree = jax.tree.structure(call.init)
    items, x_tree = jax.tree.flatten(call.xs)
    x = [with_axis(leaf, 0) for leaf in items]
    location = function_location(call.f)
    where = f"{call.site}: the scan body {location}"
    out_trees: list[Any] = []

    def described() -> tuple[Any, ...]:
        pairs = leaves_with_names(call.init, "carry")
        pairs += leaves_with_names(x_tree.unflatten(x), "x")
        return ("argument", "type"), [(name, type_name(leaf)) for name, leaf in pairs], ()

    @traced_as(call.f)
    def on_leaves(carry: list[Any], x: list[Any]) -> list[Any]:
        with NotedErrors(call.f, described):
            out = call.f(tree.unflatten(carry), x_tree.unflatten(x))
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            is_sequence = isinstance(out, (tuple, list))
            came = f"{type(out).__name__} of {len(out)}" if is_sequence else type_name(out)
            raise TypeError(f"{where} must return a pair (carry, y), got {came}")
        check_carry(call.site, where, "init", call.init, out[0])
        check_leaves(call.site, out[1], "y")
        leaves, out_tree = jax.tree.flatten(tuple(out))
        out_trees.append(out_tree)
        return leaves

    closed, init = trace_step(where, "init", call.init, on_leaves, x)
    return ItemProgram(location, keep_rules(closed), out_trees[-1], (), ()), init, items


def check_carry(site: str, where: str, name: str, init: Any, carry: Any) -> None:
    """Refuse a returned carry of another structure than the first one, which is called ``name``."""
    check_leaves(site, carry, "the returned carry")
    before, after = jax.tree.structure(init), jax.tree.structure(carry)
    if before == after:
        return
    given, returned = (dict(leaves_with_names(tree, name)) for tree in (init, carry))
    missing = [path for path in given if path not in returned]
    extra = [path for path in returned if path not in given]
    details = [f"it lacks {listed(missing)}"] if missing else []
    details += [f"it adds {listed(extra)}"] if extra else []
    raise TypeError(
        f"{where} must return a carry with the structure of {name}; "
        f"{' and '.join(details) or 'its containers differ'}\n\n"
        + table(("carry", "structure"), [(name, str(before)), ("returned", str(after))], [1])
    )


def trace_step(
    where: str, name: str, init: Any, step: Callable[..., list[Any]], *x: Any
) -> tuple[Any, list[jax.Array]]:
    """Trace a step from the leaves of a carry, and of ``x``, to those of the next carry and more.

    Returns the program and the leaves of the first carry. As in `jax.lax.scan`, a weakly typed leaf
    takes the dtype that the step returns for it, which costs a second trace. Any other change of
    type is refused.
    """
    leaves = jax.tree.leaves(init)
    trace = jax.make_jaxpr(step)
    closed = trace(leaves, *x)
    first = list(map(_promoted, leaves, closed.out_avals))
    if any(a.dtype != b.dtype for a, b in zip(leaves, first, strict=True)):
        closed = trace(first, *x)
    triples = zip(leaves_with_names(init, name), first, closed.out_avals, strict=False)
    rows = [(path, type_name(leaf), type_name(new)) for (path, _), leaf, new in triples]
    if odd := [i for i, (_, before, after) in enumerate(rows) if before != after]:
        raise TypeError(
            f"{where} must return a carry with the shapes and dtypes of {name}; "
            f"{listed([rows[i][0] for i in odd])} {'differs' if len(odd) == 1 else 'differ'}\n\n"
            + table(("leaf", "carry in", "carry out"), rows, odd)
        )
    return closed, first


def _promoted(leaf: jax.Array, out: Any) -> jax.Array:
    """Give a weakly typed leaf of a first carry the dtype that the body returns for it."""
    is_weak = getattr(leaf, "weak_type", False)  # PRNG keys have no such attribute
    if not is_weak or leaf.dtype == out.dtype:
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf, out.dtype))
