# SPDX-License-Identifier: MIT
"""A call with `Ragged` arguments: a handful of ordinary calls, one for each padded length.

The items of a group (`rankax.ext.lengths`) are filled up to the same length, by a kernel that is
derived from the user's (`padded.py`). It takes a row of integers for each item: its number, and
where its rows begin and how many they are. It gets the flat values whole, reads the rows of its
item by index, and calls the user's kernel. So whatever an ordinary call does, a ragged one does:
chunks, memory limits, devices, lanes, derivatives. Nothing is filled up outside a chunk.

* Other arguments with one entry for each item are read by the number of the item as well. To sort
  them would copy them and, in an eager call, compile a program for each number of items.
* Rows beyond the last one are copies of it. So the derivative of what is evaluated is that of the
  items themselves wherever the values are equal, also for a maximum that does not look at the mask.
  An item without rows gets zeros, to which no derivative flows back.
* The transpose of a read by index adds to the cotangent of the flat values. XLA does that in place,
  in the carry of the loop (``test_the_gradient_adds_in_place``), on all platforms and versions that
  were seen (CPU, JAX 0.10 and 0.12). Narrow floats are widened for it, as in `core/loop/loop.py`.
* In a program that is being traced, each length would have a cotangent as large as the values, and
  XLA:CPU of JAX 0.10 to 0.12 keeps all of them at once. So what is read there has the derivative of
  a mapped copy (`Role.slope`), whose cotangent has the items of this length only. XLA scatters
  these into one array, and drops the copy, which nobody reads (its tangent, `jax.jvp` reads).
* Keys are split by the number of an item in the batch as it was given.
* Results of a group are put at the numbers of its items; rows of outputs, at those of the values.
* Where the items are reduced, the states of the groups are merged like those of devices.

With ``jit=True`` all shapes are in buckets: of the values, of the items of a group and of all
items. What fills a group up is dropped, or not counted in a reduction (`FILL`), so a stream of
batches needs few programs. Blocks of `rankax.stream`, which are all known, have the shapes that
`Shared` chooses for them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax._options import Options
from rankax.call.kernels import KernelCall, KernelSpec, Shell, bind, bind_leaves
from rankax.core.base.arrays import has_tangent, in_32_bits, is_narrow, is_spread, is_staged
from rankax.core.base.messages import listed
from rankax.core.declare.dims import Rank
from rankax.core.loop.loop import widen
from rankax.core.loop.spec import PLACE
from rankax.core.plan.schedule import Plan, Shape
from rankax.core.reduce.run import Reductions
from rankax.ext.bucket import as_inputs, resized
from rankax.ext.jit import evaluate_part
from rankax.ext.lengths import Group, Shared, bucket_of, groups_of, rounded_up, slots_for
from rankax.ext.ragged.padded import (
    ITEMS,
    MAPPED,
    WHOLE,
    Padded,
    Role,
    dims_of_outputs,
    places_of,
    read_at,
)
from rankax.ext.ragged.type import is_ragged
from rankax.pipeline import evaluate


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedCall:
    """A checked call with ragged arguments."""

    call: KernelCall
    options: Options
    dims: tuple[str, ...]
    dim_of: dict[int, int]  # the first dimension of each ragged leaf
    lengths: np.ndarray[Any, Any]  # (items, dims)
    starts: np.ndarray[Any, Any]  # the same
    dense: Any  # the plan of the call if all items were filled up to the longest
    is_staged: bool  # whether it is evaluated as part of a program that is being traced
    is_compiled: bool  # whether its groups are evaluated by compiled programs
    shared: Shared | None = None  # the shapes of the batch, if it is one of several blocks

    @classmethod
    def of(cls, call: KernelCall, shared: Shared | None = None) -> RaggedCall:
        """Check a call."""
        options = call.kernel.options()
        _check_options(call, options)
        names = _dimensions(call)
        first = {name: call.structure.nodes[i] for i, name in reversed(names.items())}
        dims = tuple(dict.fromkeys(names.values()))
        lengths = np.stack([first[name].lengths for name in dims], 1)
        starts = np.stack([first[name].starts for name in dims], 1)
        dim_of = {i: dims.index(name) for i, name in names.items()}
        longest, leaves = lengths.max(0, initial=1).tolist(), list(call.leaves)
        for i, dim in dim_of.items():
            shape = (len(lengths), longest[dim], *leaves[i].shape[1:])
            leaves[i] = jax.ShapeDtypeStruct(shape, leaves[i].dtype)
        dense = dataclasses.replace(call, leaves=leaves).plan_whole(options)
        if dense.names:
            unnamed = cls.of(_unnamed(call, dense), shared)
            dense = dataclasses.replace(unnamed.dense, names=dense.names)
            return dataclasses.replace(unnamed, dense=dense)
        staged = is_staged()
        program = staged, options.jit and not staged
        return cls(call, options, dims, dim_of, lengths, starts, dense, *program, shared)

    @property
    def count(self) -> int:
        """The number of ragged items."""
        return len(self.lengths)

    @property
    def is_single(self) -> bool:
        """Whether there is one ragged item only, which may go with several of the others."""
        return self.count < 2 and self.shared is None

    @property
    def is_last_reduced(self) -> bool:
        """Whether the axis of the ragged items is reduced."""
        return len(self.dense.batch_shape) - 1 in self.dense.reduced

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The items by padded length; all of them together if their order matters."""
        reductions = self.options.reduce
        is_ordered = reductions is not None and reductions.are_ordered and self.is_last_reduced
        if self.is_single or is_ordered:
            longest = self.lengths.max(0, initial=1)
            longest = longest if self.shared is None else rounded_up(longest)
            return [Group(np.arange(self.count), tuple(longest.tolist()))]
        if self.shared is not None:
            return self.shared.groups(self.lengths)
        return groups_of(self.lengths, in_series=self.is_compiled)

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether a single group is evaluated as an ordinary call, in the order given."""
        return self.is_single or (len(self.groups) == 1 and not self.is_compiled)

    @property
    def is_filled(self) -> bool:
        """Whether groups may be filled up by items that do not count."""
        return self.is_compiled or bool(self.options.devices)

    def size(self, count: int, dim: int | None = None) -> int:
        """Return a number of items, or of rows, in its bucket if programs are to be reused."""
        if self.shared is not None:
            return self.shared.items if dim is None else self.shared.rows[dim]
        return (self.is_compiled and bucket_of(count, True)) or count

    def slots(self, group: Group) -> int:
        """Return how many items a group is filled up to."""
        count, bucket = len(group.items), self.options.bucket
        if self.is_direct:
            return count
        if self.options.devices:  # each of them has an item, so that all results are on all
            count = max(count, jax.device_count())
        if not self.is_compiled:
            return count
        if self.shared is not None:
            return self.shared.slots_of(group, count)
        if not isinstance(bucket, tuple):
            return slots_for(count)
        if (size := bucket_of(count, bucket)) is None:
            raise ValueError(
                f"{self.call.site}: {count} items have the same length, but the largest bucket is "
                f"{bucket[-1]}; add a larger one, or use bucket=True, which has no end"
            )
        return size

    def items_of(self, group: Group) -> np.ndarray[Any, Any]:
        """Return a row for each item of a group: where it is, and how many rows it has.

        These are two columns for the batch (its number, and 1) and for each ragged dimension. Items
        that fill the group up are copies of the last one.
        """
        size = self.slots(group)
        at = group.items[np.minimum(np.arange(size), len(group.items) - 1)]
        table = np.ones((size, 2 + 2 * len(self.dims)), np.int32)
        # An item without rows may begin at the end.
        ends = np.maximum(self.lengths.sum(0) - 1, 0)
        table[:, 0], table[:, 2::2] = at, np.minimum(self.starts[at], ends)
        table[:, 3::2] = self.lengths[at]
        return table

    @functools.cached_property
    def arguments(self) -> tuple[tuple[Role, ...], list[Any], list[Any], list[Any]]:
        """The roles of the leaves; those that are mapped, numbers of keys, and the others."""
        call, roles, mapped, whole, counts = self.call, list[Role](), list[Any](), list[Any](), []
        axes = dict(zip(self.dense.mapped, self.dense.batch_axes, strict=True))
        splits = {split.position: split.strides for split in self.dense.splits}
        for i, (leaf, rank) in enumerate(zip(call.leaves, call.structure.ranks, strict=True)):
            role, leaf = self._role(i, leaf, rank, axes.get(i, (None,)))
            if not self.is_single and i in splits:
                *front, last = splits[i]
                role = role._replace(split=last)
                counts.append(_numbers_in_front(self.dense.batch_shape, front))
            roles.append(role)
            (whole if role.rank is None else mapped).append(leaf)
        return tuple(roles), mapped, counts, whole

    def _role(self, i: int, leaf: Any, rank: Rank | None, axes: Sequence[Any]) -> tuple[Role, Any]:
        if rank is None:
            return Role(None), leaf
        dim, is_traced = self.dim_of.get(i), isinstance(leaf, core.Tracer)
        bare = Rank(rank.rank, is_key=rank.is_key)
        if dim is None and self.is_single:
            return Role(rank), leaf
        if dim is None and axes[-1] is None:  # all groups add to its cotangent
            is_wide = is_traced and is_narrow(leaf)
            return (
                (Role(bare, dtype=leaf.dtype), in_32_bits(leaf)) if is_wide else (Role(bare), leaf)
            )
        # Of several loops in one program, each would have a cotangent of the whole leaf.
        is_one = self.is_staged and len(self.groups) > 1 and not self.options.devices
        has_slope = is_one and is_traced and has_tangent(leaf.aval)
        weak = self.is_compiled and bool(getattr(leaf, "weak_type", False))
        role = Role(None, 0, bare if has_slope else None, weak=weak)
        if dim is not None:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            leaf = self._sized(widen(leaf) if is_traced else leaf, 0, dim)
            return role._replace(column=2 + 2 * dim, dtype=dtype), leaf
        at = np.ndim(leaf) - rank.rank - 1
        leaf = self._sized(leaf, at)
        if at:
            leaf = _reshaped(leaf, (*leaf.shape[:at], 1, *leaf.shape[at:]))
            role = role._replace(rank=Rank(rank.rank + 1, is_key=rank.is_key))
        return role, leaf

    def _sized(self, leaf: Any, axis: int, dim: int | None = None) -> Any:
        """Return an array with an axis of a length in its bucket, and of at least one row."""
        size = max(1, self.size(leaf.shape[axis], dim))
        if not (self.is_compiled or isinstance(leaf, jax.ShapeDtypeStruct)):
            leaf = jnp.asarray(leaf)
        return _reshaped(leaf, (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]))

    def _slopes(self, group: Group, items: np.ndarray[Any, Any]) -> list[Any]:
        """Return what all items of a group read, of the leaves that have a slope."""
        slopes: list[Any] = []
        for role, leaf in zip(self.arguments[0], self.call.leaves, strict=True):
            if role.slope is None:
                continue
            column, axis, dim = role.column or 0, leaf.ndim - role.slope.rank - 1, None
            if column:
                leaf, axis, dim = widen(leaf), 0, column // 2 - 1
            places = functools.partial(places_of, column=column, lengths=group.lengths)
            at = (slice(None),) * axis + (jax.vmap(places)(items),)
            slopes.append(read_at(self._sized(leaf, axis, dim), at))
        return slopes

    def dims_of(self, out: Any) -> list[tuple[str, int | None]]:
        """Return each output with the ragged dimension that it is declared to begin with."""
        declared = self.call.kernel.declaration.outputs
        return dims_of_outputs(None if self.options.reduce else declared, self.dims, out)

    def call_of(self, group: Group, reduce: Reductions | None = None) -> KernelCall:
        """Return the ordinary call of one group."""
        call, (roles, mapped, counts, whole) = self.call, self.arguments
        explicit = {name: x for name, x in call.kernel.explicit.items() if name != "bucket"}
        if reduce is not None:
            explicit["reduce"] = reduce
        if not self.is_single and (shape := self.options.batch_shape):
            explicit["batch_shape"] = (*shape[:-1], 1)
        shell, others, fixed = dense_shell(call), (*call.others,), frozenset(explicit.items())
        # Without a reduction, the outputs of several groups are compared with each other.
        is_first = group is self.groups[0] and self.is_last_reduced
        padded = Padded(
            call.kernel,
            shell,
            others,
            fixed,
            roles,
            self.dims,
            group.lengths,
            is_checked=len(self.groups) == 1 or is_first,
        )
        derived = call.kernel.structures.get_or_make(padded, padded.kernel)
        items = self.items_of(group)
        arrays = (*mapped, *self._slopes(group, items), *counts)
        items = items if self.is_staged else as_inputs(items)
        arguments = {ITEMS: items, MAPPED: arrays, WHOLE: tuple(whole), **call.others}
        part = bind(derived, (), arguments, shapes_only=True)
        if self.is_last_reduced and self.is_filled and not self.is_direct:
            part.lengths = {len(self.dense.batch_shape) - 1: len(group.items)}
        return part

    def evaluate(self, call: KernelCall) -> Any:
        """Evaluate the call of one group."""
        if self.is_compiled:
            return evaluate_part(call)
        call = dataclasses.replace(call, is_one_program=not self.is_staged)
        return evaluate(call, call.kernel.options())


def _unnamed(call: KernelCall, dense: Plan) -> KernelCall:
    """Return the call with an axis of length 1 for each axis that an array lacks."""
    leaves, kernel = list(call.leaves), call.kernel.unnamed
    for leaf in dense.leaves:
        if not leaf.is_array or not leaf.batch_axes:
            continue
        shape = (*(1 if n is None else n for n in leaf.lengths), *leaf.core_shape)
        if leaf.position not in call.structure.nodes:
            leaves[leaf.position] = _reshaped(leaves[leaf.position], shape)
        elif leaf.lengths[-1] is None:
            is_it = f"is {leaf.written.batch[-1]!r}" if leaf.written.batch else "has no name"
            raise TypeError(
                f"{call.site}: {leaf.path} is Ragged, so its batch axis must be the last one of "
                f"{listed(dense.names)}, but it {is_it}. Names are ordered as in the parameters: "
                "put those of dense arrays first, and give all Ragged arguments the same name"
            )
    if call.kernel.preset.reduce is not None:
        explicit = {**kernel.explicit, "reduce_axis": dense.reduced}

        def make() -> KernelSpec:
            return KernelSpec(kernel.fun, kernel.declaration, explicit, kernel.members)

        kernel = call.kernel.structures.get_or_make((Plan, dense.reduced), make)
    return bind_leaves(kernel, call.shell, leaves, call.others)


def _numbers_in_front(batch_shape: Shape, strides: Sequence[int]) -> Any:
    """Return what the axes before that of the ragged items add to the number of a key."""
    *front, _ = batch_shape
    along = [
        np.arange(size if stride else 1, dtype=PLACE.dtype) * np.asarray(stride, PLACE.dtype)
        for size, stride in zip(front, strides, strict=True)
    ]
    return functools.reduce(np.add, np.ix_(*along, np.zeros(1, PLACE.dtype)))


def _reshaped(leaf: Any, shape: Shape) -> Any:
    """Return an array, or a shape, with more rows on an axis, or with an axis of length 1."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    if leaf.size == math.prod(shape):
        return leaf if leaf.shape == shape else jnp.reshape(leaf, shape)
    return resized([leaf], [shape])[0]


