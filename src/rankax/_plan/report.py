# SPDX-License-Identifier: MIT
"""Why the shapes of one call do not fit: every clash at once, as a table and sentences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from rankax._base.functions import function_location
from rankax._base.words import listed, plural, shortened, table
from rankax._declare.dims import Rank, bind_sizes
from rankax._errors import BatchShapeError, CoreDimensionError, RankError
from rankax._plan.text import untouched_line

__all__ = ["Item", "check_items", "output_error"]

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """One ranked leaf: its path in the caller's words, its shape and its declared rank."""

    path: str
    shape: Shape
    rank: Rank

    @functools.cached_property
    def batch(self) -> Shape:
        """The leading axes that the rank leaves over."""
        return self.shape[: len(self.shape) - self.rank.rank]

    @functools.cached_property
    def core(self) -> Shape:
        """The trailing axes that the rank declares."""
        return self.shape[len(self.shape) - self.rank.rank :]


_MOST_ROWS = 16  # of a table; with more, the rows that clash and some context are shown
_EXAMPLES = 4  # of each side of a clash, where not all rows are shown


@dataclasses.dataclass(frozen=True)
class _Clash:
    error: type[ValueError]
    groups: tuple[tuple[int, ...], ...]  # of items that agree among themselves
    sentence: str


def check_items(
    fun: Callable[..., Any],
    items: Sequence[Item],
    sizes: dict[str, int],
    untouched: Callable[[], Sequence[tuple[str, Shape]]] = tuple,
) -> Shape:
    """Return the batch shape, and bind the named core dimensions in ``sizes``.

    Parameters
    ----------
    fun : callable
        The kernel, for the error.
    items : sequence of Item
    sizes : dict
        The named core dimensions.
    untouched : callable
        Returns path and shape of the arrays without a rank; asked for an error only.

    Raises
    ------
    RankError, CoreDimensionError, BatchShapeError
        In this order of precedence; the text lists the clashes of all three kinds.
    """
    short = [i for i, item in enumerate(items) if len(item.shape) < item.rank.rank]
    whole = [i for i in range(len(items)) if i not in short]
    core = _core_clashes(items, whole, sizes, lambda item: item.core)
    batch_shape, batch = _broadcast([(i, items[i]) for i in whole])
    if short or core or batch:
        few = _too_few_axes(items, short, sizes) if short else []
        only_batch = len(batch) == 1 and not short and not core
        clashes = [*few, *core, *(_with_hint(items, batch) if only_batch else batch)]
        raise _error(fun, items, clashes, untouched())
    return batch_shape


def _core_clashes(
    items: Sequence[Item],
    positions: Sequence[int],
    sizes: dict[str, int],
    core: Callable[[Item], Shape],
) -> list[_Clash]:
    found = bind_sizes([(items[i].path, core(items[i]), items[i].rank) for i in positions], sizes)
    return [
        _Clash(
            CoreDimensionError,
            tuple(tuple(positions[i] for i in group) for group in clash.groups),
            clash.sentence,
        )
        for clash in found
    ]


_SUMMARIES: dict[type[ValueError], str] = {
    RankError: "an argument has fewer axes than its rank",
    CoreDimensionError: "the core dimensions disagree",
    BatchShapeError: "the batch axes do not broadcast together",
}


def _error(
    fun: Callable[..., Any],
    items: Sequence[Item],
    clashes: list[_Clash],
    untouched: Sequence[tuple[str, Shape]],
) -> ValueError:
    kinds = list(dict.fromkeys(clash.error for clash in clashes))
    rows = [
        (
            item.path,
            str(item.shape),
            str(item.rank),
            str(item.batch) if len(item.shape) >= item.rank.rank else "too few axes",
        )
        for item in items
    ]
    return kinds[0](
        f"{function_location(fun)}: {listed([_SUMMARIES[kind] for kind in kinds])}\n\n"
        + _marked_table(("argument", "shape", "rank", "batch axes"), rows, clashes)
        + "".join(f"\n    {line}" for line in untouched_line(untouched))
        + "\n\n"
        + "\n".join(clash.sentence for clash in clashes)
    )


def _marked_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], clashes: Sequence[_Clash]
) -> str:
    """Mark the rows that clash; of very many rows, show some of each side and count the others."""
    groups = [group for clash in clashes for group in clash.groups]
    marked = {i for group in groups for i in group}
    shown = range(len(rows))
    if len(rows) > _MOST_ROWS:
        shown = sorted({i for group in groups for i in group[:_EXAMPLES]} | {0, len(rows) - 1})
    position = {row: at for at, row in enumerate(shown)}
    text = table(header, [rows[i] for i in shown], {position[i] for i in marked if i in position})
    first, *lines = text.split("\n")
    body: list[str] = [first]
    for line, i, previous in zip(lines, shown, [-1, *shown], strict=False):
        hidden = range(previous + 1, i)
        if hidden:
            clash = sum(row in marked for row in hidden)
            part = f", {clash} of which clash" if clash else ""
            also = " that clash" if clash == len(hidden) else part
            body.append(f"    ... {len(hidden)} more{also}")
        body.append(line)
    return "\n".join(body)


