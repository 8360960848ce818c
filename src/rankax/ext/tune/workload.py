# SPDX-License-Identifier: MIT
"""What ``kernel.tune`` measures: a call, or a slice of its batch, with sets of options."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax._options import Options
from rankax.call.kernels import KernelCall, KernelSpec, Shell, is_array
from rankax.core.base.arrays import is_staged
from rankax.core.plan.schedule import Plan, Shape
from rankax.core.trace.programs import ItemProgram
from rankax.ext import cpu_math
from rankax.ext.bucket import filled, filling_of
from rankax.ext.devices import call as devices
from rankax.ext.explain.call import plan_of
from rankax.ext.lanes import walker as lanes
from rankax.ext.ragged.call import RaggedCall
from rankax.ext.ragged.results import call_ragged, plan_ragged
from rankax.ext.ragged.type import Ragged, is_ragged
from rankax.ext.xla_cpu import library
from rankax.pipeline import evaluate

# Chunk sizes, the most promising first: small ones and large ones in turn.
_SIZES = (256, 16, 4096, 4, 64, 1, 1024, 8, 2, 16384)
_LARGE = (256, 4096, 1024)  # of chunks that a gradient stores, or on several devices


@dataclasses.dataclass(eq=False)
class Workload:
    """A call that a kernel is tuned for.

    Parameters
    ----------
    call : KernelCall
    bound : int, optional
        The largest chunk that may be used.
    gradient : bool
        Whether the value is differentiated.
    site : str
        How an error message begins.
    """

    call: KernelCall
    bound: int | None
    gradient: bool
    site: str

    def __post_init__(self) -> None:
        call, options = self.call, self.call.kernel.options()
        if is_staged() or any(isinstance(x, core.Tracer) for x in call.split()[0]):
            raise TypeError(
                f"{self.site}: it runs the kernel to time it, so it cannot be called inside "
                "jax.jit, jax.vmap, jax.grad or a scan; call it before, and use the kernel that it "
                "returns"
            )
        self.call = call = self.filled()
        self.defaults = options.replace(memory_limit=None)
        self.values, self.shell = call.split()
        arrays = [i for i, value in enumerate(self.values) if options.jit and is_array(value)]
        self.traced = {*call.ranked, *arrays}
        self.floating = [i for i in call.ranked if _is_floating(call.leaves[i])]
        self.plan, self.axis = self.planned()
        self.batch = self.plan.batch_shape
        self.items = math.prod(self.batch)
        if not self.items or not self.batch:
            what = "no batch axes" if not self.batch else "an empty batch"
            raise ValueError(
                f"{self.site}: the arguments have {what}, so there is nothing to tune; pass "
                "arguments as large as those of the calls that should be fast"
            )
        if self.gradient and not self.floating:
            raise TypeError(
                f"{self.site}: gradient=True, but no argument with a rank holds floating-point "
                "numbers"
            )

    # `RaggedWorkload` overrides these.

    def filled(self) -> KernelCall:
        """Return the call with its arrays as they are evaluated."""
        filling = filling_of(self.call, self.call.kernel.options())
        call = filled(self.call, filling) if filling else self.call
        return dataclasses.replace(call, lengths={})  # copies cost what items cost

    def planned(self) -> tuple[Plan, int]:
        """Return how the call is nested without chunks, and the axis of which a slice has less."""
        plan = self.call.plan(self.with_chunk(None))
        batch = plan.batch_shape
        return plan, batch.index(max(batch, default=0)) if batch else 0

    def item(self) -> ItemProgram:
        """Return the program of one item."""
        return self.call.trace(self.plan)

    def levels(self, options: Options) -> tuple[Any, int]:
        """Return by which loops the call would be evaluated, and the items in flight."""
        plan = plan_of(self.call, options)
        return plan.levels, plan.in_flight

    def part(self, shape: Shape) -> tuple[list[Any], Shell]:
        """Return the values of a slice, and the rest of its call."""
        values, part = list(self.values), self.call.part(self.plan, shape)
        for i in self.plan.mapped:
            values[i] = values[i][tuple(map(slice, part.leaves[i].shape))]
        return values, self.shell

    def evaluate(self, call: KernelCall, options: Options) -> Any:
        """Evaluate a call with other options."""
        return evaluate(call, options)

    # These hold for both.

    def candidates(self) -> list[Options]:
        """Return the options to compare, the most promising first; the kernel's own come first."""
        bound, given = self.bound, self.defaults
        most = min(bound or self.items, self.items - 1)

        def chunks(*sizes: int | None, **changes: Any) -> list[Options]:
            tried = [n for n in sizes if n == bound or (n is not None and 0 < n <= most)]
            return [self.with_chunk(size, **changes) for size in tried]

        kinds = [chunks(*_SIZES)]
        # What chunks store grows with the batch, which a bound on chunks is meant to prevent.
        if self.gradient and given.checkpoint is not False and bound is None:
            kinds.append(chunks(*_LARGE, checkpoint=False))
        for tried in (cpu_math.tried, devices.tried, lanes.tried, library.tried):
            kinds += [chunks(*sizes, **changes) for sizes, changes in tried(self)]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
        return list(dict.fromkeys([given, *chunks(bound), *filter(None, in_turn)]))

    def with_chunk(self, chunk_size: int | Literal["auto"] | None, **changes: Any) -> Options:
        return self.defaults.replace(chunk_size=chunk_size, **changes)

    def changes(self, options: Options) -> dict[str, Any]:
        """Return the options in which a candidate may differ, as `with_options` takes them."""
        given = self.defaults.values()
        changes = {name: x for name, x in options.values().items() if x != given[name]}
        if "compiler_options" in changes:
            changes["compiler_options"] = dict(changes["compiler_options"])
        return {**changes, "chunk_size": options.chunk_size}

    def rounded(self, items: int) -> int:
        """Return the number of items of a slice, which has at least ``items`` if possible.

        A slice is the first part of the longest batch axis; of ragged items, some of all lengths.
        """
        others = self.items // self.batch[self.axis]
        return min(self.items, -(-items // others) * others)

    def compiled(self, options: Options, items: int) -> tuple[Any, Callable[[], Any]]:
        """Compile the program for a slice; return it, and a function that runs it.

        ``items`` is `rounded`.
        """
        values, shell, shape = self.values, self.shell, list(self.batch)
        shape[self.axis] = items * shape[self.axis] // self.items
        if items < self.items:
            values, shell = self.part(tuple(shape))

        def outputs(arrays: Mapping[int, Any]) -> Any:
            full = [arrays.get(i, value) for i, value in enumerate(values)]
            call = shell.call(self.call.kernel, full)
            return self.evaluate(dataclasses.replace(call, cut=tuple(shape)), options)

        def value(floats: Mapping[int, Any], arrays: Mapping[int, Any], scale: jax.Array) -> Any:
            outs = jax.tree.leaves(outputs({**arrays, **floats}))
            sums = [jnp.sum(x).astype(scale.dtype) * scale for x in outs if _is_floating(x)]
            return sum(sums, scale * 0)

        def program(scale: jax.Array, arrays: Mapping[int, Any]) -> Any:
            if not self.gradient:
                return outputs(arrays)
            floats = {i: arrays[i] for i in self.floating}
            return jax.value_and_grad(value)(floats, arrays, scale)

        # Arrays, and a scale of the cotangents, are arguments: XLA would fold constants.
        inputs = jnp.float32(1), {i: values[i] for i in self.traced}
        if options.jit and not self.gradient:
            jitted = options.compiled(program, inputs)
        else:
            jitted = jax.jit(program, compiler_options=dict(options.compiler_options or ()))
        compiled = jitted.lower(*inputs).compile()
        return compiled, lambda: compiled(*inputs)


class RaggedWorkload(Workload):
    """A call with ragged items."""

    def filled(self) -> KernelCall:
        self.ragged = RaggedCall.of(self.call, None)
        return self.call

    def planned(self) -> tuple[Plan, int]:
        return self.ragged.dense, len(self.ragged.dense.batch_shape) - 1

    def item(self) -> ItemProgram:
        bound = self.ragged.bound(self.ragged.groups[0])
        options = bound.kernel.options().replace(reduce=None, reduce_axis=None)
        return bound.trace(bound.plan_whole(options))

    def levels(self, options: Options) -> tuple[Any, int]:
        parts = [part for _, part in plan_ragged(_with(self.call, options)).parts]
        return [part.levels for part in parts], max(part.in_flight for part in parts)

    def part(self, shape: Shape) -> tuple[list[Any], Shell]:
        order = np.argsort(self.ragged.lengths.sum(1), kind="stable")
        count, total = shape[-1], self.batch[-1]
        chosen = np.arange(count) * total // count
        if self.ragged.count > 1:
            chosen = np.sort(order[chosen])
        values, nodes = list(self.values), self.call.structure.nodes
        for i, axes in zip(self.plan.mapped, self.plan.batch_axes, strict=True):
            if i not in nodes and axes[-1] is not None:
                values[i] = jnp.take(values[i], chosen, axes[-1])
        if self.ragged.count < 2:
            return values, self.shell
        leaves = len(self.call.leaves)
        tree = jax.tree.map(
            lambda x: Ragged.from_list([x.to_list()[n] for n in chosen]) if is_ragged(x) else x,
            self.shell.treedef.unflatten(values[:leaves]),
            is_leaf=is_ragged,
        )
        values[:leaves], treedef = jax.tree.flatten(tree)
        return values, self.shell._replace(treedef=treedef)

    def evaluate(self, call: KernelCall, options: Options) -> Any:
        return call_ragged(_with(call, options))


def _with(call: KernelCall, options: Options) -> KernelCall:
    """Return a call with ragged items of a kernel that has other options."""
    spec, of_jit = call.kernel, {"jit": False, "bucket": False, "compiler_options": None}
    explicit = {**options.values(), **of_jit}
    kernel = KernelSpec(spec.fun, spec.declaration, explicit, spec.members)
    return dataclasses.replace(call, kernel=kernel)


def _is_floating(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return jnp.issubdtype(jnp.result_type(leaf) if dtype is None else dtype, jnp.floating)
