# SPDX-License-Identifier: MIT
"""Why the shapes of one call do not fit, in words: a table and a sentence for every problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankax._base.functions import function_location
from rankax._base.words import listed, plural, shortened, table
from rankax._declare.dims import Dim, Rank
from rankax._declare.expressions import CannotComputeError, for_sizes
from rankax._errors import BatchShapeError, CoreDimensionError, RankError
from rankax._plan.broadcast import Clash, bind_sizes, broadcast
from rankax._plan.leaves import LeafPlan
from rankax._plan.levels import Shape
from rankax._plan.text import untouched_line

__all__ = ["call_error", "clash_sentence", "output_error"]

_MOST_ROWS = 16  # of a table; with more, the rows that clash and some context are shown
_EXAMPLES = 4  # of each side of a clash, where not all rows are shown


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One sentence of an error, and the rows of the table that it is about."""

    error: type[ValueError]
    groups: Sequence[Sequence[int]]  # of leaves that agree among themselves
    sentence: str


def call_error(
    fun: Callable[..., Any],
    leaves: Sequence[LeafPlan],
    ranks: Sequence[Rank],
    clashes: Sequence[Clash],
    sizes: Mapping[str, int],
    untouched: Sequence[tuple[str, Shape]],
) -> ValueError:
    """Word all that is wrong with the shapes of a call.

    Parameters
    ----------
    fun : callable
        The kernel.
    leaves, ranks : sequences of equal length
        Every leaf that has a rank; one with fewer axes than that is a problem too.
    clashes : sequence of Clash
        Of the others; its leaves are positions in ``leaves``.
    sizes : dict
        The named core dimensions.
    untouched : sequence of (path, shape)
        The arrays without a rank.

    Returns
    -------
    RankError, CoreDimensionError, BatchShapeError
        In this order of precedence; the text lists the problems of all three kinds.
    """
    short = [i for i, leaf in enumerate(leaves) if len(leaf.shape) < leaf.rank]
    problems = [_too_few_axes(leaves, ranks, short, sizes)] if short else []
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
    """Compare what a kernel returned for one item with what it declares."""
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
    """Mark the rows that clash; of very many rows, show some of each side and count the others."""
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
    leaves: Sequence[LeafPlan],
    ranks: Sequence[Rank],
    short: Sequence[int],
    sizes: Mapping[str, int],
) -> _Problem:
    sentences = [_too_few(leaves[i], ranks[i], sizes) for i in short]
    if len(sentences) > _EXAMPLES:
        count = len(sentences) - _EXAMPLES
        rest = f"And {plural(count, 'leaf')} more with too few axes."
        sentences = [*sentences[:_EXAMPLES], rest]
    return _Problem(RankError, [short], "\n".join(sentences))


def _too_few(leaf: LeafPlan, rank: Rank, sizes: Mapping[str, int]) -> str:
    sentence = f"{_has_axes(leaf)} needs {leaf.rank}"
    # A vector where a matrix is due most likely lacks an axis; a number could be a mistake of any
    # kind, and has no [None].
    one_missing = leaf.shape and leaf.rank - len(leaf.shape) == 1
    if one_missing and _would_fit((1, *leaf.shape), rank, sizes):
        return f"{sentence}; did you mean {leaf.path}[None]?"
    return f"{sentence}."


def _has_axes(leaf: LeafPlan) -> str:
    return f"{leaf.path} has {plural(len(leaf.shape), 'axis')}, but its rank {leaf.declared}"


def _would_fit(core: Shape, rank: Rank, sizes: Mapping[str, int]) -> bool:
    declared = zip(core, rank.dims or (), strict=rank.dims is not None)
    return all(dim.fits(size, sizes) for size, dim in declared)


def _problem(clash: Clash, leaves: Sequence[LeafPlan], sizes: Mapping[str, int]) -> _Problem:
    error = BatchShapeError if isinstance(clash.axis, int) else CoreDimensionError
    sentence = clash_sentence(clash, [leaf.path for leaf in leaves], sizes)
    return _Problem(error, list(clash.leaves.values()), sentence)


def clash_sentence(clash: Clash, paths: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Word one clash: the axis, each of its sizes, and the leaves that show it."""
    shown = listed(
        [
            f"{size} ({shortened([paths[i] for i in group]) or 'the arguments'})"
            for size, group in clash.leaves.items()
        ]
    )
    if isinstance(clash.axis, int):
        return f"Batch axis {clash.axis} is {shown}."
    sentence = f"{_dimension(clash.axis, clash.expected)} is {shown}"
    if isinstance(clash.expected, CannotComputeError):
        known = for_sizes({name: sizes[name] for name in clash.axis.names})
        sentence += f", but {clash.axis.expression} cannot be computed{known}: {clash.expected}"
    return f"{sentence}."


def _dimension(dim: Dim, expected: Any) -> str:
    if dim.name is not None:
        return f"Dimension {dim.name}"
    text = dim.text.lstrip("#")
    is_said = isinstance(expected, CannotComputeError) or text.split("=")[-1] == str(expected)
    return f"A dimension declared as {text}{'' if is_said else f' = {expected}'}"


def _outer_product(leaves: Sequence[LeafPlan], clash: Clash) -> list[str]:
    """Two leaves with one batch axis each were perhaps meant as an outer product."""
    involved = [i for group in clash.leaves.values() for i in group]
    if len(involved) != 2 or any(len(leaves[i].batch_axes) != 1 for i in involved):
        return []
    first, second = (leaves[i] for i in involved)
    apart = [(*leaf.batch_axes, 1) if leaf is first else leaf.batch_axes for leaf in leaves]
    if broadcast(enumerate(apart))[1]:
        return []
    return [f"To combine every {first.path} with every {second.path}, pass {first.path}[:, None]."]
