# SPDX-License-Identifier: MIT
"""The programs of a call on blocks: what one task evaluates, in any process.

A task graph holds a `Program`, which takes NumPy arrays, returns NumPy arrays and can be pickled.
Each task unpickles a copy of it, and a copy must not compile the kernel again. So each process
keeps one program per pickle, with what it has compiled (`kept`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rankax._options import Options
from rankax.call.kernels import KernelCall, Shell, bind, bind_leaves, is_number
from rankax.core.base.cache import Kept
from rankax.core.base.trees import check_outputs
from rankax.core.reduce.protocol import FILL
from rankax.ext.blocks.checksum import checksum
from rankax.ext.lengths import Shared
from rankax.ext.ragged.results import call_ragged
from rankax.ext.ragged.type import is_ragged
from rankax.ext.runs import RunStates
from rankax.pipeline import evaluate

Array = np.ndarray[Any, Any]
Items = Sequence[jax.ShapeDtypeStruct]  # one item of each of several arrays


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


def packed_item(items: Items) -> jax.ShapeDtypeStruct:
    """Return one item of several arrays in one, as bytes."""
    return jax.ShapeDtypeStruct((record(items).itemsize,), np.dtype(np.uint8))


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
    def unbounded(self) -> Setup:
        """The same without a bound on memory."""
        options = self.options.replace(chunk_size=None, memory_limit=None)
        return dataclasses.replace(self, options=options)

    @property
    def is_ragged(self) -> bool:
        """Whether the kernel has ragged arguments."""
        return any(leaf.is_ragged for leaf in self.inputs)

    @property
    def reductions(self) -> Any:
        """Those of the kernel, for states; items that fill ragged ones up do not count."""
        reductions = self.mapped.spec.preset.reduce
        return reductions.of_items(FILL) if reductions and self.is_ragged else reductions

    def call(self, values: Sequence[Any], *, is_item: bool = False) -> KernelCall:
        """Bind a call of the kernel with these numbers and arrays among its leaves."""
        spec = self.mapped.spec.unnamed if is_item else self.mapped.spec
        leaves = list(self.static)
        for (place, _, key_impl, _), value in zip(self.inputs, values, strict=True):
            leaves[place] = value
            if key_impl is not None:
                leaves[place] = jax.random.wrap_key_data(value, impl=key_impl)
        return bind_leaves(spec, self.shell, leaves, dict(self.others))

    def evaluate(self, values: Sequence[Any], options: Options) -> Any:
        """Evaluate a call; with a `Ragged` among the values, as the kernel itself does."""
        call = self.call(values)
        if not any(map(is_ragged, values)):
            if self.is_ragged and options.reduce is not None:
                *front, count = call.plan_whole(options).batch_shape
                call.lengths = {len(front): count}
            return evaluate(call, options)
        # Later blocks have other lengths, and reuse what `jit=True` compiles.
        explicit = {**options.values(), "jit": True, "where": None}  # a reduction has its mask
        spec = self.mapped.with_explicit(explicit, self.mapped.spec.name).spec
        call = bind(spec, call.bound.args, call.bound.kwargs)
        return call_ragged(call, self.shared)

    def on_item(self, *values: Any) -> Any:
        """Call the kernel for one item."""
        out = evaluate(self.call(values, is_item=True), Options())
        check_outputs(self.mapped.spec.fun, out)
        return out

    def on_counted(self, *values: Any) -> Any:
        """Call the kernel for one item, to be reduced."""
        call = self.call(values, is_item=True)
        counts = jnp.bool_(True) if self.is_ragged else True
        return self.reductions.marked(self.on_item(*values), call.paths, call.leaves, counts)


# The options of JAX that a program takes from the process where the call was made.
CONFIG: dict[str, Any] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
}


# What a program does with JAX arrays: first the numbers of a call, then a block of each array.


def outputs(setup: Setup, *values: Any, only: Sequence[int]) -> list[Any]:
    """Return some of the outputs of all items of a block."""
    outs = jax.tree.leaves(setup.evaluate(values, setup.options))
    return [outs[i] for i in only]


# Of a reduction. The states are a tree of this structure; ``batch`` axes of it are not reduced.


def states(runs: RunStates, axes: tuple[int, ...], setup: Setup, *values: Any) -> list[Any]:
    """Return the states of a block, which have length 1 along each reduced axis.

    The indices along each reduced axis follow the other arrays.
    """
    values, indices = values[: len(setup.inputs)], values[len(setup.inputs) :]
    of_run = runs.reductions.for_runs(runs.size)
    out = setup.evaluate(values, setup.options.replace(reduce=of_run, reduce_axis=axes))
    starts = [index[0] if len(index) else 0 for index in indices]
    found = runs.reductions.structure.flatten_up_to(out)
    found = runs.renumber(found, list(map(len, indices)), starts)
    pairs = zip(runs.reductions.entries, found, strict=True)
    found = [() if entry.is_kept else state for entry, state in pairs]
    return jax.tree.map(lambda x: jnp.expand_dims(x, axes), found)


def merged(runs: RunStates, batch: int, structure: Any, _: Setup, *values: Any) -> list[Any]:
    """Return the states of two blocks as one; the second one follows the first."""
    count = len(values) // 2
    one, other = map(structure.unflatten, (values[:count], values[count:]))
    return runs.merge_two(one, other, batch)


def result(runs: RunStates, batch: int, structure: Any, _: Setup, *values: Any) -> list[Any]:
    """Return the reduced outputs, from the states of all items."""
    return runs.finish(structure.unflatten(values), batch)


@dataclasses.dataclass(eq=False)
class Program:
    """A function of the numbers of a call and one block of each array, and its compiled form.

    Attributes
    ----------
    setup : Setup
    step : callable
        Takes the setup and JAX arrays, and returns a pytree of JAX arrays.
    takes, returns : sequence of jax.ShapeDtypeStruct, optional
        The items of arrays that arrive, or leave, as bytes: those of a `record`.
    payload : bytes, optional
        The pickle of a program that is `kept`.
    """

    setup: Setup
    step: Callable[..., Any]
    takes: Items = ()
    returns: Items = ()
    payload: bytes | None = None

    def __post_init__(self) -> None:
        self.__name__ = self.setup.mapped.spec.name
        options = dict(self.setup.options.compiler_options or ())
        self._traced = functools.partial(self.step, self.setup)
        self._compiled = jax.jit(self._traced, compiler_options=options)  # one for all threads

    def __call__(self, *values: Any) -> Any:
        """Evaluate one block; return a writable NumPy array, or a tuple of several."""
        if self.takes:
            values = tuple(x for data in values for x in unpacked(self.takes, data))
        has_ragged, values = any(map(is_ragged, values)), jax.tree.map(as_input, values)
        with contextlib.ExitStack() as stack:
            for name, value in self.setup.config.items():
                stack.enter_context(CONFIG[name](value))
            outs = (self._traced if has_ragged else self._compiled)(*values)
            outs = tuple(np.array(out) for out in jax.tree.leaves(outs))
        if self.returns:
            return packed(self.returns, outs)
        return outs[0] if len(outs) == 1 else outs

    def along(self, states: Any, axis: Sequence[int], keepdims: bool = True) -> Any:
        """Merge states along some axes in their order, with arguments as of `numpy.sum`."""
        axes = tuple(axis)
        in_front = np.moveaxis(states, axes, range(len(axes)))
        whole = functools.reduce(self, in_front.reshape(-1, *in_front.shape[len(axes) :]))
        return np.expand_dims(whole, axes) if keepdims else whole

    def nonfinite(self, *values: Any) -> Any:
        """Return which items of a block are not finite."""
        values = jax.tree.map(as_input, values[: len(self.setup.inputs)])  # without indices
        bound, limit = self.setup.call(values).bound, self.setup.options.memory_limit
        mapped = self.setup.mapped.with_options(memory_limit=limit, progress=False)
        return mapped.nonfinite(*bound.args, **bound.kwargs)

    def digest(self, *values: Any) -> str:
        """Return a digest of the program for values of these shapes, equal in each process."""
        if self.takes:
            batches = [data.shape[:-1] for data in values]
            values = tuple(
                jax.ShapeDtypeStruct((*batch, *item.shape), item.dtype)
                for batch, item in itertools.product(batches, self.takes)
            )
        traced = functools.partial(self.step, self.setup.unbounded)
        parts: list[Any] = [jax.make_jaxpr(traced)(*values)]
        reductions = self.setup.reductions
        for fields in map(vars, reductions.entries if reductions else ()):
            # The program has their functions.
            parts += [item for item in fields.items() if not callable(item[1])]
        return checksum(parts)

    def __reduce__(self) -> Any:
        return _unpickled, (self.payload or _pickled(self),)  # raises what `kept` ignored

    def __dask_tokenize__(self) -> Any:
        return uuid.uuid4().hex if self.payload is None else self.payload


_programs: Kept[Program] = Kept(128, "programs of blocks")


def kept(program: Program) -> Program:
    """Return the program that an equal call has compiled, or this one."""
    try:
        payload = _pickled(program)
    except Exception:  # whatever a class raises; it matters only where it leaves this process
        return program
    return _programs.get_or_make(payload, lambda: dataclasses.replace(program, payload=payload))


def _unpickled(payload: bytes) -> Program:
    return _programs.get_or_make(payload, lambda: Program(*pickle.loads(payload), payload=payload))


def _pickled(program: Program) -> bytes:
    # Imported for arrays in blocks only. The compiled form belongs to this process.
    dumps = importlib.import_module("cloudpickle").dumps
    return dumps((program.setup, program.step, program.takes, program.returns))
