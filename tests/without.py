# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Leave out an extension, and see that nothing else needs it: ``tox -e without``.

Each folder or file of `rankax.ext` that no other file of the library imports is deleted from a
copy of the library, one at a time, with the lines that import it. Then the tests run on the copy.
A test that fails because it uses what is gone says so (`GONE`); any other failure is a fault.

Arguments: names of extensions (all by default), then ``--`` and arguments of pytest.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src"
WITH = {"blocks": ("stream", "xarray")}  # what is built on an extension, and goes with it
LOADERS = ("rankax/ext/__init__.py", "rankax/__init__.py", "rankax/plans.py")
# How a test fails that uses a method, a name or a file of what was left out, unless the error names
# the extension or one of its options.
GONE = re.compile(
    r"no option is called|KeyError: '[a-z_]+'"
    r"|No module named 'rankax\.|cannot import name|has no attribute"
)


def module_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return the imports of a file, except those for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def names_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}


def is_in(name: str, extension: str) -> bool:
    folders = f"ext.{extension}", *WITH.get(extension, ())
    return any(f"{name}.".startswith(f"rankax.{folder}.") for folder in folders)


def extensions() -> dict[str, set[str]]:
    """Return each extension, with the modules outside of it that import it."""
    found = {
        path.stem: set[str]()
        for path in sorted((SOURCE / "rankax/ext").iterdir())
        if not path.name.startswith("_")
    }
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() in LOADERS:
            continue
        module = module_of(path, SOURCE)
        for node in imports(ast.parse(path.read_text())):
            for extension in found:
                if not is_in(module, extension) and any(
                    is_in(n, extension) for n in names_of(node)
                ):
                    found[extension].add(module)
    return found


def leave_out(extension: str, source: Path) -> None:
    """Delete an extension, and what imports it in the files that load all of them."""
    for folder in (f"ext/{extension}", *WITH.get(extension, ())):
        place = source / "rankax" / folder
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    for loader in LOADERS:
        path = source / loader
        lines = path.read_text().splitlines()
        gone = set[str]()
        for node in imports(ast.parse(path.read_text())):
            if any(is_in(name, extension) for name in names_of(node)):
                gone |= {alias.asname or alias.name for alias in node.names}
                for at in range(node.lineno - 1, int(node.end_lineno or 0)):
                    lines[at] = ""
        text = [line for line in lines if line.strip().strip('",') not in gone]
        path.write_text("\n".join(text) + "\n")


def options_in(source: Path) -> set[str]:
    """Import the library, because each test would fail if that did, and return its options."""
    code = "import rankax; print(*rankax.core.options.OPTIONS)"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", code]
    return set(subprocess.check_output(command, env=environment, text=True).split())


def source_of(case: ET.Element) -> str:
    """Return the function of a test, with its cases."""
    path = PROJECT / f"{case.get('classname', '').replace('.', '/')}.py"
    body = ast.parse(path.read_text()).body if path.exists() else []
    name = case.get("name", "").partition("[")[0]
    return next((ast.unparse(node) for node in body if getattr(node, "name", "") == name), "")


def failures(extension: str, args: list[str]) -> list[str]:
    """Run the tests without an extension; return those that fail for another reason."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shutil.copytree(SOURCE, scratch / "src")
        leave_out(extension, scratch / "src")
        words = {extension.rstrip("s"), *options_in(SOURCE) - options_in(scratch / "src")}
        report = scratch / "report.xml"
        options = ["--tb=line", "--continue-on-collection-errors", f"--junitxml={report}"]
        quick = ["-n", "auto", "-m", "not slow and not weekly"]
        command = [sys.executable, "-m", "pytest", *options, *quick, *args]
        environment = {**os.environ, "PYTHONPATH": str(scratch / "src")}
        subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL)
        cases = [*ET.parse(report).iter("testcase")]
    other: list[str] = []
    written = re.compile(rf"\b({'|'.join(words)})(=|')")  # as an option
    for case in cases:
        for part in (*case.findall("failure"), *case.findall("error")):
            text = f"{part.get('message')} {part.text}"
            where = f"{case.get('classname')}::{case.get('name')}: {text[:300]}"
            # Of a package in another process, no reason is seen.
            names_it = any(word in where for word in words) or written.search(source_of(case))
            other += [] if names_it or GONE.search(text) or "CalledProcess" in text else [where]
    print(f"without {extension}: {len(cases)} tests, {len(other)} fail for another reason")
    print(*other, sep="\n", flush=True)
    return other


def main() -> None:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    names, args = given[:at], given[at + 1 :]
    found = extensions()
    for name, users in found.items():
        if users:
            print(f"{name} stays: {', '.join(sorted(users))}")
    faults = [
        fault
        for name in names or [name for name, users in found.items() if not users]
        for fault in failures(name, args or ["tests"])
    ]
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
