# SPDX-License-Identifier: MIT
"""The body of a scan, traced once, as a step that several loops can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from rankax._base.functions import function_location, noted_errors, traced_as
from rankax._base.trees import check_leaves, leaves_with_names, type_name
from rankax._base.words import listed, table
from rankax._scan.arguments import ScanCall
from rankax._trace.derivatives import keep_rules

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Body:
    """A traced scan body. It holds no arrays: `step` takes those that the body closes over.

    A step takes and returns lists of leaves, because a class that checks or converts its leaves
    must only see the values of one step, or those of all steps.
    """

    jaxpr: Any
    carry_tree: Any
    y_tree: Any

    @property
    def y_avals(self) -> list[Any]:
        """The shapes and dtypes of the output of a step."""
        return [y.aval for y in self.jaxpr.outvars[self.carry_tree.num_leaves :]]

    def step(self, consts: list[Any]) -> Step:
        carry_leaves = self.carry_tree.num_leaves

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            out = jax.core.eval_jaxpr(self.jaxpr, consts, *jax.tree.leaves((carry, x)))
            return out[:carry_leaves], out[carry_leaves:]

        return step


class ScanArrays(NamedTuple):
    """All arrays that a scan reads."""

    consts: list[Any]
    init: list[Any]
    xs: list[Any]


def trace_body(call: ScanCall) -> tuple[Body, ScanArrays]:
    """Trace the body for one step and check what it returns.

    As in `jax.lax.scan`, a weakly typed leaf of ``init`` takes the dtype that the body returns for
    it, which costs a second trace.
    """
    carry, tree = jax.tree.flatten(call.init)
    items, x_tree = jax.tree.flatten(call.xs)
    x = [
        jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=_is_weak(leaf)) for leaf in items
    ]
    y_trees: list[Any] = []

    def described() -> tuple[Any, ...]:
        pairs = leaves_with_names(call.init, "carry")
        pairs += leaves_with_names(x_tree.unflatten(x), "x")
        return ("argument", "type"), [(name, type_name(leaf)) for name, leaf in pairs], ()

    @traced_as(call.f)
    def on_leaves(carry: list[Any], x: list[Any]) -> list[Any]:
        with noted_errors(call.f, described):
            out = call.f(tree.unflatten(carry), x_tree.unflatten(x))
        _check_pair(call, out)
        check_leaves(call.site, out[0], "the returned carry")
        check_leaves(call.site, out[1], "y")
        check_carry_structure(f"{call.site}: the scan body", call.f, ("init", call.init), out[0])
        y_trees.append(jax.tree.structure(out[1]))
        return jax.tree.leaves(tuple(out))

    trace = jax.make_jaxpr(on_leaves)
    jaxpr = trace(carry, x)
    pairs = zip(carry, jaxpr.out_avals[: len(carry)], strict=True)
    promoted = [promote_weak_type(leaf, out) for leaf, out in pairs]
    if any(a.dtype != b.dtype for a, b in zip(carry, promoted, strict=True)):
        jaxpr = trace(promoted, x)
    names = [name for name, _ in leaves_with_names(call.init, "init")]
    types = zip(names, promoted, jaxpr.out_avals, strict=False)
    check_carry_types(f"{call.site}: the scan body", call.f, "init", types)
    jaxpr = keep_rules(jaxpr)
    return Body(jaxpr.jaxpr, tree, y_trees[-1]), ScanArrays(list(jaxpr.consts), promoted, items)


def _is_weak(leaf: jax.Array) -> bool:
    return getattr(leaf, "weak_type", False)  # PRNG keys have no such attribute


def promote_weak_type(leaf: jax.Array, out: Any) -> jax.Array:
    """Give a weakly typed leaf of a first carry the dtype that the body returns for it."""
    if not _is_weak(leaf) or leaf.dtype == out.dtype:
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf, out.dtype))


def _check_pair(call: ScanCall, out: Any) -> None:
    is_sequence = isinstance(out, (tuple, list))
    if is_sequence and len(out) == 2:
        return
    came = f"{type(out).__name__} of {len(out)}" if is_sequence else type_name(out)
    raise TypeError(
        f"{call.site}: the scan body {function_location(call.f)} must return a pair (carry, y), "
        f"got {came}"
    )


def check_carry_structure(
    site: str, fun: Callable[..., Any], init: tuple[str, Any], carry: Any
) -> None:
    """Refuse a returned carry of another structure than ``init``, which is a name and a value."""
    name, first = init
    before, after = jax.tree.structure(first), jax.tree.structure(carry)
    if before == after:
        return
    given, returned = (dict(leaves_with_names(tree, name)) for tree in (first, carry))
    missing = [path for path in given if path not in returned]
    extra = [path for path in returned if path not in given]
    details = [f"it lacks {listed(missing)}"] if missing else []
    details += [f"it adds {listed(extra)}"] if extra else []
    raise TypeError(
        f"{site} {function_location(fun)} must return a carry with the "
        f"structure of {name}; {' and '.join(details) or 'its containers differ'}\n\n"
        + table(("carry", "structure"), [(name, str(before)), ("returned", str(after))], [1])
    )


def check_carry_types(
    site: str, fun: Callable[..., Any], init: str, leaves: Iterable[tuple[str, Any, Any]]
) -> None:
    """Refuse a carry whose leaves, given by name, type in and type out, change their types."""
    rows = [(name, type_name(leaf), type_name(new)) for name, leaf, new in leaves]
    if odd := [i for i, (_, before, after) in enumerate(rows) if before != after]:
        raise TypeError(
            f"{site} {function_location(fun)} must return a carry with the "
            f"shapes and dtypes of {init}; {listed([rows[i][0] for i in odd])} "
            f"{'differs' if len(odd) == 1 else 'differ'}\n\n"
            + table(("leaf", "carry in", "carry out"), rows, odd)
        )
