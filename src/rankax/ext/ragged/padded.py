# SPDX-License-Identifier: MIT
"""The kernel of a group of ragged items (`call.py`), derived from the user's.

An eager call traces the user's kernel each time, because something that it uses may have changed
(`core/loop/eager_programs.py`). What reads the rows (`_read`) follows from the roles of the
arguments, the length and the types. `jax.jit` keeps its program by these, so it is traced once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rankax._options import Options
from rankax.call.kernels import KernelSpec, Shell, bind_leaves
from rankax.core.base.arrays import weakened, zeros
from rankax.core.base.messages import traced_as
from rankax.core.base.trees import leaves_with_names
from rankax.core.declare.dims import Rank
from rankax.core.declare.ranks import Declaration, ranks_of_output
from rankax.core.loop.shared import narrowed
from rankax.core.loop.spec import PLACE, item_key
from rankax.core.trace.derivatives import with_derivative

# The parameters of a derived kernel, besides those of the original that have no rank.
ITEMS, MAPPED, WHOLE = "rankax_items", "rankax_mapped", "rankax_whole"

# Of JAX, which says on which argument a value depends.
_ERRORS = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


class Role(NamedTuple):
    """How a derived kernel gets one leaf of the original arguments."""

    rank: Rank | None  # of what is mapped; None: it gets it whole
    column: int | None = None  # says where it is read (`RaggedCall.items_of`); 0: by number
    slope: Rank | None = None  # of a copy that has the derivative of what is read
    split: int | None = None  # of a key that is split: how much an item adds to its number
    dtype: Any = None  # of the rows, or of what all items share, if that is wider
    weak: bool = False

    @property
    def is_read(self) -> bool:
        """Whether what the kernel gets is computed."""
        return not self.column is self.split is self.dtype is None


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
    is_checked: bool  # whether each trace compares the outputs with those of longer items

    def kernel(self) -> KernelSpec:
        """Return the derived kernel."""

        @functools.wraps(self.spec.fun, updated=())
        def padded(*, rankax_items: Any, rankax_mapped: Any, rankax_whole: Any, **rest: Any) -> Any:
            passed = rankax_items, rankax_mapped, rankax_whole
            leaves, masks = self._read(*passed)
            try:
                out = self._evaluate(leaves, masks, rest)
            except _ERRORS as error:
                failed = error
            else:
                if self.is_checked:
                    self._check_outputs(out, passed, rest)
                return out
            # Once more by itself, so that the error names what the user passed.
            call = bind_leaves(self.spec, self.shell, leaves, rest)

            @traced_as(self.spec.fun, [*(call.paths[i] for i in call.ranked), *self._masked])
            def named(*values: Any) -> Any:
                ranked = dict(zip(call.ranked, values, strict=False))
                merged = [ranked.get(i, leaf) for i, leaf in enumerate(leaves)]
                return self._evaluate(merged, values[len(ranked) :], rest)

            jax.make_jaxpr(named)(*[leaves[i] for i in call.ranked], *masks)
            raise failed

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

    @property
    def _masked(self) -> list[str]:
        """The ragged dimensions whose masks the kernel takes."""
        return [dim for dim in self.dims if dim in self.spec.declaration.masks.values()]

    def _evaluate(self, leaves: list[Any], masks: Sequence[Any], rest: dict[str, Any]) -> Any:
        """Call the user's kernel; ``rest`` are the arguments without a rank."""
        call = bind_leaves(self.spec, self.shell, leaves, rest)
        call.masks = dict(zip(self._masked, masks, strict=True))
        out = call.evaluate(leaves, call.plan(Options()))
        reductions = dict(self.explicit).get("reduce")
        return out if reductions is None else reductions.marked(out, call.paths, leaves, True)

    def _check_outputs(self, out: Any, passed: tuple[Any, ...], rest: dict[str, Any]) -> None:
        """Refuse outputs whose shapes depend on the length to which the item is filled up."""
        items, mapped, whole = passed
        first = sum(role.rank is not None for role in self.roles)
        slopes = sum(role.slope is not None for role in self.roles)
        mapped = [*mapped[:first], *mapped[first + slopes :]]
        roles = tuple(role._replace(slope=None) for role in self.roles)
        lengths = tuple(length + 1 for length in self.lengths)
        longer = dataclasses.replace(self, roles=roles, lengths=lengths)
        other = jax.eval_shape(lambda: longer._evaluate(*longer._read(items, mapped, whole), rest))
        is_reduced = dict(self.explicit).get("reduce") is not None
        declared = None if is_reduced else self.spec.declaration.outputs
        named = dims_of_outputs(declared, self.dims, out)
        for (path, dim), x, y in zip(named, *map(jax.tree.leaves, (out, other)), strict=True):
            if dim is None and np.shape(x) != y.shape:
                raise depends_on_length(self.spec.name, self.dims[0], path, np.shape(x))

    def _read(
        self, items: Any, mapped: Sequence[Any], whole: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of one item, and its masks."""
        of_item, shared = iter(mapped), iter(whole)
        leaves = [next(shared if role.rank is None else of_item) for role in self.roles]
        read = {i: role for i, role in enumerate(self.roles) if role.is_read}
        masked = tuple(map(self.dims.index, self._masked))
        arrays, more = [leaves[i] for i in read], list(of_item)
        values, masks = _read(tuple(read.values()), self.lengths, masked, items, arrays, more)
        for i, value in zip(read, values, strict=True):
            leaves[i] = value
        return leaves, masks


def dims_of_outputs(declared: Any, dims: Sequence[str], out: Any) -> list[tuple[str, int | None]]:
    """Return each output with the ragged dimension that it is declared to begin with, if any."""
    paths = [path for path, _ in leaves_with_names(out, "output")]
    if declared is None:
        return [(path, None) for path in paths]
    ranks = ranks_of_output(declared, out)
    names = [rank.dims[0].name if rank is not None and rank.dims else None for rank in ranks]
    places = [dims.index(name) if name in dims else None for name in names]
    return list(zip(paths, places, strict=True))


def depends_on_length(kernel: str, dim: str, path: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{kernel}(): {path} has the shape {shape} for one item, which depends on how many rows "
        f'the item is filled up to; declare the output, as in -> Float[Array, "{dim} 3"], if it '
        "has a row for each row, or reduce that axis in the kernel"
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    roles: Sequence[Role],
    lengths: Sequence[int],
    masked: Sequence[int],
    items: Any,
    leaves: list[Any],
    more: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Return what an item reads, and its mask in each dimension that is ``masked``.

    ``more``: the slopes, then the numbers to which a split key adds its own.
    """
    masks = [jnp.arange(lengths[dim], dtype=items.dtype) < items[3 + 2 * dim] for dim in masked]
    rest, read = iter(more), list[Any]()
    slopes = [None if role.slope is None else next(rest) for role in roles]
    for x, role, slope in zip(leaves, roles, slopes, strict=True):
        if role.column is not None:
            x = read_at(x, places_of(items, role.column, lengths))
            x = x if slope is None else with_derivative(x, slope)
        if role.column:
            is_there = items[role.column + 1] > jnp.zeros_like(items[0])
            x = jnp.where(is_there, x.astype(role.dtype), zeros(x.shape, role.dtype))
        elif role.dtype is not None:
            x = narrowed(x, role.dtype, [items])
        if role.weak:
            x = weakened(x)
        if role.split is not None:
            number = items[0].astype(PLACE.dtype) * np.asarray(role.split, PLACE.dtype)
            x = item_key(x, next(rest) + number)
        read.append(x)
    return read, masks


def places_of(items: Any, column: int, lengths: Sequence[int]) -> Any:
    """Return where an item is; or where its rows are, then its last one again."""
    start, length = items[column], items[column + 1]
    if not column:
        return start
    last = jnp.maximum(length - 1, jnp.zeros_like(length))
    most = lengths[column // 2 - 1]
    return start + jnp.minimum(jnp.arange(most, dtype=start.dtype), last)


def read_at(values: Any, at: Any) -> Any:
    """Read by index."""
    return jnp.asarray(values).at[at].get(mode="promise_in_bounds")
