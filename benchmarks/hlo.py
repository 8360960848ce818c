# SPDX-License-Identifier: MIT
"""Read what a program does from what XLA compiled: loops, launches, bytes, operations, collectives.

`read` takes a compiled program, of this machine or of one that is not there, and `read_text` its
HLO. Kernels, copies and loops are exactly those of the program. Bytes and operations are counted
simply: each kernel reads and writes its arrays once, of a slice only the slice; an element that is
computed is one operation, and one of a matrix product is two for each pair that is multiplied.
Calls of libraries other than matrix products have no operations here.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

# What the host starts, one by one: kernels, and copies within the memory of the device.
KERNELS = {
    *("fusion", "custom-call", "reduce", "scatter", "sort", "dynamic-update-slice"),
    *("dot", "convolution", "fft", "gather", "reduce-window", "select-and-scatter"),
    *("cholesky", "triangular-solve", "rng-bit-generator", "rng-get-and-update-state"),
}
COPIES = {"fusion-start", "copy-start", "copy"}
SENDS = {
    *("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"),
    *("ragged-all-to-all", "collective-broadcast"),
}
FROM_HOST = {"infeed", "outfeed", "send", "recv"}
HOST_MEMORY = "S(5)"

# What moves numbers, or is decided when the program is compiled.
MOVES = {
    *("parameter", "constant", "bitcast", "broadcast", "reshape", "transpose", "copy", "iota"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reverse", "gather"),
    *("tuple", "get-tuple-element", "bitcast-convert", "convert", "custom-call"),
}
SLICES = {"slice", "dynamic-slice", "gather"}
SIZES = {"pred": 1, "c64": 8, "c128": 16}  # in bytes; of others the name has the bits


class Loop(NamedTuple):
    """A loop: its steps, what a step launches, and the loops within.

    A loop whose number of steps is not known has None: in each step, the host waits for the
    condition, whose kernels are counted too.
    """

    steps: int | None
    kernels: int
    copies: int
    loops: tuple[Loop, ...] = ()

    @property
    def launches(self) -> int:
        """Of all steps; of one, if nobody knows how many there are."""
        inside = sum(loop.launches for loop in self.loops)
        return (self.steps or 1) * (self.kernels + self.copies + inside)

    def __str__(self) -> str:
        """Steps x kernels+copies, with the loops within."""
        copies = f"+{self.copies}" if self.copies else ""
        own = [f"{self.kernels}{copies}", *map(str, self.loops)]
        step = own[0] if len(own) == 1 else f"({' + '.join(own)})"
        return f"{'?' if self.steps is None else f'{self.steps:,}'} x {step}"


class Program(NamedTuple):
    """What a compiled program does, when it is called once."""

    temporaries: int  # bytes
    kernels: int  # outside of loops
    copies: int  # outside of loops
    loops: tuple[Loop, ...]
    bytes: int
    operations: int
    collectives: int  # places in the program
    collectives_in_loops: int
    host_copies: int  # places in the program that copy to or from the host, or call it

    @property
    def launches(self) -> int:
        """Kernels and copies that the host starts."""
        return self.kernels + self.copies + sum(loop.launches for loop in self.loops)

    @property
    def has_unknown_steps(self) -> bool:
        return any(loop.steps is None for loop in _all(self.loops))

    def __str__(self) -> str:
        """The loops, as steps x kernels+copies."""
        return ", ".join(map(str, self.loops)) or "no loop"


def _all(loops: tuple[Loop, ...]) -> list[Loop]:
    return [found for loop in loops for found in (loop, *_all(loop.loops))]


def read(compiled: Any) -> Program:
    """Return what a compiled program of JAX does."""
    return read_text(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


def read_text(text: str, temporaries: int = 0) -> Program:
    """Return what the program does whose HLO this is, after all passes of the compiler."""
    module = _Module(text)
    work = module.work(module.entry)
    return Program(
        temporaries,
        work.kernels,
        work.copies,
        tuple(work.loops),
        work.bytes,
        work.operations,
        work.collectives,
        work.in_loops,
        work.host_copies,
    )


def launched(text: str) -> list[list[str]]:
    """Return what a step of each loop launches: the last operation of a kernel, and its shape."""
    computations = _Module(text).computations
    loops = [
        line for lines in computations.values() for line in lines.values() if line.kind == "while"
    ]
    return [
        [
            f"{_operation(line)} {line.shape.lstrip('(').partition('{')[0]}"
            for line in computations[loop.called("body")].values()
            if line.kind in KERNELS
        ]
        for loop in loops
    ]


def _operation(line: _Line) -> str:
    found = re.search(r'op_name="(?:[^"]*/)?([^"/]*)"', line.rest)
    return found[1] if found else line.kind


LAUNCH = 2.5e-6  # seconds that the host needs to start a kernel or a copy
BYTES = 3.35e12  # a second, from and to the memory of an H100
OPERATIONS = 60e12  # a second, of an H100 in float32


def predict(program: Program) -> tuple[float, str]:
    """Return the seconds that an H100 needs at least, if nothing else takes time, and for what.

    That is a prediction from three numbers, not a measurement.
    """
    parts = {
        "launches": LAUNCH * program.launches,
        "bytes": program.bytes / BYTES,
        "operations": program.operations / OPERATIONS,
    }
    most = max(parts, key=parts.__getitem__)
    return parts[most], most


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, three digits of it; a dash if there is none."""
    return "—" if math.isnan(seconds) else f"{float(f'{1e3 * seconds:.3g}'):,g}"


