# SPDX-License-Identifier: MIT
"""When a result was measured, at which commit, and with which JAX.

Each file of ``benchmarks/results`` ends with such a stamp, or has it under "measured". Whether the
figures still hold, a benchmark says: it compares what it finds with them (`page.py`).

Only the standard library is needed.
"""

import dataclasses
import datetime as dt
import importlib.metadata
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rankax"
_STAMP = re.compile(
    r"(?m)^Measured on (?P<date>\S+) at commit (?P<commit>.+), with JAX (?P<jax>\S+)\."
)


@dataclasses.dataclass(frozen=True)
class Stamp:
    """When, at which commit, and with which JAX."""

    date: str
    commit: str
    jax: str

    def __str__(self) -> str:
        return f"Measured on {self.date} at commit {self.commit}, with JAX {self.jax}."


def now() -> Stamp:
    """Return the stamp of what was just measured."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    if _git("status", "--porcelain", str(SOURCE)):
        commit += " with changes"
    today = dt.date.today().isoformat()
    return Stamp(today, commit, importlib.metadata.version("jax"))


def write(path: Path, text: str) -> None:
    """Write a table of results, and the stamp below it."""
    path.write_text(f"{text.rstrip()}\n\n{now()}\n", "utf-8")


def read(text: str) -> Stamp:
    """Return the stamp of a table of results."""
    return Stamp(**_STAMP.search(text).groupdict())


def _git(*arguments: str) -> str:
    """Return what git prints; nothing in a copy that has no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
