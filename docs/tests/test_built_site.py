# SPDX-License-Identifier: MIT
"""The checks that make the build of the documentation fail."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1]


def of_docs(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


problems, misread = of_docs("built_site").problems, of_docs("formulas").misread

PICTURE = '<div class="cell_output docutils"><p><img src="../a.png" alt="Orbits."></p></div>'
SOUND = {
    "index.html": '<h1 id="top-of-it">T</h1><a href="#top-of-it">a</a><a href="#">b</a>'
    '<a href="gallery/coil.html?highlight=x#field%20lines">c</a><img src="a.png">'
    '<a href="https://example.org/no#where">d</a><a href="mailto:a@b.org">e</a>'
    '<img src="data:image/png;base64,AA"><pre>\\frac</pre><p>a <code>\\dot</code> b</p>'
    "<math><mi>x</mi></math>",
    "gallery/index.html": "<br><p>six</p>",
    "gallery/coil.html": f'<h2 id="field lines">F</h2>{PICTURE}<a href="../index.html">up</a>',
    "a.png": "",
}


def site(folder, **changed):
    for name, text in (SOUND | changed).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_sound_site_has_no_problems(tmp_path):
    assert problems(site(tmp_path)) == []


@pytest.mark.parametrize(
    ("page", "text", "problem"),
    [
        ("index.html", '<a href="gone.html">a</a>', "the link gone.html leads to no file"),
        ("index.html", '<img src="gone.png">', "the link gone.png leads to no file"),
        ("index.html", '<a href="gallery/">a</a>', "the link gallery/ leads to no file"),
        ("index.html", '<a href="#gone">a</a>', "the link #gone leads to no anchor"),
        (
            "gallery/index.html",
            '<a href="../index.html#gone">a</a><a href="../index.html#gone">b</a>',
            "the link ../index.html#gone leads to no anchor",
        ),
        (
            "index.html",
            "<math><mi>\\mu</mi></math>",
            "\\mu stands in the text: a formula was not translated to MathML",
        ),
        (
            "index.html",
            "<p>$\\tfrac12$</p>",
            "\\tfrac stands in the text: a formula was not translated to MathML",
        ),
        (
            "gallery/coil.html",
            '<h2 id="field lines">F</h2><div class="cell_output">&lt;Figure&gt;</div>'
            '<img src="../a.png" alt="A picture outside of a cell.">',
            "no picture in the output of any cell: see MPLBACKEND in docs/conf.py",
        ),
        (
            "gallery/coil.html",
            f'<h2 id="field lines">F</h2>{PICTURE.replace("Orbits.", "")}',
            "a picture without an alt text",
        ),
        (
            "index.html",
            '<h1 id="top-of-it">T</h1><figure><img src="a.png" alt=""></figure>',
            "a picture without an alt text",
        ),
        (
            "index.html",
            '<h1 id="top-of-it">T</h1><div class="cell_output"><div role="img"></div></div>',
            "a picture without an alt text",
        ),
    ],
)
def test_what_is_broken_is_named_with_its_page(tmp_path, page, text, problem):
    assert problems(site(tmp_path, **{page: text})) == [f"{page}: {problem}"]


@pytest.mark.parametrize(
    ("tex", "mistake"),
    [
        (r"a\boldsymbol\mu", r"\boldsymbol: docutils does not see where it ends; write \mathbf"),
        (r"\pmb{\mu}", r"\pmb: docutils does not see where it ends; write \mathbf"),
        (r"\tfrac12", r"\tfrac: write its arguments in braces"),
        (r"\frac \pi2", r"\frac: write its arguments in braces"),
        (r"\sqrt 23", r"\sqrt 23: TeX takes one digit, docutils all of them; write braces"),
        (r"x^23", r"^23: TeX takes one digit, docutils all of them; write braces"),
    ],
)
def test_a_formula_that_docutils_misreads_is_refused(tex, mistake):
    assert misread(tex) == mistake


@pytest.mark.parametrize("tex", [r"\frac{1}{2}", r"\frac {1}{2}", r"\sqrt n", "10^{-16}", "x^2 3"])
def test_a_formula_that_docutils_reads_as_tex_does_is_not(tex):
    assert misread(tex) is None


def test_no_formula_of_the_pages_is_misread():
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    formulas = [
        found[1]
        for page in pages
        for found in re.finditer(r"\$\$?([^$`]*\\[^$`]*)\$\$?", page.read_text())
    ]
    assert len(formulas) > 20
    assert [tex for tex in formulas if misread(tex)] == []
