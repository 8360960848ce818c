# SPDX-License-Identifier: MIT
"""A thread-safe cache of bounded size."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """A thread-safe LRU cache of at most ``most`` values."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Kept, (self._most,)  # a copy begins empty

    def find(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made if it is missing; two threads may both make it."""
        try:  # without the lock, because each of these is one step; another thread may come between
            self._values.move_to_end(key)
            return self._values[key]
        except KeyError:
            pass
        value = make()
        with self._lock:
            value = self._values.setdefault(key, value)
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        return value
