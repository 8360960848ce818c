# SPDX-License-Identifier: MIT
"""Errors about the shapes of one call: a table, and a sentence for each problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankax._base.functions import function_location
from rankax._base.words import listed, plural, shortened, table
from rankax._declare.dims import NoSize, Rank
from rankax._errors import BatchShapeError, CoreDimensionError, RankError
from rankax._plan.broadcast import Clash, bind_sizes, broadcast
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Shape
from rankax._plan.text import untouched_line

__all__ = ["call_error", "clash_sentence", "output_error"]

_MOST_ROWS = 16  # of a table; with more, only the rows that clash and some context are shown
_EXAMPLES = 4  # of each side of a clash, if not all rows are shown


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One sentence of an error, and the table rows that it refers to."""

    error: type[ValueError]
    groups: Sequence[Sequence[int]]  # of leaves that agree with each other
    sentence: str


def call_error(
    fun: Callable[..., Any],
    leaves: Sequence[LeafPlan],
    ranks: Sequence[Rank],
    clashes: Sequence[Clash],
    sizes: Mapping[str, int],
    untouched: Sequence[tuple[str, Shape]],
) -> ValueError:
    """Return the error that describes all problems with the shapes of a call.

    Parameters
    ----------
    fun : callable
        The kernel.
    leaves, ranks : sequences of equal length
        Every leaf that has a rank; one with too few axes is a problem too.
    clashes : sequence of Clash
        Of the other leaves, by their positions in ``leaves``.
    sizes : dict
        Of the named core dimensions.
    untouched : sequence of (path, shape)
        The arrays without a rank.

    Returns
    -------
    RankError, CoreDimensionError, BatchShapeError
        The first of these with a problem; the text lists the problems of all three kinds.
    """
    short = [i for i, leaf in enumerate(leaves) if len(leaf.shape) < leaf.rank]
    problems: list[_Problem] = []
    if short:
        sentences = [_too_few(leaves[i], ranks[i], sizes) for i in short]
        if (others := len(short) - _EXAMPLES) > 0:
            sentences[_EXAMPLES:] = [f"And {plural(others, 'leaf')} more with too few axes."]
        problems.append(_Problem(RankError, [short], "\n".join(sentences)))
    problems += [_problem(clash, leaves, sizes) for clash in clashes]
    kinds = list(dict.fromkeys(problem.error for problem in problems))
    sentences = [problem.sentence for problem in problems]
    if len(problems) == 1 and kinds == [BatchShapeError]:
        sentences += _outer_product(leaves, clashes[0])
    rows = [
        (
            leaf.path,
            str(leaf.shape),
            leaf.declared,
            "too few axes" if i in short else str(leaf.batch_axes),
        )
        for i, leaf in enumerate(leaves)
    ]
    groups = [group for problem in problems for group in problem.groups]
    return kinds[0](
        f"{function_location(fun)}: {listed([_SUMMARIES[kind] for kind in kinds])}\n\n"
        + _marked_table(("argument", "shape", "rank", "batch axes"), rows, groups)
        + "".join(f"\n    {line}" for line in untouched_line(untouched))
        + "\n\n"
        + "\n".join(sentences)
    )


_SUMMARIES: dict[type[ValueError], str] = {
    RankError: "an argument has fewer axes than its rank",
    CoreDimensionError: "the core dimensions disagree",
    BatchShapeError: "the batch axes do not broadcast together",
}


def output_error(
    fun: Callable[..., Any], outputs: Sequence[tuple[LeafPlan, Rank]], sizes: Mapping[str, int]
) -> CoreDimensionError | None:
    """Return the error of a kernel whose outputs differ from their declared ranks, if they do."""
    leaves = [leaf for leaf, _ in outputs]
    wrong = [i for i, leaf in enumerate(leaves) if len(leaf.shape) != leaf.rank]
    problems = [
        _Problem(CoreDimensionError, [[i]], f"{_has_axes(leaves[i])} declares {leaves[i].rank}.")
        for i in wrong
    ]
    bound = dict(sizes)
    cores = [(i, leaf.shape, rank) for i, (leaf, rank) in enumerate(outputs) if i not in wrong]
    problems += [_problem(clash, leaves, bound) for clash in bind_sizes(cores, bound)]
    if not problems:
        return None
    rows = [(leaf.path, str(leaf.shape), leaf.declared) for leaf in leaves]
    groups = [group for problem in problems for group in problem.groups]
    return CoreDimensionError(
        f"{function_location(fun)}: the kernel does not return what it declares, for one item\n\n"
        + _marked_table(("output", "shape", "rank"), rows, groups)
        + "\n\n"
        + "\n".join(problem.sentence for problem in problems)
    )


