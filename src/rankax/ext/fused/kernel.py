# SPDX-License-Identifier: MIT
"""The kernel of a `FusedFold` in C++: each thread folds the items of one row, in nested loops.

What a row has is read once, before the loops; what lies along a reduced axis, in the loop of this
axis. Axes that all operands have alike are one loop. The state is a few variables. Where a sum
would round often, a block of `_BLOCK` items is folded by itself and added with what rounding took,
as long loops of `rankax.core.reduce.row` do.

With few rows, the outermost loop is cut into parts, each for another thread; what they return is
merged by the caller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from rankax.core.base.arrays import index_dtype
from rankax.core.loop.loop import Tile, TileSlots, steps_of
from rankax.core.loop.shared import MOST_PLAIN
from rankax.core.reduce.row import Accumulation
from rankax.ext.fused.scalars import MOST_NUMBERS, Lines, Refused, Translation, named, type_of

_BLOCK = 32  # items that are folded without what rounding takes
MOST_INDEX = 2**31 - 64  # an index in a kernel has 32 bits, and goes a block beyond the last item
_THREADS, _LEAST_ITEMS = 2**17, 64  # wanted, and items of each at least

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


def groups_of(sizes: Sequence[int], reduced: Sequence[bool], on: Sequence[Any]) -> list[AxisGroup]:
    """Merge axes that are alike; those of length 1 are none."""
    found: list[AxisGroup] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        group = AxisGroup(size, reduced[axis], tuple([own[axis] for own in on]), f"i{len(found)}")
        last = found[-1] if found else group._replace(size=MOST_INDEX)
        is_alike = (last.reduced, last.on) == (group.reduced, group.on)
        if is_alike and last.size * size <= MOST_INDEX:
            found[-1] = last._replace(size=last.size * size)
        else:
            found.append(group)
    return found


def parts_of(groups: Sequence[AxisGroup]) -> tuple[int, int, int]:
    """Return how many rows there are, how many parts of each, and how long a part is."""
    rows = math.prod(group.size for group in groups if not group.reduced)
    loops = [group.size for group in groups if group.reduced] or [1]
    wanted = min(_THREADS // max(rows, 1), math.prod(loops) // _LEAST_ITEMS, loops[0])
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
        What is folded; outputs have one slot.

    Raises
    ------
    Refused
        For what no kernel has.
    """
    loops = [group for group in groups if group.reduced]
    lines, depth = Lines("t"), len(loops)
    loads, args = _loads(item, groups, lines)
    outs = Translation(lines).program(item, args)
    state = _StateCode(steps, item.out_avals, index_dtype(math.prod(loop.size for loop in loops)))
    held, of_group = state.held, state.of_group
    lines.depth |= dict.fromkeys([*of_group.names, "at"], depth)
    try:
        moved = Translation(lines).program(state.moved, [*of_group.arrays, *outs, state.at])
    except Refused as error:
        raise Refused(f"a reduction whose state takes more than arithmetic ({error})") from None
    ends, values = _translated("z", state.totals, held)
    results = jax.tree.leaves(state.ends)
    writes = [
        f"O{k}.data[tid*{aval.size}+{c}] = {text};"
        for k, (aval, x) in enumerate(zip(results, values, strict=True))
        for c, text in enumerate(named(x, aval.dtype).ravel())
    ]
    index = type_of(state.dtype)
    flat = functools.reduce(lambda at, x: f"({at}*n{x.name}+{x.name})", loops, f"({index})0")
    block = (
        _code(of_group.defined, _translated("f", state.fresh, held)),
        [f"const {index} at = {flat};", *lines.lines[depth], *of_group.assigned(moved)],
        _code(held.assigned, _translated("w", state.joined, held, of_group)),
    )
    before = [*loads.get(0, []), *(lines.lines[0] if loops else [])]
    body = [
        *(_MACROS, _places(groups), *before, *_code(held.defined, _translated("b", state.start))),
        *_nested(loops, loads, lines, block),
        *(*ends, *writes),
    ]
    numbers = (*(f"n{group.name}" for group in groups), "rows", "len")
    types = tuple([type_of(aval.dtype) for aval in item.in_avals])
    return Source("\n".join(body), types, numbers, tuple([type_of(x.dtype) for x in results]))


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


