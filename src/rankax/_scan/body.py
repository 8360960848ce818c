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
from rankax._scan.arguments import check_leaves, type_name
from rankax._trace.derivatives import keep_rules

__all__ = ["Body", "Operands", "Step", "trace_body"]

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Body:
    """A traced scan body, without any array: those that it closes over are handed to `step`.

    Its steps take and return lists of leaves, for a class may check, or convert, what it is rebuilt
    from, and must see nothing but the values of one step, or of all.
    """

    jaxpr: Any
    carry_tree: Any
    y_tree: Any

    def step(self, consts: list[Any]) -> Step:
        held = self.carry_tree.num_leaves

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            out = jax.core.eval_jaxpr(self.jaxpr, consts, *jax.tree.leaves((carry, x)))
            return out[:held], out[held:]

        return step

    def rebuilt(self, carry: list[Any], ys: list[Any]) -> tuple[Any, Any]:
        """Return what a scan has of the lists as what the user's body returned."""
        return self.carry_tree.unflatten(carry), self.y_tree.unflatten(ys)


class Operands(NamedTuple):
    """All arrays that a scan reads."""

    consts: list[Any]
    init: list[Any]
    xs: list[Any]


def trace_body(where: str, f: Callable[..., Any], init: Any, xs: Any) -> tuple[Body, Operands]:
    """Trace ``f`` for one step, and check what it returns.

    As in `jax.lax.scan`, a weakly typed leaf of ``init`` takes the dtype that the body returns for
    it, which costs a second trace.
    """
    leaves, tree = jax.tree.flatten((init, xs))
    held = jax.tree.structure(init).num_leaves
    carry, items = leaves[:held], leaves[held:]
    x = [_as_shape(leaf, leaf.shape[1:]) for leaf in items]
    trees: list[tuple[Any, Any]] = []

    def on_leaves(*leaves: Any) -> list[Any]:
        out = f(*tree.unflatten(leaves))
        _check_pair(where, f, out)
        check_leaves(where, out[0], "the returned carry")
        check_leaves(where, out[1], "y")
        _check_carry_structure(where, f, init, out[0])
        trees.append((jax.tree.structure(out[0]), jax.tree.structure(out[1])))
        return jax.tree.leaves(tuple(out))

    trace = jax.make_jaxpr(on_leaves)
    jaxpr = trace(*carry, *x)
    returned = jaxpr.out_avals[:held]
    pairs = zip(carry, returned, strict=True)
    promoted = [_promote_weak_type(leaf, out) for leaf, out in pairs]
    if any(a.dtype != b.dtype for a, b in zip(carry, promoted, strict=True)):
        jaxpr = trace(*promoted, *x)
        returned = jaxpr.out_avals[:held]
    names = [name for name, _ in leaves_with_names(init, "init")]
    _check_carry_types(where, f, names, promoted, returned)
    jaxpr = keep_rules(jaxpr)
    carry_tree, y_tree = trees[-1]
    return Body(jaxpr.jaxpr, carry_tree, y_tree), Operands(list(jaxpr.consts), promoted, items)


def _as_shape(leaf: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=_is_weak(leaf))


def _is_weak(leaf: jax.Array) -> bool:
    return getattr(leaf, "weak_type", False)  # which PRNG keys do not have


def _promote_weak_type(leaf: jax.Array, out: Any) -> jax.Array:
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


def _check_carry_types(
    where: str, f: Callable[..., Any], names: list[str], init: list[Any], returned: list[Any]
) -> None:
    rows = [
        (path, type_name(leaf), type_name(new))
        for path, leaf, new in zip(names, init, returned, strict=True)
    ]
    if odd := [i for i, (_, given, new) in enumerate(rows) if given != new]:
        raise TypeError(
            f"{where}: the scan body {function_location(f)} must return a carry with the shapes "
            f"and dtypes of init; {listed([rows[i][0] for i in odd])} "
            f"{'differs' if len(odd) == 1 else 'differ'}\n\n"
            + table(("leaf", "carry in", "carry out"), rows, odd)
        )
