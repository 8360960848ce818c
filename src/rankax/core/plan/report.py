# SPDX-License-Identifier: MIT
"""Errors about the shapes of one call: a table, and a sentence for each problem."""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankax._errors import BatchShapeError, CoreDimensionError, RankError
from rankax.core.base.messages import function_location, listed, plural, shortened, table
from rankax.core.declare.dims import Dim, NoSize, Rank
from rankax.core.plan.schedule import Clash, LeafPlan, Shape, bind_sizes, broadcast, leaf_plan

_MOST_ROWS = 16  # of a table; with more, only the rows that clash and some context are shown
_EXAMPLES = 4  # of each side of a clash, if not all rows are shown


def call_error(
    fun: Callable[..., Any],
    leaves: Sequence[LeafPlan],
    ranks: Sequence[Rank],
    clashes: Sequence[Clash],
    sizes: Mapping[str, int],
    untouched: Sequence[tuple[str, Shape]],
    axes: Sequence[str] = (),
) -> ValueError:
    """Return the error that describes all problems with the shapes of a call.

    Parameters
    ----------
    fun : callable
        The kernel.
    leaves, ranks : sequences of equal length
        Every leaf that has a rank; one with too few axes is a problem too.
    clashes : sequence of Clash
        The clashes of the other leaves, by their positions in ``leaves``.
    sizes : dict
        The sizes of the named core dimensions.
    untouched : sequence of (path, shape)
        The arrays without a rank.
    axes : sequence of str
        The names of batch axes.

    Returns
    -------
    RankError, CoreDimensionError, BatchShapeError
        The first of these with a problem; the text lists the problems of all three kinds.
    """
    paths = [leaf.path for leaf in leaves]
    short = [i for i, leaf in enumerate(leaves) if len(leaf.shape) < leaf.rank + len(leaf.names)]
    kinds: list[type[ValueError]] = [RankError] if short else []
    sentences = [_too_few(leaves[i], ranks[i], sizes) for i in short[:_EXAMPLES]]
    if (others := len(short) - _EXAMPLES) > 0:
        sentences.append(f"And {plural(others, 'leaf')} more with too few axes.")
    tuples = {_list_of(leaves[i].path) for i in short}
    longer = {_list_of(leaf.path) for leaf in leaves if leaf.shape or not leaf.rank}
    parameters = inspect.signature(fun).parameters.values()
    # `*args` is a tuple that the caller did not pass.
    tuples -= {each.name for each in parameters if each.kind is each.VAR_POSITIONAL}
    sentences += [
        f"If {x} is an array, pass jnp.asarray({x}); if it is the shape of one, for a plan, pass "
        f"jax.ShapeDtypeStruct({x}, jnp.float32)."
        for x in sorted(filter(None, tuples - longer))
    ]
    for clash in clashes:
        kinds.append(CoreDimensionError if isinstance(clash.axis, Dim) else BatchShapeError)
        sentences.append(_clash_sentence(clash, paths, sizes))
    if not short:
        # A hint applies to whole parameters, but not to those that also hold untouched arrays.
        mixed = {_parameter(path) for path, _ in untouched}
        names = [path if _parameter(path) in mixed else _parameter(path) for path in paths]
        hints = _last_axis_first(leaves, ranks, clashes, names, axes)
        if kinds == [BatchShapeError] and not axes:
            vectors = [] if hints else _vectors(leaves, clashes[0], names)
            hints += [*_outer_product(leaves, clashes[0], names), *vectors]
        sentences += [*hints, *_unlike_items(leaves, clashes)]
    rows = [(leaf.path, str(leaf.shape), leaf.declared, _batch_axes(leaf)) for leaf in leaves]
    for i in short:
        rows[i] = (*rows[i][:3], "too few axes")
    lines = [f"    {line}" for line in untouched_line(untouched)]
    header = ("argument", "shape", "rank", "batch axes")
    shown = "\n".join([_marked_table(header, rows, short, clashes), *lines])
    summaries = listed([_SUMMARIES[kind] for kind in dict.fromkeys(kinds)])
    if any(isinstance(clash.axis, str) for clash in clashes):
        summaries = summaries.replace("do not broadcast together", "disagree")
    return kinds[0](_text(fun, summaries, shown, sentences))


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
    cores = [(i, leaf.shape, rank) for i, (leaf, rank) in enumerate(outputs) if i not in wrong]
    bound = dict(sizes)
    clashes = bind_sizes(cores, bound)
    if not wrong and not clashes:
        return None
    sentences = [f"{_has_axes(leaves[i])} declares {leaves[i].rank}." for i in wrong]
    paths = [leaf.path for leaf in leaves]
    sentences += [_clash_sentence(clash, paths, bound) for clash in clashes]
    rows = [(leaf.path, str(leaf.shape), leaf.declared) for leaf in leaves]
    summary = "the kernel does not return what it declares, for one item"
    shown = _marked_table(("output", "shape", "rank"), rows, wrong, clashes)
    return CoreDimensionError(_text(fun, summary, shown, sentences))


