# SPDX-License-Identifier: MIT
"""The rooms of the library, their order and their sizes, as CONTRIBUTING.md describes them.

Docstrings do not count as lines; nor do comments and blank lines where lines of code are counted.
"""

import ast
import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rankax
from helpers import codes_entered
from rankax import auto_vmap

SOURCE = Path(rankax.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
PROJECT = Path(__file__).parents[1]

# The rooms of the core, in their order. What surrounds it, the features, has no order, but that the
# page `pipeline.py` imports them.
CORE = [
    *("_errors", "_static", "core/base", "core/declare", "core/trace", "core/plan"),
    *("core/protocols", "core/loop", "core/reduce", "core/walk", "core"),
]
MOST_FILES_IN_A_FOLDER = 12  # and an `__init__.py`
MOST_LINES_OF_A_FUNCTION = 60  # of the page `pipeline.py`: one screen

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


@pytest.mark.parametrize("name", sorted(imported_files("pipeline.py")))
def test_what_the_page_imports_knows_nothing_above_it(name):
    above = {"pipeline.py", "ext/jit.py", *(file for file in FILES if file.startswith("_front/"))}
    assert all_imported_files(name) & above == set()


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


def shown_functions() -> list[str]:
    """Return the functions of `pipeline.py` that "How it works" includes, in its order."""
    page = (PROJECT / "docs" / "how_it_works.md").read_text()
    block = r"^```\{literalinclude\} \.\./src/rankax/pipeline\.py\n(?::.*\n)*:pyobject: (\w+)\n```$"
    return re.findall(block, page, re.MULTILINE)


def test_how_it_works_shows_the_page_itself():
    defined = {node.name: node for node in TREES["pipeline.py"].body if hasattr(node, "name")}
    shown = shown_functions()
    assert shown[0] == "evaluate"
    assert len(shown) >= 3
    assert [name for name in shown if name not in defined] == []
    long = {name: node.end_lineno - node.lineno for name, node in defined.items()}
    assert {name: n for name, n in long.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


def calls_in(fun) -> list[tuple[str, str]]:
    """Return file and function of each call of the library's own functions."""
    return [
        (Path(code.co_filename).relative_to(SOURCE).as_posix(), code.co_qualname)
        for code in codes_entered(fun)
        if code.co_filename.startswith(f"{SOURCE}/") and code.co_name not in INLINED
    ]


INLINED = "<listcomp>", "<setcomp>", "<dictcomp>"  # no calls from Python 3.12 on

X, Y = jnp.ones((20, 3)), jnp.ones(20)


def item(x, y):
    return jnp.tanh(x @ x) + y


def until_nine(y):
    return jax.lax.while_loop(lambda z: z < 9, lambda z: z * (1 + y), 1 + y)


def in_chunks(**options):
    return auto_vmap(1, 0, chunk_size=4, **options)(item)


def a_call(kind):
    """Return a call of a new kernel."""
    kernel = auto_vmap(1, 0)(item) if kind == "plain" else in_chunks(**OPTIONS.get(kind, {}))
    if kind == "gradient":
        return functools.partial(jax.grad(lambda x, y: jnp.sum(kernel(x, y))), X, Y)
    if kind == "lanes":
        return functools.partial(auto_vmap(0, lockstep=False, chunk_size=4)(until_nine), Y)
    if kind == "ragged":
        items = rankax.Ragged.from_list([X[:2], X[:5]])
        return functools.partial(auto_vmap(x="n 3", chunk_size=4)(lambda x: jnp.sum(x)), items)
    return functools.partial(kernel, X, Y)


OPTIONS = {"reduced": {"reduce": "sum"}, "jit": {"jit": True}}
# Files, distinct functions and calls: of a first call at most, and of the same call again.
MOST = {
    "plain": ((14, 96, 134), (13, 63, 74)),
    "chunked": ((21, 275, 668), (14, 107, 168)),
    "reduced": ((25, 348, 764), (15, 119, 198)),
    "gradient": ((22, 288, 740), (14, 111, 191)),
    "lanes": ((25, 310, 1646), (14, 108, 170)),
    "ragged": ((29, 280, 2678), (22, 160, 481)),
    "jit": ((23, 273, 664), (7, 30, 34)),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", MOST)
def test_what_a_call_passes(kind):
    rankax.clear_caches()
    call = a_call(kind)
    for most in MOST[kind]:
        called = calls_in(call)
        passed = len({file for file, _ in called}), len({*called}), len(called)
        assert all(map(operator.le, passed, most)), passed


def test_a_chunked_call_takes_the_path_that_the_page_shows():
    calls = iter(calls_in(functools.partial(in_chunks(), X + 0.2824, Y)))
    # Each search goes on where the last one ended.
    assert [f for f in shown_functions() if ("pipeline.py", f) not in calls] == []