class _Line(NamedTuple):
    """One operation of HLO: its result, its operands, and the text after them."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str

    def called(self, role: str) -> str:
        return re.search(rf"\b{role}=%?([\w.\-]+)", self.rest)[1]


class _Work:
    """What one run of a computation does; loops apart, but for bytes and operations."""

    def __init__(self) -> None:
        self.kernels = self.copies = self.bytes = self.operations = 0
        self.collectives = self.in_loops = self.host_copies = 0
        self.loops: list[Loop] = []

    def add(self, other: _Work) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def launches(self) -> int:
        return Loop(1, self.kernels, self.copies, tuple(self.loops)).launches


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)\)?(.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class _Module:
    """The computations of a program."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, _Line]] = {}
        self.entry = ""
        lines: dict[str, _Line] = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                lines = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                name, shape, kind, operands, rest = found.groups()
                names = re.findall(r"%([\w.\-]+)", operands)
                lines[name] = _Line(name, shape, kind, names, rest)

    def work(self, name: str) -> _Work:
        """Return what a run of the computation does that has this name."""
        lines = self.computations[name]
        total = _Work()
        for line in lines.values():
            kind = line.kind.removesuffix("-start") if line.kind not in COPIES else line.kind
            total.host_copies += HOST_MEMORY in line.shape and line.kind in COPIES
            total.host_copies += kind in FROM_HOST or "callback" in line.rest.partition("meta")[0]
            if kind == "while":
                total.add(self.loop(line))
            elif kind == "conditional":
                names = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
                branches = re.findall(r"[\w.\-]+", names[1]) if names else _two_branches(line)
                total.add(max(map(self.work, branches), key=_Work.launches))
            elif kind == "call":
                total.add(self.work(line.called("to_apply")))
            elif kind == "async":
                total.add(self.work(line.called("calls")))
            elif kind in SENDS:
                total.collectives += 1
                total.kernels += 1
                total.bytes += self.moved(line, lines)
            elif line.kind in COPIES:
                total.copies += 1
                total.bytes += self.moved(line, lines)
            elif line.kind in KERNELS:
                total.kernels += 1
                total.bytes += self.moved(line, lines)
                total.operations += self.computed(line, lines)
        return total

    def loop(self, line: _Line) -> _Work:
        known = re.search(r"known_trip_count\D*(\d+)", line.rest)
        steps = int(known[1]) if known else None
        step = self.work(line.called("body"))
        if steps is None:
            step.add(self.work(line.called("condition")))
        total = _Work()
        total.loops = [Loop(steps, step.kernels, step.copies, tuple(step.loops))]
        total.bytes = (steps or 1) * step.bytes
        total.operations = (steps or 1) * step.operations
        total.collectives = total.in_loops = step.collectives
        total.host_copies = step.host_copies
        return total

    def moved(self, line: _Line, lines: dict[str, _Line]) -> int:
        """Return the bytes that a kernel reads and writes."""
        if "calls=" not in line.rest:
            operands = sum(_bytes(lines[name].shape) for name in line.operands if name in lines)
            return operands + _bytes(_result(line))
        inside = self.computations[line.called("calls")]
        *_, root = inside.values()
        outputs = [root.name] if root.kind != "tuple" else root.operands
        read = (_read(each, inside) for each in inside.values() if each.kind == "parameter")
        return sum(read) + sum(_written(name, inside) for name in outputs)

    def computed(self, line: _Line, lines: dict[str, _Line]) -> int:
        """Return the operations of a line, or of all lines of the computation that it calls."""
        if "calls=" in line.rest:
            inside = self.computations[line.called("calls")]
            return sum(self.computed(each, inside) for each in inside.values())
        first = lines[line.operands[0]].shape if line.operands else ""
        if contracted := re.search(r'lhs_contracting_dim\w*\W+([\d,"]+)', line.rest):
            sizes = _sizes(first)
            pairs = math.prod(sizes[int(at)] for at in re.findall(r"\d+", contracted[1]))
            return 2 * _elements(line.shape) * pairs
        if line.kind in MOVES:
            return 0
        if "to_apply=" in line.rest and line.kind != "sort":
            applied = self.computations[line.called("to_apply")]
            each = sum(self.computed(inner, applied) for inner in applied.values())
            updates = lines[line.operands[-1]].shape if line.kind == "scatter" else first
            return each * _elements(updates)
        return _elements(line.shape)


