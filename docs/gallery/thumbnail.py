# SPDX-License-Identifier: MIT
"""The small pictures on the front page of the gallery: a page's figure, made when the page runs."""

import base64
import io

from IPython.display import HTML
from myst_nb import glue


def thumbnail(page, title, figure, show="center"):
    """Hand ``figure`` to the front page, as a link; of a tall one, the part that ``show`` names."""
    png = io.BytesIO()
    figure.savefig(png, dpi=90)
    source = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    picture = f'<img src="{source}" alt="" style="object-position: {show}">'  # the title says it
    glue(page, HTML(f'<a href="{page}.html">{picture}{title}</a>'), display=False)
