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

from rankax._base.arrays import index_dtype, zeros
from rankax._base.trees import entries, leaves_with_names
from rankax._call.arguments import KernelSpec, keep
from rankax._call.bind import BoundKernel, bind, rebind
from rankax._call.fill import as_inputs, resized, weakened
from rankax._call.run import plan_of, run
from rankax._declare.dims import Rank
from rankax._declare.ragged import Ragged, span
from rankax._declare.ranks import Declaration, ranks_of_leaves
from rankax._devices.mesh import is_spread
from rankax._loop.access import widen
from rankax._loop.keys import PLACE, item_key
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._plan.lengths import Group, groups_of, slots_for
from rankax._plan.shapes import bucket_of
from rankax._reduce.merge import RunStates
from rankax._reduce.protocol import FILL
from rankax._reduce.run import Reductions

# The parameters of a derived kernel, besides those of the user's that have no rank.
_ITEMS, _MAPPED, _WHOLE = "rankax_items", "rankax_mapped", "rankax_whole"

Compiled = Callable[[BoundKernel], Any]  # calls a bound kernel by its compiled program


class _Role(NamedTuple):
    """How a derived kernel gets one leaf of the arguments of the user's."""

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
            shape = (len(lengths), longest[_first(call, i)], *leaves[i].shape[1:])
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

    def size(self, count: int) -> int:
        """Return a number of items or rows, in its bucket if programs are to be reused."""
        if self.compiled is None:
            return count
        return bucket_of(count, True) or count

    def slots(self, group: Group) -> int:
        """Return how many items a group is filled up to."""
        count, bucket = len(group.items), self.options.bucket
        if self.is_direct or self.compiled is None:
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
            leaf = widen(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
            rows = self.dims.index(_first(self.call, i))
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
        stripped = [
            jax.tree.map(lambda x: x.values if isinstance(x, Ragged) else x, value, is_leaf=_is)
            for value in call.treedef.unflatten(call.leaves)
        ]
        treedef = jax.tree.structure(stripped)
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
        derived = call.kernel.structures.get(key)
        if derived is None:
            derived = padded.kernel(list(others), self._explicit(reduce))
            keep(call.kernel.structures, key, derived)
        items = self.items_of(group)
        given = {_ITEMS: items, _MAPPED: tuple(mapped), _WHOLE: tuple(whole), **others}
        bound = bind(derived, (), given, shapes_only=True)
        if self.compiled is None or self.is_direct or not self.is_last_reduced:
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
        return run(bound, bound.kernel.options()) if self.compiled is None else self.compiled(bound)


def _is(node: Any) -> bool:
    return isinstance(node, Ragged)


def _first(call: BoundKernel, i: int) -> str:
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


# Results.


def call_ragged(call: BoundKernel, compiled: Compiled | None = None) -> Any:
    """Evaluate a call with ragged arguments."""
    ragged = RaggedCall.of(call, compiled)
    reductions = ragged.options.reduce
    _check_reduced_outputs(ragged)
    if reductions is not None and ragged.is_last_reduced and not ragged.is_direct:
        return _reduced(ragged, reductions)
    bounds = [ragged.bound(group, None) for group in ragged.groups]
    if len(bounds) == 1:
        _check_same_outputs(ragged, bounds[0])
    outs = list(map(ragged.evaluate, bounds))
    if reductions is None:
        return _in_order(ragged, outs, len(ragged.dense.plan.batch_shape) - 1)
    if ragged.is_direct:
        return outs[0]
    parts = [reductions.structure.flatten_up_to(out) for out in outs]
    return reductions.structure.unflatten(_kept_in_order(ragged, reductions, parts))


def _kept_in_order(ragged: RaggedCall, reductions: Reductions, parts: list[list[Any]]) -> list[Any]:
    """Put the results of groups in order, one for each reduction, where their axis is kept."""
    batch, reduced = ragged.dense.plan.batch_shape, ragged.dense.plan.reduced
    triples = zip(reductions.entries, *parts, strict=True)
    return [
        _in_order(ragged, own, len(batch) - 1 - (0 if entry.is_kept else len(reduced)))
        for entry, *own in triples
    ]


def _in_order(ragged: RaggedCall, outs: Sequence[Any], axis: int) -> Any:
    """Put results of the groups, which have their items on ``axis``, in the order given."""
    declared = ragged.call.kernel.declaration.outputs
    trees = [jax.tree.flatten(out) for out in outs]
    structure = trees[0][1]
    is_map = ragged.options.reduce is None and declared is not None
    ranks = ranks_of_leaves(declared, outs[0], "output") if is_map else [None] * len(trees[0][0])
    names = [path for path, _ in leaves_with_names(outs[0], "output")]
    leaves: list[Any] = []
    for path, rank, *parts in zip(names, ranks, *(leaves for leaves, _ in trees), strict=True):
        name = rank.dims[0].name if rank is not None and rank.dims else None
        if name in ragged.dims:
            leaves.append(_rows_in_order(ragged, path, name, parts))
            continue
        if len({part.shape[axis + 1 :] for part in parts}) > 1:
            raise _depends_on_length(ragged, path, parts[0].shape[axis + 1 :])
        if ragged.is_direct:
            leaves += parts
            continue
        held, size = None, ragged.size(ragged.count)
        for part, group in zip(parts, ragged.groups, strict=True):
            index = np.full(ragged.slots(group), size, np.int32)
            index[: len(group.items)] = group.items
            held = _put(held, part, as_inputs(index), axis, size)
        leaves.append(_cut(held, axis, ragged.count))
    return structure.unflatten(leaves)


def _rows_in_order(ragged: RaggedCall, path: str, name: str, parts: Sequence[Any]) -> Ragged:
    """Return an output that begins with a ragged dimension."""
    batch = ragged.dense.plan.batch_shape
    if len(batch) > 1 or batch[0] != ragged.count:
        raise ValueError(
            f"{ragged.call.where}: {path} begins with the ragged dimension {name!r}, so it would "
            f"be Ragged, which has one batch axis, but the batch shape is {batch}; use jax.vmap "
            "over the other axes"
        )
    at = ragged.dims.index(name)
    lengths, starts = ragged.lengths[:, at], ragged.starts[:, at]
    total = int(lengths.sum())
    held, size = None, max(1, ragged.size(total))
    for part, group in zip(parts, ragged.groups, strict=True):
        items = np.full((ragged.slots(group), 2), 0, np.int32)
        items[: len(group.items), 0] = starts[group.items]
        items[: len(group.items), 1] = lengths[group.items]
        held = _put_rows(held, part, as_inputs(items), size)
    return Ragged(_cut(held, 0, total), lengths)


def _cut(x: Any, axis: int, size: int) -> Any:
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return x if x.shape == shape else resized([x], [shape])[0]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _put(held: Any, part: Any, index: Any, axis: int, size: int) -> Any:
    """Put a part at some places along an axis; those that do not exist are dropped."""
    if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        data = None if held is None else jax.random.key_data(held)
        data = _put(data, jax.random.key_data(part), index, axis, size)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
    if held is None:
        held = jnp.zeros((*part.shape[:axis], size, *part.shape[axis + 1 :]), part.dtype)
    return held.at[(slice(None),) * axis + (index,)].set(part, mode="drop")


@functools.partial(jax.jit, static_argnums=3)
def _put_rows(held: Any, part: Any, items: Any, size: int) -> Any:
    starts, lengths = items[:, :1], items[:, 1:]
    rows = jnp.arange(part.shape[1], dtype=items.dtype)[None]
    index = jnp.where(rows < lengths, starts + rows, jnp.full_like(starts, size))
    return _put(held, jnp.reshape(part, (-1, *part.shape[2:])), jnp.ravel(index), 0, size)


# What is the same for all lengths.


def _check_reduced_outputs(ragged: RaggedCall) -> None:
    """Refuse outputs whose declaration has a ragged dimension where none can be."""
    call, dims = ragged.call, ragged.dims
    for rank in entries(call.kernel.declaration.outputs):
        for place, dim in enumerate((rank.dims or ()) if isinstance(rank, Rank) else ()):
            name = next((name for name in (dim.name, *dim.names) if name in dims), None)
            if name is None or (place == 0 and dim.name == name and ragged.options.reduce is None):
                continue
            reduced = "with reduce=, " if place == 0 and dim.name == name else ""
            raise TypeError(
                f"{call.where}: {reduced}an output of rank {rank} has the ragged dimension "
                f"{name!r}, but only the first core dimension of an output that is not reduced may "
                "be ragged; reduce that axis in the kernel, or return its rows in front"
            )


def _check_same_outputs(ragged: RaggedCall, bound: BoundKernel) -> None:
    """Refuse outputs that depend on the padded length, where there is one only."""
    longer = Group(ragged.groups[0].items, tuple(n + 1 for n in ragged.groups[0].lengths))
    pair = [dataclasses.replace(x, lengths={}) for x in (bound, ragged.bound(longer, None))]
    items = [each.trace(each.plan(ragged.options.unchunked)) for each in pair]
    declared = ragged.call.kernel.declaration.outputs
    out = items[0].out_tree.unflatten(items[0].closed.out_avals)
    names = [path for path, _ in leaves_with_names(out, "output")]
    ranks = [None] * len(names) if declared is None else ranks_of_leaves(declared, out, "output")
    avals = [item.closed.out_avals for item in items]
    for path, rank, one, other in zip(names, ranks, *avals, strict=True):
        is_ragged = rank is not None and rank.dims and rank.dims[0].name in ragged.dims
        if one.shape != other.shape and not is_ragged:
            raise _depends_on_length(ragged, path, one.shape)


def _depends_on_length(ragged: RaggedCall, path: str, shape: tuple[int, ...]) -> ValueError:
    name = ragged.dims[0]
    return ValueError(
        f"{ragged.call.where}: {path} has the shape {shape} for one item, which depends on how "
        f"many rows the item is filled up to; declare the output, as in -> "
        f'Float[Array, "{name} 3"], if it has a row for each row, or reduce that axis in the kernel'
    )


# Reductions over the ragged items.


def _reduced(ragged: RaggedCall, reductions: Reductions) -> Any:
    """Merge the states of the groups, as those of devices are merged."""
    plan = ragged.dense.plan
    row = tuple(plan.batch_shape[axis] for axis in plan.reduced)
    total = int(np.prod(row))
    # The number of items decides the type of indices, and must not be part of the program.
    is_compiled = ragged.compiled is not None
    of_run = max(total, 2**31 - 1) if is_compiled else total
    bounds = [ragged.bound(group, reductions.for_runs(of_run)) for group in ragged.groups]
    reductions = reductions.of_items(FILL) if is_compiled else reductions
    traced = [_outputs(ragged, bound, reductions, total) for bound in (bounds[0], bounds[-1])]
    if len(bounds) == 1:
        _check_same_outputs(ragged, bounds[0])
    for one, other in zip(*traced, strict=True):
        for path, aval, longer in zip(one.names, one.avals, other.avals, strict=True):
            if aval.shape != longer.shape:
                raise _depends_on_length(ragged, path, aval.shape)
    runs = RunStates(reductions, traced[0], ())
    batch = len(plan.batch_shape) - len(plan.reduced)
    held, kept = None, list[list[Any]]()
    for bound, group in zip(bounds, ragged.groups, strict=True):
        values = reductions.structure.flatten_up_to(ragged.evaluate(bound))
        kept.append(
            [v if e.is_kept else () for e, v in zip(reductions.entries, values, strict=True)]
        )
        states = [() if e.is_kept else v for e, v in zip(reductions.entries, values, strict=True)]
        size = ragged.slots(group)
        index = np.zeros(size, index_dtype(total))
        index[: len(group.items)] = group.items
        held = _merged(runs, batch, held, states, as_inputs(index), np.int64(ragged.count))
    results = dataclasses.replace(runs, sizes=row).finish(held or (), batch)
    return runs.assemble(results, _kept_in_order(ragged, reductions, kept))


def _outputs(ragged: RaggedCall, bound: BoundKernel, reductions: Reductions, total: int) -> Any:
    options = ragged.options
    plan = bound.plan(dataclasses.replace(options.unchunked, batch_shape=None))
    return bound.trace(plan, reductions.for_runs(total)).outputs


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged(
    runs: RunStates, batch: int, held: Any, states: list[Any], items: Any, count: Any
) -> Any:
    """Merge the states of a group with those before; its items get the numbers they had."""
    size = items.shape[0]

    def place(index: jax.Array) -> jax.Array:
        index = index.astype(items.dtype)
        own = items.at[index % size].get(mode="clip")
        return index // size * count.astype(items.dtype) + own

    states = runs.placed(states, place)
    if held is None:
        return states
    both = jax.tree.map(lambda *pair: jnp.stack(pair), held, states)
    merged = runs.merge(both, batch)
    # Some merge tuples to lists.
    return jax.tree.unflatten(jax.tree.structure(states), jax.tree.leaves(merged))


# What `plan` prints.


def plan_ragged(call: BoundKernel, compiled: Compiled | None = None) -> BatchPlan:
    """Return what `call_ragged` would do."""
    ragged = RaggedCall.of(call, compiled)
    parts = [
        plan_of(bound, bound.kernel.options())
        for bound in (ragged.bound(group, None) for group in ragged.groups)
    ]
    groups = [(len(group.items), group.lengths) for group in ragged.groups]
    notes: list[str] = []
    for at, name in enumerate(ragged.dims):
        lengths = ragged.lengths[:, at]
        evaluated = sum(count * longest[at] for count, longest in groups)
        padding = 1 - lengths.sum() / max(1, evaluated)
        several = len({longest[at] for _, longest in groups})
        plural = "length" if several == 1 else "lengths"
        notes.append(
            f"ragged {name}: {span(lengths)} in {several} {plural}, padding {padding:.0%}".replace(
                "%", " %"
            )
        )
    if (slots := sum(map(ragged.slots, ragged.groups))) > ragged.count:
        notes.append(f"items of a length in buckets, {slots} in all")
    return dataclasses.replace(
        ragged.dense.plan,
        levels=(),
        untouched=call.untouched(),
        ragged=tuple(notes),
        parts=tuple((longest, part) for (_, longest), part in zip(groups, parts, strict=True)),
    )
