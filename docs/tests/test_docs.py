# SPDX-License-Identifier: MIT
"""The examples in README.md and in every page of docs/ run, and print what the page shows."""

import doctest
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import rankax

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in page.parts and page.is_file() and ">>> " in page.read_text()
]

FIRST_CHUNKED = ["index", "tutorial", "howto/chunk_size"]  # where a reader meets chunks, and README


def missing(page: Path) -> list[str]:
    """What a page imports and this environment lacks: libraries that docs/coming compares with."""
    lines = re.findall(r"(?m)^>>> (?:import (.*)|from (\S+) import .*)$", page.read_text())
    names = {name.split()[0].split(".")[0] for line in lines for name in "".join(line).split(", ")}
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def runnable(text: str) -> str:
    """The page as doctest reads it: no fences, and blank lines within an output spelled out."""
    page = re.sub(
        r"^```python\n.*?^```$",
        lambda block: re.sub(r"\n\n(?=(?!>>>|```|\n).)", r"\n<BLANKLINE>\n", block[0]),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"^\s*(```|:::).*$", "", page, flags=re.MULTILINE)


# What a compiler needs differs between versions of JAX: numbers within a factor of 3. The page does
# not show the comment.
ABOUT = doctest.register_optionflag("ABOUT")


class Checker(doctest.OutputChecker):
    """Compares output as printed, but for the place of a kernel, which here is a page."""

    def check_output(self, want, got, optionflags):
        want, got = (re.sub(r"\) at .+:\d+: ", ") at FILE: ", text) for text in (want, got))
        if optionflags & ABOUT:
            number = r"(?<![\w.])\d[\d,_]*(?:\.\d+)?"
            wanted, found = ([_number(n) for n in re.findall(number, text)] for text in (want, got))
            if all(w <= 3 * g and g <= 3 * w for w, g in zip(wanted, found, strict=False)):
                want, got = (re.sub(number, "NUMBER", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("9.6 MB", "4.1 MB", True),
        ("9.6 MB", "3.1 MB", False),
        ("9.6 MB", "9.6 kB", False),
        ("40,000", "80,000", True),
        ("0", "0", True),
        ("0", "1", False),
        ("1 2", "1", False),
    ],
)
def test_about_allows_a_factor_of_three(want, got, same):
    assert Checker().check_output(f"{want}\n", f"{got}\n", ABOUT) is same
    assert Checker().check_output(f"{want}\n", f"{got}\n", 0) is (want == got)


def test_blank_lines_in_an_output_are_part_of_it():
    page = "a\n\n```python\n>>> print('x\\n\\ny')\nx\n\ny\n\n>>> 1\n1\n\n```\n\nb\n"
    examples = doctest.DocTestParser().get_examples(runnable(page))
    assert [example.want for example in examples] == ["x\n<BLANKLINE>\ny\n", "1\n"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_teaches_a_kernel_that_compiles_at_every_call(page):
    code = "\n".join(re.findall(r"(?m)^(?:>>> |\.\.\. |@)(.*)$", page.read_text()))
    kernels = re.findall(r".*auto_vmap\([^()]*\bchunk_size=[^()]*\).*", code)
    assert [line for line in kernels if "jit=True" not in line and "jax.jit(" not in line] == []
    if page in map(ROOT.joinpath, ["README.md", *(f"docs/{name}.md" for name in FIRST_CHUNKED)]):
        assert kernels
        assert "recompiled" in " ".join(page.read_text().split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_wider_than_the_page(page):
    block = r"(?ms)^```(?:python|bash|text|\{code-cell\})\n(.*?)^```$"
    blocks = re.findall(block, page.read_text())
    lines = [line for block in blocks for line in block.splitlines() if "alt: " not in line]
    assert [line for line in lines if len(line) > 103] == []


# ASE 3.29, with NumPy 2.5.
@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_print_what_the_page_shows(page):
    name = str(page.relative_to(ROOT))
    if page.parent.name == "coming" and missing(page):
        pytest.skip(f"{', '.join(missing(page))}: in the docs environment only")
    examples = doctest.DocTestParser().get_doctest(
        runnable(page.read_text()), {}, name, str(page), 0
    )
    failures: list[str] = []
    # As a reader has it, not as this session sets it for its own tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runner = doctest.DocTestRunner(Checker(), optionflags=doctest.REPORT_NDIFF)
        result = runner.run(examples, out=failures.append)
    assert result.attempted > 0
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", ["auto_vmap", "options"])
def test_the_reference_shows_the_signature_that_there_is(name):
    text = (ROOT / f"docs/reference/{name}.md").read_text()
    (shown,) = re.findall(rf"autofunction:: {name}(\(.*\))\n", text)
    assert shown == str(inspect.signature(getattr(rankax, name)))


@pytest.mark.parametrize(
    "index", ["howto/index.md", "coming/index.md", "gallery/index.md", "reference.md"]
)
def test_every_page_is_in_the_menu(index):
    text = (ROOT / "docs" / index).read_text()
    (menu,) = re.findall(r"```\{toctree\}\n:hidden:\n\n(.*?)\n```", text, flags=re.DOTALL)
    folder = ROOT / "docs" / index.removesuffix(".md").removesuffix("index")
    pages = {page.stem for page in folder.glob("*.md")} - {"index"}
    assert {name.removeprefix("reference/") for name in menu.split()} == pages


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"auto(?:function|class|exception):: ([\w.]+)", pages))
    assert shown >= set(rankax.__all__) - {"caches", "plans", "reductions"}
    named = set(re.findall(r"\w+", (ROOT / "docs/reference/reductions.md").read_text()))
    others = {"Reduction", "MomentsResult", "TopKResult"}  # the base class and two results
    assert named >= set(rankax.reductions.__all__) - others


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import docstring_notes

    return docstring_notes


def test_the_notes_of_a_docstring_are_sections_of_its_page(notes):
    names = notes.marked(ROOT / "docs")
    assert {"rankax.auto_vmap", "rankax.stream.run"} <= names
    for name in names:
        page = notes.sections(name)
        assert page.startswith("## Notes\n")
        assert page.count("\n### ") >= 2
        paragraphs = re.findall(r"(?s)currentmodule:: rankax[.a-z]*\n\n(.*?)\n```", page)
        docstring = inspect.getdoc(pkgutil.resolve_name(name))
        rest = notes.without_notes(docstring)
        assert "Notes\n-----" not in rest
        assert all(text in docstring and text not in rest for text in paragraphs)
        assert ">>> " in rest  # the examples, which come after the notes, stay
