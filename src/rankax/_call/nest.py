# SPDX-License-Identifier: MIT
"""The nest of a plan: one map per level (a `jax.vmap` or a loop) around the program of one item."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rankax._lockstep.call import map_in_lockstep, walk_in_lanes
from rankax._loop.access import on_explicit_mesh
from rankax._loop.loop import map_level
from rankax._loop.spec import LoopSpec, number_items, vmap_level
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._plan.nesting import Nesting
from rankax._progress.bars import Progress
from rankax._reduce.passes import RowReduction
from rankax._reduce.run import Reductions
from rankax._scan.while_loop import has_plain_loop, with_reverse_pass
from rankax._trace.derivatives import call_with_derivative_of
from rankax._trace.functions import with_own_functions
from rankax._trace.kept_residuals import keep_residuals
from rankax._trace.kept_values import keep_inputs, keep_values
from rankax._trace.programs import ClosedJaxpr, ItemProgram

_MOST_COMPONENTS = 16  # of an item that is stored by component
_MOST_BYTES_COPIED = 2**19
_LOOPS_ARE_NATIVE = jax.__version_info__ >= (0, 12)

# An option with the name of a field of `LoopSpec` goes into every loop. Only one loop reports.
_LOOP_OPTIONS = {field.name for field in dataclasses.fields(LoopSpec)} - {"progress", "reduced"}


Begins = Mapping[int, Any]  # where a part begins, by axis of the batch


@dataclasses.dataclass(frozen=True)
class Nest:
    """The nested maps of one call, or of one part of it; hashable, as a key of kept programs.

    Attributes
    ----------
    nesting : Nesting
        If it is that of a part, its splits are numbered within the whole batch.
    specs : tuple of LoopSpec
        One for each level of the plan, outermost first.
    inputs : tuple of int
        The leaves that an item takes. Levels map not all of them if a part has only one item along
        an axis.
    reductions : Reductions or None
        What the reduced levels fold.
    differentiable : bool
        Whether the walk may be differentiated.
    """

    nesting: Nesting
    specs: tuple[LoopSpec, ...]
    inputs: tuple[int, ...]
    reductions: Reductions | None
    differentiable: bool

    @property
    def plan(self) -> BatchPlan:
        """The plan that is printed."""
        return self.nesting.plan

    def walk(
        self, item: ItemProgram, leaves: Sequence[Any], begins: Begins | None = None
    ) -> list[Any]:
        """Evaluate an item over all levels: kept ones store what is inside, reduced ones fold it.

        Parameters
        ----------
        item : ItemProgram
            Takes one item of each input, then one number for each split.
        leaves : sequence of arrays
            The inputs.
        begins : mapping, optional
            Where a part of a batch begins, if keys are split (see `number_items`).

        Returns
        -------
        list
            The outputs; with ``reductions``, one value for each of them. Kept axes of the batch
            come first; outputs that are kept whole have all axes of the batch.
        """
        if self.plan.in_flight > 1:
            item.check_order()
        arrays = self._reshaped([on_explicit_mesh(jnp.asarray(x)) for x in leaves])
        mapped = [arrays.pop(position) for position in self.nesting.mapped]
        # Without the constants, because JAX keeps the walk and they may be tracers. From JAX 0.12
        # on, a jaxpr holds its constants; replacing its variables drops them.
        jaxpr = item.closed.jaxpr.replace(constvars=list(item.closed.jaxpr.constvars))
        alone = dataclasses.replace(item, closed=None)
        walk = differentiated = _Walk(self, alone, jaxpr)
        if any(spec.is_loop and not spec.lanes for spec in self.specs):
            jaxpr = keep_values(jaxpr)
            differentiated = _Walk(self, alone, with_own_functions(jaxpr))
            in_axes = zip(self.nesting.mapped, *(spec.in_axes for spec in self.specs), strict=False)
            consts = len(jaxpr.invars) - len(item.closed.in_avals)  # some versions have them first
            at = [consts + self.inputs.index(i) for i, *axes in in_axes if set(axes) != {None}]
            walk = _Walk(self, alone, with_own_functions(keep_inputs(jaxpr, at)))
            # Derivatives of reductions read another layout of the inputs, so there it does not pay.
            differentiated = walk if self.reductions is None else differentiated
        operands = list(item.closed.consts), mapped, arrays, begins or {}
        if not self.differentiable or walk.is_linear(mapped):
            return walk.values(operands, back=False)
        # A user-defined function may change between calls and stay the same object.
        is_ordered = self.reductions is not None and self.reductions.are_ordered
        evaluated = functools.partial(walk.values, back=False)
        key = None if is_ordered else self
        return call_with_derivative_of(differentiated.differentiated, evaluated, operands, key=key)

    def map_at_once(self, fun: Callable[..., list[Any]], leaves: Sequence[Any]) -> list[jax.Array]:
        """Map a function of all inputs over levels without loops, as one would by hand."""
        arrays = self._reshaped(leaves)
        if self.nesting.splits:
            fun = number_items(fun, self.nesting.splits, self.plan.levels, self.plan.batch_shape)
        for spec in reversed(self.specs):
            fun = vmap_level(fun, spec)
        return self.in_batch_shape(fun(*arrays.values()))

    def _reshaped(self, leaves: Sequence[Any]) -> dict[int, jax.Array]:
        """Return the inputs by position, without stretched axes."""
        leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        arrays = dict(zip(self.inputs, leaves, strict=True))
        for position, shape in self.nesting.reshaped:
            if position in arrays:
                arrays[position] = jnp.reshape(arrays[position], shape)
        return arrays

    def in_batch_shape(self, outs: Sequence[jax.Array]) -> list[jax.Array]:
        """Give outputs the axes of the batch.

        A level may cover more than one axis of the batch, or none where it has length 1.
        """
        sizes, shape = tuple(level.size for level in self.plan.levels), self.plan.batch_shape
        if self.plan.lanes is not None:
            sizes = (math.prod(sizes),)
        if sizes == shape:
            return list(outs)
        return [jnp.reshape(out, shape + out.shape[len(sizes) :]) for out in outs]


# The constants of the item, the leaves that the levels map, the other inputs by position, and where
# a part begins.
Operands = tuple[list[Any], list[Any], Mapping[int, Any], Begins]


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The walk of one item over the levels of a nest."""

    nest: Nest
    item: ItemProgram  # without its program
    jaxpr: Any

    def values(self, operands: Operands, *, back: bool) -> list[Any]:
        """Walk the levels, in the pass that is evaluated or in the one that is differentiated."""
        consts, mapped, others, begins = operands
        if self.nest.reductions is not None:
            walk, mapped = self._by_component(mapped, back=back)
            return walk._reduced((consts, mapped, others, begins), back=back)
        fun = self._of_items(consts, others, begins)
        if self.nest.plan.lanes is not None:
            by = map_in_lockstep if back else walk_in_lanes
            return self.nest.in_batch_shape(by(fun, mapped, self.nest.specs, self.item))
        if None in self.out_axes:
            self._with(consts).check_unmapped_outputs()
        for spec in reversed(self.nest.specs):
            fun = map_level(fun, spec, self.out_axes, back=back)
        return self.nest.in_batch_shape(fun(*mapped))

    def _by_component(self, mapped: list[Any], *, back: bool) -> tuple[_Walk, list[Any]]:
        """Store small vectors by component, where that is faster; return the walk over them.

        From JAX 0.12 on, only the pass that is evaluated gains: the other one is up to three times
        as fast item by item, because sums over the items of a tile would copy it there.
        """
        plan = self.nest.plan
        # A plan of `chunked_reduce` names no leaves. It has one row, whose eager calls would take
        # longer by the copy than they gain.
        if not plan.leaves or plan.lanes is not None or (back and _LOOPS_ARE_NATIVE):
            return self, mapped
        mapped, specs = _lanes_last(mapped, self.nest.specs)
        return dataclasses.replace(self, nest=dataclasses.replace(self.nest, specs=specs)), mapped

    def differentiated(self, operands: Operands) -> list[Any]:
        """Walk the levels in the pass that is differentiated."""
        if self._reverses_loops:
            jaxpr = with_reverse_pass(self.jaxpr, self.item.where)
        elif any(spec.is_loop for spec in self.nest.specs):
            jaxpr = self._with_residuals
        else:
            jaxpr = self.jaxpr
        return dataclasses.replace(self, jaxpr=jaxpr).values(operands, back=True)

    @functools.cached_property
    def _with_residuals(self) -> Any:
        return keep_residuals(self.jaxpr)

    @property
    def _reverses_loops(self) -> bool:
        is_free = not all(spec.lockstep for spec in self.nest.specs)
        return is_free and has_plain_loop(self.jaxpr.eqns)

    @property
    def out_axes(self) -> tuple[int | None, ...]:
        """Where each level has its items in the outputs."""
        axes = self.item.out_axes
        return axes if len(self.nest.specs) == 1 else (0,) * len(axes)

    def _reduced(self, operands: Operands, *, back: bool) -> list[Any]:
        consts, mapped, others, begins = operands
        plan, row = self.nest.plan, self._row(others, begins)

        def fun(*items: Any) -> list[Any]:
            return row.values(consts, items, back=back)

        entries = row.reductions.entries
        kept = [spec for spec in self.nest.specs if not spec.reduced]
        for spec in reversed(kept):
            fun = map_level(fun, spec, [0] * len(entries), back=back)
        values = fun(*mapped)
        kept_shape = tuple(n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced)
        row_shape = tuple(plan.batch_shape[axis] for axis in plan.reduced)

        def whole(array: jax.Array) -> jax.Array:
            shape = kept_shape + row_shape + array.shape[len(plan.levels) :]
            places = range(len(kept_shape), len(plan.batch_shape))
            return jnp.moveaxis(jnp.reshape(array, shape), places, plan.reduced)

        def of_rows(array: jax.Array) -> jax.Array:
            return jnp.reshape(array, kept_shape + array.shape[len(kept) :])

        return [
            jax.tree.map(whole if entry.is_kept else of_rows, value)
            for entry, value in zip(entries, values, strict=True)
        ]

    def _row(self, others: Mapping[int, Any], begins: Begins) -> RowReduction:
        assert self.nest.reductions is not None
        return RowReduction(
            lambda consts: self._of_items(consts, others, begins),
            tuple(spec for spec in self.nest.specs if spec.reduced),
            self.item.outputs,
            self.nest.reductions,
            self.jaxpr,
        )

    def _with(self, consts: Sequence[Any]) -> ItemProgram:
        """Return the item with these constants."""
        return dataclasses.replace(self.item, closed=ClosedJaxpr(self.jaxpr, list(consts)))

    def _of_items(
        self, consts: Sequence[Any], others: Mapping[int, Any], begins: Begins
    ) -> Callable[..., list[Any]]:
        """Return the item as a function of the leaves that the levels map, and of its places."""
        item, inputs, nesting = self._with(consts), self.nest.inputs, self.nest.nesting

        def of_mapped(*items: Any) -> list[Any]:
            here = {**others, **dict(zip(nesting.mapped, items, strict=False))}
            return item(*(here[i] for i in inputs), *items[len(nesting.mapped) :])

        fun = of_mapped if others else item
        if not nesting.splits:
            return fun
        plan = nesting.plan
        return number_items(fun, nesting.splits, plan.levels, plan.batch_shape, begins)

    def is_linear(self, mapped: Sequence[jax.Array]) -> bool:
        """Whether the pass that is evaluated is also the best one to differentiate."""
        if self.nest.plan.lanes is not None or self._reverses_loops:
            return False
        if self.nest.reductions is not None:
            row = self._row({}, {})
            stored = self._by_component(list(mapped), back=False)[0]
            if not (row.is_linear or row.is_at_once) or stored.nest != self.nest:
                return False
        loops = [spec for spec in self.nest.specs if spec.is_loop]
        if any(spec.derivative or not spec.chunks.even for spec in loops):
            return False
        outs = [v.aval.shape for v in self.jaxpr.outvars]
        shapes = [x.shape for x in mapped]
        for spec in self.nest.specs:
            pairs = list(zip(shapes, spec.in_axes, strict=False))
            # The chunks of all others are read by index, or written.
            rows = [axis in (None, 0) and 1 not in shape[1:] for shape, axis in pairs]
            if spec.is_loop and not all(rows):
                return False
            shapes = [x if a is None else (*x[:a], *x[a + 1 :]) for x, a in pairs]
        pairs = zip(self.out_axes, outs, strict=True)
        joined = all(axis == 0 and 1 not in shape for axis, shape in pairs)
        return not loops or (joined and self._with_residuals is self.jaxpr)


