# SPDX-License-Identifier: MIT
"""A plan as a small picture, for a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from rankax._plan_text import plan_text

if TYPE_CHECKING:
    from rankax._plan import BatchPlan

__all__ = ["plan_html"]


def plan_html(plan: BatchPlan) -> str:
    """Draw a plan."""
    return f"<pre>{html.escape(plan_text(plan))}</pre>"
