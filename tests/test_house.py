# SPDX-License-Identifier: MIT
"""The rooms of the library, their order and their sizes, as CONTRIBUTING.md describes them.

Docstrings do not count as lines; nor do comments and blank lines where lines of code are counted.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rankax
from helpers import codes_entered
from rankax._options import Options
from rankax.core.protocols import NO_RULES

SOURCE = Path(rankax.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
PROJECT = Path(__file__).parents[1]

# The rooms of the core, in their order. What surrounds it, the extensions, has no order.
CORE = [
    *("_errors", "_static", "core/base", "core/declare", "core/trace", "core/plan", "core/hooks"),
    *("core/loop", "core/reduce", "core/options", "core/call", "core"),
]
MOST_FILES_IN_A_FOLDER = 12  # and an `__init__.py`

TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def nodes(name: str, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(TREES[name]) if isinstance(node, kinds))


def room(name: str) -> str:
    """Return what a file belongs to: its folder, or itself."""
    place = "/".join(name.split("/")[: 2 if name.startswith(("core/", "ext/")) else 1])
    return place.removesuffix(".py").removesuffix("/__init__")


# Imports.


def imported_modules(name: str) -> Iterator[str]:
    """Return every module that a file imports, also in functions and for type checkers only."""
    for node in nodes(name, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{name}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imported_files(name: str) -> set[str]:
    """Return the files of the library that a file imports itself."""
    modules = [module.split(".") for module in imported_modules(name)]
    paths = ["/".join(path) or "__init__" for package, *path in modules if package == "rankax"]
    return {f"{path}.py" for path in paths} & FILES.keys()


def all_imported_files(name: str) -> set[str]:
    """Return the files of the library that a file imports, itself or through others."""
    files: set[str] = set()
    waiting = [name]
    while waiting:
        new = imported_files(waiting.pop()) - files
        files |= new
        waiting += new
    return files


def of_package(package: str, modules: Iterable[str]) -> list[str]:
    return [module for module in modules if module.split(".")[0] == package]


IN_CORE = [name for name in FILES if room(name) in CORE]


@pytest.mark.parametrize("name", FILES)
def test_files_import_without_cycles(name):
    assert name not in all_imported_files(name)


@pytest.mark.parametrize("name", IN_CORE)
def test_the_core_imports_only_from_a_room_and_earlier_rooms(name):
    place = CORE.index(room(name))
    rooms = {file: room(file) for file in imported_files(name)}
    assert [x for x in rooms if rooms[x] not in CORE or CORE.index(rooms[x]) > place] == []


@pytest.mark.parametrize("name", [name for name in FILES if room(name) == "core/plan"])
def test_planning_imports_no_jax(name):
    for file in {name, *all_imported_files(name)}:
        assert of_package("jax", imported_modules(file)) == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_uses_nothing_private_of_jax(name):
    modules = list(imported_modules(name))
    used = of_package("jax", modules)
    for node in nodes(name, ast.Attribute):
        if (path := ast.unparse(node)).split(".")[0] in ("jax", "jnp", "lax"):
            used.append(path)
    assert [path for path in used if re.search(r"\._(?!_)", path)] == []
    assert of_package("jaxlib", modules) == []


# Sizes.


def test_folders_are_small():
    folders = Counter(room(name) for name in FILES if not name.endswith("__init__.py"))
    assert {name: n for name, n in folders.items() if n > MOST_FILES_IN_A_FOLDER} == {}


def test_nothing_but_code_is_published():
    files = [path for path in SOURCE.rglob("*") if path.is_file() and path.parent.name[:2] != "__"]
    assert {path.suffix for path in files} == {".py", ".typed"}


def test_no_two_classes_share_a_name():
    classes = (node for name in FILES for node in nodes(name, ast.ClassDef))
    names = Counter(node.name.lstrip("_") for node in classes)
    assert [name for name, count in names.items() if count > 1] == []


def test_names_of_tests_are_short():
    tests = [*PROJECT.glob("tests/**/test_*.py"), *PROJECT.glob("docs/tests/test_*.py")]
    assert tests
    names = (name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text()))
    assert [name for name in names if len(name) > 60] == []


# Pages that describe the house.


def test_contributing_lists_the_rooms_of_the_core():
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"^\| Room .*?\n\n", page, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([\w/]+?)(?:/|\.py)`", cell)]
    assert listed == CORE[:-1]
    assert {*listed} == {room(name) for name in IN_CORE} - {"core"}


def drawn_path() -> list[tuple[str, str]]:
    """Return file and function of each line of the drawing in "How it works"."""
    page = (PROJECT / "docs" / "how_it_works.md").read_text()
    (drawing,) = re.findall(r"^```text\n(step .*?)^```", page, re.MULTILINE | re.DOTALL)
    return [(file, function) for function, file in re.findall(r"([\w.]+) +([\w/]+\.py)", drawing)]


def calls_in(fun) -> list[tuple[str, str]]:
    """Return file and function of each call of the library's own functions."""
    return [
        (
            Path(code.co_filename).relative_to(SOURCE).as_posix(),
            code.co_qualname.split("<locals>.")[-1],
        )
        for code in codes_entered(fun)
        if code.co_filename.startswith(f"{SOURCE}/")
    ]


def until_positive(a, b):
    return jax.lax.while_loop(lambda x: x < 0, lambda x: x + b.sum(), a[0] * b.sum())


FIRST_CALLS = {
    "plain": (13, {}),
    "chunked": (18, {"chunk_size": 10}),
    "reduced": (22, {"chunk_size": 10, "reduce": "sum"}),
    "lanes": (22, {"chunk_size": 10, "lockstep": False}),
    "ragged": (26, {"chunk_size": 10, "b": "n 3"}),
}


@pytest.mark.parametrize("kind", FIRST_CALLS)
def test_a_first_call_passes_few_files(kind):
    most, options = FIRST_CALLS[kind]
    args = jnp.ones((4, 1, 3)), jnp.ones((25, 3))
    if kind == "ragged":
        args = jnp.ones(3), rankax.Ragged.from_list([args[1][:2], args[1][:5]])
    rankax.clear_caches()
    called = calls_in(lambda: rankax.auto_vmap(a=1, **{"b": 1, **options})(until_positive)(*args))
    files = {file for file, _ in called}
    assert len(files) <= most, files


def test_a_chunked_call_takes_the_path_that_the_page_draws():
    kernel = rankax.auto_vmap(a=1, b=1, chunk_size=10)(lambda a, b: jnp.tanh(a @ b) + 0.2824)
    called = calls_in(lambda: kernel(jnp.ones((4, 1, 3)), jnp.ones((25, 3))))
    drawn = drawn_path()
    assert len({file for file, _ in drawn}) <= 10
    if Options().rules is NO_RULES:
        drawn.remove(("ext/xla_cpu/rules.py", "XlaCpu.tiles"))
    calls = iter(called)  # each search goes on where the last one ended
    assert [step for step in drawn if step not in calls] == []
    assert len(drawn) >= 8
