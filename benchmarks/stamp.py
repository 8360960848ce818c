# SPDX-License-Identifier: MIT
"""When a result was measured, at which commit, and a fingerprint of the code that it measured.

Each file of ``benchmarks/results`` ends with such a stamp, or has it under "measured". The build of
the documentation lists the results that are older than the code.

Only the standard library is needed.
"""

import ast
import dataclasses
import datetime as dt
import functools
import hashlib
import importlib.metadata
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rankax"
_STAMP = re.compile(
    r"(?m)^Measured on (?P<date>\S+) at commit (?P<commit>.+), with JAX (?P<jax>\S+)\."
    r"(?: <!-- source: (?P<source>\w+) -->)?$"
)


@dataclasses.dataclass(frozen=True)
class Stamp:
    """When, at which commit, with which JAX, and the fingerprint of the code, if there was one."""

    date: str
    commit: str
    jax: str
    source: str | None = None

    def __str__(self) -> str:
        return f"Measured on {self.date} at commit {self.commit}, with JAX {self.jax}."

    def is_older(self) -> bool:
        """Whether the code is not the one that was measured, as far as anybody knows."""
        return self.source != fingerprint()


def now() -> Stamp:
    """Return the stamp of what was just measured."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    if _git("status", "--porcelain", str(SOURCE)):
        commit += " with changes"
    today = dt.date.today().isoformat()
    return Stamp(today, commit, importlib.metadata.version("jax"), fingerprint())


def write(path: Path, text: str, stamp: Stamp | None = None) -> None:
    """Write a table of results, and the stamp below it."""
    stamp = stamp or now()
    path.write_text(f"{text.rstrip()}\n\n{stamp} <!-- source: {stamp.source} -->\n", "utf-8")


def read(text: str) -> Stamp:
    """Return the stamp of a table of results."""
    return Stamp(**_STAMP.search(text).groupdict())


@functools.cache
def fingerprint(source: Path = SOURCE) -> str:
    """Hash the code of the library, without what cannot change a figure.

    That is comments, docstrings, empty lines, and the version.
    """
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        code = "\n".join(_code(path.read_text(encoding="utf-8")))
        digest.update(f"{path.relative_to(source).as_posix()}\n{code}\n".encode())
    return digest.hexdigest()[:12]


def _code(text: str) -> list[str]:
    docstrings = _docstring_lines(text)
    lines = [line.strip() for n, line in enumerate(text.split("\n"), 1) if n not in docstrings]
    return [line for line in lines if line and not line.startswith(("#", "__version__ = "))]


def _docstring_lines(text: str) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            found.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def _git(*arguments: str) -> str:
    """Return what git prints; nothing in a copy that has no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