def _text(fun: Callable[..., Any], summary: str, shown: str, sentences: Sequence[str]) -> str:
    problems = "\n".join(sentences)
    return f"{function_location(fun)}: {summary}\n\n{shown}\n\n{problems}"


def _marked_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    wrong: Sequence[int],
    clashes: Sequence[Clash],
) -> str:
    """Mark the rows that clash; of very many rows, show some of each size and count the others."""
    groups = [wrong, *(group for clash in clashes for group in clash.leaves.values())]
    marked = {i for group in groups for i in group}
    shown = list(range(len(rows)))
    if len(rows) > _MOST_ROWS:
        shown = sorted({i for group in groups for i in group[:_EXAMPLES]} | {0, len(rows) - 1})
    marks = [at for at, row in enumerate(shown) if row in marked]
    first, *lines = table(header, [rows[i] for i in shown], marks).split("\n")
    body = [first]
    for line, i, previous in zip(lines, shown, [-1, *shown], strict=False):
        if hidden := range(previous + 1, i):
            count = sum(row in marked for row in hidden)
            which = f", {count} of which clash" if count else ""
            which = " that clash" if count == len(hidden) else which
            body.append(f"    ... {len(hidden)} more{which}")
        body.append(line)
    return "\n".join(body)


def _batch_axes(leaf: LeafPlan) -> str:
    """Write the lengths of its batch axes, with their names."""
    if not leaf.names:
        return str(leaf.batch_axes)
    front = ("",) * (len(leaf.batch_axes) - len(leaf.names))
    pairs = zip((*front, *(f"{name}=" for name in leaf.names)), leaf.batch_axes, strict=False)
    return f"({', '.join(f'{name}{n}' for name, n in pairs)})"


def _too_few(leaf: LeafPlan, rank: Rank, sizes: Mapping[str, int]) -> str:
    sentence = f"{_has_axes(leaf)} needs {leaf.rank + len(leaf.names)}"
    if leaf.names:
        other = dataclasses.replace(rank, batch=())
        names = listed([*rank.batch], "or")
        return f"{sentence}; if it has no axis {names}, declare it as {other}."
    # A vector in place of a matrix most likely lacks an axis. A number has no [None], and may be
    # any kind of mistake.
    if leaf.shape and leaf.rank - len(leaf.shape) == 1:
        sized = zip((1, *leaf.shape), rank.dims or (), strict=rank.dims is not None)
        if all(dim.fits(size, sizes) for size, dim in sized):
            return f"{sentence}; did you mean {leaf.path}[None]?"
    return f"{sentence}."


def _has_axes(leaf: LeafPlan) -> str:
    return f"{leaf.path} has {plural(len(leaf.shape), 'axis')}, but its rank {leaf.declared}"


