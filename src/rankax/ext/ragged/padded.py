# SPDX-License-Identifier: MIT
"""The kernel of a group of ragged items (`ragged.py`), and how an eager call traces it.

An eager call traces the user's kernel each time, because something that it uses may have changed
(`core/loop/eager_programs.py`). To trace what reads the rows as well would take several times as
long. That part follows from the roles of the arguments, the length and the types, so it is traced
only if there is no compiled program yet (`PaddedItem`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from rankax._options import Options
from rankax.call.kernels import KernelCall, KernelSpec, Shell, rebind
from rankax.core.base.arrays import is_ref, weakened, zeros
from rankax.core.base.cache import Kept
from rankax.core.base.messages import traced_as
from rankax.core.declare.dims import Rank
from rankax.core.declare.ranks import Declaration
from rankax.core.loop.eager_programs import opened
from rankax.core.loop.shared import narrowed
from rankax.core.loop.spec import PLACE, item_key
from rankax.core.plan.schedule import Plan
from rankax.core.reduce.protocol import Marked
from rankax.core.reduce.run import Reductions
from rankax.core.trace.programs import ItemProgram, evaluate, with_variables

# The parameters of a derived kernel, besides those of the original that have no rank.
ITEMS, MAPPED, WHOLE = "rankax_items", "rankax_mapped", "rankax_whole"

T = TypeVar("T")
Compiled = Callable[[KernelCall], Any]  # calls a bound kernel, such as by its compiled program


class Role(NamedTuple):
    """How a derived kernel gets one leaf of the original arguments."""

    rank: Rank | None  # of what is mapped; None: it gets it whole
    rows: int | None = None  # the ragged dimension whose rows are read
    by_number: bool = False  # whether it has an item for each item, which is read
    slope: Rank | None = None  # of a copy that has the derivative of what is read
    split: int | None = None  # of a key that is split: how much an item adds to its number
    dtype: Any = None  # of the rows, or of what all items share, if that is wider
    weak: bool = False

    @property
    def is_read(self) -> bool:
        """Whether what the kernel gets is computed, so that it depends on the item."""
        is_cast = self.dtype is not None
        return is_cast or self.by_number or self.weak or self.split is not None


@dataclasses.dataclass(frozen=True)
class Padded:
    """The user's kernel as a function of items that are filled up."""

    spec: KernelSpec
    shell: Shell
    others: tuple[str, ...]
    explicit: frozenset[tuple[str, Any]]
    roles: tuple[Role, ...]
    dims: tuple[str, ...]  # the ragged dimensions
    lengths: tuple[int, ...]  # to which they are filled up
    of_item: Compiled | None  # evaluates a call of one item; None: as it is

    def kernel(self) -> KernelSpec:
        """Return the derived kernel."""

        @functools.wraps(self.spec.fun, updated=())
        def padded(*, rankax_items: Any, rankax_mapped: Any, rankax_whole: Any, **rest: Any) -> Any:
            leaves, masks = self.read(rankax_items, rankax_mapped, rankax_whole)
            return self.evaluate(leaves, masks, rest)

        mapped = [role.rank for role in self.roles if role.rank is not None]
        mapped += [role.slope for role in self.roles if role.slope is not None]
        mapped += [Rank(0) for role in self.roles if role.split is not None]
        kind = inspect.Parameter.KEYWORD_ONLY
        names = [ITEMS, MAPPED, WHOLE, *self.others]
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        declaration = Declaration(signature, {ITEMS: Rank(1), MAPPED: tuple(mapped)}, None)
        derived = type(self.spec)(padded, declaration, dict(self.explicit), self.spec.members)
        derived.name = self.spec.name
        return derived

    def evaluate(self, leaves: list[Any], masks: Sequence[Any], rest: dict[str, Any]) -> Any:
        """Call the user's kernel; ``rest`` are the arguments without a rank."""
        call = rebind(self.spec, self.shell, leaves, rest)
        call.masks = dict(zip(self.dims, masks, strict=True))
        if self.of_item is not None:
            return self.of_item(call)
        return call.evaluate(leaves, call.plan(Options()))

    def read(
        self, items: Any, mapped: Sequence[Any], whole: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of one item, and the mask of each ragged dimension."""
        pairs = zip(self.lengths, items[3::2], strict=True)
        masks = [jnp.arange(most, dtype=n.dtype) < n for most, n in pairs]
        return self._leaves(items, iter(mapped), iter(whole)), masks

    def _leaves(self, items: Any, mapped: Iterator[Any], whole: Iterator[Any]) -> list[Any]:
        leaves = [next(whole if role.rank is None else mapped) for role in self.roles]
        slopes = [None if role.slope is None else next(mapped) for role in self.roles]
        for i, (role, slope) in enumerate(zip(self.roles, slopes, strict=True)):
            if role.rows is not None:
                start, length = items[2 + 2 * role.rows], items[3 + 2 * role.rows]
                at = places_of(start, length, self.lengths[role.rows])
                rows = read_at(leaves[i], slope, at)
                rows = rows if rows.dtype == role.dtype else rows.astype(role.dtype)
                empty = zeros(rows.shape, rows.dtype)
                leaves[i] = jnp.where(length > jnp.zeros_like(length), rows, empty)
            elif role.by_number:
                leaves[i] = read_at(leaves[i], slope, items[0])
            elif role.dtype is not None:
                leaves[i] = narrowed(leaves[i], role.dtype, [items])
            if role.weak:
                leaves[i] = weakened(leaves[i])
            if role.split is not None:
                number = items[0].astype(PLACE.dtype) * np.asarray(role.split, PLACE.dtype)
                leaves[i] = item_key(leaves[i], next(mapped) + number)
        return leaves


def places_of(start: Any, length: Any, most: int) -> Any:
    """Return where the rows of an item are, then its last one again."""
    last = jnp.maximum(length - 1, jnp.zeros_like(length))
    return start + jnp.minimum(jnp.arange(most, dtype=start.dtype), last)


def read_at(values: Any, slope: Any, at: Any) -> Any:
    """Read by index; with ``slope``, which is what is read, the derivative is that of ``slope``."""
    rows = jnp.asarray(values).at[at].get(mode="promise_in_bounds")
    return rows if slope is None else _with_slope(rows, slope)


@jax.custom_jvp
def _with_slope(rows: Any, slope: Any) -> Any:  # noqa: ARG001
    return rows


# Zeros stay symbolic, for a `jax.custom_vjp` of the kernel: it refuses a tangent, even of zeros.
@functools.partial(_with_slope.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    return _with_slope(*primals), tangents[1]


def as_a(kind: type[T], other: Any, **fields: Any) -> T:
    """Return an object of this dataclass, whose other fields are as those of ``other``."""
    every = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    own = {each.name: getattr(other, each.name) for each in every if each.name not in fields}
    return kind(**own, **fields)


@dataclasses.dataclass(frozen=True)
class PaddedItem(ItemProgram):
    """An item in two parts: one reads its leaves, and ``closed`` is the user's kernel on them."""

    read: tuple[Any, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]
    how: Hashable = None  # pyright: ignore[reportIncompatibleMethodOverride]
    reader: Callable[..., list[Any]] | None = None  # a function of ``read`` and of an item
    avals: tuple[Any, ...] = ()  # of an item

    @functools.cached_property
    def whole(self) -> ItemProgram:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The item as one program, whose constants are ``read``, then those of the kernel."""
        assert self.reader is not None
        jaxpr, reader, arrays = self.closed.jaxpr, self.reader, [*self.read, *self.closed.consts]

        def item(*values: Any) -> list[Any]:
            arrays, leaves = values[:count], values[count:]
            read, consts = arrays[:given], arrays[given:]
            return evaluate(jaxpr, consts, *reader(read, leaves))

        given, count = len(self.read), len(arrays)
        closed = jax.make_jaxpr(item)(*map(jax.typeof, arrays), *self.avals)
        program, inputs = closed.jaxpr, closed.jaxpr.invars
        constvars = [*inputs[:count], *closed.jaxpr.constvars]
        program = with_variables(program, inputs[count:], program.outvars, constvars=constvars)
        closed = ClosedJaxpr(program, [*arrays, *closed.consts])
        return as_a(ItemProgram, self, closed=closed)


@dataclasses.dataclass(eq=False)
class PaddedCall(KernelCall):
    """The eager call of a group."""

    padded: Padded = dataclasses.field(kw_only=True)
    given: Sequence[str] = dataclasses.field(kw_only=True)  # what the user calls the leaves

    def trace(self, plan: Plan, reductions: Reductions | None = None) -> ItemProgram:
        """Trace the user's kernel on what the first part of an item reads."""
        padded, rest, mapped = self.padded, self.others, {*plan.mapped}
        split = [key.position for key in plan.splits]
        leaves, whole = self.reshaped(plan), list(rest.pop(WHOLE))
        plan = dataclasses.replace(plan, reshaped=())
        # Where the value of each role is; after these leaves, there are numbers of keys.
        numbers = itertools.count(1), itertools.count()
        places = [
            (whole, next(numbers[1])) if role.rank is None else (leaves, next(numbers[0]))
            for role in padded.roles
        ]
        is_read = [
            role.is_read or (values is leaves and at in (*mapped, *split))
            for role, (values, at) in zip(padded.roles, places, strict=True)
        ]
        own = [place for place, is_own in zip(places, is_read, strict=True) if is_own]
        own += [(leaves, at) for at in range(next(numbers[0]), len(leaves))]
        own = [(values, at) for values, at in own if values is whole or at not in mapped]

        def reader(read: Sequence[Any], items: Sequence[Any]) -> list[Any]:
            given = list(leaves), list(whole)
            for (values, at), x in zip(own, read, strict=True):
                given[values is whole][at] = x
            call = as_a(_Reading, self, leaves=given[0], whole=given[1], is_read=is_read)
            return jax.tree.leaves(call.on_item(plan)(*items))

        read, avals = tuple(values[at] for values, at in own), tuple(self.types_of_item(plan))
        how = padded.roles, padded.lengths, tuple(is_read), tuple(map(jax.typeof, read)), avals
        how = *how, tuple(self.lengths.items()), jax.dtypes.canonicalize_dtype(float)

        def types() -> list[Any]:
            return jax.make_jaxpr(lambda read, *items: reader(read, items))(read, *avals).out_avals

        names = [name for name, is_own in zip(self.given, is_read, strict=True) if is_own]
        names += [*padded.dims, *(["batch_shape"] if self.lengths else [])]

        @traced_as(self.fun, names)
        def kernel(*values: Any) -> Any:
            iterator = iter(values)
            pairs = zip(is_read, places, strict=True)
            leaves = [next(iterator) if is_own else given[at] for is_own, (given, at) in pairs]
            masks = [next(iterator) for _ in padded.dims]
            out = padded.evaluate(leaves, masks, rest)
            counts = list(iterator)
            return Marked(out, *counts) if counts else out

        item = self.trace_on(kernel, _types.get_or_make((how, plan), types), plan, reductions)
        if any(map(is_ref, item.closed.consts)):
            return super().trace(plan, reductions)
        closed = opened(item.closed)
        return as_a(PaddedItem, item, closed=closed, read=read, how=how, reader=reader, avals=avals)


@dataclasses.dataclass(eq=False)
class _Reading(PaddedCall):
    """The first part of an item: returns the leaves that depend on it, and the masks."""

    whole: Sequence[Any] = dataclasses.field(kw_only=True)
    is_read: Sequence[bool] = dataclasses.field(kw_only=True)

    def evaluate(self, leaves: Sequence[Any], plan: Plan) -> Any:  # noqa: ARG002
        values, masks = self.padded.read(leaves[0], leaves[1:], self.whole)
        return [x for x, is_read in zip(values, self.is_read, strict=True) if is_read], masks


_types: Kept[Any] = Kept(1024, "types of padded items")
