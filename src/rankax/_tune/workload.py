# SPDX-License-Identifier: MIT
"""The programs of one kernel that `tune` times, for all items or for a slice of them.

They are compiled with `jax.jit` whether or not the kernel has ``jit=True``, because that is how a
fast program runs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from rankax._base.arrays import is_staged
from rankax._call.arguments import KernelSpec, is_array
from rankax._call.bind import bind, rebind
from rankax._call.fill import fill_up, filled
from rankax._call.run import run
from rankax._fit.cpu import LIBRARY_OPTION, tiles_matter
from rankax._lockstep.machine import cut_program
from rankax._options import Options

# Chunk sizes, the most promising first: small ones and large ones in turn.
_SIZES = (256, 16, 4096, 4, 64, 1, 1024, 8, 2, 16384)
_LARGE = (256, 4096, 1024)  # of chunks that a gradient stores, or on several devices
_LANES = (256, 64, 1024)  # where items end by themselves


class Workload:
    """A kernel and the arguments that it is tuned for.

    Parameters
    ----------
    kernel : KernelSpec
    args, kwargs
        Of the call.
    bound : int, optional
        The largest chunk that may be used.
    gradient : bool
        Whether the value is differentiated.
    where : str
        How an error message begins.
    """

    def __init__(
        self,
        kernel: KernelSpec,
        args: Any,
        kwargs: Any,
        bound: int | None,
        gradient: bool,
        where: str,
    ) -> None:
        self.kernel, self.bound, self.gradient = kernel, bound, gradient
        call = bind(kernel, args, kwargs)
        self.others, self.others_tree = jax.tree.flatten(call.others)
        if is_staged() or any(isinstance(x, core.Tracer) for x in [*call.leaves, *self.others]):
            raise TypeError(
                f"{where}: it runs the kernel to time it, so it cannot be called inside jax.jit, "
                "jax.vmap, jax.grad or a scan; call it before, and use the kernel that it returns"
            )
        call = filled(call, fill_up(call, kernel.options()))
        self.call = call = dataclasses.replace(call, lengths={})  # copies cost what items cost
        self.defaults = dataclasses.replace(kernel.options(), memory_limit=None)
        values = [*call.leaves, *self.others] if kernel.preset.jit else []
        self.traced = {*call.ranked, *(i for i, value in enumerate(values) if is_array(value))}
        self.floating = [i for i in call.ranked if _is_floating(call.leaves[i])]
        self.plan = call.plan(self.with_chunk(None))
        self.batch = self.plan.plan.batch_shape
        self.items = math.prod(self.batch)
        if not self.items or not self.batch:
            what = "no batch axes" if not self.batch else "an empty batch"
            raise ValueError(
                f"{where}: the arguments have {what}, so there is nothing to tune; pass arguments "
                "as large as those of the calls that should be fast"
            )
        if gradient and not self.floating:
            raise TypeError(
                f"{where}: gradient=True, but no argument with a rank holds floating-point numbers"
            )

    def candidates(self) -> list[Options]:
        """Return the options to compare, the most promising first; the kernel's own come first."""
        bound, given = self.bound, self.defaults
        most = min(bound or self.items, self.items - 1)

        def chunks(*sizes: int | None, **changes: Any) -> list[Options]:
            tried = [n for n in sizes if n == bound or (n is not None and 0 < n <= most)]
            return [self.with_chunk(size, **changes) for size in tried]

        kinds = [chunks(*_SIZES)]
        compiler_options = dict(given.compiler_options or ())
        if given.jit and tiles_matter(compiler_options):
            pairs = {**compiler_options, LIBRARY_OPTION: "LIBRARY_FUSION_TYPE_DOT"}.items()
            kinds.append(chunks(bound, 256, 16, compiler_options=tuple(sorted(pairs))))
        # What chunks store grows with the batch, which a bound on chunks is meant to prevent.
        if self.gradient and given.checkpoint is not False and bound is None:
            kinds.append(chunks(*_LARGE, checkpoint=False))
        # What is committed to one device is meant to stay there.
        is_free = not any(getattr(x, "committed", False) for x in [*self.call.leaves, *self.others])
        if given.devices is None and jax.local_device_count() > 1 and is_free:
            kinds.append(chunks(bound, *_LARGE, devices="all"))
        if not self.gradient and not given.batched and self._has_ends():
            kinds.append(chunks(*_LANES, bound or 0, lockstep=False))
        if not given.lockstep:
            kinds.append(chunks(bound, 1, *_LARGE, lockstep=True))
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
        return list(dict.fromkeys([given, *chunks(bound), *filter(None, in_turn)]))

    def _has_ends(self) -> bool:
        """Whether items differ in cost: a loop or an expensive branch depends on the item."""
        return bool(cut_program(self.call.trace(self.plan).closed).ends)

    def with_chunk(self, chunk_size: int | None, **changes: Any) -> Options:
        return dataclasses.replace(self.defaults, chunk_size=chunk_size, **changes)

    def changes(self, options: Options) -> dict[str, Any]:
        """Return the options in which a candidate may differ, as `with_options` takes them."""
        changes: dict[str, Any] = {"chunk_size": options.chunk_size}
        for name in ("checkpoint", "devices", "lockstep", "compiler_options"):
            if (value := getattr(options, name)) != getattr(self.defaults, name):
                changes[name] = dict(value) if name == "compiler_options" else value
        return changes

    def rounded(self, items: int) -> int:
        """Return the number of items of a slice, which has at least ``items`` if possible.

        A slice is the first part of the longest batch axis.
        """
        others = self.items // max(self.batch)
        return min(self.items, -(-items // others) * others)

    def sliced(self, items: int) -> tuple[list[Any], tuple[int, ...]]:
        """Return the leaves of a slice, and its batch shape; ``items`` is `rounded`."""
        leaves, shape = list(self.call.leaves), list(self.batch)
        longest = shape.index(max(shape))
        shape[longest] = items * shape[longest] // self.items
        if items < self.items:
            part = self.call.part(self.plan, tuple(shape))
            for i in self.plan.mapped:
                leaves[i] = leaves[i][tuple(map(slice, part.leaves[i].shape))]
        return leaves, tuple(shape)

    def compiled(self, options: Options, items: int) -> tuple[Any, Callable[[], Any]]:
        """Compile the program for a slice; return it, and a function that runs it."""
        leaves, shape = self.sliced(items)
        values = [*leaves, *self.others]
        count = len(self.call.leaves)

        def outputs(arrays: Mapping[int, Any]) -> Any:
            full = [arrays.get(i, value) for i, value in enumerate(values)]
            others = self.others_tree.unflatten(full[count:])
            call = rebind(self.kernel, self.call.names, full[:count], self.call.treedef, others)
            return run(dataclasses.replace(call, cut=shape), options)

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
        compiler = dict(options.compiler_options or ())
        compiled = jax.jit(program, compiler_options=compiler).lower(*inputs).compile()
        return compiled, lambda: compiled(*inputs)


def _is_floating(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return jnp.issubdtype(jnp.result_type(leaf) if dtype is None else dtype, jnp.floating)
