# SPDX-License-Identifier: MIT
"""Each argument's own work, once: what an item computes from fewer batch axes than it has.

In ``exp(-|net(x) - net(y)|**2)`` over pairs, ``net(y)`` depends on ``y`` alone. `jax.vmap`
evaluates it once for each ``y``, but a loop over rows of pairs would do so once for each pair. So
the program of an item is split by the axes on which its equations depend: an argument depends on
those along which it is longer than 1. A piece that depends on fewer axes than the item is evaluated
over its own axes, before the loop, in chunks like any map; its results are arguments of the rest,
which broadcast as all arguments do. In the reverse pass, their cotangents add up, and are pulled
back once.

A piece is dear, and so worth a loop of its own, if it takes at least eight operations for each
number that the rest reads of it, and a sixteenth of those of an item; an exponential, or what a
library computes, counts as sixteen for each number. Its results must not take more than
`_MOST_BYTES`, or `_PER_ARGUMENT` times what the arguments and outputs of the call take; larger ones
are computed again for each row and each column of a tile (`with_sides`).

A reduction that chooses items, or leaves some out (``where=``), sends nothing back to the others.
Nor does it to an item of a piece that none of the rest reads (`unless_unused`): 0 times an infinite
derivative would be NaN.

If all that a reduction over pairs reads of its vectors is numbers, as in ``y[2] * cos(x * y[0])``,
these are read once, too: the rest computes with numbers only, which XLA:CPU does in vectors along
the items of a tile (`with_sides`). Sums of eight such kernels take 0.12 to 1.1 times as long, their
gradients 0.35 to 1.0 times, and 0.52 in the median.

What has effects, calls back, or draws from a key of its own item stays where it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from rankax.core.base.arrays import is_narrow, is_plain
from rankax.core.declare.dims import Rank
from rankax.core.plan.schedule import (
    InAxes,
    LeafPlan,
    Plan,
    Shape,
    Tiles,
    at_most,
    broadcast,
    leaf_plan,
)
from rankax.core.reduce.run import Reductions
from rankax.core.trace.programs import ItemProgram, with_variables
from rankax.core.walk import Nest
from rankax.ext.equations import FUNCTIONS, LIBRARIES, bytes_of, cost, numbers_of
from rankax.ext.reductions.unused import unless_unused

_FUNCTION = 16  # operations
_INDEXING = {"reshape", "slice", "squeeze", "unstack"}
_LEAST_PER_NUMBER, _LEAST_SHARE = 8, 1 / 16  # operations, and of those of an item
_MOST_BYTES, _PER_ARGUMENT = 2**26, 8

_SIDE = 256  # of a tile that multiplies, at most
_BYTES = 2**22  # of what its rows and columns have, or of a value of all its items, at most
_SIDE_OF_NUMBERS = 128  # so that a running state takes 64 kB
_FEW_ROWS = 8  # of a map, which are stored whole

Axes = frozenset[int]


class Piece(NamedTuple):
    """Some equations of a program, what they read, and what they compute for others."""

    axes: Axes  # on which it depends
    eqns: list[Any]
    reads: list[Any]
    makes: list[Any]
    is_dear: bool = True  # otherwise, it reads numbers of vectors


Chosen = tuple[tuple[Axes, bool], ...]  # of each piece: its axes, and whether it is dear


class Hoisted(NamedTuple):
    """A piece of the work of a call, which is evaluated before its loops."""

    axes: Axes
    is_dear: bool
    plan: Plan  # over these axes, without chunks
    item: ItemProgram
    makes: tuple[LeafPlan, ...]  # its results, as leaves of the call
    bytes: int  # what they take


class Apart(NamedTuple):
    """The work of a call, of which some is hoisted."""

    hoisted: tuple[Hoisted, ...]
    plan: Plan  # of the rest, without chunks
    item: ItemProgram  # the rest
    is_gated: bool  # whether some results of pieces may go unused

    @property
    def chosen(self) -> Chosen:
        """The pieces."""
        return tuple([(own.axes, own.is_dear) for own in self.hoisted])

    @property
    def bytes(self) -> int:
        """What the results of all pieces take."""
        return sum(own.bytes for own in self.hoisted)


def _has_sides(plan: Plan, jaxpr: Jaxpr) -> bool:
    """Whether items have several axes, each input has some of them, and order is free."""
    has_axes = sum(not at_most(size, 1) for size in plan.batch_shape) > 1
    is_free = has_axes and not jaxpr.effects
    return is_free and len(jaxpr.invars) == len(plan.mapped) + len(plan.splits)


def pieces(
    jaxpr: Jaxpr, plan: Plan, chosen: Chosen | None = None, indexing: Collection[int] = ()
) -> tuple[list[Piece], Piece]:
    """Split the program of an item into pieces, which are dear or ``chosen``, and the rest.

    ``indexing``: the equations that read numbers of vectors, by `id`; they are pieces, too.
    """
    every = frozenset(axis for axis, size in enumerate(plan.batch_shape) if not at_most(size, 1))
    on = _axes(jaxpr, plan)
    groups: dict[Axes, list[Any]] = {}
    of: dict[int, Axes] = {}
    for eqn in jaxpr.eqns:
        own = frozenset[int]().union(*(on[v] for v in eqn.invars if not isinstance(v, Literal)))
        own = own if _may_move(eqn) else every
        on |= dict.fromkeys(eqn.outvars, own)
        of[id(eqn)] = own
        groups.setdefault(own, []).append(eqn)
    total = cost(jaxpr.eqns, _operations)
    found, left = list[Piece](), jaxpr.eqns

    def piece_of(axes: Axes, eqns: Sequence[Any]) -> tuple[Piece, list[Any]]:
        """Return a piece, and the equations that it leaves."""
        moved = {id(eqn) for eqn in eqns if of[id(eqn)]}
        others = [eqn for eqn in left if id(eqn) not in moved]
        needed = {v for eqn in others for v in _variables(eqn.invars)}
        needed |= {*_variables(jaxpr.outvars)}
        makes = [v for eqn in eqns if id(eqn) in moved for v in eqn.outvars if v in needed]
        return _piece(axes, eqns, makes), others

    for own in sorted(groups, key=lambda axes: (len(axes), sorted(axes))):
        if own in (every, frozenset()):
            continue
        eqns = [eqn for eqn in left if of[id(eqn)] <= own]
        piece, others = piece_of(own, eqns)
        is_dear = _is_dear(piece, total) if chosen is None else (own, True) in chosen
        if not is_dear:
            piece, others = piece_of(own, [eqn for eqn in eqns if id(eqn) in indexing])
        if piece.makes:
            found.append(piece._replace(is_dear=is_dear))
            left = others
    return found, _piece(every, left, jaxpr.outvars)


def _is_dear(piece: Piece, total: int) -> bool:
    """Whether a piece is worth a loop of its own; ``total``: the operations of an item."""
    work, numbers = cost(piece.eqns, _operations), sum(map(_size, piece.makes))
    return work >= max(_LEAST_PER_NUMBER * numbers, _LEAST_SHARE * total)


def _indexing(jaxpr: Jaxpr, plan: Plan) -> set[int]:
    """Return by `id` which equations read numbers of vectors, if all others compute with numbers.

    There are none if nothing is reduced.
    """
    read, found = {*jaxpr.invars}, set[int]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _INDEXING and not read.isdisjoint(_variables(eqn.invars)):
            read.update(eqn.outvars)
            found.add(id(eqn))
    others = [eqn for eqn in jaxpr.eqns if id(eqn) not in found]
    return found if plan.reduced and _are_numbers_of_sides(jaxpr, plan, others) else set()


def _axes(jaxpr: Jaxpr, plan: Plan) -> dict[Any, Axes]:
    """Return the axes on which the inputs of the program of an item depend."""
    every = frozenset(axis for axis, size in enumerate(plan.batch_shape) if not at_most(size, 1))
    on: dict[Any, Axes] = {v: frozenset() for v in jaxpr.constvars}
    on |= dict.fromkeys(jaxpr.invars, every)  # numbers of items, after the leaves
    for v, axes in zip(jaxpr.invars, plan.batch_axes, strict=False):
        on[v] = frozenset(axis for axis in every if axes[axis] is not None)
    return on


def _size(variable: Any) -> int:
    return variable.aval.size


def _may_move(eqn: Any) -> bool:
    is_plain = not eqn.effects and "callback" not in eqn.primitive.name
    return is_plain and not any(
        jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) if hasattr(v.aval, "dtype") else True
        for v in eqn.outvars
    )


def _variables(values: Sequence[Any]) -> list[Any]:
    return [v for v in values if not isinstance(v, Literal)]


def _operations(eqn: Any) -> int:
    """Return about how many operations an equation takes."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return (
            2 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        )
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
        return 2 * _size(eqn.outvars[0]) * kernel.size // kernel.shape[numbers.rhs_spec[0]]
    return numbers_of(eqn) * (_FUNCTION if name in FUNCTIONS or name in LIBRARIES else 1)


