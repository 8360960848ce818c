# SPDX-License-Identifier: MIT
"""The plan of one call: its schedule, and what else there is to say, as aligned text."""

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from rankax.core.base.messages import listed, plural, table
from rankax.core.plan.report import untouched_line
from rankax.core.plan.schedule import LeafPlan, Level, Plan, Shape

_MANY = 3  # leaves of one argument that are alike are one row


@dataclasses.dataclass(frozen=True)
class BatchPlan(Plan):
    """The plan of one call of a kernel, as ``print(kernel.plan(...))`` shows it.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    batch_shape : tuple of int
        The leading axes of every output.
    leaves : tuple of LeafPlan
        Every leaf that has a rank, in the order of the parameters.
    levels : tuple of Level
        The nested maps, outermost first.
    reduced : tuple of int
        The axes of the batch shape that are reduced.
    reduce : str
        The name of the reduction.
    names : tuple of str
        Of the last axes of the batch, if they have names.
    untouched : tuple of (str, tuple of int)
        Path and shape of every other array with axes. It has no rank, so every item gets all of it.
    memory : MemoryFit or None
        The chunk size chosen for ``memory_limit``, and the memory that it needs.
    devices : tuple of (int, int)
        The axes of the batch shape that several devices share, and the number of devices for each.
        They work side by side; the levels are those of one device's part.
    lanes : int or None
        With ``lockstep=False``, how many items are in flight; each of them ends by itself.
    ends : tuple of str, or None
        With ``lockstep=False``, where items part: loops whose length depends on the item, and
        expensive branches; and how each loop is reversed. Empty: nowhere, so they run in lockstep.
    filled : tuple of (int, int)
        With ``bucket=``, the axes of the batch shape that are padded, and the length that each has
        in the arguments and the results.
    ragged : tuple of str
        With ragged arguments, how many items there are in how many lengths, for each dimension.
    notes : tuple of str
        What else there is to say about the call.
    parts : tuple of (tuple of int, BatchPlan)
        With ragged arguments, the padded lengths and the plan of each call that is made.
    """

    untouched: tuple[tuple[str, Shape], ...] = ()
    memory: Any = None
    devices: tuple[tuple[int, int], ...] = ()
    ends: tuple[str, ...] | None = None
    filled: tuple[tuple[int, int], ...] = ()
    ragged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple[tuple[tuple[int, ...], Any], ...] = ()

    @property
    def lanes(self) -> int | None:
        """How many items are in flight, if each of them ends by itself."""
        return self.walked

    @property
    def in_flight(self) -> int:
        """The number of items evaluated at once, on each device if there are several."""
        if self.parts:
            return max(part.in_flight for _, part in self.parts)
        return super().in_flight

    @property
    def steps(self) -> int:
        """The number of times that the batched kernel runs, one after another.

        Where items end by themselves, the number of items that each lane evaluates on average.
        """
        if self.parts:
            return sum(part.steps for _, part in self.parts)
        return super().steps

    def __str__(self) -> str:
        # A row per leaf, then a line per level and note.
        lines = _text_table(self) if self.leaves else []
        below = [_level_sentence(level, self) for level in self.levels]
        below += [*_legend(self), *self._notes()]
        first = self.kernel + self._summary()
        return "\n".join([first, *lines, *(f"  {line}" for line in below)])

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        # What IPython calls for the last line of a cell of a notebook.
        printer.text(str(self))

    def _summary(self) -> str:
        if not self.leaves or not self.batch_shape:
            lacking = "batch axes" if self.leaves else "argument with a rank"
            return f": no {lacking}, so the kernel is simply called"
        return (
            f": batch shape {self._shape(range(len(self.batch_shape)))}, "
            f"{plural(self.evaluations, 'evaluation')}, {self.in_flight} in flight"
            f"{' on each device' if self.devices else ''}, "
            f"{'items end by themselves' if self.lanes else plural(self.steps, 'step')}"
        )

    def _shape(self, axes: Sequence[int]) -> str:
        """Write the lengths of some axes of the batch, with their names."""
        if not self.names:
            return str(tuple([self.batch_shape[axis] for axis in axes]))
        pairs = [(self.words[axis], self.batch_shape[axis]) for axis in axes]
        return f"({', '.join(f'{w}={n}' if w in self.names else str(n) for w, n in pairs)})"

    def _notes(self) -> list[str]:
        """Describe what the leaves and levels do not show, such as devices and reductions."""
        notes = [
            f"axis {self.words[axis]}: {length} items, in a bucket of {self.batch_shape[axis]}"
            for axis, length in self.filled
        ]
        notes += [*self.ragged, *map(_part_sentence, self.parts)]
        if self.lanes is not None:
            notes.append(f"{plural(self.lanes, 'lane')}; items diverge at")
            notes += [f"  {end}" for end in self.ends or ()]
        elif self.ends is not None:
            notes.append("in lockstep: no loop, and no expensive branch, depends on the item")
        for axis, count in self.devices:
            shorter, longer = divmod(self.batch_shape[axis], count)
            items = f"{shorter} or {shorter + 1} items" if longer else plural(shorter, "item")
            notes.append(f"axis {self.words[axis]}: over {count} devices, {items} on each")
        if self.reduced:
            kept = [axis for axis in range(len(self.batch_shape)) if axis not in self.reduced]
            over = [self.words[axis] for axis in self.reduced] if self.names else []
            over = f" over {listed(over)}" if over else ""
            notes.append(f"reduced by {self.reduce}{over}, to {self._shape(kept)}")
            notes += _pairs_lines(self)
        if self.memory is not None:
            notes.append(str(self.memory))
        return [*notes, *self.notes, *untouched_line(self.untouched)]


