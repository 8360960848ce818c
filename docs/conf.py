# SPDX-License-Identifier: MIT
"""The documentation: pages in MyST Markdown, run while they are built.

python -m tox -e docs               # writes docs/_build/html
"""

import os
import re
import sys
import urllib.request
from html import escape
from importlib.metadata import metadata
from pathlib import Path

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the extensions beside this file
BENCHMARKS = HERE.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import shown  # noqa: E402

shown.check()  # the figures, and the words about them, against what was measured

TAGLINE = "Write a JAX function for one item. Call it on any batch, in bounded memory."
project = "rankax"
author = "The rankax authors"
copyright = author
version = release = re.search(
    r'__version__ = "(.+)"', (HERE.parent / "src/rankax/__init__.py").read_text()
)[1]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "built_site",
    "docstring_notes",
    "formulas",
    "notebooks",
    "prompts",
]
exclude_patterns = ["README.md", "_build", "_parts", "tests"]

# Pages that run, each in a kernel of its own and in an empty folder, so that a reader can paste
# their cells. The path is for what draws the page on benchmarks, and the thumbnails of the gallery.

folders = [str(BENCHMARKS), str(HERE), str(HERE / "gallery"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("MPLBACKEND", None)  # where it is set, a kernel does not show its figures
os.environ["MATPLOTLIBRC"] = str(HERE / "matplotlibrc")
# On a loaded machine a worker of dask logs late heartbeats, and stderr of a cell fails the build.
os.environ["DASK_LOGGING__DISTRIBUTED"] = "critical"
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this environment, not one of another
# A kernel warns that its messages, which stay on this machine, are not encrypted.
os.environ["IPYTHONDIR"] = str(HERE / "_build" / "ipython")
profile = HERE / "_build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.json").write_text('{"IPKernelApp": {"log_level": "ERROR"}}')
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_output_stderr = "remove-warn"
nb_merge_streams = True  # lines that one cell prints are one block
nb_render_markdown_format = "gfm"  # so that a cell can show a table

# Markdown, doctests, mathematics.

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
# The empty line that ends a definition in a bare Python prompt is copied, too.
copybutton_prompt_text = r">>> |\.\.\. ?|\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
copybutton_exclude = ".linenos, .gp, .go"
html_math_renderer = "mathml"  # of formulas.py

# The reference.


def defining_module(_app, module, name):
    """The file that holds a public name, which says of itself that it is in `rankax`."""
    for loaded in sorted(sys.modules):
        if loaded.startswith("rankax.") and name in ModuleAnalyzer.for_module(loaded).find_tags():
            return loaded
    return module


autodoc_typehints = "none"  # the docstrings have the types, with shapes
autodoc_member_order = "bysource"
add_module_names = False
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [  # the parameters of `auto_vmap`, by group
    (group, "params_style")
    for group in ("Ranks", "Memory", "Reductions", "Programs", "Devices", "Items")
]

# References into rankax must resolve. Those into JAX and NumPy do where the list of their names can
# be had; elsewhere they stay plain text, so that the site builds without a network.

nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r"(jax|numpy|xarray|dask|distributed)\..*"),
    ("py:class", ".*"),  # the words of a "Parameters" type: "int", "pytree", "optional"
    ("py:exc", r"(Type|Value)Error"),
]


def has_inventory(site):
    try:
        with urllib.request.urlopen(f"{site}objects.inv", timeout=5):
            return True
    except OSError:
        return False


intersphinx_mapping = {
    name: (site, None)
    for name, site in {
        "jax": "https://docs.jax.dev/en/latest/",
        "numpy": "https://numpy.org/doc/stable/",
        "xarray": "https://docs.xarray.dev/en/stable/",
    }.items()
    if has_inventory(site)
}
intersphinx_timeout = 10

# The looks.

html_theme = "furo"
html_title = "rankax"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
        "version.html",
    ]
}
html_css_files = ["rankax.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False

# The addresses of the repository and of the site, once `[project.urls]` in pyproject.toml has them.
urls = metadata("rankax").get_all("Project-URL", [])
addresses = dict(url.split(", ") for url in urls)
repository, html_baseurl = (addresses.get(name, "") for name in ("Repository", "Documentation"))
html_context = {"repository": repository}
html_theme_options = {
    **(
        {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
        if repository
        else {}
    ),
    "light_css_variables": {
        "color-brand-primary": "#1f5fbf",
        "color-brand-content": "#1f5fbf",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fb2ff",
        "color-brand-content": "#7fb2ff",
    },
}
pygments_style = "a11y-light"  # on its ground, all colours have the contrast 4.5:1 of WCAG AA
pygments_dark_style = "github-dark"


def describe(_app, page, _template, context, doctree):
    """What a search engine shows of a page, and social media, which need a full address."""
    texts = [*doctree.findall(nodes.caption), *doctree.findall(nodes.paragraph)] if doctree else []
    words = next((text.astext() for text in texts if not text.next_node(nodes.math)), TAGLINE)
    words = " ".join(words.split())
    values = {
        "og:title": f"{re.sub('<.*?>', '', context.get('title', page))} - rankax",
        "og:type": "website",
    }
    if html_baseurl:
        values["og:url"] = f"{html_baseurl.rstrip('/')}/{page}.html"
        values["og:image"] = f"{html_baseurl.rstrip('/')}/_static/card.png"
        values["twitter:card"] = "summary_large_image"
    values["og:description"] = words = words if len(words) <= 160 else f"{words[:157]}..."
    tags = [f'<meta property="{name}" content="{escape(text)}">' for name, text in values.items()]
    tags.append(f'<meta name="description" content="{escape(words)}">')
    context["metatags"] = "".join([context.get("metatags", ""), *tags])


def setup(app):
    app.connect("viewcode-follow-imported", defining_module)
    app.connect("html-page-context", describe)
