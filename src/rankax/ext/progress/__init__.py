# SPDX-License-Identifier: MIT
"""Progress: reports from a running loop (`report`), and the bars that show them (`bars`)."""

from typing import Any

from rankax.core.hooks import OBSERVERS
from rankax.core.options import Option, Options, register
from rankax.ext.progress.bars import checked_progress, progress_of_call

register(Option("progress", False, checked_progress, scoped=True))


def _observed(options: Options, name: str) -> Any:
    return progress_of_call(options.progress, name)


OBSERVERS.add("progress", _observed)
