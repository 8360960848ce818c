# SPDX-License-Identifier: MIT
"""A call with `Ragged` arguments: a handful of ordinary calls, one for each padded length.

The items of a group (`rankax._plan.lengths`) are filled up to the same length, by a kernel that is
derived from the user's (`_Padded`). It takes a row of integers for each item: its number, and where
its rows begin and how many they are. It gets the flat values whole, reads the rows of its item by
index, and calls the user's kernel. So whatever an ordinary call does, a ragged one does: chunks,
memory limits, devices, lanes, derivatives. Nothing is filled up outside a chunk.

* Other arguments with an item for each item are read by the number as well, and never sorted, which
  would be a copy and, in an eager call, a program for each number of items.
* Rows beyond the last one are copies of it. So the derivative of what is evaluated is that of the
  items themselves wherever the values are equal, also for a maximum that does not look at the mask.
  An item without rows gets zeros, to which no derivative flows back.
* The transpose of a read by index adds to the cotangent of the flat values. XLA does that in place,
  in the carry of the loop (``test_the_gradient_adds_in_place``), on all platforms and versions that
  were seen (CPU, JAX 0.10 and 0.12). Narrow floats are widened for it, as in `_loop/access.py`.
* Keys are split by the number of an item in the batch as it was given.
  Each length has its own cotangent, as large as the values, and XLA adds all of them at once: so
  the gradient needs the memory of a chunk and, inside one program, of that many gradients.
* Results of a group are put at the numbers of its items; rows of outputs, at those of the values.
* Where the items are reduced, the states of the groups are merged like those of devices.

With ``jit=True`` all shapes are in buckets: of the values, of the items of a group and of all
items. What fills a group up is dropped, or not counted in a reduction (`FILL`), so a stream of
batches needs few programs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax._base.arrays import is_staged, zeros
from rankax._call.arguments import KernelSpec
from rankax._call.bind import BoundKernel, bind, rebind
from rankax._call.fill import marked, resized, weakened
from rankax._call.run import run
from rankax._declare.dims import Rank
from rankax._declare.ragged import Ragged
from rankax._declare.ranks import Declaration
from rankax._devices.mesh import is_spread
from rankax._loop.access import widen
from rankax._loop.keys import PLACE, item_key
from rankax._options import Options
from rankax._plan.lengths import Group, groups_of, slots_for
from rankax._plan.shapes import bucket_of
from rankax._reduce.run import Reductions

# The parameters of a derived kernel, besides those of the original that have no rank.
_ITEMS, _MAPPED, _WHOLE = "rankax_items", "rankax_mapped", "rankax_whole"

Compiled = Callable[[BoundKernel], Any]  # calls a bound kernel by its compiled program


class _Role(NamedTuple):
    """How a derived kernel gets one leaf of the original arguments."""

    rank: Rank | None  # of what is mapped; None: it gets it whole
    rows: int | None = None  # the ragged dimension whose rows are read
    by_number: bool = False  # whether it has an item for each item, which is read
    split: int | None = None  # of a key that is split: how much an item adds to its number
    dtype: Any = None  # of the rows
    weak: bool = False


@dataclasses.dataclass(frozen=True)
class _Padded:
    """The user's kernel as a function of items that are filled up."""

    spec: KernelSpec
    names: tuple[str, ...]
    treedef: Any
    roles: tuple[_Role, ...]
    dims: tuple[str, ...]  # the ragged dimensions
    lengths: tuple[int, ...]  # to which they are filled up

    def kernel(self, others: Sequence[str], explicit: Mapping[str, Any]) -> KernelSpec:
        """Return the derived kernel."""

        @functools.wraps(self.spec.fun, updated=())
        def padded(*, rankax_items: Any, rankax_mapped: Any, rankax_whole: Any, **rest: Any) -> Any:
            leaves = self._leaves(rankax_items, iter(rankax_mapped), iter(rankax_whole))
            call = rebind(self.spec, self.names, leaves, self.treedef, rest)
            pairs = zip(self.dims, self.lengths, rankax_items[2::2], strict=True)
            masks = {name: jnp.arange(most, dtype=n.dtype) < n for name, most, n in pairs}
            call = dataclasses.replace(call, masks=masks)
            return call.evaluate(leaves, call.plan(Options()))

        mapped = [role.rank for role in self.roles if role.rank is not None]
        mapped += [Rank(0)] * sum(role.split is not None for role in self.roles)
        kind = inspect.Parameter.KEYWORD_ONLY
        names = [_ITEMS, _MAPPED, _WHOLE, *others]
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        ranks = {_ITEMS: Rank(1), _MAPPED: tuple(mapped)}
        derived = type(self.spec)(
            padded, Declaration(signature, ranks, None), explicit, self.spec.members
        )
        derived.name = self.spec.name
        return derived

    def _leaves(self, items: Any, mapped: Any, whole: Any) -> list[Any]:
        """Return the leaves of one item."""
        leaves: list[Any] = []
        for role in self.roles:
            leaf = next(whole if role.rank is None else mapped)
            if role.rows is not None:
                leaf = self._rows(jnp.asarray(leaf), items[1 + 2 * role.rows :], role)
            elif role.by_number:
                leaf = jnp.asarray(leaf).at[items[0]].get(mode="promise_in_bounds")
            leaves.append(weakened(leaf) if role.weak else leaf)
        for i, role in enumerate(self.roles):
            if role.split is not None:
                number = items[0].astype(PLACE.dtype) * np.asarray(role.split, PLACE.dtype)
                leaves[i] = item_key(leaves[i], next(mapped) + number)
        return leaves

    def _rows(self, values: Any, where: Any, role: _Role) -> Any:
        start, length = where[0], where[1]
        assert role.rows is not None
        at = jnp.arange(self.lengths[role.rows], dtype=start.dtype)
        last = jnp.maximum(length - 1, jnp.zeros_like(length))
        rows = values.at[start + jnp.minimum(at, last)].get(mode="promise_in_bounds")
        rows = rows.astype(role.dtype) if rows.dtype != role.dtype else rows
        return jnp.where(length > jnp.zeros_like(length), rows, zeros(rows.shape, rows.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedCall:
    """A checked call with ragged arguments."""

    call: BoundKernel
    options: Options
    dims: tuple[str, ...]
    lengths: np.ndarray[Any, Any]  # (items, dims)
    starts: np.ndarray[Any, Any]  # the same
    dense: Any  # the plan of the call if all items were filled up to the longest
    compiled: Compiled | None

    @classmethod
    def of(cls, call: BoundKernel, compiled: Compiled | None) -> RaggedCall:
        """Check a call; with ``compiled``, its parts are called by compiled programs."""
        options = call.kernel.options()
        _check_options(call, options)
        found = _by_dimension(call)
        dims = tuple(found)
        lengths = np.stack([ragged.lengths for ragged in found.values()], 1)
        starts = np.stack([ragged.starts for ragged in found.values()], 1)
        longest = dict(zip(dims, lengths.max(0, initial=1).tolist(), strict=True))
        leaves = list(call.leaves)
        for i in call.structure.ragged:
            shape = (len(lengths), longest[first_dim(call, i)], *leaves[i].shape[1:])
            leaves[i] = jax.ShapeDtypeStruct(shape, leaves[i].dtype)
        dense = dataclasses.replace(call, leaves=leaves).plan(options.unchunked)
        return cls(call, options, dims, lengths, starts, dense, compiled)

    @property
    def count(self) -> int:
        """The number of ragged items."""
        return len(self.lengths)

    @property
    def is_last_reduced(self) -> bool:
        """Whether the axis of the ragged items is reduced."""
        return len(self.dense.plan.batch_shape) - 1 in self.dense.plan.reduced

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The items by padded length; all of them together if their order matters."""
        reductions = self.options.reduce
        is_ordered = reductions is not None and reductions.are_ordered and self.is_last_reduced
        # One item may go with several of the other arguments.
        if self.count < 2 or is_ordered:
            longest = tuple(self.lengths.max(0, initial=1).tolist())
            return [Group(np.arange(self.count), longest)]
        return groups_of(self.lengths, in_series=self.compiled is not None)

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether a single group is evaluated as an ordinary call, in the order given."""
        return self.count < 2 or (len(self.groups) == 1 and self.compiled is None)

    @property
    def is_filled(self) -> bool:
        """Whether groups may be filled up by items that do not count."""
        return self.compiled is not None or bool(self.options.devices)

    def size(self, count: int) -> int:
        """Return a number of items or rows, in its bucket if programs are to be reused."""
        if self.compiled is None:
            return count
        return bucket_of(count, True) or count

    def slots(self, group: Group) -> int:
        """Return how many items a group is filled up to."""
        count, bucket = len(group.items), self.options.bucket
        if self.is_direct or not self.is_filled:
            return count
        if self.options.devices:  # each of them has an item, so that all results are on all
            count = max(count, jax.device_count())
        if self.compiled is None:
            return count
        if not isinstance(bucket, tuple):
            return slots_for(count)
        if (size := bucket_of(count, bucket)) is None:
            raise ValueError(
                f"{self.call.where}: {count} items have the same length, but the largest bucket is "
                f"{bucket[-1]}; add a larger one, or use bucket=True, which has no end"
            )
        return size

    def items_of(self, group: Group) -> np.ndarray[Any, Any]:
        """Return the number, starts and lengths of each item of a group, filled up by the last."""
        size = self.slots(group)
        at = group.items[np.minimum(np.arange(size), len(group.items) - 1)]
        table = np.zeros((size, 1 + 2 * len(self.dims)), np.int32)
        table[:, 0], table[:, 1::2], table[:, 2::2] = at, self.starts[at], self.lengths[at]
        # An item without rows may begin at the end.
        ends = np.maximum(self.lengths.sum(0) - 1, 0)
        table[:, 1::2] = np.minimum(table[:, 1::2], ends)
        return table

    @functools.cached_property
    def arguments(self) -> tuple[tuple[_Role, ...], list[Any], list[Any]]:
        """The roles of the leaves, those that are mapped and those that are passed whole."""
        call, roles, mapped, whole, counts = self.call, list[_Role](), list[Any](), list[Any](), []
        axes = dict(zip(self.dense.mapped, self.dense.batch_axes, strict=True))
        splits = {split.position: split.strides for split in self.dense.splits}
        for i, (leaf, rank) in enumerate(zip(call.leaves, call.structure.ranks, strict=True)):
            role, leaf = self._role(i, leaf, rank, axes.get(i, (None,)))
            if self.count > 1 and i in splits:
                *front, last = splits[i]
                role = role._replace(split=last)
                counts.append(self._numbers_in_front(front))
            roles.append(role)
            (whole if role.rank is None else mapped).append(leaf)
        return tuple(roles), [*mapped, *counts], whole

    def _role(self, i: int, leaf: Any, rank: Rank | None, axes: Sequence[Any]) -> tuple[_Role, Any]:
        if rank is None:
            return _Role(None), leaf
        weak = self.compiled is not None and bool(getattr(leaf, "weak_type", False))
        if i in self.call.structure.ragged:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            leaf = widen(leaf) if isinstance(leaf, core.Tracer) else leaf
            rows = self.dims.index(first_dim(self.call, i))
            return _Role(None, rows, dtype=dtype, weak=weak), self._sized(leaf, 0)
        if self.count < 2:
            return _Role(rank), leaf
        bare = Rank(rank.rank, is_key=rank.is_key)
        if axes[-1] is None:
            return _Role(bare), leaf
        at = np.ndim(leaf) - rank.rank - 1
        leaf = self._sized(leaf, at)
        if not at:
            return _Role(None, by_number=True, weak=weak), leaf
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jnp.expand_dims(leaf, at)
        else:
            shape = (*leaf.shape[:at], 1, *leaf.shape[at:])
            leaf = jax.ShapeDtypeStruct(shape, leaf.dtype)
        return _Role(Rank(rank.rank + 1, is_key=rank.is_key), by_number=True, weak=weak), leaf

    def _sized(self, leaf: Any, axis: int) -> Any:
        """Return an array with an axis of a length in its bucket, and of at least one row."""
        size = max(1, self.size(leaf.shape[axis]))
        shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        if self.compiled is None:
            leaf = jnp.asarray(leaf)
        return leaf if leaf.shape == shape else resized([leaf], [shape])[0]

    def _numbers_in_front(self, strides: Sequence[int]) -> Any:
        """Return what the axes before that of the ragged items add to the number of a key."""
        shape = self.dense.plan.batch_shape[:-1]
        number = np.zeros((1,) * (len(shape) + 1), PLACE.dtype)
        for axis, stride in enumerate(strides):
            if stride:
                along = [-1 if other == axis else 1 for other in range(len(shape) + 1)]
                places = np.arange(shape[axis], dtype=PLACE.dtype)
                number = number + places.reshape(along) * np.asarray(stride, PLACE.dtype)
        return number

    def bound(self, group: Group, reduce: Reductions | None) -> BoundKernel:
        """Return the ordinary call of one group."""
        call, (roles, mapped, whole) = self.call, self.arguments
        treedef = dense_treedef(call)
        padded = _Padded(call.kernel, call.names, treedef, roles, self.dims, group.lengths)
        others = call.others
        key = (
            "ragged",
            padded.names,
            treedef,
            roles,
            padded.dims,
            padded.lengths,
            (*others,),
            reduce,
        )
        derived = call.kernel.structures.find(
            key, lambda: padded.kernel(list(others), self._explicit(reduce))
        )
        items = self.items_of(group)
        given = {_ITEMS: items, _MAPPED: tuple(mapped), _WHOLE: tuple(whole), **others}
        bound = bind(derived, (), given, shapes_only=True)
        if not self.is_filled or self.is_direct or not self.is_last_reduced:
            return bound
        axis = len(self.dense.plan.batch_shape) - 1
        return dataclasses.replace(bound, lengths={axis: len(group.items)})

    def _explicit(self, reduce: Reductions | None) -> dict[str, Any]:
        explicit = {name: x for name, x in self.call.kernel.explicit.items() if name != "bucket"}
        if reduce is not None:
            explicit["reduce"] = reduce
        if self.count > 1 and (shape := self.options.batch_shape):
            explicit["batch_shape"] = (*shape[:-1], 1)
        return explicit

    def evaluate(self, bound: BoundKernel) -> Any:
        """Evaluate the call of one group."""
        if self.compiled is not None:
            return self.compiled(bound)
        bound = dataclasses.replace(bound, is_kept=not is_staged())
        return run(bound, marked(bound, bound.kernel.options()))


def dense_treedef(call: BoundKernel) -> Any:
    """Return the tree of the arguments with an array in place of each `Ragged`."""
    tree = call.treedef.unflatten(call.leaves)
    return jax.tree.structure(
        jax.tree.map(lambda _: 0, tree, is_leaf=lambda node: isinstance(node, Ragged))
    )


def first_dim(call: BoundKernel, i: int) -> str:
    """Return the name of the first core dimension of a leaf."""
    rank = call.structure.ranks[i]
    assert rank is not None
    assert rank.dims
    return rank.dims[0].name or ""


def _check_options(call: BoundKernel, options: Options) -> None:
    if options.batched:
        path = call.structure.paths[next(iter(call.structure.ragged))]
        raise TypeError(
            f"{call.where}: {path} is Ragged, but with batched=True the function takes a whole "
            "chunk; write it for one item, or fill the items up and pass a boolean array"
        )
    for i, leaf in enumerate(call.leaves):
        if options.devices is None and call.structure.ranks[i] is not None and is_spread(leaf):
            raise ValueError(
                f"{call.where}: {call.structure.paths[i]} is sharded over devices, but ragged "
                "items are read by index from all of it; with devices=, the devices share the items"
            )


def _by_dimension(call: BoundKernel) -> dict[str, Ragged]:
    """Return ragged lengths by dimension; refuse what does not go together."""
    found: dict[str, Ragged] = {}
    paths: dict[str, str] = {}
    structure, where = call.structure, call.where
    for i, ragged in structure.ragged.items():
        path, rank = structure.paths[i], structure.ranks[i]
        dims = rank.dims if rank is not None else None
        if not dims or dims[0].name is None:
            raise TypeError(
                f"{where}: {path} is Ragged, so its first core dimension needs a name, as in "
                f'{path}="n 3", but its rank is {rank}'
            )
        name, shape = dims[0].name, np.shape(call.leaves[i])
        if any(name in (dim.name, *dim.names) for dim in dims[1:]):
            raise TypeError(
                f"{where}: {path} is Ragged, but its rank {rank} has {name!r} more than once; only "
                "the first axis of an item may differ"
            )
        if len(shape) != len(dims):
            raise ValueError(
                f"{where}: {path} is Ragged with values of shape {shape}, but its rank {rank} asks "
                f"for {len(dims)}: the rows, and {len(dims) - 1} for one row"
            )
        first = next(iter(found), None)
        for other in [other for other in (name, first) if other in found][:1]:
            _check_equal(where, (path, ragged), (paths[other], found[other]), other == name)
        found.setdefault(name, ragged)
        paths.setdefault(name, path)
    for i, rank in enumerate(structure.ranks):
        for dim in (rank.dims or ()) if rank is not None and i not in structure.ragged else ():
            name = next((name for name in (dim.name, *dim.names) if name in found), None)
            if name is not None:
                raise TypeError(
                    f"{where}: {structure.paths[i]} has the dimension {name!r}, in which "
                    f"{paths[name]} is Ragged; pass it as Ragged of the same lengths, if that is "
                    "its first core dimension, or give the dimension another name"
                )
    return found


def _check_equal(
    where: str, one: tuple[str, Ragged], other: tuple[str, Ragged], same_name: bool
) -> None:
    (path, mine), (first, its) = one, other
    if len(mine) != len(its):
        raise ValueError(f"{where}: {path} has {len(mine)} items, but {first} has {len(its)}")
    if same_name and (mine.lengths != its.lengths).any():
        i = int(np.argmax(mine.lengths != its.lengths))
        raise ValueError(
            f"{where}: item {i} of {path} has {mine.lengths[i]} rows, but that of {first} has "
            f"{its.lengths[i]}"
        )
