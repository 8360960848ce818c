# SPDX-License-Identifier: MIT
"""Walk the items of a batch in lanes, in place of a nest of loops over chunks.

The items of all levels are numbered as one row. Each output is written to the place of its item.
A reduction takes outputs in the order of the items, tile by tile, as in lockstep, so its result is
the same: outputs of items that end early wait in a window, and no item begins beyond the window.

What is differentiated is the same call in lockstep: a loop over tiles of as many items as there are
lanes, whose `while` loops have a reverse pass (`rankax.ext.scan.while_loop.with_reverse_pass`). A
tile takes as long as its slowest item, so a first pass, in lanes, counts the steps of each item,
and tiles take the items in the order of their steps (`in_lockstep`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr

from rankax.core.base.arrays import counted, index_dtype, is_ref, places_of, scalar, zeros, zeros_of
from rankax.core.loop.loop import (
    Sink,
    Store,
    Tile,
    TileSlots,
    carried_with,
    ends_of,
    first_start,
    map_level,
    new_items,
    steps_of,
    write_chunk,
)
from rankax.core.loop.spec import item_of, items_at, lengths_of, own_places
from rankax.core.plan.schedule import Chunks, Level, split_into_chunks
from rankax.core.trace.derivatives import with_derivative
from rankax.core.trace.programs import ItemProgram, has_order, subprograms, with_shape
from rankax.ext.lanes.engine import Engine, Output, written
from rankax.ext.lanes.machine import Machine, cut_program

_WINDOW = 16  # for each lane, the outputs that may wait to be reduced
_MOST_SORTED = 2**20  # items, if no argument has one element for each


# Lanes, if nothing bounds them: at least, at most, and the numbers that all keep together.
# On a CPU, what they keep stays in the cache. (Where an item computes with arrays, fewer lanes are
# faster still, and with many numbers of their own, as samplers have, more are.)
# On a GPU, a round takes as long for all of the fewest lanes as for the first of them, because its
# kernels are shorter than their launches: an H100 runs 270,000 threads. More lanes need fewer
# rounds, as long as what they keep is no more than a GPU moves in a launch.
_CPU_LANES = 1, 2**8, 2**15
_GPU_LANES = 2**12, 2**16, 2**21


def most_lanes(machine: Machine, *, on_cpu: bool) -> int:
    """Return how many lanes there are if nothing bounds them."""
    numbers = sum(math.prod(slot.aval.shape) for slot in machine.stored())
    fewest, most, together = _CPU_LANES if on_cpu else _GPU_LANES
    return max(fewest, min(most, 2 ** int(math.log2(together // max(1, numbers) or 1))))


def check_lanes(item: ItemProgram) -> None:
    """Refuse a kernel whose items must run together, or in order."""
    names = [effect.name for effect in item.closed.effects if hasattr(effect, "name")]
    order = "items end in any order"
    if has_order(item.closed):
        place = _loop_in_order(item.closed.jaxpr)
        cause = f"has an ordered effect{place}, such as a callback with ordered=True"
        clash, instead = order, "ordered=False"
    elif any(map(is_ref, item.closed.jaxpr.constvars)):
        cause, clash, instead = "uses a jax.Ref", order, "read it before the call"
    elif names:
        cause, clash = f"uses a collective over {names[0]!r}", "items do not run together"
        instead = "take the collective out of the kernel"
    else:
        return
    cause += f", but with lockstep=False {clash}"
    raise ValueError(f"{item.site}: it {cause}; use lockstep=True, or {instead}")


def _loop_in_order(jaxpr: Jaxpr) -> str:
    """Name the innermost `while` loop with an ordered effect; nothing if there is none."""
    for eqn in filter(has_order, jaxpr.eqns):
        inside = "".join(map(_loop_in_order, subprograms(eqn)))
        if inside or eqn.primitive.name != "while":
            return inside
        return f" in the loop at {source_info_util.summarize(eqn.source_info)}"
    return ""


def walk_in_lanes(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    levels: Sequence[Level],
    like: ItemProgram | None = None,
    folds: Callable[[Sequence[Any], Chunks], Sequence[Sink]] | None = None,
    tile: int = 1,
) -> list[Any]:
    """Evaluate ``fun``, which takes arrays and returns a list of them, for the items of all levels.

    Parameters
    ----------
    fun : callable
    leaves : sequence of arrays
    levels : sequence of Level
    like : ItemProgram, optional
        Where the items are in the outputs, and how errors name ``fun``.
    folds : callable, optional
        What becomes of tiles of outputs, as in `run_loop`. By default, the outputs are returned.
    tile : int
        How many outputs ``folds`` take at a time.
    """
    closed, spec, count = _numbered(fun, leaves, levels), levels[0], math.prod(lengths_of(levels))
    avals, lanes = closed.out_avals, min(spec.walker.count, count)
    output = Output(count, like.out_axes if like else (), avals)
    if folds is not None:
        tiles = Chunks(count, tile, -(-count // tile))
        outs = [jax.ShapeDtypeStruct((tile, *aval.shape), aval.dtype) for aval in avals]
        own = tuple(folds(outs, tiles))
        in_tile = TileSlots(tile, (), index_dtype(count))
        output = _Window(count, (), avals, tiles, lanes, own, in_tile)
    reports = spec.observer and spec.observer.reports(count, 1, 1)
    machine, rounds = cut_program(closed), spec.walker.rounds
    return Engine(machine, closed.consts, count, lanes, output, rounds, reports).run()


def _numbered(fun: Callable[..., Any], leaves: Sequence[Any], levels: Sequence[Level]) -> Any:
    """Trace ``fun`` as a function of the number of an item, which closes over the leaves."""
    trace = jax.make_jaxpr(lambda number: fun(*items_at(leaves, number, levels)))
    number = with_shape(jax.ShapeDtypeStruct((), index_dtype(math.prod(lengths_of(levels)))), ())
    closed = trace(number)
    # In lanes, the number varies among the devices of a `jax.shard_map` as what is known does.
    same = scalar(0, number.dtype)
    varying = carried_with(same, closed.consts)
    return closed if varying is same else trace(with_shape(jax.typeof(varying), ()))


def in_lockstep(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    levels: Sequence[Level],
    out_axes: Sequence[int | None] = (),
    *,
    sort: bool = True,
) -> tuple[Callable[..., Any], list[Any], Level, Callable[[jax.Array], jax.Array], list[Any]]:
    """Put the items of all levels on one, in the order of their steps, to be differentiated.

    Leaves that all levels map are put in this order, and the others are read item by item. The
    order takes memory. If no leaf is as long, many items stay in their own.

    Returns
    -------
    fun, leaves, level
        The function of an item, what it takes, and the level.
    stored : callable
        Puts an output, which has the items on axis 0, in their own order.
    outs : list of arrays
        The outputs, without derivatives, that lanes have computed while they counted the steps:
        those with ``out_axes``. Empty if steps were not counted.
    """
    sizes = lengths_of(levels)
    count = math.prod(sizes)
    # A numbered level takes the places along those around it as well.
    by_leaf = [[level.in_axes[i] for level in levels] for i in range(len(leaves))]
    whole = [i for i, axes in enumerate(by_leaf) if None not in axes]
    sort = sort and (bool(whole) or count <= _MOST_SORTED)
    order, outs = _by_steps(fun, leaves, levels, out_axes) if sort else (None, [])

    def on_item(*inputs: Any) -> Any:
        *leaves, place = inputs
        number = place.astype(index_dtype(count))
        if order is not None:
            number = lax.dynamic_index_in_dim(order, number, keepdims=False)
        places = places_of(number, sizes)
        pairs = enumerate(leaves)
        items = [x if i in whole else item_of(x, i, places, levels) for i, x in pairs]
        return fun(*items, *own_places(places, levels))

    def in_order(i: int, leaf: Any) -> Any:
        numbers = counted(count, index_dtype(count)) if order is None else order
        return jax.vmap(lambda number: item_of(leaf, i, places_of(number, sizes), levels))(numbers)

    ordered = [in_order(i, x) if i in whole else x for i, x in enumerate(leaves)]
    axes = tuple(0 if i in whole else None for i in range(len(leaves)))
    changes = {"in_axes": axes, "is_loop": True, "walker": None, "numbered": True}
    chunks = split_into_chunks(count, levels[0].walker.count)
    level = dataclasses.replace(levels[0], chunks=chunks, **changes)

    def stored(x: jax.Array) -> jax.Array:
        if order is None:
            return x
        return lax.stop_gradient(x).at[order].set(x, unique_indices=True)

    return on_item, ordered, level, stored, outs


def _by_steps(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    levels: Sequence[Level],
    out_axes: Sequence[int | None],
) -> tuple[jax.Array | None, list[Any]]:
    """Return the items in the order of their steps, which lanes count, and those outputs."""
    closed, count = _numbered(fun, leaves, levels), math.prod(lengths_of(levels))
    machine = cut_program(closed, with_steps=True)
    if not machine.has_loop:
        return None, []
    *outputs, steps = machine.outputs
    machine = machine._replace(outputs=[*outputs[: len(out_axes)], steps])
    avals = [*closed.out_avals[: len(out_axes)], jax.ShapeDtypeStruct((), jnp.int32)]
    output = Output(count, [*out_axes, 0], avals)
    walker: Any = levels[0].walker
    lanes = min(walker.count, count)
    *outs, steps = Engine(machine, closed.consts, count, lanes, output, walker.rounds).run()
    return jnp.argsort(steps).astype(index_dtype(count)), outs


def map_in_lockstep(
    fun: Callable[..., Any], leaves: Sequence[Any], levels: Sequence[Level], like: ItemProgram
) -> list[Any]:
    """Evaluate what `walk_in_lanes` does without folds, to be differentiated."""
    on_item, ordered, level, stored, values = in_lockstep(fun, leaves, levels, like.out_axes)
    axes = [None if axis is None else 0 for axis in like.out_axes]
    outs = map_level(on_item, level, axes, back=True)(*ordered)
    pairs = zip(outs, like.out_axes, strict=True)
    outs = [x if a is None else jnp.moveaxis(stored(x), 0, a) for x, a in pairs]
    # The reverse pass evaluates the items again, and so they are evaluated only there.
    return list(map(with_derivative, values, outs)) if values else outs


class _Waiting(NamedTuple):
    """What a window holds."""

    start: jax.Array  # the first item that is not folded
    outs: list[jax.Array]  # items on the last axis, at their numbers modulo the size of the window
    ended: jax.Array  # which of them are there
    carry: Any


@dataclasses.dataclass(frozen=True)
class _Window(Output):
    """A window of outputs that wait for items before them; folds take whole tiles."""

    tiles: Chunks
    lanes: int
    folds: tuple[Sink, ...]
    in_tile: TileSlots

    @property
    def size(self) -> int:
        tiles, tile = self.tiles.steps, self.tiles.size
        return tile * min(_WINDOW * -(-self.lanes // tile), tiles)

    def start(self) -> _Waiting:
        outs = [zeros_of(aval, (*aval.shape, self.size)) for aval in self.avals]
        carry = [fold.start(self.tiles.size) for fold in self.folds]
        return _Waiting(first_start(self.tiles), outs, zeros((self.size,), jnp.bool_), carry)

    def put(self, held: _Waiting, outs: list[Any], items: jax.Array, on: jax.Array) -> _Waiting:
        at = written(on, items % self.size, self.size)
        new = [
            old.at[..., at].set(jnp.moveaxis(x, 0, -1), mode="drop", unique_indices=True)
            for x, old in zip(outs, held.outs, strict=True)
        ]
        ended = held.ended.at[at].set(True, mode="drop", unique_indices=True)
        return held._replace(outs=new, ended=ended)

    def settle(self, held: _Waiting) -> _Waiting:
        return lax.while_loop(self._has_tile, self._fold, held)

    def _at(self, x: jax.Array, at: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, at, self.tiles.size, x.ndim - 1)

    def _has_tile(self, held: _Waiting) -> Any:
        ended = self._at(held.ended, held.start % self.size)
        return jnp.all(ended) & (held.start + self.tiles.size <= self.tiles.length)

    def _fold(self, held: _Waiting) -> _Waiting:
        at = held.start % self.size
        carry = self._folded(held.carry, [self._at(x, at) for x in held.outs], held.start, None)
        ended = write_chunk(held.ended, zeros((self.tiles.size,), jnp.bool_), at, 0)
        return _Waiting(held.start + self.tiles.size, held.outs, ended, carry)

    def _folded(self, carry: Any, outs: list[Any], start: jax.Array, ok: Any) -> Any:
        stored = {fold.position for fold in self.folds if isinstance(fold, Store)}
        outs = [jnp.moveaxis(x, -1, 0) if i in stored else x for i, x in enumerate(outs)]
        return steps_of(self.folds, carry, Tile(outs, start, ok, self.in_tile))[0]

    def limit(self, held: _Waiting) -> Any:
        return jnp.minimum(held.start + self.size, self.tiles.length)

    def end(self, held: _Waiting) -> Any:
        carry, tiles = held.carry, self.tiles
        if not tiles.even:  # the last tile begins early, as in a loop, and the window still has it
            start = held.start.dtype.type(tiles.length - tiles.size)
            at = (start + counted(tiles.size, start.dtype)) % self.size
            outs = [jnp.take(x, at, axis=-1) for x in held.outs]
            carry = self._folded(carry, outs, jnp.asarray(start), new_items(start, tiles))
        return ends_of(self.folds, carry, [None] * len(self.folds))
