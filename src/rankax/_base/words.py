# SPDX-License-Identifier: MIT
"""Counts, lists and tables, worded for messages."""

from collections.abc import Collection, Sequence


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 axis``, ``2 core axes``, ``3 leaves``."""
    irregular = {"axis": "axes", "core axis": "core axes", "leaf": "leaves", "entry": "entries"}
    return f"{count} {noun if count == 1 else irregular.get(noun, noun + 's')}"


def listed(items: Sequence[str], conjunction: str = "and") -> str:
    """Join words into a list: ``a, b and c``."""
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Collection[int]) -> str:
    """Align rows under a header; marked rows begin with ``>``."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(lead: str, cells: Sequence[str]) -> str:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return (lead + padded).rstrip()

    body = [line("  > " if i in marked else "    ", row) for i, row in enumerate(rows)]
    return "\n".join([line("    ", header), *body])


def shortened(names: Sequence[str]) -> str:
    """Join names by commas; after the first few, give only the number of the others."""
    return first_of(names if len(names) <= 6 else names[:4], len(names))


def first_of(names: Sequence[str], count: int) -> str:
    """Join the first of ``count`` names by commas, and give the number of the others."""
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + more


def with_article(noun: str) -> str:
    """Return a noun with its article: ``a str``, ``an object``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
