# SPDX-License-Identifier: MIT
"""Why the shapes of one call do not fit: every clash at once, as a table and sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rankax._dims import Rank, bind_sizes
from rankax._errors import (
    BatchShapeError,
    CoreDimensionError,
    RankError,
    function_location,
    listed,
    plural,
    table,
)

__all__ = ["Item", "check_items", "output_error"]

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """One ranked leaf: its path in the caller's words, its shape and its declared rank."""

    path: str
    shape: Shape
    rank: Rank

    @property
    def batch(self) -> Shape:
        """The leading axes that the rank leaves over."""
        return self.shape[: len(self.shape) - self.rank.rank]

    @property
    def core(self) -> Shape:
        """The trailing axes that the rank declares."""
        return self.shape[len(self.shape) - self.rank.rank :]


@dataclasses.dataclass(frozen=True)
class _Clash:
    error: type[ValueError]
    marked: frozenset[int]
    sentence: str


def check_items(fun: Callable[..., Any], items: Sequence[Item], sizes: dict[str, int]) -> Shape:
    """Return the batch shape, and bind the named core dimensions in ``sizes``.

    Raises
    ------
    RankError, CoreDimensionError, BatchShapeError
        In this order of precedence; the text lists the clashes of all three kinds.
    """
    short = [i for i, item in enumerate(items) if len(item.shape) < item.rank.rank]
    whole = [i for i in range(len(items)) if i not in short]
    clashes = [_Clash(RankError, frozenset([i]), _too_few_axes(items[i])) for i in short]
    core = bind_sizes([(items[i].path, items[i].core, items[i].rank) for i in whole], sizes)
    clashes += [
        _Clash(CoreDimensionError, frozenset(whole[i] for i in clash.leaves), clash.sentence)
        for clash in core
    ]
    batch_shape, clash = _broadcast([(i, items[i]) for i in whole])
    clashes += [clash] if clash else []
    if clashes:
        raise _error(fun, items, clashes)
    return batch_shape


def _error(fun: Callable[..., Any], items: Sequence[Item], clashes: list[_Clash]) -> ValueError:
    summaries: dict[type[ValueError], str] = {
        RankError: "an argument has fewer axes than its rank",
        CoreDimensionError: "the core dimensions disagree",
        BatchShapeError: "the batch axes do not broadcast together",
    }
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
    marked = frozenset[int]().union(*(clash.marked for clash in clashes))
    return kinds[0](
        f"{function_location(fun)}: {listed([summaries[kind] for kind in kinds])}\n\n"
        + table(("argument", "shape", "rank", "batch axes"), rows, marked)
        + "\n\n"
        + "\n".join(clash.sentence for clash in clashes)
    )


def _too_few_axes(item: Item) -> str:
    missing = item.rank.rank - len(item.shape)
    sentence = (
        f"{item.path} has {plural(len(item.shape), 'axis')}, but its rank {item.rank} needs "
        f"{item.rank.rank}"
    )
    if missing == 1 and _would_fit((1, *item.shape), item.rank):
        return f"{sentence}; did you mean {item.path}[None]?"
    return f"{sentence}."


def _would_fit(core: Shape, rank: Rank) -> bool:
    return all(dim.size in (None, size) for size, dim in zip(core, rank.dims or (), strict=False))


def _broadcast(items: list[tuple[int, Item]]) -> tuple[Shape, _Clash | None]:
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
    if not clashing:
        return tuple(shape), None
    sentences = [
        f"Batch axis {axis} is "
        + listed([f"{n} ({', '.join(it.path for _, it in who)})" for n, who in lengths.items()])
        + "."
        for axis, lengths in clashing.items()
    ]
    found = [pair for lengths in clashing.values() for who in lengths.values() for pair in who]
    hint = _outer_hint({item.path: item for _, item in found})
    marked = frozenset(i for i, _ in found)
    return (), _Clash(BatchShapeError, marked, " ".join([*sentences, *hint]))


def _outer_hint(found: dict[str, Item]) -> list[str]:
    """Two leaves with one batch axis each were most likely meant as an outer product."""
    if len(found) != 2 or any(len(item.batch) != 1 for item in found.values()):
        return []
    first, second = found.values()
    return [f"To combine every {first.path} with every {second.path}, pass {first.path}[:, None]."]


def output_error(
    fun: Callable[..., Any], items: Sequence[Item], sizes: dict[str, int]
) -> CoreDimensionError | None:
    """Compare what a kernel returned for one item with what it declares."""
    wrong = [i for i, item in enumerate(items) if len(item.shape) != item.rank.rank]
    sentences = [
        f"{items[i].path} has {plural(len(items[i].shape), 'axis')} where the rank "
        f"{items[i].rank} declares {items[i].rank.rank}."
        for i in wrong
    ]
    marked = set(wrong)
    whole = [i for i in range(len(items)) if i not in marked]
    known = dict(sizes)
    for clash in bind_sizes([(items[i].path, items[i].shape, items[i].rank) for i in whole], known):
        marked.update(whole[i] for i in clash.leaves)
        sentences.append(clash.sentence)
    if not sentences:
        return None
    rows = [(item.path, str(item.shape), str(item.rank)) for item in items]
    return CoreDimensionError(
        f"{function_location(fun)}: the kernel does not return what it declares, for one item\n\n"
        + table(("output", "shape", "rank"), rows, marked)
        + "\n\n"
        + "\n".join(sentences)
    )
