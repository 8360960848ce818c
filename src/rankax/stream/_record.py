# SPDX-License-Identifier: MIT
"""What is recorded of a call, so that only an equal call resumes its store.

A result follows from the programs of the stages, the numbers that they read, and the blocks. The
programs are recorded as a digest of all their equations, with the arrays that they hold at any
depth (`_trace/fingerprint.py`). Functions that JAX does not trace, such as callbacks, are recorded
by their code and by what they refer to, as far as Python shows it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.functions import unwrapped
from rankax._blocks.on_streamed import Stage, Streamed
from rankax._trace.fingerprint import description
from rankax.stream._sources import digest, grain


def program_of(stage: Stage) -> str:
    """Return a digest of the programs of a stage, and of the fields of its reductions."""
    blocks: list[Any] = []
    for array, axes, core in stage.inputs:
        sizes = [min(2, n) for n in array.shape[: len(axes)]]
        dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))  # of indices, too
        blocks.append(jax.ShapeDtypeStruct((*sizes, *core), dtype))
    programs = [stage.fun.traced(stage.fun.states if stage.reads_states else blocks)]
    if stage.merge is not None:
        programs.append(stage.merge.traced([*stage.merge.states] * 2))
    setup = stage.fun.setup
    module = getattr(unwrapped(setup.kernel.fun), "__module__", None) or ""
    about = functools.partial(described, home=module.partition(".")[0], seen={})
    reductions = setup.kernel.preset.reduce
    fields = [vars(entry) for entry in reductions.entries] if reductions else []
    data = [{k: v for k, v in each.items() if not callable(v)} for each in fields]
    parts = [description(program, about) for program in programs], about(data)
    return _checksum(text(parts).encode())


def argument(value: Any) -> str:
    """Return what is recorded of an argument with a rank."""
    if isinstance(value, Streamed):
        return f"{value.dtype}{value.shape}, chunks {grain(value)}, digest {digest(value)}"
    if isinstance(value, (int, float, complex)):
        return text(value)
    return f"{type(value).__name__}, digest {_checksum(text(described(value, '', {})).encode())}"


def text(value: Any) -> str:
    """Return the text of an object without addresses, which differ in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.dtype)

# What decides the values of a function, by its type.
_PARTS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    types.CodeType: ("co_code", "co_names", "co_consts"),
    types.CellType: ("cell_contents",),
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
}


def described(value: Any, home: str, seen: dict[int, Any]) -> Any:
    """Describe an object by nested tuples, whose text is equal in each process.

    Functions and classes of other packages than ``home`` are described by their names.
    """
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if id(value) in seen:  # kept there, so that no later object has its id
        return "seen"
    seen[id(value)] = value
    of = functools.partial(described, home=home, seen=seen)
    if hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(value)), of(jax.random.key_data(value))
    if hasattr(value, "__array__") and not isinstance(value, type):
        array = np.asarray(value)
        data = text(of(array.tolist())).encode() if array.dtype.hasobject else array.tobytes()
        return array.dtype.str, array.shape, _checksum(data)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(of, value)
    if isinstance(value, dict):
        return "dict", *((of(name), of(item)) for name, item in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", *sorted(text(of(item)) for item in value)
    return _of_object(value, home, of)


def _of_object(value: Any, home: str, of: Callable[[Any], Any]) -> Any:
    """Describe a function by its code and what this refers to, and an object by its fields."""
    names = [str(getattr(value, name, "")) for name in ("__module__", "__qualname__", "__name__")]
    is_known = names[0].partition(".")[0] == home or "<locals>" in names[1]
    if isinstance(value, type):
        methods = [x for x in vars(value).values() if isinstance(x, types.FunctionType)]
        return *names, *map(of, methods if is_known else [])
    is_function = isinstance(value, types.FunctionType)
    if isinstance(value, types.ModuleType) or (is_function and not is_known):
        return names
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    fields = {*slots, "__dict__", "__wrapped__"} - {"__weakref__"}
    parts: list[Any] = []
    for name in _PARTS.get(type(value), sorted(fields)):
        with contextlib.suppress(AttributeError, ValueError):  # a cell may be empty
            parts.append((name, of(getattr(value, name))))
    if is_function:
        used = sorted({*_names(value.__code__)} & value.__globals__.keys())
        parts.append([(name, of(value.__globals__[name])) for name in used])
    return names, of(type(value)) if parts else text(value), *parts


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function, and those inside it, look up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)
