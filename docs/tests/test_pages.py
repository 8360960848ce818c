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

DOCS = Path(__file__).parents[1]
CELL = re.compile(
    r"^```\{code-cell\}\n((?:---\n.*?^---\n|:.*?\n\n)?)(.*?)^```$", re.MULTILINE | re.DOTALL
)
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
    return {line.split()[1].split(".")[0] for line in re.findall(r"(?m)^(?:import|from) .*$", code)}


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
    (described,) = re.findall(r'```\{glue:figure\} picture\n:alt: "(.*)"\n```', head)
    assert len(described) > 40
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
        pytest.skip(f"{', '.join(missing)}: in the docs environment only, where the build runs it")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code, name, "exec"), {})
