# SPDX-License-Identifier: MIT
"""Checksums of programs, arrays, functions and objects, for a record on disk.

A record on disk cannot hold the objects of a program, so it stores a description of every program:
`checksum` has the content of a fingerprint, with the arrays of all depths in it. Functions that JAX
does not trace, such as callbacks, are described by their code and by what they refer to, as far as
Python shows it.
"""

import contextlib
import functools
import hashlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from rankax.core.loop.eager_programs import PLAIN, key_of_value

# What decides the values of functions, and what objects hold.
_PARTS = (
    *("__code__", "__defaults__", "__kwdefaults__", "__closure__", "cell_contents"),
    *("__func__", "__self__", "func", "args", "keywords", "__wrapped__", "__dict__"),
    *("co_code", "co_names", "co_consts"),
)


def checksum(value: Any) -> str:
    """Return a checksum of programs, arrays, functions and objects, equal in each process."""
    return hashlib.sha256(_text(_described(value, {})).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # without addresses


def _described(value: Any, seen: dict[int, Any]) -> Any:
    """Describe a value by nested containers.

    ``seen`` has the number and the value of each object by its id, which no other object gets then.
    """
    each = functools.partial(_described, seen=seen)
    if isinstance(value, (*PLAIN, float, complex)):
        return value
    if isinstance(value, ClosedJaxpr):
        return key_of_value(value, each)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(value)), each(jax.random.key_data(value))
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            return array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()
        value = array.tolist()
    if id(value) in seen:
        return "seen", seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, dict):
        return [(each(name), each(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, list(map(each, value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(_text, map(each, value)))
    return value.__name__ if isinstance(value, types.ModuleType) else _parts(value, each)


def _parts(value: Any, each: Callable[[Any], Any]) -> Any:
    """Describe a function by its code and what this refers to, and an object by its fields."""
    kind = type(value)
    if hasattr(kind, "rankax_parts"):  # a decorated kernel, without what its calls keep
        return kind.__qualname__, each(value.rankax_parts)
    slots = [name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ())]
    parts: list[Any] = []
    for name in (*_PARTS, *sorted({*slots} - {"__weakref__"})):
        with contextlib.suppress(AttributeError, ValueError):  # a cell may be empty
            parts.append((name, each(getattr(value, name))))
    if isinstance(value, types.FunctionType):
        used = [value.__globals__.get(name) for name in value.__code__.co_names]
        home = value.__module__  # functions of other modules are told by their names
        parts += [each(x) for x in used if not callable(x) or x.__module__ == home]
    call = vars(kind).get("__call__")
    if isinstance(call, types.FunctionType):
        parts.append(each(call))
    return kind.__qualname__, parts or repr(value)
