# SPDX-License-Identifier: MIT
"""The kernel of a `FusedFold` in C++: each thread folds the items of one row, in nested loops.

What a row has is read once, before the loops; what lies along a reduced axis, in the loop of this
axis. Axes that all operands have alike are one loop. The state is a few variables. Where a sum
would round often, a block of `_BLOCK` items is folded by itself and added with what rounding took,
as long loops of `rankax.core.reduce.row` do.

States of bins are in memory, where each thread has its own: an item reads the state of its bin,
adds itself as exactly, and writes it. Atomic additions of floats would round each time, in any
order.

With few rows, the outermost loop is cut into parts, each for another thread. The caller merges what
threads hold.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from rankax.core.base.arrays import index_dtype
from rankax.core.loop.loop import Tile, TileSlots
from rankax.core.reduce.row import Accumulation
from rankax.ext.fused.scalars import MOST_NUMBERS, Lines, Refused, Translation, named, type_of
from rankax.ext.reductions.bins import InBins

_BLOCK = 32  # items that are folded without what rounding takes
MOST_INDEX = 2**31 - 64  # an index in a kernel has 32 bits, and goes a block beyond the last item
_THREADS, _LEAST_ITEMS = 2**17, 64  # wanted, and items of each at least
_MOST_IN_BINS, _MOST_HELD = 2**12, 2**23  # numbers of each thread, and of all of them

# CUDA has these, Warp on a CPU has not. `div.full` is within two units in the last place.
_OF_CUDA = ("rsqrt", "log1p", "expm1", "asinh", "acosh", "atanh")
_MACROS = "\n".join(
    [
        """
auto rankax_bits = [](auto x, auto like) {
    union { decltype(x) from; decltype(like) to; } both; both.from = x; return both.to; };
#define rankax_div(x, y) ((x)/(y))
#ifdef __CUDA_ARCH__
auto rankax_divf = [](float x, float y) {
    float q; asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y)); return q; };""",
        *(f"#define rankax_{name}{f}(x) {name}{f}(x)" for name in _OF_CUDA for f in ("", "f")),
        """#else
#define rankax_divf(x, y) ((x)/(y))
#define rankax_rsqrtf(x) (1.f/sqrtf(x))
#define rankax_rsqrt(x) (1./sqrt(x))
#define rankax_log1p(x) (1.+(x)==1.||(x)-(x)!=0?(x):log(1.+(x))*((x)/((1.+(x))-1.)))
#define rankax_expm1(x) (fabs(x)<1e-5?(x)+(x)*(x)/2:2*sinh((x)/2)*exp((x)/2))
#define rankax_asinhq(x) rankax_log1p((x)+(x)*(x)/(1+sqrt((x)*(x)+1)))
#define rankax_asinhp(x) ((x)>1e150?log(x)+0.6931471805599453:rankax_asinhq(x))
#define rankax_asinh(x) ((x)<0?-rankax_asinhp(-(x)):rankax_asinhp(x))
#define rankax_acosh(x) ((x)>1e150?log(x)+0.6931471805599453:log((x)+sqrt(((x)-1)*((x)+1))))
#define rankax_atanh(x) ((rankax_log1p(x)-rankax_log1p(-(x)))/2)""",
        *(
            f"#define rankax_{name}f(x) ((float)rankax_{name}((double)(x)))"
            for name in _OF_CUDA[1:]
        ),
        "#endif",
    ]
)


class AxisGroup(NamedTuple):
    """Adjacent axes that all operands have alike, as one."""

    size: int
    reduced: bool
    on: tuple[bool, ...]  # which operands have them
    name: str  # of the index


class Source(NamedTuple):
    """The text of a kernel, and what it takes and returns."""

    body: str
    operands: tuple[str, ...]  # their types
    numbers: tuple[str, ...]  # the names of integers that it takes after them
    outs: tuple[str, ...]  # the types of what it returns
    chooses: bool  # whether an item reads a float of an argument by a computed index


