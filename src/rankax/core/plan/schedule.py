# SPDX-License-Identifier: MIT
"""Plan a call: shapes divided by their ranks, the levels that cover the batch, and the nesting.

Batch axes agree by NumPy's rules, core dimensions by name. Disagreements are returned as data;
`rankax.core.plan.report` words them. `plan_ranks`, at the end, does all of it; `plan_axis` plans a
call that maps one axis.

A chunk fills the levels from the innermost outwards. A batch that fits one chunk has one level per
axis, all plain `jax.vmap`, as if there were no bound (but see `plan_levels`). Otherwise, adjacent
axes that all leaves map alike are merged first, so that a chunk can span them.

A chunk size that divides an axis is preferred, even at the cost of a quarter more steps: it needs
no overlap, and along axis 0 a derivative then copies nothing. If none is that close, the last chunk
starts early and overlaps the one before it; `core/loop/loop.py` reads it.

In a reduction, items of the overlap that were counted before add nothing (`core/reduce/row.py`).
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rankax.core.base.messages import function_location, function_name
from rankax.core.declare.dims import Dim, Rank

Shape = tuple[int, ...]
InAxes = tuple[int | None, ...]


_FAR = 2**15  # items
_MOST_KEYS = 2**32  # jax.random.fold_in takes a number of 32 bits


# With `jax.export`, a length may be an expression such as ``4*k``. To compare it is an error where
# not all of its values agree.


def is_known(size: Any) -> bool:
    """Whether a length is a number."""
    return isinstance(size, int)


def at_most(size: Any, bound: Any) -> bool:
    """Whether a length is at most so large; not if that is unknown."""
    if isinstance(size, int) and isinstance(bound, int):
        return size <= bound
    try:
        return bool(size <= bound)
    except Exception as error:  # of JAX, which planning does not import
        if type(error).__name__ != "InconclusiveDimensionOperation":
            raise
        return False


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One ranked leaf of a call.

    Attributes
    ----------
    path : str
        Its name, as the caller writes it: ``pose.rotation``.
    shape : tuple of int
    rank : int
        The declared number of core axes.
    core_shape : tuple of int
        ``shape`` without its leading batch axes.
    batch_axes : tuple of int
        The lengths of those axes.
    written : Rank
        The rank as it was declared; ignored in comparisons.
    is_split : bool
        Whether its rank is `rankax.SplitKey`.
    position : int
        Which leaf of the call it is.
    axis : int
        Where its batch axes are: in front, or where ``in_axes`` says.
    lengths : tuple of int or None
        Its length along each axis of the batch, counted from the right; None: it lacks the axis.
    names : tuple of str
        Of those of its batch axes that have a name, which are the last ones.
    """

    path: str
    shape: Shape
    rank: int
    core_shape: Shape
    batch_axes: Shape
    written: Rank = dataclasses.field(compare=False)
    is_split: bool = False
    position: int = dataclasses.field(default=-1, repr=False)
    axis: int = dataclasses.field(default=0, repr=False)
    lengths: InAxes = dataclasses.field(default=(), repr=False)
    names: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def declared(self) -> str:
        """The rank as it was written."""
        return str(self.written)

    @property
    def is_array(self) -> bool:
        """Whether it is an array, not only a shape."""
        return self.position != NO_ARRAY


def leaf_plan(
    path: str, shape: Shape, rank: Rank, position: int = -1, names: Sequence[str] = ()
) -> LeafPlan:
    """Divide a shape by its rank; one with too few axes has no batch axes.

    ``names``: of the last axes of the batch.
    """
    batch = max(0, len(shape) - rank.rank)
    core, batch_axes = shape[batch:], shape[:batch]
    own, lengths = rank.batch if names else (), batch_axes
    if names:
        front = max(0, batch - len(own))
        by_name = dict(zip(own, batch_axes[front:], strict=False))
        lengths = (*batch_axes[:front], *map(by_name.get, names))
    divided = path, shape, rank.rank, core, batch_axes, rank, rank.is_split, position
    return LeafPlan(*divided, lengths=lengths, names=own)


