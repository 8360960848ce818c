# SPDX-License-Identifier: MIT
"""What the build of the documentation does not see: that pages check themselves, and alt texts.

The build runs every `{code-cell}`; here those of the pages outside the gallery run too, as far as
the test environment has what they import.
"""

import importlib.util
import re
from pathlib import Path

import jax
import pytest

from test_prompts import CELL, refused

DOCS = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(DOCS)): page
    for page in sorted(DOCS.rglob("*.md"))
    if "_build" not in page.parts and CELL.search(page.read_text())
}
GALLERY = sorted(name for name in PAGES if name.startswith("gallery/"))


def cells(name):
    """The options and the code of each cell of a page."""
    return CELL.findall(PAGES[name].read_text())


def imported(code):
    return set(re.findall(r"(?m)^(?:import|from) (\w+)", code))


def test_cells_are_found_with_and_without_options():
    assert len(GALLERY) == len([*(DOCS / "gallery").glob("*.md")]) - 1 >= 7
    assert "tutorial.md" in PAGES
    assert any(options for options, _ in cells("gallery/coil.md"))
    assert not any("```" in code for name in PAGES for _, code in cells(name))


@pytest.mark.parametrize("name", PAGES)
def test_page_runs_when_it_is_built(name):
    assert (
        PAGES[name]
        .read_text()
        .startswith("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n")
    )


@pytest.mark.parametrize("name", GALLERY)
def test_gallery_page_begins_with_its_picture_and_checks_itself(name):
    head, _ = PAGES[name].read_text().split("```{code-cell}", 1)
    ((described, caption),) = re.findall(
        r'```\{glue:figure\} picture\n:alt: "(.*)"\n\n(.*)\n```', head
    )
    assert len(described) > 40
    assert len(caption) > 40
    drawn = [options for options, code in cells(name) if "plt.subplots(" in code]
    assert drawn
    for options in drawn:  # the code is folded, and what else it shows has words
        assert "hide-input" in options
        assert "remove-output" in options or len(re.search(r'alt: "(.*)"', options)[1]) > 40
    _, check = PAGES[name].read_text().split("\n## Check\n")
    assert re.search(r"(?m)^ *(assert|np\.testing\.assert_)", check)


@pytest.mark.parametrize("name", sorted(set(PAGES) - set(GALLERY)))
def test_cells_outside_the_gallery_run(name):
    code = "\n".join(code for _, code in cells(name))
    if missing := sorted(p for p in imported(code) if importlib.util.find_spec(p) is None):
        pytest.skip(f"{', '.join(missing)}: run by the build of the documentation, not here")
    if "netket" in code and "P(" in code:
        pytest.skip("NetKet sets a mesh when it is imported: run by the build, not here")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code, name, "exec"), {})


# The gallery: what docs/notebooks.py makes of a page.


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import notebooks

    return notebooks


@pytest.mark.parametrize("name", GALLERY)
def test_the_cells_of_the_gallery_can_be_pasted(notebooks, name):
    page = notebooks.with_sources(PAGES[name].read_text())
    assert notebooks.unpasteable(page) == []
    for _, code in CELL.findall(page):
        assert refused(code) == [], code


def test_a_cell_gets_the_source_that_it_names(notebooks):
    (code,) = re.findall(
        r"(?s)x = 1\n(.*)\n```",
        notebooks.with_sources("x = 1\n# source: rays.py paint nearest\n```"),
    )
    assert code.startswith("def paint(mesh):\n")
    assert "\n\n\n# What a ray hits first: " in code
    assert code.endswith('reduce=Best("distance"), reduce_axis=-1, chunk_size=2**16)')
    position = notebooks.with_sources("# source: planets.py position ELEMENTS")
    assert "\n\n    a, e, inclination" not in position  # a prompt would end the function there
    assert "\n\n    Parameters\n" in position
    assert "Table 1" in position
    assert "fmt:" not in position


HIDDEN = "```{code-cell}\n:tags: [remove-cell]\n\nimport thumbnail\nx = 1\n```\n"


@pytest.mark.parametrize(
    ("code", "problems"),
    [
        ("import jax\nx = 2\nprint(x)", []),
        ("from rays import hit", ["a cell imports rays, a file of this repository"]),
        ("def f():\n    import thumbnail", ["a cell imports thumbnail, a file of this repository"]),
        ("print(x)", ["a cell uses x, which a hidden cell defines"]),
    ],
)
def test_a_cell_that_needs_more_than_its_page_is_named(notebooks, code, problems):
    assert notebooks.unpasteable(f"{HIDDEN}\n```{{code-cell}}\n{code}\n```\n") == problems


def test_a_page_is_a_notebook(notebooks):
    page = PAGES["gallery/water.md"].read_text()
    written = notebooks.notebook(page, {"land": "Land"})
    kinds = [cell["cell_type"] for cell in written["cells"]]
    assert kinds.count("code") == len(cells("gallery/water.md")) - 1  # the thumbnail
    text = "\n".join(cell["source"] for cell in written["cells"])
    assert text.startswith("# Water in the air")
    assert "```" not in text
    assert "thumbnail" not in text
    link = "A [a](../b.md) [](land.md#x) [c](https://d.org).\n"
    (cell,) = notebooks.notebook(link, {"land": "Land"})["cells"]
    assert cell["source"] == "A a Land [c](https://d.org)."
