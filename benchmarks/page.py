# SPDX-License-Identifier: MIT
"""What a benchmark prints: its figures, and in brackets those that the pages show.

A benchmark writes only with ``--write``. Until then its tables go to the standard output, beside
those in its file of results, and what it does meanwhile to the standard error. The last lines name
the figures that do not agree: memory and counts, which the compiler decides, by a share of `SHARE`;
times and ratios by a factor of `FACTOR`. A machine may be slower as a whole, or busy: that is taken
out of columns of times. With another JAX, nothing is compared.

A row is found by its cells in the columns that identify it, whose rule is ``---``. Columns of
what was measured are set right, ``---:``, or are words, ``:---``.

Only the standard library is needed.
"""

import argparse
import importlib.metadata
import importlib.util
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import stamp

RESULTS = Path(__file__).parent / "results"
FACTOR, SHARE = 4, 0.1
# What the compiler decides, by the heading of a table or of a column. All else is times and ratios.
EXACT = re.compile(r"temporar|memory|\bMB\b|\bGB\b|evaluations|launches|programs")
UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1, "s": 1, "ms": 1e-3, "us": 1e-6}
INSTALL = "python -m pip install -U pip && python -m pip install . --group bench"


def arguments(doc: str) -> argparse.ArgumentParser:
    """Return a parser with ``--write``; its help is the docstring of the benchmark."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results, which the pages show"
    )
    return parser


def needs(*modules: str) -> None:
    """End the program with words if a package that it compares with is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        sys.exit(f"{Path(sys.argv[0]).name} needs {', '.join(absent)}, in a clone: {INSTALL}")


def progress(*words: object) -> None:
    """Say what was done so far: on the standard error, at once."""
    print(*words, file=sys.stderr, flush=True)


def turns(count: int) -> Iterator[int]:
    """Count turns, and say after each ten seconds which one comes."""
    said = time.monotonic()
    for turn in range(count):
        if time.monotonic() - said > 10:
            progress(f"  turn {turn + 1} of {count}")
            said = time.monotonic()
        yield turn


