# SPDX-License-Identifier: MIT
"""A Sphinx extension: examples that run where they are pasted, in a bare Python prompt too.

That prompt ends a definition at the first empty line, and needs one. So an example gets a line of
`...` behind each definition, and loses those within one. What the copy button copies then runs.
"""

import codeop
import re

__all__ = ["pasteable", "setup"]

_PROMPT = re.compile(r"^(\s*)(>>> |\.\.\. |\.\.\.$)(.*)$")


def pasteable(lines: list[str]) -> list[str]:
    """Return the lines of a page or docstring with each doctest as a prompt would show it."""
    shown: list[str] = []
    statement: list[str] = []
    indent = ""
    for line in [*lines, ""]:
        found = _PROMPT.match(line)
        more = found is not None and found[2] != ">>> "
        if statement and not more:
            if _is_open(statement):
                shown.append(f"{indent}...")
            statement = []
        if found:
            if more and not found[3].strip():
                continue  # put back above, where the statement needs it
            indent = found[1]
            statement.append(found[3])
        shown.append(line)
    return shown[:-1]


def _is_open(statement: list[str]) -> bool:
    """Whether a prompt would wait for an empty line."""
    try:
        return codeop.compile_command("\n".join(statement), symbol="single") is None
    except SyntaxError:
        return False  # no Python; nothing to wait for


def setup(app):
    """Change pages as they are read, and docstrings as they are taken."""

    def page(_app, _name, source):
        source[0] = "\n".join(pasteable(source[0].split("\n")))

    def docstring(_app, _what, _name, _obj, _options, lines):
        lines[:] = pasteable(lines)

    app.connect("source-read", page)
    app.connect("autodoc-process-docstring", docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