def _piece(axes: Axes, eqns: Sequence[Any], makes: Sequence[Any]) -> Piece:
    """Return a part with the equations that its results need, in their order."""
    wanted, kept = {*_variables(makes)}, list[Any]()
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars) or eqn.effects:
            kept.append(eqn)
            wanted |= {*_variables(eqn.invars)}
    made = {v for eqn in kept for v in eqn.outvars}
    reads = dict.fromkeys(v for eqn in kept[::-1] for v in _variables(eqn.invars) if v not in made)
    reads |= dict.fromkeys(v for v in _variables(makes) if v not in made)
    return Piece(axes, kept[::-1], list(reads), list(makes))


def share(jaxpr: Jaxpr, variable: Any) -> float:
    """Return which part of the operations of a program a variable needs; 0 if they are few."""
    work = cost(_piece(frozenset(), jaxpr.eqns, [variable]).eqns, _operations)
    return work / cost(jaxpr.eqns, _operations) if work >= _LEAST_PER_NUMBER else 0


def is_gated(item: ItemProgram, reductions: Reductions | None) -> bool:
    """Whether some items send nothing back."""
    if reductions is None:
        return False
    counts = any(own.mask is not None for own in item.outputs)
    return counts or reductions.chosen(item.outputs) > 0


def hoist(
    item: ItemProgram,
    plan: Plan,
    chosen: Chosen | None = None,
    *,
    is_gated: bool,
    by_number: bool = False,
) -> Apart | None:
    """Take the pieces out of an item that are worth it, or those ``chosen`` before.

    ``by_number``: also what reads numbers of vectors.

    Programs that agree equation by equation, as those of a kernel with its rules of derivatives and
    without them do, have the same pieces.
    """
    jaxpr = item.closed.jaxpr
    if not _has_sides(plan, jaxpr):
        return None
    is_by_number = by_number if chosen is None else not all(dear for _, dear in chosen)
    indexing = _indexing(jaxpr, plan) if is_by_number else ()
    found, rest = pieces(jaxpr, plan, chosen, indexing)
    by_position = {leaf.position: leaf for leaf in plan.leaves}
    leaf_of = {v: by_position[i] for v, i in zip(jaxpr.invars, plan.mapped, strict=False)}
    arguments = sum(math.prod(leaf.batch_axes) * bytes_of(v) for v, leaf in leaf_of.items())
    hoisted, position = list[Hoisted](), max(by_position, default=0)
    for piece in found:
        reads = [v for v in leaf_of if v in piece.reads]
        leaves = [leaf_of[v] for v in reads]
        shape, _ = broadcast([(i, leaf.lengths) for i, leaf in enumerate(leaves)])
        if is_gated and piece.is_dear:
            leaves = [
                leaf_plan(x.path, shape + x.core_shape, x.written, x.position) for x in leaves
            ]
        paths = ", ".join(dict.fromkeys(leaf.path for leaf in leaves))
        path = f"f({paths})" if piece.is_dear else f"numbers of {paths}"
        for v in piece.makes:
            position += 1
            core, rank = tuple(v.aval.shape), Rank(v.aval.ndim)
            leaf_of[v] = leaf_plan(path, shape + core, rank, position)
        whole = Plan(plan.kernel, shape, tuple(leaves), ()).cut(None)
        size = math.prod(shape) * sum(map(bytes_of, piece.makes))
        makes = tuple([leaf_of[v] for v in piece.makes])
        program = _program(item, piece, reads)
        hoisted.append(Hoisted(piece.axes, piece.is_dear, whole, program, makes, size))
    kept = [n for axis, n in enumerate(plan.batch_shape) if axis not in plan.reduced]
    outputs = math.prod(kept) * sum(map(bytes_of, jaxpr.outvars))
    most = max(_MOST_BYTES, _PER_ARGUMENT * (arguments + outputs))
    if not hoisted or (chosen is None and sum(own.bytes for own in hoisted) > most):
        return None
    reads = [v for v in leaf_of if v in rest.reads]
    shapes = [leaf for leaf in plan.leaves if not leaf.is_array]
    plan = dataclasses.replace(plan, leaves=(*(leaf_of[v] for v in reads), *shapes)).cut(None)
    numbers = jaxpr.invars[len(jaxpr.invars) - len(plan.splits) :] if plan.splits else []
    closed = _program(item, rest, [*reads, *numbers]).closed
    return Apart(tuple(hoisted), plan, dataclasses.replace(item, closed=closed), is_gated)


