# SPDX-License-Identifier: MIT
"""What is evaluated for one block, in whatever process: callables of arrays of NumPy.

Such a callable is pickled for each task, and must not compile for each: what it compiles belongs to
a `Program`, and a process keeps one for each pickle that it has seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import math
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from rankax._base.cache import Kept
from rankax._base.trees import check_outputs
from rankax._blocks.dtypes import in_native_order
from rankax._blocks.packing import Array, Packing
from rankax._call.bind import rebind
from rankax._call.kernel import Kernel
from rankax._call.run import run
from rankax._options import Options
from rankax._reduce.merge import RunStates

__all__ = [
    "MapBlock",
    "MergeStates",
    "OnBlocks",
    "ResultOfStates",
    "Setup",
    "StateOfBlock",
    "Unpack",
]

_MOST_KEPT = 128  # programs


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one leaf of the arguments becomes in a block."""

    kind: str  # "array", "number", or "static" for what has no rank
    static: Any = None
    key_impl: Any = None  # of typed PRNG keys, which go as their data
    item: jax.ShapeDtypeStruct | None = None  # one item, of an array or a number


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a call has besides its arrays and numbers; it is pickled by cloudpickle."""

    mapped: Callable[..., Any]  # the decorated kernel
    options: Mapping[str, Any]
    config: Mapping[str, Any]  # of JAX, where the call was made
    names: tuple[str, ...]
    treedef: Any
    others: Mapping[str, Any]
    leaves: tuple[Leaf, ...]

    @property
    def kernel(self) -> Kernel:
        """What the decorator made."""
        return vars(self.mapped)["_kernel"]

    def run(self, arrays: Sequence[Any], numbers: Sequence[Any], options: Options) -> Any:
        """Call the kernel with these arrays in their places."""
        given = {"array": iter(arrays), "number": iter(numbers)}
        leaves: list[Any] = []
        for leaf in self.leaves:
            value = leaf.static if leaf.kind == "static" else next(given[leaf.kind])
            if leaf.key_impl is not None:
                value = jax.random.wrap_key_data(value, impl=leaf.key_impl)
            leaves.append(value)
        call = rebind(self.kernel, self.names, leaves, self.treedef, dict(self.others))
        return run(call, options)

    def on_item(self, arrays: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Call the kernel for one item."""
        out = self.run(arrays, numbers, Options())
        check_outputs(self.kernel.fun, out)
        return out

    def shapes_of_item(self) -> tuple[list[Any], list[Any]]:
        """Return what stands for the arrays and for the numbers of one item."""
        arrays = [leaf.item for leaf in self.leaves if leaf.kind == "array"]
        return arrays, [leaf.item for leaf in self.leaves if leaf.kind == "number"]

    def runs(self, sizes: Sequence[int]) -> RunStates:
        """Return the operations on states of blocks; this traces the kernel."""
        runs: list[RunStates] = []
        reductions = self.kernel.preset.reduce
        assert reductions is not None

        def trace(arrays: list[Any], numbers: list[Any]) -> None:
            @functools.wraps(self.kernel.fun, updated=())
            def fun(*items: Any) -> Any:
                return self.on_item(items, numbers)

            runs.append(RunStates.traced(fun, arrays, reductions, sizes))

        jax.eval_shape(trace, *self.shapes_of_item())
        return runs[0]

    @contextlib.contextmanager
    def as_configured(self) -> Generator[None]:
        """Compute as JAX was configured where the call was made, for this may be a new process."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_enable_x64(self.config["jax_enable_x64"]))
            precision = self.config["jax_default_matmul_precision"]
            stack.enter_context(jax.default_matmul_precision(precision))
            promotion = self.config["jax_numpy_dtype_promotion"]
            stack.enter_context(jax.numpy_dtype_promotion(promotion))
            yield


# JAX 0.7 has it among its experiments; newer ones have it there no longer.
_enable_x64: Any = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]
CONFIG = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


class Program:
    """One program for blocks, and what it compiled.

    Parameters
    ----------
    setup : Setup
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        compiler = setup.options.get("compiler_options")
        self.compiled = jax.jit(
            self.traced, compiler_options=None if compiler is None else dict(compiler)
        )

    def __getstate__(self) -> dict[str, Any]:
        # What was compiled belongs to this process.
        return {name: value for name, value in vars(self).items() if name != "compiled"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Program.__init__(self, self.setup)

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        """Do what is compiled."""
        raise NotImplementedError

    def evaluated(self, arrays: Sequence[Array], numbers: Sequence[Any]) -> list[Array]:
        """Return the leaves of what was compiled, as arrays of NumPy that can be written to."""
        with self.setup.as_configured():
            outs = self.compiled([in_native_order(np.asarray(x)) for x in arrays], list(numbers))
            return [np.array(out) for out in jax.tree.leaves(outs)]

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        """Evaluate one block."""
        raise NotImplementedError


class MapBlock(Program):
    """The outputs of a block: one array, a tuple of them, or all of them packed.

    Parameters
    ----------
    setup : Setup
    only : tuple of int
        The leaves of the output that are wanted.
    layout : Packing, optional
        Of their items, where they are to be packed.
    """

    def __init__(self, setup: Setup, only: tuple[int, ...], layout: Packing | None = None) -> None:
        super().__init__(setup)
        self.only = only
        self.layout = layout

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        outs = jax.tree.leaves(self.setup.run(arrays, numbers, Options(**self.setup.options)))
        return [outs[i] for i in self.only]

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        outs = self.evaluated(blocks, numbers)
        if self.layout is not None:
            batch = outs[0].shape[: outs[0].ndim - len(self.layout.shapes[0])]
            return self.layout.packed(outs, batch)
        return outs[0] if len(outs) == 1 else tuple(outs)


@dataclasses.dataclass(frozen=True)
class Unpack:
    """One of the arrays that were packed."""

    layout: Packing
    number: int

    def __call__(self, packed: Array) -> Array:
        """Unpack one block."""
        return self.layout.unpacked(packed)[self.number]


@dataclasses.dataclass(frozen=True)
class Reduce:
    """What is reduced: the axes of the batch, and their lengths as a whole."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]


class StateOfBlock(Program):
    """The packed states of one block, which has length 1 along each reduced axis.

    It is given the indices along each reduced axis behind the other arrays.
    """

    def __init__(self, setup: Setup, reduce: Reduce, layout: Packing) -> None:
        super().__init__(setup)
        self.reduce = reduce
        self.layout = layout

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        count = len(arrays) - len(self.reduce.axes)
        arrays, indices = arrays[:count], arrays[count:]
        reductions = self.setup.kernel.preset.reduce
        assert reductions is not None
        of_run = reductions.for_runs(math.prod(self.reduce.sizes))
        options: dict[str, Any] = dict(self.setup.options)
        options |= {"reduce": of_run, "reduce_axis": self.reduce.axes}
        states = self.setup.run(arrays, numbers, Options(**options))
        shape = [index.shape[0] for index in indices]
        starts = [index[0] if index.shape[0] else 0 for index in indices]
        states = reductions.structure.flatten_up_to(states)
        states = self.setup.runs(self.reduce.sizes).renumber(states, shape, starts)
        pairs = zip(reductions.entries, states, strict=True)
        return [() if entry.is_kept else state for entry, state in pairs]

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        outs = self.evaluated([_only(block) for block in blocks], numbers)
        batch = outs[0].shape[: outs[0].ndim - len(self.layout.shapes[0])]
        return np.expand_dims(self.layout.packed(outs, batch), self.reduce.axes)


def _only(block: Any) -> Any:
    """Take a block out of the lists that some schedulers put it in, along axes that are summed."""
    while isinstance(block, (list, tuple)):
        (block,) = block
    return block


@dataclasses.dataclass(frozen=True)
class States:
    """How states are packed: their tree and the layout of its leaves."""

    treedef: Any
    layout: Packing

    def batch(self, leaves: Sequence[Any]) -> int:
        """Return how many kept axes the leaves have in front."""
        return leaves[0].ndim - len(self.layout.shapes[0])


class MergeStates(Program):
    """Packed states, merged along some axes, in their order."""

    def __init__(self, setup: Setup, reduce: Reduce, states: States) -> None:
        super().__init__(setup)
        self.reduce = reduce
        self.states = states

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        del numbers
        count = len(arrays) // 2
        pairs = zip(arrays[:count], arrays[count:], strict=True)
        both = self.states.treedef.unflatten([jnp.stack(pair) for pair in pairs])
        return self.setup.runs(self.reduce.sizes).merge(both, self.states.batch(arrays))

    def __call__(
        self, numbers: Sequence[Any], *blocks: Any, axis: Sequence[int] = (), keepdims: bool = True
    ) -> Any:
        del numbers
        (packed,) = blocks
        axes = tuple(axis)
        layout = self.states.layout
        in_front = np.moveaxis(packed, axes, range(len(axes)))
        kept = in_front.shape[len(axes) : -1]
        rows = in_front.reshape(-1, *in_front.shape[len(axes) :])
        merged = layout.unpacked(rows[0])
        for row in rows[1:]:
            merged = self.evaluated([*merged, *layout.unpacked(row)], ())
        whole = layout.packed(merged, kept)
        return np.expand_dims(whole, axes) if keepdims else whole


class ResultOfStates(Program):
    """The reduced outputs, from the packed state of all items."""

    def __init__(
        self, setup: Setup, reduce: Reduce, states: States, layout: Packing | None = None
    ) -> None:
        super().__init__(setup)
        self.reduce = reduce
        self.states = states
        self.layout = layout

    def traced(self, arrays: list[Any], numbers: list[Any]) -> Any:
        del numbers
        states = self.states.treedef.unflatten(arrays)
        return self.setup.runs(self.reduce.sizes).finish(states, self.states.batch(arrays))

    def __call__(self, numbers: Sequence[Any], *blocks: Any) -> Any:
        del numbers
        (packed,) = blocks
        outs = self.evaluated(self.states.layout.unpacked(packed), ())
        if self.layout is not None:
            return self.layout.packed(outs, packed.shape[:-1])
        return outs[0] if len(outs) == 1 else tuple(outs)


# What a scheduler holds.

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
        cloudpickle: Any = importlib.import_module("cloudpickle")

        try:
            payload = cloudpickle.dumps(program)
        except Exception:  # whatever a class raises; it matters only where it leaves this process
            return cls(program, tuple(numbers), None)
        return cls(_programs.find(payload, lambda: program), tuple(numbers), payload)

    @property
    def limit(self) -> int:
        """The bytes that the kernel was given for what it computes; 0 where nobody can say."""
        limit = self._program.setup.options["memory_limit"]
        return limit if isinstance(limit, int) else 0  # a share is one of a machine elsewhere

    def __call__(self, *blocks: Any, **given: Any) -> Any:
        """Evaluate one block."""
        return self._program(self._numbers, *blocks, **given)

    def __reduce__(self) -> Any:
        if self._payload is None:
            cloudpickle: Any = importlib.import_module("cloudpickle")

            cloudpickle.dumps(self._program)  # raises what is in the way
        return _from_payload, (self._payload, self._numbers)

    def __dask_tokenize__(self) -> Any:
        if self._payload is None:
            return uuid.uuid4().hex
        return hashlib.sha256(self._payload).hexdigest(), repr(self._numbers)


def _from_payload(payload: bytes, numbers: tuple[Any, ...]) -> OnBlocks:
    cloudpickle: Any = importlib.import_module("cloudpickle")

    program = _programs.find(payload, lambda: cloudpickle.loads(payload))
    return OnBlocks(program, numbers, payload)
