# SPDX-License-Identifier: MIT
"""``kernel.check`` of ragged items: by themselves, with their own rows, and filled up otherwise."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax._options import Options
from rankax.call.kernels import KernelCall, rebind
from rankax.core.base.arrays import has_tangent, target_of
from rankax.core.base.messages import listed
from rankax.core.plan.schedule import Shape
from rankax.ext.check.call import CallItems, Index
from rankax.ext.check.ulps import difference, most_ulps, numbers_of
from rankax.ext.ragged.call import RaggedCall, dense_shell
from rankax.ext.ragged.results import call_ragged
from rankax.ext.ragged.type import Ragged

_FILLS = {"large numbers": 1e6, "NaN": np.nan}


class RaggedItems(CallItems):
    """The items of a call with ragged arguments.

    An item is one of a dense call that gets its own rows without a batch axis. Outputs with a row
    for each of these are filled up with zeros to the longest item, to be compared at once.
    """

    def __init__(self, call: KernelCall, options: Options) -> None:
        self.call, self.ragged = call, RaggedCall.of(call, None)
        self.shape = self.ragged.dense.batch_shape
        self.options = options.replace(batch_shape=self.shape)

    def _number(self, index: Index) -> Any:
        return index[-1] if self.ragged.count > 1 else 0

    def lengths(self, index: Index) -> Shape:
        return tuple(self.ragged.lengths[self._number(index)].tolist())

    def has_rows(self, index: Index) -> bool:
        return all(self.lengths(index))

    def inputs(self, index: Index, leaves: Sequence[Any], lengths: Shape) -> list[Any]:
        """Return the rows of each ragged leaf, their numbers, and what the dense call is given."""
        number, rows = self._number(index), dict[int, Any]()
        for i, dim in self.ragged.dim_of.items():
            starts = self.ragged.starts[:, dim]
            start = starts[number] if isinstance(number, int) else jnp.asarray(starts)[number]
            rows[i] = _rows(leaves[i], start, lengths[dim])
        leaves = self._with(rows, leaves)
        return [rows, [*lengths], self._dense(leaves, lengths).inputs(index, leaves, ())]

    def evaluate(self, inputs: Sequence[Any], leaves: list[Any]) -> list[Any]:
        rows, lengths, others = inputs
        leaves = self._with(rows, leaves)
        out = self._dense(leaves, lengths).output(others, leaves)
        pairs = zip(jax.tree.leaves(out), self.ragged.dims_of(out), strict=True)
        every = self.ragged.lengths
        return [
            x if dim is None else _to_longest(x, lengths[dim], every[:, dim])
            for x, (_, dim) in pairs
        ]

    def gathered(self, outs: Any, chosen: Sequence[Index]) -> list[Any]:
        by_leaf: list[Any] = []
        for leaf in jax.tree.leaves(outs, is_leaf=lambda node: isinstance(node, Ragged)):
            if not isinstance(leaf, Ragged):
                by_leaf += super().gathered(leaf, chosen)
                continue
            items = leaf.to_list()
            rows = [jnp.asarray(items[self._number(index)]) for index in chosen]
            by_leaf.append(jnp.stack([_to_longest(x, len(x), leaf.lengths) for x in rows]))
        return by_leaf

    def described(self, index: Index) -> str:
        _, lines = self._leaks([index])
        return f"; {'; '.join(lines)}" if lines else ""

    def padding(self, chosen: Sequence[Index]) -> tuple[str, ...]:
        differs, lines = self._leaks(chosen)
        if not differs:
            return tuple(lines)
        # Also where these lengths need no padding.
        first = "the items differ if they are filled up with copies of their last rows"
        advice = "leave these rows out, by a parameter of rank Mask"
        raise ValueError(f"{self.call.name}.check: {'; '.join([first, *lines, advice])}")

    def arguments(self, index: Index) -> dict[str, Any]:
        lengths = self.lengths(index)
        rows, *_ = self.inputs(index, self.call.leaves, lengths)
        leaves = self._with(jax.tree.map(jnp.asarray, rows), self.call.leaves)
        return self._dense(leaves, lengths).arguments(index)

    def reduced(self, fun: Callable[[KernelCall], Any], explicit: dict[str, Any]) -> Any:
        spec = self.call.kernel
        declaration = dataclasses.replace(spec.declaration, outputs=None)
        items = type(spec)(spec.fun, declaration, explicit, spec.members)
        return call_ragged(dataclasses.replace(self.call, kernel=items), None, fun)

    # Items with other rows.

    def _leaks(self, chosen: Sequence[Index]) -> tuple[bool, list[str]]:
        """Say whether items change if copies fill them up, and which change if other rows do."""
        evaluate, paths = self.alone, self.call.structure.paths
        most = np.max([self.lengths(index) for index in chosen], 0, initial=0) + 3
        differs, found = False, set[tuple[int, str]]()
        for index in chosen:
            inputs = self.inputs(index, self.call.leaves, self.lengths(index))
            copies = evaluate(self._filled(inputs, most, {}))
            differs |= not _agree(evaluate(inputs), copies)
            for i, (fill, number) in itertools.product(self.ragged.dim_of, _FILLS.items()):
                if not _agree(copies, evaluate(self._filled(inputs, most, {i: number}))):
                    found.add((i, fill))
        lines: list[str] = []
        for i, path in enumerate(paths):
            if fills := [fill for fill in _FILLS if (i, fill) in found]:
                what = f"the items depend on the rows that fill {path} up"
                lines.append(f"{what}: by {listed(fills)}")
        return differs, lines

    def _filled(self, inputs: Sequence[Any], most: Any, fills: Mapping[int, float]) -> list[Any]:
        """Fill rows up to these lengths: by copies of the last one, or by a number."""
        rows, *others = inputs
        filled: dict[int, Any] = {}
        for i, x in rows.items():
            package: Any = np if isinstance(x, np.ndarray) else jnp
            last, more = x[-1:], most[self.ragged.dim_of[i]] - len(x)
            if i in fills and has_tangent(x):
                with np.errstate(over="ignore"):  # of narrow floats
                    last = package.full_like(last, fills[i])
            filled[i] = package.concatenate([x, package.repeat(last, more, axis=0)])
        return [filled, *others]

    # The dense call.

    def _with(self, rows: Mapping[int, Any], leaves: Sequence[Any]) -> list[Any]:
        return [rows.get(i, leaf) for i, leaf in enumerate(leaves)]

    def _dense(self, leaves: list[Any], lengths: Any) -> CallItems:
        call, dims = self.call, self.ragged.dims
        dense = rebind(call.kernel, dense_shell(call), leaves, call.others)
        most = {dims[dim]: len(leaves[i]) for i, dim in self.ragged.dim_of.items()}
        masks = {name: n > np.arange(most[name]) for name, n in zip(dims, lengths, strict=True)}
        return CallItems(dataclasses.replace(dense, masks=masks), self.options)


def _rows(values: Any, start: Any, length: int) -> Any:
    """Return the rows of an item; from NumPy, because JAX would compile each length."""
    own = getattr(values, "weak_type", False) or jnp.issubdtype(values.dtype, jax.dtypes.extended)
    if own or any(isinstance(x, core.Tracer) for x in (values, start)):
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(values), start, length)
    return np.asarray(values)[start : start + length]


def _to_longest(x: Any, length: Any, lengths: Any) -> Any:
    """Return as many rows as the longest item has, with zeros in place of those that fill up."""
    x, longest = numbers_of(x)[: lengths.max()], int(lengths.max())
    is_own = jnp.arange(len(x)) < length
    x = jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
    return jnp.pad(x, [(0, longest - len(x)), *[(0, 0)] * (x.ndim - 1)])


def _agree(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether outputs are equal up to rounding."""
    target, pairs = target_of(found), zip(wanted, found, strict=True)
    return all(difference(x, y, target)[0] <= most_ulps(x.dtype, target) for x, y in pairs)
