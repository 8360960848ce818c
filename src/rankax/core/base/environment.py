# SPDX-License-Identifier: MIT
"""Defaults that environment variables set, read once."""

import os

_WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def switch(name: str, *, default: bool) -> bool:
    """Return what an environment variable says."""
    word = os.environ.get(name, str(default)).strip().lower()
    if word not in _WORDS:
        raise ValueError(f"{name} must be 0 or 1, got {os.environ[name]!r}")
    return _WORDS[word]