@dataclasses.dataclass(frozen=True)
class Clash:
    """An axis with several sizes, or with a size other than the declared one."""

    axis: int | str | Dim  # a batch axis, counted from the right or by name; a core dimension
    leaves: dict[int, list[int]]  # the leaves of each size, by position
    expected: Any = None  # of a dimension without a name: its size, or a `NoSize`


def broadcast(
    batches: Iterable[tuple[int, InAxes]], names: Sequence[str] = ()
) -> tuple[Shape, list[Clash]]:
    """Return the batch shape, and a clash for each axis that has two lengths.

    Parameters
    ----------
    batches : iterable of (leaf, lengths along the axes of the batch, counted from the right)
    names : sequence of str
        Of the last axes, along which a length of 1 is as good as any other, and is not stretched.
    """
    batches = list(batches)
    width = max((len(batch) for _, batch in batches), default=0)
    shape: list[int] = []
    clashes: list[Clash] = []
    for axis in range(-width, 0):
        leaves: dict[int, list[int]] = {}
        name = names[axis] if len(names) >= -axis else None
        for leaf, batch in batches:
            size = batch[axis] if len(batch) >= -axis else None
            if size is not None and (size != 1 or name):
                leaves.setdefault(size, []).append(leaf)
        shape.append(next(iter(leaves), 1))
        if len(leaves) > 1:
            clashes.append(Clash(name or axis, leaves))
    return tuple(shape), clashes


def bind_sizes(cores: Iterable[tuple[int, Shape, Rank]], sizes: dict[str, int]) -> list[Clash]:
    """Bind each named dimension in ``sizes``, and return every disagreement.

    Parameters
    ----------
    cores : iterable of (leaf, core shape, rank)
    sizes : dict
        The sizes known so far, by dimension name; extended in place.
    """
    declared = [
        (leaf, size, dim)
        for leaf, core, rank in cores
        for size, dim in zip(core, rank.dims or (), strict=bool(rank.dims))
        if not (dim.stretches and size == 1)
    ]
    named: dict[str, Clash] = {}
    for leaf, size, dim in declared:
        if dim.name is not None:
            named.setdefault(dim.name, Clash(dim, {})).leaves.setdefault(size, []).append(leaf)
    for name, clash in named.items():
        size = sizes.setdefault(name, next(iter(clash.leaves)))
        clash.leaves.setdefault(size, [])  # the size may be known from leaves other than these
    others: dict[tuple[str, int], Clash] = {}  # expressions need all names bound
    for leaf, size, dim in declared:
        if dim.name is None and not dim.fits(size, sizes):
            clash = Clash(dim, {}, dim.expected(sizes))
            clash = others.setdefault((dim.text.lstrip("#"), size), clash)
            clash.leaves.setdefault(size, []).append(leaf)
    return [*(clash for clash in named.values() if len(clash.leaves) > 1), *others.values()]


# Split keys: how items are numbered; `core/loop/spec.py` makes the keys from these numbers.


@dataclasses.dataclass(frozen=True)
class Split:
    """One array of keys that are split over the batch axes that it lacks.

    Or, with the position `NO_ARRAY`, one padded axis, along which the numbers tell copies from
    items.

    The number of an item is the sum of index times stride over all axes of the batch.
    """

    position: int  # the leaf position of the array
    strides: tuple[int, ...]  # one for each axis of the batch; 0 for those that the array has