def shown(schedule: Plan, **found: Any) -> BatchPlan:
    """Return a plan with a schedule, and what else there is to say."""
    own = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(Plan)}
    return BatchPlan(**{**own, **found})


def _pairs_lines(plan: BatchPlan) -> list[str]:
    """Say which arguments go together item by item, where others meet in all pairs.

    A caller who means all pairs would get a result of the same shape, and no error.
    """
    by_axes: dict[tuple[int, ...], dict[str, list[LeafPlan]]] = {}
    for leaf in plan.leaves if not plan.names else ():
        absent = len(plan.batch_shape) - len(leaf.lengths)
        axes = tuple([at for at, n in enumerate(leaf.lengths, absent) if n not in (None, 1)])
        if axes and leaf.is_array:
            by_axes.setdefault(axes, {}).setdefault(_argument(leaf), []).append(leaf)
    if len(plan.batch_shape) == 1:
        together, *others = [*by_axes.get((0,), {})] or [""]
        is_array = others and [leaf.path for leaf in by_axes[0,][together]] == [together]
        hint = f"; for all pairs, pass {together}[:, None]" if is_array else ""
        also = listed([f"{name} i" for name in others])
        return [f"{together} i goes with {also} only{hint}"] if others else []
    return [
        f"along {'axis' if len(axes) == 1 else 'axes'} {listed([str(axis) for axis in axes])}, "
        f"{listed([*names])} go together, item by item"
        for axes, names in by_axes.items()
        if len(names) > 1 and any({*axes} - {*other} and {*other} - {*axes} for other in by_axes)
    ]


def _text_table(plan: BatchPlan) -> list[str]:
    """Align words to the left, lengths of batch axes to the right."""
    header = ["leaf", "shape", "rank", "core", "batch axes" if plan.batch_shape else ""]
    words = plan.words if plan.names else ()
    groups = _named_groups(
        plan.leaves, lambda x: (_argument(x), x.shape, x.declared, x.core_shape, x.lengths)
    )
    first = [(path, group[0]) for path, group in groups]
    rows = [[path, str(x.shape), x.declared, str(x.core_shape)] for path, x in first]
    lengths = [_cells(leaf, plan.batch_shape) for _, leaf in first]
    if plan.batch_shape:
        rows.append(["batch", str(plan.batch_shape), "", ""])
        lengths.append([str(size) for size in plan.batch_shape])
    widths = [
        max(map(len, column)) for column in zip(*lengths, *[words] * bool(words), strict=True)
    ]
    for row, texts in zip(rows, lengths, strict=True):
        row.append(" ".join(n.rjust(width) for n, width in zip(texts, widths, strict=True)))
    if words:
        header[-1] = " ".join(map(str.rjust, words, widths))
    return [line[2:] for line in table(header, rows, ()).split("\n")]