def _marked_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], groups: Sequence[Sequence[int]]
) -> str:
    """Mark the rows that clash; of very many rows, show some of each group and count the others."""
    marked = {i for group in groups for i in group}
    shown = list(range(len(rows)))
    if len(rows) > _MOST_ROWS:
        shown = sorted({i for group in groups for i in group[:_EXAMPLES]} | {0, len(rows) - 1})
    marks = [at for at, row in enumerate(shown) if row in marked]
    first, *lines = table(header, [rows[i] for i in shown], marks).split("\n")
    body: list[str] = [first]
    for line, i, previous in zip(lines, shown, [-1, *shown], strict=False):
        if hidden := range(previous + 1, i):
            count = sum(row in marked for row in hidden)
            which = f", {count} of which clash" if count else ""
            which = " that clash" if count == len(hidden) else which
            body.append(f"    ... {len(hidden)} more{which}")
        body.append(line)
    return "\n".join(body)


def _too_few(leaf: LeafPlan, rank: Rank, sizes: Mapping[str, int]) -> str:
    sentence = f"{_has_axes(leaf)} needs {leaf.rank}"
    # A vector in place of a matrix most likely lacks an axis. A number has no [None], and may be
    # any kind of mistake.
    if leaf.shape and leaf.rank - len(leaf.shape) == 1:
        sized = zip((1, *leaf.shape), rank.dims or (), strict=rank.dims is not None)
        if all(dim.fits(size, sizes) for size, dim in sized):
            return f"{sentence}; did you mean {leaf.path}[None]?"
    return f"{sentence}."


def _has_axes(leaf: LeafPlan) -> str:
    return f"{leaf.path} has {plural(len(leaf.shape), 'axis')}, but its rank {leaf.declared}"


def _problem(clash: Clash, leaves: Sequence[LeafPlan], sizes: Mapping[str, int]) -> _Problem:
    error = BatchShapeError if isinstance(clash.axis, int) else CoreDimensionError
    sentence = clash_sentence(clash, [leaf.path for leaf in leaves], sizes)
    return _Problem(error, list(clash.leaves.values()), sentence)


def clash_sentence(clash: Clash, paths: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Describe one clash: the axis, each of its sizes, and the leaves of that size."""
    shown = listed(
        [
            f"{size} ({shortened([paths[i] for i in group]) or 'the arguments'})"
            for size, group in clash.leaves.items()
        ]
    )
    dim, expected = clash.axis, clash.expected
    if isinstance(dim, int):
        return f"Batch axis {dim} is {shown}."
    if dim.name is not None:
        return f"Dimension {dim.name} is {shown}."
    text = dim.text.lstrip("#")
    if isinstance(expected, NoSize):
        values = listed([f"{name} = {sizes[name]}" for name in dim.names])
        return (
            f"A dimension declared as {text} is {shown}, but {dim.expression} cannot be computed"
            f"{values and f' for {values}'}: {expected.reason}."
        )
    value = "" if text.split("=")[-1] == str(expected) else f" = {expected}"
    return f"A dimension declared as {text}{value} is {shown}."


def _outer_product(leaves: Sequence[LeafPlan], clash: Clash) -> list[str]:
    """Return a hint for two leaves with one batch axis each: an outer product may be meant."""
    involved = [i for group in clash.leaves.values() for i in group]
    if len(involved) != 2 or any(len(leaves[i].batch_axes) != 1 for i in involved):
        return []
    first, second = (leaves[i] for i in involved)
    apart = [(*leaf.batch_axes, 1) if leaf is first else leaf.batch_axes for leaf in leaves]
    if broadcast(enumerate(apart))[1]:
        return []
    return [f"To combine every {first.path} with every {second.path}, pass {first.path}[:, None]."]
