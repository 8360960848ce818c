# SPDX-License-Identifier: MIT
"""Compile for GPUs that are not here, and read what the compiler decided.

A device is made from its description, and XLA:GPU compiles for it to the end. Memory, kernels,
loops and collectives are exact then; how long they take is not known.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@functools.cache
def mesh(hosts: int = 1, each: int = 1, kind: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of H100s, with one axis ``"d"``."""
    topology = f"1x{hosts}x{each}"
    described = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=topology)
    return Mesh(np.array(described.devices), ("d",), axis_types=(kind,))


def shape(*sizes: int, dtype: Any = "float32", on: Mesh | None = None, spec: Any = ()) -> Any:
    """Return an array of this shape on a mesh, which need not be there; by default of one GPU."""
    sharding = NamedSharding(on or mesh(), PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a compiled program."""

    steps: int | None  # None: not known, so the host reads its condition in each of them
    kernels: int  # that a step launches, without those of loops inside
    slices: int  # that a step copies: what is read of a stack, or written to it
    around: tuple[int | None, ...] = ()  # the steps of the loops around it

    @property
    def launches(self) -> int:
        """How many kernels all its steps launch; an unknown number of steps counts as one."""
        return self.kernels * math.prod(steps or 1 for steps in (self.steps, *self.around))

    def __str__(self) -> str:
        count = "?" if self.steps is None else self.steps
        inside = "".join(f"{'?' if n is None else n} x " for n in self.around)
        return f"{inside}{count} x {self.kernels}" + (f"+{self.slices}" if self.slices else "")


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler decided."""

    temporaries: int  # bytes, beyond arguments and results
    kernels: int  # outside of loops
    loops: tuple[Loop, ...]  # in the order of the text, outer ones first
    collectives: tuple[str, ...]
    in_loops: tuple[str, ...]  # collectives, and copies to the host, in the step of a loop

    @property
    def launches(self) -> int:
        return self.kernels + sum(loop.launches for loop in self.loops)

    def __str__(self) -> str:
        return ", ".join(map(str, self.loops)) or "no loop"


_KERNELS = ("fusion", "custom-call", "copy", "reduce", "scatter", "sort", "async-start")
_KERNELS += ("copy-start", "dynamic-update-slice", "convolution", "cholesky", "triangular-solve")
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_ON_HOST = ("infeed", "outfeed", "send", "recv")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][a-z\-]*)\(")


def read(compiled: Any) -> Program:
    """Read a compiled program."""
    text = compiled.as_text()
    temporaries = int(compiled.memory_analysis().temp_size_in_bytes)
    found = _Reader(_computations(text))
    kernels, _ = found.step(_entry(text), ())
    return Program(
        temporaries, kernels, tuple(found.loops), tuple(found.collectives), tuple(found.in_loops)
    )


def compiled(fun: Any, *args: Any) -> Program:
    """Compile a function of shapes on a mesh, and read the program."""
    return read(jax.jit(fun).lower(*args).compile())


class _Reader:
    """Walks the computations that are evaluated, each as often as it is called."""

    def __init__(self, computations: dict[str, list[str]]) -> None:
        self.computations = computations
        self.loops: list[Loop] = []
        self.collectives: list[str] = []
        self.in_loops: list[str] = []

    def step(self, name: str, around: tuple[int | None, ...]) -> tuple[int, int]:
        """Return the kernels and the slices of one evaluation, without those of loops in it."""
        kernels = slices = 0
        for line in self.computations[name]:
            match = _INSTRUCTION.match(line)
            kind = match[1] if match else ""
            if kind == "while":
                self._loop(line, around)
            elif kind in ("call", "conditional"):
                # The branch with most kernels counts; the host reads which one it is.
                branches = [self.step(each, around) for each in _called(line)]
                kernels += max(each for each, _ in branches)
                slices += max(each for _, each in branches)
            elif kind == "fusion-start":
                slices += 1
            elif kind in _KERNELS:
                kernels += 1
            self._note(kind, line, bool(around))
        return kernels, slices

    def _note(self, kind: str, line: str, in_loop: bool) -> None:
        is_collective = kind.removesuffix("-start") in _COLLECTIVES
        if is_collective:
            self.collectives.append(kind.removesuffix("-start"))
        # Memory space 5 is that of the host.
        is_on_host = kind in _ON_HOST or "S(5)" in line or "callback" in line.split("metadata")[0]
        if in_loop and (is_collective or is_on_host):
            self.in_loops.append(line.strip())

    def _loop(self, line: str, around: tuple[int | None, ...]) -> None:
        body = re.search(r"body=%?([\w.\-]+)", line)
        count = re.search(r'known_trip_count[^\d}]*"?(\d+)', line)
        assert body
        steps = int(count[1]) if count else None
        place = len(self.loops)
        kernels, slices = self.step(body[1], (*around, steps))
        self.loops.insert(place, Loop(steps, kernels, slices, around))


def _computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.split("\n"):
        if line and not line[0].isspace() and line.endswith("{"):
            lines = found.setdefault(_name(line), [])
        elif line.startswith((" ", "\t")):
            lines.append(line)
    return found


def _name(line: str) -> str:
    return line.removeprefix("ENTRY ").lstrip("%").split(" ")[0].split("(")[0]


def _entry(text: str) -> str:
    return next(_name(line) for line in text.split("\n") if line.startswith("ENTRY "))


def _called(line: str) -> Iterator[str]:
    if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
        yield from (name.strip().lstrip("%") for name in branches[1].split(","))
    else:
        yield from re.findall(r"(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)", line)
