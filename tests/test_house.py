# SPDX-License-Identifier: MIT
"""The order of the source files, and what each may hold, as CONTRIBUTING.md says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankax

ROOT = Path(rankax.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
ORDER = [
    *["_errors", "_static", "_base", "_declare", "_trace", "_plan", "_progress", "_fit", "_loop"],
    *["_devices", "_scan", "_reduce", "_options", "_call", "_tune", "_blocks", "_front"],
    *["reductions", "xarray", "__init__"],
]
MOST_LINES = 60


def tree_of(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def part(name: str) -> str:
    """What a file belongs to: its folder, or itself."""
    return name.split("/")[0].removesuffix(".py")


def imported_modules(name: str) -> Iterator[str]:
    """Every module that a file imports, also in functions and for type checkers only."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_files(name: str) -> set[str]:
    """Those of the library, without those that these import."""
    ours = [module.split(".")[1:] for module in imported_modules(name) if part_of_rankax(module)]
    return {f"{'/'.join(path) or '__init__'}.py" for path in ours} & SOURCES.keys()


def part_of_rankax(module: str) -> bool:
    return module.split(".")[0] == "rankax"


def all_imported_files(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = imported_files(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def test_every_file_has_its_place():
    assert {part(name) for name in SOURCES} == set(ORDER)


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_imports_only_from_its_folder_and_from_what_stands_before_it(name):
    own = ORDER.index(part(name))
    late = [other for other in imported_files(name) if ORDER.index(part(other)) > own]
    assert late == []
    assert name not in all_imported_files(name)  # no cycle among the files of a folder


@pytest.mark.parametrize("name", [name for name in SOURCES if part(name) == "_plan"])
def test_planning_imports_no_jax(name):
    for file in {name, *all_imported_files(name)}:
        assert [module for module in imported_modules(file) if module.split(".")[0] == "jax"] == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_fits_a_screen(name):
    long = [
        f"{node.name}: {lines}"
        for node in ast.walk(tree_of(name))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := lines_of(node)) > MOST_LINES
    ]
    assert long == []


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - (docstring.end_lineno - docstring.lineno + 1)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_private_of_jax_is_used(name):
    modules = [module for module in imported_modules(name) if module.split(".")[0] == "jax"]
    used = [
        ast.unparse(node) for node in ast.walk(tree_of(name)) if isinstance(node, ast.Attribute)
    ]
    names = modules + [path for path in used if path.split(".")[0] in ("jax", "jnp", "lax")]
    assert [path for path in names if re.search(r"\._(?!_)", path)] == []
    assert [module for module in imported_modules(name) if module.startswith("jaxlib")] == []
