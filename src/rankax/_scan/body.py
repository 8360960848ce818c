# SPDX-License-Identifier: MIT
"""The body of a scan: traced once, then a step that can be laid out in several loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from rankax._base.functions import function_location
from rankax._base.trees import leaves_with_names
from rankax._base.words import listed, table
from rankax._map.calls import keep_rules
from rankax._scan.arguments import check_leaves, type_name

__all__ = ["Body", "Operands", "Step", "trace_body"]

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Body:
    """A traced scan body, without any array: those that it closes over are handed to `step`."""

    jaxpr: Any
    out_tree: Any

    def step(self, consts: list[Any]) -> Step:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            out = jax.core.eval_jaxpr(self.jaxpr, consts, *jax.tree.leaves((carry, x)))
            return jax.tree.unflatten(self.out_tree, out)

        return step


class Operands(NamedTuple):
    """All arrays that a scan reads."""

    consts: list[Any]
    init: Any
    xs: Any


def trace_body(where: str, f: Callable[..., Any], init: Any, xs: Any) -> tuple[Body, Operands]:
    """Trace ``f`` for one step, and check what it returns.

    As in `jax.lax.scan`, a weakly typed leaf of ``init`` takes the dtype that the body returns for
    it, which costs a second trace.
    """
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=_is_weak(leaf)), xs
    )

    def checked(carry: Any, x: Any) -> tuple[Any, Any]:
        out = f(carry, x)
        _check_pair(where, f, out)
        check_leaves(where, out[0], "the returned carry")
        check_leaves(where, out[1], "y")
        return tuple(out)

    trace = jax.make_jaxpr(checked, return_shape=True)
    jaxpr, out = trace(init, x)
    _check_carry_structure(where, f, init, out[0])
    promoted = jax.tree.map(_promote_weak_type, init, out[0])
    if any(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype != b.dtype, init, promoted))):
        jaxpr, out = trace(promoted, x)
    _check_carry_types(where, f, promoted, out[0])
    jaxpr = keep_rules(jaxpr)
    body = Body(jaxpr.jaxpr, jax.tree.structure(out))
    return body, Operands(list(jaxpr.consts), promoted, xs)


def _is_weak(leaf: jax.Array) -> bool:
    return getattr(leaf, "weak_type", False)  # which PRNG keys do not have


def _promote_weak_type(leaf: jax.Array, out: jax.ShapeDtypeStruct) -> jax.Array:
    if not _is_weak(leaf) or leaf.dtype == out.dtype:
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf, out.dtype))


def _check_pair(where: str, f: Callable[..., Any], out: Any) -> None:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        came = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else None
        raise TypeError(
            f"{where}: the scan body {function_location(f)} must return a pair (carry, y), got "
            f"{came or type_name(out)}"
        )


def _check_carry_structure(where: str, f: Callable[..., Any], init: Any, out: Any) -> None:
    given, returned = jax.tree.structure(init), jax.tree.structure(out)
    if given == returned:
        return
    before, after = dict(leaves_with_names(init, "init")), dict(leaves_with_names(out, "init"))
    missing = [path for path in before if path not in after]
    extra = [path for path in after if path not in before]
    details = [
        *([f"it lacks {listed(missing)}"] if missing else []),
        *([f"it adds {listed(extra)}"] if extra else []),
    ]
    raise TypeError(
        f"{where}: the scan body {function_location(f)} must return a carry with the structure of "
        f"init; {' and '.join(details) or 'its containers differ'}\n\n"
        + table(("carry", "structure"), [("init", str(given)), ("returned", str(returned))], [1])
    )


def _check_carry_types(where: str, f: Callable[..., Any], init: Any, out: Any) -> None:
    named, returned = leaves_with_names(init, "init"), jax.tree.leaves(out)
    rows = [
        (path, type_name(leaf), type_name(new))
        for (path, leaf), new in zip(named, returned, strict=True)
    ]
    if odd := [i for i, (_, given, new) in enumerate(rows) if given != new]:
        raise TypeError(
            f"{where}: the scan body {function_location(f)} must return a carry with the shapes "
            f"and dtypes of init; {listed([rows[i][0] for i in odd])} "
            f"{'differs' if len(odd) == 1 else 'differ'}\n\n"
            + table(("leaf", "carry in", "carry out"), rows, odd)
        )
