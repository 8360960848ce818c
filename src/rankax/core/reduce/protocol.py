# SPDX-License-Identifier: MIT
"""The protocol of reductions: how outputs of items become states, and states a result.

One row of items is folded tile by tile (`Row.fold`)::

    state = accumulator.start(slots)
    for begin in range(0, size, slots):  # the last may begin earlier, see `row.py`
        tile = jax.vmap(kernel, out_axes=-1)(items[begin : begin + slots])
        state = accumulator.step(state, tile, begin + jnp.arange(slots))
    state = accumulator.join(state)  # the slots become one
    state = reduction.partial(outputs, row, [state])  # for `Best`: with the outputs of the winner
    result = reduction.finish_state(outputs, state, size)

If no single program sees all items, each run of them is folded into a state, and the states are
merged (`ext/runs.py`). Calls over several devices, or over blocks of dask and cubed, do this::

    states = [reduction.renumber(outputs, partial(run), place) for run, place in runs]
    state = reduction.merge_states(outputs, stacked(states))  # two, or all; the runs on axis 0
    result = reduction.finish_state(outputs, state, size)

A reduction defines `plain` (of a row that is evaluated at once), `accumulations`, `finish_state`,
and `name` if that is not the name of its class. The other methods have defaults that serve:

* `partial`, `renumber` and `merge_states` use the accumulators. `FirstK` and `Best` override
  `partial`, which evaluates their winners once more and puts these outputs into the state in place
  of what the accumulator compared, and `merge_states`.
* `differentiable` returns what finds the state of a row by a program that has the right derivative
  in bounded memory: sums are folded as they are, ``logsumexp`` and moments sum in a second pass,
  and reductions that choose items evaluate the chosen ones again. No derivative rule is needed, so
  every order is right if the first one is. What finds an entry of a state is a generator: it yields
  a `Request` for each pass, so that all reductions of a call share the loops of these passes
  (`Row.found_together`), and is sent the states.
* `chosen`: with `Row.picks`, `plain` evaluates so many items again, for the derivative.
* With ``where``, the accumulations get `Outputs.mask`, and the accumulator says what adds `nothing`
  or asks which items count (`Accumulation.taken`).
* `check` refuses outputs, `lifted` converts the output of an item, `assemble` builds the result.

Most reductions work on each leaf by itself (`EachLeaf`): they define `function`, `accumulator` and
`result`. That is enough for gradients, which store a state for each tile; what stores less is
`is_linear`, a `differentiable_leaf` of their own, or `folds_constants` if the result has no
derivative. The code of a new reduction is in `ext/reductions`: `sums.py` or `winners.py` defines
it, and its accumulator unless one of `accumulators.py` there, or of `row.py` or `extrema.py` here,
fits; `read.py` lists those with a name; and `rankax.reductions` exports it. Gradients, sharded
batches and blocks need no more. A name is also listed under `reduce` in the docstrings of
`auto_vmap` and `chunked_reduce`, in ``docs/howto/reduce.md`` and ``docs/reference/reductions.md``,
and in `named_reductions` of ``tests/helpers.py``.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from rankax.core.base.arrays import has_tangent, index_dtype, too_many
from rankax.core.reduce.row import (
    Accumulation,
    Accumulator,
    Elementwise,
    Finding,
    Request,
    Row,
    alone,
)

Place = Callable[[jax.Array], jax.Array]  # from an item's index in its run to its index in the row


class Outputs(NamedTuple):
    """The outputs of one item that one reduction takes."""

    path: str
    names: tuple[str, ...]  # of the leaves
    structure: Any
    avals: tuple[Any, ...]  # of the leaves
    positions: tuple[int, ...]  # of the leaves among all outputs
    mask: Any = None  # the position of the output that says whether an item counts, if one does
    total: int = 0  # how many items there are, in all runs

    def number(self, key: str | int) -> int | None:
        """Return which leaf has this key, field or index, if one has."""
        wanted = f"{self.path}.{key}", f"{self.path}[{key!r}]"
        return next((i for i, name in enumerate(self.names) if name in wanted), None)

    def counting(self) -> Accumulation:
        """Return what counts the items that count."""
        return Accumulation(
            self.mask, Elementwise((), count_dtype(self.total), 0, lax.add, jnp.sum)
        )


FILL = "\0fill"  # in place of ``where``: items count unless they are copies that fill the batch up


class Marked(NamedTuple):
    """The output of an item, and whether it counts: copies, which pad a batch, do not.

    ``arguments`` has those, by path, that ``where`` or a reduction names.
    """

    out: Any
    counts: Any = True
    arguments: Any = ()

    @classmethod
    def opened(cls, out: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return the output itself, whether it counts, and the arguments."""
        counts, arguments = True, dict[str, Any]()
        while isinstance(out, cls):
            counts = out.counts if counts is True else counts & out.counts
            arguments |= dict(out.arguments)
            out = out.out
        return out, counts, arguments


