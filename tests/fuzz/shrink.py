# SPDX-License-Identifier: MIT
"""Make a program that fails smaller."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def failure(program: Any, check: Callable[[Any], None]) -> str | None:
    """Say in a few words how the check of a program fails; None if it does not."""
    try:
        check(program)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        numbers = r"[-+]?\d[\d.e+-]*"  # such as tolerances, which depend on the program
        return f"{type(error).__name__}: {re.sub(numbers, '#', message[:80])}"
    return None


def smaller(program: Any, check: Callable[[Any], None]) -> Any:
    """Leave out of a program, or replace, whatever it fails without, in the same words."""
    words = failure(program, check)
    found = program
    while found is not None:
        program = found
        found = next((each for each in program.simpler() if failure(each, check) == words), None)
    return program
