# SPDX-License-Identifier: MIT
"""Bind a call of `chunked_vmap` or `chunked_reduce`; all checks precede the trace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.arrays import check_no_ref
from rankax._base.checks import common_length, positive_int
from rankax._base.functions import argument_names, function_name, noted_errors
from rankax._base.trees import leaves_with_names, spread_prefix
from rankax._base.words import plural
from rankax._call.bound import Bound, tiles_of
from rankax._declare.ragged import Ragged
from rankax._options import Options
from rankax._plan.levels import WHOLE_CHUNKS, Tiles
from rankax._plan.nesting import Nesting, plan_axis
from rankax._trace.item import checked_output_axes, is_axis


@dataclasses.dataclass(frozen=True)
class MappedAxes:
    """The checked parameters of `jax.vmap`, without its function."""

    in_axes: Any
    out_axes: Any = 0
    axis_name: Hashable | None = None
    axis_size: int | None = None


def checked_axes(
    where: str, in_axes: Any, axis_size: Any, out_axes: Any = 0, axis_name: Hashable | None = None
) -> MappedAxes:
    """Check what `jax.vmap` would check at the call; a list of ``in_axes`` becomes a tuple."""
    size = None
    if axis_size is not None:
        is_zero = not isinstance(axis_size, bool) and axis_size == 0
        size = 0 if is_zero else positive_int(axis_size, where, "axis_size")
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    for parameter, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        for path, entry in jax.tree_util.tree_flatten_with_path(axes)[0]:
            if not is_axis(entry):
                raise TypeError(
                    f"{where}: {parameter} must hold ints and None, got {type(entry).__name__} "
                    f"{entry!r} at {parameter}{jax.tree_util.keystr(path)}"
                )
    return MappedAxes(in_axes, out_axes, axis_name, size)


@dataclasses.dataclass(eq=False)
class BoundAxes(Bound):
    """A bound call that maps one axis of each argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_axes: Any
    places: list[int | None]  # where each leaf has the mapped axis
    length: int

    def plan(self, options: Options, tiles: Tiles = WHOLE_CHUNKS) -> Nesting:
        both = enumerate(zip(self.leaves, self.places, strict=True))
        arrays = tuple((i, tuple(leaf.shape), axis) for i, (leaf, axis) in both if axis is not None)
        reduce = "" if options.reduce is None else str(options.reduce)
        length = self.length if self.cut is None else self.cut[0]
        tiles = tiles_of(options, tiles)
        return plan_axis(self.name, length, arrays, options.chunk_size, tiles, reduce)

    @property
    def ranked(self) -> list[int]:
        return [i for i, place in enumerate(self.places) if place is not None]

    def call(self, leaves: Sequence[Any], plan: Nesting) -> Any:
        del plan
        args, kwargs = jax.tree.structure((self.args, self.kwargs)).unflatten(leaves)
        with noted_errors(self.fun, self._described):
            return self.fun(*args, **kwargs)

    def _described(self) -> tuple[Any, ...]:
        """Describe the arguments of one item, for an error of the function."""
        rows: list[tuple[str, ...]] = []
        for path, leaf, axis in zip(self.paths, self.leaves, self.places, strict=True):
            shape = np.shape(leaf) if hasattr(leaf, "shape") else ()
            core = shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
            rows.append((path, str(shape), str(axis), str(core)))
        return ("argument", "shape", "in_axes", "one item"), rows, self.in_front

    def in_one_piece(self, plan: Nesting) -> Any:
        """Call `jax.vmap`, with our errors."""
        returned = False

        @functools.wraps(self.fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal returned
            out = self.evaluate(jax.tree.leaves((args, kwargs)), plan)
            checked_output_axes(self.fun, out, self.out_axes)
            returned = True
            return out

        vmapped = jax.vmap(
            checked, self.in_axes, self.out_axes, axis_name=self.axis_name, axis_size=self.length
        )
        try:
            return vmapped(*self.args, **self.kwargs)
        except ValueError:
            if returned and self.axis_name is None:  # `fun` itself did not fail
                self.trace(plan).check_unmapped_outputs()
            raise


def _refuse_rows(arg: Any, name: str, places: Sequence[int | None], where: str) -> None:
    """Refuse to map the rows of ragged items as if they were items."""
    nodes = leaves_with_names(arg, name, stops=lambda node: isinstance(node, Ragged))
    for (path, node), place in zip(nodes, places, strict=True):
        is_whole = isinstance(node, Ragged) and node.values.shape[:1] == (node.lengths.sum(),)
        if is_whole and place is not None:
            raise TypeError(
                f"{where}: {path} is Ragged, and its rows are not items of a batch; use "
                'rankax.auto_vmap with a rank such as "n 3", or map other arguments only'
            )


def bind_axes(
    fun: Callable[..., Any],
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: MappedAxes,
    *,
    batched: bool = False,
) -> BoundAxes:
    """Give every leaf its axis and find the common length, or say which leaf does not fit."""
    in_axes, axis_size = axes.in_axes, axes.axis_size
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{where}: in_axes has {plural(len(in_axes), 'entry')} for "
            f"{plural(len(args), 'positional argument')}"
        )
    prefixes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    names = argument_names(fun, len(args))
    named: list[tuple[str, Any]] = []
    places: list[int | None] = []
    for name, prefix, arg in [
        *zip(names, prefixes, args, strict=True),
        *((name, 0, kwargs[name]) for name in sorted(kwargs)),
    ]:
        found = leaves_with_names(arg, name)
        named += found
        try:
            places += spread_prefix(prefix, arg, name, is_entry=is_axis, what="in_axes")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        _refuse_rows(arg, name, places[len(places) - len(found) :], where)
    table = [(name, x, a) for (name, x), a in zip(named, places, strict=True) if a is not None]
    if not table and axis_size is None:
        raise ValueError(
            f"{where}: nothing is mapped; map at least one array through in_axes, or give axis_size"
        )
    if axis_size is not None:
        table.append(("axis_size", np.broadcast_to(0, axis_size), 0))
    for name, x, _ in table:
        check_no_ref(x, where, name)
    length = common_length(table, where)
    leaves = [x if a is None else jnp.asarray(x) for (_, x), a in zip(named, places, strict=True)]
    places = [None if a is None else a % jnp.ndim(x) for a, x in zip(places, leaves, strict=True)]
    call = fun, function_name(fun), where, leaves, [name for name, _ in named]
    own = args, kwargs, in_axes, places, length
    out, name = axes.out_axes, axes.axis_name
    return BoundAxes(*call, *own, batched=batched, out_axes=out, axis_name=name)
