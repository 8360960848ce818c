# SPDX-License-Identifier: MIT
"""A Sphinx extension: gallery pages whose cells run where they are pasted, and as notebooks.

A line ``# source: rays.py hit nearest`` in a cell becomes the source of these names in examples/,
so that a page shows all that it runs. Each page offers itself as a notebook. A cell that needs a
file or a module that only this repository has makes the build fail: cells run in an empty folder,
without examples/ on the path, and `unpasteable` looks for the rest.
"""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

__all__ = ["notebook", "setup", "unpasteable", "with_sources"]

_ROOT = Path(__file__).parents[1]
_CELL = re.compile(
    r"^```\{code-cell\}\n((?:---\n.*?^---\n|:.*?\n\n)?)(.*?)^```$", re.MULTILINE | re.DOTALL
)
_SOURCE = re.compile(r"^# source: (\S+) (.+)$", re.MULTILINE)
_PICTURE = re.compile(r"^```\{glue:figure\} picture\n.*?^```\n", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^(`{3,})\{.*?^\1\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#]*)[^)]*\)")


def with_sources(page: str) -> str:
    """Return a page with the source of the names that its cells take from examples/."""
    return _SOURCE.sub(lambda found: _source(found[1], found[2].split()), page)


def _source(file: str, names: list[str]) -> str:
    text = (_ROOT / "examples" / file).read_text(encoding="utf-8")
    lines, statements = text.splitlines(), {}
    for node in ast.parse(text).body:
        for name in _bound(node):
            first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1
            while lines[first - 1].startswith("#"):
                first -= 1
            kept = [line for line in lines[first : node.end_lineno] if "# fmt:" not in line]
            statements[name] = _without_blank_lines("\n".join(kept))
    return "\n\n\n".join(dict.fromkeys(statements[name] for name in names))


def _without_blank_lines(text: str) -> str:
    """Drop the lines at which a bare Python prompt would end the definition."""
    lines = text.split("\n")
    blank = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NL and not token.line.strip()
    }
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in blank)


def _bound(node: ast.AST) -> list[str]:
    """The names that a statement, or what is in it, gives a meaning."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    return [
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]


def unpasteable(page: str) -> list[str]:
    """Say why the visible cells of a page would not run where they are pasted."""
    folders = ("benchmarks", "docs", "examples")
    ours = {path.stem for folder in folders for path in (_ROOT / folder).rglob("*.py")}
    hidden: set[str] = set()
    problems = []
    for options, code in _CELL.findall(page):
        tree = ast.parse(code)
        if "remove-cell" in options or "remove-input" in options:
            hidden |= {name for node in tree.body for name in _bound(node)}
            continue
        hidden -= {name for node in tree.body for name in _bound(node)}
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in ours.intersection(modules):
                problems.append(f"a cell imports {module}, a file of this repository")
            if isinstance(node, ast.Name) and node.id in hidden:
                problems.append(f"a cell uses {node.id}, which a hidden cell defines")
    return problems


def notebook(page: str, titles: dict[str, str]) -> dict[str, object]:
    """Return a page as a notebook; ``titles`` has what a link without words shows."""
    text = re.sub(r"\A---\n.*?^---\n", "", page, flags=re.MULTILINE | re.DOTALL)
    cells: list[dict[str, object]] = []
    last = 0
    for found in _CELL.finditer(text):
        _words(cells, text[last : found.start()], titles)
        last = found.end()
        if "remove-cell" not in found[1]:
            cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
            cells.append({**cell, "id": f"cell-{len(cells)}", "source": found[2].strip("\n")})
    _words(cells, text[last:], titles)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _words(cells: list[dict[str, object]], text: str, titles: dict[str, str]) -> None:
    text = _LINK.sub(
        lambda found: found[1] or titles[Path(found[2]).stem], _DIRECTIVE.sub("", text)
    )
    if text := re.sub(r"\n{3,}", "\n\n", text).strip():
        cell = {"cell_type": "markdown", "metadata": {}, "id": f"cell-{len(cells)}"}
        cells.append({**cell, "source": text})


def _read(_app, docname, source):
    from sphinx.util import logging

    if not re.match("gallery/(?!index)", docname):
        return
    source[0] = page = with_sources(source[0])
    for problem in unpasteable(page):
        logging.getLogger(__name__).warning(problem, location=docname)
    name = docname.split("/")[1]
    link = (
        f'<p class="small"><a href="{name}.ipynb" download>Download this page as a notebook</a></p>'
    )
    source[0] = _PICTURE.sub(
        lambda found: f"{found[0]}\n```{{raw}} html\n{link}\n```\n", page, count=1
    )


def _write(app, exception):
    if exception is None and app.builder.format == "html":
        titles = {Path(name).name: title.astext() for name, title in app.env.titles.items()}
        for page in (Path(app.srcdir) / "gallery").glob("*.md"):
            if page.stem != "index":
                cells = notebook(with_sources(page.read_text(encoding="utf-8")), titles)
                file = Path(app.outdir) / "gallery" / f"{page.stem}.ipynb"
                file.write_text(json.dumps(cells, indent=1, ensure_ascii=False), encoding="utf-8")


def setup(app):
    """Change gallery pages as they are read; write the notebooks before built_site.py looks."""
    app.connect("source-read", _read)
    app.connect("build-finished", _write, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