def _clash_sentence(clash: Clash, paths: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Describe one clash: the axis, each of its sizes, and the leaves of that size."""
    shown = listed(
        [
            f"{size} ({shortened([paths[i] for i in group]) or 'the arguments'})"
            for size, group in clash.leaves.items()
        ]
    )
    dim, expected = clash.axis, clash.expected
    if not isinstance(dim, Dim):
        one = shortened([paths[i] for i in clash.leaves.get(1, ())])
        same = f"if all {dim} have the same {one}, leave {dim} out of its rank"
        hint = f" Named axes are not stretched: {same}." if one and isinstance(dim, str) else ""
        return f"Batch axis {dim} is {shown}.{hint}"
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


def _last_axis_first(
    leaves: Sequence[LeafPlan],
    ranks: Sequence[Rank],
    clashes: Sequence[Clash],
    names: Sequence[str],
    axes: Sequence[str],
) -> list[str]:
    """Return a hint for arguments whose batch axis may be the last one: the call would then fit."""
    candidates = [
        (clash, _arguments(by, group))
        for clash in clashes
        for group in clash.leaves.values()
        for by in (names, [leaf.path for leaf in leaves])
    ]
    for clash, arguments in candidates:
        moved = {i for ids in arguments.values() for i in ids}
        shared_core = any(len(leaves[i].shape) > 1 and not leaves[i].batch_axes for i in moved)
        if shared_core or len(arguments) > _EXAMPLES or not any(leaves[i].rank for i in moved):
            continue
        alone = all(moved.issuperset(group) for group in clash.leaves.values())
        wide = all(max(leaves[i].shape) == leaves[i].shape[-1] for i in moved if leaves[i].shape)
        if not isinstance(clash.axis, Dim) and (alone or not wide):
            continue  # that the batch axes would agree is no evidence then
        shapes = [leaf.shape for leaf in leaves]
        shapes = [(*s[-1:], *s[:-1]) if i in moved else s for i, s in enumerate(shapes)]
        pairs = zip(shapes, ranks, strict=True)
        again = [leaf_plan("", s, rank, names=axes) for s, rank in pairs]
        cores = [(i, leaf.core_shape, ranks[i]) for i, leaf in enumerate(again)]
        batches = [(i, leaf.lengths) for i, leaf in enumerate(again)]
        if not bind_sizes(cores, {}) and not broadcast(batches, axes)[1]:
            code = "jnp.moveaxis({}, -1, 0)"
            return [
                f"Batch axes come first; if the last axis of {listed(list(arguments))} is the "
                f"batch axis, pass {_applied(code, leaves, arguments)}."
            ]
    return []


def _outer_product(leaves: Sequence[LeafPlan], clash: Clash, names: Sequence[str]) -> list[str]:
    """Return a hint for arguments with one batch axis each: an outer product may be meant."""
    groups = list(clash.leaves.values())
    sides = [_arguments(names, group) for group in groups]
    if len({argument for side in sides for argument in side}) < sum(map(len, sides)):
        if any(len(group) > 1 for group in groups):
            return []  # one parameter is on two sides, with others
        sides = [_arguments([leaf.path for leaf in leaves], group) for group in groups]
    # The last side stays as it is; an option cannot be indexed.
    sides.sort(key=lambda side: ("batch_shape" in side, len(side)))
    batches = [leaf.batch_axes for leaf in leaves]
    codes: list[str] = []
    for number, side in enumerate(sides, 1 - len(sides)):
        for i in (i for ids in side.values() for i in ids):
            if len(leaves[i].batch_axes) != 1:
                return []
            batches[i] += (1,) * -number
        if number:
            codes.append(_applied(f"{{}}[:{', None' * -number}]", leaves, side))
    if broadcast(enumerate(batches))[1] or sum(map(len, sides)) > _EXAMPLES:
        return []
    first, *others = [f"every {listed(list(side))}" for side in sides]
    return [f"To combine {first} with {listed(others)}, pass {listed(codes)}."]


def _vectors(leaves: Sequence[LeafPlan], clash: Clash, names: Sequence[str]) -> list[str]:
    """Return a hint for arguments of rank 0 that may be vectors.

    Their last axis is as long as a core axis of another argument, and no other argument has a batch
    of their length.
    """
    cores = {size for leaf in leaves for size in leaf.core_shape}

    def may_be(i: int) -> bool:
        return not leaves[i].rank and bool(cores.intersection(leaves[i].shape[-1:]))

    groups = [group for group in clash.leaves.values() if all(map(may_be, group))]
    return [
        f"If one item of {name} is a vector, its rank is 1, not 0."
        for name in _arguments(names, [i for group in groups for i in group])
    ]


def _unlike_items(leaves: Sequence[LeafPlan], clashes: Sequence[Clash]) -> list[str]:
    """Return a hint for a list whose arrays differ in a core dimension: they may be items."""
    found: set[str] = set()
    for clash in clashes:
        if not isinstance(clash.axis, int):
            by_size = [{_list_of(leaves[i].path) for i in ids} for ids in clash.leaves.values()]
            counts = Counter(name for names in by_size for name in names if name)
            found.update(name for name, count in counts.items() if count > 1)
    return [f"If {x} is a list of items, pass rankax.Ragged.from_list({x})." for x in sorted(found)]


def _list_of(path: str) -> str | None:
    """Return the path of the list that a leaf is an entry of: ``x`` for ``x[0]``."""
    match = re.fullmatch(r"(.+)\[\d+\]", path)
    return match and match[1]


def _parameter(path: str) -> str:
    return re.split(r"\W", path)[0]


def _arguments(names: Sequence[str], group: Sequence[int]) -> dict[str, list[int]]:
    """Return the arguments that a group of leaves belongs to, each with all of its leaves."""
    return {names[i]: [j for j, name in enumerate(names) if name == names[i]] for i in group}


def _applied(code: str, leaves: Sequence[LeafPlan], arguments: Mapping[str, Sequence[int]]) -> str:
    """Return ``code`` for each argument: for its only leaf, or for each leaf of its tree."""
    return listed(
        [
            code.format(leaves[ids[0]].path)
            if len(ids) == 1
            else f"jax.tree.map(lambda x: {code.format('x')}, {argument})"
            for argument, ids in arguments.items()
        ]
    )


def untouched_line(untouched: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return a line with the arrays without a rank, which every item gets whole, if any."""
    if not untouched:
        return []
    return [f"untouched: {shortened([f'{path} {shape}' for path, shape in untouched])}"]