def finish(path: Path, text: str, *, write: bool) -> None:
    """Print tables beside those of the file; write it if told to."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    print(beside(text, page))
    if write:
        stamp.write(path, text)
        progress(f"wrote {path.name}")


def beside(text: str, page: str) -> str:
    """Return the text, with the figures of the page in brackets where they are others."""
    were = {row.key: dict(row.cells) for row in _rows(page)}
    tables: dict[int, list[list[str]]] = {}
    lines = _without_origin(text).rstrip().splitlines()
    for row in _rows("\n".join(lines)):
        old = were.get(row.key, {})
        cells = [_beside(cell, old.get(column, "")) for column, cell in row.cells]
        tables.setdefault(row.begin, [[column for column, _ in row.cells]]).append(cells)
    for begin, (head, *body) in tables.items():
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        rule = ["-" * width for width in widths]
        for number, cells in enumerate((head, rule, *body), begin):
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines[number] = "  ".join(padded).rstrip()
    shown = [line for line in lines if not line.startswith("<!--")]
    return "\n".join([*shown, "", *_footer(page, *compared(text, page))])


def _beside(cell: str, old: str) -> str:
    return f"{cell} ({old})" if old and old != cell else cell


def compared(text: str, page: str) -> tuple[int, float, list[str]]:
    """Return how many figures both have, how slow this machine is, and what does not agree."""
    were = {row.key: dict(row.cells) for row in _rows(page)}
    figures = [
        (row, column, cell, old, pair)
        for row in _rows(text)
        for column, cell in row.measured
        if (old := were.get(row.key, {}).get(column))
        for pair in _pairs(cell, old)
    ]
    times = [
        here.value / there.value
        for _, column, _, _, (here, there) in figures
        if _is_time(here, column) and here.value * there.value
    ]
    slow = statistics.median(times) if times else 1.0
    found = [
        f"{', '.join([*(name for _, name in row.key[1] if name), column])}: {_beside(cell, old)}"
        for row, column, cell, old, pair in figures
        if not _agree(*pair, f"{row.key[0]} {column}", slow if _is_time(pair[0], column) else 1.0)
    ]
    return len(figures), slow, list(dict.fromkeys(found))


class _Number(NamedTuple):
    value: float
    digit: float  # the last one that is shown
    unit: str


def _pairs(cell: str, old: str) -> list[tuple[_Number, _Number]]:
    """The numbers of two cells; none where one has words."""
    both = [
        [
            _Number(float(number.replace(",", "")) * scale, scale / 10 ** len(rest), unit)
            for number, rest, unit in re.findall(r"(\d[\d,]*(?:\.(\d+))?) ?(\w+)?", text)
            for scale in [UNITS.get(unit, 1)]
        ]
        for text in (cell, old)
    ]
    return list(zip(*both, strict=True)) if len(both[0]) == len(both[1]) else []


def _is_time(number: _Number, column: str) -> bool:
    return (
        number.unit in ("s", "ms", "us") or re.search(r"\b(ms|s|us|seconds)\b", column) is not None
    )


def _agree(here: _Number, page: _Number, words: str, slow: float) -> bool:
    less, more = sorted([here.value / slow, page.value])
    digit = min(here.digit / slow, page.digit)
    if here.unit.endswith("B") or (here.unit not in UNITS and EXACT.search(words)):
        return more * (1 - SHARE) <= less + digit
    return more <= FACTOR * (less + digit)


class _Row(NamedTuple):
    begin: int  # the line of the head of its table
    key: tuple[str, tuple[tuple[str, str], ...], int]  # heading, cells that identify it, how often
    cells: list[tuple[str, str]]  # beside their columns

    @property
    def measured(self) -> list[tuple[str, str]]:
        return [cell for cell in self.cells if cell not in self.key[1]]


def _rows(text: str) -> Iterator[_Row]:
    """The rows of all tables; equal identities below one heading are told apart by their order."""
    section, head, rule, begin = "", [], [], 0
    seen: Counter[object] = Counter()
    for number, line in enumerate(text.splitlines()):
        if line.startswith("## "):
            section = line
        if not line.startswith("|"):
            head = rule = []
            continue
        cells = [cell.strip(" *") for cell in line.strip()[1:-1].split("|")]
        if not head:
            head, begin = cells, number
        elif not rule:
            rule = cells
        else:
            named = list(zip(head, cells, strict=True))
            names = tuple(cell for cell, kind in zip(named, rule, strict=True) if kind == "---")
            yield _Row(begin, (section, names, seen[section, names]), named)
            seen[section, names] += 1


def _without_origin(text: str) -> str:
    """Leave out the paragraph that says which command wrote the file."""
    return re.sub(r"(?ms)^Written by .*?\n(\n|\Z)", "", text)


def _footer(page: str, count: int, slow: float, found: list[str]) -> Iterator[str]:
    here = importlib.metadata.version("jax")
    if not page:
        yield f"No page shows these figures. Measured with JAX {here}."
        return
    origin = re.search(r"(?ms)^Written by (.*?)(\n\n|\Z)", page)[1]
    measured = re.findall(r"Measured on .*? with JAX (\S+)\.", page)
    yield f"In brackets: what the pages show, if it differs. It is from {' '.join(origin.split())}"
    yield from re.findall(r"(?m)^.*Measured on .*? with JAX \S+\.", page)
    if set(measured) != {here}:
        yield (
            f"JAX here: {here}, another version. It compiles other programs, so that times and "
            "memory may differ."
        )
        return
    end = ":" if found else "."
    yield f"JAX here: {here}, the same. Times are {slow:.2g} times the page's."
    verb = "does" if len(found) == 1 else "do"
    yield f"{count} figures compared; {len(found)} {verb} not agree{end}"
    yield from (f"  {words}" for words in found)
