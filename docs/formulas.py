# SPDX-License-Identifier: MIT
"""A Sphinx extension: formulas as MathML, and a warning for each that would not read as written.

MathML is drawn by the browser itself: no script, nothing to fetch, any colour.
"""

import re

__all__ = ["misread", "setup"]

_MISREAD = {
    r"\\(?:boldsymbol|pmb)(?![a-zA-Z])": "docutils does not see where it ends; write \\mathbf",
    r"\\(?:[cdt]?frac|[dt]?binom)(?![a-zA-Z])\s*(?!\s*\{)": "write its arguments in braces",
    r"(?:\\sqrt\s*|[_^])\d\d": "TeX takes one digit, docutils all of them; write braces",
}


def misread(tex: str) -> str | None:
    """Say what docutils would silently read otherwise than TeX does, and what to write instead."""
    for pattern, advice in _MISREAD.items():
        if found := re.search(pattern, tex):
            return f"{found[0].strip()}: {advice}"
    return None


def write_math(self, node):
    """Write one formula into a page; what cannot be translated is a warning at its place."""
    from docutils import nodes
    from docutils.utils.math import MathError, latex2mathml
    from sphinx.util import logging

    block = node.tagname == "math_block"
    tex = node.astext()
    mistake = misread(tex)
    try:
        formula = latex2mathml.tex2mathml(tex, as_block=block)
    except MathError as error:
        formula, mistake = "", str(error)
    if mistake or "\\" in formula:
        told = mistake or "a macro is left in the MathML"
        logging.getLogger(__name__).warning("formula %s: %s", tex, told, location=node)
    self.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app):
    """Register the renderer, which `html_math_renderer` names."""
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
