# SPDX-License-Identifier: MIT
"""The programs of a call on blocks: what one task evaluates, in any process.

A task graph holds `OnBlocks`, which takes NumPy arrays, returns NumPy arrays and can be pickled.
Each task unpickles a copy of it, and a copy must not compile the kernel again. The compiled
function therefore belongs to a `Program`, and each process keeps one program per pickle.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from rankax._options import Options
from rankax.call.kernels import KernelCall, Shell, bind, is_number, rebind
from rankax.core.base.cache import Kept
from rankax.core.base.trees import check_outputs
from rankax.core.reduce.protocol import FILL, Marked, Outputs
from rankax.ext.blocks.checksum import checksum
from rankax.ext.lengths import Shared
from rankax.ext.ragged.results import call_ragged
from rankax.ext.ragged.type import Ragged
from rankax.ext.runs import RunStates
from rankax.pipeline import evaluate

Array = np.ndarray[Any, Any]
Items = Sequence[jax.ShapeDtypeStruct]  # one item of each of several arrays

_MOST_KEPT = 128  # programs


def in_native_order(array: Any) -> Any:
    """Return a NumPy array in the byte order of this machine, which JAX requires."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def as_input(value: Any) -> Any:
    """Return a number as it is, and an array as JAX takes it."""
    return value if is_number(value) else in_native_order(np.asarray(value))


def record(items: Items) -> Any:
    """Return the dtype of one item of several arrays in one.

    States of reductions, which are of many kinds, and the outputs of an operation of cubed, which
    returns one array, travel as the bytes of such records: every scheduler, store and tree
    reduction takes an array of bytes.
    """
    fields = [(f"{n}", item.dtype, item.shape) for n, item in enumerate(items)]
    return np.dtype(fields if np.dtype(fields).itemsize else [*fields, ("none", np.uint8)])


def packed(items: Items, arrays: Sequence[Any]) -> Array:
    """Return the bytes of arrays along a new last axis, after their batch axes."""
    batch = arrays[0].shape[: arrays[0].ndim - len(items[0].shape)]
    records: Any = np.empty(batch, record(items))
    for n, array in enumerate(arrays):
        records[f"{n}"] = array
    return records[..., None].view(np.uint8)


def unpacked(items: Items, data: Array) -> list[Array]:
    """Return the arrays that `packed` was given."""
    records = data.view(record(items))[..., 0]
    return [records[f"{n}"].copy() for n in range(len(items))]  # aligned