def _named_groups(
    leaves: Sequence[LeafPlan], key: Callable[[LeafPlan], Hashable]
) -> list[tuple[str, list[LeafPlan]]]:
    """Return the leaves of which each argument has many alike under one name, others alone."""
    alike: dict[Hashable, list[LeafPlan]] = {}
    for leaf in leaves:
        alike.setdefault(key(leaf), []).append(leaf)
    found: list[tuple[str, list[LeafPlan]]] = []
    for group in alike.values():
        if len(group) < _MANY:
            found += [(leaf.path, [leaf]) for leaf in group]
        else:
            found.append((f"{_argument(group[0])} ({len(group)} leaves)", group))
    return found


def _argument(leaf: LeafPlan) -> str:
    return re.split(r"\W", leaf.path)[0]


def _cells(leaf: LeafPlan, batch_shape: Shape) -> list[str]:
    """Return one cell per batch axis of a leaf: its length, or a sign."""
    absent = (None,) * (len(batch_shape) - len(leaf.lengths))
    missing, stretched = ("/", "1/") if leaf.is_split else ("-", "1*")
    pairs = zip((*absent, *leaf.lengths), batch_shape, strict=True)
    return [missing if n is None else str(n) if n == size else stretched for n, size in pairs]


def _legend(plan: BatchPlan) -> list[str]:
    """Explain the signs in the table."""
    used = {cell for leaf in plan.leaves for cell in _cells(leaf, plan.batch_shape)}
    signs = [text for text in ("1* stretched", "- absent") if text.split()[0] in used]
    lines = [f"({', '.join(signs)}: used again for each item, never copied)"] if signs else []
    if used & {"/", "1/"}:
        lines.append("(/ split: each item has a key of its own)")
    return lines


def _level_sentence(level: Level, plan: BatchPlan) -> str:
    """Describe one level: its axes, its tile, the leaves that it maps."""
    mapped = [leaf for leaf, mapped in zip(plan.leaves, level.mapped, strict=True) if mapped]
    paths = [path for path, _ in _named_groups(mapped, _argument)]
    shown = paths if len(paths) <= 6 else [*paths[:4], f"{len(paths) - 4} more"]
    axes = ", ".join(plan.words[axis] for axis in level.axes)
    which = f"axis {axes}" if len(level.axes) == 1 else f"axes {axes} as one"
    reduced = ", reduced" if level.reduced else ""
    return f"{which}: {_level_how(level)}, mapping {', '.join(shown)}{reduced}"


def _part_sentence(lengths_and_part: tuple[tuple[int, ...], BatchPlan]) -> str:
    """Describe how the ragged items of one padded length are evaluated."""
    lengths, part = lengths_and_part
    how = [
        f"axis {', '.join(part.words[axis] for axis in x.axes)}: {_level_how(x)}"
        for x in part.levels
    ]
    how += [] if part.lanes is None else [plural(part.lanes, "lane")]
    how += [] if part.memory is None else [str(part.memory)]
    front = [str(length) for length in lengths[:-1]]
    return f"  {', '.join([*front, plural(lengths[-1], 'row')])}: {'; '.join(how)}"


def _level_how(level: Level) -> str:
    """Describe how one level is evaluated."""
    if level.walker:
        return f"{level.size} {level.walker}"
    if level.tile == level.size:
        return f"vmap over {level.size}"
    word = "tile" if level.reduced else "chunk"
    other = level.derivative
    there = "" if other is None else f" ({other.tile or other.size} in derivatives)"
    return f"{plural(level.steps, word)} of {level.tile} over {level.size}{there}"
