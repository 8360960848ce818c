# SPDX-License-Identifier: MIT
"""The pages show what benchmarks/results has, and the citation names this version."""

import re
import sys
import types
from pathlib import Path

import pytest

import rankax

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "shown", raising=False)
    import shown

    return shown


def test_the_readme_and_its_figure_are_what_the_results_say(shown):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    hint = "run python benchmarks/shown.py"
    assert shown.with_figures(readme) == readme, hint
    assert shown.memory_svg() == shown.FIGURE.read_text(encoding="utf-8"), hint
    for name, part in shown.FILES.items():
        assert part() == (shown.DOCS_PARTS / f"{name}.md").read_text(encoding="utf-8"), hint


def test_other_results_make_another_readme(shown, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    document = shown.document()
    for row in document["memory"]:
        row["length_and_bytes"] = [(n, size + 5e9) for n, size in row["length_and_bytes"]]
    monkeypatch.setattr(shown, "document", lambda *platform: document)
    changed = shown.with_figures(readme)
    assert "at once, needs **1.1 MB** of" in readme
    assert "at once, needs **5.0 GB** of" in changed


def test_a_figure_that_contradicts_its_caption_is_refused(shown, monkeypatch):
    shown.check()
    document = shown.document()
    monkeypatch.setattr(shown, "document", lambda *platform: document)
    (row,) = (
        row
        for row in document["memory"]
        if (row["kernel"], row["mode"], row["peer"]) == ("eigh 8x8", "gradient", "rankax")
    )
    row["length_and_bytes"] = [(n, size + n) for n, size in row["length_and_bytes"]]
    with pytest.raises(ValueError, match="the memory of rankax is not flat"):
        shown.check()
    row["length_and_bytes"] = [(n, 5 * n if n % 1000 else 10) for n, _ in row["length_and_bytes"]]
    with pytest.raises(ValueError, match="more than a copy of the outputs"):
        shown.check()
    row["length_and_bytes"] = [(n, 10) for n, _ in row["length_and_bytes"]]
    with pytest.raises(ValueError, match=r"memory.svg is old: python benchmarks/shown.py"):
        shown.check()


def test_a_missing_row_and_a_missing_mark_are_named(shown):
    with pytest.raises(LookupError, match=r"has no row .*'peer': 'nobody'"):
        shown.measured("eigh 8x8", 20_003, 500, "gradient", "nobody")
    with pytest.raises(LookupError, match=r"<!-- results: figures -->"):
        shown.with_figures("# rankax\n")


def test_tables_of_results_are_read(shown):
    rows = shown.table("reductions")
    assert {row["contestant"] for row in rows} >= {"rankax", "KeOps"}
    assert all(float(row["ms"]) > 0 for row in rows if row["times rankax"])
    assert shown.table("tiles")[0]["kernel"] == "distances 8x3"
    assert [shown.megabytes(size) for size in (0, 5e3, 2e5, 4.1e8, 2e9)] == [
        "0 MB",
        "5 kB",
        "0.2 MB",
        "410 MB",
        "2.0 GB",
    ]


def test_the_how_to_quotes_the_results_of_ragged_items(shown):
    page = " ".join((ROOT / "docs/howto/ragged.md").read_text(encoding="utf-8").split())
    rows = {(row["way"], row[""]): row for row in shown.table("ragged")}
    own = rows["`Ragged`, `jit=True`", "forward"]
    padded = rows["padded to the longest", "forward"]
    each = rows["one program for each length", "forward"]
    slower = float(padded["times `jit=True`"])
    assert f"takes {float(own['later, ms']):.0f} ms and {own['temporaries, MB']} MB" in page
    assert f"takes {slower:.0f} times as long" in page
    assert f"one program for each length compiles {each['programs']} of them" in page
    assert int(own["of the kernel"]) <= 12
    assert slower >= 5
    assert shown.command("ragged") in page


def test_every_result_says_when_it_was_measured(shown):
    stamps = shown.stamps()
    tables = {path.name for path in shown.RESULTS.glob("*.md")} - {"cpu.md"}
    assert stamps.keys() == tables | {"cpu.json, cases", "cpu.json, memory"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", stamp.date) for stamp in stamps.values())
    assert str(stamps["cpu.json, cases"]) in shown.benchmark()


def test_a_stamp_is_read_as_it_was_written(shown, tmp_path):
    import stamp

    table = tmp_path / "tiles.md"
    stamp.write(table, "# Tiles\n\n| a |\n|---|\n| 1 |\n\n")
    assert table.read_text().startswith("# Tiles\n\n| a |\n|---|\n| 1 |\n\nMeasured on 20")
    assert stamp.read(table.read_text()) == stamp.now()
    text = "Measured on 2026-11-22 at commit 65b8fac with changes, with JAX 0.12.0.1."
    assert str(stamp.read(f"# Tiles\n\n{text}\n")) == text


# Sentences that were true once. An open question belongs into an issue, not into a page.
STALE = [
    r"\b(?:not|never)(?: yet)? (?:been )?(?:timed|measured)\b",
    r"\b(?:timed|measured|tested|written|supported) yet\b",
    r"\b(?:no|none) (?:\w+ )?(?:was|were|are|have been) (?:timed|measured)\b",
    r"\bno GPU (?:has|was|is) (?:yet|here|available)\b",
    r"\b(?:coming soon|in a future|will be added|TODO|FIXME)\b",
    r"tox -e bench\b",  # an environment without CUDA
    r"pip install tox && ",  # a phone breaks the line in its middle
    r"python benchmarks\S* --write",  # what a reader runs changes no file
]


def test_no_page_says_what_is_no_longer_so():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {page: " ".join(page.read_text(encoding="utf-8").split()) for page in pages}
    found = [
        (page.name, text[max(0, hit.start() - 60) : hit.end()])
        for page, text in texts.items()
        if "_build" not in page.parts
        for words in STALE
        for hit in re.finditer(words, text, re.IGNORECASE)
    ]
    assert found == []


def test_commands_stand_alone_and_fit_a_phone():
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"(?ms)(.*?)^```bash\n(.*?)^```$", text)
        assert blocks
        for before, commands in blocks:
            label = before.rstrip().splitlines()[-1]
            assert label.endswith((":", "."))
            assert max(map(len, commands.splitlines())) <= 41  # at 390 pixels


def test_every_link_of_the_readme_leads_to_a_rendered_file():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", readme)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert [link for link in links if link.startswith("docs/") and link.endswith(".md")] == []
    anchors = {re.sub(r"[^\w ]", "", head).lower() for head in re.findall(r"(?m)^## (.*)$", readme)}
    assert {link.replace("-", " ") for link in re.findall(r"\]\(#([^)]+)", readme)} <= anchors


def test_the_citation_is_that_of_this_version():
    cff = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    bib = (ROOT / "docs/cite.bib").read_text(encoding="utf-8")
    (version,) = re.findall(r"(?m)^version: (.*)$", cff)
    (title,) = re.findall(r'(?m)^title: "(.*)"$', cff)
    (released,) = re.findall(r"(?m)^date-released: (.*)$", cff) or ["unreleased"]
    assert version == rankax.__version__
    assert f"\n## [{version}] - {released}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version = {{{version}}}" in bib
    assert f"title   = {{{title.replace('JAX', '{JAX}')}}}" in bib
    assert released == "unreleased" or f"year    = {{{released[:4]}}}" in bib


@pytest.fixture
def curves(shown, monkeypatch):
    """docs/curves.py without IPython, which only the docs environment has."""
    display = types.ModuleType("IPython.display")
    display.Markdown = display.HTML = str
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "curves", raising=False)
    import curves

    yield curves
    curves.plt.close("all")
    del sys.modules["curves"]


