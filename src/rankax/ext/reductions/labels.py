# SPDX-License-Identifier: MIT
"""Reductions by label: each item enters the bin that one of its outputs names."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.tree_util import DictKey

from rankax.core.base.arrays import counted, has_tangent, index_dtype, too_many, wide
from rankax.core.base.messages import check_bool, listed, positive_int
from rankax.core.base.trees import leaves_with_names
from rankax.core.plan.schedule import Chunks, Level
from rankax.core.reduce.extrema import Arg, worst_value
from rankax.core.reduce.protocol import EachLeaf, MisfitError, Outputs, Reduction, count_dtype
from rankax.core.reduce.row import Accumulation, Elementwise, Finding, Request, Row, alone
from rankax.core.trace.derivatives import call_with_derivative_of
from rankax.ext.reductions.bins import InBins, constant
from rankax.ext.reductions.sums import LogSumExp, Mean, Moments, Sum
from rankax.ext.reductions.top import if_found
from rankax.ext.reductions.unused import unless_unused
from rankax.ext.reductions.winners import Max, Min

_BY_NAME: dict[str, EachLeaf] = {
    kind.name: kind for kind in (Sum(), Mean(), Max(), Min(), LogSumExp())
}
_KNOWN = listed([*map(repr, ("count", *_BY_NAME)), "Moments()"], "or")

Value = Callable[[list[jax.Array]], jax.Array]  # of the outputs of an item


class _LabelledOutputs(NamedTuple):
    """The outputs of an item: labels, and values that have the shape of the labels in front."""

    at: int  # the leaf that has the labels
    labels: Any  # their type
    position: int  # of the labels among all outputs
    values: list[tuple[int, Any]]  # the position of each value, and its type in a bin


@dataclasses.dataclass(frozen=True)
class _ByArgument:
    """Labels that are an argument, beside the outputs, which keep their names."""

    by: str
    labels: Any
    out: Any


jax.tree_util.register_pytree_with_keys(
    _ByArgument,
    lambda own: (((DictKey(own.by), own.labels), ("", own.out)), own.by),
    lambda by, children: _ByArgument(by, *children),
)


def _sum_of(aval: Any, dtype: Any) -> Elementwise:
    return Elementwise(aval.shape, dtype, 0, lax.add, jnp.sum)


class _Labelled(Reduction):
    """What `ByLabel` and `Histogram` share."""

    by: str | int | None  # the output or argument that has the labels; None: the only output
    length: int
    of: Any

    def labels(self, x: jax.Array) -> jax.Array | None:
        """Return labels in int32 from that output; None if it has none."""
        raise NotImplementedError

    def refusal(self, aval: Any) -> str:
        """Return why that output has no labels."""
        raise NotImplementedError

    @property
    def kind(self) -> EachLeaf | None:
        """What each bin computes; None: it counts."""
        return _BY_NAME.get(self.of) if isinstance(self.of, str) else self.of

    @property
    def is_sum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kind is None or self.kind.is_sum

    @property
    def argument(self) -> str | int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.by

    def lifted(self, out: Any, given: Mapping[Any, Any]) -> Any:
        leaves, structure = jax.tree.flatten(out)
        names = tuple(name for name, _ in leaves_with_names(out, ""))
        at = self._at(Outputs("", names, structure, (), ()))
        if at is None and self.by in given:
            return self.lifted(_ByArgument(str(self.by), given[self.by], out), {})
        labels = None if at is None else self.labels(jnp.asarray(leaves[at]))
        if at is None or labels is None:  # `check` says why
            return out
        return structure.unflatten([*leaves[:at], labels, *leaves[at + 1 :]])

    def _at(self, outputs: Outputs) -> int | None:
        if self.by is None:
            return 0 if len(outputs.names) == 1 else None
        return outputs.number(self.by)

    def check(self, outputs: Outputs, count: int) -> None:
        at, kind = self._at(outputs), self.kind
        if at is None:
            found = listed(outputs.names) or "none"
            lack = f"no output {self.by!r}; it has" if self.by is not None else "several outputs:"
            other = "" if self.by is None else f", and there is no argument {self.by} with a rank"
            raise MisfitError(
                f"{outputs.path} has {lack} {found}{other}; name the output with the labels, or an "
                "argument with them, which the kernel need not use"
            )
        is_given = isinstance(outputs.structure.unflatten(outputs.names), _ByArgument)
        name = f"the argument {self.by}" if is_given else outputs.names[at]
        if outputs.avals[at].dtype != jnp.int32:
            raise MisfitError(f"{name} {self.refusal(outputs.avals[at])}")
        shape = outputs.avals[at].shape
        if kind is not None and len(outputs.avals) == 1:
            raise MisfitError(
                f"{name} has labels, and there is no value beside it; return both, or count the "
                "items with of='count'"
            )
        for own, aval in zip(outputs.names, outputs.avals, strict=True):
            if kind is None or own == outputs.names[at]:
                continue
            if aval.shape[: len(shape)] != shape:
                raise MisfitError(
                    f"{name} has labels of shape {shape}, so the shape of {own} must begin with "
                    f"it, but that is {aval.shape}"
                )
            if reason := kind.misfit(aval):
                raise MisfitError(f"{own} has dtype {aval.dtype}, and {reason}")

    def _parts(self, outputs: Outputs) -> _LabelledOutputs:
        at = self._at(outputs)
        assert at is not None  # see `check`
        labels = outputs.avals[at]
        values = [
            (position, jax.ShapeDtypeStruct(aval.shape[labels.ndim :], aval.dtype))
            for i, (position, aval) in enumerate(zip(outputs.positions, outputs.avals, strict=True))
            if i != at and self.kind is not None
        ]
        return _LabelledOutputs(at, labels, outputs.positions[at], values)

    def accumulations(self, outputs: Outputs, size: int) -> Sequence[Accumulation]:
        kind, parts = self.kind, self._parts(outputs)
        each = [
            self._folding(parts, position, kind.accumulator(aval, size), outputs.mask)
            for position, aval in parts.values
            if kind is not None
        ]
        return [*each, *self._counting(outputs, parts)]

    def _folding(
        self, parts: _LabelledOutputs, position: int, own: Any, mask: int | None = None
    ) -> Accumulation:
        """Return what folds one value with an accumulator in each bin."""
        in_each = InBins(own, self.length, parts.labels.size)
        return Accumulation((parts.position, position), in_each, mask)

    def _counting(self, outputs: Outputs, parts: _LabelledOutputs) -> list[Accumulation]:
        """Return what counts the labels of each bin, if that is needed."""
        if not (self.kind is None or isinstance(self.kind, (Mean, Moments))):
            return []
        # One scatter of pairs (value, 1) would take 0.7 to 0.85 of the time of two on a CPU, but
        # float32 counts to 2**24, and a chunk on a GPU has more items.
        own = Elementwise((), count_dtype(outputs.total * parts.labels.size), 0, lax.add, jnp.sum)
        return [Accumulation((parts.position,), InBins(own, self.length), outputs.mask)]

    def numbers_of_tile(self, outputs: Outputs) -> int:
        return self.length * sum(aval.size for _, aval in self._parts(outputs).values)

    def plain(self, outputs: Outputs, row: Row, outs: list[jax.Array]) -> Any:
        # Of a row of outputs, an item is itself.
        own = outputs._replace(positions=tuple(range(len(outs))), mask=None)
        level = Level(Chunks(row.size, row.size, 1), (0,) * len(outs), is_loop=False, reduced=True)

        def row_of(outs: Sequence[Any]) -> Row:
            return dataclasses.replace(
                row,
                item=lambda *outs: list(outs),
                leaves=tuple(outs),
                levels=(level,),
                count_of_outputs=len(outs),
            )

        def folded(outs: Sequence[Any]) -> list[Any]:
            return row_of(outs).fold(self.accumulations(own, row.size))

        def differentiated(outs: Sequence[Any]) -> list[Any]:
            whole = row_of(outs)
            return whole.found_together(self.differentiable(own, whole))

        if row.size and row.back:
            state = differentiated(outs)
        elif row.size and isinstance(self.kind, (Max, Min)):
            # JAX would divide a cotangent among equal items.
            state = call_with_derivative_of(differentiated, folded, outs, key=self)
        else:
            state = folded(outs)
        return self.finish_state(own, state, row.size)

    def finish_state(self, outputs: Outputs, state: Any, size: Any) -> Any:
        parts, kind = self._parts(outputs), self.kind
        states, counts = state[: len(parts.values)], [x[..., 0] for x in state[len(parts.values) :]]
        if kind is None:
            return counts

        def result(aval: Any, own: Any) -> Any:
            def of_bin(own: Any, count: Any = None) -> Any:
                return kind.result(own, aval, count)

            return jax.vmap(of_bin)(own, *counts)

        return [result(aval, own) for (_, aval), own in zip(parts.values, states, strict=True)]

    def assemble(self, outputs: Outputs, values: Any) -> Any:
        if self.kind is None:
            return values[0]
        at = self._parts(outputs).at
        found = outputs.structure.unflatten([*values[:at], None, *values[at:]])
        return found.out if isinstance(found, _ByArgument) else found

    # Derivatives: labels have none. That of a value is gathered from the bin of its label.
    #
    # Sums are linear, but not folded as such (`is_linear`): a reverse pass would keep the labels of
    # all items, where it computes these again if each step is checkpointed as a whole. No step
    # keeps the bins, on which the derivative of a sum does not depend.

    def differentiable(self, outputs: Outputs, row: Row) -> list[Finding]:
        if self.kind is None or isinstance(self.kind, Sum):
            return super().differentiable(outputs, row)
        parts = self._parts(outputs)
        counting = self._counting(outputs, parts)
        each = [self._of_value(parts, row, *value, counting) for value in parts.values]
        return [*each, *(alone(step, is_constant=True) for step in counting)]

    def _of_value(
        self,
        parts: _LabelledOutputs,
        row: Row,
        position: int,
        aval: Any,
        counting: list[Accumulation],
    ) -> Finding:
        """Find the state of one value in terms with the right derivative."""
        kind = self.kind
        assert kind is not None
        if not has_tangent(aval):
            step = self._folding(parts, position, kind.accumulator(aval, row.size))
            return alone(step, is_constant=True)
        if isinstance(kind, LogSumExp):
            return self._exponentials(parts, position, aval)
        if isinstance(kind, Moments):
            return self._moments(parts, position, aval, *counting)
        return self._extreme(parts, row, position, aval, largest=isinstance(kind, Max))

    def _shifted(self, parts: _LabelledOutputs, position: int, bins: jax.Array) -> Value:
        """Return a function of the outputs of an item: a value less the number of its bin.

        ``bins`` has a slot, as a state has. A value whose label is no bin's is 0, so that no
        function of it has an infinite derivative.
        """
        numbers = constant(bins[..., 0])

        def shifted(outs: list[jax.Array]) -> jax.Array:
            labels = outs[parts.position]
            own = numbers(labels)
            is_in = (labels >= 0) & (labels < self.length)
            is_in = lax.expand_dims(is_in, range(labels.ndim, own.ndim))
            off = outs[position].astype(own.dtype) - own
            return jnp.where(is_in, off, jnp.zeros_like(off))

        return shifted

    def _requested(
        self,
        parts: _LabelledOutputs,
        funs: Sequence[Value],
        owns: Sequence[Any],
        *,
        is_constant: bool = False,
    ) -> Request:
        """Return what asks for accumulators of functions of an item, one of each, in each bin."""
        here = parts._replace(position=0)
        steps = [self._folding(here, i, own) for i, own in enumerate(owns, start=1)]
        functions = operator.itemgetter(parts.position), *funs
        return Request(steps, functions, is_constant=is_constant, is_linear=False)

    def _exponentials(self, parts: _LabelledOutputs, position: int, aval: Any) -> Finding:
        dtype = wide(aval.dtype)
        real = jnp.finfo(dtype).dtype

        def wide_part(outs: list[jax.Array]) -> jax.Array:
            return jnp.real(outs[position].astype(dtype))

        largest = Elementwise(aval.shape, real, -jnp.inf, lax.max, jnp.max)
        (top,) = yield self._requested(parts, [wide_part], [largest], is_constant=True)
        off = jnp.where(jnp.isfinite(top), top, 0).astype(dtype)
        shifted = self._shifted(parts, position, off)
        (total,) = yield self._requested(
            parts, [lambda outs: jnp.exp(shifted(outs))], [_sum_of(aval, dtype)]
        )
        return top, total

    def _moments(
        self, parts: _LabelledOutputs, position: int, aval: Any, counting: Accumulation
    ) -> Finding:
        dtype = wide(aval.dtype)
        real = jnp.finfo(dtype).dtype
        summing = self._folding(parts, position, _sum_of(aval, dtype))
        total, count = yield Request([summing, counting], is_constant=True)
        share = 1 / jnp.maximum(count, 1).astype(real)
        share = lax.expand_dims(share, range(1, 1 + len(aval.shape)))
        # The distances from any constant give mean and variance, as in `Moments`.
        center = total * share.astype(dtype)
        center = jnp.where(jnp.isfinite(center), center, jnp.zeros_like(center))
        shifted = self._shifted(parts, position, center)

        def squared(outs: list[jax.Array]) -> jax.Array:
            off = shifted(outs)
            return jnp.real(off * jnp.conj(off))

        owns = [_sum_of(aval, dtype), _sum_of(aval, real)]
        off, squares = yield self._requested(parts, [shifted, squared], owns)
        mean = center + off * share.astype(dtype)
        return count.astype(real), mean, squares - jnp.real(off * jnp.conj(off)) * share

    def _extreme(
        self, parts: _LabelledOutputs, row: Row, position: int, aval: Any, *, largest: bool
    ) -> Finding:
        labels = parts.labels.size
        if words := too_many(row.size * labels):
            raise ValueError(f"{self.label} cannot be differentiated: {words}")
        dtype = index_dtype(row.size * labels)
        arg = Arg(aval.shape, aval.dtype, dtype, largest, some=True)
        _, index = yield from alone(self._folding(parts, position, arg), is_constant=True)
        index = index[..., 0]
        # A bin without items picks an arbitrary one, which then must get nothing.
        item = unless_unused(row.item) if row.back else row.item

        def pick(index: jax.Array, number: jax.Array) -> jax.Array:
            each = index.dtype.type(labels)
            out = dataclasses.replace(row, item=item).at(index // each)[position]
            at = index % each * index.dtype.type(aval.size) + number.astype(index.dtype)
            return lax.dynamic_index_in_dim(jnp.ravel(out), at, keepdims=False)

        numbers = jnp.tile(counted(aval.size, jnp.int32), self.length)
        picked = jnp.reshape(jax.vmap(pick)(jnp.ravel(index), numbers), index.shape)
        picked = if_found(index, picked, worst_value(aval.dtype, largest=largest))
        return lax.expand_dims(picked, (picked.ndim,))


@dataclasses.dataclass(frozen=True)
class ByLabel(_Labelled):
    """One reduction for each label: ``jax.ops.segment_sum(values, labels, length)`` and the like.

    For outputs ``{"bin": labels, "w": values}`` of all items, equivalent to ::

        {"bin": None, "w": jnp.zeros((length, *shape)).at[labels].add(values, mode="drop")}

    but neither labels nor values of the batch are stored.

    Parameters
    ----------
    by : str or int, optional
        The key, field or index of the output with the labels, or else the argument of the kernel
        with them: an integer, or an array of integers of any shape. None: the labels are the only
        output, and ``of`` is ``"count"``. All other outputs are values, each an array whose shape
        begins with that of the labels.
    length : int
        How many labels there are: 0 to ``length - 1``. Others, such as -1, count nowhere.
    of : {"sum", "mean", "count", "max", "min", "logsumexp"} or Moments(), default "sum"
        What to compute of the values with the same label, with the dtype that the reduction of this
        name has. ``"count"`` counts labels; other outputs are ignored.

    Returns
    -------
    pytree
        The outputs, with an axis of ``length`` in place of the axes of the labels, and None in
        place of an output with labels. Of ``"count"``: an array of integers, of shape
        ``(length,)``. A label that no item has gets what a reduction with ``where`` gives for no
        items: 0 for a sum, NaN for a mean, ``-inf`` or the least integer for a maximum.

    Raises
    ------
    TypeError
        If ``length`` is missing, or an argument is of another kind.
    ValueError
        If ``length`` is not positive, and in a call, if there is no such output or argument with a
        rank, it has no integers, there is no value beside it, or shapes do not match.

    Notes
    -----
    *An array of labels* is an argument of the kernel, which need not use it: ``lambda label, x: x``
    with ``ByLabel("label", 3)``. So it broadcasts with the batch, and is cut into chunks, blocks
    and parts of devices, as every argument.

    *Cost.* Each tile is scattered into the bins: one scatter for ``"sum"``, ``"max"``, ``"min"``
    and ``"count"``, two for ``"mean"``, whose counts are integers, because those of float32 end at
    2**24. ``"logsumexp"`` takes two if a tile has as many labels as there are bins, else three, and
    ``Moments()`` five. Memory is that of a tile and of the bins, for any number of items. Up to
    2048 numbers in all bins, long sums hold what rounding took. On a GPU, atomic additions come in
    any order, so the last digits can vary, but not with ``fused=True``.

    *Derivatives.* Those of a sum or mean gather from the bins. ``"logsumexp"`` and ``Moments`` take
    a second pass. ``"max"`` and ``"min"`` find the winners, the first among equals, and evaluate
    these once more, all at once. Labels have no derivative. An item whose label is out of range
    gets a cotangent of 0, which is NaN where its derivative is infinite; ``where`` leaves it out
    for good.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import chunked_reduce
    >>> from rankax.reductions import ByLabel
    >>> def item(x):
    ...     return {"group": jnp.int32(x) % 3, "x": x, "square": x * x}
    >>> x = jnp.arange(10.0)
    >>> found = chunked_reduce(item, ByLabel("group", length=3), chunk_size=4)(x)
    >>> found["x"], found["square"], found["group"]
    (Array([18., 12., 15.], dtype=float32), Array([126.,  66.,  93.], dtype=float32), None)

    Labels that are an argument:

    >>> per_label = chunked_reduce(lambda x, label: x, ByLabel("label", length=2), chunk_size=4)
    >>> per_label(x, x.astype(int) % 2)
    Array([20., 25.], dtype=float32)
    """

    by: str | int | None = None
    length: int = None  # pyright: ignore[reportAssignmentType]
    of: Any = "sum"

    def __post_init__(self) -> None:
        _check_by(self.by, "ByLabel", "labels")
        if self.length is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise TypeError(
                "ByLabel: length is missing; say how many labels there are, because shapes are "
                'part of the program: ByLabel("bin", length=64)'
            )
        positive_int(self.length, "ByLabel", "length")
        _check_of(self.of, "ByLabel")
        if self.by is None and self.of != "count":
            raise TypeError(
                f"ByLabel: of={self.of!r} needs the output with the labels, by its key, field or "
                "index, or their argument; without one, only of='count' is possible"
            )

    @property
    def name(self) -> str:
        by = "" if self.by is None else f"{self.by!r}, "
        return f"ByLabel({by}length={self.length}{_shown(self.of, 'sum')})"

    def labels(self, x: jax.Array) -> jax.Array | None:
        if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_):
            return None
        if jnp.iinfo(jnp.int32).max < (1 if x.dtype == jnp.bool_ else jnp.iinfo(x.dtype).max):
            x = jnp.where((x >= 0) & (x < self.length), x, self.length)
        return x.astype(jnp.int32)

    def refusal(self, aval: Any) -> str:
        return (
            f"has dtype {aval.dtype}, but labels are integers; convert them, or take "
            "rankax.reductions.Histogram, which makes labels from numbers"
        )


@dataclasses.dataclass(frozen=True)
class Histogram(_Labelled):
    """The histogram of numbers: ``jnp.histogram(numbers, edges, weights=weights)[0]``.

    Neither the numbers nor the weights of the batch are stored. As in `numpy.histogram`, a bin
    contains its left edge, the last one its right edge, too, and numbers outside of all bins, and
    NaN, count nowhere.

    Parameters
    ----------
    edges : sequence of numbers or int
        The increasing edges of the bins, one more than there are bins; or how many equal bins
        ``range`` has. Equal bins are found without a search.
    range : (float, float), optional
        The left and the right end of all bins, if ``edges`` is an int.
    of : {"count", "sum", "mean", "max", "min", "logsumexp"} or Moments(), default "count"
        What to compute in each bin, as in `ByLabel`, of the other outputs: their ``"sum"`` is a
        histogram with weights.
    by : str or int, optional
        The key, field or index of the output that has the numbers, or else the argument that has
        them: a real number, or an array of any shape, each number of which counts. None: the only
        output.
    density : bool, default False
        Divide counts or sums by the width of their bin, and by the total.

    Returns
    -------
    array or pytree
        As `ByLabel` returns it, with one entry for each bin.

    Raises
    ------
    TypeError
        If an argument is of another kind, or JAX is tracing ``edges``.
    ValueError
        If edges do not increase, ``range`` is missing or given without an int, and in a call, as
        `ByLabel` does.

    Notes
    -----
    *Cost and derivatives.* Those of `ByLabel`. Edges are compared in the dtype of the numbers, and
    integers as floats. With ``edges``, each number is searched for, in as many steps as their
    number has bits. Numbers have no derivative, because a bin changes in jumps; weights have.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import auto_vmap, chunked_reduce
    >>> from rankax.reductions import Histogram
    >>> x = jnp.array([0.1, 0.2, 0.25, 0.7, 1.0, 3.0])
    >>> chunked_reduce(jnp.sqrt, Histogram(4, range=(0, 1)), chunk_size=4)(x)
    Array([0, 2, 1, 2], dtype=int32)

    The distances of all pairs, each weighted by a product:

    >>> @auto_vmap(x=0, y=0, v=0, w=0, reduce=Histogram([0, 1, 10], "sum", by="r"), chunk_size=8)
    ... def pairs(x, y, v, w):
    ...     return {"r": abs(x - y), "w": v * w}
    >>> w = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    >>> pairs(x[:, None], x, w[:, None], w)["w"]
    Array([261., 180.], dtype=float32)
    """

    edges: Any
    of: Any = "count"
    range: Any = dataclasses.field(default=None, kw_only=True)
    by: str | int | None = dataclasses.field(default=None, kw_only=True)
    density: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_by(self.by, "Histogram", "numbers")
        _check_of(self.of, "Histogram")
        check_bool(self.density, "Histogram", "density")
        if self.density and self.of not in ("count", "sum"):
            raise ValueError(f"Histogram: density is of counts or sums, got of={self.of!r}")
        edges, ends = _edges(self.edges, self.range)
        object.__setattr__(self, "edges", edges)  # it is frozen
        object.__setattr__(self, "range", ends)

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.edges if isinstance(self.edges, int) else len(self.edges) - 1

    @property
    def name(self) -> str:
        ends = None if self.range is None else tuple(map(float, self.range))
        bins = f"{self.length + 1} edges" if ends is None else f"{self.edges}, range={ends}"
        by = "" if self.by is None else f", by={self.by!r}"
        return f"Histogram({bins}{_shown(self.of, 'count')}{by})"

    @property
    def exact(self) -> np.ndarray:
        """The edges in float64."""
        if self.range is None:
            return np.asarray(self.edges, np.float64)
        low, high = self.range
        return np.linspace(low, high, self.length + 1)

    def _edges_in(self, dtype: Any) -> np.ndarray:
        """Return the edges as numbers of this dtype that compare as they do in float64."""
        if self.range is not None:
            return self.exact.astype(dtype)
        exact = self.exact
        edges = exact.astype(dtype)
        # A number is at or above an edge if it is at or above the next number of its dtype. It is
        # at or below the last edge if it is at or below the number before it.
        up, down = (np.nextafter(edges, edges.dtype.type(end)) for end in (np.inf, -np.inf))
        is_last = np.arange(len(exact)) == self.length
        edges = np.where((edges < exact) & ~is_last, up, edges)
        return np.where((edges > exact) & is_last, down, edges)

    def labels(self, x: jax.Array) -> jax.Array | None:
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            return None
        x = _as_floats(lax.stop_gradient(x))
        edges, last = self._edges_in(x.dtype), self.length - 1
        if self.range is None:
            at = _count_at_most(x, edges[1:-1])
        else:
            table = constant(edges)
            low, high = edges[0], edges[-1]
            at = jnp.clip(jnp.floor((x - low) * (self.length / (high - low))), 0, last)
            at = at.astype(jnp.int32)
            # Rounding may have chosen the bin beside it.
            at = jnp.where(x < table(at), at - 1, at)
            at = jnp.where((x >= table(at + 1)) & (at < last), at + 1, at)
        is_in = (x >= edges[0]) & (x <= edges[-1])
        return jnp.where(is_in, at.astype(jnp.int32), jnp.int32(-1))

    def refusal(self, aval: Any) -> str:
        return f"has dtype {aval.dtype}, but a histogram is of real numbers"

    def finish_state(self, outputs: Outputs, state: Any, size: Any) -> Any:
        found = super().finish_state(outputs, state, size)
        if not self.density:
            return found

        def divided(x: jax.Array) -> jax.Array:
            x = _as_floats(x)
            widths = np.diff(self.exact).reshape(-1, *(1 for _ in x.shape[1:]))
            return x / jnp.asarray(widths, x.dtype) / jnp.sum(x, axis=0, keepdims=True)

        return list(map(divided, found))


def _count_at_most(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """Return how many of the increasing edges are at most each number, by bisection.

    `jax.numpy.searchsorted` is one operation, which a fused kernel lacks, or a loop, from JAX 0.12
    on or before.
    """
    bits = len(edges).bit_length()
    padded = np.full(2**bits - 1, np.inf, edges.dtype)
    padded[: len(edges)] = edges
    table, at = constant(padded), jnp.zeros(x.shape, jnp.int32)
    for step in [1 << bit for bit in reversed(range(bits))]:
        is_above = x >= table(at + (step - 1))
        at = jnp.where(is_above, at + step, at)
    return jnp.minimum(at, len(edges))


def _as_floats(x: jax.Array) -> jax.Array:
    """Return floats of at least 32 bits."""
    return x.astype(wide(x.dtype if has_tangent(x) else jnp.result_type(float)))


def _edges(edges: Any, ends: Any) -> tuple[Any, Any]:
    """Return edges that can be hashed, and the range of an int of them; refuse anything else."""
    if isinstance(edges, core.Tracer):
        raise TypeError(
            "Histogram: JAX is tracing edges, but they are part of the program; pass them to the "
            "kernel, return jnp.searchsorted of them, and take ByLabel"
        )
    shape = np.shape(edges)
    if not shape:
        count = positive_int(edges, "Histogram", "edges, if there is one,")
        if ends is None:
            raise ValueError(
                f"Histogram: range is missing; say where {count} equal bins begin and end: "
                f"Histogram({count}, range=(0, 1))"
            )
        if np.shape(ends) != (2,) or not -np.inf < ends[0] < ends[1] < np.inf:
            raise ValueError(f"Histogram: range must be two increasing numbers, got {ends!r}")
        return count, tuple(map(float, ends))
    if ends is not None:
        raise ValueError(
            f"Histogram: range is for an int of equal bins, got edges of shape {shape}"
        )
    if len(shape) != 1 or shape[0] < 2 or not (np.diff(np.asarray(edges, float)) > 0).all():
        raise ValueError(
            f"Histogram: edges must be an int, or two or more increasing numbers, got {edges!r}"
        )
    return tuple(np.asarray(edges, float).tolist()), None


def _shown(of: Any, default: str) -> str:
    shown = repr(of) if isinstance(of, str) else f"{type(of).__name__}()"
    return "" if of == default else f", of={shown}"


def _check_of(of: Any, site: str) -> None:
    if (isinstance(of, str) and (of == "count" or of in _BY_NAME)) or of == Moments():
        return
    if isinstance(of, Reduction) and of.where is not None:
        raise TypeError(f"{site}: where belongs to {site} itself, not to of={of.label}")
    name = of.__name__ if isinstance(of, type) else repr(of)
    raise TypeError(f"{site}: of must be {_KNOWN}, got {name}")


def _check_by(by: Any, site: str, what: str) -> None:
    if by is None or (isinstance(by, (str, int)) and not isinstance(by, bool)):
        return
    is_array = hasattr(by, "shape")
    raise TypeError(
        f"{site}: by must be the key, field or index of the output with the {what}, or the name of "
        f"an argument, got {type(by).__name__}{'' if is_array else f' {by!r}'}"
        + (f"; pass the {what} to the kernel, and name that argument" if is_array else "")
    )