@dataclasses.dataclass(frozen=True)
class Before:
    """What evaluates the pieces that are hoisted, before the rest is walked.

    JAX keeps it, so it holds no program of an item.

    Attributes
    ----------
    plan : Plan
        Of the item as it was, without chunks.
    chosen : Chosen
    nests : tuple of Nest
        What walks each piece.
    is_gated : bool
        Whether some items of a piece may send nothing back.
    """

    plan: Plan
    chosen: Chosen
    nests: tuple[Nest, ...]
    is_gated: bool

    def __call__(self, item: ItemProgram, leaves: Sequence[Any]) -> tuple[ItemProgram, list[Any]]:
        """Return the rest of an item, and its inputs, of which some are results of pieces."""
        apart = hoist(item, self.plan, self.chosen, is_gated=self.is_gated)
        assert apart is not None
        values = dict(zip(self.plan.mapped, leaves, strict=True))
        lengths = {leaf.position: leaf.lengths for leaf in self.plan.leaves}
        for own, nest in zip(apart.hoisted, self.nests, strict=True):
            run = functools.partial(_walked, nest, own.item)
            inputs = [values[i] for i in own.plan.mapped]
            if self.is_gated and own.is_dear:
                shape = own.plan.batch_shape
                inputs = [_stretched(values[i], lengths[i], shape) for i in own.plan.mapped]
                is_apart = nest.differentiable and not is_plain()
                run = unless_unused(run, axes=len(shape)) if is_apart else run
            outs = run(*inputs)
            lengths |= {leaf.position: leaf.lengths for leaf in own.makes}
            values |= {leaf.position: x for leaf, x in zip(own.makes, outs, strict=True)}
        return apart.item, [values[i] for i in apart.plan.mapped]