def _nested(loops: Sequence[AxisGroup], loads: Any, lines: Lines, block: Any) -> list[str]:
    """Return the loops around a block: what stands before, in and after its loop over items."""
    before, item, after = block
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


class _Variables:
    """The numbers of a tree of arrays, as variables of a kernel."""

    def __init__(self, prefix: str, like: Any) -> None:
        self.avals, self.tree = jax.tree.flatten(like)
        self.arrays = [
            np.array([f"{prefix}{k}_{c}" for c in range(aval.size)], object).reshape(aval.shape)
            for k, aval in enumerate(self.avals)
        ]
        self.names = [name for array in self.arrays for name in array.ravel()]
        if len(self.names) > MOST_NUMBERS:
            raise Refused(f"a state of {len(self.names)} numbers")

    def _with(self, values: Sequence[Any]) -> list[tuple[str, str, str]]:
        """Return types, names and values."""
        return [
            (type_of(aval.dtype), name, text)
            for aval, names, x in zip(self.avals, self.arrays, values, strict=True)
            for name, text in zip(names.ravel(), named(x, aval.dtype).ravel(), strict=True)
        ]

    def defined(self, values: Sequence[Any]) -> list[str]:
        """Return the lines that make them."""
        return [f"{type_} {name} = {text};" for type_, name, text in self._with(values)]

    def assigned(self, values: Sequence[Any]) -> list[str]:
        """Return the lines that give them new values, all at once."""
        new = self._with(values)
        lines = [f"const {type_} new_{name} = {text};" for type_, name, text in new]
        return [*lines, *(f"{name} = new_{name};" for _, name, _ in new)]


class _StateCode:
    """What is held of a row, and what a group of its items changes: see `Accumulation`."""

    def __init__(self, steps: Sequence[Accumulation], avals: Sequence[Any], dtype: Any) -> None:
        # As in long loops, whatever the length, so that one kernel serves all.
        self.steps, self.dtype = [step.over(MOST_PLAIN + 1) for step in steps], dtype
        like = jax.eval_shape(self.start)
        self.held, self.ends = _Variables("h", like), jax.eval_shape(self.totals, like)
        self.of_group = _Variables("g", jax.eval_shape(self.fresh, like))
        groups, slots = [step.of_group for step in self.steps], TileSlots(1, (), dtype)

        def moved(of_group: Any, outs: Any, at: Any) -> Any:
            tile = Tile([x[..., None] for x in outs], at, None, slots)
            return jax.tree.leaves(steps_of(groups, of_group, tile)[0])

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        group = self.of_group.tree.unflatten(self.of_group.avals)
        self.at = np.array("at", object)
        self.moved = jax.make_jaxpr(moved)(group, shapes, jax.ShapeDtypeStruct((), dtype))

    def start(self) -> list[Any]:
        return [step.start(1) for step in self.steps]

    def fresh(self, held: Any) -> list[Any]:
        return [step.fresh(own, 1) for step, own in zip(self.steps, held, strict=True)]

    def joined(self, held: Any, of_group: Any) -> list[Any]:
        triples = zip(self.steps, held, of_group, strict=True)
        return [step.with_group(own, group, None) for step, own, group in triples]

    def totals(self, held: Any) -> list[Any]:
        pairs = zip(self.steps, held, strict=True)
        return [x.accumulator.total(own) if x.is_long else own for x, own in pairs]


def _translated(prefix: str, fun: Callable[..., Any], *args: _Variables) -> Any:
    """Translate a function of trees; return the lines, and the leaves of what it returns."""
    closed = jax.make_jaxpr(lambda *trees: jax.tree.leaves(fun(*trees)))(
        *(own.tree.unflatten(own.avals) for own in args)
    )
    lines = Lines(prefix)
    values = Translation(lines).program(closed, [x for own in args for x in own.arrays])
    return lines.lines[0], values


def _code(write: Callable[[Any], list[str]], translated: Any) -> list[str]:
    lines, values = translated
    return [*lines, *write(values)]
