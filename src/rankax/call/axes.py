# SPDX-License-Identifier: MIT
"""A call of a function that is mapped along one axis, as `jax.vmap` maps it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._options import Options
from rankax.call.base import Call, sizes_of
from rankax.core.base.arrays import check_no_ref
from rankax.core.base.messages import (
    argument_names,
    checked_int,
    common_length,
    function_name,
    noted_errors,
    plural,
)
from rankax.core.base.trees import (
    is_sparse,
    leaves_with_names,
    refusal_of_sparse,
    spread_prefix,
)
from rankax.core.plan.schedule import WHOLE_CHUNKS, Plan, Tiles, plan_axis
from rankax.core.reduce.run import Reductions
from rankax.core.trace.programs import ItemProgram, checked_output_axes, is_axis
from rankax.ext.ragged.type import is_ragged


@dataclasses.dataclass(eq=False)
class AxisCall(Call):
    """A bound call that maps one axis of each argument."""

    tree: Any  # of the arguments: a tuple and a dict
    in_axes: Any
    places: list[int | None]  # where each leaf has the mapped axis
    length: int

    def plan(self, options: Options, tiles: Tiles | None = WHOLE_CHUNKS) -> Plan:
        both = enumerate(zip(self.leaves, self.places, strict=True))
        arrays = tuple((i, tuple(leaf.shape), axis) for i, (leaf, axis) in both if axis is not None)
        reduce = "" if options.reduce is None else str(options.reduce)
        length = self.length if self.cut is None else self.cut[0]
        return plan_axis(self.name, length, arrays, *sizes_of(options, tiles), reduce)

    @property
    def ranked(self) -> list[int]:
        return [i for i, place in enumerate(self.places) if place is not None]

    def call(self, leaves: Sequence[Any], plan: Plan) -> Any:
        del plan
        return self._called(*self.tree.unflatten(leaves))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with noted_errors(self.fun, self._described):
            return self.fun(*args, **kwargs)

    def trace(self, plan: Plan, reductions: Reductions | None = None) -> ItemProgram:
        start = 0
        for node in jax.tree.leaves(self.tree.unflatten(self.leaves), is_leaf=is_sparse):
            end = start + jax.tree.structure(node).num_leaves
            if is_sparse(node) and any(place is not None for place in self.places[start:end]):
                path, _, _ = self.paths[start].rpartition(".")
                raise refusal_of_sparse(self.site, path, node)
            start = end
        return super().trace(plan, reductions)

    def _described(self) -> tuple[Any, ...]:
        """Describe the arguments of one item, for an error of the function."""
        rows: list[tuple[str, ...]] = []
        for path, leaf, axis in zip(self.paths, self.leaves, self.places, strict=True):
            shape = np.shape(leaf) if hasattr(leaf, "shape") else ()
            core = shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
            rows.append((path, str(shape), str(axis), str(core)))
        return ("argument", "shape", "in_axes", "one item"), rows, self.form.in_front

    def in_one_piece(self, plan: Plan) -> Any:
        """Call `jax.vmap`, with errors of rankax."""
        returned = False

        @functools.wraps(self.fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal returned
            if self.form.takes_chunks:
                out = self.evaluate(jax.tree.leaves((args, kwargs)), plan)
            else:  # as it is: `jax.vmap` knows how to take apart sparse matrices
                out = self._called(args, kwargs)
            checked_output_axes(self.fun, out, self.out_axes)
            returned = True
            return out

        vmapped = jax.vmap(
            checked, self.in_axes, self.out_axes, axis_name=self.axis_name, axis_size=self.length
        )
        args, kwargs = self.tree.unflatten(self.leaves)
        try:
            return vmapped(*args, **kwargs)
        except ValueError:
            if returned and self.axis_name is None:  # `fun` itself did not fail
                self.trace(plan).check_unmapped_outputs()
            raise


def checked_axes(
    site: str, *, in_axes: Any = 0, axis_size: Any = None, out_axes: Any = 0, axis_name: Any = None
) -> dict[str, Any]:
    """Check what `jax.vmap` would check at the call; return arguments of `bind_axes`."""
    if axis_size is not None:
        refusal = f"{site}: axis_size must be a positive int, got"
        axis_size = checked_int(axis_size, refusal, least=0)
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    axes = {"in_axes": in_axes, "out_axes": out_axes}
    for parameter, prefix in axes.items():
        for path, entry in jax.tree_util.tree_flatten_with_path(prefix)[0]:
            if not is_axis(entry):
                raise TypeError(
                    f"{site}: {parameter} must hold ints and None, got {type(entry).__name__} "
                    f"{entry!r} at {parameter}{jax.tree_util.keystr(path)}"
                )
    return {**axes, "axis_size": axis_size, "axis_name": axis_name}


def bind_axes(
    fun: Callable[..., Any],
    site: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    axis_size: int | None,
    out_axes: Any,
    axis_name: Hashable | None,
) -> AxisCall:
    """Give every leaf its axis and find the common length, or say which leaf does not fit."""
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{site}: in_axes has {plural(len(in_axes), 'entry')} for "
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
        of_arg = leaves_with_names(arg, name)
        named += of_arg
        try:
            places += spread_prefix(prefix, arg, name, is_entry=is_axis, what="in_axes")
        except ValueError as error:
            raise ValueError(f"{site}: {error}") from None
        _refuse_rows(arg, name, places[len(places) - len(of_arg) :], site)
    pairs = list(zip(named, places, strict=True))
    table = [(name, x, axis) for (name, x), axis in pairs if axis is not None]
    if not table and axis_size is None:
        raise ValueError(
            f"{site}: nothing is mapped; map at least one array through in_axes, or give axis_size"
        )
    if axis_size is not None:
        table.append(("axis_size", np.broadcast_to(0, axis_size), 0))
    for name, x, _ in table:
        check_no_ref(x, site, name)
    length = common_length(table, site)
    leaves = [x if axis is None else jnp.asarray(x) for (_, x), axis in pairs]
    places = [None if axis is None else axis % jnp.ndim(x) for (_, x), axis in pairs]
    return AxisCall(
        fun,
        function_name(fun),
        site,
        leaves,
        [name for name, _ in named],
        jax.tree.structure((args, kwargs)),
        in_axes,
        places,
        length,
        out_axes=out_axes,
        axis_name=axis_name,
    )


def _refuse_rows(arg: Any, name: str, places: Sequence[int | None], site: str) -> None:
    """Refuse to map the rows of ragged items as if they were items."""
    nodes = leaves_with_names(arg, name, stops=is_ragged)
    for (path, node), place in zip(nodes, places, strict=True):
        is_whole = is_ragged(node) and node.values.shape[:1] == (node.lengths.sum(),)
        if is_whole and place is not None:
            raise TypeError(
                f"{site}: {path} is Ragged, and its rows are not items of a batch; use "
                'rankax.auto_vmap with a rank such as "n 3", or map only other arguments'
            )
