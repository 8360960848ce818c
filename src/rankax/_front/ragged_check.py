# SPDX-License-Identifier: MIT
"""``kernel.check`` of ragged items: by themselves, with their own rows, and filled up otherwise."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.checks import check_bool, checked_int, positive_int
from rankax._base.trees import leaves_with_names
from rankax._base.words import listed
from rankax._call.arguments import rebind_arguments
from rankax._call.bind import BoundKernel, bind, rebind
from rankax._call.ragged import RaggedCall
from rankax._declare.ragged import Ragged
from rankax._front import trust
from rankax._front.trust import (
    CheckReport,
    Index,
    choose_items,
    difference,
    disagreement,
    has_gradient,
    most_ulps,
)
from rankax._loop.keys import item_key
from rankax._options import Options

_FILLS = {"large numbers": 1e6, "NaN": np.nan}


@dataclasses.dataclass(frozen=True, eq=False)
class _RaggedItems:
    """The items of a call with ragged arguments."""

    ragged: RaggedCall
    mapped: Any
    site: str

    @property
    def shape(self) -> Index:
        return self.ragged.dense.plan.batch_shape

    def number(self, index: Index) -> int:
        return index[-1] if self.ragged.count > 1 else 0

    def lengths(self, index: Index) -> list[int]:
        return self.ragged.lengths[self.number(index)].tolist()

    def leaves(self, index: Index, values: Mapping[int, Any]) -> list[Any]:
        """Return the leaves of one item, with its own rows; ``values`` take the place of leaves."""
        call, plan, number = self.ragged.call, self.ragged.dense, self.number(index)
        axes = dict(zip(plan.mapped, plan.batch_axes, strict=True))
        leaves: list[Any] = []
        for i, leaf in enumerate(call.leaves):
            leaf = values.get(i, leaf)
            if (ragged := call.structure.ragged.get(i)) is not None:
                begin = int(ragged.starts[number])
                leaf = jnp.asarray(leaf)[begin : begin + int(ragged.lengths[number])]
            elif (rank := call.structure.ranks[i]) is not None:
                leaf = jnp.asarray(leaf)
                for axis, place in zip(axes.get(i, ()), index, strict=False):
                    if axis is not None:
                        leaf = lax.slice_in_dim(leaf, place, place + 1, axis=axis)
                leaf = jnp.reshape(leaf, leaf.shape[leaf.ndim - rank.rank :])
            leaves.append(leaf)
        for split in plan.splits:
            number = sum(map(int.__mul__, split.strides, index))
            leaves[split.position] = item_key(leaves[split.position], np.uint32(number))
        return leaves

    def filled(self, leaves: Sequence[Any], most: Sequence[int], fills: Mapping[int, Any]) -> Any:
        """Return leaves filled up to these lengths: by copies, or by a number."""
        filled = list(leaves)
        for i in self.ragged.call.structure.ragged:
            rows, more = leaves[i], most[self.ragged.dims.index(self._dim(i))] - len(leaves[i])
            last = rows[-1:] if len(rows) else jnp.zeros((1, *rows.shape[1:]), rows.dtype)
            if fills.get(i) is not None and has_gradient(rows):
                last = jnp.full_like(last, fills[i])
            filled[i] = jnp.concatenate([rows, jnp.repeat(last, more, axis=0)])
        return filled

    def _dim(self, i: int) -> str:
        rank: Any = self.ragged.call.structure.ranks[i]
        return rank.dims[0].name

    def evaluate(self, leaves: Sequence[Any], lengths: Any) -> list[Any]:
        """Evaluate one item of which as many rows are real."""
        call = self.ragged.call
        values = [
            jax.tree.map(lambda x: x.values if isinstance(x, Ragged) else x, value, is_leaf=_is)
            for value in call.treedef.unflatten(leaves)
        ]
        flat, treedef = jax.tree.flatten(values)
        one = rebind(call.kernel, call.names, flat, treedef, call.others)
        most = {self._dim(i): len(leaves[i]) for i in call.structure.ragged}
        masks = {
            name: jnp.arange(most[name]) < length
            for name, length in zip(self.ragged.dims, lengths, strict=True)
        }
        one = dataclasses.replace(one, masks=masks)
        return jax.tree.leaves(one.evaluate(flat, one.plan(Options())))

    def gathered(self, out: Any, index: Index) -> list[Any]:
        """Return one item of the outputs of the call."""
        outs: list[Any] = []
        for leaf in jax.tree.leaves(out, is_leaf=_is):
            if _is(leaf):
                begin = int(leaf.starts[index[-1]])
                outs.append(leaf.values[begin : begin + int(leaf.lengths[index[-1]])])
            else:
                outs.append(leaf[index])
        return outs


def _is(node: Any) -> bool:
    return isinstance(node, Ragged)


def _compare(
    them: _RaggedItems, items: int, random: np.random.Generator, *, gradient: bool
) -> CheckReport:
    call, given = them.ragged.call, them.ragged.call.arguments
    chosen = [i for i in choose_items(them.shape, items, random) if min(them.lengths(i), default=1)]
    name = call.kernel.name
    if not chosen:
        return CheckReport(name, them.shape, (), ())
    out = them.mapped(*given.args, **given.kwargs)
    names = [path for path, _ in leaves_with_names(out, "output", stops=_is)]
    exact = jax.jit(them.evaluate)
    most = np.max([them.lengths(index) for index in chosen], 0) + 3
    worst: dict[str, tuple[float, Index]] = {}
    leaks: dict[tuple[int | None, str], None] = {}
    for index in chosen:
        leaves = them.leaves(index, {})
        wanted = exact(leaves, them.lengths(index))
        lengths = them.lengths(index)
        copies = _cut(wanted, exact(them.filled(leaves, most, {}), lengths))
        if not _agree(wanted, copies):
            leaks[None, "copies"] = None
        for i in call.structure.ragged:
            for fill, number in _FILLS.items():
                padded = exact(them.filled(leaves, most, {i: number}), lengths)
                if not _agree(copies, _cut(wanted, padded)):
                    leaks[i, fill] = None
        for path, want, got in zip(names, wanted, them.gathered(out, index), strict=True):
            ulps, _ = difference(want, got)
            worst[path] = max(worst.get(path, (-1.0, index)), (ulps, index))
            if ulps > most_ulps(want.dtype):
                raise disagreement(them.site, path, index, ulps, want, got, _hint(call, leaks))
    if (None, "copies") in leaks:  # also where these lengths need no padding
        raise ValueError(
            f"{them.site}: the items differ if they are filled up with copies of their last rows"
            f"{_hint(call, leaks)}; leave these rows out, by a parameter of rank Mask"
        )
    differences = [(path, *found) for path, found in worst.items()]
    if gradient:
        differences += _gradients_ragged(them, chosen)
    lines = tuple(_leak_lines(call, leaks))
    return CheckReport(name, them.shape, tuple(chosen), tuple(differences), lines)


def _cut(wanted: Sequence[Any], padded: Sequence[Any]) -> list[Any]:
    """Return outputs without the rows that fill them up."""
    pairs = zip(wanted, padded, strict=True)
    return [y if x.shape == y.shape else y[: len(x)] for x, y in pairs]


def _agree(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether outputs are equal up to rounding."""
    pairs = zip(wanted, found, strict=True)
    return all(difference(x, y)[0] <= most_ulps(x.dtype) for x, y in pairs)


