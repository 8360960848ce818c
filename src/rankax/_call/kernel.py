# SPDX-License-Identifier: MIT
"""What a decorated kernel is: its function, declaration and options; the caches of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankax._base.cache import Kept
from rankax._base.functions import function_name
from rankax._declare.ranks import Declaration
from rankax._options import Options, resolve

_MOST_KEPT = 1024  # structures per kernel, and plans per structure


class KernelSpec:
    """What `bind` and `run` know of a decorated kernel, which has it as its ``spec``."""

    def __init__(
        self,
        fun: Callable[..., Any],
        declaration: Declaration,
        explicit: Mapping[str, Any],
        members: Kept[Any],
    ) -> None:
        self.fun = fun
        self.name = function_name(fun)
        self.declaration = declaration
        self.explicit = dict(explicit)  # the options set for this kernel
        self.members = members  # the kernels that differ in their options only
        self.preset = Options(**explicit)
        self.structures: dict[Any, Any] = {}
        self.silent = set(declaration.silent)  # parameters not warned about yet
        self.defaults = {
            name: parameter.default
            for name, parameter in declaration.signature.parameters.items()
            if parameter.default is not parameter.empty
            # A positional-only argument can be passed only if all before it are, ranked or not.
            and (name in declaration.ranks or parameter.kind is parameter.POSITIONAL_ONLY)
        }

    def __getstate__(self) -> dict[str, Any]:
        # Kept structures need not be picklable, and a copy fills its own cache.
        return {**vars(self), "structures": {}}

    def options(self) -> Options:
        """Return the options of a call made now."""
        return resolve(self.explicit, self.preset)


def keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember ``value``, within bounds."""
    if len(cache) >= _MOST_KEPT:
        cache.clear()
    cache[key] = value
