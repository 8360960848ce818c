# SPDX-License-Identifier: MIT
"""The programs of a call on blocks: what one task evaluates, in any process.

A task graph holds `OnBlocks`, which takes NumPy arrays, returns NumPy arrays and can be pickled.
Each task unpickles a copy of it, and a copy must not compile the kernel again. The compiled
function therefore belongs to a `Program`, and each process keeps one program per pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from rankax._base.cache import Kept
from rankax._base.trees import check_outputs
from rankax._call.arguments import KernelSpec
from rankax._call.bind import BoundKernel, rebind
from rankax._call.run import run
from rankax._options import Options
from rankax._reduce.passes import RunStates
from rankax._reduce.run import trace_reduced
from rankax._trace.fingerprint import checksum

Array = np.ndarray[Any, Any]

_MOST_KEPT = 128  # programs


def in_native_order(array: Any) -> Any:
    """Return a NumPy array in the byte order of this machine, which JAX requires."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Several arrays over one batch as one array of bytes: the shape and dtype of one item of each.

    The states of a reduction travel as bytes too. A reduction has states of many kinds, some with
    indices, some with user-defined trees. Cubed stores one array for each operation, and its
    ``apply_gufunc`` has one output; every scheduler, store and tree reduction takes an array of
    bytes.
    """

    items: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, avals: Sequence[Any], batch: int = 0) -> Packing:
        """Return the layout of arrays whose first ``batch`` axes are batch axes."""
        return cls(tuple(jax.ShapeDtypeStruct(x.shape[batch:], np.dtype(x.dtype)) for x in avals))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of one item of each array."""
        return tuple(math.prod(item.shape) * item.dtype.itemsize for item in self.items)

    def batch_shape(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """Return the batch axes of these arrays."""
        return arrays[0].shape[: arrays[0].ndim - len(self.items[0].shape)]

    def packed(self, arrays: Sequence[Any]) -> Array:
        """Return the bytes of arrays along a new last axis, after their batch axes."""
        batch = self.batch_shape(arrays)
        rows = [
            np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(*batch, size)
            for x, size in zip(arrays, self.sizes, strict=True)
        ]
        return np.concatenate(rows, axis=-1)

    def unpacked(self, packed: Array) -> list[Array]:
        """Return the arrays that `packed` was given."""
        batch, parts = packed.shape[:-1], np.split(packed, np.cumsum(self.sizes)[:-1], axis=-1)
        pairs = zip((np.ascontiguousarray(x).reshape(-1) for x in parts), self.items, strict=True)
        return [x.view(item.dtype).reshape(batch + item.shape) for x, item in pairs]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How a block receives one leaf of the arguments."""

    kind: str  # "array", "number", or "static" if it has no rank
    static: Any = None  # the value of a static leaf
    key_impl: Any = None  # of a typed PRNG key, which is passed as its data
    item: jax.ShapeDtypeStruct | None = None  # one item of an array or a number


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything about a call except its arrays and numbers; cloudpickle pickles it."""

    mapped: Any  # the decorated kernel
    options: Mapping[str, Any]
    config: Mapping[str, Any]  # of JAX, where the call was made
    names: tuple[str, ...]
    treedef: Any
    others: Mapping[str, Any]
    leaves: tuple[Leaf, ...]

    @property
    def kernel(self) -> KernelSpec:
        """The kernel behind the decorated function."""
        return self.mapped.spec

    def call(self, arrays: Sequence[Any], numbers: Sequence[Any]) -> BoundKernel:
        """Bind a call of the kernel with these arrays and numbers among its leaves."""
        values = {"array": iter(arrays), "number": iter(numbers)}
        leaves: list[Any] = []
        for leaf in self.leaves:
            value = leaf.static if leaf.kind == "static" else next(values[leaf.kind])
            if leaf.key_impl is not None:
                value = jax.random.wrap_key_data(value, impl=leaf.key_impl)
            leaves.append(value)
        return rebind(self.kernel, self.names, leaves, self.treedef, dict(self.others))

    def unbounded(self) -> Setup:
        """Return the same without a bound on memory."""
        options = {**self.options, "chunk_size": None, "memory_limit": None}
        return dataclasses.replace(self, options=options)

    def on_item(self, arrays: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Call the kernel for one item."""
        out = run(self.call(arrays, numbers), Options())
        check_outputs(self.kernel.fun, out)
        return out

    def shapes_of_item(self) -> tuple[list[Any], list[Any]]:
        """Return the shapes and dtypes of the arrays and of the numbers of one item."""
        arrays = [leaf.item for leaf in self.leaves if leaf.kind == "array"]
        return arrays, [leaf.item for leaf in self.leaves if leaf.kind == "number"]

    def runs(self, sizes: Sequence[int]) -> RunStates:
        """Return the operations on states of blocks; this traces the kernel."""
        runs: list[RunStates] = []
        reductions: Any = self.kernel.preset.reduce
        total = math.prod(sizes)

        def trace(arrays: list[Any], numbers: list[Any]) -> None:
            @functools.wraps(self.kernel.fun, updated=())
            def fun(*items: Any) -> Any:
                return self.on_item(items, numbers)

            outputs = trace_reduced(fun, arrays, reductions, total).outputs
            runs.append(RunStates(reductions, outputs, tuple(sizes)))

        jax.eval_shape(trace, *self.shapes_of_item())
        return runs[0]


# JAX 0.7 has `enable_x64` in `jax.experimental` only, newer versions in `jax` only.
_enable_x64: Any = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]
# The options of JAX that a program takes from the process where the call was made.
CONFIG: dict[str, Any] = {
    "jax_enable_x64": _enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
}


@dataclasses.dataclass(eq=False)
class Program:
    """A function of one block of each array, and its compiled form."""

    setup: Setup

    def __post_init__(self) -> None:
        compiler = self.setup.options.get("compiler_options")
        self.compiled = jax.jit(
            self.traced, compiler_options=None if compiler is None else dict(compiler)
        )

    def __reduce__(self) -> Any:
        # The compiled form belongs to this process.
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        """Return the outputs as JAX arrays."""
        raise NotImplementedError

    def evaluated(self, arrays: Sequence[Array], numbers: Sequence[Any]) -> list[Array]:
        """Return the leaves of the outputs as writable NumPy arrays."""
        with contextlib.ExitStack() as stack:
            for name, value in self.setup.config.items():
                stack.enter_context(CONFIG[name](value))
            outs = self.compiled([in_native_order(np.asarray(x)) for x in arrays], list(numbers))
            return [np.array(out) for out in jax.tree.leaves(outs)]

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        """Evaluate one block; return an array, or a tuple of several."""
        outs = self.evaluated(blocks, numbers)
        return outs[0] if len(outs) == 1 else tuple(outs)


@dataclasses.dataclass(eq=False)
class MapBlock(Program):
    """The outputs of all items of a block."""

    only: tuple[int, ...]  # the leaves of the output to return

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        out = run(self.setup.call(arrays, numbers), Options(**self.setup.options))
        outs = jax.tree.leaves(out)
        return [outs[i] for i in self.only]


@dataclasses.dataclass(eq=False)
class StateProgram(Program):
    """One step of a reduction whose states are packed."""

    axes: tuple[int, ...]  # the reduced axes of the batch
    sizes: tuple[int, ...]  # their lengths in the whole batch
    treedef: Any  # of the states
    layout: Packing  # of their leaves


class StateOfBlock(StateProgram):
    """The packed states of one block, which has length 1 along each reduced axis.

    The indices along each reduced axis follow the other arrays.
    """

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        count = len(arrays) - len(self.axes)
        arrays, indices = arrays[:count], arrays[count:]
        reductions: Any = self.setup.kernel.preset.reduce
        of_run = reductions.for_runs(math.prod(self.sizes))
        options: dict[str, Any] = dict(self.setup.options)
        options |= {"reduce": of_run, "reduce_axis": self.axes}
        states = run(self.setup.call(arrays, numbers), Options(**options))
        shape = [index.shape[0] for index in indices]
        starts = [index[0] if index.shape[0] else 0 for index in indices]
        states = reductions.structure.flatten_up_to(states)
        states = self.setup.runs(self.sizes).renumber(states, shape, starts)
        pairs = zip(reductions.entries, states, strict=True)
        return [() if entry.is_kept else state for entry, state in pairs]

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        outs = self.evaluated([_only(block) for block in blocks], numbers)
        return np.expand_dims(self.layout.packed(outs), self.axes)


def _only(block: Any) -> Any:
    """Take a block out of the lists in which some schedulers pass it along axes that are summed."""
    while isinstance(block, (list, tuple)):
        (block,) = block
    return block


class MergeStates(StateProgram):
    """Packed states, merged along some axes, in their order."""

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        del numbers
        count = len(arrays) // 2
        pairs = zip(arrays[:count], arrays[count:], strict=True)
        both = self.treedef.unflatten([jnp.stack(pair) for pair in pairs])
        return self.setup.runs(self.sizes).merge(both, len(self.layout.batch_shape(arrays)))

    def __call__(
        self, numbers: Sequence[Any], *blocks: Any, axis: Sequence[int] = (), keepdims: bool = True
    ) -> Any:
        (packed,) = blocks
        axes = tuple(axis)
        in_front = np.moveaxis(packed, axes, range(len(axes)))
        rows = in_front.reshape(-1, *in_front.shape[len(axes) :])
        whole = self.layout.packed(
            functools.reduce(
                lambda first, second: self.evaluated([*first, *second], numbers),
                map(self.layout.unpacked, rows),
            )
        )
        return np.expand_dims(whole, axes) if keepdims else whole


class ResultOfStates(StateProgram):
    """The reduced outputs, from the packed state of all items."""

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        del numbers
        states = self.treedef.unflatten(arrays)
        return self.setup.runs(self.sizes).finish(states, len(self.layout.batch_shape(arrays)))

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        return super().__call__(numbers, *self.layout.unpacked(*blocks))


_programs: Kept[Program] = Kept(_MOST_KEPT)


class OnBlocks:
    """A program and the numbers of one call, for the tasks of a graph."""

    def __init__(self, program: Program, numbers: tuple[Any, ...], payload: bytes | None) -> None:
        self._program = program
        self._numbers = numbers
        self._payload = payload
        self.__name__ = program.setup.kernel.name

    @classmethod
    def of(cls, program: Program, numbers: Sequence[Any]) -> OnBlocks:
        """Find the program that an equal call has compiled, and pickle it."""
        try:
            payload = _cloudpickle().dumps(program)
        except Exception:  # whatever a class raises; it matters only where it leaves this process
            return cls(program, tuple(numbers), None)
        return cls(_programs.find(payload, lambda: program), tuple(numbers), payload)

    @property
    def layout(self) -> Packing:
        """The layout of the packed states that it takes or returns."""
        assert isinstance(self._program, StateProgram)
        return self._program.layout

    @property
    def limit(self) -> int:
        """The kernel's memory limit in bytes; 0 if it has none, or one that is a share."""
        limit = self._program.setup.options["memory_limit"]
        return limit if isinstance(limit, int) else 0  # a share depends on the machine that runs it

    @property
    def reductions(self) -> Sequence[Any]:
        """The kernel's reductions, if there are any."""
        reductions = self._program.setup.kernel.preset.reduce
        return reductions.entries if reductions else ()

    def called(self, blocks: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the kernel, with the memory limit of blocks, and its arguments of one block."""
        setup = self._program.setup
        bounds = {name: setup.options[name] for name in ("memory_limit", "progress")}
        call = setup.call([in_native_order(x) for x in blocks], self._numbers).arguments
        return setup.mapped.with_options(**bounds), call.args, call.kwargs

    def traced(self, blocks: Sequence[Any]) -> Any:
        """Return the program for blocks of these shapes and dtypes, without a bound on memory."""
        program = dataclasses.replace(self._program, setup=self._program.setup.unbounded())
        return jax.make_jaxpr(program.traced)(list(blocks), list(self._numbers))

    def digest(self, blocks: Sequence[Any]) -> str:
        """Return a digest of the program for such blocks, equal in each process."""
        parts: list[Any] = [self.traced(blocks)]
        for fields in map(vars, self.reductions):  # the program has their functions
            parts += [item for item in fields.items() if not callable(item[1])]
        return checksum(parts)

    def __call__(self, *blocks: Any, **options: Any) -> Any:
        """Evaluate one block."""
        return self._program(self._numbers, *blocks, **options)

    def __reduce__(self) -> Any:
        # Pickling again raises what `of` ignored.
        payload = self._payload or _cloudpickle().dumps(self._program)
        return _from_payload, (payload, self._numbers)

    def __dask_tokenize__(self) -> Any:
        if self._payload is None:
            return uuid.uuid4().hex
        return hashlib.sha256(self._payload).hexdigest(), repr(self._numbers)


def _from_payload(payload: bytes, numbers: tuple[Any, ...]) -> OnBlocks:
    program = _programs.find(payload, lambda: _cloudpickle().loads(payload))
    return OnBlocks(program, numbers, payload)


def _cloudpickle() -> Any:
    return importlib.import_module("cloudpickle")  # needed for arrays in blocks only