def _hint(call: BoundKernel, leaks: Mapping[tuple[int | None, str], None]) -> str:
    lines = _leak_lines(call, leaks)
    return f"; {'; '.join(lines)}" if lines else ""


def _leak_lines(call: BoundKernel, leaks: Mapping[tuple[int | None, str], None]) -> list[str]:
    return [
        f"the items depend on the rows that fill {path} up: by {listed(fills)}"
        for i, path in enumerate(call.structure.paths)
        if (fills := [fill for fill in _FILLS if (i, fill) in leaks])
    ]


def _gradients_ragged(
    them: _RaggedItems, chosen: Sequence[Index]
) -> Iterator[tuple[str, float, Index]]:
    """Compare the gradient of a random sum of the chosen items with that of them by themselves."""
    call = them.ragged.call
    floats = [i for i, leaf in enumerate(call.leaves) if has_gradient(leaf)]

    def weighed(outs: Sequence[Any], number: int) -> Any:
        draw = np.random.default_rng(number)
        floating = [out for out in outs if has_gradient(out)]
        terms = [jnp.sum(jnp.real(x * draw.normal(size=x.shape).astype(x.dtype))) for x in floating]
        return sum(terms, jnp.zeros(()))

    def of_call(values: Mapping[int, Any]) -> Any:
        leaves = [values.get(i, leaf) for i, leaf in enumerate(call.leaves)]
        named = dict(zip(call.names, call.treedef.unflatten(leaves), strict=True))
        given = rebind_arguments(call.kernel, {**call.arguments.arguments, **named})
        out = them.mapped(*given.args, **given.kwargs)
        return sum(weighed(them.gathered(out, index), n) for n, index in enumerate(chosen))

    def of_items(values: Mapping[int, Any]) -> Any:
        outs = [them.evaluate(them.leaves(index, values), them.lengths(index)) for index in chosen]
        return sum(weighed(out, n) for n, out in enumerate(outs))

    at = {i: jnp.asarray(call.leaves[i]) for i in floats}
    got, wanted = jax.grad(of_call)(at), jax.grad(of_items)(at)
    for i in floats:
        path = f"gradient of {call.structure.paths[i]}"
        ulps, place = difference(wanted[i], got[i])
        yield path, ulps, place
        if ulps > most_ulps(wanted[i].dtype):
            raise disagreement(them.site, path, place, ulps, wanted[i][place], got[i][place])


def check(
    kernel: Any, args: Any, kwargs: Any, items: int, seed: int, *, gradient: bool
) -> CheckReport:
    """Compare some items of a call with the kernel by itself, ragged or not."""
    mapped = kernel.with_options(reduce=None, reduce_axis=None, where=None)
    call = bind(mapped.spec, args, kwargs, takes_ragged=True)
    if not call.structure.ragged:
        return trust.check(kernel, args, kwargs, items, seed, gradient=gradient)
    site = f"{kernel.spec.name}.check"
    positive_int(items, site, "items")
    checked_int(seed, f"{site}: seed must be an int, got")
    check_bool(gradient, site, "gradient")
    ragged = _RaggedItems(RaggedCall.of(call, None), mapped, site)
    return _compare(ragged, items, np.random.default_rng(seed), gradient=gradient)
