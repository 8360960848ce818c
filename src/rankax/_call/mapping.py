# SPDX-License-Identifier: MIT
"""The arguments of `chunked_vmap` and `chunked_reduce`: checked before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.checks import common_length, positive_int
from rankax._base.trees import leaves_with_names, spread_prefix
from rankax._base.words import plural
from rankax._devices.parts import Parts, Shards, find_parts, part_shape
from rankax._fit.memory import shape_of
from rankax._trace.item import is_axis, with_axis

__all__ = ["ArgumentMapping", "axis_length", "check_axes", "resolve_arguments"]


class ArgumentMapping(NamedTuple):
    """The arguments of one call, flat, and the axis of each that is mapped."""

    leaves: list[Any]
    axes: list[int | None]
    treedef: Any
    length: int

    @property
    def mapped(self) -> list[Any]:
        return [x for x, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]

    @property
    def mapped_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in self.axes if axis is not None)

    @property
    def item_avals(self) -> list[jax.ShapeDtypeStruct]:
        """Return shape and dtype of what one item has of each leaf that is mapped."""
        pairs = zip(self.mapped, self.mapped_axes, strict=True)
        return [with_axis(x, axis) for x, axis in pairs]

    def parts(self, shards: Shards, where: str) -> Parts | None:
        """Return the parts in which the mapped axis lies, if there are any."""
        axes = [(axis,) for axis in self.mapped_axes]
        found = find_parts(shards, self.mapped, axes, (self.length,), where)
        return found[0] if found else None

    def part(self, parts: Parts) -> ArgumentMapping:
        """Return one part of it, of which the mapped leaves are shapes only."""
        leaves = [
            x if axis is None else shape_of(x, part_shape(jnp.shape(x), axis, parts))
            for x, axis in zip(self.leaves, self.axes, strict=True)
        ]
        return self._replace(leaves=leaves, length=self.length // parts.count)

    def arguments(self, mapped: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other leaves in place of those that are mapped."""
        rest = iter(mapped)
        pairs = zip(self.leaves, self.axes, strict=True)
        leaves = [x if axis is None else next(rest) for x, axis in pairs]
        return self.treedef.unflatten(leaves)


def axis_length(value: Any, where: str) -> int:
    is_zero = not isinstance(value, bool) and value == 0
    return 0 if is_zero else positive_int(value, where, "axis_size")


def check_axes(axes: Any, where: str, parameter: str) -> None:
    for path, entry in jax.tree_util.tree_flatten_with_path(axes)[0]:
        if not is_axis(entry):
            raise TypeError(
                f"{where}: {parameter} must hold ints and None, got {type(entry).__name__} "
                f"{entry!r} at {parameter}{jax.tree_util.keystr(path)}"
            )


def _argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Name positional arguments as ``fun`` does; by position where it has no signature."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def resolve_arguments(
    fun: Callable[..., Any],
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Any,
    axis_size: int | None,
) -> ArgumentMapping:
    """Give every leaf its axis and find the common length, or say which leaf does not fit."""
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{where}: in_axes has {plural(len(in_axes), 'entry')} for "
            f"{plural(len(args), 'positional argument')}"
        )
    prefixes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    names = _argument_names(fun, len(args))
    named: list[tuple[str, Any]] = []
    axes: list[int | None] = []
    for name, prefix, arg in [
        *zip(names, prefixes, args, strict=True),
        *((name, 0, kwargs[name]) for name in sorted(kwargs)),
    ]:
        named += leaves_with_names(arg, name)
        try:
            axes += spread_prefix(prefix, arg, name, is_entry=is_axis, what="in_axes")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    table = [(name, x, a) for (name, x), a in zip(named, axes, strict=True) if a is not None]
    if not table and axis_size is None:
        raise ValueError(
            f"{where}: nothing is mapped; map at least one array through in_axes, or give axis_size"
        )
    if axis_size is not None:
        table.append(("axis_size", np.broadcast_to(0, axis_size), 0))
    length = common_length(table, where)
    leaves = [x if a is None else jnp.asarray(x) for (_, x), a in zip(named, axes, strict=True)]
    axes = [None if a is None else a % jnp.ndim(x) for a, x in zip(axes, leaves, strict=True)]
    return ArgumentMapping(leaves, axes, jax.tree.structure((args, kwargs)), length)