def groups_of(sizes: Sequence[int], reduced: Sequence[bool], on: Sequence[Any]) -> list[AxisGroup]:
    """Merge axes that are alike; those of length 1 are none."""
    found: list[AxisGroup] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        group = AxisGroup(size, reduced[axis], tuple([own[axis] for own in on]), f"i{len(found)}")
        last = found[-1] if found else group._replace(size=MOST_INDEX)
        if last[1:3] == group[1:3] and last.size * size <= MOST_INDEX:
            found[-1] = last._replace(size=last.size * size)
        else:
            found.append(group)
    return found


def parts_of(groups: Sequence[AxisGroup], numbers: int) -> tuple[int, int, int]:
    """Return how many rows there are, how many parts of each, and how long a part is.

    Each part holds so many ``numbers``.
    """
    rows = math.prod(group.size for group in groups if not group.reduced)
    loops = [group.size for group in groups if group.reduced] or [1]
    threads = min(_THREADS, _MOST_HELD // numbers)
    wanted = min(threads // max(rows, 1), math.prod(loops) // _LEAST_ITEMS, loops[0])
    length = -(-loops[0] // max(1, wanted))
    return rows, -(-loops[0] // length), length


def kernel_of(
    item: ClosedJaxpr, groups: Sequence[AxisGroup], steps: Sequence[Accumulation]
) -> Source:
    """Write the kernel.

    Parameters
    ----------
    item : ClosedJaxpr
        From one item of each operand to what the steps take.
    groups : sequence of AxisGroup
    steps : sequence of Accumulation
        What is folded; outputs have one slot. `Source.outs` are the states that they begin with.

    Raises
    ------
    Refused
        For what no kernel has.
    """
    loops = [group for group in groups if group.reduced]
    lines, depth = Lines("t"), len(loops)
    loads, args = _loads(item, groups, lines)
    outs = _Names(item.out_avals, Translation(lines).program(item, args))
    dtype = index_dtype(math.prod(loop.size for loop in loops))
    lines.depth["at"] = depth
    at = _Names(jax.ShapeDtypeStruct((), dtype), [np.array("at", object)])
    states = _StateWriter(outs, at, lines, [])
    try:
        codes = list(map(states.code, steps, itertools.count()))
    except Refused as error:
        raise Refused(f"a reduction whose state takes more than arithmetic ({error})") from None
    start, fresh, moved, joined, end = map(itertools.chain.from_iterable, zip(*codes, strict=True))
    index = type_of(dtype)
    flat = functools.reduce(lambda at, x: f"({at}*n{x.name}+{x.name})", loops, f"({index})0")
    items = [f"const {index} at = {flat};", *lines.lines[depth], *moved]
    before = [*loads.get(0, []), *(lines.lines[0] if loops else [])]
    loop = _nested(loops, loads, lines, fresh, items, joined)
    body = [_MACROS, _places(groups), *before, *start, *loop, *end]
    numbers = (*(f"n{group.name}" for group in groups), "rows", "len")
    operands = tuple([type_of(aval.dtype) for aval in item.in_avals])
    return Source("\n".join(body), operands, numbers, tuple(states.results), lines.chooses)


def _loads(item: ClosedJaxpr, groups: Sequence[AxisGroup], lines: Lines) -> tuple[Any, list[Any]]:
    """Return the lines that read operands, by depth, and the names of what they read."""
    loops = [group for group in groups if group.reduced]
    loads: dict[int, list[str]] = {}
    args: list[Any] = []
    for k, aval in enumerate(item.in_avals):
        if aval.size > MOST_NUMBERS:
            raise Refused(f"an argument with {aval.size} numbers for each item")
        depth = max((i for i, loop in enumerate(loops, 1) if loop.on[k]), default=0)
        offset, stride = [], str(aval.size)
        for group in reversed(groups):
            if group.on[k]:
                offset.append(f"{group.name}*{stride}")
                stride = f"n{group.name}*{stride}"
        names = [f"a{k}_{c}" for c in range(aval.size)]
        own_lines = loads.setdefault(depth, [])
        own_lines.append(f"const int o{k} = {'+'.join(offset) or 0};")
        type_ = type_of(aval.dtype)
        own_lines += [f"const {type_} {x} = A{k}.data[o{k}+{c}];" for c, x in enumerate(names)]
        lines.depth |= dict.fromkeys(names, depth)
        args.append(np.array(names, object).reshape(aval.shape))
    return loads, args


def _places(groups: Sequence[AxisGroup]) -> str:
    """Return the lines that say which row, and which part of it, a thread has."""
    text = ["int r = tid % rows; const int part = tid / rows;"]
    for group in reversed([group for group in groups if not group.reduced]):
        text.append(f"const int {group.name} = r % n{group.name}; r /= n{group.name};")
    return "\n".join(text)


def _nested(loops: Any, loads: Any, lines: Lines, before: Any, item: Any, after: Any) -> list[str]:
    """Return the loops around a block: what stands before, in and after its loop over items."""
    if not loops:
        return [*before, *item, *after]
    # The index of the outermost loop begins and ends in a part.
    n = f"n{loops[0].name}"
    text = [f"const int end = {n}-part*len > len ? part*len+len : {n};"]
    first, last = "part*len", "end"
    for depth, loop in enumerate(loops, 1):
        i = loop.name
        if depth < len(loops):
            text.append(f"for (int {i} = {first}; {i} < {last}; ++{i}) {{")
            text += [*loads.get(depth, []), *lines.lines[depth]]
            first, last = "0", f"n{loops[depth].name}"
            continue
        text.append(f"for (int b = {first}; b < {last}; b += {_BLOCK}) {{")
        text += [f"const int e = b+{_BLOCK} < {last} ? b+{_BLOCK} : {last};", *before]
        text += ["#pragma unroll 4", f"for (int {i} = b; {i} < e; ++{i}) {{"]
        text += [*loads.get(depth, []), *item, "}", *after]
    return [*text, *["}"] * len(loops)]


class _Names:
    """The numbers of a tree of arrays, by their names in a kernel."""

    def __init__(self, like: Any, names: Sequence[Any]) -> None:
        self.like, self.avals = like, jax.tree.leaves(like)
        pairs = zip(names, self.avals, strict=True)
        self.arrays = [named(x, aval.dtype).reshape(aval.shape) for x, aval in pairs]
        self.names = [name for array in self.arrays for name in array.ravel()]

    def defined(self, values: _Names) -> list[str]:
        """Return the lines that make variables."""
        types = [type_of(aval.dtype) for aval in self.avals for _ in range(aval.size)]
        triples = zip(types, self.names, values.names, strict=True)
        return [f"{type_} {name} = {text};" for type_, name, text in triples]

    def assigned(self, values: _Names) -> list[str]:
        """Return the lines that give variables new values, all at once."""
        new = _variables(self.like, "new{0}_{2}")
        pairs = zip(self.names, new.names, strict=True)
        return ["{", *new.defined(values), *(f"{own} = {x};" for own, x in pairs), "}"]


def _variables(like: Any, text: str, first: int = 0) -> _Names:
    """Return names made of a text, the place of an array, its size, and the place of a number."""
    avals = jax.tree.leaves(like)
    if sum(aval.size for aval in avals) > MOST_NUMBERS:
        raise Refused(f"a state of more than {MOST_NUMBERS} numbers")
    each = [[text.format(k, x.size, c) for c in range(x.size)] for k, x in enumerate(avals, first)]
    return _Names(like, [np.array(own, object) for own in each])


def _translated(lines: Lines, fun: Callable[..., Any], *args: _Names) -> _Names:
    """Translate a function of trees; return what it returns."""
    closed, like = jax.make_jaxpr(fun, return_shape=True)(*(own.like for own in args))
    return _Names(like, Translation(lines).program(closed, [x for own in args for x in own.arrays]))


class _StateWriter(NamedTuple):
    """Writes what is done to states, by items that have these outputs and this flat index."""

    outs: _Names
    at: _Names
    lines: Lines  # of an item
    results: list[str]  # the types of all states so far

    def code(self, step: Accumulation, k: int) -> Sequence[list[str]]:
        """Return the lines about the state of step ``k``: see `Accumulation`.

        They make it, begin a block of items, take an item, end a block, and write the state.
        """
        bins: Any = step.accumulator if isinstance(step.accumulator, InBins) else None
        own = Accumulation(0, bins.own, 1, step.is_long) if bins else step
        before, first = Lines(f"b{k}_"), len(self.results)
        start = _translated(before, lambda: own.start(1))
        held = _variables(start.like, f"h{k}_{{0}}_{{2}}")
        self.results.extend(type_of(aval.dtype) for aval in held.avals)
        place = _variables(start.like, f"O{{0}}.data[{'p' if bins else 'tid'}*{{1}}+{{2}}]", first)
        if bins is None:
            begin = [*before.lines[0], *held.defined(start)]
            return begin, *self._folded(step, k, held), place.assigned(held)
        if len(held.names) * bins.length > _MOST_IN_BINS:
            raise Refused(f"more than {_MOST_IN_BINS} numbers in all bins")
        every = f"for (int p = tid*{bins.length}; p < (tid+1)*{bins.length}; ++p)"
        begin = [*before.lines[0], every, *place.assigned(start)]
        return begin, [], self._binned(step, own, k, held, place), [], []

    def _folded(self, step: Accumulation, k: int, held: _Names) -> Any:
        """Return how items move variables that are held: before, in and after a block of items."""
        before, after = Lines(f"f{k}_"), Lines(f"w{k}_")
        fresh = _translated(before, lambda held: step.fresh(held, 1), held)
        group = _variables(fresh.like, f"g{k}_{{0}}_{{2}}")
        self.lines.depth |= dict.fromkeys(group.names, self.lines.depth["at"])

        def moved(group: Any, outs: Any, at: Any) -> Any:
            return step.of_group.step(group, tile_of(outs, at))[0]

        new = _translated(self.lines, moved, group, self.outs, self.at)
        joined = _translated(after, lambda *two: step.with_group(two[0], two[1], None), held, group)
        begin, end = group.defined(fresh), held.assigned(joined)
        return [*before.lines[0], *begin], group.assigned(new), [*after.lines[0], *end]

    def _binned(
        self, step: Accumulation, own: Accumulation, k: int, held: _Names, place: _Names
    ) -> list[str]:
        """Return how an item moves the states of its bins, each at its ``place``."""
        bins: Any = step.accumulator
        at, *places = jax.tree.leaves(step.outputs)
        labels, found = self.outs.arrays[at].ravel(), list[str]()
        for c, label in enumerate(labels):

            def moved(held: Any, at: Any, value: Any, c: int = c) -> Any:
                value = value or [jnp.ones((), bins.own.dtype)]
                at = at * at.dtype.type(len(labels)) + at.dtype.type(c)
                return own.step(held, tile_of([*value, jnp.bool_(True)], at))[0]

            value = [self.outs.arrays[i].reshape(len(labels), -1)[c] for i in places]
            like = [jax.ShapeDtypeStruct(bins.own.core, self.outs.avals[i].dtype) for i in places]
            inner = Lines(f"m{k}_{c}_")
            new = _translated(inner, moved, held, self.at, _Names(like, value))
            counts = [] if step.mask is None else self.outs.arrays[step.mask].ravel()
            test = " && ".join([f"{label} >= 0", f"{label} < {bins.length}", *counts])
            found += [f"if ({test}) {{", f"const int p = tid*{bins.length}+{label};"]
            found += [*held.defined(place), *inner.lines[0], *place.assigned(new), "}"]
        return found


def tile_of(outs: Sequence[Any], at: Any) -> Tile:
    """Return a tile of one item."""
    return Tile([x[..., None] for x in outs], at, None, TileSlots(1, (), at.dtype))