class Leaf(NamedTuple):
    """How a block receives one leaf of the arguments that has a rank."""

    place: int  # among all leaves
    item: jax.ShapeDtypeStruct  # a number, or one item of an array
    key_impl: Any = None  # of a typed PRNG key, which is passed as its data
    is_ragged: bool = False  # whether a block is `Ragged`; what depends on shapes only is dense


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything about a call except its numbers and arrays; cloudpickle pickles it."""

    mapped: Any  # the decorated kernel
    options: Options
    config: Mapping[str, Any]  # of JAX, where the call was made
    shell: Shell
    others: Mapping[str, Any]
    static: tuple[Any, ...]  # the leaves without a rank; None in place of the others
    inputs: tuple[Leaf, ...]  # first the numbers, then the arrays
    shared: Shared | None = None  # the shapes of blocks with ragged items

    @property
    def is_ragged(self) -> bool:
        """Whether the kernel has ragged arguments."""
        return any(leaf.is_ragged for leaf in self.inputs)

    @property
    def reductions(self) -> Any:
        """Those of the kernel, for states; items that fill ragged ones up do not count."""
        reductions = self.mapped.spec.preset.reduce
        return reductions.of_items(FILL) if reductions and self.is_ragged else reductions

    def call(self, values: Sequence[Any]) -> KernelCall:
        """Bind a call of the kernel with these numbers and arrays among its leaves."""
        leaves = list(self.static)
        for (place, _, key_impl, _), value in zip(self.inputs, values, strict=True):
            leaves[place] = value
            if key_impl is not None:
                leaves[place] = jax.random.wrap_key_data(value, impl=key_impl)
        return rebind(self.mapped.spec, self.shell, leaves, dict(self.others))

    def evaluated(self, values: Sequence[Any], options: Options) -> Any:
        """Evaluate a call; with a `Ragged` among the values, as the kernel itself does."""
        call = self.call(values)
        if not any(isinstance(value, Ragged) for value in values):
            if self.is_ragged and options.reduce is not None:
                *front, count = call.plan_whole(options).batch_shape
                call.lengths = {len(front): count}
            return evaluate(call, options)
        # Later blocks have other lengths, and reuse what `jit=True` compiles.
        given = {**options.values(), "jit": True, "where": None}  # a reduction has its mask
        spec = self.mapped.with_explicit(given, self.mapped.spec.name).spec
        arguments = call.arguments
        call = bind(spec, arguments.args, arguments.kwargs, takes_nodes=True)
        return call_ragged(call, spec.part(), shared=self.shared)

    def on_item(self, *values: Any) -> Any:
        """Call the kernel for one item."""
        out = evaluate(self.call(values), Options())
        check_outputs(self.mapped.spec.fun, out)
        return out

    def on_counted(self, *values: Any) -> Any:
        """Call the kernel for one item, to be reduced."""
        out = self.on_item(*values)
        return Marked(out, jnp.bool_(True)) if self.is_ragged else out


# The options of JAX that a program takes from the process where the call was made.
CONFIG: dict[str, Any] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
}


@dataclasses.dataclass(eq=False)
class Program:
    """A function of the numbers of a call and one block of each array, and its compiled form."""

    setup: Setup

    def __post_init__(self) -> None:
        options = dict(self.setup.options.compiler_options or ())
        self.compiled = jax.jit(self.traced, compiler_options=options)  # one for all threads

    def __reduce__(self) -> Any:
        # The compiled form belongs to this process.
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def traced(self, *values: Any) -> Any:
        """Return the outputs as JAX arrays."""
        raise NotImplementedError

    def evaluated(self, *values: Any) -> list[Array]:
        """Return the leaves of the outputs as writable NumPy arrays."""
        is_ragged = any(isinstance(x, Ragged) for x in values)
        values = jax.tree.map(as_input, values)
        with contextlib.ExitStack() as stack:
            for name, value in self.setup.config.items():
                stack.enter_context(CONFIG[name](value))
            outs = (self.traced if is_ragged else self.compiled)(*values)
            return [np.array(out) for out in jax.tree.leaves(outs)]

    def __call__(self, *values: Any) -> Any:
        """Evaluate one block; return an array, or a tuple of several."""
        outs = self.evaluated(*values)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def unbounded(self) -> Self:
        """Return the same without a bound on memory."""
        options = self.setup.options.replace(chunk_size=None, memory_limit=None)
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, options=options))


@dataclasses.dataclass(eq=False)
class MapBlock(Program):
    """The outputs of all items of a block."""

    only: tuple[int, ...]  # the leaves of the output to return

    def traced(self, *values: Any) -> Any:
        outs = jax.tree.leaves(self.setup.evaluated(values, self.setup.options))
        return [outs[i] for i in self.only]


@dataclasses.dataclass(eq=False)
class StateProgram(Program):
    """One step of a reduction whose states are packed."""

    axes: tuple[int, ...]  # the reduced axes of the batch
    sizes: tuple[int, ...]  # their lengths in the whole batch
    outputs: tuple[Outputs, ...]  # of one item
    treedef: Any  # of the states
    items: Items  # their leaves

    @property
    def runs(self) -> RunStates:
        """The operations on states of blocks; the kernel has the reductions."""
        return RunStates(self.setup.reductions, self.outputs, self.sizes)


class StateOfBlock(StateProgram):
    """The packed states of one block, which has length 1 along each reduced axis.

    The indices along each reduced axis follow the other arrays.
    """

    def traced(self, *values: Any) -> Any:
        count, reductions = len(self.setup.inputs), self.runs.reductions
        of_run = reductions.for_runs(self.runs.size)
        options = self.setup.options.replace(reduce=of_run, reduce_axis=self.axes)
        states = self.setup.evaluated(values[:count], options)
        states = reductions.structure.flatten_up_to(states)
        shape = [index.shape[0] for index in values[count:]]
        starts = [index[0] if index.shape[0] else 0 for index in values[count:]]
        states = self.runs.renumber(states, shape, starts)
        pairs = zip(reductions.entries, states, strict=True)
        return [() if entry.is_kept else state for entry, state in pairs]

    def __call__(self, *values: Any) -> Any:
        return np.expand_dims(packed(self.items, self.evaluated(*values)), self.axes)


class MergeStates(StateProgram):
    """Packed states, merged along some axes, in their order."""

    def traced(self, *values: Any) -> Any:
        count = len(values) // 2
        one, other = map(self.treedef.unflatten, (values[:count], values[count:]))
        return self.runs.merge_two(one, other, values[0].ndim - len(self.items[0].shape))

    def __call__(self, *values: Any, axis: Sequence[int] = (), keepdims: bool = True) -> Any:
        axes = tuple(axis)
        in_front = np.moveaxis(values[0], axes, range(len(axes)))
        rows = in_front.reshape(-1, *in_front.shape[len(axes) :])
        states = (unpacked(self.items, row) for row in rows)
        merged = functools.reduce(lambda a, b: self.evaluated(*a, *b), states)
        whole = packed(self.items, merged)
        return np.expand_dims(whole, axes) if keepdims else whole


class ResultOfStates(StateProgram):
    """The reduced outputs, from the packed state of all items."""

    def traced(self, *values: Any) -> Any:
        states = self.treedef.unflatten(values)
        return self.runs.finish(states, values[0].ndim - len(self.items[0].shape))

    def __call__(self, *values: Any) -> Any:
        return super().__call__(*unpacked(self.items, *values))


_programs: Kept[Program] = Kept(_MOST_KEPT, "programs of blocks")


class OnBlocks:
    """A program and the numbers of one call, for the tasks of a graph."""

    def __init__(self, program: Any, numbers: tuple[Any, ...], payload: bytes | None) -> None:
        self.program = program
        self.numbers = numbers
        self._payload = payload
        self.__name__ = program.setup.mapped.spec.name

    @classmethod
    def of(cls, program: Program, numbers: Sequence[Any] = ()) -> Self:
        """Find the program that an equal call has compiled, and pickle it."""
        try:
            payload = _pickled(program)
        except Exception:  # whatever a class raises; it matters only where it leaves this process
            return cls(program, tuple(numbers), None)
        return cls(_programs.get_or_make(payload, lambda: program), tuple(numbers), payload)

    @property
    def limit(self) -> int:
        """The kernel's memory limit in bytes; 0 if it has none, or one that is a share."""
        limit = self.program.setup.options.memory_limit
        return limit if isinstance(limit, int) else 0  # a share depends on the machine that runs it

    @property
    def reductions(self) -> Sequence[Any]:
        """The kernel's reductions, if there are any."""
        reductions = self.program.setup.reductions
        return reductions.entries if reductions else ()

    def called(self, blocks: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the kernel, with the memory limit of blocks, and its arguments of one block."""
        setup = self.program.setup
        values = jax.tree.map(as_input, [*self.numbers, *blocks])
        call = setup.call(values[: len(setup.inputs)]).arguments  # without indices
        options = setup.options
        mapped = setup.mapped.with_options(memory_limit=options.memory_limit, progress=False)
        return mapped, call.args, call.kwargs

    def digest(self, blocks: Sequence[Any]) -> str:
        """Return a digest of the program for such blocks, equal in each process."""
        parts: list[Any] = [jax.make_jaxpr(self.program.unbounded().traced)(*self.numbers, *blocks)]
        for fields in map(vars, self.reductions):  # the program has their functions
            parts += [item for item in fields.items() if not callable(item[1])]
        return checksum(parts)

    def __call__(self, *blocks: Any, **options: Any) -> Any:
        """Evaluate one block."""
        return self.program(*self.numbers, *blocks, **options)

    def __reduce__(self) -> Any:
        # Pickling again raises what `of` ignored.
        return _from_payload, (self._payload or _pickled(self.program), self.numbers)

    def __dask_tokenize__(self) -> Any:
        if self._payload is None:
            return uuid.uuid4().hex
        return hashlib.sha256(self._payload).hexdigest(), repr(self.numbers)


def _from_payload(payload: bytes, numbers: tuple[Any, ...]) -> OnBlocks:
    return OnBlocks(_programs.get_or_make(payload, lambda: pickle.loads(payload)), numbers, payload)


def _pickled(program: Program) -> bytes:
    return importlib.import_module("cloudpickle").dumps(program)  # for arrays in blocks only