def plan_splits(
    fun: Callable[..., Any],
    leaves: Sequence[LeafPlan],
    batch_shape: Shape,
) -> tuple[Split, ...]:
    """Return how items are counted for each key that is split; keys without absent axes are not.

    Parameters
    ----------
    fun : callable
        The kernel.
    leaves : sequence of LeafPlan
        Every leaf that has a rank.
    batch_shape : tuple of int

    Raises
    ------
    ValueError
        If a key would be split into more than 2**32 keys.
    """
    splits: list[Split] = []
    for leaf in leaves:
        if not leaf.is_split:
            continue
        count: Any = 1  # symbolic shapes are not ints
        strides: list[int] = []
        axes = itertools.zip_longest(reversed(batch_shape), reversed(leaf.lengths))
        for length, size in axes:
            strides.append(count if size != length else 0)
            count *= length if size != length else 1
        if isinstance(count, int) and count > _MOST_KEYS:
            raise ValueError(
                f"{function_location(fun)}: each key of {leaf.path} would be split into {count} "
                f"keys, but JAX counts only {_MOST_KEYS}; pass keys that have a batch axis "
                f"themselves, such as jax.random.split({leaf.path}, n) for an axis of length n"
            )
        if any(strides):
            splits.append(Split(leaf.position, tuple(reversed(strides))))
    return tuple(splits)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How an axis of ``length`` items is walked: ``steps`` chunks of ``size`` items each.

    Where ``steps * size > length`` the last chunk starts early and overlaps the one before it, so
    that every chunk has the same size and no item is invented.

    A chunk is evaluated at once, unless ``tile`` says how many of its items are.

    The chunks of a part of the axis begin at its item ``first``, and may end before the last one.
    """

    length: int
    size: int
    steps: int
    tile: int | None = None
    first: int = 0

    @property
    def even(self) -> bool:
        """Whether the chunks tile the axis without overlap."""
        return self.steps * self.size == self.length

    @property
    def over(self) -> int:
        """How many items the last chunk shares with the one before it."""
        return max(0, self.first + self.steps * self.size - self.length)

    @property
    def is_far(self) -> bool:
        """Whether they begin so far along the axis that no cache may hold it."""
        return self.first > _FAR

    @property
    def apart(self) -> list["Chunks"]:
        """The chunks that no other overlaps, and the rest as one chunk."""
        at = self.size * (self.steps - 1)
        rest = self.length - at
        tile = self.tile and min(self.tile, rest)
        return [
            dataclasses.replace(self, steps=self.steps - 1),
            Chunks(self.length, rest, 1, tile, first=at),
        ]


def split_into_chunks(length: int, chunk_size: int) -> Chunks:
    """Cut an axis into chunks of at most ``chunk_size`` items, alike in size.

    The chunks are as few and then as small as possible, so that little is computed twice: 10 items
    by at most 6 are 5 + 5, not 6 + 6. A chunk that divides the axis is worth up to a quarter more
    steps because it needs no overlap, and so no copy of the outputs in a derivative.

    An unknown length has to be a multiple of the chunk size: which one it is, decides the program.
    """
    if not is_known(length):
        return _chunks_of_unknown(length, chunk_size)
    steps = -(-length // chunk_size)
    size = -(-length // steps)
    if divisor := _divisor(length, -(-4 * size // 5), chunk_size):
        return Chunks(length, divisor, length // divisor)
    return Chunks(length, size, steps)


class UnknownLengthError(ValueError):
    """Raised for an unknown length that chunks would not divide."""


def _chunks_of_unknown(length: Any, chunk_size: int) -> Chunks:
    """Cut an axis whose length is an expression into chunks that divide it whatever its value."""
    divides = (size for size in range(chunk_size, 0, -1) if length % size == 0)
    size = next(divides, 1)
    if size == 1 < chunk_size:
        sizes = "2" if chunk_size == 2 else f"2 to {chunk_size}"
        raise UnknownLengthError(
            f"the batch has the unknown length {length}, which no chunk of {sizes} items "
            f"divides; export a multiple, as of jax.export.symbolic_shape('{chunk_size}*n'), or "
            "give chunk_size=None"
        )
    return Chunks(length, size, length // size)


def even_chunk_size(sizes: Sequence[int], most: int) -> int:
    """Return a chunk size from half of ``most`` to ``most`` that divides the level it cuts.

    Parameters
    ----------
    sizes : sequence of int
        Of the levels, outermost first; a chunk fills them from the innermost outwards.
    most : int
        Returned itself where there is no such chunk size.
    """
    whole = 1  # levels that a chunk covers
    for size in reversed(sizes):
        room = most // whole
        if size > room:
            return whole * (_divisor(size, -(-room // 2), room) or room)
        whole *= size
    return whole


def _divisor(number: int, least: int, most: int) -> int:
    """Return the largest divisor from ``least`` to ``most``, or 0 if there is none."""
    pairs = [(d, number // d) for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max([d for pair in pairs for d in pair if least <= d <= most], default=0)


def split_into_tiles(length: int, chunk_size: int, tile: int) -> Chunks:
    """Cut an axis into chunks that are smaller than allowed: at most ``tile`` items, if possible.

    If the chunk divides the axis, so does the tile, so that no derivative copies what it would not
    have copied otherwise. If no divisor of the axis is near ``tile``, each chunk is cut by itself
    into tiles that overlap: then a derivative copies the outputs of one chunk only.
    """
    chunks = split_into_chunks(length, chunk_size)
    if tile >= chunks.size:
        return chunks
    if not is_known(length):
        divisor = _divisor(chunks.size, tile // 4 + 1, tile)
        if divisor:
            return Chunks(length, divisor, length // divisor)
        return dataclasses.replace(chunks, tile=split_into_chunks(chunks.size, tile).size)
    tiles = split_into_chunks(length, tile)
    if tiles.even or not chunks.even:
        return tiles
    divisor = _divisor(length, tile // 4 + 1, tile)
    if divisor:
        return Chunks(length, divisor, length // divisor)
    if chunks.steps == 1:
        return tiles
    return dataclasses.replace(chunks, tile=split_into_chunks(chunks.size, tile).size)


class Tiles(NamedTuple):
    """How many items are best evaluated at once; None: as many as a chunk may have.

    With ``chunk_size=103`` and tiles of 8, 1,000 items are 125 steps of 8 (`Chunks(1000, 8, 125)`,
    `Level.tile` is 8). No number near 8 divides 10,403, so as many items are 101 chunks of 103,
    each cut into tiles of 8 (``Chunks(10403, 103, 101, tile=8)``, `Level.chunk` is 103).
    """

    forward: int | None = None
    derivative: int | None = None
    side: int | None = None  # items along each of two levels, which share what they read
    rows: int = 0  # of a map with sides: the inner level is whole if so many of it are a chunk
    across: int = 0  # the most items along a kept axis that is contiguous where the reduced is not
    reduced: int | None = None  # the most items of a reduction that leaves functions to a library


WHOLE_CHUNKS = Tiles()


@dataclasses.dataclass(frozen=True)
class Level:
    """One map of the nest: how the items along some axes of the batch are evaluated.

    Attributes
    ----------
    chunks : Chunks
        The number of items along this level, and the chunks that they are cut into.
    in_axes : tuple of int or None
        Where each mapped leaf has these items, once the levels around this one have taken theirs.
    axes : tuple of int
        The axes of the batch shape that this level covers; several where adjacent ones are merged.
    mapped : tuple of bool
        For each ranked leaf, whether this level maps it; the others are passed whole.
    reduced : bool
        Whether the items are folded. Otherwise their outputs are stored.
    is_loop : bool
        Whether chunks are evaluated one after another. Otherwise `jax.vmap` maps the level.
    derivative : Chunks or None
        The chunks of a derivative, if they are others.
    walker : object
        What walks the items of this level in place of a loop, such as lanes; ``str`` says how.
    numbered : bool
        Whether each item takes its place along the level as its last input.
    checkpoint : bool
        Whether the reverse pass computes each chunk again instead of storing its intermediates.
    linear : bool
        Whether a derivative needs no carry of a step. Otherwise steps are checkpointed as a whole,
        so that what they compute is not stored either.
    differentiable : bool
        Whether the loop may be differentiated.
    observer : Observer or None
        Who is told of the steps of the loop.
    """

    chunks: Chunks
    in_axes: tuple[int | None, ...] = ()
    axes: tuple[int, ...] = ()
    mapped: tuple[bool, ...] = ()
    reduced: bool = False
    is_loop: bool = True
    derivative: Chunks | None = None
    walker: Any = None
    numbered: bool = dataclasses.field(default=False, repr=False)
    checkpoint: bool = dataclasses.field(default=True, repr=False)
    linear: bool = dataclasses.field(default=True, repr=False)
    differentiable: bool = dataclasses.field(default=False, repr=False)
    observer: Any = dataclasses.field(default=None, repr=False)

    @property
    def size(self) -> int:
        """The number of items along this level."""
        return self.chunks.length

    @property
    def tile(self) -> int:
        """How many of them are evaluated at once; ``size`` where it is a plain `jax.vmap`."""
        return self.chunks.tile or self.chunks.size

    @property
    def chunk(self) -> int | None:
        """If no good tile divides the level: how many items a chunk has, which is cut by itself."""
        return self.chunks.size if self.chunks.tile else None

    @property
    def steps(self) -> int:
        """How many tiles cover this level."""
        return -(-self.chunks.size // self.tile) * self.chunks.steps if self.tile else 0


@functools.lru_cache(maxsize=4096)  # pure, and the same few shapes come again and again
def plan_levels(
    batches: tuple[InAxes, ...],
    batch_shape: Shape,
    chunk_size: int | None,
    reduced: frozenset[int] = frozenset(),
    tiles: Tiles = WHOLE_CHUNKS,
) -> tuple[Level, ...]:
    """Nest the maps that cover ``batch_shape``, outermost first; those that are reduced come last.

    Parameters
    ----------
    batches : tuple of shapes
        The lengths of each leaf along the axes of the batch; they broadcast to ``batch_shape``.
    chunk_size : int or None
        How many items may be in flight over all levels together.
    reduced : frozenset of int
        The axes of ``batch_shape`` that are reduced.
    tiles : Tiles
        How many items a tile should have where there are chunks, because that is faster.
    """
    aligned = [(None,) * (len(batch_shape) - len(batch)) + batch for batch in batches]
    levels = [
        Level(
            Chunks(size, size, 1),
            axes=(axis,),
            mapped=tuple([batch[axis] == size for batch in aligned]),
            reduced=axis in reduced,
            # With a bound of 1 even a single item is a chunk, so that branches are always branches.
            is_loop=size == chunk_size == 1 and axis not in reduced,
        )
        for axis, size in enumerate(batch_shape)
    ]
    levels.sort(key=operator.attrgetter("reduced"))
    if chunk_size is None or at_most(math.prod(batch_shape), chunk_size):
        return tuple(levels)
    tile, other = [min(chunk_size, best or chunk_size) for best in tiles[:2]]
    merged = _merged(levels, batch_shape)
    if tiles.side and len(merged) > 1 and not merged[-2].reduced:
        sides = _sides(merged, tiles.side, tiles.rows, chunk_size)
        cut = derivative = _cut(merged, chunk_size, chunk_size, sides)
    elif (row := _across(merged, tiles, chunk_size)) is not None:
        most = [level.size if level is row else 1 for level in merged]
        cut = derivative = list(map(split_into_chunks, [level.size for level in merged], most))
    elif reduced:  # no output of an item is stored, so the same tiles serve a derivative
        cut = derivative = _cut(merged, tile, tile)
    else:
        cut, derivative = _cut(merged, chunk_size, tile), _cut(merged, chunk_size, other)
    return tuple(
        [
            dataclasses.replace(
                level,
                chunks=chunks,
                is_loop=not at_most(chunks.steps, 1) or chunks.tile is not None,
                # A level that is mapped whole is no loop, in any direction.
                derivative=None if other == chunks or chunks.steps == 1 else other,
            )
            for level, chunks, other in zip(merged, cut, derivative, strict=True)
        ]
    )


def _across(levels: Sequence[Level], tiles: Tiles, most: int) -> Level | None:
    """Return the kept level of which each step evaluates all items, and one of the reduced ones.

    There is one if an array has it on a later axis than a reduced level. A tile along that would
    read a number from each of many lines of the cache, in every row again.
    """
    kept = [level for level in levels if not level.reduced]
    reduced = [level for level in levels if level.reduced]
    if not kept or not reduced or not all(is_known(level.size) for level in levels):
        return None
    row = kept[-1]
    is_later = any(
        on_row and on_reduced
        for level in reduced
        if level.axes < row.axes
        for on_row, on_reduced in zip(row.mapped, level.mapped, strict=True)
    )
    fits = _LEAST_ACROSS <= row.size <= min(tiles.across, most)
    items = row.size * math.prod(level.size for level in reduced)
    return row if is_later and fits and items > (tiles.forward or most) else None


def _merged(levels: Sequence[Level], batch_shape: Shape) -> list[Level]:
    """Make one level of adjacent axes that every leaf maps alike; drop axes of length 1."""
    merged: list[Level] = []
    for level in levels:
        if level.size == 1:
            continue
        last = merged[-1] if merged else level
        between = batch_shape[last.axes[-1] + 1 : level.axes[0]]
        is_alike = (last.mapped, last.reduced) == (level.mapped, level.reduced)
        if merged and is_alike and math.prod(between) == 1:
            size = last.size * level.size
            chunks, axes = Chunks(size, size, 1), last.axes + level.axes
            merged[-1] = dataclasses.replace(last, chunks=chunks, axes=axes)
        else:
            merged.append(level)
    return merged


def _sides(levels: Sequence[Level], side: int, rows: int, chunk_size: int) -> list[int]:
    """Return the most items of a tile along each level: ``side``, and more of a few rows.

    A map takes the innermost level whole, however long, if so many ``rows`` of it fit.
    """
    side = min(side, max(1, math.isqrt(chunk_size)))
    around, row = levels[-2:]
    few = around.size if at_most(around.size, side) else side
    along = max(side, min(_MOST_OF_FEW_ROWS, side * side // few))
    if rows and not row.reduced and is_known(row.size) and rows * row.size <= chunk_size:
        along = chunk_size
    return [*[side] * (len(levels) - 1), along]


def _cut(
    levels: Sequence[Level], chunk_size: int, tile: int, sides: Sequence[int] | None = None
) -> list[Chunks]:
    """Fill the tile from the innermost level outwards, each level up to its side."""
    cut: list[Chunks] = []
    for level, side in zip(levels[::-1], (sides or [chunk_size] * len(levels))[::-1], strict=True):
        sizes = [level.size] if is_known(level.size) else []
        chunks = split_into_tiles(level.size, min([*sizes, chunk_size, side]), tile)
        cut.append(chunks)
        in_tile = chunks.tile or chunks.size
        chunk_size //= in_tile
        tile //= in_tile
    return cut[::-1]


_MOST_OF_FEW_ROWS = 1024  # items of a row, in a tile of two sides
_LEAST_ACROSS = 32  # items: two lines of a cache, of float32

NO_ARRAY = -1  # the position of a leaf that is only a shape, as the option batch_shape is


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the items of a call are evaluated, and how its arrays enter the nested maps.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    batch_shape : tuple of int
        The axes of the batch, broadcast; outputs have them in front, without those in ``reduced``.
    leaves : tuple of LeafPlan
        Every leaf that has a rank, in the order of the parameters.
    levels : tuple of Level
        The nested maps, outermost first.
    reduced : tuple of int
        The axes of the batch shape that are reduced.
    reduce : str
        The name of the reduction.
    sizes : dict
        Of the named core dimensions.
    mapped : tuple of int
        The arrays that some level maps, by their position among the leaves of the call.
    cores : tuple of shapes
        Of one item of each of them.
    batch_axes : tuple of tuples of int or None
        Where each of them, as passed, has each axis of the batch.
    reshaped : tuple of (int, shape)
        The position of an array, and its shape without stretched axes.
    splits : tuple of Split
        Of keys of which each item gets its own, and of padded axes.
    names : tuple of str
        Of the last axes of the batch, if they have names.
    """

    kernel: str
    batch_shape: Shape
    leaves: tuple[LeafPlan, ...]
    levels: tuple[Level, ...]
    reduced: tuple[int, ...] = ()
    reduce: str = ""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    mapped: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    cores: tuple[Shape, ...] = dataclasses.field(default=(), repr=False)
    batch_axes: tuple[InAxes, ...] = dataclasses.field(default=(), repr=False)
    reshaped: tuple[tuple[int, Shape], ...] = dataclasses.field(default=(), repr=False)
    splits: tuple[Split, ...] = dataclasses.field(default=(), repr=False)
    names: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The name of each axis of the batch, or its number."""
        numbers = range(len(self.batch_shape) - len(self.names))
        return (*map(str, numbers), *self.names)

    @property
    def evaluations(self) -> int:
        """The number of items, which is the size of the batch."""
        return math.prod(self.batch_shape)

    @property
    def walked(self) -> int | None:
        """How many items a walker has in flight, if one walks the levels."""
        return next((level.walker.count for level in self.levels if level.walker), None)

    @property
    def in_flight(self) -> int:
        """The number of items evaluated at once, on each device if there are several."""
        return self.walked or math.prod([level.tile for level in self.levels])

    @property
    def steps(self) -> int:
        """The number of times that the batched kernel runs, one after another.

        Where items end by themselves, the number of items that each lane evaluates on average.
        """
        if self.walked is not None:
            return -(-self.evaluations // self.walked)
        return math.prod([level.steps for level in self.levels])

    @property
    def is_empty(self) -> bool:
        """Whether there is no item, or no batch."""
        return not self.levels or 0 in self.batch_shape

    @property
    def has_loop(self) -> bool:
        """Whether chunks are evaluated one after another."""
        return any(level.is_loop for level in self.levels)

    def across(self, tiles: Tiles) -> int:
        """Return how many items each step of a reduction has if it takes a kept axis whole, or 0.

        The plan has no chunks.
        """
        row = _across(_merged(self.levels, self.batch_shape), tiles, tiles.across)
        return row.size if row else 0

    def part(self, shape: Shape) -> Self:
        """Return the plan of a part of the batch, of this shape, without chunks."""

        def of(leaf: LeafPlan) -> LeafPlan:
            absent = len(shape) - len(leaf.lengths)
            sizes = zip(leaf.lengths, self.batch_shape[absent:], shape[absent:], strict=True)
            both = [(n == size, new if n == size else n) for n, size, new in sizes]
            # Stretched axes alone are none, or they would be axes of a part of 1 item.
            own = tuple([n for _, n in both]) if any(is_own for is_own, _ in both) else ()
            axes = tuple([n for n in own if n is not None])
            whole = (*leaf.core_shape[: leaf.axis], *axes, *leaf.core_shape[leaf.axis :])
            return dataclasses.replace(leaf, shape=whole, lengths=own, batch_axes=axes)

        leaves = tuple(map(of, self.leaves))
        return dataclasses.replace(self, batch_shape=shape, leaves=leaves).cut(None)

    def cut(self, chunk_size: int | None, tiles: Tiles = WHOLE_CHUNKS) -> Self:
        """Return the plan with at most ``chunk_size`` items in flight.

        Parameters
        ----------
        chunk_size : int or None
        tiles : Tiles
            How many items a tile should have where there are chunks, because that is faster.
        """
        leaves, shape = self.leaves, self.batch_shape
        batches = tuple([leaf.lengths for leaf in leaves])
        try:
            levels = plan_levels(batches, shape, chunk_size, frozenset(self.reduced), tiles)
        except UnknownLengthError as error:
            raise ValueError(f"{self.kernel}(): {error}") from None
        in_order = sorted(levels, key=operator.attrgetter("axes"))
        sizes = [level.chunks.length for level in in_order]
        fronts = [
            tuple([n for n, level in zip(sizes, in_order, strict=True) if level.mapped[i]])
            for i in range(len(leaves))
        ]
        arrays = [(leaf, new) for leaf, new in zip(leaves, fronts, strict=True) if leaf.is_array]
        mapped = [i for i, leaf in enumerate(leaves) if fronts[i] and leaf.is_array]
        return dataclasses.replace(
            self,
            levels=tuple(
                [
                    dataclasses.replace(level, in_axes=_in_axes(levels[n:], leaves, mapped))
                    for n, level in enumerate(levels)
                ]
            ),
            mapped=tuple([leaves[i].position for i in mapped]),
            cores=tuple([leaves[i].core_shape for i in mapped]),
            batch_axes=tuple([_batch_axes(leaves[i], shape) for i in mapped]),
            reshaped=tuple(
                [(x.position, new + x.core_shape) for x, new in arrays if new != x.batch_axes]
            ),
        )


def plan_ranks(
    fun: Callable[..., Any],
    arrays: Sequence[tuple[int, str, Shape, Rank]],
    error: Callable[..., Exception],
    reduce: str = "",
    reduce_axis: int | tuple[int, ...] | None = (),
    names: tuple[str, ...] = (),
) -> Plan:
    """Check the shapes of a call whose arrays have ranks, and plan it without chunks.

    Parameters
    ----------
    fun : callable
        The kernel.
    arrays : sequence of (position, path, shape, rank)
        Each leaf that has a rank; last, `NO_ARRAY` for a shape that only broadcasts with them.
    error : callable
        Returns what is raised, from all leaves, their ranks, their clashes, and the sizes of the
        named core dimensions: see `rankax.core.plan.report.call_error`.
    reduce, reduce_axis
        The name of the reduction, and the axes that it reduces, as the caller says it: None is all
        of them, and by default there are none.
    names : tuple of str
        Of the batch axes that have names, in order; they are the last ones.

    Raises
    ------
    Exception
        The ``error``.
    ValueError
        If an axis to reduce is out of range, or named twice.
    """
    leaves = [leaf_plan(path, shape, rank, i, names) for i, path, shape, rank in arrays]
    ranks = [rank for *_, rank in arrays]
    sizes: dict[str, int] = {}
    whole = [i for i, leaf in enumerate(leaves) if len(leaf.shape) >= leaf.rank + len(leaf.names)]
    clashes = bind_sizes([(i, leaves[i].core_shape, ranks[i]) for i in whole], sizes)
    batch_shape, batch_clashes = broadcast([(i, leaves[i].lengths) for i in whole], names)
    clashes += batch_clashes
    if clashes or len(whole) < len(leaves):
        raise error(leaves, ranks, clashes, sizes)
    axes = reduced_axes(fun, reduce_axis, batch_shape)
    splits = plan_splits(fun, leaves, batch_shape)
    plan = Plan(function_name(fun), batch_shape, tuple(leaves), (), axes, reduce, sizes)
    return dataclasses.replace(plan, splits=splits, names=names).cut(None)


@functools.lru_cache(maxsize=4096)  # pure, and the same few shapes come again and again
def plan_axis(
    name: str,
    length: int,
    arrays: tuple[tuple[int, Shape, int], ...],
    chunk_size: int | None,
    tiles: Tiles = WHOLE_CHUNKS,
    reduce: str = "",
) -> Plan:
    """Plan a call of the kernel ``name`` that maps one axis of ``length`` items.

    Parameters
    ----------
    arrays : tuple of (position, shape, axis)
        Each array that is mapped.
    chunk_size, tiles
        As in `Plan.cut`.
    reduce : str
        The name of the reduction of the axis, if there is one.
    """
    leaves = [
        LeafPlan(
            *("", x, len(x) - 1, x[:at] + x[at + 1 :], (length,), Rank(len(x) - 1), False, i, at),
            lengths=(length,),
        )
        for i, x, at in arrays
    ]
    axes = (0,) if reduce else ()
    return Plan(name, (length,), tuple(leaves), (), axes, reduce).cut(chunk_size, tiles)


def reduced_axes(
    fun: Callable[..., Any], axis: int | tuple[int, ...] | None, batch_shape: Shape
) -> tuple[int, ...]:
    """Return the axes to reduce, counted from the front, in order."""
    count = len(batch_shape)
    given = tuple(range(count)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if wrong := [number for number in given if not -count <= number < count]:
        raise ValueError(
            f"{function_location(fun)}: reduce_axis {wrong[0]} is out of range for the batch shape "
            f"{batch_shape}"
        )
    axes = tuple(sorted(number % count for number in given))
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"{function_location(fun)}: reduce_axis {axis} names an axis of the batch shape "
            f"{batch_shape} twice"
        )
    return axes


def _batch_axes(leaf: LeafPlan, batch_shape: Shape) -> InAxes:
    """Return where a leaf, as passed, has each axis of the batch."""
    absent, places = len(batch_shape) - len(leaf.lengths), itertools.count(leaf.axis)
    own = [(n, None if n is None else next(places)) for n in leaf.lengths]
    pairs = zip(own, batch_shape[absent:], strict=True)
    return (*[None] * absent, *[at if n == size else None for (n, at), size in pairs])


def _in_axes(levels: Sequence[Level], leaves: Sequence[LeafPlan], mapped: Sequence[int]) -> InAxes:
    """Return where each leaf has the first of these levels, while those inside are there too."""
    first, *inside = levels
    before = [level.mapped for level in inside if level.axes < first.axes]
    return tuple(
        [
            leaves[i].axis + sum(own[i] for own in before) if first.mapped[i] else None
            for i in mapped
        ]
    )