@pytest.mark.parametrize("name", ["chunk_sizes", "memory", "reductions", "tiles"])
def test_the_curves_of_the_benchmarks_can_be_drawn(curves, name):
    panels = [panel for figure in getattr(curves, name)() for panel in figure.axes]
    assert panels
    assert all(panel.get_lines() for panel in panels)


def test_benchmark_curves_have_the_colours_of_the_page(curves):
    with curves.plt.rc_context(fname=ROOT / "docs/matplotlibrc"):
        drawn = curves.drawn(curves.tiles, 'Tiles, "fast".')
    assert drawn.startswith(
        '<div class="figures" role="img" aria-label="Tiles, &quot;fast&quot;.">'
    )
    assert drawn.count("<svg ") == 2
    names = re.findall(r'\bid="([^"]+)"', drawn)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', drawn)) <= set(names)
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()  # nothing of one theme only
    css = (ROOT / "docs/_static/rankax.css").read_text(encoding="utf-8")
    series = set(re.findall(r"--series-\d", drawn))
    assert series
    assert all(css.count(f"{name}:") == 3 for name in series)  # light, dark, dark of the system


def test_the_tables_of_the_benchmarks_have_all_cases(curves, shown):
    cases = {
        tuple(row[name] for name in ("kernel", "length", "chunk_size", "mode"))
        for row in shown.document()["cases"]
    }
    assert curves.every_row().count("\n") == len(cases) + 1
    assert curves.ages().count("\n") == len(shown.stamps()) + 1
    lost = curves.slower()
    assert lost.startswith(f"{lost.count(chr(10)) - 3} of {len(cases)} cases:")
    assert curves.slower(margin=0.0).startswith(f"{len(cases)} of {len(cases)}")
    assert curves.slower(margin=1e9).startswith(f"0 of {len(cases)}")
    assert "python benchmarks" in curves.machine()


def test_results_of_other_devices_are_shown_as_they_are(curves, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(shown, "RESULTS", tmp_path)
    assert curves.others().startswith("All results")
    (tmp_path / "ragged.md").write_text("# Ragged\n\nOf lengths.\n")
    assert curves.file("ragged") == "Of lengths."
    (tmp_path / "gpu.md").write_text("# Benchmark on 1 x gpu\n\n## Time\n\n| a |\n|---|\n| 1 |\n")
    assert curves.others() == "**Benchmark on 1 x gpu**\n\n**Time**\n\n| a |\n|---|\n| 1 |"


def test_each_figure_of_the_benchmarks_names_its_command():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    figures = re.findall(r"curves\.drawn\(\n    curves\..*\n    \".*\",\n\)\n```\n\n(.*)\n", page)
    assert len(figures) == page.count("curves.drawn(") >= 4
    assert all(line.startswith("`python benchmarks") for line in figures)


def test_of_each_command_it_is_known_whether_it_runs_weekly(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests")
    import commands

    found = {command: commands.why_not(command) for command in commands.commands()}
    assert {command for command, why in found.items() if why is None} == commands.SHORT
    with pytest.raises(LookupError, match=r"a page has the command 'python new\.py'"):
        commands.why_not("python new.py")