def dense_shell(call: KernelCall) -> Shell:
    """Return the shell of a call with an array in place of each `Ragged`."""
    tree = call.shell.treedef.unflatten(call.leaves)
    dense = jax.tree.structure(tree, is_leaf=is_ragged)
    return call.shell._replace(treedef=dense)


# What ragged arguments cannot be, or do not go together with.


def _check_options(call: KernelCall, options: Options) -> None:
    if options.batched:
        path = call.structure.paths[next(iter(call.structure.nodes))]
        raise TypeError(
            f"{call.site}: {path} is Ragged, but with batched=True the function takes a whole "
            "chunk; write it for one item, or fill the items up and pass a boolean array"
        )
    for i, leaf in enumerate(call.leaves):
        if options.devices is None and call.structure.ranks[i] is not None and is_spread(leaf):
            raise ValueError(
                f"{call.site}: {call.structure.paths[i]} is sharded over devices, but ragged "
                "items are read by index from all of it; with devices=, the devices share the items"
            )


def _dimensions(call: KernelCall) -> dict[int, str]:
    """Return the first dimension of each ragged leaf; refuse what does not go together."""
    names: dict[int, str] = {}
    first: dict[str, int] = {}  # the leaf that has a dimension first
    structure, site = call.structure, call.site
    for i in structure.nodes:
        path, rank = structure.paths[i], structure.ranks[i]
        dims = rank.dims if rank is not None else None
        if not dims or dims[0].name is None:
            raise TypeError(
                f"{site}: {path} is Ragged, so its first core dimension needs a name, as in "
                f'{path}="n 3", but its rank is {rank}'
            )
        name = dims[0].name
        if any(name in (dim.name, *dim.names) for dim in dims[1:]):
            raise TypeError(
                f"{site}: {path} is Ragged, but its rank {rank} has {name!r} more than once; only "
                "the first axis of an item may differ"
            )
        if len(shape := np.shape(call.leaves[i])) != len(dims):
            raise ValueError(
                f"{site}: {path} is Ragged with values of shape {shape}, but its rank {rank} asks "
                f"for {len(dims)}: the rows, and {len(dims) - 1} for one row"
            )
        if names:
            other = first.get(name, next(iter(names)))
            mine, its = structure.nodes[i], structure.nodes[other]
            its_path = structure.paths[other]
            if len(mine) != len(its):
                raise ValueError(
                    f"{site}: {path} has {len(mine)} items, but {its_path} has {len(its)}"
                )
            if name in first and (differs := mine.lengths != its.lengths).any():
                at = int(np.argmax(differs))
                raise ValueError(
                    f"{site}: item {at} of {path} has {mine.lengths[at]} rows, but that of "
                    f"{its_path} has {its.lengths[at]}"
                )
        names[i] = name
        first.setdefault(name, i)
    for i, rank in enumerate(structure.ranks):
        for dim in (rank.dims or ()) if rank is not None and i not in names else ():
            name = next((name for name in (dim.name, *dim.names) if name in first), None)
            if name is not None:
                raise TypeError(
                    f"{site}: {structure.paths[i]} has the dimension {name!r}, in which "
                    f"{structure.paths[first[name]]} is Ragged; pass it as Ragged of the same "
                    "lengths, if that is its first core dimension, or give the dimension another "
                    "name"
                )
    return names
