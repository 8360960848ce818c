# SPDX-License-Identifier: MIT
"""The nest of a plan: one map per level (a `jax.vmap` or a loop) around the program of one item."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from rankax.core.base.arrays import in_32_bits, is_narrow, is_plain
from rankax.core.loop.loop import map_level, on_explicit_mesh
from rankax.core.loop.shared import is_multiplied, narrowed
from rankax.core.loop.spec import number_items, vmap_level
from rankax.core.plan.schedule import Level, Plan, at_most
from rankax.core.protocols import NO_RULES, Observer, Pass, Rules, Walker
from rankax.core.reduce.run import GivenMask, Reductions, RowReduction
from rankax.core.trace.derivatives import (
    call_with_derivative_of,
    makes_constant_ref,
    makes_ref,
    without_derivative,
    writes_ref,
)
from rankax.core.trace.programs import ItemProgram


@dataclasses.dataclass(frozen=True)
class Nest:
    """The nested maps of one call, or of one part of it; hashable, as a key of kept programs.

    Attributes
    ----------
    plan : Plan
        With the settings of a walk in its levels. If it belongs to a part, its splits are numbered
        within the whole batch.
    inputs : tuple of int
        The leaves that an item takes. Some are mapped by no level: those with one item along an
        axis of this part.
    reductions : Reductions or None
        What the reduced levels fold.
    differentiable : bool
        Whether the walk may be differentiated.
    rules : Rules
        What the compiler asks for.
    passes : tuple of Pass
        What changes the program of an item.
    takes_chunks : bool
        Whether the program of an item calls the kernel with all items of a chunk.
    before : callable or None
        What evaluates a part of an item over fewer axes: returns the item that is walked, and its
        inputs.
    """

    plan: Plan
    inputs: tuple[int, ...]
    reductions: Reductions | None = None
    differentiable: bool = True
    rules: Rules = NO_RULES
    passes: tuple[Pass, ...] = ()
    takes_chunks: bool = False
    before: Callable[[ItemProgram, Sequence[Any]], tuple[ItemProgram, list[Any]]] | None = None

    @property
    def walker(self) -> Walker | None:
        """What walks all levels in place of loops."""
        return next((level.walker for level in self.plan.levels if not level.reduced), None)

    def walk(self, item: ItemProgram, leaves: Sequence[Any]) -> list[Any]:
        """Evaluate an item over all levels: kept ones store what is inside, reduced ones fold it.

        Parameters
        ----------
        item : ItemProgram
            Takes one item of each input, then one number for each split.
        leaves : sequence of arrays
            The inputs.

        Returns
        -------
        list
            The outputs; with ``reductions``, one value for each of them. Kept axes of the batch
            come first; outputs that are kept whole have all axes of the batch.
        """
        if self.before is not None:
            item, leaves = self.before(item, leaves)
        if not at_most(self.plan.in_flight, 1):
            item.check_order()
        arrays = self._reshaped([on_explicit_mesh(jnp.asarray(x)) for x in leaves])
        mapped = [arrays.pop(position) for position in self.plan.mapped]
        # Without the constants, because JAX keeps the walk and they may be tracers. From JAX 0.12
        # on, a jaxpr holds its constants; replacing its variables drops them.
        jaxpr = item.closed.jaxpr.replace(constvars=list(item.closed.jaxpr.constvars))
        consts = len(jaxpr.invars) - len(item.closed.in_avals)  # some versions have them first
        walk = _Walk(self, dataclasses.replace(item, closed=None), jaxpr, consts)
        operands = list(item.closed.consts), mapped, arrays
        evaluated = walk.evaluated
        if self.differentiable and evaluated.loses_refs(item.closed):
            forward = evaluated.not_differentiated().values(operands, back=False)
            return without_derivative(
                forward,
                f"{item.site}: it uses a jax.Ref inside a loop over chunks, where JAX gets "
                "derivatives wrong; use no Ref, or evaluate all items at once",
            )
        if is_plain():
            return evaluated.not_differentiated().values(operands, back=False)
        if not self.differentiable or evaluated.serves_both(operands):
            return evaluated.values(operands, back=False)
        # A user-defined function may change between calls and stay the same object.
        is_ordered = self.reductions is not None and self.reductions.are_ordered
        key = None if is_ordered else self
        forward = functools.partial(evaluated.not_differentiated().values, back=False)

        def backward(operands: Operands) -> list[Any]:
            return walk.differentiated.values(operands, back=True)

        return call_with_derivative_of(backward, forward, operands, key=key)

    def map_at_once(self, fun: Callable[..., list[Any]], leaves: Sequence[Any]) -> list[jax.Array]:
        """Map a function of all inputs over levels without loops, as one would by hand."""
        arrays = self._reshaped(leaves)
        if self.plan.splits:
            fun = number_items(fun, self.plan.splits, self.plan.levels, self.plan.batch_shape)
        for level in reversed(self.plan.levels):
            fun = vmap_level(fun, level)
        return self.in_batch_shape(fun(*arrays.values()))

    def _reshaped(self, leaves: Sequence[Any]) -> dict[int, jax.Array]:
        """Return the inputs by position, without stretched axes."""
        leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        arrays = dict(zip(self.inputs, leaves, strict=True))
        for position, shape in self.plan.reshaped:
            if position in arrays:
                arrays[position] = jnp.reshape(arrays[position], shape)
        return arrays

    def in_batch_shape(self, outs: Sequence[jax.Array]) -> list[jax.Array]:
        """Give outputs the axes of the batch.

        A level may cover more than one axis of the batch, or none where it has length 1.
        """
        sizes, shape = tuple([level.size for level in self.plan.levels]), self.plan.batch_shape
        if self.walker is not None:
            sizes = (math.prod(sizes),)
        if sizes == shape:
            return list(outs)
        return [jnp.reshape(out, shape + out.shape[len(sizes) :]) for out in outs]


# The constants of the item, the leaves that the levels map, and the other inputs by position.
Operands = tuple[list[Any], list[Any], Mapping[int, Any]]


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The walk of one item over the levels of a nest."""

    nest: Nest
    item: ItemProgram  # without its program
    jaxpr: Jaxpr
    consts: int  # how many inputs of the program are constants

    @functools.cached_property
    def evaluated(self) -> _Walk:
        """The walk that is evaluated."""
        if any(level.is_loop and level.walker is None for level in self.nest.plan.levels):
            return self._as_computed(self.nest.rules.evaluated(self.jaxpr, self._mapped_inputs))
        return self._as_computed(self.jaxpr)

    def not_differentiated(self) -> _Walk:
        """Return the walk whose derivative is that of another one."""
        return self._with_levels(
            [dataclasses.replace(level, differentiable=False) for level in self.nest.plan.levels]
        )

    def _with_levels(self, levels: Sequence[Level]) -> _Walk:
        plan = dataclasses.replace(self.nest.plan, levels=tuple(levels))
        return dataclasses.replace(self, nest=dataclasses.replace(self.nest, plan=plan))

    @functools.cached_property
    def differentiated(self) -> _Walk:
        """The walk that is differentiated."""
        back = (each.back(self.jaxpr, self.item.site) for each in self.nest.passes)
        jaxpr = next((each for each in back if each is not None), None)
        if jaxpr is None:
            has_loops = any(level.is_loop for level in self.nest.plan.levels)
            jaxpr = self._kept_back if has_loops else self.jaxpr
        return self._as_computed(jaxpr)

    @functools.cached_property
    def _kept_back(self) -> Any:
        # Derivatives of reductions read another layout of the inputs, so no copy pays there.
        mapped = self._mapped_inputs if self.nest.reductions is None else []
        return self.nest.rules.differentiated(self.jaxpr, mapped)

    def _as_computed(self, jaxpr: Jaxpr) -> _Walk:
        for each in self.nest.passes:
            jaxpr = each.both(jaxpr)
        return dataclasses.replace(self, jaxpr=jaxpr)

    @property
    def _mapped_inputs(self) -> list[int]:
        """The inputs of the program that levels map."""
        nest = self.nest
        by_level = [level.in_axes for level in nest.plan.levels]
        in_axes = zip(nest.plan.mapped, *by_level, strict=False)
        mapped = [i for i, *axes in in_axes if set(axes) != {None}]
        return [self.consts + nest.inputs.index(i) for i in mapped]

    def values(self, operands: Operands, *, back: bool) -> list[Any]:
        """Walk the levels, in the way that is evaluated or in the one that is differentiated."""
        consts, mapped, others = self._in_32_bits(operands) if back else operands
        if self.nest.reductions is not None:
            walk, mapped = (self, mapped) if back else self._stored(mapped)
            return walk._reduced((consts, mapped, others), back=back)
        fun = self._of_items(consts, others)
        if (walker := self.nest.walker) is not None:
            outs = walker.walk(fun, mapped, self.nest.plan.levels, self.item, back=back)
            return self.nest.in_batch_shape(outs)
        if None in self.out_axes:
            self._with(consts).check_unmapped_outputs()
        for level in reversed(self.nest.plan.levels):
            fun = map_level(fun, level, self.out_axes, back=back)
        return self.nest.in_batch_shape(fun(*mapped))

    def _in_32_bits(self, operands: Operands) -> Operands:
        """Return the operands of a derivative; what several items share has at least 32 bits."""
        consts, mapped, others = operands
        pairs = zip(mapped, self._are_shared, strict=True)
        mapped = [in_32_bits(x) if shared else x for x, shared in pairs]
        others = {i: in_32_bits(x) for i, x in others.items()}
        return list(map(in_32_bits, consts)), mapped, others

    @property
    def _are_shared(self) -> list[bool]:
        """Which of the leaves that the levels map are mapped by some of them only."""
        by_level = zip(*(level.in_axes for level in self.nest.plan.levels), strict=False)
        return [None in axes for axes, _ in zip(by_level, self.nest.plan.mapped, strict=False)]

    def _stored(self, mapped: list[Any]) -> tuple[_Walk, list[Any]]:
        """Return the inputs of a reduction as it reads them best, and the walk over them."""
        stored, levels = self.nest.rules.stored(mapped, self.nest.plan.levels)
        return self._with_levels(levels), stored

    def loses_refs(self, closed: ClosedJaxpr) -> bool:
        """Whether JAX gets derivatives wrong: those of a loop whose body uses a `jax.Ref`.

        Such a body loses what it writes into one that it makes, if the first value is a constant. A
        `jax.Ref` of the caller is written again where an item is evaluated again.
        Test: ``tests/upstream/test_upstream.py``.
        """
        if not any(level.is_loop for level in self.nest.plan.levels):
            return False
        again = self.nest.reductions is not None and not self._row(0, ()).is_linear
        is_made = makes_ref(closed.effects) and makes_constant_ref(closed.jaxpr)
        return is_made or (again and writes_ref(closed.effects))

    @property
    def out_axes(self) -> tuple[int | None, ...]:
        """Where each level has its items in the outputs."""
        axes = self.item.out_axes
        return axes if len(self.nest.plan.levels) == 1 else (0,) * len(axes)

    def _reduced(self, operands: Operands, *, back: bool) -> list[Any]:
        consts, mapped, others = operands
        plan, row = self.nest.plan, self._row(len(consts), tuple(others))
        if back and not others and not plan.is_empty:
            levels = plan.levels
            masks = {m: GivenMask.of(i, consts, mapped, levels) for m, i in self._masks.items()}
            if {own.mask for own in self.item.outputs} == {*masks} and len(masks) == 1:
                ((position, mask),) = masks.items()
                masks[position], mapped = mask.replaced(mapped, levels)
            row = dataclasses.replace(row, masks=masks)

        def fun(*items: Any) -> list[Any]:
            return row.values([*consts, *others.values()], items, back=back)

        entries = row.reductions.entries
        kept = [level for level in self.nest.plan.levels if not level.reduced]
        for level in reversed(kept):
            fun = map_level(fun, level, [0] * len(entries), back=back)
        values = fun(*mapped)
        kept_shape = tuple(
            [n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced]
        )
        row_shape = tuple([plan.batch_shape[axis] for axis in plan.reduced])

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

    def _row(self, count: int, others: tuple[int, ...]) -> RowReduction:
        """Return the reduction of a row, for which inputs that no level maps are constants too."""
        assert self.nest.reductions is not None

        def item_of(consts: Sequence[Any]) -> Callable[..., list[Any]]:
            own = dict(zip(others, consts[count:], strict=True))
            return self._of_items(consts[:count], own)

        return RowReduction(
            item_of,
            tuple([level for level in self.nest.plan.levels if level.reduced]),
            self.item.outputs,
            self.nest.reductions,
            self.jaxpr,
            self.nest.rules,
        )

    @property
    def _masks(self) -> dict[int, int]:
        """The masks among the outputs that are arguments, each with its place among the leaves."""
        nest = self.nest
        inputs = dict(zip(self.jaxpr.invars[self.consts :], nest.inputs, strict=False))
        masks = {own.mask for own in self.item.outputs if own.mask is not None}
        variables = {mask: self.jaxpr.outvars[mask] for mask in masks}
        given = {m: inputs.get(v) for m, v in variables.items() if not isinstance(v, Literal)}
        return {m: nest.plan.mapped.index(i) for m, i in given.items() if i in nest.plan.mapped}

    def _with(self, consts: Sequence[Any]) -> ItemProgram:
        """Return the item with these constants."""
        return dataclasses.replace(self.item, closed=ClosedJaxpr(self.jaxpr, list(consts)))

    def _of_items(
        self, consts: Sequence[Any], others: Mapping[int, Any]
    ) -> Callable[..., list[Any]]:
        """Return the item as a function of the leaves that the levels map, and of its places."""
        item, inputs, plan = self._item_of(consts), self.nest.inputs, self.nest.plan

        def of_mapped(*items: Any) -> list[Any]:
            here = {**others, **dict(zip(plan.mapped, items, strict=False))}
            return item(*(here[i] for i in inputs), *items[len(plan.mapped) :])

        fun = of_mapped if others else item
        if not plan.splits:
            return fun
        return number_items(fun, plan.splits, plan.levels, plan.batch_shape)

    def _item_of(self, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return the item, which takes what is `in_32_bits`."""
        jaxpr, each = self.jaxpr, not self.nest.takes_chunks
        variables = [*jaxpr.constvars, *jaxpr.invars]
        if not any(is_narrow(v.aval) for v in variables):
            return self._with(consts)
        mapped = [jaxpr.invars[i] for i in self._mapped_inputs]
        multiplied = [v for v in mapped if is_multiplied(v, jaxpr)]

        def item(*leaves: Any) -> list[Any]:
            def own(x: Any, var: Any) -> Any:
                dtype = var.aval.dtype
                if x.dtype == dtype:
                    return x
                return narrowed(x, dtype, leaves if each and var not in multiplied else ())

            values = [own(x, v) for x, v in zip((*consts, *leaves), variables, strict=True)]
            return self._with(values[: len(consts)])(*values[len(consts) :])

        return item

    def serves_both(self, operands: Operands) -> bool:
        """Whether the walk that is evaluated is also the best one to differentiate.

        It is not if lanes walk it, if a derivative walks other chunks or another program, or if
        items share floats of less than 32 bits (`narrowed`). Nor, of a map, if chunks overlap or
        are read by index, because a derivative would copy outputs; nor, of a reduction, if it is
        not linear, has a mask, takes steps in groups, goes back through a few items of each row,
        or if tiles overlap, because a derivative must not count an item twice.
        """
        consts, mapped, others = operands
        has_walker = any(level.walker is not None for level in self.nest.plan.levels)
        if has_walker or any(each.differs_back(self.jaxpr) for each in self.nest.passes):
            return False
        loops = [level for level in self.nest.plan.levels if level.is_loop]
        some = itertools.compress(mapped, self._are_shared)
        if any(map(is_narrow, (*consts, *some, *others.values()))):
            return False
        if self.nest.reductions is not None:
            row = self._row(0, ())
            stored, _ = self._stored(list(mapped))
            as_jax_does = row.is_at_once and not (loops and row.chooses_few)
            if not (row.is_linear or as_jax_does) or stored.nest != self.nest:
                return False
            if row.has_groups:
                return False
        if any(level.derivative or not level.chunks.even for level in loops):
            return False
        outs: list[Any] = [v.aval for v in self.jaxpr.outvars]
        shapes = [x.shape for x in mapped]
        for level in self.nest.plan.levels:
            pairs = list(zip(shapes, level.in_axes, strict=False))
            # The chunks of all others are read by index, or written.
            rows = [axis in (None, 0) and 1 not in shape[1:] for shape, axis in pairs]
            if level.is_loop and not all(rows):
                return False
            shapes = [x if a is None else (*x[:a], *x[a + 1 :]) for x, a in pairs]
        pairs = zip(self.out_axes, outs, strict=True)
        joined = all(axis == 0 and 1 not in out.shape for axis, out in pairs)
        return not loops or (joined and not self.nest.rules.differs_back(self.jaxpr))


def nest_of(
    plan: Plan,
    inputs: tuple[int, ...],
    *,
    reductions: Reductions | None = None,
    rules: Rules = NO_RULES,
    passes: tuple[Pass, ...] = (),
    takes_chunks: bool = False,
    before: Any = None,
    checkpoint: bool = True,
    differentiable: bool = True,
    observer: Observer | None = None,
) -> Nest:
    """Build the nested maps of a plan.

    Parameters
    ----------
    checkpoint : bool
        Whether a reverse pass computes each chunk again.
    observer : Observer, optional
        Who is told of the steps of the outermost loop.
    plan, inputs, reductions, rules, passes, takes_chunks, before, differentiable
        As in `Nest`.
    """
    levels: list[Level] = []
    for around, level in enumerate(plan.levels):
        may_report = level.is_loop or level.reduced or level.walker
        levels.append(
            dataclasses.replace(
                level,
                # A numbered level passes on the places along the levels around it.
                in_axes=level.in_axes + (None,) * around if plan.splits else level.in_axes,
                numbered=bool(plan.splits),
                checkpoint=checkpoint and differentiable,  # otherwise nothing is computed again
                differentiable=differentiable,
                observer=observer if may_report else None,
            )
        )
        observer = None if may_report else observer
    plan = dataclasses.replace(plan, levels=tuple(levels))
    return Nest(plan, inputs, reductions, differentiable, rules, passes, takes_chunks, before)