def _walked(nest: Nest, item: ItemProgram, *inputs: Any) -> list[Any]:
    return nest.walk(item, inputs)


def _stretched(x: Any, lengths: InAxes, shape: Shape) -> Any:
    """Return an input of a piece with all axes of its items: each has an input of its own."""
    own = [1] * (len(shape) - len(lengths)) + [n or 1 for n in lengths]
    core = x.shape[sum(n is not None for n in lengths) :]
    return jnp.broadcast_to(jnp.reshape(x, (*own, *core)), (*shape, *core))


def shown(plan: Plan, whole: Plan, hoisted: Sequence[Hoisted]) -> Plan:
    """Return the plan of the rest, with the leaves of the whole call as well.

    A vector of which numbers are read stands for those.
    """
    makes = [leaf for own in hoisted if own.is_dear for leaf in own.makes]
    leaves = (*whole.leaves, *makes)
    read = {
        leaf.position: own.makes[0].position
        for own in hoisted
        for leaf in own.plan.leaves
        if not own.is_dear
    }
    by_level = [
        dict(zip([leaf.position for leaf in plan.leaves], level.mapped, strict=True))
        for level in plan.levels
    ]
    levels = [
        dataclasses.replace(
            level, mapped=tuple([own.get(read.get(x.position, x.position), False) for x in leaves])
        )
        for level, own in zip(plan.levels, by_level, strict=True)
    ]
    return dataclasses.replace(plan, leaves=leaves, levels=tuple(levels))


