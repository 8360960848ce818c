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
from rankax.ext.fused.scalars import Lines, Refused, Translation, is_known, literal, type_of

_BLOCK = 32  # items that are folded without what rounding takes
_MOST_NUMBERS = 256  # of an argument of one item, or of a state
MOST_INDEX = 2**31 - 1  # indices in a kernel are 32-bit integers
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

    axes: tuple[int, ...]
    size: int
    reduced: bool
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
        alike = (reduced[axis], *(own[axis] for own in on))
        last = found[-1] if found else None
        is_alike = last and alike == (last.reduced, *(own[last.axes[0]] for own in on))
        if last and is_alike and last.size * size <= MOST_INDEX:
            found[-1] = AxisGroup((*last.axes, axis), last.size * size, last.reduced, last.name)
            continue
        found.append(AxisGroup((axis,), size, reduced[axis], f"i{len(found)}"))
    return found


def parts_of(groups: Sequence[AxisGroup]) -> tuple[int, int, int]:
    """Return how many rows there are, how many parts of each, and how long a part is."""
    rows = math.prod(group.size for group in groups if not group.reduced)
    loops = [group.size for group in groups if group.reduced]
    if not loops:
        return rows, 1, 1
    wanted = min(_THREADS // max(rows, 1), math.prod(loops) // _LEAST_ITEMS, loops[0])
    length = -(-loops[0] // max(1, wanted))
    return rows, -(-loops[0] // length), length


def kernel_of(
    item: ClosedJaxpr, groups: Sequence[AxisGroup], on: Sequence[Any], steps: Sequence[Accumulation]
) -> Source:
    """Write the kernel.

    Parameters
    ----------
    item : ClosedJaxpr
        From one item of each operand to what the steps take.
    groups : sequence of AxisGroup
    on : sequence of tuple of bool
        For each operand, which axes it has.
    steps : sequence of Accumulation
        What is folded; outputs have one slot.

    Raises
    ------
    Refused
        For what no kernel has.
    """
    loops = [group for group in groups if group.reduced]
    lines = Lines("t")
    loads, args = _loads(item, groups, on, lines)
    translation = Translation(lines)
    outs = translation.program(item, args)
    count = math.prod(group.size for group in loops)
    state = _StateCode(steps, item.out_avals, count)
    held, depth = state.named("h"), len(loops)
    inner = state.named("g") if state.is_long else held
    lines.depth |= dict.fromkeys(_names(inner), depth) | {"at": depth}
    at, dtype = np.array("at", object), index_dtype(count)
    try:
        moved = translation.program(state.step, [*inner, *outs, at])
    except Refused as error:
        raise Refused(f"a reduction whose state takes more than arithmetic ({error})") from None
    type_ = type_of(dtype)
    body = [f"const {type_} at = {_flat_index(loops, type_)};", *lines.at(depth)]
    body += state.assigned(inner, moved)
    begin = [*loads.get(0, []), *lines.at(0)] if loops else []
    text = [_MACROS, _places(groups), *begin, *state.defined("h", state.begun("b"))]
    if not loops:
        text += [*loads.get(0, []), *body]
    else:
        text += _nested(loops, loads, lines, state, body)
    text += state.written(held)
    numbers = (*(f"n{group.name}" for group in groups), "rows", "len")
    types = tuple([type_of(aval.dtype) for aval in item.in_avals])
    return Source("\n".join(text), types, numbers, tuple(state.types))


def _loads(
    item: ClosedJaxpr, groups: Sequence[AxisGroup], on: Sequence[Any], lines: Lines
) -> tuple[dict[int, list[str]], list[Any]]:
    """Return the lines that read operands, by depth, and the names of what they read."""
    loops = [group for group in groups if group.reduced]
    loads: dict[int, list[str]] = {}
    args: list[Any] = []
    for k, (aval, own) in enumerate(zip(item.in_avals, on, strict=True)):
        if aval.size > _MOST_NUMBERS:
            raise Refused(f"an argument with {aval.size} numbers for each item")
        depth = max((i for i, loop in enumerate(loops, 1) if own[loop.axes[0]]), default=0)
        offset, stride = [], str(aval.size)
        for group in reversed(groups):
            if own[group.axes[0]]:
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


def _flat_index(loops: Sequence[AxisGroup], type_: str) -> str:
    text = "0"
    for loop in loops:
        text = f"({text}*n{loop.name}+{loop.name})"
    return f"({type_}){text}"


def _nested(
    loops: Sequence[AxisGroup], loads: Any, lines: Lines, state: _StateCode, body: Sequence[str]
) -> list[str]:
    """Return the loops; the innermost one is cut into blocks if sums are long."""
    text: list[str] = []
    for depth, loop in enumerate(loops, 1):
        first = "part*len" if depth == 1 else "0"
        last = f"n{loop.name}"
        if depth == 1:
            text.append(f"const int end = {first}+len < {last} ? {first}+len : {last};")
            last = "end"
        i = loop.name
        inside = [*loads.get(depth, [])]
        if depth < len(loops):
            text += [f"for (int {i} = {first}; {i} < {last}; ++{i}) {{", *inside, *lines.at(depth)]
            continue
        unroll = "#pragma unroll 4"
        if not state.is_long:
            text += [
                unroll,
                f"for (int {i} = {first}; {i} < {last}; ++{i}) {{",
                *inside,
                *body,
                "}",
            ]
            continue
        text += [
            f"for (int b = {first}; b < {last}; b += {_BLOCK}) {{",
            f"const int e = b+{_BLOCK} < {last} ? b+{_BLOCK} : {last};",
            *state.defined("g", state.fresh("f")),
            unroll,
            *(f"for (int {i} = b; {i} < e; ++{i}) {{", *inside, *body, "}"),
            *state.joined("w"),
            "}",
        ]
    return text + ["}"] * (len(loops) - 1)


def _names(arrays: Sequence[Any]) -> list[str]:
    return [name for array in arrays for name in array.ravel()]


class _StateCode:
    """The variables of a state, and the programs that change them."""

    def __init__(self, steps: Sequence[Accumulation], avals: Sequence[Any], count: int) -> None:
        # As long ones, whatever the length: so one kernel serves all.
        self.steps = [step.over(MOST_PLAIN + 1) for step in steps]
        self.is_long = any(step.is_long for step in self.steps)
        held, of_group = self.starts()
        self.tree, self.group_tree = jax.tree.structure(held), jax.tree.structure(of_group)
        self.avals, self.group_avals = jax.tree.leaves(held), jax.tree.leaves(of_group)
        index = jax.ShapeDtypeStruct((), index_dtype(count))
        groups = [step.of_group for step in self.steps]
        slots = TileSlots(1, (), index_dtype(count))

        def step(held: Any, outs: Any, at: Any) -> Any:
            tile = Tile([x[..., None] for x in outs], at, None, slots)
            return jax.tree.leaves(steps_of(groups, held, tile)[0])

        self.step = jax.make_jaxpr(step)(of_group, list(map(_shape, avals)), index)
        self.end = jax.make_jaxpr(lambda held: jax.tree.leaves(self._totals(held)))(held)
        self.types = [type_of(aval.dtype) for aval in self.end.out_avals]
        if sum(aval.size for aval in self.end.out_avals) > _MOST_NUMBERS:
            raise Refused(f"a state of more than {_MOST_NUMBERS} numbers")

    def starts(self) -> tuple[Any, Any]:
        """Return the types of what is held before the first item, and by a group."""

        def start() -> Any:
            held = [step.start(1) for step in self.steps]
            pairs = zip(self.steps, held, strict=True)
            return held, [step.fresh(own, 1) for step, own in pairs]

        return jax.eval_shape(start)

    def _totals(self, held: Any) -> Any:
        pairs = zip(self.steps, held, strict=True)
        return [x.accumulator.total(own) if x.is_long else own for x, own in pairs]

    def named(self, prefix: str) -> list[Any]:
        """Return the variables of what is held, or of a group, as arrays of names."""
        avals = self.avals if prefix == "h" else self.group_avals
        return [
            np.array([f"{prefix}{k}_{c}" for c in range(aval.size)], object).reshape(aval.shape)
            for k, aval in enumerate(avals)
        ]

    def begun(self, prefix: str) -> tuple[list[str], list[Any]]:
        """Return the lines and the values of what is held before the first item."""

        def start() -> Any:
            return jax.tree.leaves([step.start(1) for step in self.steps])

        return _lines(prefix, start)

    def fresh(self, prefix: str) -> tuple[list[str], list[Any]]:
        """Return the lines and the values of a group before its first item."""

        def fresh(held: Any) -> Any:
            pairs = zip(self.steps, held, strict=True)
            return jax.tree.leaves([step.fresh(own, 1) for step, own in pairs])

        return _lines(prefix, fresh, (self.tree, self.avals, self.named("h")))

    def joined(self, prefix: str) -> list[str]:
        """Return the lines that add a group to what is held."""

        def joined(held: Any, of_group: Any) -> Any:
            triples = zip(self.steps, held, of_group, strict=True)
            return jax.tree.leaves([step.with_group(a, b) for step, a, b in triples])

        of_group = self.group_tree, self.group_avals, self.named("g")
        held = self.named("h")
        text, values = _lines(prefix, joined, (self.tree, self.avals, held), of_group)
        return [*text, *self.assigned(held, values)]

    def defined(self, prefix: str, begun: tuple[list[str], list[Any]]) -> list[str]:
        """Return the lines that make variables with some values."""
        lines, values = begun
        avals = self.avals if prefix == "h" else self.group_avals
        triples = zip(avals, self.named(prefix), values, strict=True)
        own = [
            f"{type_of(aval.dtype)} {name} = {value};"
            for aval, names, array in triples
            for name, value in zip(names.ravel(), _texts(array, aval), strict=True)
        ]
        return [*lines, *own]

    def assigned(self, variables: Sequence[Any], values: Sequence[Any]) -> list[str]:
        """Return the lines that give variables new values, all at once."""
        avals = self.avals if variables[0].ravel()[0][0] == "h" else self.group_avals
        pairs = [
            (type_of(aval.dtype), name, value)
            for aval, names, array in zip(avals, variables, values, strict=True)
            for name, value in zip(names.ravel(), _texts(array, aval), strict=True)
        ]
        pairs = [(type_, name, value) for type_, name, value in pairs if name != value]
        new = [f"const {type_} new_{name} = {value};" for type_, name, value in pairs]
        return [*new, *(f"{name} = new_{name};" for _, name, _ in pairs)]

    def written(self, held: Sequence[Any]) -> list[str]:
        """Return the lines that write the state of a thread."""
        lines = Lines("z")
        totals = Translation(lines).program(self.end, held)
        own = [
            f"O{k}.data[tid*{aval.size}+{c}] = {value};"
            for k, (array, aval) in enumerate(zip(totals, self.end.out_avals, strict=True))
            for c, value in enumerate(_texts(array, aval))
        ]
        return [*lines.at(0), *own]


def _lines(prefix: str, fun: Callable[..., Any], *args: Any) -> tuple[list[str], list[Any]]:
    """Translate a function of trees of variables, each a structure, types and names."""
    trees = [tree.unflatten(avals) for tree, avals, _ in args]
    lines, names = Lines(prefix), [name for *_, own in args for name in own]
    values = Translation(lines).program(jax.make_jaxpr(fun)(*trees), names)
    return lines.at(0), values


def _texts(array: Any, aval: Any) -> list[str]:
    """Return the numbers of an array as text."""
    array = np.broadcast_to(array, aval.shape)
    if not is_known(array):
        return list(array.ravel())
    return [literal(x, type_of(aval.dtype)) for x in array.ravel()]


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
