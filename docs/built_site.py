# SPDX-License-Identifier: MIT
"""A Sphinx extension: the build fails on what is broken in the HTML and Sphinx does not see.

A link or an anchor that leads nowhere, a formula that was not translated, a page of the gallery
without its picture, a picture without words. All but the hook is the standard library, so that the
tests need no Sphinx.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

__all__ = ["problems", "setup"]

_VOID = {"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
_VERBATIM = {"code", "pre", "script", "style", "textarea"}  # where a backslash is meant
_MACRO = re.compile(r"\\[a-zA-Z]+")


def problems(site: Path) -> list[str]:
    """Say, page by page, what a reader would find broken in the HTML under ``site``."""
    site = site.resolve()
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for told in (_dead_links(page, pages), _unset_formulas(page), _missing_picture(page, site)):
            found += [f"{path.relative_to(site).as_posix()}: {problem}" for problem in told]
    return found


class _Page(HTMLParser):
    """The anchors, the links, the pictures that cells drew, and the text of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.anchors, self.links, self.pictures, self.text = {"", "top"}, [], [], []
        self._open: list[tuple[str, bool]] = []  # tag, and whether what a cell drew stands in it
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = {name: value or "" for name, value in attributes}
        classes = values.get("class", "").split()
        self.anchors.add(values.get("id", ""))
        self.links += [values[name] for name in ("href", "src") if name in values]
        is_picture = tag == "img" or (tag == "div" and values.get("role") == "img")
        if is_picture and any(output for _, output in self._open):
            self.pictures.append(values)
        if tag not in _VOID:
            self._open.append((tag, tag == "figure" or "cell_output" in classes))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag in [name for name, _ in self._open]:
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data):
        if not _VERBATIM & {tag for tag, _ in self._open}:
            self.text.append(data)


def _dead_links(page, pages):
    for link in dict.fromkeys(page.links):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE):
            continue  # another site, or data in the link itself
        address, anchor = urldefrag(link)
        name = unquote(address.partition("?")[0])
        target = (page.path.parent / name).resolve() if name else page.path
        if not target.is_file():
            yield f"the link {link} leads to no file"
        elif target in pages and unquote(anchor) not in pages[target].anchors:
            yield f"the link {link} leads to no anchor"


def _unset_formulas(page):
    for macro in dict.fromkeys(_MACRO.findall(" ".join(page.text))):
        yield f"{macro} stands in the text: a formula was not translated to MathML"


def _missing_picture(page, site):
    folder, name = page.path.parent.relative_to(site).as_posix(), page.path.name
    if folder == "gallery" and name != "index.html" and not page.pictures:
        yield "no picture in the output of any cell: see MPLBACKEND in docs/conf.py"
    for picture in page.pictures:
        if not (picture.get("alt", "") + picture.get("aria-label", "")).strip():
            yield "a picture without an alt text"


def check(app, exception):
    """Warn of each problem and fail, also without -W; a build that ended early is left alone."""
    from sphinx.util import logging

    found = problems(Path(app.outdir)) if exception is None and app.builder.format == "html" else []
    for problem in found:
        logging.getLogger(__name__).warning(problem)
    if found:
        app.statuscode = 1


def setup(app):
    """Look when everything is written."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
