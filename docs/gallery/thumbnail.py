# SPDX-License-Identifier: MIT
"""The picture at the head of a gallery page, and the small one on the front pages.

Both are made when the page runs. The small one is a single panel, without axes and words, and a
link to its page.
"""

import base64
import io

from IPython.display import HTML
from myst_nb import glue

__all__ = ["picture", "thumbnail"]


def picture(figure):
    """Hand ``figure`` to the head of this page."""
    glue("picture", figure, display=False)


def thumbnail(page, title, panel):
    """Hand what ``panel`` draws to the front pages; its figure is not to be shown afterwards."""
    figure = panel.figure
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the panel keeps its place
    for other in figure.axes:
        other.set_visible(other is panel)
    panel.set_axis_off()
    panel.set_title("")
    for words in [*panel.texts, *filter(None, [panel.get_legend()])]:
        words.set_visible(False)
    png = io.BytesIO()
    extent = panel.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    figure.savefig(png, bbox_inches=extent, dpi=max(440 / extent.width, 330 / extent.height))
    source = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    shown = f'<img src="{source}" alt="">{title}'  # the title says it
    for key, folder in ((page, ""), (f"front-{page}", "gallery/")):
        glue(key, HTML(f'<a href="{folder}{page}.html">{shown}</a>'), display=False)