def _program(item: ItemProgram, piece: Piece, inputs: Sequence[Any]) -> ItemProgram:
    """Return the program of a piece, as that of an item."""
    closed, count = item.closed, len(piece.makes)
    pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    consts = {v: x for v, x in pairs if v in piece.reads}
    jaxpr = with_variables(closed.jaxpr, inputs, piece.makes, eqns=piece.eqns, constvars=[*consts])
    names = tuple(f"result {i}" for i in range(count))
    return dataclasses.replace(
        item,
        closed=ClosedJaxpr(jaxpr, [*consts.values()]),
        out_tree=None,
        out_names=names,
        out_axes=(0,) * count,
        outputs=(),
    )


def notes(hoisted: Sequence[Hoisted], whole: Plan) -> list[str]:
    """Name what is hoisted, for a plan."""
    return [
        f"{own.makes[0].path}: once for each of {math.prod(own.plan.batch_shape)}"
        f"{''.join(f' {whole.words[axis]}' for axis in sorted(own.axes) if whole.names)}, "
        f"{max(1, own.bytes // 1000)} kB"
        for own in hoisted
    ]


def _are_numbers_of_sides(jaxpr: Jaxpr, plan: Plan, eqns: Sequence[Any]) -> bool:
    """Whether equations compute numbers only, of inputs that each lack an axis of the items.

    In half precision, each item of a tile may have a cotangent of its own, so rows are faster.
    """
    on, most = _axes(jaxpr, plan), sum(not at_most(size, 1) for size in plan.batch_shape)
    values = [v for eqn in eqns for v in (*eqn.invars, *eqn.outvars)]
    are_numbers = not any(getattr(v.aval, "shape", ()) for v in (*values, *jaxpr.outvars))
    are_wide = not any(is_narrow(v.aval) for v in jaxpr.invars)
    return are_numbers and are_wide and all(len(on[v]) < most for v in jaxpr.invars)


def with_sides(tiles: Tiles, jaxpr: Jaxpr, plan: Plan) -> Tiles:
    """Return the tiles, with sides if items share work along an axis.

    Items that multiply what they have of two axes are one product of matrices then, whose results
    stay in the cache. Its operands need not: what multiplies reads them in blocks of its own, and
    fewer rows or columns would read the others more often. A map stores whole rows, if there is
    room for a few: a part of a row is copied after the product, which takes as long as that. What
    was not hoisted is evaluated once for each row of the tile, and once for each column.

    Pairs of numbers that are reduced have two sides as well. A tile of one row would read all
    columns again, and its derivative add to the cotangents of all, plainly. Gradients of sums over
    2,000 x 2,000 such pairs take 0.16 to 0.77 times as long, six of six, maxima 0.2 to 0.7. (Of
    pairs of vectors, XLA:CPU computes no vectors along the items of such a tile.)
    """
    if not _has_sides(plan, jaxpr):
        return tiles
    on, is_whole = _axes(jaxpr, plan), plan.reduced and not tiles.reduced  # sines have their own
    if is_whole and _are_numbers_of_sides(jaxpr, plan, jaxpr.eqns):
        return tiles._replace(side=_SIDE_OF_NUMBERS)
    again = max([sum(map(_size, piece.makes)) for piece in pieces(jaxpr, plan)[0]], default=0)
    most, largest = again, 1
    for eqn in jaxpr.eqns:
        own = [frozenset() if isinstance(v, Literal) else on[v] for v in eqn.invars]
        axes = frozenset[int]().union(*own)
        on |= dict.fromkeys(eqn.outvars, axes)
        if len(axes) > 1:
            largest = max([largest, *map(_size, eqn.outvars)])
        if eqn.primitive.name == "dot_general" and all(own) and not own[0] & own[1]:
            most = max(most, *map(_size, eqn.invars))
    if not most:
        return tiles
    side = max(8, min(_SIDE, _BYTES // (8 * most), math.isqrt(_BYTES // (4 * largest))))
    return tiles._replace(side=side, rows=0 if again else _FEW_ROWS)
