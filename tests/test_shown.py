# SPDX-License-Identifier: MIT
"""The README shows what benchmarks/results has, and the citation is that of this version."""

import re
import sys
from pathlib import Path

import pytest

import rankax

ROOT = Path(__file__).parents[1]


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "shown", raising=False)
    import shown

    return shown


def test_the_readme_and_its_figure_are_what_the_results_say(shown):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    hint = "run python benchmarks/shown.py"
    assert shown.with_parts(readme) == readme, hint
    assert shown.memory_svg() == shown.FIGURE.read_text(encoding="utf-8"), hint


def test_other_results_make_another_readme(shown, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    document = shown.document()
    for row in document["cases"]:
        row["temporary_bytes"] += 5e9
    monkeypatch.setattr(shown, "document", lambda: document)
    changed = shown.with_parts(readme)
    assert changed != readme
    assert "5.4 GB" in changed


def test_a_missing_row_and_a_missing_mark_are_named(shown):
    with pytest.raises(LookupError, match=r"has no row .*'peer': 'nobody'"):
        shown.measured("eigh 8x8", 20_003, 500, "gradient", "nobody")
    with pytest.raises(LookupError, match=r"<!-- results: bullets -->"):
        shown.with_parts("# rankax\n")


def test_tables_of_results_are_read(shown):
    rows = shown.table("reductions")
    assert {row["contestant"] for row in rows} >= {"rankax", "KeOps"}
    assert all(float(row["ms"]) > 0 for row in rows)
    assert shown.table("tiles")[0]["kernel"] == "distances 8x3"
    assert [shown.megabytes(size) for size in (0, 2e5, 4.1e8, 2e9)] == [
        "0 MB",
        "0.2 MB",
        "410 MB",
        "2.0 GB",
    ]


def test_every_link_of_the_readme_leads_to_a_file():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", readme)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_citation_is_that_of_this_version():
    cff = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    bib = (ROOT / "docs/cite.bib").read_text(encoding="utf-8")
    (version,) = re.findall(r"(?m)^version: (.*)$", cff)
    (title,) = re.findall(r'(?m)^title: "(.*)"$', cff)
    (released,) = re.findall(r"(?m)^date-released: (\d+)-", cff)
    assert version == rankax.__version__
    assert f"version = {{{version}}}" in bib
    assert f"title   = {{{title.replace('JAX', '{JAX}')}}}" in bib
    assert f"year    = {{{released}}}" in bib
