# SPDX-License-Identifier: MIT
"""Values that are kept, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

V = TypeVar("V")


class Kept(Generic[V]):
    """Some values by their keys: those that were used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value that is kept, or else a new one, which two threads may make at once."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        value = make()
        with self._lock:
            value = self._found.setdefault(key, value)
            if len(self._found) > self._most:
                self._found.popitem(last=False)
        return value