class MisfitError(Exception):
    """A reduction does not fit an output; the caller adds the kernel's name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """An entry of ``reduce``: an object of one of the classes of `rankax.reductions`.

    Parameters
    ----------
    where : str or int, optional
        The argument that says whether an item counts, or the key, field or index of such an output,
        as in `rankax.auto_vmap`. None: every item counts.
    """

    where: str | int | None = dataclasses.field(default=None, kw_only=True)

    #: Whether the outputs are kept, not reduced.
    is_kept = False

    #: Whether the result contains indices of items.
    finds_items = False

    #: How many items it needs.
    least_items = 0

    #: Whether runs are merged in order, so that each must be contiguous.
    is_ordered = False

    #: Whether the fold can be differentiated as it is.
    is_linear = False

    #: The argument that it takes beside the outputs, if there is one of this name.
    argument = None

    #: Whether devices merge their states by an all-reduce. Otherwise each gathers all states.
    is_sum = False

    @property
    def name(self) -> str:
        """As ``reduce`` takes it, or else as the user writes the object."""
        return type(self).__name__.lower()

    @property
    def label(self) -> str:
        """The name, and which items count."""
        is_plain = self.where is None or self.where == FILL
        return self.name if is_plain else f"{self.name} where {self.where!r}"

    def of_items(self, where: str | int | None) -> Self:
        """Return the same for the items that count; its own ``where`` comes first."""
        if self.is_kept or self.where is not None:
            return self
        changed = copy.copy(self)
        object.__setattr__(changed, "where", where)  # it is frozen
        return changed

    def lifted(self, out: Any, given: Mapping[str, Any]) -> Any:
        """Convert the output of one item to what is folded.

        ``given`` has the argument with the name `argument`, if the kernel has one.
        """
        return out

    def check(self, outputs: Outputs, count: int) -> None:
        """Raise `MisfitError` for outputs, or more items, that cannot be reduced."""

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        """Reduce axis 0 of the leaves, as `jax.numpy` does."""

    def accumulations(self, outputs: Outputs, size: int) -> Sequence[Accumulation]:
        """Return what a loop over ``size`` items accumulates."""
        return ()

    def chosen(self, outputs: Outputs) -> int:
        """Return how many items `plain` evaluates again if `Row.picks`."""
        return 0

    def numbers_of_tile(self, outputs: Outputs) -> int:
        """Return how many numbers of its state each tile updates, however few items it has."""
        return 0

    def partial(self, outputs: Outputs, row: Row, states: list[Any]) -> Any:
        """Return the state of a row from the states of its accumulations."""
        return states

    def renumber(self, outputs: Outputs, state: Any, place: Place) -> Any:
        """Replace each index in a state by its ``place``."""
        pairs = zip(self.accumulators(outputs), state, strict=True)
        return [accumulator.renumber(own, place) for accumulator, own in pairs]

    def merge_states(self, outputs: Outputs, states: Any) -> Any:
        """Merge the states of several runs, which are on axis 0 of each array."""
        pairs = zip(self.accumulators(outputs), states, strict=True)
        return [accumulator.join_runs(own) for accumulator, own in pairs]

    def accumulators(self, outputs: Outputs) -> list[Accumulator]:
        """Return what accumulates each entry of a state."""
        # Any size will do: only `start` uses it, for the dtype of indices.
        return [step.accumulator for step in self.accumulations(outputs, 0)]

    def finish_state(self, outputs: Outputs, state: Any, size: int) -> Any:
        """Return the result of all items, one value for each leaf, from their state.

        ``size`` is an array if windows of a scan differ in length.
        """
        return state

    def differentiable(self, outputs: Outputs, row: Row) -> list[Finding]:
        """Return what finds the entries of a state in terms that have the right derivative.

        By default, a derivative stores a state for each tile, unless the fold ``is_linear``.
        """
        return [alone(step, self.is_linear) for step in self.accumulations(outputs, row.size)]

    def assemble(self, outputs: Outputs, values: Any) -> Any:
        """Return the result as the user sees it."""
        return outputs.structure.unflatten(values)

    def with_places(self, result: Any, place: Place) -> Any:
        """Return an assembled result with each index of an item replaced by its ``place``."""
        return result


class EachLeaf(Reduction):
    """One result for each leaf, independent of the others."""

    #: The equivalent function of `jax.numpy`.
    function: Callable[..., Any]

    #: Whether the result is divided by the number of items; with a mask, that is its last state.
    divides = False

    #: Whether a derivative needs none of the states: the result has no derivative, as an index has
    #: none, or `partial` finds what has one. Never needed for outputs that have no tangents.
    folds_constants = False

    def check(self, outputs: Outputs, count: int) -> None:
        for name, aval in zip(outputs.names, outputs.avals, strict=True):
            if reason := self.misfit(aval):
                raise MisfitError(f"{name} has dtype {aval.dtype}, and {reason}")

    def misfit(self, aval: Any) -> str:
        """Return why numbers of this type cannot be reduced, if so."""
        return ""

    def accumulator(self, aval: Any, size: int) -> Accumulator:
        """Return the accumulator of one leaf, for a row of ``size`` items."""
        raise NotImplementedError

    def result(self, state: Any, aval: Any, size: Any) -> Any:
        """Return the result of one leaf."""

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        return [type(self).function(out, axis=0) for out in outs]

    def accumulations(self, outputs: Outputs, size: int) -> Sequence[Accumulation]:
        each = [
            Accumulation(position, self.accumulator(aval, size), outputs.mask)
            for position, aval in zip(outputs.positions, outputs.avals, strict=True)
        ]
        counts = self.divides and outputs.mask is not None
        return [*each, outputs.counting()] if counts else each

    def finish_state(self, outputs: Outputs, state: Any, size: int) -> Any:
        if self.divides and outputs.mask is not None:
            *state, (size,) = state
        pairs = zip(state, outputs.avals, strict=True)
        return [self.result(own, aval, size) for own, aval in pairs]

    def differentiable(self, outputs: Outputs, row: Row) -> list[Finding]:
        if self.is_linear:
            return super().differentiable(outputs, row)
        pairs = zip(outputs.avals, outputs.positions, strict=True)
        each = [
            self.differentiable_leaf(aval, row, position)
            if has_tangent(aval)
            else EachLeaf.differentiable_leaf(self, aval, row, position)
            for aval, position in pairs
        ]
        counts = self.divides and outputs.mask is not None
        return [*each, alone(outputs.counting(), is_linear=True)] if counts else each

    def differentiable_leaf(self, aval: Any, row: Row, position: int) -> Finding:
        """Find the state of one leaf that has tangents in terms with the right derivative.

        By default, a derivative stores a state for each tile, unless it is constant.
        """
        is_constant = self.folds_constants or not has_tangent(aval)
        step = Accumulation(position, self.accumulator(aval, row.size))
        return alone(step, is_constant=is_constant)


@dataclasses.dataclass(frozen=True)
class Keep(Reduction):
    """No reduction: the outputs are kept whole. ``None`` in a tree of reductions."""

    name = "kept"  # pyright: ignore
    is_kept = is_linear = True

    def differentiable(self, outputs: Outputs, row: Row) -> list[Finding]:
        return [self._whole(position) for position in outputs.positions]

    def _whole(self, position: int) -> Finding:
        (out,) = yield Request((), kept=(position,))
        return out

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        return [row.split(out) for out in outs]


class Several:
    """More than one reduction of the same output, in one pass.

    ``Several("min", "argmin")`` returns a tuple, ``Several(least="min", at="argmin")`` a dict.

    Parameters
    ----------
    *reductions, **named : str or Reduction
        Names or objects, as ``reduce`` takes them.
    where : str or int, optional
        As in `rankax.auto_vmap`, for reductions without a ``where`` of their own.
    """

    def __init__(self, *reductions: Any, where: str | int | None = None, **named: Any) -> None:
        if bool(reductions) == bool(named) or None in (*reductions, *named.values()):
            raise TypeError(
                "Several takes names and objects of rankax.reductions, all by position or all by "
                f'keyword, such as Several("min", "argmin"), got {reductions} and {named}'
            )
        self.reductions = reductions or named
        self.where = where


def count_dtype(total: int) -> Any:
    """Return the dtype of numbers up to ``total``: a float if there are no integers of 64 bits."""
    dtype = index_dtype(total)
    return dtype if not too_many(total) else jnp.float32
