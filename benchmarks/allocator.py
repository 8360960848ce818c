# SPDX-License-Identifier: MIT
"""Let the C library keep the memory that was freed, so that equal programs take equal times.

glibc gives large arrays back to Linux when they are freed, or keeps them, depending on what was
freed before. To get one again takes up to twice as long as to fill it, and this falls on one
contestant and not on another. Such times say little about programs.
"""

import os
import sys

KEPT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def keep_memory() -> None:
    """Start this process again with the settings, unless it has them; glibc reads them first."""
    if not KEPT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT)