def _too_few_axes(
    items: Sequence[Item], short: Sequence[int], sizes: dict[str, int]
) -> list[_Clash]:
    sentences = [_too_few(items[i], sizes) for i in short]
    if len(sentences) > _EXAMPLES:
        count = len(sentences) - _EXAMPLES
        rest = f"And {plural(count, 'leaf')} more with too few axes."
        sentences = [*sentences[:_EXAMPLES], rest]
    return [_Clash(RankError, (tuple(short),), "\n".join(sentences))]


def _too_few(item: Item, sizes: dict[str, int]) -> str:
    sentence = (
        f"{item.path} has {plural(len(item.shape), 'axis')}, but its rank {item.rank} needs "
        f"{item.rank.rank}"
    )
    # A vector where a matrix is due most likely lacks an axis; a number could be a mistake of any
    # kind, and has no [None].
    one_missing = item.shape and item.rank.rank - len(item.shape) == 1
    if one_missing and _would_fit((1, *item.shape), item.rank, sizes):
        return f"{sentence}; did you mean {item.path}[None]?"
    return f"{sentence}."


def _would_fit(core: Shape, rank: Rank, sizes: dict[str, int]) -> bool:
    declared = zip(core, rank.dims or (), strict=rank.dims is not None)
    return all(dim.fits(size, sizes) for size, dim in declared)


def _broadcast(items: list[tuple[int, Item]]) -> tuple[Shape, list[_Clash]]:
    """Broadcast the batch axes by NumPy's rules; report every axis that has two lengths."""
    width = max((len(item.batch) for _, item in items), default=0)
    shape: list[int] = []
    clashing: dict[int, dict[int, list[tuple[int, Item]]]] = {}
    for axis in range(-width, 0):
        lengths: dict[int, list[tuple[int, Item]]] = {}
        for i, item in items:
            if len(item.batch) >= -axis and item.batch[axis] != 1:
                lengths.setdefault(item.batch[axis], []).append((i, item))
        shape.append(next(iter(lengths), 1))
        if len(lengths) > 1:
            clashing[axis] = lengths
    clashes = [
        _Clash(
            BatchShapeError,
            tuple(tuple(i for i, _ in who) for who in lengths.values()),
            f"Batch axis {axis} is "
            + listed(
                [f"{n} ({shortened([it.path for _, it in who])})" for n, who in lengths.items()]
            )
            + ".",
        )
        for axis, lengths in clashing.items()
    ]
    return tuple(shape), clashes


def _with_hint(items: Sequence[Item], clashes: list[_Clash]) -> list[_Clash]:
    """Two leaves with one batch axis each were perhaps meant as an outer product."""
    (clash,) = clashes
    involved = [items[i] for group in clash.groups for i in group]
    if len(involved) != 2 or any(len(item.batch) != 1 for item in involved):
        return clashes
    first, second = involved
    (i, *_), *_ = clash.groups
    apart = dataclasses.replace(first, shape=(*first.batch, 1, *first.core))
    if _broadcast([(at, apart if at == i else item) for at, item in enumerate(items)])[1]:
        return clashes
    hint = f"To combine every {first.path} with every {second.path}, pass {first.path}[:, None]."
    return [dataclasses.replace(clash, sentence=f"{clash.sentence}\n{hint}")]


def output_error(
    fun: Callable[..., Any], items: Sequence[Item], sizes: dict[str, int]
) -> CoreDimensionError | None:
    """Compare what a kernel returned for one item with what it declares."""
    wrong = [i for i, item in enumerate(items) if len(item.shape) != item.rank.rank]
    clashes = [
        _Clash(
            CoreDimensionError,
            ((i,),),
            f"{items[i].path} has {plural(len(items[i].shape), 'axis')}, but its rank "
            f"{items[i].rank} declares {items[i].rank.rank}.",
        )
        for i in wrong
    ]
    whole = [i for i in range(len(items)) if i not in wrong]
    clashes += _core_clashes(items, whole, dict(sizes), lambda item: item.shape)
    if not clashes:
        return None
    rows = [(item.path, str(item.shape), str(item.rank)) for item in items]
    return CoreDimensionError(
        f"{function_location(fun)}: the kernel does not return what it declares, for one item\n\n"
        + _marked_table(("output", "shape", "rank"), rows, clashes)
        + "\n\n"
        + "\n".join(clash.sentence for clash in clashes)
    )
