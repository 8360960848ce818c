# SPDX-License-Identifier: MIT
"""``jit=True``: compile the mapped call, with everything that is no array static."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np

from rankax._kernel import Kernel, is_number, keep
from rankax._trees import leaves_with_names

__all__ = ["JitKernel"]

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The static part of one call, by which `jax.jit` finds its compiled program.

    The types stand beside the values because ``1 == 1.0 == True``.
    """

    names: tuple[str, ...]
    treedef: Any
    traced: tuple[bool, ...]
    static: tuple[Any, ...]
    types: tuple[type, ...]


class _Identity:
    """Stands for an unhashable ``self``: the same object is the same method."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


class JitKernel:
    """A kernel whose mapped call is compiled once per set of shapes, dtypes and static values."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._ranked_leaves: dict[Any, list[bool]] = {}

        def call(frame: _Frame, *arrays: Any) -> Any:
            return self._run(frame, arrays)

        call.__name__ = kernel.name  # what a profile and an HLO dump show
        # Inlined into an outer trace, so that the decorator leaves nothing there.
        self._jitted = jax.jit(call, static_argnums=0, inline=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled kernel on every item of the batch."""
        frame, arrays = self._split(args, kwargs)
        return self._jitted(frame, *arrays)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the call with these arguments: ``jax.jit(f).lower(...)``."""
        frame, arrays = self._split(args, kwargs)
        return self._jitted.lower(frame, *arrays)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Frame, list[Any]]:
        """Part the arguments into what is traced and what is static."""
        arguments = self._kernel.bound(args, kwargs).arguments
        names = tuple(arguments)
        leaves, treedef = jax.tree.flatten(list(arguments.values()))
        ranked = self._ranked(names, treedef, arguments)
        traced = tuple(
            isinstance(leaf, _ARRAYS) or _becomes_array(leaf, has_rank)
            for leaf, has_rank in zip(leaves, ranked, strict=True)
        )
        static = tuple(
            leaf for leaf, is_traced in zip(leaves, traced, strict=True) if not is_traced
        )
        arrays = [leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced]
        if static:
            static = self._hashable(static, arguments, traced)
        return _Frame(names, treedef, traced, static, tuple(map(type, static))), arrays

    def _ranked(
        self, names: tuple[str, ...], treedef: Any, arguments: dict[str, Any]
    ) -> list[bool]:
        """Tell for each leaf whether it has a rank, which the tree structure alone decides."""
        key = (names, treedef)
        ranked = self._ranked_leaves.get(key)
        if ranked is None:
            ranked = [
                rank is not None
                for name, value in arguments.items()
                for _, part, rank in self._kernel.parts(name, value)
                for _ in range(jax.tree.structure(part).num_leaves)
            ]
            keep(self._ranked_leaves, key, ranked)
        return ranked

    def _hashable(
        self, static: tuple[Any, ...], arguments: dict[str, Any], traced: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        try:
            hash(static)
        except TypeError:
            pass
        else:
            return static
        named = [
            pair for name, value in arguments.items() for pair in leaves_with_names(value, name)
        ]
        named = [pair for pair, is_traced in zip(named, traced, strict=True) if not is_traced]
        hashable: list[Any] = []
        for name, value in named:
            if name == "self":
                hashable.append(_Identity(value))
                continue
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{self._kernel.name}(): {name} is not an array, so jit=True makes it a static "
                    f"argument, but {type(value).__name__} cannot be hashed; pass a hashable value "
                    "(a tuple for a list), or an array"
                ) from None
            hashable.append(value)
        return tuple(hashable)

    def _run(self, frame: _Frame, arrays: tuple[Any, ...]) -> Any:
        rest, static = iter(arrays), iter(frame.static)
        leaves = [next(rest) if is_traced else next(static) for is_traced in frame.traced]
        leaves = [leaf.value if isinstance(leaf, _Identity) else leaf for leaf in leaves]
        values = jax.tree.unflatten(frame.treedef, leaves)
        signature = self._kernel.declaration.signature
        arguments = dict(zip(frame.names, values, strict=True))
        bound = inspect.BoundArguments(signature, arguments)  # pyright: ignore[reportArgumentType]
        return self._kernel(*bound.args, **bound.kwargs)


def _becomes_array(leaf: Any, has_rank: bool) -> bool:
    return hasattr(leaf, "__jax_array__") or (has_rank and is_number(leaf))