def _two_branches(line: _Line) -> list[str]:
    return [line.called("true_computation"), line.called("false_computation")]


def _users(name: str, lines: dict[str, _Line]) -> list[tuple[_Line, int]]:
    """Return who uses a value, and as which operand; who uses a bitcast of it, too."""
    found = [
        (line, at)
        for line in lines.values()
        for at, operand in enumerate(line.operands)
        if operand == name
    ]
    through = [
        user for line, _ in found if line.kind == "bitcast" for user in _users(line.name, lines)
    ]
    return [user for user in found if user[0].kind != "bitcast"] + through


def _read(parameter: _Line, lines: dict[str, _Line]) -> int:
    """Return the bytes that a kernel reads of a parameter: of slices no more than they hold."""
    read = 0
    for line, at in _users(parameter.name, lines):
        if at == 0 and line.kind in SLICES:
            read += _bytes(line.shape)
        elif not (at == 0 and line.kind == "dynamic-update-slice"):
            return _bytes(parameter.shape)
    return min(read, _bytes(parameter.shape))


def _written(name: str, lines: dict[str, _Line]) -> int:
    """Return the bytes that a kernel writes of an output, of which it may replace a slice only."""
    line = lines[name]
    while line.kind == "bitcast":
        line = lines[line.operands[0]]
    return _bytes(
        lines[line.operands[1]].shape if line.kind == "dynamic-update-slice" else line.shape
    )


def _result(line: _Line) -> str:
    """Return the shape that a line writes: what starts a copy has its operands there, too."""
    arrays = _ARRAY.findall(line.shape)
    if not line.kind.endswith("-start") or len(arrays) < 2:
        return line.shape
    kind, sizes = arrays[1 if line.kind == "copy-start" else -1]
    return f"{kind}[{sizes}]"


def _sizes(shape: str) -> list[int]:
    """Return the sizes of an array, of the first one if there are several."""
    found = _ARRAY.search(shape)
    return [int(n) for n in found[2].split(",") if n] if found else []


def _elements(shape: str) -> int:
    return math.prod(_sizes(shape))


def _bytes(shape: str) -> int:
    total = 0
    for kind, sizes in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        size = SIZES.get(kind) or (int(bits[0]) / 8 if bits else 0)
        total += math.ceil(size * math.prod(int(n) for n in sizes.split(",") if n))
    return total
