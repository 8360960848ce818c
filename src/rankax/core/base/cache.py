# SPDX-License-Identifier: MIT
"""Caches of bounded size, and the registry that shows and empties all of them.

What a call keeps between calls is in a `Kept`, or in the `Members` of a kernel. Each registers
itself by what it holds. Functions of shapes and strings alone, whose values are few small tuples,
use `functools.lru_cache` and are not listed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def switch(name: str, *, default: bool) -> bool:
    """Return what an environment variable says."""
    word = os.environ.get(name, str(default)).strip().lower()
    if word not in _WORDS:
        raise ValueError(f"{name} must be 0 or 1, got {os.environ[name]!r}")
    return _WORDS[word]


V = TypeVar("V")


class Caches:
    """All caches of the process, by what they hold; ``print`` shows how many they hold."""

    def __init__(self) -> None:
        # By identity, because an empty cache may equal another one. A dead one leaves by itself.
        self._all: dict[int, tuple[str, weakref.ref[Any]]] = {}

    def add(self, cache: Any, what: str) -> None:
        key = id(cache)
        self._all[key] = what, weakref.ref(cache, lambda _: self._all.pop(key, None))

    def clear(self) -> None:
        for _, found in list(self._all.values()):
            if (cache := found()) is not None:
                cache.clear()

    def __reduce__(self) -> str:
        return "caches"  # there is one in a process

    def counts(self) -> dict[str, int]:
        """Return how many entries there are of each kind."""
        counts: dict[str, int] = {}
        for what, found in list(self._all.values()):
            if (cache := found()) is not None:
                counts[what] = counts.get(what, 0) + len(cache)
        return dict(sorted(counts.items()))

    def __repr__(self) -> str:
        lines = [f"  {count:>6}  {what}" for what, count in self.counts().items()]
        return "\n".join(["caches of rankax", *lines])


#: The registry, which `rankax.clear_caches` empties.
caches = Caches()


class Kept(Generic[V]):
    """A thread-safe LRU cache of at most ``most`` values; ``what`` names them."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()
        caches.add(self, what)

    def __reduce__(self) -> Any:
        return Kept, (self._most, self._what)  # a copy begins empty

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
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


class Members(Generic[V]):
    """Values that live as long as someone has them, and a few that were used last.

    ``kernel.with_options(reduce=...)`` in a loop makes a kernel in each step, which may hold arrays
    and compiled programs.
    """

    def __init__(self, what: str, most: int = 8) -> None:
        self._what, self._most = what, most
        self._values: weakref.WeakValueDictionary[Hashable, V] = weakref.WeakValueDictionary()
        self._last: tuple[V, ...] = ()
        caches.add(self, what)

    def __reduce__(self) -> Any:
        return Members, (self._what, self._most)  # a copy begins empty

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._last = ()

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made if nobody has it any more."""
        value = self._values.get(key)
        if value is None:
            value = self._values.setdefault(key, make())
        # A new tuple, because another thread may read the old one.
        self._last = (*(other for other in self._last if other is not value), value)[-self._most :]
        return value


def clear_caches() -> None:
    r"""Forget all that rankax keeps between calls: plans, compiled programs, measurements.

    To forget what JAX keeps as well::

        jax.clear_caches()
        rankax.clear_caches()

    Compiled programs are functions of `jax.jit`, whose machine code `jax.clear_caches` frees by
    itself. What rankax adds is their traced programs, plans by shapes, chunk sizes by memory limit,
    and which warnings were given. All of it is made again when it is needed, so that results stay
    the same; the next calls take as long as first calls. ``print(rankax.caches)`` shows what is
    kept, and how many of it.

    Notes
    -----
    Kernels that ``with_options`` made stay alive as long as someone has them; without this call,
    also the eight of a kernel that were used last.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import rankax
    >>> square = rankax.auto_vmap(0, chunk_size=2)(lambda x: x**2)
    >>> square(jnp.arange(5.0)).shape
    (5,)
    >>> rankax.clear_caches()
    >>> square(jnp.arange(5.0)).shape
    (5,)
    """
    caches.clear()


class KeptDict(dict[Any, Any]):
    """A dict that is listed among the caches: `Kept` looks a key up twice."""

    def __init__(self, what: str) -> None:
        super().__init__()
        caches.add(self, what)
