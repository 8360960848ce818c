# SPDX-License-Identifier: MIT
"""The rooms of the library, their order and their sizes, as CONTRIBUTING.md describes them.

Docstrings do not count as lines; nor do comments and blank lines where lines of code are counted.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rankax
from rankax._loop.rules import NO_RULES
from rankax._options import Options

SOURCE = Path(rankax.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
PROJECT = Path(__file__).parents[1]

# The rooms in their order, with the most lines of code that each may have. A change that needs more
# makes room first; if it raises the number instead, its commit says why.
MOST_LINES_OF_CODE = {
    "_errors": 3,
    "_static": 17,
    "_base": 594,
    "_declare": 885,
    "_trace": 1082,
    "_plan": 961,
    "_progress": 192,
    "_fit": 202,
    "_loop": 610,
    "_devices": 364,
    "_lockstep": 746,
    "_reduce": 1406,
    "_xla_cpu": 544,
    "_scan": 976,
    "_options": 211,
    "_call": 2088,
    "_tune": 512,
    "_blocks": 693,
    "_front": 1320,
    "reductions": 29,
    "plans": 19,
    "xarray": 339,
    "__init__": 44,
    "stream": 547,
    "__main__": 82,
}
ROOMS = [*MOST_LINES_OF_CODE]
MOST_FILES_IN_A_FOLDER = 12  # and an `__init__.py`
MOST_LINES = {ast.Module: 400, ast.ClassDef: 200, ast.FunctionDef: 80}

Node = ast.Module | ast.ClassDef | ast.FunctionDef
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def nodes(name: str, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(TREES[name]) if isinstance(node, kinds))


def room(name: str) -> str:
    """Return what a file belongs to: its folder, or itself."""
    return name.split("/")[0].removesuffix(".py")


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


def test_every_file_belongs_to_a_room():
    assert {room(name) for name in FILES} == set(ROOMS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_from_its_room_and_earlier_rooms(name):
    place = ROOMS.index(room(name))
    assert [file for file in imported_files(name) if ROOMS.index(room(file)) > place] == []
    assert name not in all_imported_files(name)  # no cycle within a room


@pytest.mark.parametrize("name", [name for name in FILES if room(name) == "_plan"])
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


def docstring_lines(node: Node) -> set[int]:
    documented = (part for part in ast.walk(node) if isinstance(part, Node) and part.body)
    first = (part.body[0] for part in documented if ast.get_docstring(part) is not None)
    return {line for text in first for line in range(text.lineno, text.end_lineno + 1)}


def length(node: Node) -> int:
    lines = range(getattr(node, "lineno", 1), node.body[-1].end_lineno + 1)
    return len(set(lines) - docstring_lines(node))


def lines_of_code(name: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(FILES[name].read_text()).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(TREES[name]))


@pytest.mark.parametrize("name", FILES)
def test_functions_classes_and_files_are_short(name):
    lengths = [
        (getattr(node, "name", name), length(node), most)
        for kind, most in MOST_LINES.items()
        for node in nodes(name, kind)
    ]
    assert [(what, lines) for what, lines, most in lengths if lines > most] == []


def test_folders_and_rooms_are_small():
    folders = Counter(room(name) for name in FILES if not name.endswith("__init__.py"))
    assert {name: n for name, n in folders.items() if n > MOST_FILES_IN_A_FOLDER} == {}
    lines = Counter(dict.fromkeys(ROOMS, 0))
    for name in FILES:
        lines[room(name)] += lines_of_code(name)
    too_many = [
        f"{name}: {n} lines of code, at most {most}"
        for name, most in MOST_LINES_OF_CODE.items()
        if (n := lines[name]) > most
    ]
    assert not too_many, "make room, or raise MOST_LINES_OF_CODE and say why in the commit"


def test_nothing_but_code_is_published():
    files = [path for path in SOURCE.rglob("*") if path.is_file() and path.parent.name[:2] != "__"]
    assert {path.suffix for path in files} == {".py", ".css", ".typed"}


def test_streams_are_a_small_part():
    files = [name for name in FILES if room(name) in ("stream", "__main__")]
    assert sum(map(lines_of_code, [*files, "_blocks/on_streamed.py"])) <= 710


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


def test_contributing_lists_the_rooms_in_their_order():
    (table,) = re.findall(
        r"^\| Room .*?\n\n", (PROJECT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]
    assert listed == ROOMS


def drawn_path() -> list[tuple[str, str]]:
    """Return file and function of each line of the drawing in "How it works"."""
    page = (PROJECT / "docs" / "how_it_works.md").read_text()
    (drawing,) = re.findall(r"^```text\n(step .*?)^```", page, re.MULTILINE | re.DOTALL)
    return [(file, function) for function, file in re.findall(r"([\w.]+) +(\w+/\w+\.py)", drawing)]


def calls_in(fun) -> list[tuple[str, str]]:
    """Return file and function of each call of the library's own functions."""
    called: list[tuple[str, str]] = []

    def record(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(f"{SOURCE}/"):
            file = Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix()
            called.append((file, frame.f_code.co_qualname.split("<locals>.")[-1]))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        fun()
    finally:
        sys.setprofile(before)
    return called


def until_positive(a, b):
    return jax.lax.while_loop(lambda x: x < 0, lambda x: x + b[0], a @ b)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 16),
        *(({"reduce": name}, 19) for name in ("sum", "logsumexp", "argmax")),
        ({"lockstep": False}, 22),
        ({"lockstep": False, "reduce": "sum"}, 22),
    ],
    ids=str,
)
def test_an_eager_call_passes_few_files(options, most):
    kernel = rankax.auto_vmap(a=1, b=1, chunk_size=10, **options)(until_positive)
    args = jnp.ones((4, 1, 3)), jnp.ones((25, 3))
    kernel(*args)
    files = {file for file, _ in calls_in(lambda: kernel(*args))}
    assert len(files) <= most, files


def test_a_chunked_call_takes_the_path_that_the_page_draws():
    kernel = rankax.auto_vmap(a=1, b=1, chunk_size=10)(lambda a, b: jnp.tanh(a @ b) + 0.2824)
    called = calls_in(lambda: kernel(jnp.ones((4, 1, 3)), jnp.ones((25, 3))))
    drawn = drawn_path()
    assert len({file for file, _ in drawn}) <= 10
    if Options().rules is NO_RULES:
        drawn.remove(("_xla_cpu/rules.py", "XlaCpu.tiles"))
    calls = iter(called)  # each search goes on where the last one ended
    assert [step for step in drawn if step not in calls] == []
    assert len(drawn) >= 8