def nest_of(
    plan: Nesting,
    inputs: tuple[int, ...],
    options: Options,
    progress: Progress | None = None,
    *,
    differentiable: bool = True,
) -> Nest:
    """Build the nested maps of a plan; the other arguments are those of `Nest`."""
    splits = plan.splits
    shared = {name: value for name, value in vars(options).items() if name in _LOOP_OPTIONS}
    shared["checkpoint"] = options.checkpoint is not False
    specs: list[LoopSpec] = []
    for around, (level, is_loop) in enumerate(zip(plan.plan.levels, plan.loops, strict=True)):
        may_report = is_loop or level.reduced or level.in_lanes  # only the outermost loop does
        spec = LoopSpec(
            level.chunks,
            # A numbered level passes on the places along the levels around it.
            plan.in_axes[around] + (None,) * around if splits else plan.in_axes[around],
            is_loop,
            reduced=level.reduced,
            numbered=bool(splits),
            progress=progress if may_report else None,
            derivative=level.derivative if is_loop else None,
            lanes=plan.plan.lanes if level.in_lanes else None,
            **shared,
        )
        specs.append(spec)
        progress = None if may_report else progress
    return Nest(plan, tuple(specs), inputs, options.reduce, differentiable)


def _lanes_last(
    leaves: Sequence[Any], specs: Sequence[LoopSpec]
) -> tuple[list[Any], tuple[LoopSpec, ...]]:
    """Store small vectors by component, if a loop over tiles reads them again for every row.

    They are stored with the items on the last axis. Before JAX 0.12, this makes their gradient
    three times as fast: XLA:CPU does not vectorise otherwise. Products of vectors gain later, too.
    This is a copy, so it is bounded by half a megabyte.
    """
    stored, changed = list(leaves), list(specs)
    for i, leaf in enumerate(leaves):
        number, *others = [n for n, spec in enumerate(specs) if spec.in_axes[i] is not None]
        spec = changed[number]
        axis, is_again = spec.in_axes[i], spec.reduced and spec.is_loop and not others
        if axis is not None and is_again and _is_small_vector(leaf, axis):
            stored[i] = jnp.moveaxis(leaf, axis, -1)
            in_axes = (*spec.in_axes[:i], jnp.ndim(leaf) - 1, *spec.in_axes[i + 1 :])
            changed[number] = dataclasses.replace(spec, in_axes=in_axes)
    return stored, tuple(changed)


def _is_small_vector(leaf: Any, axis: int) -> bool:
    if jax.default_backend() != "cpu" or not jnp.issubdtype(jnp.result_type(leaf), jnp.number):
        return False
    components = leaf.size // leaf.shape[axis]
    return 1 < components <= _MOST_COMPONENTS and leaf.nbytes <= _MOST_BYTES_COPIED
