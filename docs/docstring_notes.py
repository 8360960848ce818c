# SPDX-License-Identifier: MIT
"""A Sphinx extension: the notes of a docstring as sections of a page, which its menu shows.

A line ``<!-- notes: rankax.auto_vmap -->`` in a page becomes the section "Notes" of that docstring.
A paragraph that begins with ``*Title.*`` begins a section of that title. Where autodoc shows the
docstring, its notes are left out.
"""

import inspect
import pkgutil
import re
from pathlib import Path

__all__ = ["marked", "sections", "setup", "without_notes"]

_MARK = re.compile(r"(?m)^<!-- notes: ([\w.]+) -->$")
_NOTES = re.compile(r"(?ms)^Notes\n-----\n(.*?)(?=^\w[\w ]*\n-{3,}\n|\Z)")
_TITLE = re.compile(r"(?m)^\*([^*\n]+)\.\*\s+")


def marked(pages: Path) -> set[str]:
    """The names whose notes stand in some page."""
    return {name for page in pages.rglob("*.md") for name in _MARK.findall(page.read_text("utf-8"))}


def without_notes(docstring: str) -> str:
    """A docstring without its notes."""
    return _NOTES.sub("", docstring)


def sections(name: str) -> str:
    """The notes of what has this name, as sections in Markdown."""
    (notes,) = _NOTES.findall(inspect.getdoc(pkgutil.resolve_name(name)))
    head, *rest = _TITLE.split(notes)
    parts = [_rst(name, head)] if head.strip() else []
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        parts += [f"### {title}", _rst(name, text)]
    return "\n\n".join(["## Notes", *parts])


def _rst(name: str, text: str) -> str:
    module = name.rpartition(".")[0]
    return f"```{{eval-rst}}\n.. py:currentmodule:: {module}\n\n{text.strip()}\n```"


def setup(app):
    """Cut notes from docstrings before napoleon reads them, and put them into pages."""
    names = marked(Path(app.srcdir))

    def docstring(_app, _what, name, _obj, _options, lines):
        if name in names:
            lines[:] = without_notes("\n".join(lines)).split("\n")

    def page(_app, _name, source):
        source[0] = _MARK.sub(lambda found: sections(found[1]), source[0])

    app.connect("autodoc-process-docstring", docstring, priority=400)
    app.connect("source-read", page, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
